"""Traces measure any stretch of code, tracked loops each iteration, and neither gets in the way of
it.
"""

import asyncio
import functools
import os
import re
import sys
import weakref
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from benchmarks.harness.kernel import Kernel
from ipygpumem.api import shell as shell_of_calls
from ipygpumem.errors import TraceError
from ipygpumem.inventory.names import top
from ipygpumem.meter import contexts
from ipygpumem.probes.mappings import OwnPages
from ipygpumem.shell.searches import growth_search
from ipygpumem.units import MIB
from tests.alone import printed
from tests.fakes import SCRIPT_BYTES, FakeProbe
from tests.hiding import show_modules


class HostUse(NamedTuple):
    """The memory that the host kept, and its peak above the start."""

    kept_bytes: int
    peak_bytes: int


def host_use(record: Any) -> HostUse:
    (usage,) = record.usages
    return HostUse(usage.delta_bytes, usage.peak_delta_bytes)


def test_a_block_is_measured_and_a_line_shows_it(
    script_memory: FakeProbe, capsys: pytest.CaptureFixture[str]
) -> None:
    with ipygpumem.trace("load\ndata") as trace:
        script_memory.spike(5 * MIB)
        script_memory.set(3 * MIB)
    assert trace.record is not None
    assert host_use(trace.record) == HostUse(
        kept_bytes=3 * MIB - SCRIPT_BYTES, peak_bytes=5 * MIB - SCRIPT_BYTES
    )
    assert ipygpumem.traces() == [trace.record]
    printed = capsys.readouterr().out
    assert printed.startswith("trace load\N{REPLACEMENT CHARACTER}data · ")
    assert printed.endswith(" · RAM +3 MiB, peak +5 MiB, 3 MiB now\n")


def test_a_trace_continues_after_a_report_but_not_after_a_reset(
    script_memory: FakeProbe, capsys: pytest.CaptureFixture[str]
) -> None:
    # Until the first reset.
    trace = ipygpumem.Trace("epoch").start()
    script_memory.spike(900)
    trace.report("forward")
    script_memory.set(200)
    assert trace.usage()[0].peak_bytes == 900

    # Until the second one, which drops what it has measured, and until the end.
    trace.report_and_reset("backward")
    script_memory.set(250)
    trace.reset()
    script_memory.set(260)
    assert host_use(trace.stop()) == HostUse(10, 10)

    # The records and lines of the first stretch and the last.
    assert trace.usage() == trace.record.usages  # type: ignore[union-attr]
    assert [host_use(record) for record in ipygpumem.traces()] == [
        HostUse(200 - SCRIPT_BYTES, 900 - SCRIPT_BYTES),
        HostUse(10, 10),
    ]
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("trace epoch · forward · ")
    assert second.startswith("trace epoch · backward · ")


def test_each_call_of_a_decorated_function_is_a_trace_of_its_own(script_memory: FakeProbe) -> None:
    @ipygpumem.trace
    def factorial(n: int) -> int:
        """Docs."""
        return 1 if n == 0 else n * factorial(n - 1)

    assert factorial(2) == 2
    assert factorial.__doc__ == "Docs."
    assert [record.label.rpartition(".")[2] for record in ipygpumem.traces()] == ["factorial"] * 3

    @ipygpumem.trace("named", silent=True)
    def other() -> None:
        return None

    other()
    assert ipygpumem.traces()[-1].label == "named"


def test_coroutines_and_generators_are_measured_until_they_end(script_memory: FakeProbe) -> None:
    @ipygpumem.trace
    async def wait() -> str:
        script_memory.set(110)
        await asyncio.sleep(0)
        script_memory.set(130)
        return "done"

    @ipygpumem.trace
    def produce() -> Generator[int, int, str]:
        script_memory.set(140)
        got = yield 1
        script_memory.set(100 + got)
        return "end"

    # A coroutine.
    assert asyncio.run(wait()) == "done"
    assert host_use(ipygpumem.traces()[-1]) == HostUse(30, 30)

    # A generator that returns.
    generator = produce()
    assert next(generator) == 1
    with pytest.raises(StopIteration) as stopped:
        generator.send(60)
    assert stopped.value.value == "end"
    assert host_use(ipygpumem.traces()[-1]) == HostUse(30, 30)

    # A generator that is closed.
    left = produce()
    next(left)
    left.close()
    assert ipygpumem.traces()[-1].error is None


