"""The callbacks in Hugging Face's and Lightning's trainers."""

from __future__ import annotations

import gc
import pickle
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lightning import pytorch as lightning
from lightning.pytorch.callbacks import EarlyStopping
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import ipygpumem
from ipygpumem.api import shell as where
from ipygpumem.errors import GpuMemError
from ipygpumem.extras.trainers import hf
from ipygpumem.extras.trainers import lightning as ours_of_lightning
from ipygpumem.extras.trainers.epochs import needs
from ipygpumem.failures import forget_told
from ipygpumem.meter.meter import Meter
from ipygpumem.meter.traces import Traces
from ipygpumem.reclaim.failure import classify
from tests.alone import ROOT
from tests.fakes import FakeProbe

pytestmark = pytest.mark.filterwarnings("ignore")
PEAK = "mem/cuda_0/peak_mib"


class Card(FakeProbe):
    """A card of which 10 MiB are in use."""

    mib = 10

    def move(self, kept: int, passing: int = 0) -> None:
        """Take ``passing`` MiB for a moment, and keep ``kept``."""
        self.spike((self.mib + passing) << 20)
        self.mib += kept
        self.set(self.mib << 20)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    """A card whose memory the test sets; it and the host are all that is measured."""
    host = FakeProbe()
    card = Card("cuda:0")
    host.set(100 << 20)
    card.move(0)
    traces = Traces(Meter([host, card]))
    monkeypatch.setattr(where.traces, "of_script", lambda: traces)
    yield card
    traces.meter.close()


class Network(torch.nn.Module):
    """In training, forward keeps 4 MiB of 8, and backward takes 16 and gives the 4 back; else
    forward takes 32.
    """

    def __init__(self, card: Card) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.take: Callable[..., None] = card.move

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(torch.nn.functional.dropout(x, 0.5, self.training))
        if out.requires_grad:
            self.take(4, 8)
            out.register_hook(lambda gradient: self.take(-4, 16))
        else:
            self.take(0, 32)
        return out


class Optimizer(torch.optim.SGD):
    """A step takes 3 MiB, of which the first keeps 1."""

    def __init__(self, parameters: Any, card: Card, lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr)
        self.take = card.move
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.take(0 if self.steps else 1, 3)
        self.steps += 1
        return loss


def rows(number: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (row, row.sum().reshape(1)) for row in torch.arange(4.0 * number).reshape(number, 4) / 32
    ]


def failing(base: type, hook: str, error: type[BaseException]) -> Any:
    """Return a callback whose hook fails once."""

    def fail(self: Any, *args: Any, **more: Any) -> None:
        if not failed:
            failed.append(hook)
            raise error("mine")

    failed: list[str] = []
    return type("Failing", (base,), {hook: fail})()


class HuggingFace:
    base = transformers.TrainerCallback
    kind = hf.HfMemoryCallback
    before_step = "on_pre_optimizer_step"
    highest = 20  # its validation comes after the epoch

    class Model(Network):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            out = super().forward(x)
            return {"loss": mse_loss(out, labels), "logits": out}

    def __init__(
        self, card: Card, folder: Path, *callbacks: Any, trainer: type = transformers.Trainer
    ):
        quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
        usual = {
            "num_train_epochs": 2,
            "per_device_train_batch_size": 4,
            "logging_strategy": "epoch",
            **quiet,
        }
        usual["eval_strategy"] = "epoch"
        data = [{"x": x, "labels": y} for x, y in rows()]
        model = self.Model(card)
        sets = {"train_dataset": data, "eval_dataset": data[:1], "callbacks": list(callbacks)}
        options = transformers.TrainingArguments(str(folder), **usual)
        step = Optimizer(model.parameters(), card)
        self.trainer: Any = trainer(model, options, optimizers=(step, None), **sets)

    def train(self) -> HuggingFace:
        self.trainer.train()
        return self

    def validate(self) -> None:
        self.trainer.evaluate()

    def weights(self) -> Any:
        return [*self.trainer.model.parameters()]

    def logged(self) -> list[dict[str, float]]:
        """Return the card's figures of each epoch."""
        return [
            figures
            for entry in self.trainer.state.log_history
            if "kept_mib" in (figures := on_card(entry))
        ]


