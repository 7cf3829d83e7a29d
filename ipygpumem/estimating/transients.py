"""The memory that CUDA's kernels allocate while they run and free before they return, by operator.

Each entry was measured with torch 2.11's kernels and its real caching allocator on a simulated card; the sizes follow
from shapes and types alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ipygpumem.units import MIB

Sizes = Callable[[Any, Any], Any]
"""From an operator's arguments and its first result to bytes, or to several blocks that are there at once."""


UNKNOWN = frozenset(
    [
        *("_cudnn_rnn", "_cudnn_rnn_backward", "_cudnn_ctc_loss", "_scaled_dot_product_cudnn_attention"),
        *("_scaled_dot_product_cudnn_attention_backward", "_fft_c2c", "_fft_c2r", "_fft_r2c"),
        *("_linalg_svd", "_linalg_eigh", "_linalg_eigvals", "linalg_eig", "_linalg_slogdet", "_linalg_det"),
        *("_linalg_solve_ex", "linalg_cholesky_ex", "linalg_inv_ex", "linalg_ldl_factor_ex", "linalg_lstsq"),
        *("linalg_lu", "linalg_lu_factor_ex", "linalg_qr", "geqrf", "ormqr", "linalg_householder_product"),
        *("_cslt_sparse_mm", "_grouped_mm", "_scaled_grouped_mm", "_sparse_sparse_matmul"),
    ]
)
"""Operators whose kernels get memory from libraries or from the allocator that no shape tells; custom ones are, too."""


HOPPERS_PROCESSORS = 132
"""Multiprocessors of an H100."""


def transient_sizes(name: str, args: Any, result: Any, processors: int) -> list[int]:
    """Return the blocks that an operator allocates next to its results on a device with so many multiprocessors."""
    size = _TRANSIENTS.get(name)
    found = size(args, result) if size is not None else ()
    sizes = [*found] if isinstance(found, (list, tuple)) else [found]
    if name in _SUMS and len(args) > _SUMS[name]:
        sizes.append(_column_sums(args[0], args[_SUMS[name]], result.itemsize, processors))
    if name in _CELLS and args[-1]:
        sizes.append(_column_sums(result, [0], result.itemsize, processors))
    return [int(size) for size in sizes if size]


_SUMS = {"sum": 1, "mean": 1, "linalg_vector_norm": 2}
"""Operators that add up along dimensions, and which argument these are."""
_CELLS = frozenset({"_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_gru_cell_backward"})
"""Operators that add up their first result for a bias, which is their last argument."""
_THREADS, _WARP, _THREADS_OF_PROCESSOR = 512, 32, 2048
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""Values that one thread adds up if several blocks share one sum."""


def _column_sums(given: Any, dims: Any, result_itemsize: int, processors: int) -> Any:
    """Return the buffer of sums of columns, such as a bias's gradient: several blocks write partial sums.

    The choice of blocks is that of ATen/native/cuda/Reduce.cuh.
    """
    reduced = {dim % given.dim() for dim in dims or ()} if given.dim() else set()
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
    grid, most_blocks = -(-outputs // vector // width), processors * (_THREADS_OF_PROCESSOR // (width * height))
    if inputs < min(height * _LEAST_VALUES, _MOST_VALUES) or values < _MOST_VALUES or grid > most_blocks:
        return 0
    shares = max(min(-(-most_blocks // grid), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    return max(4, result_itemsize) * outputs * shares * width * vector if shares > 1 else 0


def _power_of_2(size: int, most: int) -> int:
    return most if size >= most else 1 << max(0, size.bit_length() - 1)


def loss_bytes(name: str, args: Any, result: Any) -> int:
    """Return the bytes that a reduced loss keeps: some kernels compute all losses in its storage."""
    return int(args[0].nbytes) if result.dim() == 0 and name in _IN_RESULT else 0


_IN_RESULT = frozenset({"mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"})


def operator_name(func: Any, args: Any, kwargs: Any) -> str:
    """Return an operator's name on CUDA, without its overload and without the mark of operators in place.

    Those of other libraries have their library's name before it.
    """
    name = str(func.__name__.partition(".")[0].rstrip("_"))
    if func.namespace not in _TORCHS:
        return f"{func.namespace}::{name}"
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return f"_scaled_dot_product_{'flash' if is_flash(args, kwargs) else 'efficient'}_attention_backward"
    return name


_TORCHS = frozenset({"aten", "prim", "prims", "quantized", "rngprims", "torchvision"})


def is_unknown(name: str) -> bool:
    """Return True if nothing tells what memory an operator's kernel takes while it runs."""
    return name in UNKNOWN or "::" in name


