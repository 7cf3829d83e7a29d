"""Memory that CUDA kernels allocate while they run and free before they return, by operator.

Each rule was measured with torch 2.11's kernels and its real caching allocator on a simulated card;
sizes depend on shapes and types only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ipygpumem.estimating.operators.column_sums import column_sums_bytes
from ipygpumem.units import KIB, MIB, divided_up, rounded_up

_CUDNN = (
    "_cudnn_ctc_loss",
    "_cudnn_rnn",
    "_cudnn_rnn_backward",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
)
_CUFFT = ("_fft_c2c", "_fft_c2r", "_fft_r2c")
_CUSOLVER = (
    "_linalg_det",
    "_linalg_eigh",
    "_linalg_eigvals",
    "_linalg_slogdet",
    "_linalg_solve_ex",
    "_linalg_svd",
    "geqrf",
    "linalg_cholesky_ex",
    "linalg_eig",
    "linalg_householder_product",
    "linalg_inv_ex",
    "linalg_ldl_factor_ex",
    "linalg_lstsq",
    "linalg_lu",
    "linalg_lu_factor_ex",
    "linalg_matrix_exp",
    "linalg_qr",
    "ormqr",
)
_PRODUCTS_OF_LIBRARIES = (
    "_cslt_sparse_mm",
    "_grouped_mm",
    "_scaled_grouped_mm",
    "_sparse_sparse_matmul",
)
_UNKNOWN = frozenset((*_CUDNN, *_CUFFT, *_CUSOLVER, *_PRODUCTS_OF_LIBRARIES))
"""Operators whose kernels' memory cannot be derived from shapes."""
_TORCHS = frozenset({"aten", "prim", "prims", "quantized", "rngprims", "torchvision"})
"""Namespaces of torch's own operators."""


def operator_name(func: Any) -> str:
    """Return an operator's name without overload and final underscore: ``add`` for ``aten.add_``.

    A custom operator keeps its library's prefix: ``mylib::op``.
    """
    packet, _, _ = func.__name__.partition(".")
    name = str(packet.rstrip("_"))
    if func.namespace in _TORCHS:
        return name
    return f"{func.namespace}::{name}"


def has_unknown_memory(name: str) -> bool:
    """Return True if the memory of an operator's kernel cannot be derived from shapes.

    That of custom operators cannot, either.
    """
    return name in _UNKNOWN or "::" in name


Bytes = int | list[int]
"""The bytes of a block, or of several blocks that are alive at once."""
Rule = Callable[[Any, Any], Bytes]
"""Returns the bytes for an operator's arguments and its first result."""
_RULES: dict[str, Rule] = {}
"""Rules by operator."""


def has_rule(name: str) -> bool:
    """Return True if an operator may allocate blocks next to its results."""
    return name in _RULES or name in _PARTIAL_BYTES or name in _BACKWARD_OF_CELLS


def transient_sizes(name: str, args: Any, result: Any, processors: int) -> list[int]:
    """Return the bytes of the blocks that an operator allocates next to its results.

    Args:
        name: of the operator, as ``operator_name`` returns it.
        args: its arguments.
        result: its first result.
        processors: the number of the device's multiprocessors.
    """
    sizes = _sizes_by_rule(name, args, result)
    if name in _PARTIAL_BYTES:
        sizes.append(_partial_results_bytes(name, args, result, processors))
    if name in _BACKWARD_OF_CELLS and args[-1]:
        itemsize = max(4, result.itemsize)
        sizes.append(column_sums_bytes(result, [0], itemsize, processors))
    return [int(size) for size in sizes if size]


def _sizes_by_rule(name: str, args: Any, result: Any) -> list[int]:
    """Return the bytes of the blocks that an operator's rule gives; none without a rule."""
    rule = _RULES.get(name)
    if rule is None:
        return []
    sizes = rule(args, result)
    if isinstance(sizes, list):
        return list(sizes)
    return [sizes]


# -- reductions ------------------------------------------------------------------------------------

