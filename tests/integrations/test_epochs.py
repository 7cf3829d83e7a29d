"""What the callbacks of all trainers share: epochs, phases, their names, and that they do no harm."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import threading

import pytest

import ipygpumem
from ipygpumem.api.shell import current_traces
from ipygpumem.errors import GpuMemError
from ipygpumem.integrations.epochs import Epochs, harmless
from tests.integrations.steps import Card, is_closed, is_sampled_after_a_cell, on_card, records, sample_one_more


def test_an_epoch_has_a_span_around_those_of_its_phases(card: Card) -> None:
    epochs = Epochs(phases=True)
    epochs.begin(1)
    epochs.enter("forward")
    card.move(4, 8)
    epochs.leave("forward")
    card.move(1, 64)  # what a data loader takes
    epochs.enter("backward")
    card.move(-4, 16)
    epochs.leave("backward")
    assert on_card(epochs.end()) == {
        "kept_mib": 1.0,
        "peak_mib": 68.0,
        "forward/kept_mib": 4.0,
        "forward/peak_mib": 8.0,
        "backward/kept_mib": -4.0,
        "backward/peak_mib": 16.0,
    }
    assert records() == [("forward", 1, 4, 8), ("backward", 1, -4, 16), ("epoch", 1, 1, 68)]
    assert epochs.end() == {}


def test_a_phase_is_told_by_its_run_with_the_highest_peak(card: Card) -> None:
    epochs = Epochs(phases=True)
    epochs.begin(3)
    for kept, passing in ((1, 3), (2, 5), (0, 4)):
        epochs.enter("optimizer")
        card.move(kept, passing)
        epochs.leave("optimizer")
    assert on_card(epochs.take("optimizer")) == {"optimizer/kept_mib": 2.0, "optimizer/peak_mib": 5.0}
    (record,) = ipygpumem.traces()
    assert (record.label, record.iteration, record.duration_seconds > 0) == ("optimizer", 3, True)
    assert epochs.take("optimizer") == {}


def test_a_run_that_does_not_end_where_its_phase_does_is_not_counted(card: Card) -> None:
    epochs = Epochs(phases=True)
    epochs.begin(1)
    epochs.enter("forward")
    epochs.leave("backward")
    epochs.enter("optimizer")
    epochs.skip()
    epochs.leave("optimizer")
    assert set(on_card(epochs.end())) == {"kept_mib", "peak_mib"}


def test_without_phases_and_outside_of_epochs_nothing_is_measured(card: Card) -> None:
    for epochs in (Epochs(), Epochs(phases=True)):
        epochs.enter("forward")
        epochs.leave("forward")
        assert epochs.end() == {}
        epochs.begin(1)
        epochs.close()
        assert epochs.end() == {}
        assert is_closed(epochs)
    assert records() == []


def test_figures_are_named_for_devices_that_hold_memory(card: Card) -> None:
    epochs = Epochs(phases=True)
    assert epochs.names(["forward"]) == [
        "mem/cpu/kept_mib",
        "mem/cpu/peak_mib",
        "mem/cuda_0/kept_mib",
        "mem/cuda_0/peak_mib",
        "mem/cpu/forward/kept_mib",
        "mem/cpu/forward/peak_mib",
        "mem/cuda_0/forward/kept_mib",
        "mem/cuda_0/forward/peak_mib",
    ]
    card.set(0)
    assert Epochs().names(["forward"]) == ["mem/cpu/kept_mib", "mem/cpu/peak_mib"]
    card.rearm()
    epochs.begin(1)
    assert set(epochs.end()) == {"mem/cpu/kept_mib", "mem/cpu/peak_mib"}


def test_what_is_open_ends_with_the_function_that_runs_the_training(card: Card) -> None:
    sample_one_more()
    epochs = Epochs(phases=True)

    def loop() -> None:
        epochs.begin(1, loop="loop")
        epochs.enter("validation")
        assert is_sampled_while_open()
        card.move(0, 500)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as raised:  # the traceback keeps the frame alive
        loop()
    assert not is_sampled_after_a_cell()
    epochs.close_if_lost()
    epochs.leave("validation")
    assert epochs.take("validation") == {}
    assert records() == [("", None, 0, 0)] * 2
    del raised


def is_sampled_while_open() -> bool:
    with ipygpumem.Trace(silent=True):
        pass
    return "ipygpumem-sampler" in [thread.name for thread in threading.enumerate()]


def test_a_training_in_another_thread_goes_on_while_others_measure(card: Card) -> None:
    sample_one_more()
    epochs, begun, goes_on = Epochs(), threading.Event(), threading.Event()
    found: list[dict[str, float]] = []

    def loop() -> None:
        epochs.begin(1, loop="loop")
        begun.set()
        goes_on.wait(60)
        found.append(on_card(epochs.end()))

    thread = threading.Thread(target=loop)
    thread.start()
    begun.wait(60)
    assert is_sampled_while_open()
    card.move(0, 7)
    goes_on.set()
    thread.join()
    assert found == [{"kept_mib": 0.0, "peak_mib": 7.0}]
    assert not is_sampled_after_a_cell()


class Broken:
    def __init__(self) -> None:
        self.epochs = Epochs()
        self.calls = 0

    @harmless
    def hook(self) -> None:
        self.calls += 1
        self.epochs.begin(1)
        raise ZeroDivisionError("half")


def test_a_hook_that_fails_says_so_once_and_does_nothing_from_then_on(
    card: Card, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Broken()
    broken.hook()
    broken.hook()
    assert broken.calls == 1
    assert broken.epochs.end() == {}
    assert capsys.readouterr().err == (
        "ipygpumem: the memory callback failed (ZeroDivisionError: half). Your code is not affected; "
        "it measures no more.\n"
    )


def test_of_an_epoch_in_which_the_extension_is_unloaded_no_part_is_logged(card: Card) -> None:
    epochs = Epochs(phases=True)
    epochs.begin(1)
    epochs.enter("forward")
    epochs.leave("forward")
    current_traces().meter.close()
    assert epochs.end() == {}
    assert records() == []
    assert epochs.take("forward") == {}


class WordlessError(Exception):
    def __str__(self) -> str:
        raise TypeError("no text")


@pytest.mark.parametrize(
    ("error", "text"), [(ValueError("first\nsecond"), "ValueError: first"), (WordlessError(), "WordlessError")]
)
def test_a_failure_is_one_line_whatever_the_users_logger_raises(
    error: Exception, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Epochs().step_aside(error)
    assert capsys.readouterr().err == (
        f"ipygpumem: the memory callback failed ({text}). Your code is not affected; it measures no more.\n"
    )


def test_copies_measure_the_same_and_share_nothing(card: Card) -> None:
    epochs = Epochs(phases=True)
    epochs.begin(1)
    for other in (copy.deepcopy(epochs), pickle.loads(pickle.dumps(epochs))):
        assert (other.phases, other.end()) == (True, {})


class Without:
    """An environment that lacks a library."""

    def __init__(self, library: str) -> None:
        self.library = library

    def find_spec(self, name: str, *more: object) -> None:
        if name == self.library:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize(
    ("module", "library", "package"),
    [
        ("hf", "transformers", "transformers[torch]"),
        ("lightning", "lightning", "lightning"),
        ("fastai", "fastai", "fastai"),
    ],
)
def test_a_missing_library_is_one_line_that_says_what_to_install(
    module: str, library: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"ipygpumem.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    for loaded in [other for other in sys.modules if other.partition(".")[0] in {library, "pytorch_lightning"}]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(sys, "meta_path", [Without(library), *sys.meta_path])
    with pytest.raises(GpuMemError) as found:
        importlib.import_module(name)
    assert isinstance(found.value, ImportError)
    assert str(found.value) == f"{library} is not installed: pip install '{package}'"
    assert name not in sys.modules


def test_a_library_that_is_there_and_broken_says_so_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "ipygpumem.integrations.fastai"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "fastai", type(sys)("fastai"))
    for loaded in [other for other in sys.modules if other.startswith("fastai.")]:
        monkeypatch.delitem(sys.modules, loaded)
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'fastai\.callback'"):
        importlib.import_module(name)