def is_flash(args: Any, kwargs: Any) -> bool:
    """Return True if CUDA takes flash attention where the CPU has one kernel: half precision and no mask."""
    return args[1].itemsize == 2 and args[1].shape[-1] <= MOST_OF_FLASH and kwargs.get("attn_mask") is None


MOST_OF_FLASH = 256
"""The widest heads that flash attention takes."""


def _input(args: Any, _: Any) -> Any:
    return args[0].nbytes


def _unless_contiguous(*numbers: int) -> Sizes:
    """Return a size: copies of the arguments with these numbers that are not contiguous."""

    def size(args: Any, _: Any) -> int:
        tensors = (args[number] for number in numbers)
        return sum(tensor.nbytes for tensor in tensors if not tensor.is_contiguous())

    return size


def _unless_dense(args: Any, _: Any) -> Any:
    """A copy of pictures that lie neither channel by channel nor pixel by pixel."""
    pictures = args[0]
    dense = pictures.is_contiguous() or (
        pictures.dim() == 4 and pictures.is_contiguous(memory_format=torch.channels_last)
    )
    return 0 if dense else pictures.nbytes


def _reduced(args: Any, result: Any) -> Any:
    """All losses before they are reduced."""
    return args[0].nbytes if result.dim() == 0 else 0


def _converted(args: Any, result: Any) -> Any:
    """Integers and truth values are converted to the result's type before they are added up."""
    return args[0].numel() * result.itemsize if args[0].dtype is not result.dtype and not _floats(args[0]) else 0


def _floats(tensor: Any) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _operands(*numbers: int) -> Sizes:
    """Return a size: copies of the matrices that cuBLAS cannot read as they lie, such as expanded gradients."""

    def size(args: Any, _: Any) -> int:
        return sum(args[number].nbytes for number in numbers if not _is_readable(args[number]))

    return size


def _is_readable(matrix: Any) -> bool:
    rows, columns = matrix.shape[-2:]
    down, across = matrix.stride()[-2:]
    return bool((across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows)))


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _laid_out(*tensors: Any) -> list[int]:
    """Copies of the tensors whose heads do not lie inside their rows."""
    return [tensor.nbytes for tensor in tensors if not tensor.transpose(1, 2).is_contiguous()]


def _flash_backward(args: Any, _: Any) -> Any:
    """Copies, products of gradient and output, sums for queries, and keys and values for grouped heads."""
    gradient, query, key, value, output = args[:5]
    batch, heads, length, width = query.shape
    rows, groups = batch * heads * _up(length, 128), heads // key.shape[1]
    expanded = [key.nbytes * groups, value.nbytes * groups] if groups > 1 else []
    return [*_laid_out(gradient, output), rows * 4, rows * _up(width, 32) * 4, *expanded]