_WITH_TYPE_OF_ARGUMENT = ("amax", "amin", "any", "all")
"""Operators whose partial results have the type of their argument."""
_SUMS = ("sum", "mean", "linalg_vector_norm")
_POSITIONS_AND_MOMENTS = ("max", "min", "argmax", "argmin", "var", "std", "var_mean", "std_mean")
_PARTIAL_BYTES = {
    **dict.fromkeys((*_SUMS, *_WITH_TYPE_OF_ARGUMENT), 0),
    **dict.fromkeys(_POSITIONS_AND_MOMENTS, 16),
}
"""Operators that reduce dimensions, and the bytes of a partial result.

0: those are derived from the tensor's type.
"""
_BACKWARD_OF_CELLS = frozenset(
    {"_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_gru_cell_backward"}
)
"""Operators that sum their first result for a bias's gradient.

Their last argument says if there is a bias.
"""


def _partial_results_bytes(name: str, args: Any, result: Any, processors: int) -> int:
    """Return the bytes of the partial results of a reduction of some dimensions.

    0 for a reduction of all dimensions.
    """
    position_of_dims = 1
    if name == "linalg_vector_norm":
        position_of_dims = 2
    if len(args) <= position_of_dims:
        return 0
    dims = args[position_of_dims]
    if not isinstance(dims, (list, tuple)):
        dims = [dims]
    itemsize = _PARTIAL_BYTES[name]
    if name in _WITH_TYPE_OF_ARGUMENT:
        itemsize = args[0].itemsize
    elif itemsize == 0:
        itemsize = max(4, result.itemsize)
    return column_sums_bytes(args[0], dims, itemsize, processors)


# -- rules -----------------------------------------------------------------------------------------


def _rule_of(*names: str) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a function as the rule for operators with these names."""

    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def _nbytes(tensor: Any) -> int:
    return int(tensor.nbytes)


@_rule_of("masked_scatter_backward")
def _first_argument(args: Any, _: Any) -> int:
    """Return the bytes of the first argument, for a block of its size."""
    return _nbytes(args[0])


@_rule_of("_softmax_backward_data")
def _second_argument(args: Any, _: Any) -> int:
    """Return the bytes of the second argument, for a block of its size."""
    return _nbytes(args[1])


@_rule_of("_pdist_backward")
def _distances_of_pairs_backward(args: Any, _: Any) -> int:
    """Return the bytes of the gradients of ``torch.pdist`` before they are added up.

    Each row has a gradient from each other row.
    """
    return _nbytes(args[1]) * (len(args[1]) - 1)


@_rule_of("_cdist_backward")
def _distances_backward(args: Any, _: Any) -> int:
    """Return the bytes of the gradients of ``torch.cdist`` before they are added up.

    Each row of the first argument has a gradient from each row of the second one.
    """
    rows = args[2].shape[-2]
    return int(_nbytes(args[1]) * rows)


@_rule_of("_safe_softmax")
def _truth_values(args: Any, _: Any) -> int:
    """Return the bytes of a truth value for each element, which says if it is masked."""
    return int(args[0].numel())


@_rule_of("randperm")
def _sorted_keys(args: Any, _: Any) -> int:
    """Return the bytes with which ``torch.randperm(n)`` sorts positions by random keys."""
    return int(40 * args[0] + MIB)


@_rule_of("mse_loss", "smooth_l1_loss")
def _reduced_loss(args: Any, result: Any) -> int:
    """Return the bytes of the losses of all elements, if they are reduced."""
    if result.dim():
        return 0
    return _nbytes(args[0])


@_rule_of("sum", "cumsum", "prod", "cumprod")
def _converted_copy(args: Any, result: Any) -> int:
    """Return the bytes of a converted copy of integers, which are reduced in the result's type."""
    source = args[0]
    is_same = source.dtype is result.dtype
    if is_same or source.is_floating_point() or source.is_complex():
        return 0
    return int(source.numel() * result.itemsize)


@_rule_of("multinomial")
def _multinomial(args: Any, _: Any) -> list[int]:
    """Return the bytes of blocks as large as the weights: one, or three with replacement."""
    weights_bytes = _nbytes(args[0])
    with_replacement = len(args) > 2 and args[2]
    if with_replacement:
        return [weights_bytes, weights_bytes, weights_bytes]
    return [weights_bytes]


