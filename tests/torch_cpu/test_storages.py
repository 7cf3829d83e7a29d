"""Where tensors lie in memory, for the reconciliation of a device: each storage once, and nothing changed by asking."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernel import Kernel
from tests.steps import works

torch: Any = pytest.importorskip("torch")

LOOK = """
import warnings
from ipygpumem.reconcile.findings import storages_of
def look(*tensors):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [tuple(item) for item in storages_of((tensor, "kind") for tensor in tensors)]
"""


def test_what_has_no_memory_of_its_own_is_left_out(notebook: Kernel) -> None:
    works(
        notebook,
        LOOK + "from torch._subclasses.fake_tensor import FakeTensorMode\nwith FakeTensorMode(): fake = torch.ones(5)\n"
        "meta = torch.ones(3, device='meta'); sparse = torch.eye(3).to_sparse(); empty = torch.empty(0)",
    )
    assert notebook.value("look(fake, meta, sparse, empty)") == []


def test_a_lazy_clone_stays_lazy(notebook: Kernel) -> None:
    works(notebook, LOOK + "x = torch.ones(1000)\nlazy = hasattr(torch._C, '_is_cow_tensor')")
    if not notebook.value("lazy"):
        return  # this version of torch has no lazy clones that one could tell
    works(notebook, "y = torch._lazy_clone(x); found = look(x, y)")
    assert notebook.value("(len(found), torch._C._is_cow_tensor(x), torch._C._is_cow_tensor(y))") == (1, True, True)