def test_contradictory_arguments_of_a_loop_are_refused(script_memory: FakeProbe) -> None:
    # A trace that is not running, and one that is.
    trace = ipygpumem.Trace()
    for call in (trace.stop, trace.usage, trace.report, trace.reset, trace.report_and_reset):
        with pytest.raises(TraceError, match="is not running: start"):
            call()
    trace.start()
    with pytest.raises(TraceError, match="is already running"):
        trace.start()
    trace.stop()
    trace.start().stop()

    # Arguments that are no label and no function.
    for wrong in (5, None, b"label"):
        with pytest.raises(TraceError, match="must be a string, not"):
            ipygpumem.trace(wrong)  # type: ignore[call-overload]

    async def numbers() -> Any:
        yield 1

    for wrong in (int, numbers):
        with pytest.raises(TraceError, match="cannot decorate classes or async generators"):
            ipygpumem.trace(wrong)


def test_a_script_needs_no_ipython_and_its_stdout_no_unicode() -> None:
    code = "import sys, ipygpumem\nwith ipygpumem.trace('größe'): pass\n"
    code += (
        "ipygpumem.memory(); ipygpumem.autofit(lambda n: n, n=2)\nassert not {'IPython', 'torch'} "
        "& {*sys.modules}"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    assert printed("-c", code, env=environment).startswith("trace gr??e - ")


def test_unloading_ends_traces_and_says_so(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = ipygpumem.Trace("open").start()
    loaded.run_line_magic("unload_ext", "ipygpumem")
    assert trace.stop().usages == ()
    trace.report()
    assert "memory was not measured" in capsys.readouterr().out


class Broken:
    def write(self, text: str) -> int:
        raise BrokenPipeError("the reader has gone")

    def flush(self) -> None:
        raise BrokenPipeError("the reader has gone")


@pytest.mark.usefixtures("others_out_of_sight")
@pytest.mark.parametrize("stdout", [Broken(), None])
def test_a_broken_stdout_harms_nothing_and_is_said_once(
    script_memory: FakeProbe,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stdout: Any,
) -> None:
    shell_of_calls.tell_why_not_shown.cache_clear()
    monkeypatch.setattr("sys.stdout", stdout)
    with pytest.raises(KeyError, match="mine"), ipygpumem.trace("x"):
        raise KeyError("mine")
    assert ipygpumem.traces()[-1].error == "KeyError"
    running = ipygpumem.Trace("y").start()
    running.report()
    running.report_and_reset()
    assert list(ipygpumem.track([1, 2], "epoch")) == [1, 2]
    assert ipygpumem.tracker().track().number == 1
    monkeypatch.undo()
    said = capsys.readouterr().err
    assert said.count("ipygpumem") == (0 if stdout is None else 1), said
    assert ("could not be shown (BrokenPipeError: the reader has gone)" in said) == (
        stdout is not None
    )


def uses_of_iterations(tracked: Any) -> list[tuple[int, HostUse]]:
    return [(record.iteration, host_use(record)) for record in tracked.records]


def test_an_iterations_figures_include_fetching_its_item(script_memory: FakeProbe) -> None:
    def batches() -> Iterator[int]:
        for number in range(3):
            script_memory.set(100 + 10 * number)
            yield number

    loop = ipygpumem.track(batches(), "epoch", silent=True)
    for number in loop:
        script_memory.spike(200 + number)
    assert uses_of_iterations(loop) == [
        (1, HostUse(kept_bytes=0, peak_bytes=200 - 100)),
        (2, HostUse(kept_bytes=10, peak_bytes=201 - 100)),
        (3, HostUse(kept_bytes=10, peak_bytes=202 - 110)),
    ]
    assert ipygpumem.traces() == list(loop.records)
    assert {record.label for record in loop.records} == {"epoch"}


def test_a_loop_has_the_length_of_its_iterable_and_can_run_again(script_memory: FakeProbe) -> None:
    loop = ipygpumem.track([1, 2], silent=True)
    assert len(loop) == 2
    assert [*loop, *loop] == [1, 2, 1, 2]
    assert [record.iteration for record in loop.records] == [1, 2]
    with pytest.raises(TypeError, match="has no len"):
        len(ipygpumem.track(iter([1])))


def test_a_break_or_an_error_ends_a_loop_with_its_iteration(script_memory: FakeProbe) -> None:
    # A break.
    loop = ipygpumem.track(range(5), silent=True)
    for number in loop:
        script_memory.set(100 + number)
        if number == 1:
            break
    assert uses_of_iterations(loop) == [(1, HostUse(0, 0)), (2, HostUse(1, 1))]

    def fails() -> None:
        for number in loop:
            if number == 2:
                raise KeyError(number)

    # An error of the loop's body.
    with pytest.raises(KeyError, match="2"):
        fails()
    assert [record.iteration for record in loop.records] == [1, 2, 3]

    def broken() -> Iterator[int]:
        yield 1
        raise ValueError("source")

    # An error of the iterable.
    with pytest.raises(ValueError, match="source"):
        list(ipygpumem.track(broken(), silent=True))


def test_no_item_lives_longer_than_the_loop_keeps_it(script_memory: FakeProbe) -> None:
    class Batch:
        pass

    seen: list[weakref.ref[Batch]] = []

    def batches() -> Iterator[Batch]:
        for _ in range(3):
            assert [ref() for ref in seen] == [None] * len(seen)
            batch = Batch()
            seen.append(weakref.ref(batch))
            yield batch
            del batch

    loop = iter(ipygpumem.track(batches(), silent=True))
    for batch in loop:
        del batch
    assert len(seen) == 3


STEP_BYTES = 12 * MIB
helpers = ModuleType("helpers")
vars(helpers)["rows"] = []

GROWING: list[tuple[Any, str, str]] = [
    ([], "kept.append('x' * size)", "kept (list of str)"),
    ({}, "kept[number] = 'x' * size", "kept (dict of str)"),
    ("", "kept += 'x' * size", "kept (str)"),
    (set(), "kept.add((number, 'x' * size))", "kept (set of tuple)"),
    (SimpleNamespace(log=[]), "kept.log.append(bytearray(size))", "kept (SimpleNamespace: .log)"),
    ([], "pass", ""),
    (helpers, "kept.rows.append('x' * size)", "helpers.rows (list of str)"),
    (
        functools.cache(lambda number: "x" * STEP_BYTES),
        "kept(number)",
        "kept (_lru_cache_wrapper)",
    ),
    ([], "import numpy; kept.append(numpy.ones(size // 8))", "kept (list of ndarray)"),
    # too many to count
    ([], "kept.append([b'%4d' % item * 1024 for item in range(3072)])", "kept (list of list)"),
    (
        [],
        "import pandas; kept.append(pandas.DataFrame({'text': ['x' * size]}))",
        "kept (list of DataFrame)",
    ),
]
"""An object, the code of an iteration, and the name of what grows; empty if nothing does."""


def run_growing_loop(kept: Any, step: str, grow: Callable[[], None]) -> None:
    """Run a step of each iteration, without names that lead to all of pytest."""
    names = {"kept": kept}
    for number in ipygpumem.track(range(5), "epoch"):
        batch = [bytes(STEP_BYTES + number)]
        exec(step, names | {"number": number, "size": STEP_BYTES}, names)
        kept = names["kept"]
        grow()
    del batch


@pytest.mark.usefixtures("others_out_of_sight")
@pytest.mark.parametrize(("kept", "step", "holder"), GROWING)
def test_growth_in_every_iteration_is_reported_with_its_holder(
    kept: Any,
    step: str,
    holder: str,
    script_memory: FakeProbe,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for library in re.findall(r"import (\w+)", step):
        pytest.importorskip(library)
    monkeypatch.setitem(sys.modules, "helpers", helpers)
    show_modules(monkeypatch, lambda: {"helpers": helpers})
    # the heap of all tests may have free pages
    monkeypatch.setattr(growth_search, "own_pages", lambda: OwnPages(0, 0, 0))
    if "range" in step:
        monkeypatch.setattr(top, "Sizes", functools.partial(top.Sizes, limit=3000))
    in_use = 0

    def grow(grown_bytes: int = STEP_BYTES) -> None:
        nonlocal in_use
        in_use += grown_bytes
        script_memory.set(in_use)

    grow(100 * MIB)
    # The loop has not freed the memory that the look frees.
    monkeypatch.setattr(growth_search, "create_hidden_tensors", lambda garbage: grow(-30 * MIB))
    run_growing_loop(kept, step, grow)
    printed = capsys.readouterr().out
    assert re.search(
        r"^RAM has grown by 12 MiB in each of the last \d iterations$", printed, re.MULTILINE
    )
    if holder:
        explanation = rf"RAM \+12(\.2)? MiB per iteration is held by {re.escape(holder)}$"
    else:
        explanation = (
            "no name, tensor or array accounts for the growth of RAM: its holder is unknown"
        )
    assert re.search(f"^{explanation}", printed, re.MULTILINE)
    assert "batch" not in printed


@pytest.mark.parametrize("wrong", [5, None, object()])
def test_objects_that_cannot_be_iterated_are_refused_in_one_line(wrong: Any) -> None:
    with pytest.raises(TraceError, match="an iterable, such as range"):
        ipygpumem.track(wrong)
    with pytest.raises(TraceError, match="must be a string, not int"):
        ipygpumem.track([1], 5)  # type: ignore[arg-type]


def test_in_a_notebook_a_loop_updates_one_table(kernel: Kernel) -> None:
    kernel.run("import ipygpumem, time")
    reply = kernel.run(
        """
        kept = []
        for step in ipygpumem.track(range(30), '<b>step'):
            kept.append(bytearray(40 << 20)) if step < 6 else None
            print('mine') if step == 1 else None
        """
    )
    assert reply.status == "ok", reply.traceback
    (table,) = reply.reports("track")
    assert table.splitlines()[0].startswith("<b>step 30 of 30 · ")
    assert "10 rows after the first not shown" in table
    html = next(
        display["data"]["text/html"]
        for display in reply.displays
        if "track" in str(display["metadata"])
    )
    assert "<b>step" not in html
    assert "&lt;b&gt;step" in html
    assert reply.stdout == "mine\n"
    assert kernel.value("[len(ipygpumem.traces()), ipygpumem.traces()[-1].iteration]") == [30, 30]


@pytest.mark.parametrize(
    ("cuda", "why"),
    [
        ("None", "this build of torch has no accelerator"),
        ("'12.4'", "there is no NVIDIA driver here"),
    ],
)
def test_preload_looks_for_an_accelerator_before_torch(
    loaded: InteractiveShell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cuda: str,
    why: str,
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('imported')")
    lines = f"__version__ = '2.5'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n"
    (tmp_path / "torch" / "version.py").write_text(lines)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(contexts, "has_driver", lambda: False)
    loaded.run_line_magic("gpumem", "preload")
    assert f"{why}: there is nothing to preload" in capsys.readouterr().out
    monkeypatch.setattr(contexts, "has_driver", lambda: True)
    assert contexts.why_no_accelerator() == ("" if "driver" in why else why)
    # whose GPU torch finds without being built for it
    monkeypatch.setattr(sys, "platform", "darwin")
    assert contexts.why_no_accelerator() == ""
