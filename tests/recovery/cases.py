"""Cells that run out of memory while they hold arrays in every way that may pin them."""

from typing import Any

from benchmarks.harness.kernel import Kernel
from tests.steps import recovery_report

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


def recovers(kernel: Kernel, code: str, **options: Any) -> str:
    """Run a cell that runs out of memory; every watched array is gone at once.
    Return the report.
    """
    before = kernel.value("len(watched)")
    text = recovery_report(kernel, code, **options)
    assert kernel.value("len(watched)") > before, "the test itself watches nothing"
    assert kernel.value("alive()") == 0
    assert kernel.run("6 * 7").result == "42"
    return text


CASES = """\
### a plain function
def f():
    x = big()
    raise MemoryError
f()
### raise from
def f():
    x = big()
    raise MemoryError
def g():
    y = big()
    try: f()
    except MemoryError as e: raise ValueError('wrapped') from e
g()
### a chain that is a circle
def f():
    x = big()
    raise MemoryError
def g():
    try: f()
    except MemoryError as e:
        v = ValueError(); v.__cause__ = e; e.__context__ = v; raise v
g()
### a generator
def gen():
    x = big()
    yield 1
    raise MemoryError
list(gen())
### arguments that wait on the stack
def f(): raise MemoryError
print(big(), [big()], f())
### a closure
def f():
    x = big()
    def g():
        nonlocal x
        raise MemoryError
    g()
f()
### top-level await
async def f():
    x = big()
    await asyncio.sleep(0)
    raise MemoryError
await f()
### a thread pool
from concurrent.futures import ThreadPoolExecutor
def f():
    x = big()
    raise MemoryError
with ThreadPoolExecutor(1) as pool:
    pool.submit(f).result()
### a cell magic that captures
%%capture
def f():
    x = big()
    raise MemoryError
f()
### a cell scope
%%experiment a
def f():
    x = big()
    raise MemoryError
y = big()
f()
### a with block in a function
def g():
    before = big()
    with ipygpumem.experiment('a'):
        x = big()
        raise MemoryError
g()
"""

OOM = {case.partition("\n")[0]: case.partition("\n")[2] for case in CASES.split("### ")[1:]}
"""Each case's name, and its cell, which runs out of memory while ``big()`` arrays are held in some
way.
"""
