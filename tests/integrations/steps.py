"""A network whose passes and steps take known amounts of a card's memory, and what callbacks say of it."""

from __future__ import annotations

import threading
from typing import Any

import torch

import ipygpumem
from ipygpumem.api.shell import current_traces
from ipygpumem.integrations.epochs import Epochs
from tests.alone import ROOT
from tests.fakes import FakeProbe


class Card(FakeProbe):
    """A card of which 10 MiB are in use."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.mib = 10
        self.move(0)

    def move(self, kept: int, passing: int = 0) -> None:
        """Take ``passing`` MiB for a moment, and keep ``kept``."""
        self.spike((self.mib + passing) << 20)
        self.mib += kept
        self.set(self.mib << 20)


class Network(torch.nn.Module):
    """In training, forward keeps 4 MiB of 8, and backward takes 16 and gives the 4 back; else forward takes 32."""

    def __init__(self, card: Card | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.card = card

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(torch.nn.functional.dropout(x, 0.5, self.training))
        if self.card is None:
            return out
        if out.requires_grad:
            self.card.move(4, 8)
            out.register_hook(lambda gradient: self.card and self.card.move(-4, 16))
        else:
            self.card.move(0, 32)
        return out


class Optimizer(torch.optim.SGD):
    """A step takes 3 MiB, of which the first keeps 1."""

    def __init__(self, parameters: Any, card: Card | None = None, lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr)
        self.card = card
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self.card is not None:
            self.card.move(0 if self.steps else 1, 3)
        self.steps += 1
        return loss


def rows(number: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what there is to learn."""
    numbers = torch.arange(4.0 * number).reshape(number, 4) / 32
    return [(row, row.sum().reshape(1)) for row in numbers]


def weights(network: torch.nn.Module) -> list[float]:
    return [value for parameter in network.parameters() for value in parameter.detach().flatten().tolist()]


def records() -> list[tuple[str, int | None, int, int]]:
    """Return the label, the iteration, and the MiB that the card kept and its peak, of all records."""
    return [
        (record.label, record.iteration, usage.delta_bytes >> 20, usage.peak_delta_bytes >> 20)
        for record in ipygpumem.traces()
        for usage in record.usages
        if usage.device == "cuda:0"
    ]


def on_card(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of the card, under their short names."""
    start = "mem/cuda_0/"
    return {name.removeprefix(start): value for name, value in figures.items() if name.startswith(start)}


OF_PHASES = {
    "kept_mib": 1.0,
    "peak_mib": 33.0,
    "forward/kept_mib": 4.0,
    "forward/peak_mib": 8.0,
    "backward/kept_mib": -4.0,
    "backward/peak_mib": 16.0,
    "optimizer/kept_mib": 1.0,
    "optimizer/peak_mib": 3.0,
    "validation/kept_mib": 0.0,
    "validation/peak_mib": 32.0,
}
"""What an epoch of the network is known to take on the card, where a trainer tells all phases apart."""


def is_closed(epochs: Epochs) -> bool:
    """Whether nothing is open: what is entered now counts for nothing."""
    epochs.enter("probe")
    epochs.leave("probe")
    return epochs.take("probe") == {}


def sample_one_more() -> None:
    """Measure a device that has to be sampled, too: a thread does that while a span is open."""
    probe: Any = FakeProbe("sampled:0", sampled=True)
    probe.name = "sampled"  # else it would take the place of the host's
    current_traces().meter.add(probe)


def is_sampled_after_a_cell() -> bool:
    """Whether that thread is still there once a span of somebody else's, such as a cell's, has ended."""
    with ipygpumem.Trace(silent=True):
        pass
    samplers = [thread for thread in threading.enumerate() if thread.name == "ipygpumem-sampler"]
    for sampler in samplers:
        sampler.join(5)
    return any(sampler.is_alive() for sampler in samplers)


def run_example(heading: str) -> dict[str, Any]:
    """Run the code below a heading of docs/trainers.md, and return its names."""
    page = (ROOT / "docs" / "trainers.md").read_text("utf-8")
    code = page.split(f"\n## {heading}\n")[1].split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(compile(code, f"docs/trainers.md, {heading}", "exec"), names)
    return names
