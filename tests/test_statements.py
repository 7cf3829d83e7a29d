"""What statements cost: exact figures from a fake probe, then in a real kernel."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ipygpumem.extras.lines.statements import Statement, measure
from ipygpumem.meter.meter import Meter
from tests.fakes import FakeProbe, fake_module
from tests.kernel import Kernel
from tests.steps import kernel_with

MIB = 1 << 20


def statement(source: str) -> Statement:
    return Statement(source, compile(source, "<test>", "exec"))


def costs_of(*sources: str, probe: FakeProbe, setup: str = "", **names: Any) -> tuple[list[Any], Any]:
    meter = Meter([probe])
    code = compile(setup, "<setup>", "exec") if setup else None
    try:
        names["probe"] = probe
        return measure(meter, [statement(source) for source in sources], names, setup=code, repeats=3)
    finally:
        meter.close()


def test_kept_and_peak_are_each_runs_own_whatever_the_runs_before_it_left() -> None:
    probe = FakeProbe()
    probe.set(1000)
    sources = ("probe.set(probe.read()[0].current_bytes + 10)", "probe.spike(probe.read()[0].current_bytes + 70)")
    (keeps, spikes), nothing = costs_of(*sources, probe=probe)
    assert [run.usages[0].delta_bytes for run in keeps.runs] == [10, 10, 10]
    assert (keeps.kept_bytes("cpu").median, keeps.peak_bytes("cpu").most) == (10, 10)
    assert (spikes.kept_bytes("cpu").most, spikes.peak_bytes("cpu").least) == (0, 70)
    assert nothing.peak_bytes("cpu").most == 0


def test_names_that_a_statement_binds_are_gone_and_functions_in_it_see_them() -> None:
    seen: list[int] = []
    names = {"x": 1, "seen": seen}
    costs_of(
        "x += 1; y = x; seen.append((lambda: [y for _ in '1'])()[0])", "seen.append(9)", probe=FakeProbe(), **names
    )
    assert seen == [2, 9] * 4  # in turns, once to warm up
    assert names["x"] == 1


def test_a_device_that_cannot_be_waited_for_keeps_no_statement_from_its_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def synchronize(*_: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setitem(sys.modules, "torch", fake_module(cuda=SimpleNamespace(synchronize=synchronize)))
    probe = FakeProbe("cuda:0")
    read = probe.read
    monkeypatch.setattr(probe, "read", lambda **how: tuple(item._replace(reserved_bytes=1) for item in read(**how)))
    (cost,), _ = costs_of("x = 1", probe=probe)
    assert len(cost.runs) == 3


def test_setup_runs_before_every_run_and_is_not_measured() -> None:
    probe = FakeProbe()
    (cost,), _ = costs_of("probe.set(60)", probe=probe, setup="probe.set(500); probe.set(50)")
    assert cost.peak_bytes("cpu").most == 10


def test_an_error_of_a_statement_comes_out_and_leaves_no_span_open() -> None:
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


def test_a_copy_costs_its_size_and_the_same_in_place_costs_nothing(shared: Kernel) -> None:
    copy, in_place = rows(shared, "%%gpumemit -r 3\nnumpy.maximum(block, 0)\nnumpy.maximum(block, 0, out=block)")
    assert copy.split()[:2] == ["numpy.maximum(block,", "0)"]
    peak = re.findall(r"\+([\d.]+) (\w+)", copy)[-1]  # it may keep +0
    assert peak[1] == "MiB"
    assert float(peak[0]) == pytest.approx(64, abs=1)  # the kernel counts pages in batches
    assert "MiB" not in in_place


def test_lines_of_a_cell_are_statements_and_a_block_is_one(shared: Kernel) -> None:
    for rule, first in (("", "first = 1; first"), ("---\n", "first = 1 ⏎ first")):
        text = first.replace(" ⏎ ", "\n")
        found = rows(shared, f"%%gpumemit -r 1 -s 'left = [1]'\n{text}\n{rule}for _ in range(2):\n    pass\n")
        assert [row.split("RAM")[0].strip() for row in found] == [first, "for _ in range(2): ⏎ pass"]


def test_braces_are_pythons_and_no_variable_of_ipythons(shared: Kernel) -> None:
    """IPython would put a value's text where ``{name}`` stands: another statement, and a ``repr`` of the user's."""
    for line in ("%gpumemit -r 1 {1}", "%%gpumemit -r 1 -s 'x = {1}'\n{1}"):
        (row,) = rows(shared, line)
        assert row.strip().startswith("{1}")


def test_a_traceback_has_the_users_frames_and_none_of_ours(shared: Kernel) -> None:
    reply = shared.run("def fail(x): return 1 / x\n%gpumemit fail(0)")
    plain = re.sub(r"\x1b\[[\d;]*m", "", reply.traceback)
    assert not re.findall(r"ipygpumem/(?:notebook|extras)", plain)
    shown = re.findall(r"^-+> *\d+ (.*)", plain, re.MULTILINE)  # before version 9 IPython shows frames of its own, too
    assert shown[-2:] == ["fail(0)", "def fail(x): return 1 / x"]
