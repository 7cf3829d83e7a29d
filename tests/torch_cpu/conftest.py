"""Tests with torch on the CPU: in kernels, and all those for which torch is imported in the tests' own process."""

import pytest

from tests.steps import tidied_kernel

SETUP = """
import gc, sys, weakref
import torch, ipygpumem
from torch import nn
torch.set_num_threads(2)
watched = {}
def watch(**things):
    for name, thing in things.items():
        watched.setdefault(name, []).append(weakref.ref(thing))
def alive():
    return sorted(name for name, refs in watched.items() if any(ref() is not None for ref in refs))
"""

shared_kernel, notebook = tidied_kernel("%reset -f", "%reload_ext ipygpumem\n" + SETUP, timeout=600)
"""A kernel with torch and the extension loaded, nothing open, and ``watch()`` and ``alive()``."""


@pytest.fixture
def no_modules_of_users(monkeypatch: pytest.MonkeyPatch, others_out_of_sight: None) -> None:
    """Let estimates put back arguments and closures alone: the modules of tests lead to all of pytest."""
    monkeypatch.setattr("ipygpumem.estimating.rollback._is_users_module", lambda module: False)
    monkeypatch.setattr("ipygpumem.estimating.rollback.is_users", lambda file: False)
