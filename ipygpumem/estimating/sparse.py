"""Gives sparse results the number of entries of their arguments: torch forgets it for fake tensors."""

from __future__ import annotations

from typing import Any

import torch

_ATEN = torch.ops.aten
_SUMS = frozenset({_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.cat.default})
"""Their results have the entries of all arguments."""
AT_MOST = frozenset({_ATEN._coalesce.default, *_SUMS})
"""Their results may have fewer entries than is said here, since several may be in one place."""


def is_sparse(value: Any) -> bool:
    """Whether a value is a tensor that is its indices and values."""
    return isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo


def is_made_of_parts(func: Any) -> bool:
    """Whether an operation makes a sparse tensor of indices and values, or an empty one."""
    name = str(func)
    return "sparse_coo_tensor" in name or name.startswith(("aten.empty", "aten.zeros", "aten.detach"))


def with_entries(func: Any, arguments: list[Any], result: Any) -> Any:
    """Return the sparse result of an operation with as many entries as its arguments have."""
    given = [tensor._nnz() for tensor in arguments if is_sparse(tensor)]
    if not given or any(result is tensor for tensor in arguments) or result._nnz():
        return result
    entries = sum(given) if func in _SUMS else max(given)
    dense = result.shape[result.sparse_dim() :]
    indices = torch.empty((result.sparse_dim(), entries), dtype=torch.long, device=result.device)
    values = torch.empty((entries, *dense), dtype=result.dtype, device=result.device)
    made = torch.sparse_coo_tensor(indices, values, result.shape, check_invariants=False)
    return made._coalesced_(True) if func is _ATEN._coalesce.default else made
