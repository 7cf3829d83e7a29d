"""What the tests of recovery do with a kernel."""

from __future__ import annotations

from typing import Any

from tests.kernel import Kernel, Reply

SETUP = """
import gc, sys, weakref, asyncio, contextlib
import numpy as np
import ipygpumem
watched = []
def big(mib=4):
    array = np.ones(mib << 17)
    watched.append(weakref.ref(array))
    return array
def alive():
    return sum(ref() is not None for ref in watched)
"""


def fails(kernel: Kernel, code: str, **options: Any) -> Reply:
    """Run a cell that must end with an error that the user sees."""
    reply = kernel.run(code, **options)
    assert reply.status == "error" or reply.error is not None, reply
    assert "is not affected" not in reply.stderr, reply.stderr
    return reply


def recovers(kernel: Kernel, code: str, **options: Any) -> str:
    """Run a cell that runs out of memory; every watched array is gone at once. Return the report."""
    before = kernel.value("len(watched)")
    reply = fails(kernel, code, **options)
    assert kernel.value("len(watched)") > before, "the test itself watches nothing"
    assert kernel.value("alive()") == 0
    (text,) = reply.reports("recovery")
    assert kernel.run("6 * 7").result == "42"
    return text
