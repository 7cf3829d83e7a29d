"""After an out-of-memory error or an interrupt the memory is back, and other errors keep their frames."""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipygpumem.tracebacks import classify
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


@pytest.fixture(scope="module")
def kernels() -> Iterator[list[Kernel]]:
    """One kernel that the tests of this module share; a test that breaks it takes it out of the list."""
    alive: list[Kernel] = []
    yield alive
    for kernel in alive:
        kernel.close()


@pytest.fixture
def notebook(kernels: list[Kernel]) -> Iterator[Kernel]:
    """A kernel with the extension loaded, nothing open, and ``big()`` and ``alive()`` to watch arrays."""
    if kernels and not _is_well(kernels[0]):
        kernels.pop().close()
    if not kernels:
        kernels.append(Kernel())
        assert kernels[0].run("%load_ext ipygpumem").status == "ok"
        assert _is_well(kernels[0])
    return kernels[0]


def _is_well(kernel: Kernel) -> bool:
    try:
        kernel.run("%reset -f\n%config IPyGpuMem.release_frames = 'oom+interrupt'", timeout=15)
        return kernel.run("%reload_ext ipygpumem\n" + SETUP, timeout=15).status == "ok"
    except (TimeoutError, queue.Empty):
        return False


def works(kernel: Kernel, code: str, **options: Any) -> Reply:
    """Run a cell that must succeed."""
    reply = kernel.run(code, **options)
    assert reply.status == "ok", (code, reply.message, reply.stderr, reply.traceback)
    assert "steps aside" not in reply.stderr
    return reply


def fails(kernel: Kernel, code: str, **options: Any) -> Reply:
    """Run a cell that must end with an error that the user sees."""
    reply = kernel.run(code, **options)
    assert reply.status == "error" or reply.error is not None, reply
    assert "steps aside" not in reply.stderr, reply.stderr
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


# -- everything that may pin memory ---------------------------------------------------------------------------------

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


@pytest.mark.parametrize("code", OOM.values(), ids=OOM)
def test_after_an_oom_nothing_is_pinned_and_one_report_says_so(notebook: Kernel, code: str) -> None:
    text = recovers(notebook, code)
    assert "out of memory (" in text
    assert "came back: " in text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    x = big()\n    raise MemoryError\ndef g():\n    found = []\n    for _ in range(2):\n"
        "        try: f()\n"
        "        except MemoryError as e: found.append(e)\n    raise ExceptionGroup('both', [KeyError(), *found])\ng()",
        "def f():\n    x = big()\n    raise MemoryError\ndef g():\n    try: f()\n    except* MemoryError as group:\n"
        "        raise BaseExceptionGroup('outer', [group, KeyboardInterrupt()])\ng()",
        "async def f():\n    x = big()\n    await asyncio.sleep(0)\n    raise MemoryError\n"
        "async with asyncio.TaskGroup() as tasks:\n    for _ in range(3): tasks.create_task(f())",
    ],
)
def test_an_oom_inside_an_exception_group_is_found_and_released(notebook: Kernel, code: str) -> None:
    assert "out of memory (MemoryError)" in recovers(notebook, code)


@pytest.mark.parametrize("how", ["%run", "%run -i", "%run -n"])
def test_an_oom_in_a_script_leaves_only_the_scripts_names(notebook: Kernel, tmp_path: Path, how: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import builtins, weakref\nimport numpy as np\n"
        "def f():\n    x = np.ones(4 << 17)\n    builtins.script_ref = weakref.ref(x)\n    raise MemoryError\nf()\n"
    )
    reply = fails(notebook, f"{how} {script}")
    assert reply.error == "MemoryError"
    assert notebook.value("__import__('builtins').script_ref() is None") is True
    assert len(reply.reports("recovery")) == 1