@_rule_of("normal")
def _expanded_deviation(args: Any, result: Any) -> int:
    """Return the bytes of the expanded standard deviation of ``torch.normal(means, 1.0)``.

    0 if the deviation is a tensor, too, or if the tensor itself is filled: ``x.normal_()``.
    """
    means, *deviations = args
    if not isinstance(means, torch.Tensor) or result is means:
        return 0
    if any(isinstance(value, torch.Tensor) for value in deviations):
        return 0
    return _nbytes(result)


# -- copies of arguments ---------------------------------------------------------------------------


def _rule_of_copies(is_readable: Callable[[Any], bool], *, indices: Iterable[int]) -> Rule:
    """Return a rule: the bytes of copies of arguments that a kernel cannot read.

    Args:
        is_readable: returns True for a tensor that the kernel reads without a copy.
        indices: the indices of the arguments.
    """

    def rule(args: Any, _: Any) -> int:
        copied_bytes = 0
        for index in indices:
            source = args[index]
            if not is_readable(source):
                copied_bytes += _nbytes(source)
        return copied_bytes

    return rule


def is_contiguous(tensor: Any) -> bool:
    """Return True if a tensor is contiguous in the usual order of dimensions."""
    return bool(tensor.is_contiguous())


def _is_dense(tensor: Any) -> bool:
    """Return True if a tensor is contiguous, also in channels-last order.

    The gradient of a sum is not, because it is expanded.
    """
    if tensor.is_contiguous():
        return True
    if tensor.dim() == 4:
        return bool(tensor.is_contiguous(memory_format=torch.channels_last))
    if tensor.dim() == 5:
        return bool(tensor.is_contiguous(memory_format=torch.channels_last_3d))
    return False


def is_matrix_of_cublas(matrix: Any) -> bool:
    """Return True if cuBLAS can read a matrix, by rows or by columns.

    It cannot read one that is expanded, as some gradients are.
    """
    rows, columns = matrix.shape[-2:]
    row_stride, column_stride = matrix.stride()[-2:]
    if column_stride == 1 and row_stride >= max(1, columns):
        return True
    return bool(row_stride == 1 and column_stride >= max(1, rows))


_READ_ONLY_CONTIGUOUS = (
    "_log_softmax",
    "_log_softmax_backward_data",
    "_softmax",
    "reflection_pad2d",
    "upsample_bicubic2d_backward",
)
_READ_ONLY_DENSE = (
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward",
    "_upsample_bicubic2d_aa_backward",
    "_upsample_bilinear2d_aa_backward",
    "_upsample_nearest_exact1d_backward",
    "_upsample_nearest_exact2d_backward",
    "_upsample_nearest_exact3d_backward",
    "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d_backward",
    "avg_pool2d",
    "avg_pool2d_backward",
    "avg_pool3d_backward",
    "max_pool2d_with_indices",
    "reflection_pad1d_backward",
    "reflection_pad2d_backward",
    "reflection_pad3d_backward",
    "replication_pad1d_backward",
    "replication_pad2d_backward",
    "replication_pad3d_backward",
    "upsample_linear1d_backward",
    "upsample_nearest1d_backward",
    "upsample_nearest2d",
    "upsample_nearest2d_backward",
    "upsample_nearest3d_backward",
    "upsample_trilinear3d_backward",
)
_rule_of(*_READ_ONLY_CONTIGUOUS)(_rule_of_copies(is_contiguous, indices=(0,)))
_rule_of(*_READ_ONLY_DENSE)(_rule_of_copies(_is_dense, indices=(0,)))
_rule_of("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")(
    _rule_of_copies(_is_dense, indices=(0, 1))
)


@_rule_of("upsample_bilinear2d", "upsample_bilinear2d_backward")
def _dense_copy(args: Any, result: Any) -> int:
    """Return the bytes of a dense copy of the argument; 0 for a result of the same size."""
    source = args[0]
    if source.shape == result.shape or _is_dense(source):
        return 0
    return _nbytes(source)


# -- norms -----------------------------------------------------------------------------------------


@_rule_of("native_group_norm")
def _group_norm(args: Any, _: Any) -> list[int]:
    """Return the bytes of a factor and a summand for each channel of each sample."""
    _, weight, bias, samples, channels, positions = args[:6]
    is_affine = weight is not None or bias is not None
    if positions == 1 or not is_affine:
        return []
    of_channels = 4 * samples * channels
    return [of_channels, of_channels]


