"""Tells to which tensors and storages torch's C++ code may refer, such as from a graph: the
collector does not report these references.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import compress, repeat
from operator import is_not, not_, or_
from typing import Any

from ipygpumem.heap.kinds.tensors import Reader, each
from ipygpumem.heap.knowledge.graphs import with_graph_or_gradient


def known_to_torch(tensors: Sequence[Any]) -> list[Any]:
    """Return the tensors to which torch's C++ code refers, or may refer, and the tensors that share
    a storage. All references to any other tensor are Python's.
    """
    torch: Any = sys.modules["torch"]
    count_of_tensor: Any = getattr(torch.Tensor, "_use_count", None)  # neither is in every torch
    count_of_storage: Any = getattr(torch._C, "_storage_Use_Count", None)
    if count_of_tensor is None or count_of_storage is None:
        return list(tensors)
    with torch._C.DisableTorchFunction():
        reader = Reader(torch)
        plain, unusual = reader.plain(tensors)
        with_autograd = set(map(id, with_graph_or_gradient(plain.tensors)))
        have_autograd = map(with_autograd.__contains__, map(id, plain.tensors))
        uses = each(count_of_tensor, plain.tensors)
        storage_uses = each(count_of_storage, plain.keys)
        # Storages on accelerators always belong to torch.
        are_of_torch = map(or_, map("cpu".__ne__, plain.devices), reader.resizable(plain.storages))
        facts = zip(have_autograd, uses, storage_uses, are_of_torch, strict=True)
        are_unknown_to_torch = list(map(_UNKNOWN_TO_TORCH.__eq__, facts))
    return [*unusual, *compress(plain.tensors, map(not_, are_unknown_to_torch))]


def plain_tensors(tensors: Sequence[Any]) -> set[int]:
    """Return the identities of the tensors for which torch's C++ code refers to nothing but their
    storage: those without a graph or gradient, and no views.
    """
    torch: Any = sys.modules["torch"]
    with torch._C.DisableTorchFunction():
        with_storage, _ = Reader(torch).plain(tensors)
        candidates = with_storage.tensors
        excluded_ids = set(map(id, with_graph_or_gradient(candidates)))
        bases = each(torch.Tensor._base.__get__, candidates)
        views = compress(candidates, map(is_not, bases, repeat(None)))
        excluded_ids.update(map(id, views))
    return set(map(id, candidates)) - excluded_ids


_UNKNOWN_TO_TORCH = (False, 1, 2, True)
"""The facts about a tensor to which only Python refers: it requires no gradient and has none, it is
used once, its storage is used once more, by us, and torch has allocated the storage.
"""
