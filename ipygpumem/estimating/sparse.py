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


def made_of(indices: Any, values: Any, shape: Any, *, is_coalesced: bool) -> Any:
    """Return a sparse tensor of indices and values."""
    made = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
    return made._coalesced_(is_coalesced)


def _copy(tensor: Any, *_: Any, **__: Any) -> Any:
    """Return a tensor with as many entries."""
    indices, values = parts_of(tensor)
    new_values = torch.empty_like(values)
    new_indices = torch.empty_like(indices)
    is_coalesced = tensor.is_coalesced()
    return made_of(new_indices, new_values, tensor.shape, is_coalesced=is_coalesced)


def coalesce(tensor: Any, *, share: float = 1.0) -> Any:
    """Return a tensor whose entries have different indices: all entries, or a share of them.

    The indices of one dimension are a part of a tensor for all entries.
    """
    indices, values = parts_of(tensor)
    different = _number_of_different(tensor, share)
    dims = len(indices)
    if dims == 1:
        new_indices = torch.empty_like(indices)[:, :different]
    else:
        new_indices = indices.new_empty((dims, different))
    new_values = values.new_empty((different, *values.shape[1:]))
    return made_of(new_indices, new_values, tensor.shape, is_coalesced=True)


def coalesce_on_host(tensor: Any, *, share: float = 1.0) -> Any:
    """Return the same for the CPU, which makes parts of tensors for all entries."""
    indices, values = parts_of(tensor)
    different = _number_of_different(tensor, share)
    new_indices = torch.empty_like(indices)[:, :different]
    new_values = torch.empty_like(values)[:different]
    return made_of(new_indices, new_values, tensor.shape, is_coalesced=True)


def _number_of_different(tensor: Any, share: float) -> int:
    count = int(tensor._nnz())
    return max(math.ceil(count * share), min(1, count))


def _sparse_mask(dense: Any, mask: Any) -> Any:
    indices, values = parts_of(mask)
    new_values = values.new_empty(values.shape, dtype=dense.dtype)
    new_indices = torch.empty_like(indices)
    return made_of(new_indices, new_values, mask.shape, is_coalesced=True)


def _bag_backward(gradient: Any, indices: Any, *args: Any) -> Any:
    """Return the gradient of a bag of embeddings: a row for each index."""
    rows = args[4]
    width = gradient.shape[-1]
    values = gradient.new_empty((indices.numel(), width))
    row_of_indices = indices.reshape(1, -1)
    return made_of(row_of_indices, values, (rows, width), is_coalesced=False)


def _sum(first: Any, second: Any, **_: Any) -> Any:
    """Return the sum of two tensors: it has the entries of both."""
    indices, values = parts_of(first)
    count = first._nnz() + second._nnz()
    shape_of_value = values.shape[1:]
    new_indices = indices.new_empty((len(indices), count))
    new_values = values.new_empty((count, *shape_of_value))
    return made_of(new_indices, new_values, first.shape, is_coalesced=False)


def _add_in_place(first: Any, second: Any, **_: Any) -> Any:
    """Give a tensor the entries of another in addition, in new memory."""
    first.data = _sum(first, second)
    return first


def _first(first: Any, *_: Any, **__: Any) -> Any:
    """Return the tensor that an operator changes in place."""
    return first


_OF_SPARSE: dict[Any, Callable[..., Any]] = {
    _ATEN._coalesce.default: coalesce,
    _ATEN.clone.default: _copy,
    _ATEN.mul.Tensor: _copy,
    _ATEN.mul.Scalar: _copy,
    _ATEN.div.Tensor: _copy,
    _ATEN.div.Scalar: _copy,
    _ATEN.neg.default: _copy,
}
"""Functions that run instead of operators whose first argument is sparse."""
_OF_TWO: dict[Any, Callable[..., Any]] = {
    _ATEN.add.Tensor: _sum,
    _ATEN.sub.Tensor: _sum,
    _ATEN.add_.Tensor: _add_in_place,
}
"""The same of operators with two sparse arguments."""
_ADD_IN_PLACE = (_ATEN.add_.Tensor, _ATEN.sub_.Tensor)
_BY_TORCH = frozenset(
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
    """Return the function that runs instead of an operator with a sparse argument, if any."""
    first, *further = args
    if is_sparse(first):
        if further and is_sparse(further[0]):
            return _OF_TWO.get(func)
        return _OF_SPARSE.get(func)
    if func is _ATEN.sparse_mask.default:
        return _sparse_mask
    # torch has no rule for a fake sparse tensor that is added to a dense one.
    if func in _ADD_IN_PLACE:
        return _first
    return None


def embedding_bag_backward(*args: Any) -> Any:
    """Stand for the operator whose result may be sparse."""
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
    if not is_sparse(result) or func in _BY_TORCH:
        return False
    return operator is func
