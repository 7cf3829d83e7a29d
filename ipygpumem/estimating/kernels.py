"""The order in which CUDA kernels allocate their results and their intermediate blocks.

The order decides where the allocator places blocks, and so how much memory it reserves. Each rule
was read off the history of torch 2.11's allocator on a simulated card. An operator without a rule
allocates its results, then a workspace of cuBLAS, then all its intermediate blocks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ipygpumem.estimating.storages import TEMPORARIES, StorageLog
from ipygpumem.estimating.transients import (
    FEW_INDICES,
    is_contiguous,
    is_matrix_of_cublas,
    laid_out,
)
from ipygpumem.units import KIB, divided_up, rounded_up


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

    @property
    def result_bytes(self) -> int:
        """The bytes of the first result."""
        return int(self._results[0].nbytes)

    def result(self, number: int) -> None:
        """Log a result, unless the operation does not have it."""
        if number in self._logged or number >= len(self._results):
            return
        self._logged.add(number)
        self._log_result(self._results[number])

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


_PAIRS_OF_TILE = 4608
"""Pairs that one block of a card's threads sorts, with torch 2.11 on a Hopper."""
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


@_order_of("col2im")
def _fold(kernel: Kernel, args: Any) -> None:
    with kernel.copies(args[0]):
        kernel.results()


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
    copied = [matrix.nbytes for matrix in matrices if not is_matrix_of_cublas(matrix)]
    with kernel.blocks(copied):
        kernel.workspace()


# -- sparse gradients -----------------------------------------------------------------------------


@_order_of("_coalesce")
def _coalesced(kernel: Kernel, args: Any) -> None:
    """Log a sort by index, which keeps two copies of the indices until the values are added up."""
    count = args[0]._nnz()
    indices_bytes = 8 * count
    sort_bytes = 16 * count + count // 500 + 767
    with kernel.blocks([indices_bytes, indices_bytes]):
        with kernel.blocks([sort_bytes]):
            pass
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
        with kernel.blocks([indices_bytes, _sort_bytes(count)]):
            pass
        kernel.results()
        with kernel.blocks(begins):
            with kernel.blocks([indices_bytes]):  # while it finds where each row begins
                pass
            with kernel.blocks([*of_segments, *of_parts]):
                pass


def _sort_bytes(count: int) -> int:
    """Return the bytes with which a kernel sorts pairs of integers: copies, and 1 KiB a tile."""
    copies_bytes = 16 * count
    tiles_bytes = divided_up(count, _PAIRS_OF_TILE) * KIB
    return copies_bytes + tiles_bytes + 16 * KIB + 512


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


# -- losses ----------------------------------------------------------------------------------------


@_order_of("huber_loss")
def _huber_loss(kernel: Kernel, args: Any) -> None:
    """Log the losses of all elements, which are then reduced."""
    source, _, reduction = (*args, 1)[:3]
    losses_bytes = 0
    if reduction:
        losses_bytes = source.nbytes
    with kernel.blocks([losses_bytes]):
        kernel.results()


@_order_of("soft_margin_loss_backward")
def _soft_margin_loss_backward(kernel: Kernel, args: Any) -> None:
    """Log a negation, a product and its exponential, which alone is alive with the gradient."""
    source = args[1]
    exponential = kernel.blocks([source.nbytes])
    with ExitStack() as stack:
        with kernel.blocks([source.nbytes, source.nbytes]):
            stack.enter_context(exponential)
        kernel.results()
