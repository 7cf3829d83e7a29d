"""The orders of Fourier transforms, made by cuFFT."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ipygpumem.estimating.kernels.kernel import Kernel, copy_bytes, number_of_positions, order_of
from ipygpumem.units import divided_up

_MOST_DIMS_OF_CUFFT = 3
"""Maximum number of dimensions that one call of cuFFT transforms."""


@order_of("_fft_c2c")
def _complex_transform(kernel: Kernel, args: Any) -> None:
    """Log a transform of complex numbers.

    The orders of transforms follow ATen/native/cuda/SpectralOps.cpp.
    """
    source, dims = args[:2]
    _log_complex_passes(kernel, source, dims)


@order_of("_fft_r2c")
def _transform_of_real_numbers(kernel: Kernel, args: Any) -> None:
    """Log a transform of real numbers, one dimension first if not all are transformed at once."""
    source, dims, _, is_onesided = args
    shape = list(source.shape)
    halved = list(shape)
    halved[dims[-1]] = shape[dims[-1]] // 2 + 1
    if is_onesided or len(dims) > 1:
        shape = halved
    if _is_one_call(dims):
        kernel.results()
        _log_call(kernel, source, shape, dims)
        return
    passes = divided_up(len(dims) - 1, _MOST_DIMS_OF_CUFFT)
    fills_other_half = not is_onesided
    ends_in_second = (passes % 2 == 1) is not fills_other_half
    with _two_tensors(kernel, ends_in_second=ends_in_second) as make_second:
        first = _log_call(kernel, source, shape, dims[-1:])
        make_second()
        _log_passes(kernel, first, dims[:-1])


@order_of("_fft_c2r")
def _transform_to_real_numbers(kernel: Kernel, args: Any) -> None:
    """Log a transform to real numbers, of a copy because cuFFT overwrites it."""
    source, dims, _, length = args
    shape = list(source.shape)
    shape[dims[-1]] = length
    kernel.results()
    with kernel.blocks([source.nbytes]):
        copy = source.new_empty(source.shape)
        if not _is_one_call(dims):
            copy = _log_passes(kernel, source, dims[:-1])
            dims = dims[-1:]
        _log_call(kernel, copy, shape, dims)


def _is_one_call(dims: Sequence[int]) -> bool:
    """Return True if torch transforms all dimensions of real numbers by one call of cuFFT."""
    if len(dims) > _MOST_DIMS_OF_CUFFT:
        return False
    return list(dims[:2]) != [0, 1]


def _log_complex_passes(kernel: Kernel, source: Any, dims: Sequence[int]) -> None:
    """Log a transform whose calls of cuFFT read one tensor and fill another one in turns."""
    passes = divided_up(len(dims), _MOST_DIMS_OF_CUFFT)
    if passes == 1:
        kernel.results()
        _log_passes(kernel, source, dims)
        return
    with _two_tensors(kernel, ends_in_second=passes % 2 == 0) as make_second:
        _log_passes(kernel, source, dims, make_second)


@contextmanager
def _two_tensors(kernel: Kernel, *, ends_in_second: bool) -> Iterator[Callable[[], object]]:
    """Allocate a result and a tensor of its size, the second by a call of the yielded function."""
    with ExitStack() as other:
        if ends_in_second:
            other.enter_context(kernel.blocks([kernel.result_bytes]))
            yield kernel.results
        else:
            kernel.results()
            yield lambda: other.enter_context(kernel.blocks([kernel.result_bytes]))


def _log_passes(
    kernel: Kernel,
    source: Any,
    dims: Sequence[int],
    after_first: Callable[[], object] | None = None,
) -> Any:
    """Log the calls of cuFFT that transform some dimensions, and return their result.

    Those whose values are the furthest from each other come last.
    """
    remaining = list(dims)
    while remaining:
        remaining.sort(key=source.stride, reverse=True)
        now = remaining[-_MOST_DIMS_OF_CUFFT:]
        del remaining[-_MOST_DIMS_OF_CUFFT:]
        source = _log_call(kernel, source, source.shape, now)
        if after_first is not None:
            after_first()
            after_first = None
    return source


def _log_call(kernel: Kernel, source: Any, shape: Sequence[int], dims: Sequence[int]) -> Any:
    """Log a call of cuFFT, and return a tensor with the strides of its result.

    It reads all other dimensions as one: torch copies a tensor if they cannot be one, and again if
    cuFFT cannot read it.
    """
    batch_dims = [dim for dim in range(source.dim()) if dim not in dims]
    batch_dims.sort(key=source.stride, reverse=True)
    order = [*batch_dims, *dims]
    sizes = [source.shape[dim] for dim in dims]
    batch = number_of_positions(source, batch_dims)
    rows = source.permute(order).reshape(batch, *sizes)
    with ExitStack() as copy, kernel.blocks(copy_bytes(rows, source)):
        if not _is_read_by_cufft(rows):
            copy.enter_context(kernel.blocks([rows.nbytes]))
    in_order = source.new_empty([shape[dim] for dim in order])
    return in_order.permute([order.index(dim) for dim in range(source.dim())])


def _is_read_by_cufft(rows: Any) -> bool:
    """Return True if cuFFT can read the rows without a copy: the stride of each dimension is a
    multiple of the stride of the dimension after it.
    """
    batch_stride, *strides = rows.stride()
    if strides[-1] <= 0 or (batch_stride == 0 and len(rows) != 1):
        return False
    stride = strides[-1]
    for size, outer in reversed(list(zip(rows.shape[1:-1], strides[:-1], strict=True))):
        if size == 1:
            continue
        if outer <= 0 or outer % stride:
            return False
        stride = outer
    return True
