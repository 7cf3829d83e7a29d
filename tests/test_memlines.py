"""``%%memlines`` in a real kernel."""

from __future__ import annotations

import re

import pytest

from ipygpumem.units import parse_bytes
from tests.kernel import Kernel, Reply
from tests.steps import kernel_with, ok

MIB = 1 << 20
_SETUP = """\
%load_ext ipygpumem
import asyncio, mmap, sys, time
def block(mib):
    data = mmap.mmap(-1, mib << 20)  # the allocator keeps no pages of it
    for page in range(0, mib << 20, 4096):
        data[page] = 1
    return data
"""
_FUNCTIONS = """\
def work(mib):
    first = block(mib)
    second = block(mib)
    del second
    return first
class Model:
    def forward(self):
        return block(8)
async def slow():
    kept = block(16)
    await asyncio.sleep(0.01)
    return kept
"""


shared = kernel_with(_SETUP, _FUNCTIONS)
"""Each of the tests below leaves it as it found it."""


def sizes(reply: Reply) -> dict[str, tuple[int, int]]:
    (report,) = reply.reports("memlines")
    found, block, head = {}, "", ""
    for line in report.splitlines()[1:]:
        if not line.startswith(" "):
            break  # the next report
        if "RAM kept" in line:
            head = line
        elif len(line.split()) == 1 and "─" not in line:
            block = line.strip()
        elif head and line[: head.index("time")].split()[1:2]:
            middle = head.index("RAM kept") + len("RAM kept")
            kept, peak = line[head.index("time") + 4 : middle], line[middle : head.index("   source")]
            found[f"{block}:{line.split()[0]}"] = (_mib(kept), _mib(peak))
    return found


def _mib(text: str) -> int:
    words = text.replace("+", "").split()
    if len(words) == 1:
        return int(words[0])
    sign = -1 if words[0].startswith("-") else 1
    return round(sign * parse_bytes(f"{words[0].lstrip('-')} {words[1]}") / MIB)


def test_a_cell_and_a_function_of_the_notebook_line_by_line(shared: Kernel) -> None:
    reply = ok(shared, "%%memlines -f work\nkept = work(32)\n1 + 1")
    assert reply.result == "2"
    assert sizes(reply) == {
        "cell:2": (32, 64),
        "cell:3": (0, 0),
        "work:2": (32, 32),
        "work:3": (32, 32),
        "work:4": (-32, 0),
        "work:5": (0, 0),
    }
    assert "del second" in reply.reports("memlines")[0]
    ok(shared, "del kept")


def test_methods_and_async_functions_and_await_at_the_top(shared: Kernel) -> None:
    reply = ok(shared, "%%memlines -f Model.forward -f slow\nModel().forward(); gone = await slow()\nlen(gone) >> 20")
    assert reply.result == "16"
    found = sizes(reply)
    assert found["Model.forward:8"] == (8, 8)
    assert found["slow:10"] == (16, 16)
    assert not any(name.endswith(":0") for name in found)
    ok(shared, "del gone")


def test_functions_that_the_cell_defines_or_imports_are_followed(shared: Kernel) -> None:
    cell = "%%memlines -f own Local.method dedent\nfrom textwrap import dedent\ndef own():\n    return b'x' * (8 << 20)"
    cell += "\nclass Local:\n    def method(self):\n        return own()\nkept = Local().method(), dedent('text')"
    for _ in range(2):  # the second time the names have values of the first
        reply = ok(shared, cell)
        found = sizes(reply)
        assert found["cell:4"] == found["cell:7"] == (8, 8)
        assert "\n  dedent\n" in reply.reports("memlines")[0]
        assert not any(name.startswith(("own:", "Local")) for name in found)
        ok(shared, "del kept")
    ok(shared, "del own, Local, dedent")


