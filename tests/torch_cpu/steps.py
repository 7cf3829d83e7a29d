"""What the tests with torch do with a kernel."""

from __future__ import annotations

from tests.kernel import Kernel

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


def recovery(kernel: Kernel, code: str) -> str:
    """Run a cell that runs out of memory, and return the report."""
    reply = kernel.run(code)
    assert reply.status == "error", reply
    assert "is not affected" not in reply.stderr, reply.stderr
    (text,) = reply.reports("recovery")
    return text
