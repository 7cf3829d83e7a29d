"""Computes the sparse results of operators, such as an embedding's gradient, from their shapes.

How many entries have the same index depends on values: each is assumed to have its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

_ATEN = torch.ops.aten
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def is_sparse(value: Any) -> bool:
    """Return True for a tensor of indices and values."""
    return isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo


def parts_of(tensor: Any) -> tuple[Any, Any]:
    """Return the indices and the values of a sparse tensor."""
    return tensor._indices(), tensor._values()


def sparse_tensor(indices: Any, values: Any, shape: Any, *, is_coalesced: bool) -> Any:
    """Return a sparse tensor of indices and values; ``is_coalesced``: no index occurs twice."""
    tensor = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
    return tensor._coalesced_(is_coalesced)


def _with_as_many_entries(tensor: Any, *_: Any, **__: Any) -> Any:
    """Return a new sparse tensor with as many entries as another one: the result of ``-x``."""
    indices, values = parts_of(tensor)
    new_values = torch.empty_like(values)
    new_indices = torch.empty_like(indices)
    is_coalesced = tensor.is_coalesced()
    return sparse_tensor(new_indices, new_values, tensor.shape, is_coalesced=is_coalesced)


def coalesce(tensor: Any, *, share: float = 1.0) -> Any:
    """Return a coalesced tensor on a card: all entries have different indices, or a share of them.

    Indices of one dimension are a view of a tensor with room for all entries.
    """
    indices, values = parts_of(tensor)
    different = _number_of_different(tensor, share)
    dims = len(indices)
    if dims == 1:
        new_indices = torch.empty_like(indices)[:, :different]
    else:
        new_indices = indices.new_empty((dims, different))
    new_values = values.new_empty((different, *values.shape[1:]))
    return sparse_tensor(new_indices, new_values, tensor.shape, is_coalesced=True)


def coalesce_on_host(tensor: Any, *, share: float = 1.0) -> Any:
    """Return a coalesced tensor on the CPU, as ``coalesce`` does for a card.

    There the indices and the values are views of tensors with room for all entries.
    """
    indices, values = parts_of(tensor)
    different = _number_of_different(tensor, share)
    new_indices = torch.empty_like(indices)[:, :different]
    new_values = torch.empty_like(values)[:different]
    return sparse_tensor(new_indices, new_values, tensor.shape, is_coalesced=True)


def _number_of_different(tensor: Any, share: float) -> int:
    """Return the number of entries of a coalesced tensor if a share of its indices differ."""
    count = int(tensor._nnz())
    return max(math.ceil(count * share), min(1, count))


def _sparse_mask(dense: Any, mask: Any) -> Any:
    """Return the result of ``dense.sparse_mask(mask)``: values at a sparse tensor's indices."""
    indices, values = parts_of(mask)
    new_values = values.new_empty(values.shape, dtype=dense.dtype)
    new_indices = torch.empty_like(indices)
    return sparse_tensor(new_indices, new_values, mask.shape, is_coalesced=True)


def _bag_backward(gradient: Any, indices: Any, *args: Any) -> Any:
    """Return the sparse gradient of a bag of embeddings, which has a row for each index."""
    rows = args[4]
    width = gradient.shape[-1]
    values = gradient.new_empty((indices.numel(), width))
    row_of_indices = indices.reshape(1, -1)
    return sparse_tensor(row_of_indices, values, (rows, width), is_coalesced=False)


def _with_entries_of_both(first: Any, second: Any, **_: Any) -> Any:
    """Return the sum of two sparse tensors, which has the entries of both."""
    indices, values = parts_of(first)
    count = first._nnz() + second._nnz()
    shape_of_value = values.shape[1:]
    new_indices = indices.new_empty((len(indices), count))
    new_values = values.new_empty((count, *shape_of_value))
    return sparse_tensor(new_indices, new_values, first.shape, is_coalesced=False)


def _add_in_place(first: Any, second: Any, **_: Any) -> Any:
    """Add a sparse tensor to another one in place: the sum is in new memory."""
    first.data = _with_entries_of_both(first, second)
    return first


def _changed_argument(first: Any, *_: Any, **__: Any) -> Any:
    """Return the tensor that an operator changes in place."""
    return first


_BY_FIRST_SPARSE: dict[Any, Callable[..., Any]] = {
    _ATEN._coalesce.default: coalesce,
    _ATEN.clone.default: _with_as_many_entries,
    _ATEN.mul.Tensor: _with_as_many_entries,
    _ATEN.mul.Scalar: _with_as_many_entries,
    _ATEN.div.Tensor: _with_as_many_entries,
    _ATEN.div.Scalar: _with_as_many_entries,
    _ATEN.neg.default: _with_as_many_entries,
}
"""Functions that run instead of operators whose first argument is sparse."""
_BY_TWO_SPARSE: dict[Any, Callable[..., Any]] = {
    _ATEN.add.Tensor: _with_entries_of_both,
    _ATEN.sub.Tensor: _with_entries_of_both,
    _ATEN.add_.Tensor: _add_in_place,
}
"""Functions that run instead of operators with two sparse arguments."""
_ADD_IN_PLACE = (_ATEN.add_.Tensor, _ATEN.sub_.Tensor)
_INFERRED_BY_TORCH = frozenset(
    {
        _ATEN._sparse_coo_tensor_with_dims_and_tensors.default,
        _ATEN._coalesced_.default,
        _ATEN.detach.default,
    }
)
"""Operators whose sparse results torch infers correctly for fake tensors."""
OF_PARTS = frozenset(
    {
        _ATEN._indices.default,
        _ATEN._values.default,
        _ATEN.indices.default,
        _ATEN.values.default,
        _ATEN.is_coalesced.default,
        _ATEN._nnz.default,
    }
)
"""Operators that read parts of a sparse tensor, and allocate nothing."""


def stand_in(func: Any, args: Any) -> Callable[..., Any] | None:
    """Return the function that runs instead of an operator with a sparse argument; None if the
    operator itself should run.
    """
    first, *further = args
    if is_sparse(first):
        if further and is_sparse(further[0]):
            return _BY_TWO_SPARSE.get(func)
        return _BY_FIRST_SPARSE.get(func)
    if func is _ATEN.sparse_mask.default:
        return _sparse_mask
    # A sparse tensor that is added to a dense one: torch has no rule for fake tensors.
    if func in _ADD_IN_PLACE:
        return _changed_argument
    return None


def embedding_bag_backward(*args: Any) -> Any:
    """Return the gradient of bags of embeddings, which is sparse if the code asks for that."""
    is_gradient_sparse = args[9]
    if is_gradient_sparse:
        return _bag_backward(*args)
    return _ATEN._embedding_bag_backward.default(*args)


def has_unknown_entries(func: Any, operator: Any, result: Any) -> bool:
    """Return True if an operator's result is sparse, and its number of entries is not known.

    Args:
        func: the operator.
        operator: the function that ran instead of it.
        result: a tensor.
    """
    if result.layout in _COMPRESSED:
        return True
    if not is_sparse(result) or func in _INFERRED_BY_TORCH:
        return False
    return operator is func
