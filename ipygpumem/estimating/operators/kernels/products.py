"""The orders of products of matrices, distances and norms."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from ipygpumem.estimating.operators.kernels.kernel import (
    Kernel,
    copy_bytes,
    number_of_positions,
    order_of,
)
from ipygpumem.estimating.operators.transients import is_matrix_of_cublas


@order_of("mm", "bmm")
def _matrix_product(kernel: Kernel, args: Any) -> None:
    """Log ``torch.mm(first, second)``."""
    first, second = args[:2]
    _multiply(kernel, first, second)


@order_of("addmm", "baddbmm")
def _sum_with_product(kernel: Kernel, args: Any) -> None:
    """Log ``torch.addmm(summand, first, second)``: the summand needs no memory."""
    _, first, second = args[:3]
    _multiply(kernel, first, second)


def _multiply(kernel: Kernel, *matrices: Any) -> None:
    """Log a product of two matrices, and copies of the matrices that cuBLAS cannot read."""
    kernel.log_results()
    with kernel.blocks(_unreadable_bytes(*matrices)):
        kernel.log_workspaces()


def _unreadable_bytes(*matrices: Any) -> list[int]:
    """Return the bytes of the matrices that cuBLAS cannot read, in the order of their copies.

    The last matrix is copied first: cuBLAS computes columns, so that torch asks it for
    ``B.T @ A.T`` to get the rows of ``A @ B``.
    """
    swapped = reversed(matrices)
    return [matrix.nbytes for matrix in swapped if not is_matrix_of_cublas(matrix)]


@order_of("_euclidean_dist")
def _distances(kernel: Kernel, args: Any) -> None:
    """Log ``torch.cdist`` of many rows, which torch computes by one product of matrices.

    Both matrices get two more columns, the squared norms of their rows and ones: for ``x`` and
    ``y`` the product sums up ``-2 * x * y``, ``x**2`` and ``y**2``.
    """
    first, second = args
    with ExitStack() as factors:
        with ExitStack() as columns_of_second:
            with ExitStack() as columns_of_first:
                _log_norms(kernel, first, columns_of_first)
                _log_norms(kernel, second, columns_of_second)
                with kernel.blocks([first.nbytes]):  # times -2
                    factors.enter_context(kernel.blocks([_bytes_with_two_columns(first)]))
            factors.enter_context(kernel.blocks([_bytes_with_two_columns(second)]))
        kernel.log_results()
        kernel.log_workspaces()


def _log_norms(kernel: Kernel, matrix: Any, columns: ExitStack) -> None:
    """Log a matrix's squares, which are freed, and its norms and ones, which ``columns`` keeps."""
    column_bytes = matrix.nbytes // matrix.shape[-1]
    with kernel.blocks([matrix.nbytes]):
        columns.enter_context(kernel.blocks([column_bytes]))
    columns.enter_context(kernel.blocks([column_bytes]))


