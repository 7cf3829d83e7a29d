"""Epochs and phases of a training on a device: what the callbacks of all trainers measure with."""

from __future__ import annotations

from tests.gpu.support import ready, run_ok
from tests.kernel import Kernel

_TRAINING = """
import ipygpumem, torch
from ipygpumem.integrations.epochs import Epochs
def mib(n): return torch.empty(n << 20, dtype=torch.uint8, device="cuda")
def on_card(figures):
    start = "mem/cuda_0/"
    return {name[len(start):]: value for name, value in figures.items() if name.startswith(start)}

def train(phases):
    epochs, logged, state = Epochs(phases=phases), [], []
    for number in (1, 2):
        epochs.begin(number)
        for step in range(3):
            batch = mib(8)
            epochs.enter("forward"); activations = mib(64); mib(32); epochs.leave("forward")
            epochs.enter("backward"); gradients = mib(16); mib(128); del activations; epochs.leave("backward")
            epochs.enter("optimizer"); state = state or [mib(48)]; mib(4); epochs.leave("optimizer")
            del batch, gradients
        epochs.enter("validation"); mib(256); epochs.leave("validation")
        logged.append(on_card(epochs.end()))
    return logged
"""
_PHASES = {
    "forward": (64.0, 96.0),
    "backward": (-48.0, 144.0),
    "optimizer": (48.0, 52.0),
    "validation": (0.0, 256.0),
}


def figures(kept: float, peak: float, phase: str = "") -> dict[str, float]:
    return {f"{phase}kept_mib": kept, f"{phase}peak_mib": peak}


def phases(**changed: tuple[float, float]) -> dict[str, float]:
    """Return the figures of all phases, those of ``changed`` in place of the first epoch's."""
    found = {**_PHASES, **changed}
    return {name: value for phase in found for name, value in figures(*found[phase], f"{phase}/").items()}


def test_each_epoch_and_phase_is_exact(gpu_kernel: Kernel) -> None:
    """A hand-written training in a cell: kept bytes and peak of both epochs and of forward, backward, optimizer and
    validation are exact, and torch's `max_memory_allocated()` goes on over them."""
    run_ok(
        gpu_kernel,
        _TRAINING + "torch.cuda.reset_peak_memory_stats(); before = torch.cuda.memory_allocated()\n"
        "logged = train(True)\n"
        "highest = (torch.cuda.max_memory_allocated() - before) >> 20",
    )
    first, second = gpu_kernel.value("logged")
    assert first == figures(48, 304) | phases()
    assert second == figures(0, 256) | phases(optimizer=(0.0, 4.0))
    assert gpu_kernel.value("highest") == 304
    labels = gpu_kernel.value("[(record.label, record.iteration) for record in ipygpumem.traces()]")
    assert labels == [(label, number) for number in (1, 2) for label in [*_PHASES, "epoch"]]


def test_a_script_without_phases_measures_epochs_alone(bare_kernel: Kernel) -> None:
    """The same training without the extension and without phases, as in a script: each epoch has its kept bytes and its
    exact peak."""
    ready(bare_kernel)
    run_ok(bare_kernel, _TRAINING + "logged = train(False)")
    assert bare_kernel.value("logged") == [figures(48, 304), figures(0, 256)]


def test_an_epoch_that_ends_in_out_of_memory_leaves_nothing_open(gpu_kernel: Kernel) -> None:
    """A training that fails in its backward pass, and is begun again: the second has exact figures, and only it is
    remembered."""
    run_ok(
        gpu_kernel,
        _TRAINING + "%reload_ext ipygpumem\n"
        "epochs = Epochs(phases=True)\n"
        "epochs.begin(1); epochs.enter('backward')\n"
        "held = mib(32)\n"
        "try:\n    mib(1 << 20)\n"
        "except torch.cuda.OutOfMemoryError: pass\n"
        "epochs.begin(1); more = mib(16); mib(8)\n"
        "logged = on_card(epochs.end())",
    )
    assert gpu_kernel.value("logged") == figures(16, 24)
    assert gpu_kernel.value("[record.label for record in ipygpumem.traces()]") == ["epoch"]
    run_ok(gpu_kernel, "del held, more")