def _efficient_backward(args: Any, _: Any) -> Any:
    """A copy, products of gradient and output, and sums in float32: for queries, for wide heads for keys and values."""
    batch, heads, length, width = args[1].shape
    rows, keys, of_value = batch * heads, args[2].shape[-2], args[3].shape[-1]
    widest = max(width, of_value)
    sums = _up(length, 64) * _up(width, 128 if 64 < widest <= 128 else 64)
    if widest > 128 and args[1].itemsize == 2:
        parts = max(1, min(_up(keys, 64) // 64, 200 // rows))
        sums += parts * 64 * (_up(width, 128) + _up(of_value, 128))
    return [*_laid_out(args[0]), rows * length * 4, rows * sums * 4]


_FEW_INDICES = 3072
"""Up to so many, a kernel without a workspace adds up an embedding's gradients."""


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
    """Radix sort, from 4,096 values a row: a copy of keys and positions, two for several rows."""
    dim = args[1] if len(args) > 1 and isinstance(args[1], int) else -1
    length, count = (args[0].shape[dim], args[0].numel()) if args[0].dim() else (1, 1)
    if length <= 4096:
        return 0
    size = args[0].itemsize
    return count * (size + 16 if count == length else 2 * size + 24) + count // 5


def _middle(args: Any, _: Any) -> Any:
    count = args[0].numel()
    return count * (args[0].itemsize * 2 + 24) + count // 5  # sorted, with its results


def _places(args: Any, _: Any) -> Any:
    """The positions at which masks are true: everywhere."""
    return [8 * index.numel() * index.dim() for index in args[1] if index is not None and index.itemsize == 1]


def _put(args: Any, _: Any) -> Any:
    accumulates = len(args) > 3 and args[3]
    counts = [index.numel() for index in args[1] if index is not None]
    places = _places(args, _) if args[2].dim() else []  # a single value is filled in by the mask
    return [*places, 49 * max(counts, default=0) if accumulates else 0]


def _drawn(args: Any, _: Any) -> Any:
    with_replacement = len(args) > 2 and args[2]
    return args[0].nbytes * (3 if with_replacement else 1)


_TRANSIENTS: dict[str, Sizes] = {
    "_softmax_backward_data": lambda args, _: args[1].nbytes,
    "_safe_softmax": lambda args, _: args[0].numel(),
    "logsumexp": _input,
    "binary_cross_entropy_with_logits": lambda args, result: (
        2 * args[0].nbytes - (result.nbytes if result.dim() else 0)
    ),
    "soft_margin_loss_backward": lambda args, _: 2 * args[1].nbytes,
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), _reduced),
    **dict.fromkeys(("sum", "cumsum", "prod", "cumprod"), _converted),
    "count_nonzero": lambda args, _: args[0].numel() * 9,
    "native_layer_norm": _unless_contiguous(0),
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), _unless_contiguous(0, 1)),
    **dict.fromkeys(
        ("upsample_bilinear2d_backward", "upsample_nearest2d_backward", "upsample_nearest2d"), _unless_dense
    ),
    **dict.fromkeys(("avg_pool2d", "max_pool2d_with_indices"), _unless_dense),
    **dict.fromkeys(("upsample_bicubic2d_backward", "reflection_pad2d"), _unless_contiguous(0)),
    **dict.fromkeys(("avg_pool2d_backward", "_adaptive_avg_pool2d_backward"), _unless_contiguous(0)),
    "max_pool2d_with_indices_backward": _unless_contiguous(0, 1),
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
    **dict.fromkeys(("median", "nanmedian"), lambda args, _: _middle(args, _) if len(args) == 1 else 0),
    "randperm": lambda args, _: 40 * args[0] + MIB,
    "multinomial": _drawn,
    "roll": lambda args, _: args[0].nbytes if len(args) > 2 and len(args[2]) > 1 else 0,
    "im2col": _input,
    "_fft_c2r": _input,
    "_fft_r2c": _unless_contiguous(0),
    "_euclidean_dist": lambda args, _: args[0].nbytes + args[1].nbytes,
    **dict.fromkeys(("_linalg_solve_ex", "linalg_inv_ex"), _input),
}
"""Bytes by operator, from its arguments and its first result."""