class Module(lightning.LightningModule):
    def __init__(self, card: Card) -> None:
        super().__init__()
        self.network = Network(card)
        self.card = card

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        return mse_loss(self.network(batch[0]), batch[1])

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("loss", self.training_step(batch, number))

    def configure_optimizers(self) -> Any:
        return Optimizer(self.parameters(), self.card)


class Log(lightning.loggers.logger.DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, metrics))


class Lightning:
    base = lightning.Callback
    kind = ours_of_lightning.LightningMemoryCallback
    before_step = "on_before_optimizer_step"
    highest = 32

    def __init__(self, card: Card, folder: Path, *callbacks: Any) -> None:
        self.log, self.module = Log(), Module(card)
        quiet = {
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
        }
        usual: dict[str, Any] = {
            "max_epochs": 2,
            "accelerator": "cpu",
            "num_sanity_val_steps": 0,
            **quiet,
        }
        usual |= {"callbacks": list(callbacks), "logger": self.log, "log_every_n_steps": 1}
        self.trainer = lightning.Trainer(default_root_dir=folder, **usual)

    def train(self) -> Lightning:
        self.trainer.fit(self.module, DataLoader(rows(), batch_size=4), DataLoader(rows(1)))
        return self

    def validate(self) -> None:
        self.trainer.validate(self.module, DataLoader(rows(1)), verbose=False)

    def weights(self) -> Any:
        return [*self.module.parameters()]

    def logged(self) -> list[dict[str, float]]:
        return [figures for _, metrics in self.log.rows if (figures := on_card(metrics))]


@pytest.fixture(params=[HuggingFace, Lightning], ids=lambda kind: kind.__name__)
def library(request: pytest.FixtureRequest) -> Any:
    return request.param


def on_card(figures: dict[str, Any]) -> dict[str, Any]:
    start = "mem/cuda_0/"
    return {
        name.removeprefix(start): float(value)
        for name, value in figures.items()
        if name.startswith(start)
    }


def records() -> list[tuple[str, int | None, int]]:
    """Return the label, the number and the card's peak in MiB of each record, but those of tests'
    own traces.
    """
    return [
        (record.label, record.iteration, usage.peak_delta_bytes >> 20)
        for record in ipygpumem.traces()
        for usage in record.usages
        if usage.device == "cuda:0" and record.label
    ]


def test_epochs_are_exact_in_the_trainers_log_and_the_records(
    card: Card, tmp_path: Path, library: Any
) -> None:
    trained = library(card, tmp_path, library.kind()).train()
    first = (1.0, library.highest + 1.0)
    second = (0.0, float(library.highest))
    assert [(row["kept_mib"], row["peak_mib"]) for row in trained.logged()] == [first, second]
    assert records() == [("epoch", 1, library.highest + 1), ("epoch", 2, library.highest)]


def test_training_gives_the_same_weights_with_the_callback(
    card: Card, tmp_path: Path, library: Any
) -> None:
    callback = library.kind()
    runs = [library(card, tmp_path, *added).train().weights() for added in ((), (callback,))]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    # trainers copy and pickle their callbacks
    assert pickle.loads(pickle.dumps(callback.epochs)).end() == {}


