"""Estimates, without a card, of code that keeps some of its tensors on the CPU."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import ipygpumem
from ipygpumem.units import KIB, MIB

pytestmark = pytest.mark.usefixtures("no_modules_of_users")
CARD = "cuda:0"
NUMBERS = MIB // 4
HERE = "cpu"
SETTINGS = SimpleNamespace(device=torch.device("cpu"), name="cpu")
x = torch.ones(NUMBERS)
Figures = dict[str, tuple[int, int]]


def figures(step: Callable[[], Any], device: str | None = CARD) -> Figures:
    """Return the peak and the kept memory in MiB of an estimate's devices, without small ones."""
    figures_by_device = {}
    for row in ipygpumem.estimate(step, device=device).devices:
        if row.peak_bytes > 100 * KIB:
            figures_by_device[row.device] = (row.peak_bytes // MIB, row.kept_bytes // MIB)
    return figures_by_device


class Cache:
    """A cache of results on the host, in a class, whose code an estimate does not copy."""

    def __init__(self) -> None:
        self.values = torch.zeros(4, NUMBERS, device="cpu")

    def fill(self, value: torch.Tensor) -> None:
        for row in self.values:
            row.copy_(value)


def cached() -> Any:
    cache = Cache()
    cache.fill(x)
    return cache, x + 1


def device_objects() -> Any:
    host = torch.device("cpu")
    return torch.zeros(4, NUMBERS, device=host), torch.zeros_like(x), x + 1


def numbers_on(device: str) -> torch.Tensor:
    return torch.zeros(4, NUMBERS, device=device)


def results_on_the_host() -> Any:
    results = []
    for _ in range(3):
        results.append((x * 2).cpu())
        results.append((x * 2).to("cpu"))
    return [2 * result for result in results]


def as_other_tensors() -> Any:
    host = torch.zeros(NUMBERS, device="cpu")
    return torch.ones(NUMBERS, device=host.device), x.to(host), torch.ones_like(host), x.to(host)


def there_and_back() -> Any:
    return torch.zeros(4, NUMBERS, device="cpu")[:2].cuda()


def moved_model() -> Any:
    model = nn.Linear(1024, 1024, bias=False)
    model.to("cpu")
    return model


def in_contexts() -> Any:
    with torch.device("cpu"):
        on_host = torch.zeros(4, NUMBERS)
    with torch.device("cuda"):
        return on_host, torch.zeros(2, NUMBERS), nn.Linear(1024, 1024, bias=False)


ON_THE_HOST: dict[Callable[[], Any], Figures] = {
    cached: {CARD: (2, 1), "cpu": (4, 4)},
    device_objects: {CARD: (3, 2), "cpu": (4, 4)},
    lambda: numbers_on("cpu"): {"cpu": (4, 4)},
    results_on_the_host: {CARD: (2, 0), "cpu": (12, 6)},
    as_other_tensors: {CARD: (1, 0), "cpu": (5, 4)},
    there_and_back: {CARD: (2, 2), "cpu": (4, 0)},
    in_contexts: {CARD: (6, 6), "cpu": (4, 4)},
    moved_model: {CARD: (4, 0), "cpu": (4, 4)},
}


@pytest.mark.parametrize("step", ON_THE_HOST)
def test_tensors_put_on_the_cpu_by_name_stay_there(step: Callable[[], Any]) -> None:
    assert figures(step) == ON_THE_HOST[step]


def of_the_notebook() -> Any:
    return torch.zeros(NUMBERS, device=HERE), numbers_on(SETTINGS.name), x.to(SETTINGS.device)


def of_another_tensor() -> Any:
    return numbers_on(x.device), x.new_zeros(NUMBERS), nn.Linear(1024, 1024, device=x.device)


def chosen() -> Any:
    return numbers_on("cuda" if torch.cuda.is_available() else "cpu"), x + 1


@pytest.mark.parametrize(
    ("step", "peak"), [(of_the_notebook, 6), (of_another_tensor, 10), (chosen, 6)]
)
def test_devices_that_are_not_named_are_the_card(step: Callable[[], Any], peak: int) -> None:
    """The notebook may get the device's name elsewhere, and tensors here are on the CPU."""
    ((device, (peak_mib, _)),) = figures(step).items()
    assert (device, peak_mib) == (CARD, peak)


def train_with_a_table_on_the_host() -> None:
    table = nn.Embedding(1 << 16, 64, device="cpu")
    model = nn.Linear(64, 256).cuda()
    optimizers = [SGD(table.parameters(), lr=0.1), Adam(model.parameters())]
    for _ in range(2):
        words = torch.randint(1 << 16, (64, 20), device="cpu")
        model(table(words).cuda()).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("device", [CARD, None])
def test_gradients_are_where_their_parameters_are(device: str | None) -> None:
    rows = ipygpumem.estimate(train_with_a_table_on_the_host, device=device).devices
    by_device = {row.device: row for row in rows}
    assert set(by_device) == {"cpu", CARD}
    # A table and its gradient, each of 16 MiB
    assert 32 <= by_device["cpu"].peak_bytes / MIB < 34
    assert by_device["cpu"].parts["gradients"] == 16 * MIB
    assert by_device[CARD].parts["parameters"] == 65 * KIB
    workspaces = by_device[CARD].parts["cuBLAS workspaces"]
    assert by_device[CARD].peak_bytes - workspaces < 4 * MIB


def test_the_size_of_a_card_is_not_that_of_the_ram() -> None:
    def step() -> Any:
        return numbers_on("cpu"), x + 1

    rows = ipygpumem.estimate(step, device=CARD, device_memory="1GiB").devices
    rooms = {row.device: row.room_bytes for row in rows}
    assert rooms[CARD] == 1024 * MIB
    assert rooms["cpu"] != 1024 * MIB


def test_known_values_stay_known_on_the_host() -> None:
    def step() -> Any:
        lengths = torch.tensor([NUMBERS, 2])
        return torch.zeros(lengths.cpu().tolist()), x.to("cpu")

    estimate = ipygpumem.estimate(step, device=CARD)
    assert (estimate.guesses, estimate.upper_bounds) == ((), ())
    assert {row.device: row.peak_bytes // MIB for row in estimate.devices} == {CARD: 3, "cpu": 1}


def test_code_without_a_card_has_one_place() -> None:
    def step() -> Any:
        return numbers_on("cpu"), x.cpu(), (x + 1).to("cpu")

    assert figures(step, None) == {"cpu": (6, 5)}
