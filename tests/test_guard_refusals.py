"""Errors that the memory guard's limit causes: each report names the guard and how to lift it."""

import errno
import sys
import textwrap
from collections.abc import Callable

import pytest

from benchmarks.harness.kernel import Kernel, Reply
from ipygpumem.extras.guard.refusal import Refusal, refusal_in
from tests.steps import plain, run_cells, run_failing, tidied_kernel

GUARD_ON = "%gpumem guard on --limit 250MiB"
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux limits a process's data"
)
shared_kernel, notebook = tidied_kernel(
    "%gpumem guard off",
    "%reset -f",
    "import sys; sys.setrecursionlimit(3000)",
    hides_libraries=True,
)

REFUSED = {
    "list.append": "while True: x.append('x' * 1000 + str(len(x)))",
    "list.extend": "while True: x.extend(range(10**6))",
    "list *": "y = [0] * 2**30",
    "dict doubling": "y = {}\nwhile True: y[len(y)] = None",
    "set doubling": "y = set()\nwhile True: y.add(len(y))",
    "bytes": "y = bytes(2**31)",
    "bytearray": "y = bytearray()\nwhile True: y += b'1' * 2**20",
    "bytes.join": "y = b''.join([b'1' * 2**20] * 1000)",
    "text +": "y = 'ab' * 2**20\nwhile True: y = y + y",
    "str.join": "y = ['abc' * 2**20]\nwhile True: y.append(''.join(y))",
    "repr": "y = repr([list(range(1000))] * 50_000)",
    "format": "y = f'{1:>{2**31}}'",
    "numpy": "import numpy\ny = numpy.ones(2**28)",
    "numpy loop": "import numpy\nwhile True: x.append(numpy.ones(2**16))",
    "json.dumps": "import json\ny = json.dumps([list(range(1000))] * 50_000)",
    "pickle.dumps": "import pickle\ny = [pickle.dumps(bytes(2**26)) for _ in range(9)]",
    "sorted": "y = [sorted(range(2 * 10**6)) for _ in range(9)]",
    "copy.deepcopy": "import copy\ny = [[n] for n in range(10**5)]\nwhile True: x.append(copy.deepcopy(y))",  # noqa: E501
    "mmap": "import mmap\ny = mmap.mmap(-1, 2**32, flags=mmap.MAP_PRIVATE)",
    "list of a generator": "y = list(n * n for n in range(10**9))",
    "int power": "y = (2**(2**30))**32",
    "int shift": "y = 1 << 2**33",
    "array.array": "import array\ny = array.array('d', [0.0])\nwhile True: y.extend(y)",
    "BytesIO": "import io\ny = io.BytesIO()\nwhile True: y.write(b'1' * 2**20)",
    "StringIO": "import io\ny = io.StringIO()\nwhile True: y.write('1' * 2**20)",
    "zlib": "import zlib\nz = zlib.compress(bytes(2**27))\ny = [zlib.decompress(z) for _ in range(9)]",  # noqa: E501
    "re": "import re\ny = re.sub('a', 'b' * 20, 'ab' * 2**24)",
    "retry": textwrap.dedent(
        """\
        for n in range(3):
            try: y = bytes(2**31)
            except MemoryError:
                if n == 2: raise"""
    ),
    "cause": (
        "try: y = bytes(2**31)\nexcept MemoryError as error: raise ValueError('too large') from "
        "error"
    ),
    "context": "try: y = bytes(2**31)\nexcept MemoryError: raise RuntimeError('too large')",
    "pool": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(2) as pool: pool.submit(bytes, 2**31).result()
""",
}
"""Kinds of requests that 250 MiB refuse → cells."""

RAISED = {
    "without text": "raise MemoryError",
    "with text": "raise MemoryError('mine')",
    "after a refusal": "try: y = bytes(2**31)\nexcept MemoryError: pass\nraise MemoryError('mine')",
    "another error": "try: y = bytes(2**31)\nexcept MemoryError: pass\n1 / 0",
    "larger than all memory": "import numpy\ny = numpy.ones(2**45)",
}
"""Errors that would come without the guard, too → cells."""


SAMPLE = ("list.append", "dict doubling", "repr", "mmap", "zlib", "retry", "context")
"""Kinds that ``make test`` runs."""
KINDS = [
    kind if kind in SAMPLE else pytest.param(kind, marks=pytest.mark.thorough) for kind in REFUSED
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_refused_request_is_explained(kind: str, notebook: Kernel) -> None:
    run_cells(notebook, f"{GUARD_ON}\nheld, x = bytearray(b'1') * 20 * 2**20, []")
    (report,) = run_failing(notebook, REFUSED[kind], timeout=60).reports("guard")
    assert "the memory guard " in report
    assert "held" in report
    assert "%gpumem guard off" in report


@pytest.mark.parametrize("kind", RAISED)
def test_other_errors_are_not_blamed_on_the_guard(kind: str, notebook: Kernel) -> None:
    run_cells(notebook, GUARD_ON)
    assert "memory guard" not in "".join(run_failing(notebook, RAISED[kind]).reports())


RECURSIONS = {
    "function": """
import sys
def f(n):
    local, numbers = Local(), bytearray(2**18)
    return f(n + 1) + len(numbers)
f(0)
""",
    "key of sorted": """
def f(n):
    local, numbers = Local(), list(range(50_000))
    return sorted([1], key=lambda _: f(n + 1)) + numbers
f(0)
""",
    "functools.reduce": """
import functools
def f(n):
    local, numbers = Local(), bytearray(2**18)
    return functools.reduce(lambda a, b: f(n + 1), numbers)
f(0)
""",
    "generator": """
def f(n):
    local, numbers = Local(), bytearray(2**18)
    yield from f(n + 1)
list(f(0))
""",
}


def _recursion(kernel: Kernel, code: str) -> Reply:
    """Return the reply to a deep recursion.

    On a busy machine it may be a frame that is refused. Then 3.11 calls another function than the
    code names, also in IPython and in the extension, and may crash: nothing is asked of it.
    """
    if sys.version_info[:2] != (3, 11):
        return run_failing(kernel, code, timeout=120)
    try:
        reply = kernel.run(code, timeout=120)
        while kernel.run("", silent=True, timeout=60).status == "aborted":
            pass
    except (RuntimeError, TimeoutError):  # it died, or its event loop creates no tasks any longer
        pytest.xfail("CPython 3.11 broke the kernel, because memory for a frame was refused")
    if "is not affected" in reply.stderr or reply.error == "TypeError":
        pytest.xfail("CPython 3.11 called another object, because memory for a frame was refused")
    return reply


@pytest.mark.parametrize("kind", RECURSIONS)
def test_a_deep_recursion_is_cut_and_freed(kind: str, notebook: Kernel) -> None:
    """CPython 3.11 to 3.13 raise a SystemError where memory for the next frame is refused.

    After that, 3.11 may call another function than the code names. So most of the memory goes to
    the locals here, of which one is refused before a frame is.
    """
    prepare = """
import sys, weakref
sys.setrecursionlimit(10**5)
alive = weakref.WeakSet()
class Local:
    def __init__(self): alive.add(self)
"""
    run_cells(notebook, prepare, GUARD_ON)
    reply = _recursion(notebook, RECURSIONS[kind])
    assert reply.error in ("MemoryError", "MemoryGuardError", "SystemError", "RecursionError")
    assert (
        1
        < plain(reply.traceback).count("ipykernel_") + plain(reply.traceback).count("Cell In")
        <= 52
    )
    if reply.error != "RecursionError":  # 3.12 allows fewer calls from C
        assert len(reply.reports("guard")) == 1
        # a generator's frame that was never run to its end
        assert notebook.value("len(alive)") <= 1
    stored = (
        "max([0, *map(len, map(str, getattr(get_ipython().history_manager, 'exceptions', "
        "{}).values()))])"
    )
    assert notebook.value(stored) < 100_000, "IPython has formatted few of the frames"


def caught(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("no error")


def test_a_refusal_is_told_from_an_error_that_python_code_raises() -> None:
    def mine() -> None:
        raise MemoryError

    def again() -> None:
        try:
            bytes(2**62)
        except MemoryError as error:
            raise error

    def as_system() -> None:
        raise OSError(errno.ENOMEM, "no memory")

    # Python itself is refused memory.
    assert refusal_in(caught(lambda: bytes(2**62))) == Refusal("refused")
    assert refusal_in(caught(again)) == Refusal("refused")

    # No memory was refused: code raises the error itself.
    for function in mine, as_system, lambda: 1 // 0:
        assert refusal_in(caught(function)) is None

    # Errors whose text decides.
    assert refusal_in(SystemError("error return without exception set")) == Refusal("internal")
    assert refusal_in(SystemError("bad argument to internal function")) is None
    assert refusal_in(RuntimeError("can't start new thread")) == Refusal("system")