def test_our_own_failure_is_reported_once_and_training_continues(
    card: Card,
    tmp_path: Path,
    library: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    forget_told()  # each kind of failure is told once in a process
    monkeypatch.setattr(Meter, "span", lambda self: 1 / 0)
    without = library(card, tmp_path).train().weights()
    trained = library(card, tmp_path, library.kind()).train()
    assert all(
        torch.equal(one, other) for one, other in zip(trained.weights(), without, strict=True)
    )
    assert (
        capsys.readouterr().err.count(
            "the memory callback failed (ZeroDivisionError: division by zero)"
        )
        == 1
    )


def test_after_an_error_measuring_resumes_with_the_next_training(
    card: Card, tmp_path: Path, library: Any
) -> None:
    callback = library.kind()
    trained = library(
        card, tmp_path, failing(library.base, library.before_step, KeyboardInterrupt), callback
    )
    # The caught error keeps the frames, as a notebook does.
    with pytest.raises((KeyboardInterrupt, SystemExit)) as raised:
        trained.train()
    assert classify(raised.value).kind == "interrupt"
    before = records()
    trained.validate()
    assert records() == before
    again = library(card, tmp_path, callback).train()
    assert [number for _, number, _ in records()[len(before) :]] == [1, 2]
    before = records()
    again.validate()
    assert records() == before
    del raised


def test_a_missing_library_is_one_line_with_the_package_name() -> None:
    with pytest.raises(GpuMemError) as caught, needs("lightning", "lightning[extra]"):
        raise ModuleNotFoundError("No module named 'lightning'", name="lightning")
    assert isinstance(caught.value, ImportError)
    message = str(caught.value)
    assert message.startswith("lightning is not installed: ")
    assert message.endswith("pip install 'lightning[extra]'")
    with pytest.raises(ModuleNotFoundError, match="torch"), needs("lightning", "lightning"):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")


@pytest.mark.parametrize("heading", ["Hugging Face", "Lightning"])
def test_the_example_of_the_page_runs(
    heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "traces.md").read_text("utf-8")
    code = page.split(f"\n### {heading}\n")[1].split("```python\n")[1].split("```")[0]
    *_, last = code.strip().rsplit("\n", 1)
    names: dict[str, Any] = {}
    exec(code, names)
    assert "mem/cpu/peak_mib" in last or "mem/cpu/peak_mib" in eval(last, names)


class Endless(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Nobody can tell how many rows come: then the trainer's own state counts epochs
    in fractions.
    """

    def __iter__(self) -> Any:
        return iter([{"x": x, "labels": y} for x, y in rows()])


@pytest.mark.parametrize("hook", ["on_step_end", "on_epoch_end"])
@pytest.mark.parametrize("case", ["new", "used before", "no length"])
def test_a_callback_added_in_a_training_numbers_its_epochs(
    card: Card, tmp_path: Path, hook: str, case: str
) -> None:
    ours = hf.HfMemoryCallback()
    added = list[int]()
    before = 0
    if case == "used before":
        HuggingFace(card, tmp_path, ours).train()
        before = len(records())

    def add(self: Any, args: Any, state: Any, *more: Any, **others: Any) -> None:
        if not added:
            added.append(1)
            trained.trainer.add_callback(ours)

    trained = HuggingFace(card, tmp_path, type("Adding", (HuggingFace.base,), {hook: add})())
    trained.trainer.args.num_train_epochs = 3
    if case == "no length":
        trained.trainer.args.max_steps, trained.trainer.train_dataset = 6, Endless()

    # The first epoch has begun without the callback.
    trained.train()
    assert [number for label, number, _ in records()[before:] if label == "epoch"] == [2, 3]


def test_a_trainers_own_log_keeps_its_figures(card: Card, tmp_path: Path) -> None:
    class Collecting(transformers.Trainer):
        """As those do that train with preferences: a log takes along what was collected since the
        last.
        """

        steps = 0

        def log(self, logs: dict[str, float], *more: Any) -> None:
            if "loss" in logs:
                logs["collected"] = self.steps
            self.steps = 0
            super().log(logs, *more)

        def training_step(self, *inputs: Any) -> torch.Tensor:
            self.steps += 1
            return super().training_step(*inputs)

    trained = HuggingFace(card, tmp_path, hf.HfMemoryCallback(), trainer=Collecting).train()
    assert [
        entry["collected"] for entry in trained.trainer.state.log_history if "collected" in entry
    ] == [2, 2]
    assert len(trained.logged()) == 2


def test_a_trainer_whose_training_failed_can_be_freed(card: Card, tmp_path: Path) -> None:
    """Up to Python 3.12 a look at a frame's names leaves a copy there, which clearing the frame
    does not reach.
    """
    trained = HuggingFace(
        card, tmp_path, hf.HfMemoryCallback(), failing(HuggingFace.base, "on_step_end", ValueError)
    )
    seen = [weakref.ref(trained.trainer), weakref.ref(trained.trainer.model)]
    with pytest.raises(ValueError, match="mine") as raised:
        trained.train()
    traceback.clear_frames(raised.tb)
    del trained
    gc.collect()
    assert [reference() for reference in seen] == [None, None]


@pytest.mark.parametrize("first", [True, False])
def test_each_process_can_monitor_and_only_the_first_logs(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    monkeypatch.setattr(lightning.Trainer, "is_global_zero", first)
    monitor = EarlyStopping(PEAK, check_on_train_epoch_end=True)
    trained = Lightning(card, tmp_path, monitor, Lightning.kind()).train()
    assert monitor.best_score == 32.0
    logged = [(step, row["epoch"], row[PEAK]) for step, row in trained.log.rows if PEAK in row]
    assert logged == ([(1, 0, 33.0), (3, 1, 32.0)] if first else [])