@pytest.mark.parametrize("mode", ["Plain", "Context", "Verbose", "Minimal"])
def test_every_traceback_style_leaves_nothing_pinned_and_tb_still_works(notebook: Kernel, mode: str) -> None:
    works(notebook, f"%xmode {mode}")
    try:
        recovers(notebook, OOM["raise from"])
        recovers(notebook, OOM["a generator"])
        fails(notebook, OOM["a plain function"])
        # Frames whose locals the user's own code has read keep a copy of them before Python 3.13.
        fails(
            notebook,
            "def f():\n    x = big()\n    import sys; seen = sys._getframe().f_locals\n    locals()\n"
            "    raise MemoryError\nf()",
        )
        assert notebook.value("alive()") == 0
        reply = notebook.run("%tb")
        assert "MemoryError" in reply.traceback + reply.stdout + reply.stderr
        assert notebook.value("alive()") == 0
    finally:
        notebook.run("%xmode Context")


def test_the_shown_traceback_names_every_line_although_the_frames_are_released(notebook: Kernel) -> None:
    reply = fails(
        notebook, "def inner():\n    x = big()\n    raise MemoryError('no room')\ndef outer():\n    inner()\nouter()"
    )
    assert reply.error == "MemoryError"
    assert reply.message == "no room"
    for part in ("inner", "outer", "no room"):
        assert part in reply.traceback
    again = notebook.run("%tb").traceback
    for part in ("inner", "outer", "no room"):
        assert part in again


def test_a_loop_of_failures_and_retries_needs_no_more_memory_than_one(notebook: Kernel) -> None:
    works(
        notebook,
        "import psutil\ndef rss(): return psutil.Process().memory_info().rss\n"
        "def train(n):\n    x = big(n)\n    if n > 32: raise MemoryError\n    return float(x.sum())",
    )
    before = notebook.value("rss()")
    for _ in range(4):
        fails(notebook, "train(64)")
    assert notebook.value("rss()") - before < 48 << 20
    assert works(notebook, "train(32)").result == str(float(32 << 17))


def test_rss_comes_back_and_the_report_says_how_much(notebook: Kernel) -> None:
    works(notebook, "import psutil\ndef rss(): return psutil.Process().memory_info().rss")
    before = notebook.value("rss()")
    text = recovers(notebook, "def f():\n    x = big(256)\n    raise MemoryError\nf()")
    assert notebook.value("rss()") - before < 32 << 20
    came_back = float(text.split("came back: RAM ")[1].split(" MiB")[0])
    assert 250 <= came_back <= 262


def test_the_report_lists_what_each_frame_held_largest_first(notebook: Kernel) -> None:
    works(
        notebook,
        "def inner(batch):\n    small = big(2)\n    weights = {'w': big(16), 'b': big(16)}\n    raise MemoryError\n"
        "def outer():\n    hooks = [lambda: 0]\n    inner(big(8))\nnotebooks_own = np.ones(64 << 17)",
    )
    text = recovers(notebook, "outer()")
    rows = [line.split() for line in text.splitlines() if line.split()[:1] in (["inner"], ["outer"])]
    assert [row[2] for row in rows] == ["weights", "batch", "small"]
    assert rows[0][0] == "inner"
    assert "32 MiB" in " ".join(rows[0])
    assert "1048576 float64 cpu 8 MiB" in " ".join(rows[1])
    assert "hooks" not in text
    assert "notebooks_own" not in text


def test_the_notebooks_own_names_are_not_touched_by_a_release(notebook: Kernel) -> None:
    works(notebook, "mine = big(4)\nalso = {'x': mine}\ndef f(x):\n    y = x\n    raise MemoryError")
    fails(notebook, "f(mine)")
    assert notebook.value("alive()") == 1
    assert notebook.value("mine is also['x'] and float(mine[0]) == 1.0") is True


# -- real allocation failures ---------------------------------------------------------------------------------------


def test_numpys_own_memory_error_says_what_it_asked_for(notebook: Kernel) -> None:
    text = recovers(notebook, "def f():\n    x = big()\n    return np.ones((1 << 25, 1 << 22))\nf()")
    assert "asked for 1.00 PiB" in text
    text = recovers(notebook, "def f():\n    x = big()\n    return np.ones(1 << 44, dtype='f4') + 1\nf()")
    assert "asked for 64.00 TiB" in text


