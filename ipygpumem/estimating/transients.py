"""Memory that CUDA kernels allocate while they run and free before they return, by operator.

Each entry was measured with torch 2.11's kernels and its real caching allocator on a simulated
card; sizes depend on shapes and types only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ipygpumem.units import MIB

Sizes = Callable[[Any, Any], Any]
"""Function from an operator's arguments and first result to bytes, or to several blocks that are
alive at once.
"""


_NAMES = """
_cudnn_rnn _cudnn_rnn_backward _cudnn_ctc_loss _scaled_dot_product_cudnn_attention
_scaled_dot_product_cudnn_attention_backward _fft_c2c _fft_c2r _fft_r2c _linalg_svd _linalg_eigh _linalg_eigvals
linalg_eig _linalg_slogdet _linalg_det _linalg_solve_ex linalg_cholesky_ex linalg_inv_ex linalg_ldl_factor_ex
linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_qr geqrf linalg_matrix_exp ormqr linalg_householder_product
_cslt_sparse_mm _grouped_mm _scaled_grouped_mm _sparse_sparse_matmul
"""  # noqa: E501
UNKNOWN = frozenset(_NAMES.split())
"""Operators whose kernels' memory cannot be derived from shapes; custom operators are unknown, too.
"""


HOPPERS_PROCESSORS = 132
"""Multiprocessors of an H100."""


def transient_sizes(name: str, args: Any, result: Any, processors: int) -> list[int]:
    """Return the blocks that an operator allocates next to its results, on a device with that many
    processors.
    """
    size = _TRANSIENTS.get(name)
    found = size(args, result) if size is not None else ()
    sizes = [*found] if isinstance(found, (list, tuple)) else [found]
    if name in _REDUCE and len(args) > (place := 2 if name == "linalg_vector_norm" else 1):
        dims = args[place] if isinstance(args[place], (list, tuple)) else [args[place]]
        itemsize = _REDUCE[name] or (
            args[0].itemsize if name in _OWN_TYPE else max(4, result.itemsize)
        )
        sizes.append(_column_sums(args[0], dims, itemsize, processors))
    if name in _CELLS and args[-1]:
        sizes.append(_column_sums(result, [0], max(4, result.itemsize), processors))
    return [int(size) for size in sizes if size]


_OWN_TYPE = ("amax", "amin", "any", "all")
_REDUCE = {
    **dict.fromkeys(("sum", "mean", "linalg_vector_norm", "logsumexp", *_OWN_TYPE), 0),
    **dict.fromkeys(("max", "min", "argmax", "argmin", "var", "std", "var_mean", "std_mean"), 16),
}
"""Operators that reduce dimensions, and the bytes of a partial result; 0: derived from the tensor's
type.
"""
_CELLS = frozenset({"_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_gru_cell_backward"})
"""Operators that sum their first result for a bias's gradient, if their last argument says that
there is a bias.
"""
_THREADS, _WARP, _THREADS_OF_PROCESSOR = 512, 32, 2048
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""Minimum and maximum number of values that a thread adds up if several blocks share one sum."""


