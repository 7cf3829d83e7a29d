"""The order in which CUDA kernels allocate their results and their intermediate blocks.

The order decides where the allocator places blocks, and so how much memory it reserves. Each rule
was read off the history of torch 2.11's allocator on a simulated card. An operator without a rule
allocates its results, then a workspace of cuBLAS, then all its intermediate blocks at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from ipygpumem.estimating.column_sums import column_sums_bytes
from ipygpumem.estimating.largest import is_mask
from ipygpumem.estimating.sparse import parts_of
from ipygpumem.estimating.storages import TEMPORARIES, StorageLog
from ipygpumem.estimating.transients import (
    FEW_INDICES,
    is_contiguous,
    is_matrix_of_cublas,
    keys_bytes,
    laid_out,
    merge_sort_bytes,
    sort_bytes,
    sums_bytes,
)
from ipygpumem.units import divided_up, rounded_up


class Kernel:
    """Logs what one operation allocates on a device, in the order in which its rule says so."""

    def __init__(
        self,
        log: StorageLog,
        device: str,
        results: list[Any],
        log_result: Callable[[Any], object],
        keep_workspaces: Callable[[], object],
        processors: int,
        options: Mapping[str, Any],
    ) -> None:
        self._log = log
        self._device = device
        self._results = results
        self._log_result = log_result
        self._logged: set[int] = set()
        """Numbers of the results that are logged or have no memory on the device."""
        self.workspace = keep_workspaces
        """Logs the workspace of cuBLAS, unless the thread has it."""
        self.processors = processors
        """The number of the device's multiprocessors."""
        self.options = options
        """The arguments that the operation gets by name."""

    @property
    def first_result(self) -> Any:
        """The first tensor that the operation returns."""
        return self._results[0]

    @property
    def result_bytes(self) -> int:
        """The bytes of the first result."""
        return int(self.first_result.nbytes)

    def result(self, number: int) -> None:
        """Log a result, unless the operation does not have it."""
        if number in self._logged or number >= len(self._results):
            return
        self._logged.add(number)
        self._log_result(self._results[number])

    def part(self, tensor: Any) -> None:
        """Log a part of a sparse result."""
        self._log_result(tensor)

    def results(self) -> None:
        """Log the results that are not logged yet."""
        for number in range(len(self._results)):
            self.result(number)

    def on_host(self, *numbers: int) -> None:
        """Leave out results that the kernel allocates in RAM."""
        self._logged.update(numbers)

    @contextmanager
    def blocks(self, sizes: Iterable[int]) -> Iterator[None]:
        """Allocate blocks, and free them at the end of the ``with`` block."""
        lives = [self._log.hold(size, self._device, TEMPORARIES) for size in sizes if size]
        yield
        for life in lives:
            self._log.free(life)

    @contextmanager
    def copies(self, *tensors: Any) -> Iterator[None]:
        """Copy the tensors that are not contiguous, and free the copies at the end."""
        sizes = [tensor.nbytes for tensor in tensors if not is_contiguous(tensor)]
        with self.blocks(sizes):
            yield

    @contextmanager
    def resized(self, source: Any) -> Iterator[None]:
        """Log a result that is made with a tensor's size, and grows before it is filled.

        The tensor is copied unless it is contiguous; the copy is freed at the end.
        """
        first_bytes = source.nbytes
        if self.result_bytes <= first_bytes:
            self.results()
            first_bytes = 0
        with ExitStack() as copies:
            with self.blocks([first_bytes]):
                copies.enter_context(self.copies(source))
                self.results()
            yield


Order = Callable[[Kernel, Any], None]
"""Logs what an operator with some arguments allocates."""
ORDERS: dict[str, Order] = {}
"""Orders by operator."""


def _order_of(*names: str) -> Callable[[Order], Order]:
    """Return a decorator that makes a function the order of some operators."""

    def register(order: Order) -> Order:
        ORDERS.update(dict.fromkeys(names, order))
        return order

    return register


@_order_of("native_dropout")
def _dropout(kernel: Kernel, _: Any) -> None:
    kernel.result(1)  # the mask
    kernel.result(0)


@_order_of("native_layer_norm")
def _layer_norm(kernel: Kernel, args: Any) -> None:
    with kernel.copies(args[0]):
        kernel.results()


@_order_of("native_layer_norm_backward", "_fused_rms_norm_backward")
def _layer_norm_backward(kernel: Kernel, args: Any) -> None:
    gradient, source = args[:2]
    with kernel.copies(gradient, source):
        kernel.results()