@_rule_of("native_group_norm_backward")
def _group_norm_backward(args: Any, _: Any) -> list[int]:
    """Return the bytes of sums and factors for each channel, and for each group."""
    weight, samples, channels, positions, groups = args[4:9]
    if positions == 1:
        return []
    of_channels = 4 * samples * channels
    of_groups = 4 * samples * groups
    sizes = [of_channels, of_channels, of_groups, of_groups]
    if weight is not None:
        sizes.append(of_channels)
    return sizes


# -- attention -------------------------------------------------------------------------------------


def copies_by_heads(*tensors: Any) -> list[int]:
    """Return the bytes of each tensor that a kernel of attention copies.

    It needs the order (batch, length, heads, width) in memory; the tensors' dimensions are (batch,
    heads, length, width).
    """
    return [tensor.nbytes for tensor in tensors if not tensor.transpose(1, 2).is_contiguous()]


@_rule_of("_scaled_dot_product_flash_attention_backward")
def _flash_backward(args: Any, _: Any) -> list[int]:
    """Return the bytes of copies, products of gradient and output, and sums for the query.

    If several heads of the query share a key, each also needs gradients of its keys and values.
    """
    gradient, query, key, value, output = args[:5]
    batch, heads, length, width = query.shape
    rows = batch * heads * rounded_up(length, 128)
    sizes = copies_by_heads(gradient, output)
    sizes.append(rows * 4)
    sizes.append(rows * rounded_up(width, 32) * 4)
    heads_of_each_key = heads // key.shape[1]
    if heads_of_each_key > 1:
        sizes.append(key.nbytes * heads_of_each_key)
        sizes.append(value.nbytes * heads_of_each_key)
    return sizes


# -- embeddings and indices ------------------------------------------------------------------------

MOST_INDICES_WITHOUT_SORT = 3072
"""Maximum number of indices for which a kernel adds up an embedding's gradients without sorting."""


@_rule_of("unfold_backward")
def _positions_in_windows(args: Any, _: Any) -> int:
    """Return the bytes of positions along a dimension for the gradient of ``x.unfold``.

    0 unless the windows overlap.
    """
    _, shape, dim, size, step = args
    if step >= size:
        return 0
    return int(8 * shape[dim])


_SUMS_OF_TILE = 896
"""Cumulative sums that one block of a card's threads computes."""


def cumulative_sums_bytes(count: int) -> int:
    """Return the bytes with which a kernel computes cumulative sums of 64 bits."""
    tiles = divided_up(count, _SUMS_OF_TILE)
    return rounded_up(16 * (tiles + 32), 256) + 511


# -- sorting ---------------------------------------------------------------------------------------

_PAIRS_OF_TILE = {8: 4608, 4: 5376, 2: 5632, 1: 3456}
"""Pairs that one block of a card's threads sorts in a pass, by the bytes of what it compares.

Those of torch 2.11 on a Hopper.
"""
_KEYS_OF_TILE = {torch.float64: 5760, torch.int64: 5760, torch.float32: 6912, torch.int32: 7296}
"""Values without positions that one block of threads sorts in a pass, by their type."""
_SMALL_KEYS_OF_TILE = 9728
"""Values of 16 or 8 bits, without positions, that one block of threads sorts in a pass."""
_MOST_PAIRS_OF_BLOCK = 2304
"""Maximum number of pairs, or of 64-bit values, that one block sorts alone, without a copy."""
_MOST_SMALLER_KEYS_OF_BLOCK = 4864
"""Maximum number of smaller values without positions that one block sorts alone."""


def sort_bytes(count: int, bits: int, itemsize: int = 8) -> int:
    """Return the bytes of the block with which a kernel sorts values together with their positions.

    Args:
        count: the number of values.
        bits: the number of bits by which they are sorted.
        itemsize: the bytes of a value.
    """
    if count <= _MOST_PAIRS_OF_BLOCK:
        return 1
    copies_bytes = rounded_up(itemsize * count, 256) + rounded_up(8 * count, 256)
    return _radix_sort_bytes(count, bits, copies_bytes, _PAIRS_OF_TILE[itemsize])


