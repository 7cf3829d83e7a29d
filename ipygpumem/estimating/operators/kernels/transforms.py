"""The orders of Fourier transforms, made by cuFFT."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ipygpumem.estimating.operators.kernels.kernel import (
    Kernel,
    copy_bytes,
    number_of_positions,
    order_of,
)
from ipygpumem.units import divided_up

_MOST_DIMS_OF_CUFFT = 3
"""Maximum number of dimensions that one call of cuFFT transforms."""


@order_of("_fft_c2c")
def _complex_transform(kernel: Kernel, args: Any) -> None:
    """Log a transform of complex numbers, such as ``torch.fft.fft`` of a complex tensor.

    cuFFT transforms up to three dimensions at once. With more, each call of it is a pass that reads
    one tensor and fills another one, in turns. The orders of transforms follow
    ATen/native/cuda/SpectralOps.cpp.
    """
    source, dims = args[:2]
    passes = divided_up(len(dims), _MOST_DIMS_OF_CUFFT)
    if passes == 1:
        kernel.log_results()
        _log_passes(kernel, source, dims)
        return
    with _two_tensors(kernel, ends_in_second=passes % 2 == 0) as log_second:
        _log_passes(kernel, source, dims, after_first=log_second)


@order_of("_fft_r2c")
def _real_to_complex_transform(kernel: Kernel, args: Any) -> None:
    """Log a transform of real numbers, such as ``torch.fft.rfft``.

    If one call of cuFFT is not enough, it transforms the last dimension first. The result is
    complex numbers, whose other dimensions are transformed next.
    """
    source, dims, _, is_onesided = args
    shape = list(source.shape)
    if is_onesided or len(dims) > 1:
        # cuFFT computes half of the numbers, because the other half mirrors it.
        shape[dims[-1]] = shape[dims[-1]] // 2 + 1
    if _is_one_call(dims):
        kernel.log_results()
        _log_call(kernel, source, shape, dims)
        return
    passes = divided_up(len(dims) - 1, _MOST_DIMS_OF_CUFFT)
    # For both halves, torch finally copies the computed half into the result, and mirrors it.
    fills_other_half = not is_onesided
    ends_in_second = (passes % 2 == 1) is not fills_other_half
    with _two_tensors(kernel, ends_in_second=ends_in_second) as log_second:
        first = _log_call(kernel, source, shape, dims[-1:])
        log_second()
        _log_passes(kernel, first, dims[:-1])


@order_of("_fft_c2r")
def _complex_to_real_transform(kernel: Kernel, args: Any) -> None:
    """Log a transform to real numbers, such as ``torch.fft.irfft``.

    cuFFT overwrites the complex numbers that it reads here, so that torch copies them; or the
    transform of the other dimensions, which comes first, makes the copy.
    """
    source, dims, _, length = args
    shape = list(source.shape)
    shape[dims[-1]] = length
    kernel.log_results()
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
    is_slow_in_one_call = list(dims[:2]) == [0, 1]  # torch's own rule, for speed
    return not is_slow_in_one_call


@contextmanager
def _two_tensors(kernel: Kernel, *, ends_in_second: bool) -> Iterator[Callable[[], object]]:
    """Log the first of two tensors that passes fill in turns; yield a function that logs the other.

    The last pass fills the result, and the other tensor, which has its size, is freed at the end.
    ``ends_in_second``: the last pass fills the second tensor.
    """
    with ExitStack() as other:
        if ends_in_second:
            other.enter_context(kernel.blocks([kernel.result_bytes]))
            yield kernel.log_results
        else:
            kernel.log_results()
            yield lambda: other.enter_context(kernel.blocks([kernel.result_bytes]))


def _log_passes(
    kernel: Kernel,
    source: Any,
    dims: Sequence[int],
    after_first: Callable[[], object] | None = None,
) -> Any:
    """Log the calls of cuFFT that transform some dimensions, and return their result.

    The dimensions with the smallest strides are transformed first. ``after_first`` is called after
    the first of the calls.
    """
    remaining = list(dims)
    while remaining:
        remaining.sort(key=source.stride, reverse=True)
        dims_of_call = remaining[-_MOST_DIMS_OF_CUFFT:]
        del remaining[-_MOST_DIMS_OF_CUFFT:]
        source = _log_call(kernel, source, source.shape, dims_of_call)
        if after_first is not None:
            after_first()
            after_first = None
    return source


def _log_call(kernel: Kernel, source: Any, shape: Sequence[int], dims: Sequence[int]) -> Any:
    """Log the copies that torch makes for a call of cuFFT; return a tensor like the call's result.

    cuFFT reads all other dimensions as one: torch copies a tensor if they cannot be one, and again
    if cuFFT cannot read it.

    Args:
        kernel: logs the allocations.
        source: the tensor to transform.
        shape: the shape of the result.
        dims: the dimensions to transform.
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
