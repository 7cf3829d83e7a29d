"""Finds the references that torch's C++ code has to tensors and storages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import compress, repeat
from operator import is_not, not_, or_
from typing import Any

from ipygpumem.heap.knowledge.graphs import with_graph_or_gradient
from ipygpumem.heap.tensors import Reader, each


def known_to_torch(tensors: Sequence[Any]) -> list[Any]:
    """Return the tensors that torch's C++ code refers to, or may refer to, and those that share a
    storage.
    """
    torch: Any = sys.modules["torch"]
    count: Any = getattr(torch.Tensor, "_use_count", None)  # neither is in every torch
    count_of_storage: Any = getattr(torch._C, "_storage_Use_Count", None)
    if count is None or count_of_storage is None:
        return list(tensors)
    with torch._C.DisableTorchFunction():
        reader = Reader(torch)
        plain, unusual = reader.plain(tensors)
        with_autograd = set(map(id, with_graph_or_gradient(plain.tensors)))
        have_autograd = map(with_autograd.__contains__, map(id, plain.tensors))
        uses = each(count, plain.tensors)
        storage_uses = each(count_of_storage, plain.keys)
        # Storages on accelerators always belong to torch.
        is_own = map(or_, map("cpu".__ne__, plain.devices), reader.resizable(plain.storages))
        columns = zip(have_autograd, uses, storage_uses, is_own, strict=True)
        is_alone = list(map(_IS_ALONE.__eq__, columns))
    return [*unusual, *compress(plain.tensors, map(not_, is_alone))]


def plain_tensors(tensors: Sequence[Any]) -> set[int]:
    """Return the identities of the tensors for which torch's C++ code refers to nothing but their
    storage: those without a graph or gradient, and no views.
    """
    torch: Any = sys.modules["torch"]
    with torch._C.DisableTorchFunction():
        with_storage, _ = Reader(torch).plain(tensors)
        candidates = with_storage.tensors
        with_more = set(map(id, with_graph_or_gradient(candidates)))
        viewed = each(torch.Tensor._base.__get__, candidates)
        views = compress(candidates, map(is_not, viewed, repeat(None)))
        with_more.update(map(id, views))
    return {id(tensor) for tensor in candidates} - with_more


_IS_ALONE = (False, 1, 2, True)
"""A tensor that requires no gradient and has none, and is used once; one use of its storage is
ours, and torch allocated it.
"""
