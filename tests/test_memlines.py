"""Cost of lines and statements: exact with a fake probe, and both magics in real kernels."""

import asyncio
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from benchmarks.harness.kernel import Kernel, Reply
from ipygpumem.extras.lines.lines import (
    MOST_RUNS,
    CodeBlock,
    LineCost,
    LinesRecord,
    Tracer,
    code_of,
)
from ipygpumem.extras.lines.memlines import lines_report
from ipygpumem.extras.lines.statements import Statement, measure
from ipygpumem.meter.meter import Meter
from ipygpumem.report import text
from ipygpumem.units import MIB, parse_bytes
from tests.fakes import FakeProbe, fake_module
from tests.steps import kernel_with, plain, run_quietly

pytestmark = pytest.mark.usefixtures("others_out_of_sight")


class Lab:
    """Follows functions of the test while a fake probe tells their memory."""

    def __init__(self, *functions: Any) -> None:
        self.probe = FakeProbe()
        self.meter = Meter([self.probe])
        self.tracer = Tracer(self.meter, "<no cell>", CodeBlock("cell", 1, ()))
        self.record = self.tracer.record
        for function in functions:
            self.tracer.add(function.__name__, code_of(function))  # type: ignore[arg-type]

    def now(self) -> int:
        return self.probe.read()[0].current_bytes

    def add(self, size: int) -> None:
        self.probe.set(self.now() + size)

    def spike(self, size: int) -> None:
        self.probe.spike(self.now() + size)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.tracer.start()
        try:
            yield
        finally:
            self.tracer.finish()
            self.meter.close()

    def figures(self, line: int, block: int = 1) -> tuple[int, int, int]:
        """Hits, kept and peak of a line, counted from the first one of its block."""
        cost = self.record.costs.get(
            (block, self.record.blocks[block].first_line + line), LineCost()
        )
        return cost.hits, cost.kept_bytes.get("cpu", 0), cost.peak_bytes.get("cpu", 0)


@pytest.fixture(autouse=True)
def _no_trace_function_is_left() -> Iterator[None]:
    before = sys.gettrace()
    yield
    assert sys.gettrace() is before


def test_each_line_has_its_own_kept_and_peak() -> None:
    def work() -> None:
        lab.add(10)
        lab.spike(70)
        lab.add(-4)

    lab = Lab(work)
    with lab.watching():
        work()
    assert [lab.figures(line) for line in range(4)] == [
        (0, 0, 0),
        (1, 10, 10),
        (1, 0, 70),
        (1, -4, 0),
    ]


def test_a_recursion_counts_its_memory_once() -> None:
    def work(depth: int) -> None:
        lab.add(10)
        if depth:
            work(depth - 1)

    lab = Lab(work)
    with lab.watching():
        work(3)
    assert lab.figures(1) == (4, 40, 10)
    assert lab.figures(3) == (3, 30, 30)


def test_a_generator_is_charged_for_its_own_lines_only() -> None:
    def produce() -> Iterator[int]:
        lab.add(10)
        yield 1
        lab.add(20)
        yield 2

    lab = Lab(produce)
    with lab.watching():
        for _ in produce():
            lab.add(1000)
    assert [lab.figures(line)[1:] for line in (1, 2, 3, 4)] == [(10, 10), (0, 0), (20, 20), (0, 0)]


def test_a_line_that_awaits_has_the_peak_of_all_its_pieces() -> None:
    async def grow() -> None:
        for _ in range(3):
            lab.add(100)
            await asyncio.sleep(0)

    async def work() -> None:
        await grow()
        lab.add(-300)
        await grow()

    async def other() -> None:
        for _ in range(3):
            lab.add(500)
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(work(), other())

    lab = Lab(work)
    with lab.watching():
        asyncio.run(both())
    # What each line of `work` kept, and its peak, without what `other` adds between its pieces.
    assert [lab.figures(line)[1:] for line in (1, 2, 3)] == [(300, 300), (-300, 0), (300, 300)]