def sort_bytes_without_positions(count: int, bits: int, dtype: Any) -> int:
    """Return the bytes of the block with which a kernel sorts values of a type, without positions.

    ``count`` and ``bits`` are those of ``sort_bytes``.
    """
    itemsize = dtype.itemsize
    most_of_block = _MOST_SMALLER_KEYS_OF_BLOCK
    if itemsize == 8:
        most_of_block = _MOST_PAIRS_OF_BLOCK
    if count <= most_of_block:
        return 1
    tile = _KEYS_OF_TILE.get(dtype, _SMALL_KEYS_OF_TILE)
    return _radix_sort_bytes(count, bits, rounded_up(itemsize * count, 256), tile)


def _radix_sort_bytes(count: int, bits: int, copies_bytes: int, tile: int) -> int:
    """Return the bytes of a radix sort, which takes a pass for each 8 bits.

    A pass needs 2 KiB, and all passes together 1 KiB for each tile. Several passes also need copies
    of what they sort.
    """
    passes = divided_up(bits, 8)
    if passes == 1:
        copies_bytes = 0
    return copies_bytes + divided_up(count, tile) * KIB + passes * 2 * KIB + 512


_INDICES_OF_TILE = 4096
"""Indices that one block of a card's threads sorts by a comparison."""


def merge_sort_bytes(count: int, items: int = 1) -> int:
    """Return the bytes of the block with which a kernel sorts indices by comparing the values that
    they refer to.

    Args:
        count: the number of indices.
        items: 2 if each index comes with another one.
    """
    tiles = divided_up(count, _INDICES_OF_TILE)
    return items * rounded_up(8 * count, 256) + rounded_up(8 * (tiles + 1), 256) + 255


def _sort_bytes_of(values: Any) -> int:
    """Return the bytes of the block with which a kernel sorts all values of a tensor."""
    itemsize = values.itemsize
    return sort_bytes(values.numel(), 8 * itemsize, itemsize)


@_rule_of("median", "nanmedian")
def _median(args: Any, _: Any) -> list[int]:
    """Return the bytes of a sort of all values: sorted values, positions before and
    after, and its own block.

    The median along a dimension needs none.
    """
    if len(args) > 1:  # along a dimension
        return []
    source = args[0]
    positions_bytes = 8 * source.numel()
    return [source.nbytes, positions_bytes, positions_bytes, _sort_bytes_of(source)]


# -- results ---------------------------------------------------------------------------------------

_REDUCE_IN_RESULT = frozenset(
    {"mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"}
)
"""Operators that compute the losses of all elements in the storage of their result."""
_WITH_SIZE_OF_ARGUMENT = frozenset({"col2im", "im2col"})
"""Operators that make their result with the size of their argument, and then resize it."""
_CUT_ON_CARDS = frozenset({"_unique", "_unique2", "unique_consecutive"})
_CUT_ON_HOST = frozenset({"unique_consecutive"})
"""Operators that make results for all values, and then cut them without freeing the rest."""


def least_bytes(name: str, args: Any, result: Any, *, is_on_card: bool) -> int:
    """Return the minimum size of a result's storage, of which the result may be a part.

    For instance, some kernels compute all losses before they add them up. 0 if the storage is as
    large as the result.
    """
    if _cuts_results(name, args, is_on_card=is_on_card):
        if result.numel() == 0:
            return 0
        return int(args[0].numel() * result.itemsize)
    is_reduced_loss = name in _REDUCE_IN_RESULT and result.dim() == 0
    if is_on_card and (name in _WITH_SIZE_OF_ARGUMENT or is_reduced_loss):
        return _nbytes(args[0])
    return 0


def _cuts_results(name: str, args: Any, *, is_on_card: bool) -> bool:
    """Return True for an operator that makes results for all values, and then cuts them."""
    if not is_on_card:
        cuts = name in _CUT_ON_HOST
    elif args and getattr(args[0], "dtype", None) is torch.bool:
        cuts = name in _CUT_ON_HOST  # cards count truth values
    else:
        cuts = name in _CUT_ON_CARDS
    is_of_slices = name == "unique_consecutive" and len(args) > 3 and args[3] is not None
    return cuts and not is_of_slices