def test_pythons_own_memory_error_recovers(notebook: Kernel) -> None:
    recovers(notebook, "def f():\n    x = big()\n    return bytearray(1 << 60)\nf()")
    recovers(notebook, "def f():\n    x = big()\n    return [0] * (1 << 58)\nf()")


# -- interrupts, and other errors -----------------------------------------------------------------------------------


def test_an_interrupt_in_a_training_loop_gives_the_memory_back(notebook: Kernel) -> None:
    works(
        notebook,
        "import time\ndef train():\n    weights = big(64)\n    while True:\n        batch = big(4); time.sleep(0.01)",
    )
    reply = fails(notebook, "train()", interrupt_after=0.5)
    assert reply.error == "KeyboardInterrupt"
    assert notebook.value("alive()") == 0
    (text,) = reply.reports("recovery")
    assert "interrupted (KeyboardInterrupt)" in text
    assert "weights" in text
    reply = fails(notebook, "time.sleep(60)", interrupt_after=0.3)
    assert reply.reports("recovery") == []


def test_an_interrupt_of_an_async_cell_gives_the_memory_back(notebook: Kernel) -> None:
    works(notebook, "async def train():\n    weights = big(8)\n    while True: await asyncio.sleep(0.01)")
    reply = fails(notebook, "await train()", interrupt_after=0.4)
    assert reply.error in ("KeyboardInterrupt", "CancelledError")
    works(notebook, "pass")
    assert notebook.value("alive()") == 0


FAILING = "def f():\n    secret = big()\n    raise {}\nf()"


@pytest.mark.parametrize(
    ("policy", "oom", "interrupt", "other"),
    [("never", 1, 1, 1), ("oom", 0, 1, 1), ("oom+interrupt", 0, 0, 1), ("always", 0, 0, 0)],
)
def test_the_option_says_after_which_errors_frames_are_released(
    notebook: Kernel, policy: str, oom: int, interrupt: int, other: int
) -> None:
    works(notebook, f"%config IPyGpuMem.release_frames = '{policy}'")
    for error, left in (("MemoryError", oom), ("KeyboardInterrupt", interrupt), ("ValueError", other)):
        works(notebook, "watched.clear(); gc.collect()")
        fails(notebook, FAILING.format(error))
        assert notebook.value("alive()") == left, error
        assert notebook.value("len(watched)") == 1
        works(notebook, "pass")


def test_other_errors_keep_their_frames_until_their_scope_ends(notebook: Kernel) -> None:
    works(notebook, "%experiment start a")
    fails(notebook, FAILING.format("ValueError"))
    works(notebook, "pass")
    assert notebook.value("alive()") == 1
    works(notebook, "%experiment end")
    assert notebook.value("alive()") == 0


def test_an_error_from_before_a_scope_keeps_its_frames_after_it(notebook: Kernel) -> None:
    fails(notebook, FAILING.format("ValueError"))
    works(notebook, "%%experiment a\nx = 1")
    assert notebook.value("alive()") == 1
    assert notebook.value(
        "str([f.f_locals['secret'][0] for f, _ in __import__('traceback').walk_tb(sys.last_traceback)"
        " if 'secret' in f.f_locals])"
    ) in ("[1.0]", "[np.float64(1.0)]")


def test_gpumem_free_gives_back_what_a_kept_traceback_holds(notebook: Kernel) -> None:
    fails(notebook, FAILING.format("ValueError"))
    assert notebook.value("alive()") == 1
    works(notebook, "%gpumem free")
    assert notebook.value("alive()") == 0
    assert "ValueError" in notebook.run("%tb").traceback