def test_another_tools_trace_function_is_paused_and_restored() -> None:
    def theirs(*_: Any) -> None: ...

    def work() -> None:
        lab.add(1)

    lab = Lab(work)
    before = sys.gettrace()
    sys.settrace(theirs)
    try:
        with lab.watching():
            work()
        assert sys.gettrace() is theirs
    finally:
        sys.settrace(before)
    assert lab.figures(1) == (1, 1, 1)


def test_our_own_failure_stops_the_watching_and_not_the_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work() -> int:
        lab.add(1)
        return 5

    def fail(*_: Any) -> None:
        raise OSError("gone")

    lab = Lab(work)
    monkeypatch.setattr(lab.tracer, "_next_line", fail)
    with lab.watching():
        assert work() == 5
    assert lab.record.error == "OSError: gone"


def test_the_heap_is_trimmed_before_readings_if_that_is_cheap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work() -> None:
        held = 1
        assert held

    clock = [0.0]
    took = [0.0]
    trimmed = [0]

    def trim() -> None:
        trimmed[0] += 1
        clock[0] += took[0]

    monkeypatch.setattr("ipygpumem.reclaim.emptying.trim_host_heap", trim)
    monkeypatch.setattr("ipygpumem.extras.lines.lines.time.perf_counter", lambda: clock[0])

    # A trim that takes no time comes before each of 3 readings, one of ten seconds only once.
    for seconds, times, untrimmed in ((0.0, 3, 0), (10.0, 1, 2)):
        lab, took[0], trimmed[0] = Lab(work), seconds, 0
        with lab.watching():
            work()
            before_the_end = trimmed[0]
        assert (before_the_end, lab.record.untrimmed - (seconds > 0)) == (times, untrimmed)


def numbers_as_text(times: int) -> list[str]:
    return [str(number) for number in range(times)]


def sum_of_pieces(times: int) -> int:
    return sum(
        len(str(number))
        for number in range(times)
    )  # fmt: skip


def loop_of_two_lines(times: int) -> int:
    total = 0
    for number in range(times):
        total += len(piece(number))
    return total


def piece(number: int) -> str:
    digits = len(str(number))
    return "1" * digits


