"""Finds the references that torch's C++ code has to tensors and storages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import compress
from operator import not_, or_
from typing import Any

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
        requires_grad = each(reader.base.requires_grad.__get__, plain.tensors)
        uses = each(count, plain.tensors)
        storage_uses = each(count_of_storage, plain.keys)
        # Storages on accelerators always belong to torch.
        is_own = map(or_, map("cpu".__ne__, plain.devices), reader.resizable(plain.storages))
        columns = zip(map(bool, requires_grad), uses, storage_uses, is_own, strict=True)
        is_alone = list(map(_IS_ALONE.__eq__, columns))
    return [*unusual, *compress(plain.tensors, map(not_, is_alone))]


_IS_ALONE = (False, 1, 2, True)
"""A tensor that requires no gradient, and is used once; one use of its storage is ours, and torch
allocated it.
"""