def test_an_error_that_was_caught_long_ago_is_nobodys_business(notebook: Kernel) -> None:
    works(notebook, "kept = None\ntry:\n    (lambda x: 1 / 0)(big())\nexcept ZeroDivisionError as e:\n    kept = e")
    fails(notebook, FAILING.format("MemoryError"))
    assert notebook.value("alive()") == 1
    assert notebook.value("float(kept.__traceback__.tb_next.tb_frame.f_locals['x'][0])") == 1.0


def _debug(kernel: Kernel, answers: list[str]) -> str:
    """Run %debug, type ``answers``, and return all that it printed."""
    client = kernel._client
    message = client.execute("%debug", allow_stdin=True)
    text, deadline, answers = "", time.monotonic() + 30, [*answers]
    while time.monotonic() < deadline:
        try:
            asked = client.get_stdin_msg(timeout=0.02)
        except queue.Empty:
            asked = None
        if asked is not None:
            client.input(answers.pop(0) if answers else "q")
        try:
            found = client.get_iopub_msg(timeout=0.02)
        except queue.Empty:
            continue
        if found["parent_header"].get("msg_id") != message:
            continue
        if found["msg_type"] == "stream":
            text += found["content"]["text"]
        if found["msg_type"] == "status" and found["content"]["execution_state"] == "idle":
            break
    else:
        raise TimeoutError(text)
    while client.get_shell_msg(timeout=30)["parent_header"].get("msg_id") != message:
        pass
    return text


def test_debug_reads_the_locals_of_other_errors(notebook: Kernel) -> None:
    fails(notebook, "def f():\n    secret = 'the answer is ' + str(6 * 7)\n    raise ValueError\nf()")
    works(notebook, "unrelated = 1")
    assert "the answer is 42" in _debug(notebook, ["p secret", "q"])
    assert "ValueError" in notebook.run("%tb").traceback


def test_debug_after_an_oom_opens_and_closes_without_the_locals(notebook: Kernel) -> None:
    fails(
        notebook, "def f():\n    secret = 'the answer' + ' is ' + str(6 * 7)\n    x = big()\n    raise MemoryError\nf()"
    )
    text = _debug(notebook, ["p 'still ' + 'here'", "p secret", "q"])
    assert "still here" in text
    assert "the answer is" not in text
    assert notebook.value("alive()") == 0
    works(notebook, "pass")


# -- what the report promises ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["CUDA error: device-side assert triggered", "CUDA error: an illegal memory access was encountered"]
)
def test_a_broken_device_context_is_said_and_no_recovery_promised(notebook: Kernel, text: str) -> None:
    reply = fails(notebook, f"def f():\n    secret = big()\n    raise RuntimeError({text!r})\nf()")
    (shown,) = reply.reports("recovery")
    assert "Restart the kernel" in shown
    reply = fails(notebook, f"raise ValueError('my own words: {text}')")
    assert reply.reports("recovery") == []


def test_a_released_report_says_nothing_of_a_restart(notebook: Kernel) -> None:
    assert "Restart" not in recovers(notebook, OOM["a plain function"])


def test_an_oom_of_a_swallowed_cell_is_not_reported_twice(notebook: Kernel) -> None:
    reply = works(
        notebook,
        "try:\n    def f():\n        x = big()\n        raise MemoryError\n    f()\n"
        "except MemoryError: pass\nimport gc; gc.collect()",
    )
    assert reply.reports("recovery") == []
    assert notebook.value("alive()") == 0


# -- classify: what is an OOM ---------------------------------------------------------------------------------------


def _named(name: str, *bases: type) -> type[BaseException]:
    return type(name, bases or (RuntimeError,), {})