def test_pages_that_the_heap_has_kept_are_counted_when_they_are_used_again(shared: Kernel) -> None:
    # Seen: once glibc has freed a block of that size, the next ones come from its heap, and were shown as 0.
    ok(shared, "import numpy as np\ndef make():\n    held = np.ones(2**21)\n    del held\n    return 1")
    ok(shared, "for _ in range(4): make()")
    for _ in range(2):
        reply = ok(shared, "%%memlines -f make\nmake()\nmake()\nmake()")
        assert sizes(reply) == {
            **dict.fromkeys(("cell:2", "cell:3", "cell:4"), (0, 16)),
            "make:3": (48, 16),
            "make:4": (-48, 0),
            "make:5": (0, 0),
        }


def test_a_cell_that_sets_another_trace_function_is_said_so(shared: Kernel) -> None:
    reply = ok(shared, "%%memlines\nx = 1\nsys.settrace(lambda *_: None)\ny = 2")
    (report,) = reply.reports("memlines")
    assert "measuring stopped early: the code has set another trace function (sys.settrace)" in report
    assert shared.value("(sys.gettrace() is None, y)") == (False, 2)
    ok(shared, "sys.settrace(None)")
    assert "stopped early" not in ok(shared, "%%memlines\nx = 1").reports("memlines")[0]


def test_an_error_is_shown_as_ever_with_the_table_up_to_there(shared: Kernel) -> None:
    reply = shared.run("%%memlines -f work\nkept = work(16)\n1/0\nnever = 1")
    assert reply.error == "ZeroDivisionError"
    assert re.search(r"-> 3\b", re.sub(r"\x1b\[[\d;]*m", "", reply.traceback))
    assert set(sizes(reply)) == {"cell:2", "cell:3", "work:2", "work:3", "work:4", "work:5"}
    assert "never = 1" in reply.reports("memlines")[0]
    ok(shared, "del kept")


def test_an_interrupt_ends_it_with_the_table_and_nothing_stays_behind(shared: Kernel) -> None:
    ok(shared, "from tests.waiting import announce")
    reply = shared.run("%%memlines\ntime.sleep(0.01)\nannounce()", interrupt_when="waits here")
    assert reply.error == "KeyboardInterrupt"
    assert set(sizes(reply)) == {"cell:2", "cell:3"}
    assert shared.value("sys.gettrace()") is None


def test_it_stands_in_an_experiment_and_an_experiment_in_it(shared: Kernel) -> None:
    for first, second in (("%%experiment one", "%%memlines"), ("%%memlines", "%%experiment one")):
        reply = ok(shared, f"{first}\n{second}\nlocal = block(8)\nlen(local) >> 20")
        assert reply.result == "8"
        assert len(reply.reports("experiment")) == 1
        assert sizes(reply)["cell:3"] == (8, 8)
        assert shared.value("'local' in globals()") is False


def test_above_an_autofit_it_follows_the_tries_and_below_it_says_so(shared: Kernel) -> None:
    reply = ok(shared, "%%memlines\n%%autofit size=8\nheld = block(size)")
    assert sizes(reply)["cell:3"] == (8, 8)
    reply = shared.run("%%autofit size=8\n%%memlines\nheld = block(size)")
    assert "write it above %%autofit" in reply.stderr
    ok(shared, "del held")


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("%memlines", "write %%memlines as the first line"),
        ("%%memlines -f nosuch\n1", "there is no 'nosuch' here"),
        ("%%memlines -f Model\n1", "'Model' is a type, not a function"),
        ("%%memlines -f sys.getsizeof\n1", "no lines of Python"),
        ("%%memlines -f '1 + 1'\n1", "'1 + 1' is not a name"),
    ],
)
def test_a_wrong_line_is_said_in_one_line_and_nothing_runs(shared: Kernel, line: str, part: str) -> None:
    reply = shared.run(line)
    assert reply.stderr.count("\n") == 1, reply.stderr
    assert part in reply.stderr
    assert reply.result is None
    assert shared.value("sys.gettrace()") is None
