"""Measures the errors of estimates on a real card, and the time that ``%%peak`` and a cell take
there.

``python -m benchmarks.hardware [PAGE]`` writes a page of sizes in MiB and of times (default
docs/measured/hardware.md).

Kernels' workspaces, the driver's own memory and time are those of NVIDIA's libraries here. It needs
timm, transformers and peft beside what the GPU suite needs, and no network. Each step runs in a
process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import environment
from benchmarks.report import table

_PAGE = Path(__file__).parent.parent / "docs" / "measured" / "hardware.md"
_SECONDS = 60
"""Maximum time of one step's process."""
_AT_ONCE = 5
"""Number of processes that estimate at the same time."""
_ROUNDS = 3
_STEPS = 5
"""Number of steps in each turn of a round."""
_MIB = 2**20
_GIB = 2**30
_ESTIMATED = (
    "LLaMA 8B, LoRA (peft), checkpointing, 1 × 4096",
    "ResNet-50, batch 128, AMP float16, SGD",
    "ConvNeXt-B, batch 32, bf16, AdamW",
    "ViT-L/16, batch 32, bf16, fused AdamW, clip",
    "UNet, batch 8 of 256 px, Adam",
    "GPT-2 XL, bf16, checkpointing",
    "LLaMA 1B, bf16, AdamW",
    "LLaMA 1B, generation with a cache",
    "Whisper small, bf16, AdamW",
    "BERT large, AMP float16, AdamW",
    "LSTM, 2 × 1024, Adam",
    "recommender, 6 tables, Adagrad",
)
_TIMED = (_ESTIMATED[1], _ESTIMATED[3], _ESTIMATED[6])

_HEAD = """\
# Figures of a real GPU

Written by `python -m benchmarks.hardware` on a machine with one; one run, on nothing else's card.

{where}

## Estimates

Two training or inference steps with random weights: `ipygpumem.estimate` before the card has run anything, and torch's
`max_memory_allocated` and `max_memory_reserved` of the run after it, in the same process. Unlike a simulated card, this
one has the workspaces that cuDNN and other libraries ask torch's allocator for.

{estimates}

## What `%%peak` costs

{steps} training steps in turns, without and with `ipygpumem.peak()`, and what it does after them: median of {rounds}
turns, after four steps to warm up.

{costs}

## What a cell costs

The cell `1+1` from request to `idle` in a kernel that has used the card: {cell}
"""  # noqa: E501


def _step(name: str) -> Any:
    """Return a step of cuda_steps.py, its model on the card."""
    import torch

    from benchmarks.cuda_steps import STEPS

    with torch.device("cuda"):
        return STEPS[name]()


def _estimated(name: str) -> dict[str, Any]:
    """Return an estimate of a step, then the allocator's counters of its run, in bytes."""
    import torch

    import ipygpumem

    step = _step(name)
    estimate = ipygpumem.estimate(step)
    card = next(figures for figures in estimate.devices if figures.device.startswith("cuda"))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    return {
        "estimated": [card.peak_bytes, card.reserved_bytes],
        "ran": [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()],
        "seconds": estimate.duration_seconds,
    }


def _timed(name: str) -> dict[str, Any]:
    """Return the seconds of steps without and with ``peak()``, and whether its sums are the
    allocator's.
    """
    import torch  # noqa: F401  # before the package, as in _estimated

    import ipygpumem

    step = _step(name)
    step()
    step()
    without_peak = []
    with_peak = []
    for _ in range(_ROUNDS):
        without_peak.append(_turn(step, nullcontext()))
        with_peak.append(_turn(step, ipygpumem.peak()))
    return {
        "without": median(turn.seconds for turn in without_peak),
        "with": median(turn.seconds for turn in with_peak),
        "report": median(turn.report_seconds for turn in with_peak),
        "exact": all(turn.is_exact for turn in with_peak),
    }


class _Turn(NamedTuple):
    """The seconds of steps, those of leaving their context, and whether the reported peak equals
    the allocator's.
    """

    seconds: float
    report_seconds: float
    is_exact: bool