@pytest.mark.parametrize(
    "functions",
    [(numbers_as_text,), (sum_of_pieces,), (loop_of_two_lines,), (loop_of_two_lines, piece)],
)
def test_a_line_that_runs_often_is_measured_as_one(
    functions: tuple[Callable[[int], object], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = [0]

    def trim() -> None:
        readings[0] += 1

    monkeypatch.setattr("ipygpumem.reclaim.emptying.trim_host_heap", trim)
    readings_by_times = list[int]()

    # The number of readings does not depend on the number of runs.
    for times in (5_000, 20_000):
        lab, readings[0] = Lab(*functions), 0
        with lab.watching():
            functions[0](times)
        readings_by_times.append(readings[0])
        assert not lab.record.error
        assert max(cost.hits for cost in lab.record.costs.values()) >= times
        assert lab.record.measured_together
    few, many = readings_by_times
    # A few readings for each run that is measured alone.
    assert few == many < 6 * MOST_RUNS


def test_runs_measured_as_one_keep_their_memory_and_peak() -> None:
    def work() -> None:
        for number in range(3 * MOST_RUNS):
            lab.add(1)
            if number == 2 * MOST_RUNS:
                lab.spike(70_000)
        lab.add(10)

    lab = Lab(work)
    with lab.watching():
        work()

    # Totals of all lines.
    kept = [cost.kept_bytes.get("cpu", 0) for cost in lab.record.costs.values()]
    peaks = [cost.peak_bytes.get("cpu", 0) for cost in lab.record.costs.values()]
    assert sum(kept) == 3 * MOST_RUNS + 10
    assert max(peaks) >= 70_000

    # The figures of single lines.
    assert lab.figures(5) == (1, 10, 10)
    assert lab.figures(2)[0] == 3 * MOST_RUNS
    notes = "\n".join(lines_report(lab.record, "line").lines)
    assert f"after the first {MOST_RUNS:,} was not measured alone" in notes


def test_long_lines_are_measured_however_often_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("ipygpumem.reclaim.emptying.trim_host_heap", lambda: None)
    monkeypatch.setattr("ipygpumem.extras.lines.lines.time.perf_counter", lambda: clock[0])

    def work() -> None:
        for _ in range(2 * MOST_RUNS):
            clock[0] += 0.01
            lab.add(1)

    lab = Lab(work)
    with lab.watching():
        work()
    assert lab.figures(3)[1] + lab.figures(2)[1] == 2 * MOST_RUNS
    cost = lab.record.costs[1, lab.record.blocks[1].first_line + 2]
    assert cost.seconds == pytest.approx(0.01 * 2 * MOST_RUNS)


def record(*, own_seconds: float = 0.1) -> LinesRecord:
    source = ("def work():", "\tx = big()", "    y = 1", "    return x")
    first = LineCost(1, 0.5, {"cpu": 100 << 20, "cuda:0": 0}, {"cpu": 300 << 20, "cuda:0": 0})
    costs = {(1, 2): first, (1, 3): LineCost(2, 0.0001, {"cpu": 0}, {"cpu": 4096})}
    return LinesRecord(
        [CodeBlock("cell", 1, ("work()",)), CodeBlock("work", 1, source)], costs, 1.0, own_seconds
    )


def test_the_table_shows_the_source_with_figures_where_lines_ran() -> None:
    lines = text.render([lines_report(record(), "line")]).splitlines()
    assert lines[0] == "memlines · 2 lines ran · 1.00 s, of which measuring took 100 ms"
    assert lines[1].strip() == "work"
    assert lines[4].split() == ["1", "def", "work():"]
    assert lines[5].split() == [
        "2",
        "1",
        "500",
        "ms",
        "+100",
        "MiB",
        "+300",
        "MiB",
        "x",
        "=",
        "big()",
    ]
    # The source keeps its indentation.
    assert lines[5].index("x = big()") - lines[4].index("def") == 4
    assert lines[-1].strip() == "cell did not run"


@pytest.mark.parametrize(
    ("order", "first"), [("peak", "2"), ("kept", "2"), ("time", "2"), ("hits", "3")]
)
def test_a_sorted_table_has_only_lines_that_ran_largest_first(order: str, first: str) -> None:
    lines = text.render([lines_report(record(), order)]).splitlines()
    assert [line.split()[0] for line in lines[4:6]] == [first, {"2": "3", "3": "2"}[first]]
    assert len(lines) == 7


def statement(source: str) -> Statement:
    return Statement(source, compile(source, "<test>", "exec"))


def costs_of(
    *sources: str, probe: FakeProbe, setup: str = "", **names: Any
) -> tuple[list[Any], Any]:
    meter = Meter([probe])
    code = compile(setup, "<setup>", "exec") if setup else None
    try:
        names["probe"] = probe
        return measure(
            meter, [statement(source) for source in sources], names, setup=code, repeats=3
        )
    finally:
        meter.close()


def test_each_run_has_its_own_kept_memory_and_peak() -> None:
    probe = FakeProbe()
    probe.set(1000)
    sources = (
        "probe.set(probe.read()[0].current_bytes + 10)",
        "probe.spike(probe.read()[0].current_bytes + 70)",
    )
    (keeps, spikes), nothing = costs_of(*sources, probe=probe)
    figures = [
        {(usage.delta_bytes, usage.peak_delta_bytes) for usage in cost.usages("cpu")}
        for cost in (keeps, spikes, nothing)
    ]
    assert figures == [{(10, 10)}, {(0, 70)}, {(0, 0)}]


def test_names_of_a_statement_are_seen_by_functions_then_deleted() -> None:
    seen: list[int] = []
    names = {"x": 1, "seen": seen}
    code = "x += 1; y = x; seen.append((lambda: [y for _ in '1'])()[0])"
    costs_of(code, "seen.append(9)", probe=FakeProbe(), **names)
    assert seen == [2, 9] * 4  # in turns, once to warm up
    assert names["x"] == 1


def test_a_statement_has_figures_even_if_a_device_fails_to_sync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def synchronize(*_: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setitem(
        sys.modules, "torch", fake_module(cuda=SimpleNamespace(synchronize=synchronize))
    )
    probe = FakeProbe("cuda:0")
    read = probe.read
    monkeypatch.setattr(
        probe, "read", lambda **how: tuple(item._replace(reserved_bytes=1) for item in read(**how))
    )
    (cost,), _ = costs_of("x = 1", probe=probe)
    assert len(cost.runs) == 3


def test_setup_runs_before_every_run_and_is_not_measured() -> None:
    probe = FakeProbe()
    (cost,), _ = costs_of("probe.set(60)", probe=probe, setup="probe.set(500); probe.set(50)")
    assert {usage.peak_delta_bytes for usage in cost.usages("cpu")} == {10}


def test_an_error_in_a_statement_is_raised_and_ends_its_span() -> None:
    meter = Meter([FakeProbe()])
    with pytest.raises(ZeroDivisionError):
        measure(meter, [statement("1/0")], {}, setup=None, repeats=1)
    assert len(meter._open) == 0
    meter.close()


shared = kernel_with("%load_ext ipygpumem\nimport numpy\nblock = numpy.ones(8 << 20)")


def rows(kernel: Kernel, cell: str) -> list[str]:
    reply = kernel.run(cell)
    assert reply.status == "ok", (reply.traceback, reply.stderr)
    (report,) = reply.reports("gpumemit")
    return report.splitlines()[3:-1]


def test_a_copy_costs_its_size_and_work_in_place_costs_nothing(shared: Kernel) -> None:
    copy, in_place = rows(
        shared, "%%gpumemit -r 3\nnumpy.maximum(block, 0)\nnumpy.maximum(block, 0, out=block)"
    )
    assert copy.split()[:2] == ["numpy.maximum(block,", "0)"]
    peak = re.findall(r"\+([\d.]+) (\w+)", copy)[-1]  # it may keep +0
    assert peak[1] == "MiB"
    assert float(peak[0]) == pytest.approx(64, abs=1)  # the kernel counts pages in batches
    assert "MiB" not in in_place


def test_a_statement_costs_the_same_when_the_heap_has_free_pages(shared: Kernel) -> None:
    run_quietly(
        shared,
        """
        import numpy as np
        junk = [np.ones(number % 4000 + 20) for number in range(6000)]
        still_alive = junk[::3]
        del junk
        """,
    )
    for _ in range(4):
        (report,) = run_quietly(shared, "%gpumemit -r 2 np.ones(2**20)").reports("gpumemit")
        # What is kept is noise of a few KiB.
        peak = re.search(r"np\.ones\(2\*\*20\) +RAM +\S+(?: KiB)? +\+([\d.]+ MiB)", report)
        assert peak is not None, report
        # the kernel's count may be behind by 256 KiB for each thread
        assert parse_bytes(peak[1]) == pytest.approx(8 * MIB, abs=MIB)
    run_quietly(shared, "del still_alive")


def test_lines_of_a_cell_are_statements_and_a_block_is_one(shared: Kernel) -> None:
    for rule, first in (("", "first = 1; first"), ("---\n", "first = 1 ⏎ first")):
        text = first.replace(" ⏎ ", "\n")
        statements = rows(
            shared, f"%%gpumemit -r 1 -s 'left = [1]'\n{text}\n{rule}for _ in range(2):\n    pass\n"
        )
        assert [row.split("RAM")[0].strip() for row in statements] == [
            first,
            "for _ in range(2): ⏎ pass",
        ]


def test_a_line_separator_in_a_text_ends_no_line(shared: Kernel) -> None:
    shown = rows(shared, "%%gpumemit -r 1\nfirst = 'a\u2028b\x0c'\nsecond = 2")
    assert [row.split("RAM")[0].strip().partition(" ")[0] for row in shown] == ["first", "second"]


def test_braces_are_pythons_and_no_variable_of_ipythons(shared: Kernel) -> None:
    """IPython would put a value's text where ``{name}`` stands: another statement, and a ``repr``
    of the user's.
    """
    for line in ("%gpumemit -r 1 {1}", "%%gpumemit -r 1 -s 'x = {1}'\n{1}"):
        (row,) = rows(shared, line)
        assert row.strip().startswith("{1}")


def test_a_traceback_of_memlines_has_only_the_users_frames(shared: Kernel) -> None:
    reply = shared.run("def fail(x): return 1 / x\n%gpumemit fail(0)")
    assert not re.findall(r"ipygpumem/(?:notebook|extras)", plain(reply.traceback))
    # Before version 9 IPython shows frames of its own, too.
    shown = re.findall(r"^-+> *\d+ (.*)", plain(reply.traceback), re.MULTILINE)
    assert shown[-2:] == ["fail(0)", "def fail(x): return 1 / x"]


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


notebook = kernel_with(_SETUP, _FUNCTIONS)
"""Each of the tests below leaves it as it found it."""


def line_sizes(reply: Reply) -> dict[str, tuple[int, int]]:
    (report,) = reply.reports("memlines")
    sizes_by_line = {}
    block = "cell"  # without a title if it is alone
    head = ""
    for line in report.splitlines()[1:]:
        if not line.startswith(" "):
            break  # the next report
        if "RAM kept" in line:
            head = line
        elif len(line.split()) == 1 and "─" not in line:
            block = line.strip()
        elif head and line[: head.index("time")].split()[1:2]:
            middle = head.index("RAM kept") + len("RAM kept")
            kept = line[head.index("time") + 4 : middle]
            peak = line[middle : head.index("   source")]
            sizes_by_line[f"{block}:{line.split()[0]}"] = (_mib(kept), _mib(peak))
    return sizes_by_line


def _mib(text: str) -> int:
    words = text.replace("+", "").split()
    if len(words) == 1:
        return int(words[0])
    sign = -1 if words[0].startswith("-") else 1
    return round(sign * parse_bytes(f"{words[0].lstrip('-')} {words[1]}") / MIB)


def test_a_cell_and_a_function_of_the_notebook_line_by_line(notebook: Kernel) -> None:
    reply = run_quietly(
        notebook,
        """\
%%memlines -f work
kept = work(32)
1 + 1
""",
    )
    assert reply.result == "2"
    cell, work = {"cell:2": (32, 64), "cell:3": (0, 0)}, {"work:2": (32, 32), "work:3": (32, 32)}
    assert line_sizes(reply) == {**cell, **work, "work:4": (-32, 0), "work:5": (0, 0)}
    assert "del second" in reply.reports("memlines")[0]
    run_quietly(notebook, "del kept")


def test_lines_are_numbered_as_python_does(notebook: Kernel) -> None:
    reply = run_quietly(notebook, "%%memlines\ntext = 'a\u2028b\x0c'\nkept = bytearray(32 << 20)\n")
    assert line_sizes(reply)["cell:3"] == (32, 32)
    (report,) = reply.reports("memlines")
    assert re.search(r"^\s*3 .*kept = bytearray", report, re.MULTILINE)
    run_quietly(notebook, "del kept, text")


def test_methods_and_async_functions_and_await_at_the_top(notebook: Kernel) -> None:
    reply = run_quietly(
        notebook,
        """\
%%memlines -f Model.forward -f slow
Model().forward(); gone = await slow()
len(gone) >> 20
""",
    )
    assert reply.result == "16"
    sizes_by_line = line_sizes(reply)
    assert sizes_by_line["Model.forward:8"] == (8, 8)
    assert sizes_by_line["slow:10"] == (16, 16)
    assert not any(name.endswith(":0") for name in sizes_by_line)
    run_quietly(notebook, "del gone")


def test_functions_that_the_cell_defines_are_followed(notebook: Kernel) -> None:
    run_quietly(notebook, "from textwrap import dedent")
    cell = textwrap.dedent(
        """\
        %%memlines -f own Local.method dedent
        pass
        def own():
            return b'x' * (8 << 20)"""
    )
    cell += (
        "\nclass Local:\n    def method(self):\n        return own()\nkept = Local().method(), "
        "dedent('text')"
    )
    for _ in range(2):  # the second time the names have values of the first
        reply = run_quietly(notebook, cell)
        sizes_by_line = line_sizes(reply)
        assert sizes_by_line["cell:4"] == sizes_by_line["cell:7"] == (8, 8)
        assert "\n  dedent\n" in reply.reports("memlines")[0]
        assert not any(name.startswith(("own:", "Local")) for name in sizes_by_line)
        run_quietly(notebook, "del kept")
    run_quietly(notebook, "del own, Local, dedent")


def test_reused_heap_pages_are_counted(notebook: Kernel) -> None:
    # Seen: once glibc has freed a block of that size, the next ones come from its heap, and were
    # shown as 0.
    run_quietly(
        notebook,
        """
        import numpy as np
        def make():
            held = np.ones(2**21)
            del held
            return 1
        """,
    )
    run_quietly(notebook, "for _ in range(4): make()")
    for _ in range(2):
        reply = run_quietly(
            notebook,
            """\
%%memlines -f make
make()
make()
make()
""",
        )
        cells = dict.fromkeys(("cell:2", "cell:3", "cell:4"), (0, 16))
        assert line_sizes(reply) == {
            **cells,
            "make:3": (48, 16),
            "make:4": (-48, 0),
            "make:5": (0, 0),
        }


def test_a_cell_that_sets_a_trace_function_is_reported(notebook: Kernel) -> None:
    reply = run_quietly(
        notebook,
        """\
%%memlines
x = 1
sys.settrace(lambda *_: None)
y = 2
""",
    )
    (report,) = reply.reports("memlines")
    assert (
        "measuring stopped early: the code has set another trace function (sys.settrace)" in report
    )
    assert notebook.value("(sys.gettrace() is None, y)") == (False, 2)
    run_quietly(notebook, "sys.settrace(None)")
    assert "stopped early" not in run_quietly(notebook, "%%memlines\nx = 1").reports("memlines")[0]


def test_an_error_is_shown_as_ever_with_the_table_up_to_there(notebook: Kernel) -> None:
    reply = notebook.run("""\
%%memlines -f work
kept = work(16)
1/0
never = 1
""")
    assert reply.error == "ZeroDivisionError"
    assert re.search(r"-> 3\b", plain(reply.traceback))
    assert set(line_sizes(reply)) == {"cell:2", "cell:3", "work:2", "work:3", "work:4", "work:5"}
    assert "never = 1" in reply.reports("memlines")[0]
    run_quietly(notebook, "del kept")


def test_an_interrupt_ends_memlines_with_its_table(notebook: Kernel) -> None:
    run_quietly(notebook, "from tests.waiting import announce")
    reply = notebook.run(
        """\
%%memlines
time.sleep(0.01)
announce()
""",
        interrupt_when="waits here",
    )
    assert reply.error == "KeyboardInterrupt"
    assert set(line_sizes(reply)) == {"cell:2", "cell:3"}
    assert notebook.value("sys.gettrace()") is None


def test_an_interrupt_before_the_first_line_leaves_no_table(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def strike(_: Tracer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Tracer, "start", strike)
    result = loaded.run_cell("%%memlines\nx = 1")
    assert type(result.error_in_exec) is KeyboardInterrupt
    assert "ipygpumem" not in capsys.readouterr().err


def test_memlines_and_experiments_work_inside_each_other(notebook: Kernel) -> None:
    for first, second in (("%%experiment one", "%%memlines"), ("%%memlines", "%%experiment one")):
        reply = run_quietly(notebook, f"{first}\n{second}\nlocal = block(8)\nlen(local) >> 20")
        assert reply.result == "8"
        assert len(reply.reports("experiment")) == 1
        assert line_sizes(reply)["cell:3"] == (8, 8)
        assert notebook.value("'local' in globals()") is False


def test_memlines_works_above_autofit_and_is_refused_below(notebook: Kernel) -> None:
    reply = run_quietly(
        notebook,
        """\
%%memlines
%%autofit size=8
held = block(size)
""",
    )
    assert line_sizes(reply)["cell:3"] == (8, 8)
    reply = notebook.run("""\
%%autofit size=8
%%memlines
held = block(size)
""")
    assert "write it above %%autofit" in reply.stderr
    run_quietly(notebook, "del held")