def _column_sums(given: Any, dims: Any, itemsize: int, processors: int) -> Any:
    """Return the bytes of partial sums if several blocks sum a column, such as for a bias's
    gradient.

    The number of blocks follows ATen/native/cuda/Reduce.cuh.
    """
    reduced = {dim % given.dim() for dim in dims if dim is not None} if given.dim() else set()
    moving = sorted((dim for dim in range(given.dim()) if given.shape[dim] > 1), key=given.stride)
    if not reduced or not moving or moving[0] in reduced or given.stride(moving[0]) == 0:
        return 0
    outputs = math.prod(given.shape[dim] for dim in moving if dim not in reduced)
    inputs = math.prod(given.shape[dim] for dim in moving if dim in reduced)
    vector = 4 if given.stride(moving[0]) == 1 else 1
    for size in (given.shape[moving[0]], *(given.stride(dim) for dim in moving[1:])):
        vector = math.gcd(vector, size)
    threads = _THREADS // vector
    width = min(_power_of_2(outputs // vector, threads), _WARP)
    height = min(_power_of_2(inputs, threads), threads // width)
    width = min(_power_of_2(outputs // vector, threads), threads // height)
    values = -(-inputs // height)
    grid, most_blocks = (
        -(-outputs // vector // width),
        processors * (_THREADS_OF_PROCESSOR // (width * height)),
    )
    if (
        inputs < min(height * _LEAST_VALUES, _MOST_VALUES)
        or values < _MOST_VALUES
        or grid > most_blocks
    ):
        return 0
    shares = max(
        min(-(-most_blocks // grid), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES)
    )
    return itemsize * outputs * shares * width * vector if shares > 1 else 0


def _power_of_2(size: int, most: int) -> int:
    return most if size >= most else 1 << max(0, size.bit_length() - 1)


def loss_bytes(name: str, args: Any, result: Any) -> int:
    """Return the minimum size of a result's storage, in which some kernels compute more, such as
    all losses.
    """
    return (
        int(args[0].nbytes) if name == "col2im" or (result.dim() == 0 and name in _IN_RESULT) else 0
    )


_IN_RESULT = frozenset({"mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"})


def operator_name(func: Any) -> str:
    """Return an operator's name without overload and final underscore; a custom one keeps its
    library's prefix.
    """
    name = str(func.__name__.partition(".")[0].rstrip("_"))
    return name if func.namespace in _TORCHS else f"{func.namespace}::{name}"


_TORCHS = frozenset({"aten", "prim", "prims", "quantized", "rngprims", "torchvision"})


def is_unknown(name: str) -> bool:
    """Return True if the memory of an operator's kernel cannot be derived from shapes."""
    return name in UNKNOWN or "::" in name


def _input(args: Any, _: Any) -> Any:
    return args[0].nbytes


def _unless_contiguous(*numbers: int) -> Sizes:
    """Return a size function: copies of the numbered arguments that are not contiguous."""
    return lambda args, _: sum(
        args[number].nbytes for number in numbers if not args[number].is_contiguous()
    )


def _unless_dense(*numbers: int) -> Sizes:
    """Return a size function: copies of the numbered arguments that have gaps or are expanded, as
    sums' gradients.
    """

    def is_dense(tensor: Any) -> bool:
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(
            tensor.dim(), torch.contiguous_format
        )
        return bool(tensor.is_contiguous() or tensor.is_contiguous(memory_format=last))

    return lambda args, _: sum(
        args[number].nbytes for number in numbers if not is_dense(args[number])
    )


def _converted(args: Any, result: Any) -> Any:
    """Return the bytes of integers or Booleans that are converted to the result's type before they
    are added up.
    """
    is_counted = (
        args[0].dtype is not result.dtype
        and not args[0].is_floating_point()
        and not args[0].is_complex()
    )
    return args[0].numel() * result.itemsize if is_counted else 0


def _operands(*numbers: int) -> Sizes:
    """Return a size function: copies of matrices with strides that cuBLAS cannot read, such as
    expanded gradients.
    """

    def is_readable(matrix: Any) -> bool:
        (rows, columns), (down, across) = matrix.shape[-2:], matrix.stride()[-2:]
        return bool(
            (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))
        )

    return lambda args, _: sum(
        args[number].nbytes for number in numbers if not is_readable(args[number])
    )


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _laid_out(*tensors: Any) -> list[int]:
    """Return the bytes of each tensor that must be copied so that its heads are inside its rows."""
    return [tensor.nbytes for tensor in tensors if not tensor.transpose(1, 2).is_contiguous()]


def _flash_backward(args: Any, _: Any) -> Any:
    """Return the bytes of copies, products of gradient and output, query sums, and grouped heads'
    keys and values.
    """
    gradient, query, key, value, output = args[:5]
    batch, heads, length, width = query.shape
    rows, groups = batch * heads * _up(length, 128), heads // key.shape[1]
    expanded = [key.nbytes * groups, value.nbytes * groups] if groups > 1 else []
    return [*_laid_out(gradient, output), rows * 4, rows * _up(width, 32) * 4, *expanded]


def _efficient_backward(args: Any, _: Any) -> Any:
    """Return the bytes of a copy, products of gradient and output, and float32 sums, more of them
    for wide heads.
    """
    batch, heads, length, width = args[1].shape
    rows, keys, of_value = batch * heads, args[2].shape[-2], args[3].shape[-1]
    widest = max(width, of_value)
    sums = _up(length, 64) * _up(width, 128 if 64 < widest <= 128 else 64)
    if widest > 128 and args[1].itemsize == 2:
        parts = max(1, min(_up(keys, 64) // 64, 200 // rows))
        sums += parts * 64 * (_up(width, 128) + _up(of_value, 128))
    return [*_laid_out(args[0]), rows * length * 4, rows * sums * 4]


_FEW_INDICES = 3072
"""Maximum number of indices for which a kernel without a workspace adds up an embedding's
gradients.
"""


def _embedding_backward(bytes_of_index: int) -> Callable[[int, int, int], int]:
    def size(indices: int, rows: int, width: int) -> int:
        partial = -(-indices // 10) + min(indices, rows)
        return partial * _up(width, 32) * 4 + bytes_of_index * indices

    return size


def _dense_embedding(args: Any, result: Any) -> Any:
    indices, by_frequency = args[1].numel(), args[4]
    of_gradient = _unless_contiguous(0)(args, result)
    if indices <= _FEW_INDICES and not by_frequency:
        return of_gradient
    return [of_gradient, _embedding_backward(26 + 16 * by_frequency)(indices, *result.shape)]


def _bags(args: Any, result: Any) -> Any:
    takes_maximum = args[8 if len(args) > 10 else 7] == 2
    return 0 if takes_maximum else _embedding_backward(49)(args[1].numel(), *result.shape)


def _sorted(args: Any, _: Any) -> Any:
    """Return the bytes of a radix sort, over 4,096 values a row: a copy of keys and positions, two
    for several rows.
    """
    dim = args[1] if len(args) > 1 and isinstance(args[1], int) else -1
    length, count = (args[0].shape[dim], args[0].numel()) if args[0].dim() else (1, 1)
    if length <= 4096:
        return 0
    size, strided = args[0].itemsize, args[0].dim() > 0 and args[0].stride(dim) != 1
    copies = 2 * size + 8 if strided else 0
    return count * (copies + (size + 16 if count == length else 2 * size + 24)) + count // 5


def _middle(args: Any, _: Any) -> Any:
    count = args[0].numel()
    return count * (args[0].itemsize * 2 + 24) + count // 5  # sorted, with its results


def _places(args: Any, _: Any) -> Any:
    """Return the bytes of the positions at which masks are true, by assumption everywhere."""
    return [
        8 * index.numel() * index.dim()
        for index in args[1]
        if index is not None and index.itemsize == 1
    ]


def _put(args: Any, _: Any) -> Any:
    accumulates = len(args) > 3 and args[3]
    counts = [index.numel() for index in args[1] if index is not None]
    places = _places(args, _) if args[2].dim() else []  # a single value is filled in by the mask
    return [
        *places,
        *([49 * max(counts, default=0), _unless_contiguous(2)(args, _)] if accumulates else []),
    ]


def _deviations(args: Any, result: Any) -> Any:
    """Return the bytes of one standard deviation for each of several means."""
    has_one = isinstance(args[0], torch.Tensor) and not any(
        isinstance(value, torch.Tensor) for value in args[1:]
    )
    return result.nbytes if has_one and result is not args[0] else 0


_COPY_GRADIENTS = (
    *(f"_adaptive_avg_pool{number}d_backward" for number in (2, 3)),
    *(f"adaptive_max_pool{number}d_backward" for number in (2, 3)),
    *(f"avg_pool{number}d_backward" for number in (2, 3)),
    *(
        f"{how}_pad{number}d_backward"
        for how in ("reflection", "replication")
        for number in (1, 2, 3)
    ),
    *(
        "upsample_linear1d_backward",
        "upsample_bilinear2d_backward",
        "upsample_trilinear3d_backward",
    ),
    *("_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward"),
    *(
        f"{how}{number}d_backward"
        for how in ("upsample_nearest", "_upsample_nearest_exact")
        for number in (1, 2, 3)
    ),
)
_TRANSIENTS: dict[str, Sizes] = {
    "_softmax_backward_data": lambda args, _: args[1].nbytes,
    "_safe_softmax": lambda args, _: args[0].numel(),
    "logsumexp": _input,
    "binary_cross_entropy_with_logits": lambda args, result: (
        2 * args[0].nbytes - (result.nbytes if result.dim() else 0)
    ),
    "_log_softmax_backward_data": _unless_contiguous(0),
    "_pdist_backward": lambda args, _: args[1].nbytes * (len(args[1]) - 1),
    "_cdist_backward": lambda args, _: args[1].nbytes * args[2].shape[-2],
    "_ctc_loss_backward": lambda args, _: args[6].nbytes + args[1].nbytes,
    "masked_scatter": lambda args, _: 8 * args[0].numel(),
    "masked_scatter_backward": _input,
    "soft_margin_loss_backward": lambda args, _: 2 * args[1].nbytes,
    **dict.fromkeys(
        ("mse_loss", "smooth_l1_loss", "huber_loss"),
        lambda args, result: args[0].nbytes if result.dim() == 0 else 0,
    ),
    **dict.fromkeys(("sum", "cumsum", "prod", "cumprod"), _converted),
    "count_nonzero": lambda args, _: args[0].numel() * 9,
    "native_layer_norm": _unless_contiguous(0),
    **dict.fromkeys(
        ("native_layer_norm_backward", "_fused_rms_norm_backward"), _unless_contiguous(0, 1)
    ),
    **dict.fromkeys(
        ("avg_pool2d", "max_pool2d_with_indices", "upsample_nearest2d"), _unless_dense(0)
    ),
    "reflection_pad2d": _unless_contiguous(0),
    **dict.fromkeys(
        ("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"),
        _unless_dense(0, 1),
    ),
    **dict.fromkeys(_COPY_GRADIENTS, _unless_dense(0)),
    "upsample_bicubic2d_backward": _unless_contiguous(0),
    **dict.fromkeys(("mm", "bmm"), _operands(0, 1)),
    **dict.fromkeys(("addmm", "baddbmm"), _operands(1, 2)),
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "embedding_dense_backward": _dense_embedding,
    "_embedding_bag_backward": _bags,
    "_embedding_bag_dense_backward": _bags,
    **dict.fromkeys(("index_put", "_index_put_impl"), _put),
    "index": _places,
    "masked_select": lambda args, result: 8 * result.numel() * args[0].dim(),
    **dict.fromkeys(("sort", "argsort"), _sorted),
    **dict.fromkeys(
        ("median", "nanmedian"), lambda args, _: _middle(args, _) if len(args) == 1 else 0
    ),
    "randperm": lambda args, _: 40 * args[0] + MIB,
    "multinomial": lambda args, _: (
        args[0].nbytes * (3 if len(args) > 2 and args[2] else 1)
    ),  # with replacement
    "normal": _deviations,
    "roll": lambda args, _: args[0].nbytes if len(args) > 2 and len(args[2]) > 1 else 0,
    "im2col": _input,
    "col2im": _unless_contiguous(0),
    "_fft_c2r": _input,
    "_fft_r2c": _unless_contiguous(0),
    "_euclidean_dist": lambda args, _: args[0].nbytes + args[1].nbytes,
    **dict.fromkeys(("_linalg_solve_ex", "linalg_inv_ex"), _input),
}
"""Bytes by operator, from its arguments and its first result."""