def _turn(step: Any, context: AbstractContextManager[Any]) -> _Turn:
    """Run steps inside a context: ``peak()``, or one that does nothing."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    with context as peak:
        for _ in range(_STEPS):
            step()
        torch.cuda.synchronize()
        done = time.perf_counter()
    report_seconds = time.perf_counter() - done
    is_exact = True
    if peak is not None:
        devices = peak.record.devices
        (size,) = [device.size_bytes for device in devices if device.device == "cuda:0"]
        is_exact = size == torch.cuda.max_memory_allocated()
    return _Turn(done - started, report_seconds, is_exact)


def _cell(_: str) -> dict[str, Any]:
    """Return the milliseconds that the extension adds to a cell, and those of a bare one."""
    from benchmarks.tools import OURS
    from benchmarks.trivial import _added_ms

    added, bare = _added_ms(OURS.on, "import torch; x = torch.ones(9, device='cuda')", 1, 60)
    return {"added": added, "bare": bare}


_KINDS = {"estimated": _estimated, "timed": _timed, "cell": _cell}


def _apart(kind: str, name: str) -> dict[str, Any]:
    """Return a step's figures of one kind from a process of its own; none if that fails."""
    command = [sys.executable, "-m", "benchmarks.hardware", "--kind", kind, "--name", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        print(kind, name, f"no result in {_SECONDS} s", flush=True)
        return {}
    lines = done.stdout.splitlines()
    errors = done.stderr[-600:] if done.returncode else ""
    print(kind, name, *lines[-1:], errors, flush=True)
    if done.returncode:
        return {}
    return dict(json.loads(lines[-1]))


def _page() -> str:
    """Measure all figures on this machine's card; return the page."""
    import torch

    card = torch.cuda.get_device_properties(0)
    size = f"{card.total_memory / _GIB:.1f} GiB"
    facts = [*environment.describe(), f"Card: {torch.cuda.get_device_name()}, {size}"]
    estimates = _estimates_table()
    costs = _costs_table()
    cell = "no result."
    milliseconds = _apart("cell", "")
    if milliseconds:
        added = f"{milliseconds['added']:+.2f} ms with the extension."
        cell = f"{milliseconds['bare']:.2f} ms, {added}"
    return _HEAD.format(
        where="\n".join(f"- {fact}" for fact in facts),
        estimates=estimates,
        rounds=_ROUNDS,
        steps=2 * _STEPS,
        costs=costs,
        cell=cell,
    )


def _estimates_table() -> str:
    """Estimate and run each step, several at once; return the table of their sizes."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        figures_of_steps = list(pool.map(partial(_apart, "estimated"), _ESTIMATED))
    heads = ["step", "estimated", "allocated", "error"]
    heads += ["reserved, estimated", "reserved", "error", "took"]
    rows = []
    for name, figures in zip(_ESTIMATED, figures_of_steps, strict=True):
        rows.append(_estimate_row(name, figures))
    return table(heads, rows)


def _costs_table() -> str:
    """Time each step, one after the other; return the table of their times."""
    heads = ["steps", "without", "with", "added", "after them"]
    heads.append("sums equal the allocator's peak")
    rows = [_cost_row(name, _apart("timed", name)) for name in _TIMED]
    return table(heads, rows)


def _estimate_row(name: str, figures: dict[str, Any]) -> list[str]:
    """Return a step's row: sizes of its estimate and of its run, in MiB."""
    if not figures:
        return [name, *["no result"] * 7]
    cells = [name]
    for estimated, ran in zip(figures["estimated"], figures["ran"], strict=True):
        cells += [
            f"{estimated / _MIB:,.1f} MiB",
            f"{ran / _MIB:,.1f} MiB",
            f"{estimated / ran - 1:+.2%}",
        ]
    return [*cells, f"{figures['seconds']:.1f} s"]


def _cost_row(name: str, figures: dict[str, Any]) -> list[str]:
    """Return a step's row: its times without and with ``peak()``."""
    if not figures:
        return [name, *["no result"] * 5]
    without = figures["without"]
    with_peak = figures["with"]
    return [
        name,
        f"{without * 1000:.0f} ms",
        f"{with_peak * 1000:.0f} ms",
        f"{with_peak / without - 1:+.1%}",
        f"{figures['report']:.1f} s",
        "yes" if figures["exact"] else "**no**",
    ]


def main() -> None:
    """Write the page, or print the figures of one step as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", nargs="?", type=Path, default=_PAGE)
    parser.add_argument("--kind", choices=_KINDS)
    parser.add_argument("--name")
    options = parser.parse_args()
    if options.kind:
        print(json.dumps(_KINDS[options.kind](options.name)))
    else:
        options.page.write_text(_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