def _bytes_with_two_columns(matrix: Any) -> int:
    """Return the bytes of a matrix with two more columns."""
    return int(matrix.nbytes + 2 * matrix.nbytes // matrix.shape[-1])


@order_of("_trilinear")
def _trilinear(kernel: Kernel, args: Any) -> None:
    """Log the sums of products of three tensors, for one position of ``looped_dim`` at a time.

    Bilinear layers and their gradients are such sums. It follows ATen/native/Linear.cpp: each
    tensor gets the dimensions that it lacks with size 1, the first two are multiplied, and the
    product is multiplied by the third.
    """
    tensors = args[:3]
    missing_dims = args[3:6]
    summed_dims, *options = args[6:]
    looped_dim = 1
    if options:
        looped_dim = options[0]
    kernel.log_results()
    if any(tensor.numel() == 0 for tensor in tensors):
        return
    factors = _with_all_dims(tensors, missing_dims)
    positions = max(factor.shape[looped_dim] for factor in factors)
    first, second, third = [factor.narrow(looped_dim, 0, 1) for factor in factors]
    # Dimensions that the third tensor lacks are summed before the product with it.
    dims = [dim for dim in summed_dims if dim != looped_dim]
    early_sums = [dim for dim in dims if dim in missing_dims[2]]
    late_sums = [dim for dim in dims if dim not in missing_dims[2]]
    product = _product_sums(first, second, early_sums)
    last_product = _product_sums(product.result, third, late_sums)
    for _ in range(positions):
        with ExitStack() as last_block, ExitStack() as block:
            product.log(kernel, block)
            last_product.log(kernel, last_block)


def _with_all_dims(tensors: Sequence[Any], missing_dims: Sequence[Sequence[int]]) -> list[Any]:
    """Return each tensor with a dimension of size 1 for each of its missing dimensions."""
    expanded = []
    for tensor, dims in zip(tensors, missing_dims, strict=True):
        for dim in dims:
            tensor = tensor.unsqueeze(dim)
        expanded.append(tensor)
    return expanded


class _ProductSums(NamedTuple):
    """The sums of two tensors' products, which are a product of matrices if anything is summed."""

    result: Any
    """The tensor of the sums."""
    copied_bytes: Sequence[int] = ()
    """Bytes of each tensor that cannot become a matrix without a copy."""
    unreadable_bytes: Sequence[int] | None = None
    """Bytes of each matrix that cuBLAS cannot read; None if nothing is summed."""

    def log(self, kernel: Kernel, result_block: ExitStack) -> None:
        """Log the computation of the sums, whose block lives until ``result_block`` is closed."""
        with kernel.blocks(self.copied_bytes):
            result_block.enter_context(kernel.blocks([self.result.nbytes]))
            if self.unreadable_bytes is not None:
                with kernel.blocks(self.unreadable_bytes):
                    kernel.log_workspaces()


def _product_sums(left: Any, right: Any, summed_dims: Sequence[int]) -> _ProductSums:
    """Return the products of two tensors, summed over some dimensions, as torch computes them.

    With ``summed_dims`` that is a product of matrices, as in ``torch.einsum``: its rows are the
    dimensions of the left tensor, its columns those of the right one, and it is made for each
    position of the dimensions of both.
    """
    if not summed_dims:
        return _ProductSums(left * right)
    dims = _DimsOfProduct.of(left, right, summed_dims)
    rows = _matrices(left, dims.of_both, dims.of_left, summed_dims, dims.of_right)
    columns = _matrices(right, dims.of_both, summed_dims, dims.of_right, dims.of_left)
    # The product has the dimensions in another order than the tensors: permute them back.
    order = [*dims.of_both, *dims.of_left, *summed_dims, *dims.of_right]
    sizes = []
    for dim in order:
        size = max(left.shape[dim], right.shape[dim])
        sizes.append(1 if dim in summed_dims else size)
    product = torch.bmm(rows, columns).view(sizes)
    result = product.permute([order.index(dim) for dim in range(len(order))])
    copied_bytes = [*copy_bytes(rows, left), *copy_bytes(columns, right)]
    return _ProductSums(result, copied_bytes, _unreadable_bytes(rows, columns))


class _DimsOfProduct(NamedTuple):
    """The dimensions that are not summed, by the tensor in which their size is not 1."""

    of_both: list[int]
    of_left: list[int]
    of_right: list[int]

    @classmethod
    def of(cls, left: Any, right: Any, summed_dims: Sequence[int]) -> _DimsOfProduct:
        """Return the dimensions of two tensors with equally many dimensions."""
        dims = cls([], [], [])
        for dim in range(left.dim()):
            if dim in summed_dims:
                continue
            if left.shape[dim] == 1:
                dims.of_right.append(dim)
            elif right.shape[dim] == 1:
                dims.of_left.append(dim)
            else:
                dims.of_both.append(dim)
        return dims


def _matrices(
    tensor: Any,
    batch_dims: Sequence[int],
    row_dims: Sequence[int],
    column_dims: Sequence[int],
    unit_dims: Sequence[int],
) -> Any:
    """Return a tensor as matrices, one for each position of its ``batch_dims``.

    Args:
        tensor: the tensor.
        batch_dims: dimensions that are those of the batch.
        row_dims: dimensions that become the rows.
        column_dims: dimensions that become the columns.
        unit_dims: the remaining dimensions, in which its size is 1.
    """
    ordered = tensor.permute(*batch_dims, *row_dims, *column_dims, *unit_dims)
    return ordered.reshape(
        number_of_positions(tensor, batch_dims),
        number_of_positions(tensor, row_dims),
        number_of_positions(tensor, column_dims),
    )
