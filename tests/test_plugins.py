"""Probes that users register: measured, and unable to harm a cell."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from ipygpumem.errors import ProbeError
from ipygpumem.meter.meter import Meter
from ipygpumem.probes import pools as plugins
from ipygpumem.probes.pools import PluginProbe
from ipygpumem.records import Reading
from tests.fakes import FakeProbe

MIB = 2**20


class Toy(FakeProbe):
    """A device of somebody's."""

    def __init__(self, device: str = "toy:0") -> None:
        super().__init__(device)


class Raises(Toy):
    def read(self, **how: Any) -> Any:
        raise SystemExit("enough")


class Unsayable(Toy):
    class Error(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def read(self, **how: Any) -> Any:
        raise self.Error


LIES: dict[str, Any] = {
    "not Readings": [("toy", 1, 2, "kernel")],
    "another's device": [Reading("cuda:0", 1, 1, "kernel")],
    "a share": [Reading("toy", 0.5, 1, "kernel")],  # type: ignore[arg-type]
    "a peak below": [Reading("toy", 2, 1, "kernel")],
    "more than there is": [Reading("toy", 20, 20, "kernel", 10)],
    "a method of its own": [Reading("toy", 1, 1, "guessed")],  # type: ignore[arg-type]
    "nothing to go through": None,
}


@pytest.mark.parametrize("answer", LIES.values(), ids=LIES)
def test_an_answer_that_makes_no_sense_counts_for_nothing(meter: Meter, answer: Any) -> None:
    liar = Toy()
    liar.read = lambda **how: answer  # type: ignore[method-assign]
    meter.add(PluginProbe("toy", liar))
    assert [usage.device for usage in meter.stop(meter.start())] == ["cpu"]
    assert list(meter.failures) == ["toy"]


@pytest.mark.parametrize(("probe", "said"), [(Raises(), "SystemExit: enough"), (Unsayable(), "Error")])
def test_a_probe_that_raises_is_named_and_the_others_go_on(meter: Meter, probe: Any, said: str) -> None:
    meter.add(PluginProbe("toy", probe))
    assert [usage.device for usage in meter.stop(meter.start())] == ["cpu"]
    assert meter.failures == {"toy": said}


def test_a_probe_that_does_not_work_is_refused_when_it_is_registered(script_memory: FakeProbe) -> None:
    with pytest.raises(ProbeError, match="SystemExit: enough"):
        ipygpumem.register_probe("toy", Raises())


def test_a_slow_probe_is_dropped_with_one_warning(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    meter.add(PluginProbe("toy", Toy()))
    monkeypatch.setattr(plugins, "_MOST_SECONDS", -1.0)
    with pytest.warns(RuntimeWarning, match=r"the probe 'toy': took .+ s, so it is no longer used"):
        meter.now()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(meter.now()) == ["cpu"]
    assert "is no longer used" in meter.failures["toy"]


def test_a_probe_that_answers_again_is_measured_again(meter: Meter) -> None:
    toy = Toy()
    reads, toy.read = toy.read, Raises().read  # type: ignore[method-assign]
    meter.add(PluginProbe("toy", toy))
    assert list(meter.now()) == ["cpu"]
    toy.read = reads  # type: ignore[method-assign]
    assert list(meter.now()) == ["cpu", "toy:0"]
    assert not meter.failures


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:1", "", "a b", "<b>", 3])
def test_a_name_that_is_ours_or_none_is_refused(name: Any) -> None:
    with pytest.raises(ProbeError, match="a probe needs a name"):
        PluginProbe(name, Toy)


def test_a_second_probe_of_a_name_takes_the_first_ones_place(meter: Meter) -> None:
    first, second = Toy(), Toy("toy:1")
    meter.add(PluginProbe("toy", first))
    span = meter.start()
    first.spike(500)
    meter.add(PluginProbe("toy", second))
    assert list(meter.now()) == ["cpu", "toy:1"]
    assert span.peaks["toy:0"] == 500
    meter.drop(span)
    assert first.closed
    meter.close()
    assert second.closed
    assert not meter.now()


def test_a_registered_probe_has_a_row_in_the_status_and_so_has_its_failure(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    """What its line after a cell is stands in docs/probes.md, whose cells run as tests."""

    def status() -> str:
        capsys.readouterr()
        loaded.run_line_magic("gpumem", "status")
        return capsys.readouterr().out

    toy = Toy()
    toy.set(64)
    ipygpumem.register_probe("toy", toy)
    (row,) = [line for line in status().splitlines() if "toy:0" in line]  # and nothing of what it consists of
    assert row.split()[:3] == ["toy:0", "64", "B"]
    toy.read = Raises().read  # type: ignore[method-assign]
    assert "toy cannot be read: SystemExit: enough" in status()