@_order_of("logsumexp")
def _logsumexp(kernel: Kernel, args: Any) -> None:
    """Log maxima, their absolute values and a mask of infinite ones, then exponentials."""
    source, dims = args[:2]
    partial_maxima = column_sums_bytes(source, dims, source.itemsize, kernel.processors)
    itemsize = max(4, source.itemsize)
    partial_sums = column_sums_bytes(source, dims, itemsize, kernel.processors)
    result_bytes = kernel.result_bytes
    with kernel.blocks([result_bytes]):
        with kernel.blocks([partial_maxima]):
            pass
        with kernel.blocks([result_bytes, result_bytes // source.itemsize]):
            pass
        with kernel.blocks([source.nbytes]):
            kernel.results()
            with kernel.blocks([partial_sums]):
                pass


@_order_of("col2im", "im2col")
def _fold(kernel: Kernel, args: Any) -> None:
    with kernel.resized(args[0]):
        pass


@_order_of("mm", "bmm")
def _product(kernel: Kernel, args: Any) -> None:
    first, second = args[:2]
    _multiply(kernel, first, second)


@_order_of("addmm", "baddbmm")
def _sum_of_product(kernel: Kernel, args: Any) -> None:
    _, first, second = args[:3]
    _multiply(kernel, first, second)


def _multiply(kernel: Kernel, *matrices: Any) -> None:
    kernel.results()
    with kernel.blocks(_unreadable_bytes(*matrices)):
        kernel.workspace()


def _unreadable_bytes(*matrices: Any) -> list[int]:
    """Return the bytes of the matrices that cuBLAS cannot read, in the order of their copies.

    The last one is copied first, because cuBLAS swaps them for a result in rows.
    """
    swapped = reversed(matrices)
    return [matrix.nbytes for matrix in swapped if not is_matrix_of_cublas(matrix)]


@_order_of("_euclidean_dist")
def _distances(kernel: Kernel, args: Any) -> None:
    """Log squares, norms and ones of both matrices, and the product of the matrices with these."""
    first, second = args
    with ExitStack() as factors:
        with ExitStack() as columns_of_second:
            with ExitStack() as columns_of_first:
                _log_norms(kernel, first, columns_of_first)
                _log_norms(kernel, second, columns_of_second)
                with kernel.blocks([first.nbytes]):  # times -2
                    factors.enter_context(kernel.blocks([_with_two_columns(first)]))
            factors.enter_context(kernel.blocks([_with_two_columns(second)]))
        kernel.results()
        kernel.workspace()


def _log_norms(kernel: Kernel, matrix: Any, columns: ExitStack) -> None:
    """Log a matrix's squares, and its norms and as many ones, which ``columns`` keeps."""
    column_bytes = matrix.nbytes // matrix.shape[-1]
    with kernel.blocks([matrix.nbytes]):
        columns.enter_context(kernel.blocks([column_bytes]))
    columns.enter_context(kernel.blocks([column_bytes]))


def _with_two_columns(matrix: Any) -> int:
    """Return the bytes of a matrix with two more columns."""
    return int(matrix.nbytes + 2 * matrix.nbytes // matrix.shape[-1])


@_order_of("_trilinear")
def _trilinear(kernel: Kernel, args: Any) -> None:
    """Log the sums of products of three tensors, a product for each position of a dimension.

    Bilinear layers and their gradients are such sums. It follows ATen/native/Linear.cpp.
    """
    tensors = args[:3]
    missing_dims = args[3:6]
    summed_dims, *options = args[6:]
    looped_dim = 1
    if options:
        looped_dim = options[0]
    kernel.results()
    if any(tensor.numel() == 0 for tensor in tensors):
        return
    positions = 1
    factors: list[Any] = []
    for tensor, dims in zip(tensors, missing_dims, strict=True):
        for dim in dims:
            tensor = tensor.unsqueeze(dim)
        positions = max(positions, tensor.shape[looped_dim])
        factors.append(tensor.narrow(looped_dim, 0, 1))
    first, second, third = factors
    sums = [dim for dim in summed_dims if dim != looped_dim]
    early_sums = [dim for dim in sums if dim in missing_dims[2]]
    late_sums = [dim for dim in sums if dim not in missing_dims[2]]
    product = _product_sums(first, second, early_sums)
    last_product = _product_sums(product.result, third, late_sums)
    for _ in range(positions):
        with ExitStack() as last_block, ExitStack() as block:
            product.log(kernel, block)
            last_product.log(kernel, last_block)


class _ProductSums(NamedTuple):
    """The sums of two tensors' products, which are a product of matrices if anything is summed."""

    result: Any
    copied: Sequence[int] = ()
    """Bytes of factors that cannot become matrices without a copy."""
    unreadable: Sequence[int] | None = None
    """Bytes of the matrices that cuBLAS cannot read; None if nothing is summed."""

    def log(self, kernel: Kernel, block: ExitStack) -> None:
        """Log the sums, which ``block`` keeps."""
        with kernel.blocks(self.copied):
            block.enter_context(kernel.blocks([self.result.nbytes]))
            if self.unreadable is not None:
                with kernel.blocks(self.unreadable):
                    kernel.workspace()


def _product_sums(left: Any, right: Any, sums: Sequence[int]) -> _ProductSums:
    """Return the products of two tensors, summed over some dimensions, as torch computes them."""
    if not sums:
        return _ProductSums(left * right)
    of_both: list[int] = []
    of_left: list[int] = []
    of_right: list[int] = []
    for dim in range(left.dim()):
        if dim in sums:
            continue
        if left.shape[dim] == 1:
            of_right.append(dim)
        elif right.shape[dim] == 1:
            of_left.append(dim)
        else:
            of_both.append(dim)
    rows = left.permute(*of_both, *of_left, *sums, *of_right)
    rows = rows.reshape(
        _number_of_positions(left, of_both),
        _number_of_positions(left, of_left),
        _number_of_positions(left, sums),
    )
    columns = right.permute(*of_both, *sums, *of_right, *of_left)
    columns = columns.reshape(
        _number_of_positions(right, of_both),
        _number_of_positions(right, sums),
        _number_of_positions(right, of_right),
    )
    order = [*of_both, *of_left, *sums, *of_right]
    sizes = [1 if dim in sums else max(left.shape[dim], right.shape[dim]) for dim in order]
    product = torch.bmm(rows, columns).view(sizes)
    result = product.permute([order.index(dim) for dim in range(len(order))])
    copied = [*_copy_bytes(rows, left), *_copy_bytes(columns, right)]
    return _ProductSums(result, copied, _unreadable_bytes(rows, columns))


def _number_of_positions(tensor: Any, dims: Iterable[int]) -> int:
    """Return the number of positions of some dimensions together."""
    return math.prod(tensor.shape[dim] for dim in dims)


def _copy_bytes(reshaped: Any, tensor: Any) -> list[int]:
    """Return the bytes of a reshaped tensor if it is a copy."""
    if reshaped.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
        return []
    return [reshaped.nbytes]


@_order_of("affine_grid_generator")
def _affine_grid(kernel: Kernel, args: Any) -> None:
    """Log the grid before it is transformed, with one more coordinate for each of its points."""
    transforms, size = args[:2]
    batch, _, *positions = size
    coordinates = len(positions) + 1
    grid_bytes = batch * math.prod(positions) * coordinates * transforms.itemsize
    with kernel.blocks([grid_bytes]):
        kernel.results()
        kernel.workspace()


# -- systems of equations --------------------------------------------------------------------------


@_order_of("linalg_inv_ex")
def _inverse(kernel: Kernel, args: Any) -> None:
    """Log a factorization, and how the equations for the identity are solved in the result."""
    matrix = args[0]
    pivots_bytes = 4 * _number_of_positions(matrix, range(matrix.dim() - 1))
    kernel.results()
    with kernel.blocks([matrix.nbytes, pivots_bytes]):
        _log_factorization(kernel, matrix)
        _log_solution(kernel, matrix, is_transposed=False)


@_order_of("linalg_lu_factor_ex")
def _factors(kernel: Kernel, args: Any) -> None:
    kernel.results()
    _log_factorization(kernel, args[0])


@_order_of("_linalg_solve_ex")
def _solution(kernel: Kernel, args: Any) -> None:
    """Log the results, among them the factors, and how the equations are solved."""
    matrix = args[0]
    kernel.results()
    _log_factorization(kernel, matrix)
    is_right = not kernel.options.get("left", True)
    _log_solution(kernel, matrix, is_transposed=is_right)


@_order_of("linalg_lu_solve")
def _solution_of_factors(kernel: Kernel, args: Any) -> None:
    """Log how equations are solved whose factors are known."""
    kernel.results()
    is_right = not kernel.options.get("left", True)
    is_adjoint = bool(kernel.options.get("adjoint"))
    _log_solution(kernel, args[0], is_transposed=is_adjoint is not is_right)


def _log_factorization(kernel: Kernel, matrix: Any) -> None:
    """Log cuBLAS's workspace if there are several matrices; one needs cuSOLVER's unknown memory."""
    if math.prod(matrix.shape[:-2]) > 1:
        kernel.workspace()


def _log_solution(kernel: Kernel, matrix: Any, *, is_transposed: bool) -> None:
    """Log how equations are solved in the first result, which begins as their right side.

    It follows ATen/native/cuda/linalg/BatchLinearAlgebra.cpp.
    """
    result = kernel.first_result
    *batch_shape, size, _ = matrix.shape
    matrices = systems = math.prod(batch_shape)
    if result.shape != matrix.shape[:-1]:  # no vectors
        systems = math.prod(result.shape[:-2])
    if result.numel() == 0:
        return
    columns = result.numel() // (systems * size)
    expanded: list[int] = []
    if systems != matrices:
        expanded = [systems * size * size * matrix.itemsize, systems * size * 4]
    with kernel.blocks(expanded):
        if _takes_triangles(systems, size, columns, is_transposed=is_transposed):
            _log_triangles(kernel, systems, size, is_transposed=is_transposed)
        else:
            kernel.workspace()


def _takes_triangles(systems: int, size: int, columns: int, *, is_transposed: bool) -> bool:
    """Return True if torch solves equations by triangular ones, as it does for large matrices."""
    if size == columns:
        return size > 16
    if size <= 8:
        return False
    if size <= 64:
        has_few_columns = is_transposed or size <= 32 or columns <= 64
        if systems <= 2 and has_few_columns:
            return False
        return columns > 8
    if size <= 128:
        return columns > 2
    return True


def _log_triangles(kernel: Kernel, systems: int, size: int, *, is_transposed: bool) -> None:
    """Log the order of the rows in each system, and a copy of the right side in that order."""
    positions_bytes = 8 * size
    orders_bytes = systems * positions_bytes
    copy_bytes = kernel.result_bytes
    with ExitStack() as order:
        with ExitStack() as positions:
            positions.enter_context(kernel.blocks([positions_bytes]))
            if systems == 1:
                order.enter_context(positions.pop_all())
            else:
                order.enter_context(kernel.blocks([orders_bytes]))
        if is_transposed:
            kernel.workspace()
            with kernel.blocks([copy_bytes]):
                pass
        else:
            with kernel.blocks([positions_bytes, orders_bytes, copy_bytes]):
                kernel.workspace()


# -- Fourier transforms ----------------------------------------------------------------------------

_MOST_DIMS_OF_CUFFT = 3
"""Maximum number of dimensions that one call of cuFFT transforms."""


@_order_of("_fft_c2c")
def _complex_transform(kernel: Kernel, args: Any) -> None:
    """Log a transform of complex numbers.

    The orders of transforms follow ATen/native/cuda/SpectralOps.cpp.
    """
    source, dims = args[:2]
    _log_complex_passes(kernel, source, dims)


@_order_of("_fft_r2c")
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


@_order_of("_fft_c2r")
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
    batch = _number_of_positions(source, batch_dims)
    rows = source.permute(order).reshape(batch, *sizes)
    with ExitStack() as copy, kernel.blocks(_copy_bytes(rows, source)):
        if not _is_read_by_cufft(rows):
            copy.enter_context(kernel.blocks([rows.nbytes]))
    in_order = source.new_empty([shape[dim] for dim in order])
    return in_order.permute([order.index(dim) for dim in range(source.dim())])


def _is_read_by_cufft(rows: Any) -> bool:
    """Return True if each stride is a multiple of that of the next dimension."""
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


# -- sparse gradients -----------------------------------------------------------------------------


@_order_of("_coalesce")
def _coalesced(kernel: Kernel, args: Any) -> None:
    """Log a sort by index, which keeps two copies of the indices until the values are added up.

    The sorted indices of one dimension are those of the result.
    """
    count = args[0]._nnz()
    indices_bytes = 8 * count
    indices, values = parts_of(kernel.first_result)
    sorted_bytes = indices_bytes
    if len(indices) == 1:
        kernel.part(indices)
        sorted_bytes = 0
    with kernel.blocks([sorted_bytes, indices_bytes, indices_bytes]):
        with kernel.blocks([merge_sort_bytes(count, items=2)]):
            pass
        kernel.part(values)
        kernel.results()


@_order_of("sparse_mask")
def _values_at_indices(kernel: Kernel, args: Any) -> None:
    """Log the entries of a dense tensor, which the kernel multiplies by one."""
    dense, mask = args
    count = mask._values().numel()
    with kernel.blocks([dense.itemsize, count * dense.itemsize]):
        kernel.results()


# -- attention -------------------------------------------------------------------------------------


@_order_of("_scaled_dot_product_efficient_attention")
def _efficient_attention(kernel: Kernel, args: Any) -> None:
    """Log attention; outside of graphs, the state of its random numbers is in RAM.

    Wide heads of 16 bits are summed up in float32.
    """
    kernel.on_host(2, 3)
    kernel.results()
    query, _, value = args[:3]
    batch, heads, length, width = query.shape
    width_of_value = value.shape[-1]
    is_half = query.itemsize == 2
    if is_half and max(width, width_of_value) > 128:
        sums_bytes = batch * heads * length * width_of_value * 4
        with kernel.blocks([sums_bytes]):
            pass


@_order_of("_scaled_dot_product_efficient_attention_backward")
def _efficient_attention_backward(kernel: Kernel, args: Any) -> None:
    """Log the gradients, then the sums of the gradient's products with the output, then a buffer.

    Only the kernels of 16 bits compute these products themselves.
    """
    gradient, query = args[:2]
    batch, heads, length, _ = query.shape
    sums_bytes = batch * heads * length * 4
    kernel.results()
    with ExitStack() as stack:
        stack.enter_context(kernel.blocks(laid_out(gradient)))
        sums = kernel.blocks([sums_bytes])
        if query.itemsize == 2:
            stack.enter_context(sums)
        else:
            with kernel.blocks([gradient.nbytes, sums_bytes]):
                stack.enter_context(sums)  # the sums outlive the products
        with kernel.blocks([_buffer_bytes(args)]):
            pass


def _buffer_bytes(args: Any) -> int:
    """Return the bytes of float32 sums for tiles of the query's gradient, with 16 bytes each."""
    _, query, key, value = args[:4]
    batch, heads, length, width = query.shape
    rows = batch * heads
    width_of_value = value.shape[-1]
    widest = max(width, width_of_value)
    is_half = query.itemsize == 2
    is_middle = 64 < widest <= 128
    sums_columns = 64
    if is_middle:
        sums_columns = 128
    sums = rounded_up(length, 64) * rounded_up(width, sums_columns)
    if widest > 128 and is_half:
        parts_of_keys = divided_up(key.shape[-2], 64)
        parts = max(1, min(parts_of_keys, 200 // rows))
        widths = rounded_up(width, 128) + rounded_up(width_of_value, 128)
        sums += parts * 64 * widths
    tile_rows = 128
    if widest <= 64:
        tile_rows = 64
    tile_columns = 64
    if is_half and is_middle:
        tile_columns = 128
    tiles = divided_up(length, tile_rows) * divided_up(width, tile_columns)
    return int(rows * (sums * 4 + tiles * 16))


# -- embeddings ------------------------------------------------------------------------------------


@_order_of("embedding_dense_backward")
def _embedding_backward(kernel: Kernel, args: Any) -> None:
    """Log the gradient of a table: many indices are sorted before it is allocated."""
    gradient, indices, rows, _, by_frequency = args[:5]
    has_few_indices = indices.numel() <= FEW_INDICES
    with kernel.copies(gradient):
        if has_few_indices and not by_frequency:
            kernel.results()
        else:
            _log_sorted_sums(kernel, gradient, indices, rows, by_frequency=by_frequency)


def _log_sorted_sums(
    kernel: Kernel, gradient: Any, indices: Any, rows: int, *, by_frequency: bool
) -> None:
    """Log the kernels that sort indices, and add up the rows of the gradient for each one."""
    count = indices.numel()
    width = gradient.shape[-1]
    indices_bytes = 8 * count
    segments = min(count, rows)
    parts = divided_up(count, 10) + segments  # of ten indices, or of one row's
    begins = [indices_bytes]
    if by_frequency:
        begins *= 3
    of_segments = [8 * segments, 8 * segments]
    of_parts = [8 * parts, 4 * parts * width]
    with kernel.blocks([indices_bytes, indices_bytes]):
        with kernel.blocks([indices_bytes, sort_bytes(count, 64)]):
            pass
        kernel.results()
        with kernel.blocks(begins):
            with kernel.blocks([indices_bytes]):  # while it finds where each row begins
                pass
            with kernel.blocks([*of_segments, *of_parts]):
                pass


@_order_of("embedding_renorm")
def _limited_norms(kernel: Kernel, args: Any) -> None:
    """Log how a kernel finds the rows whose norms it limits: it sorts the last dimension."""
    indices = args[1]
    indices_bytes = 8 * indices.numel()
    with kernel.blocks([indices_bytes]):
        with kernel.blocks([indices_bytes]):
            if indices.dim() and indices.shape[-1] > _MOST_SORTED_IN_PLACE:
                length = indices.shape[-1]
                _log_sort_of_rows(kernel, indices.numel() // length, length, indices.itemsize)
        with kernel.blocks([indices_bytes]):
            pass


@_order_of("count_nonzero")
def _count_nonzero(kernel: Kernel, args: Any) -> None:
    """Log the truth values, integers instead of them, and then the sums of these."""
    source, *dims = args
    number = source.numel()
    with kernel.blocks([number, 8 * number]):
        kernel.results()
        if dims and dims[0] is not None:
            summed = list(dims[0]) if isinstance(dims[0], (list, tuple)) else [dims[0]]
            with kernel.blocks([column_sums_bytes(source, summed, 8, kernel.processors)]):
                pass


@_order_of("_thnn_fused_gru_cell")
def _gru_cell(kernel: Kernel, _: Any) -> None:
    kernel.result(1)  # what backward needs
    kernel.result(0)


@_order_of("_thnn_fused_lstm_cell")
def _lstm_cell(kernel: Kernel, _: Any) -> None:
    kernel.result(2)  # what backward needs
    kernel.results()


@_order_of("_embedding_bag", "_embedding_bag_forward_only")
def _bags(kernel: Kernel, _: Any) -> None:
    """Log the sizes of the bags, each index's bag, the sums, and the largest values' positions."""
    for number in (2, 1, 0, 3):
        kernel.result(number)


@_order_of("_embedding_bag_backward", "_embedding_bag_dense_backward")
def _bags_backward(kernel: Kernel, args: Any) -> None:
    """Log the gradient of a table that is read in bags."""
    gradient, indices, *options = args
    gets_offsets = len(args) > 10  # the first of these operators
    if gets_offsets:
        options = options[1:]
    rows, by_frequency, mode = options[3:6]
    takes_maximum = mode == 2
    if takes_maximum:
        kernel.results()
        return
    _log_sorted_sums(kernel, gradient, indices, rows, by_frequency=by_frequency)


# -- indices ---------------------------------------------------------------------------------------


class _Indices(NamedTuple):
    """Indices of a tensor's dimensions; masks count as the positions at which they are true."""

    dims: list[int]
    """The dimensions that are indexed."""
    positions: list[Any]
    """The index of each of these dimensions."""
    masks: list[Any]
    selected: int
    """Number of positions at which a mask is true."""

    @property
    def are_adjacent(self) -> bool:
        """True if no dimension without an index is between those with one."""
        return self.dims[-1] - self.dims[0] < len(self.dims)

    def copied(self) -> list[int]:
        """Return the bytes of copies of indices that have got one shape, and differ in strides."""
        layouts = {(index.shape, index.stride()) for index in self.positions}
        if len(layouts) < 2:
            return []
        copied: list[int] = []
        for index in self.positions:
            is_expanded = index.numel() != self.number
            if is_expanded or not is_contiguous(index):
                copied.append(self.number * index.itemsize)
        return copied

    @property
    def number(self) -> int:
        """The number of positions that the indices have together."""
        return math.prod(torch.broadcast_shapes(*(index.shape for index in self.positions)))


def _indices_of(source: Any, indices: Sequence[Any], values: Any) -> _Indices:
    """Return the indices with which an operation reads or replaces ``values`` of a tensor.

    The shape of the values says how many of them masks select; without it they select all.
    """
    masks = [index for index in indices if is_mask(index)]
    dims: list[int] = []
    dim = 0
    for index in indices:
        covered = index.dim() if is_mask(index) else 1
        if index is not None:
            dims += range(dim, dim + covered)
        dim += covered
    selected = _number_of_selected(source, dims, masks, values)
    positions: list[Any] = []
    for index in indices:
        if is_mask(index):
            positions += [index.new_empty(selected, dtype=torch.long)] * index.dim()
        elif index is not None:
            positions.append(index)
    return _Indices(dims, positions, masks, selected)


def _number_of_selected(source: Any, dims: list[int], masks: list[Any], values: Any) -> int:
    """Return at how many positions masks are true."""
    most = max((mask.numel() for mask in masks), default=0)
    if dims[-1] - dims[0] < len(dims):
        dims_behind = source.dim() - 1 - dims[-1]
    else:  # indices that are apart come first
        dims_behind = source.dim() - len(dims)
    if values.dim() <= dims_behind:
        return most
    selected = int(values.shape[-1 - dims_behind])
    if selected == 1:  # for all positions
        return most
    return min(selected, most)


def _log_masks(kernel: Kernel, masks: Iterable[Any], selected: int, positions: ExitStack) -> None:
    """Log the positions at which masks are true, which ``positions`` keeps."""
    for mask in masks:
        with kernel.copies(mask):
            positions.enter_context(kernel.blocks([8 * selected * mask.dim()]))


@_order_of("nonzero")
def _nonzero(kernel: Kernel, args: Any) -> None:
    with kernel.copies(args[0]):
        kernel.results()


@_order_of("masked_select")
def _masked_select(kernel: Kernel, args: Any) -> None:
    source, mask = args
    shape = torch.broadcast_shapes(source.shape, mask.shape)
    selected = kernel.first_result.numel()
    with ExitStack() as positions:
        _log_masks(kernel, [mask.expand(shape)], selected, positions)
        kernel.results()


@_order_of("index")
def _index(kernel: Kernel, args: Any) -> None:
    """Log the values at indices, which are copied if they differ in their strides."""
    source, given = args[:2]
    indices = _indices_of(source, given, kernel.first_result)
    with ExitStack() as positions:
        _log_masks(kernel, indices.masks, indices.selected, positions)
        with kernel.blocks(indices.copied()):
            kernel.results()


@_order_of("index_put", "_index_put_impl")
def _put(kernel: Kernel, args: Any) -> None:
    """Log how a kernel replaces values at indices, or adds values to them."""
    target, given, values, *options = args
    indices = _indices_of(target, given, values)
    accumulates = bool(options) and options[0]
    kernel.results()
    if accumulates:
        _log_added_values(kernel, target, indices, values)
        return
    is_number = values.numel() == 1 and values.device.type == "cpu"
    if is_number:  # filled in by the mask
        return
    with ExitStack() as positions:
        _log_masks(kernel, indices.masks, indices.selected, positions)


def _log_added_values(kernel: Kernel, target: Any, indices: _Indices, values: Any) -> None:
    """Log how a kernel adds values at indices, which may be repeated: it sorts positions."""
    index_bytes = 8 * indices.number
    with ExitStack() as stack:
        with ExitStack() as positions:
            _log_masks(kernel, indices.masks, indices.selected, positions)
            _log_positions(kernel, len(indices.dims), index_bytes, stack)
        stack.enter_context(kernel.copies(values))
        if not indices.are_adjacent:
            stack.enter_context(kernel.blocks([target.nbytes]))  # in another order of dimensions
        stack.enter_context(kernel.blocks([index_bytes, index_bytes, index_bytes]))
        bits = _bits_of_positions(target.shape, indices)
        with kernel.blocks([sort_bytes(indices.number, bits)]):
            pass


def _log_positions(kernel: Kernel, indices: int, index_bytes: int, positions: ExitStack) -> None:
    """Log the sum of the indices' positions, which ``positions`` keeps."""
    for number in range(indices):
        with kernel.blocks([index_bytes]):  # negative indices become positive
            product = kernel.blocks([index_bytes])
            if number == 0:
                positions.enter_context(product)
                continue
            with product:  # the sum is kept in the first one
                pass


def _bits_of_positions(shape: Any, indices: _Indices) -> int:
    """Return the bits of the highest position to which values are added."""
    if indices.are_adjacent:
        positions = math.prod(shape[: indices.dims[-1] + 1])
    else:
        positions = math.prod(shape[dim] for dim in indices.dims)
    return max(1, int(positions - 1).bit_length())


@_order_of("masked_scatter")
def _masked_scatter(kernel: Kernel, args: Any) -> None:
    """Log the position in the source for each element, which is a cumulative sum of the mask."""
    mask = args[1]
    kernel.results()
    result = kernel.first_result
    count = result.numel()
    with kernel.blocks([8 * count, *_mask_bytes(mask, result), sums_bytes(count)]):
        pass


@_order_of("masked_scatter_backward")
def _masked_scatter_backward(kernel: Kernel, args: Any) -> None:
    """Log a copy of the mask, before the gradient."""
    gradient, mask = args[:2]
    with kernel.blocks(_mask_bytes(mask, gradient)):
        pass


def _mask_bytes(mask: Any, tensor: Any) -> list[int]:
    """Return the bytes of a copy of a mask, unless it is contiguous and has a tensor's shape."""
    if mask.shape == tensor.shape and is_contiguous(mask):
        return []
    return [tensor.numel()]


@_order_of("scatter_reduce")
def _scatter_reduce(kernel: Kernel, args: Any) -> None:
    """Log how a mean is computed: ones, how many of them fall on each position, and where none."""
    source = _source_of_means(kernel, args)
    if source is None:
        return
    with kernel.blocks([source.nbytes, kernel.result_bytes, kernel.first_result.numel()]):
        pass


@_order_of("index_reduce")
def _index_reduce(kernel: Kernel, args: Any) -> None:
    """Log how a mean is computed: how many values fall on each position, then where none."""
    source = _source_of_means(kernel, args)
    if source is None:
        return
    with kernel.blocks([kernel.result_bytes]):
        with kernel.blocks([source.nbytes]):
            pass
        with kernel.blocks([kernel.first_result.numel()]):
            pass


def _source_of_means(kernel: Kernel, args: Any) -> Any:
    """Log the results of a reduction, and return its values; None if it computes no means."""
    if args[4] != "mean":
        return None
    kernel.results()
    return args[3]


# -- sorting ---------------------------------------------------------------------------------------

_MOST_SORTED_IN_PLACE = 4096
"""Maximum length of rows that are sorted without a copy."""
_LENGTH_SORTED_ALONE = 1_000_000
"""Least length of rows that are sorted one after the other."""
_ROWS_SORTED_BY_NUMBER = 128
"""Least number of shorter rows for which a kernel takes the rows as they are.

Fewer ones are sorted as one row, and then by their numbers.
"""

_BITS_OF_ROWS = 7
"""Bits of the number of a row."""


@_order_of("sort")
def _sort(kernel: Kernel, args: Any) -> None:
    """Log a sort along a dimension."""
    source, dim = (*args, kernel.options.get("dim", -1))[:2]
    kernel.results()
    _log_sort(kernel, source, dim)


def _log_sort(kernel: Kernel, source: Any, dim: int) -> None:
    """Log how a kernel sorts a tensor into its results, which exist already.

    It sorts dense rows whose values are next to each other, and copies other tensors and results.
    """
    if source.dim() == 0 or source.shape[dim] <= _MOST_SORTED_IN_PLACE:
        return
    result = kernel.first_result
    is_dense = source.stride() == result.stride()
    copies: list[int] = []
    if not is_dense or source.stride(dim) != 1:
        copies.append(source.nbytes)
    if result.stride(dim) != 1:
        copies += [source.nbytes, 8 * source.numel()]
    length = source.shape[dim]
    with kernel.blocks(copies):
        _log_sort_of_rows(kernel, source.numel() // length, length, source.itemsize)


def _log_sort_of_rows(kernel: Kernel, rows: int, length: int, itemsize: int) -> None:
    """Log a radix sort of long rows with their positions.

    It follows ATen/native/cuda/SortStable.cu.
    """
    bits = 8 * itemsize
    count = rows * length
    values_bytes = itemsize * count
    positions_bytes = 8 * count
    if rows == 1 or length >= _LENGTH_SORTED_ALONE:
        with kernel.blocks([8 * length]):
            for _ in range(rows):
                with kernel.blocks([sort_bytes(length, bits, itemsize)]):
                    pass
    elif rows < _ROWS_SORTED_BY_NUMBER:
        with kernel.blocks([positions_bytes, positions_bytes]):  # with the numbers of rows
            with kernel.blocks([values_bytes, sort_bytes(count, bits, itemsize)]):
                pass
            with kernel.blocks([keys_bytes(count, _BITS_OF_ROWS, torch.int64)]):
                pass
    else:
        copied_bytes = rounded_up(values_bytes, 256) + rounded_up(positions_bytes, 256)
        with kernel.blocks([positions_bytes, copied_bytes + 1]):
            pass


@_order_of("_unique", "_unique2")
def _unique(kernel: Kernel, args: Any) -> None:
    """Log a sort, with its positions if the code asks for the position of each value.

    Truth values are counted instead.
    """
    source, *options = args
    if source.dtype is torch.bool:
        return
    has_positions = len(options) > 1 and options[1]
    count = source.numel()
    bits = 8 * source.itemsize
    positions_bytes = 8 * count
    with kernel.copies(source), kernel.blocks([source.nbytes]), ExitStack() as stack:
        if has_positions:
            with kernel.blocks([positions_bytes]):
                stack.enter_context(kernel.blocks([positions_bytes]))
                with kernel.blocks([sort_bytes(count, bits, source.itemsize)]):
                    pass
            kernel.result(1)
            with kernel.blocks([positions_bytes]):
                pass
        else:
            with kernel.blocks([keys_bytes(count, bits, source.dtype)]):
                pass
        kernel.results()


@_order_of("unique_consecutive")
def _unique_of_neighbours(kernel: Kernel, args: Any) -> None:
    """Log the position of each value, if the code asks for it, before the values."""
    source, *options = args
    has_positions, has_numbers, dim = (*options, None, None, None)[:3]
    if dim is not None:
        _log_different_slices(
            kernel, source, dim, has_positions=has_positions, has_numbers=has_numbers
        )
        return
    with kernel.copies(source):
        if has_positions:
            kernel.result(1)
            with kernel.blocks([4 * source.numel()]):
                pass
        kernel.results()


@_order_of("unique_dim_consecutive")
def _unique_neighbours_in(kernel: Kernel, args: Any) -> None:
    source, dim, *options = args
    has_positions, has_numbers = (*options, False, False)[:2]
    _log_different_slices(kernel, source, dim, has_positions=has_positions, has_numbers=has_numbers)


@_order_of("unique_dim")
def _unique_in(kernel: Kernel, args: Any) -> None:
    source, dim, *options = args
    _, has_positions, has_numbers = [*options, False, False, False][:3]
    _log_different_slices(
        kernel, source, dim, has_positions=has_positions, has_numbers=has_numbers, sorts=True
    )


def _log_different_slices(
    kernel: Kernel,
    source: Any,
    dim: int,
    *,
    has_positions: bool | None,
    has_numbers: bool | None,
    sorts: bool = False,
) -> None:
    """Log the numbers of the slices, which are sorted, and copies of the different ones.

    It follows ATen/native/cuda/Unique.cu.
    """
    count = source.shape[dim]
    numbers_bytes = 8 * count
    with kernel.copies(source.movedim(dim, 0)), kernel.blocks([numbers_bytes]):
        if sorts:
            with kernel.blocks([merge_sort_bytes(count)]):
                pass
        if has_positions:
            kernel.result(1)
            with kernel.blocks([numbers_bytes]):
                pass
        if has_numbers:
            with kernel.blocks([numbers_bytes + 8]):
                kernel.result(2)
        kernel.results()


@_order_of("roll")
def _rolled(kernel: Kernel, args: Any) -> None:
    """Log a result for each dimension that is rolled; all stay until the last one is there."""
    source, _, dims = (*args, ())[:3]
    before_last = [source.nbytes] * (len(dims) - 1)
    with kernel.blocks(before_last):
        kernel.results()


# -- repetitions -----------------------------------------------------------------------------------


@_order_of("repeat_interleave")
def _repeated(kernel: Kernel, args: Any) -> None:
    """Log where the repetitions of each element end: cumulative sums of their numbers."""
    count = args[0].numel()
    with kernel.blocks([8 * count]):
        with kernel.blocks([sums_bytes(count)]):
            pass
        kernel.results()


_LONGEST_OF_MODE = 2048
"""Maximum length of slices whose most frequent value one kernel finds."""


@_order_of("mode")
def _mode(kernel: Kernel, args: Any) -> None:
    """Log the most frequent values, and a copy of slices that are not next to each other."""
    source, dim = (*args, -1)[:2]
    kernel.results()
    if source.dim() and source.shape[dim] <= _LONGEST_OF_MODE:
        with kernel.copies(source.transpose(dim, -1)):
            pass


# -- largest values --------------------------------------------------------------------------------

_LENGTHS_OF_SHARED_ROWS = (
    (20, 20_000),
    (40, 10_000),
    (80, 8000),
    (199, 5000),
    (799, 3000),
    (4000, 800),
)
"""Up to so many rows, and their least length with which several blocks search one row."""
_LENGTH_OF_MANY_SHARED_ROWS = 400
_THREADS_OF_SEARCH = 6 * 256
"""Threads that search the largest values on one multiprocessor."""


@_order_of("topk")
def _topk(kernel: Kernel, args: Any) -> None:
    """Log a search for the largest values of rows; it takes memory if the rows are long."""
    source, most, *options = args
    if source.dim() == 0:
        return
    dim = -1
    if options:
        dim = options[0]
    length = source.shape[dim]
    rows = source.numel() // max(1, length)
    kernel.results()
    with kernel.copies(source):
        if _shares_rows(rows, length):
            with kernel.blocks(_search_sizes(kernel, source, rows, length)):
                pass
    is_sorted = len(options) < 3 or options[2]
    if is_sorted and most > _MOST_SORTED_IN_PLACE:
        _log_sorted_results(kernel, dim)


def _shares_rows(rows: int, length: int) -> bool:
    """Return True if several blocks of a card's threads search one row.

    The limits are those of ATen/native/cuda/TensorTopK.cu.
    """
    for most_rows, least_length in _LENGTHS_OF_SHARED_ROWS:
        if rows <= most_rows:
            return length >= least_length
    return length >= _LENGTH_OF_MANY_SHARED_ROWS


def _log_sorted_results(kernel: Kernel, dim: int) -> None:
    """Log a sort of the largest values, and the positions in the order of that sort."""
    values = kernel.first_result
    positions_bytes = 8 * values.numel()
    with kernel.blocks([positions_bytes, values.nbytes]):
        _log_sort(kernel, values, dim)
        with kernel.blocks([positions_bytes]):
            pass


def _search_sizes(kernel: Kernel, source: Any, rows: int, length: int) -> list[int]:
    """Return the bytes of the state of each row, and of the counts of each block and digit."""
    values = divided_up(rows * length, kernel.processors * _THREADS_OF_SEARCH)
    values = max(4, min(values, 64))  # of a thread
    blocks = rows * divided_up(length, 256 * values)
    of_rows = [source.itemsize * rows, 8 * rows, 8 * rows]
    of_digits = [512 * blocks, 1024 * rows]
    return [*of_rows, *of_digits, 4 * blocks, 4 * blocks]


# -- losses ----------------------------------------------------------------------------------------


@_order_of("binary_cross_entropy_with_logits")
def _loss_of_logits(kernel: Kernel, args: Any) -> None:
    """Log the logarithms of sigmoids, weights of classes that are freed, and the losses."""
    source = args[0]
    options = list(args[2:])
    options += [None, None, 1][len(options) :]
    _, weights_of_classes, reduction = options
    weights_bytes = losses_bytes = 0
    if weights_of_classes is not None:
        weights_bytes = source.nbytes
    if reduction:
        losses_bytes = source.nbytes
    with kernel.blocks([source.nbytes]):
        with kernel.blocks([weights_bytes]):
            pass
        with kernel.blocks([losses_bytes]):
            kernel.results()


@_order_of("huber_loss")
def _huber_loss(kernel: Kernel, args: Any) -> None:
    """Log the losses of all elements, which are then reduced."""
    source, _, reduction = (*args, 1)[:3]
    losses_bytes = 0
    if reduction:
        losses_bytes = source.nbytes
    with kernel.blocks([losses_bytes]):
        kernel.results()


_FEW_FRAMES = 450
"""Maximum of frames, sequences and labels, weighted, whose gradients one kernel adds up."""


@_order_of("_ctc_loss_backward")
def _ctc_loss_backward(kernel: Kernel, args: Any) -> None:
    """Log the backward variables, the gradient, and a copy if infinite losses count as zero."""
    log_probabilities = args[1]
    forward = args[6]
    has_copy = len(args) > 8 and args[8]
    copied_bytes = 0
    if has_copy:
        copied_bytes = log_probabilities.nbytes
    with kernel.blocks([forward.nbytes, copied_bytes]):
        if not has_copy:
            kernel.results()
        _log_sums_of_blanks(kernel, log_probabilities, forward)
        kernel.results()


def _log_sums_of_blanks(kernel: Kernel, log_probabilities: Any, forward: Any) -> None:
    """Log the sums over the blanks of each frame; one kernel does without if frames are few."""
    frames, batch, labels = log_probabilities.shape
    if 2 * frames + 24 * batch // 10 + 2 * labels // 10 <= _FEW_FRAMES:
        return
    frames_bytes = frames * batch * log_probabilities.itemsize
    blanks = (forward.shape[2] + 1) // 2
    sums_bytes = frames_bytes * blanks
    with kernel.blocks([sums_bytes, frames_bytes]):
        with kernel.blocks([frames_bytes, frames * batch]):
            pass
        with kernel.blocks([sums_bytes, frames_bytes]):
            pass


@_order_of("soft_margin_loss_backward")
def _soft_margin_loss_backward(kernel: Kernel, args: Any) -> None:
    """Log a negation, a product and its exponential, which alone is alive with the gradient."""
    source = args[1]
    exponential = kernel.blocks([source.nbytes])
    with ExitStack() as stack:
        with kernel.blocks([source.nbytes, source.nbytes]):
            stack.enter_context(exponential)
        kernel.results()