@pytest.mark.parametrize(
    ("error", "requested"),
    [
        (MemoryError(), None),
        (
            _named("OutOfMemoryError")(
                "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139 GiB"
            ),
            int(2.5 * 2**30),
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 1.00 GiB total capacity)"), 20 << 20),
        (RuntimeError("HIP out of memory. Tried to allocate 1.00 GiB"), 1 << 30),
        (RuntimeError("XPU out of memory. Tried to allocate 512.00 MiB"), 512 << 20),
        (
            RuntimeError(
                "MPS backend out of memory (MPS allocated: 8.00 GB). Tried to allocate 2.00 GB on private pool."
            ),
            2 << 30,
        ),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you "
                "tried to "
                "allocate 4398046511104 bytes. Error code 12 (Cannot allocate memory)"
            ),
            1 << 42,
        ),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried "
                "to allocate 800 bytes."
            ),
            800,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), None),
        (RuntimeError("HIPBLAS_STATUS_ALLOC_FAILED"), None),
        (
            _named("AcceleratorError")(
                "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"
            ),
            None,
        ),
        (
            _named("XlaRuntimeError")("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes."),
            1 << 36,
        ),
        (_named("JaxRuntimeError")("RESOURCE_EXHAUSTED: Out of memory allocating 1048576 bytes"), 1 << 20),
        (
            _named("OutOfMemoryError", MemoryError)(
                "Out of memory allocating 8,589,934,592 bytes (allocated so far: 0 bytes)."
            ),
            1 << 33,
        ),
        (_named("CUDARuntimeError")("cudaErrorMemoryAllocation: out of memory"), None),
        (_named("CUBLASError")("CUBLAS_STATUS_ALLOC_FAILED"), None),
        (_named("CUDNNError")("cuDNN Error: CUDNN_STATUS_ALLOC_FAILED"), None),
        (_named("MySpecialError", MemoryError)(), None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_out_of_memory_error_of_any_library_is_known(error: BaseException, requested: int | None) -> None:
    found = classify(error)
    assert (found.kind, found.requested_bytes, found.poisoned) == ("oom", requested, False)
    wrapped = ValueError("training failed")
    wrapped.__context__ = error
    assert classify(wrapped).kind == "oom"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("out of memory is what I write about"),
        KeyError("CUDA out of memory"),
        RuntimeError("shapes do not match"),
        RuntimeError(),
        _named("Memory")("out of luck"),
        OSError(28, "No space left on device"),
        RuntimeError(MemoryError),
        StopIteration(3),
    ],
    ids=repr,
)
def test_other_errors_are_not_taken_for_an_oom(error: BaseException) -> None:
    found = classify(error)
    assert (found.kind, found.requested_bytes, found.poisoned) == ("error", None, False)


@pytest.mark.parametrize("name", ["RuntimeError", "AcceleratorError"])
@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: device-side assert triggered",
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: misaligned address",
        "CUDA error: unspecified launch failure",
        "CUDA error: uncorrectable ECC error encountered",
    ],
)
def test_a_broken_context_is_known_also_behind_another_error(name: str, text: str) -> None:
    error = _named(name)(text) if name != "RuntimeError" else RuntimeError(text)
    assert classify(error).poisoned
    wrapped = ValueError("training failed")
    wrapped.__cause__ = error
    assert classify(wrapped).poisoned
    interrupted = KeyboardInterrupt()
    interrupted.__context__ = error
    assert classify(interrupted).poisoned


def test_a_users_words_about_a_broken_context_are_not_a_broken_context() -> None:
    assert not classify(ValueError("illegal memory access is explained in chapter 3")).poisoned


def test_classifying_runs_no_code_of_the_exceptions_own() -> None:
    def trap(*arguments: object) -> Any:
        raise AssertionError("touched")

    class Meta(type):
        __name__ = property(trap)
        __module__ = property(trap)
        __eq__ = trap
        __hash__ = trap
        __instancecheck__ = trap
        __subclasscheck__ = trap

        def mro(cls) -> list[type]:
            return type.mro(cls)

    body = dict.fromkeys(("__str__", "__repr__", "__eq__", "__hash__", "__bool__", "__len__", "__getattribute__"), trap)
    hostile = Meta("Hostile", (MemoryError,), {**body, "args": property(trap), "__traceback__": property(trap)})
    error = hostile.__new__(hostile, (1 << 20, 4), Meta("Dtype", (), body)())
    assert classify(error).kind == "oom"
