"""Traces measure any stretch of code, in scripts and in notebooks, and never get in the way of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Generator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from ipygpumem.api import shell as shell_of_calls
from ipygpumem.errors import TraceError
from tests.alone import ROOT
from tests.fakes import FakeProbe


def kept_and_peak(record: Any) -> tuple[int, int]:
    """Return what the host kept, and its peak above the start."""
    (usage,) = record.usages
    return usage.delta_bytes, usage.peak_delta_bytes


def test_a_block_is_measured_and_one_line_says_what_it_took(
    script_memory: FakeProbe, capsys: pytest.CaptureFixture[str]
) -> None:
    with ipygpumem.trace("load\ndata") as trace:
        script_memory.spike(5 << 20)
        script_memory.set(3 << 20)
    assert trace.record is not None
    assert kept_and_peak(trace.record) == ((3 << 20) - 100, (5 << 20) - 100)
    assert ipygpumem.traces() == [trace.record]
    printed = capsys.readouterr().out
    assert printed.startswith("trace load\N{REPLACEMENT CHARACTER}data · ")
    assert printed.endswith(" · RAM +3 MiB, peak +5 MiB, 3 MiB now\n")


def test_traces_nest_and_overlap_with_a_peak_of_their_own(script_memory: FakeProbe) -> None:
    outer, early = ipygpumem.Trace("outer").start(), ipygpumem.Trace("early").start()
    script_memory.spike(900)
    late = ipygpumem.Trace("late").start()
    script_memory.spike(300)
    assert kept_and_peak(early.stop()) == (0, 800)
    script_memory.set(150)
    script_memory.spike(500)
    assert kept_and_peak(late.stop()) == (50, 400)
    assert kept_and_peak(outer.stop()) == (50, 800)
    assert [record.label for record in ipygpumem.traces()] == ["early", "late", "outer"]


def test_a_report_goes_on_and_one_with_a_reset_begins_anew(
    script_memory: FakeProbe, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = ipygpumem.Trace("epoch").start()
    script_memory.spike(900)
    trace.report("forward")
    script_memory.set(200)
    assert trace.usage()[0].peak_bytes == 900
    trace.report_and_reset("backward")
    script_memory.set(250)
    trace.reset()
    script_memory.set(260)
    assert kept_and_peak(trace.stop()) == (10, 10)
    assert trace.usage() == trace.record.usages  # type: ignore[union-attr]
    assert [kept_and_peak(record) for record in ipygpumem.traces()] == [(100, 800), (10, 10)]
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

    assert asyncio.run(wait()) == "done"
    assert kept_and_peak(ipygpumem.traces()[-1]) == (30, 30)
    generator = produce()
    assert next(generator) == 1
    with pytest.raises(StopIteration) as stopped:
        generator.send(60)
    assert stopped.value.value == "end"
    assert kept_and_peak(ipygpumem.traces()[-1]) == (30, 30)
    left = produce()
    next(left)
    left.close()
    assert ipygpumem.traces()[-1].error is None


def test_what_makes_no_sense_is_refused_in_one_line(script_memory: FakeProbe) -> None:
    trace = ipygpumem.Trace()
    for call in (trace.stop, trace.usage, trace.report, trace.reset, trace.report_and_reset):
        with pytest.raises(TraceError, match="is not running: start"):
            call()
    trace.start()
    with pytest.raises(TraceError, match="is already running"):
        trace.start()
    trace.stop()
    trace.start().stop()
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
    code += "ipygpumem.memory(); ipygpumem.autofit(lambda n: n, n=2)\nassert not {'IPython', 'torch'} & {*sys.modules}"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=True)
    assert done.stdout.startswith(b"trace gr??e - ")


def test_unloading_ends_what_it_measures_and_says_so(
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


@pytest.mark.parametrize("stdout", [Broken(), None])
def test_a_broken_stdout_harms_nothing_and_is_said_once(
    script_memory: FakeProbe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stdout: Any
) -> None:
    shell_of_calls.say_broken.cache_clear()
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
    assert ("could not be shown (BrokenPipeError: the reader has gone)" in said) == (stdout is not None)
