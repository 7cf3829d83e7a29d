"""Cells that run out of memory while they hold arrays in every way that may pin them."""

from __future__ import annotations

CASES = """\
### a plain function
def f():
    x = big()
    raise MemoryError
f()
### a chain of functions
def f(n):
    x = big()
    return f(n - 1) if n else fail()
def fail():
    y = big()
    raise MemoryError
f(5)
### raise from
def f():
    x = big()
    raise MemoryError
def g():
    y = big()
    try: f()
    except MemoryError as e: raise ValueError('wrapped') from e
g()
### raise from None
def f():
    x = big()
    raise MemoryError
def g():
    y = big()
    try: f()
    except MemoryError: raise ValueError('hidden') from None
g()
### an error while handling
def f():
    x = big()
    raise MemoryError
def g():
    y = big()
    try: f()
    finally: {}['missing']
g()
### an OOM while handling another error
def f():
    x = big()
    {}['missing']
def g():
    y = big()
    try: f()
    except KeyError: raise MemoryError
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
### AttributeError.obj
class Model:
    def __init__(self): self.weights = big()
def f():
    Model().missing
def g():
    try: f()
    except AttributeError: raise MemoryError
g()
### an OOM with the array among its arguments
def f():
    raise MemoryError('no memory for', big(), [big()], {'k': (big(),)})
f()
### an OOM with the array as an attribute
class Oom(MemoryError): pass
def f():
    e = Oom('no')
    e.batch = big()
    e.more = {'a': [big()]}
    raise e
f()
### an OOM with the array in a slot
class Oom(MemoryError):
    __slots__ = ('batch',)
def f():
    e = Oom('no')
    e.batch = big()
    raise e
f()
### an error with the array in StopIteration
def gen():
    return big()
    yield
def f():
    try: next(gen())
    except StopIteration: raise MemoryError
f()
### a generator
def gen():
    x = big()
    yield 1
    raise MemoryError
list(gen())
### a generator that waits
def gen():
    x = big()
    yield 1
    yield 2
def f():
    g = gen(); next(g)
    raise MemoryError
f()
### a generator expression
def f(i):
    x = big()
    if i: raise MemoryError
    return x
list(f(i) for i in range(2))
### a list comprehension
def f(i):
    x = big()
    if i > 2: raise MemoryError
    return x
[f(i) for i in range(9)]
### arguments that wait on the stack
def f(): raise MemoryError
print(big(), [big()], f())
### a context manager's body
@contextlib.contextmanager
def manager():
    x = big()
    yield x
with manager() as y:
    del y
    raise MemoryError
### a context manager that raises
class M:
    def __enter__(self): self.x = big()
    def __exit__(self, *a):
        x = big()
        raise RuntimeError('in exit')
def f():
    y = big()
    with M(): raise MemoryError
f()
### a class body
def f():
    class A:
        x = big()
        raise MemoryError
f()
### a closure
def f():
    x = big()
    def g():
        nonlocal x
        raise MemoryError
    g()
f()
### a method
class Trainer:
    def __init__(self): self.weights = big()
    def step(self):
        batch = big()
        raise MemoryError
Trainer().step()
### a reference cycle
def f():
    box = {'x': big()}; box['me'] = box
    raise MemoryError
f()
### a lambda
(lambda x: (_ for _ in ()).throw(MemoryError()))(big())
### a deep recursion
def f(n):
    x = big(1) if n % 50 == 0 else None
    if n == 0: raise MemoryError
    f(n - 1)
f(400)
### top-level await
async def f():
    x = big()
    await asyncio.sleep(0)
    raise MemoryError
await f()
### asyncio.gather
async def f():
    x = big()
    await asyncio.sleep(0)
    raise MemoryError
await asyncio.gather(f(), f())
### an async generator
async def gen():
    x = big()
    yield 1
    raise MemoryError
async for i in gen(): pass
### a thread pool
from concurrent.futures import ThreadPoolExecutor
def f():
    x = big()
    raise MemoryError
with ThreadPoolExecutor(1) as pool:
    pool.submit(f).result()
### a nested run_cell
get_ipython().run_cell('def f():\\n    x = big()\\n    raise MemoryError\\nf()').raise_error()
### a cell magic that times
%%time
def f():
    x = big()
    raise MemoryError
f()
### a line magic that times
def f():
    x = big()
    raise MemoryError
%time f()
### a cell magic that captures
%%capture
def f():
    x = big()
    raise MemoryError
f()
### captured and timed
%%capture
%%time
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
### a cell scope with a magic
%%experiment a
%%time
def f():
    x = big()
    raise MemoryError
y = big()
f()
### a with block
with ipygpumem.experiment('a'):
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
### nested with blocks in functions
def f():
    x = big()
    with ipygpumem.experiment('inner'):
        y = big()
        raise MemoryError
def g():
    z = big()
    with ipygpumem.experiment('outer'):
        f()
g()
### swallowed in a with block and raised anew
def g():
    x = big()
    with ipygpumem.experiment('a'):
        try:
            y = big(); raise MemoryError
        except MemoryError as e:
            raise RuntimeError('training failed') from e
g()
### a subclass named as torch's
class OutOfMemoryError(RuntimeError): pass
def f():
    x = big()
    raise OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')
f()
### an error that keeps the first in a variable
def f():
    x = big()
    try: raise MemoryError
    except MemoryError as e: first = e
    raise ValueError(first)
def g():
    try: f()
    except ValueError as e: raise MemoryError from e
g()
"""

OOM = {case.partition("\n")[0]: case.partition("\n")[2] for case in CASES.split("### ")[1:]}
"""Each case's name, and its cell, which runs out of memory while ``big()`` arrays are held in some way."""
