"""The orders of systems of equations, solved by cuSOLVER and cuBLAS."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

from ipygpumem.estimating.operators.kernels.kernel import Kernel, number_of_positions, order_of


@order_of("linalg_inv_ex")
def _inverse_matrix(kernel: Kernel, args: Any) -> None:
    """Log ``torch.linalg.inv``: a factorization, whose equations are solved for the identity."""
    matrix = args[0]
    pivots_bytes = 4 * number_of_positions(matrix, range(matrix.dim() - 1))
    kernel.log_results()
    with kernel.blocks([matrix.nbytes, pivots_bytes]):
        _log_factorization(kernel, matrix)
        _log_solution(kernel, matrix, is_transposed=False)


@order_of("linalg_lu_factor_ex")
def _lu_factor(kernel: Kernel, args: Any) -> None:
    """Log ``torch.linalg.lu_factor``, a factorization into triangular matrices."""
    kernel.log_results()
    _log_factorization(kernel, args[0])


@order_of("_linalg_solve_ex")
def _solve(kernel: Kernel, args: Any) -> None:
    """Log ``torch.linalg.solve(A, B)``: the results, among them the factors of ``A``, and how the
    equations are solved.
    """
    matrix = args[0]
    kernel.log_results()
    _log_factorization(kernel, matrix)
    is_right = not kernel.options.get("left", True)
    _log_solution(kernel, matrix, is_transposed=is_right)


@order_of("linalg_lu_solve")
def _lu_solve(kernel: Kernel, args: Any) -> None:
    """Log the solution of equations from given factors (``torch.linalg.lu_solve``)."""
    kernel.log_results()
    is_right = not kernel.options.get("left", True)
    is_adjoint = bool(kernel.options.get("adjoint"))
    _log_solution(kernel, args[0], is_transposed=is_adjoint is not is_right)


def _log_factorization(kernel: Kernel, matrix: Any) -> None:
    """Log cuBLAS's workspace if there are several matrices; one needs cuSOLVER's unknown memory."""
    if math.prod(matrix.shape[:-2]) > 1:
        kernel.log_workspaces()


def _log_solution(kernel: Kernel, matrix: Any, *, is_transposed: bool) -> None:
    """Log how equations are solved in the first result, which begins as their right side.

    It follows ATen/native/cuda/linalg/BatchLinearAlgebra.cpp. ``is_transposed``: the factors are
    those of the transposed matrix, as in ``X @ A = B``.
    """
    result = kernel.first_result
    *batch_shape, size, _ = matrix.shape
    matrices = systems = math.prod(batch_shape)
    are_vectors = result.shape == matrix.shape[:-1]
    if not are_vectors:  # one matrix may serve a batch of right sides
        systems = math.prod(result.shape[:-2])
    if result.numel() == 0:
        return
    columns = result.numel() // (systems * size)
    expanded_bytes: list[int] = []
    if systems != matrices:  # the factors and their pivots, repeated for each right side
        expanded_bytes = [systems * size * size * matrix.itemsize, systems * size * 4]
    with kernel.blocks(expanded_bytes):
        if _takes_triangles(systems, size, columns, is_transposed=is_transposed):
            _log_triangles(kernel, systems, size, is_transposed=is_transposed)
        else:
            kernel.log_workspaces()


def _takes_triangles(systems: int, size: int, columns: int, *, is_transposed: bool) -> bool:
    """Return True if torch solves the equations by two triangular systems, and False if cuBLAS
    solves them by one call, as it does for small matrices. The bounds are torch's own.

    Args:
        systems: the number of systems of equations.
        size: the number of equations of a system.
        columns: the number of columns of its right side.
        is_transposed: True if the factors are those of the transposed matrix.
    """
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
            if systems == 1:  # the positions of the rows become the order
                order.enter_context(positions.pop_all())
            else:  # each system has an order of its own, a copy of the positions
                order.enter_context(kernel.blocks([orders_bytes]))
        if is_transposed:
            kernel.log_workspaces()
            kernel.allocate_briefly(copy_bytes)
        else:
            with kernel.blocks([positions_bytes, orders_bytes, copy_bytes]):
                kernel.log_workspaces()
