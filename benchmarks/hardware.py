"""Figures that only a real card has: ``python -m benchmarks.hardware [PAGE]`` (default
docs/measured/hardware.md).

Kernels' workspaces, the driver's own memory and time are those of NVIDIA's libraries here. It needs
timm, transformers and peft beside what the GPU suite needs, and no network. Each step runs in a
process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import environment
from benchmarks.report import table

_PAGE = Path(__file__).parent.parent / "docs" / "measured" / "hardware.md"
_SECONDS = 60
_AT_ONCE = 5
_ROUNDS = 3
_STEPS = 5
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
    import torch

    from benchmarks.cuda_steps import STEPS

    with torch.device("cuda"):
        return STEPS[name]()


def _estimated(name: str) -> dict[str, Any]:
    """Return an estimate of a step, then the allocator's counters of its run, in bytes."""
    import torch

    import ipygpumem

    step = _step(name)
    found = ipygpumem.estimate(step)
    card = next(figures for figures in found.devices if figures.device.startswith("cuda"))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    ran = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    return {
        "estimated": [card.peak_bytes, card.reserved_bytes],
        "ran": ran,
        "seconds": found.duration_seconds,
    }


def _timed(name: str) -> dict[str, Any]:
    """Return the seconds of steps without and with ``peak()``, and whether its sums are the
    allocator's.
    """
    import torch

    import ipygpumem

    step = _step(name)
    step()
    step()
    seconds: dict[str, list[float]] = {"without": [], "with": [], "report": []}
    exact = True
    for turn in range(2 * _ROUNDS):
        on = bool(turn % 2)
        context: AbstractContextManager[Any] = ipygpumem.peak() if on else nullcontext()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        with context as peak:
            for _ in range(_STEPS):
                step()
            torch.cuda.synchronize()
            done = time.perf_counter()
        seconds["with" if on else "without"].append(done - started)
        if on:
            seconds["report"].append(time.perf_counter() - done)
            (size,) = (
                device.size_bytes for device in peak.record.devices if device.device == "cuda:0"
            )
            exact = exact and size == torch.cuda.max_memory_allocated()
    return {name: median(found) for name, found in seconds.items()} | {"exact": exact}


def _cell(_: str) -> dict[str, Any]:
    """Return the milliseconds that the extension adds to a cell, and those of a bare one."""
    from benchmarks.tools import OURS
    from benchmarks.trivial import _added_ms

    added, bare = _added_ms(OURS.on, "import torch; x = torch.ones(9, device='cuda')", 1, 60)
    return {"added": added, "bare": bare}


_KINDS = {"estimated": _estimated, "timed": _timed, "cell": _cell}


def _apart(kind: str, name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.hardware", "--kind", kind, "--name", name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, env={**os.environ}
        )
        print(
            kind,
            name,
            *done.stdout.splitlines()[-1:],
            done.stderr[-600:] if done.returncode else "",
            flush=True,
        )
        return dict(json.loads(done.stdout.splitlines()[-1])) if not done.returncode else {}
    except subprocess.TimeoutExpired:
        print(kind, name, f"no result in {_SECONDS} s", flush=True)
        return {}


def _page() -> str:
    import torch

    card = torch.cuda.get_device_properties(0)
    where = [
        *environment.describe(),
        f"Card: {torch.cuda.get_device_name()}, {card.total_memory / _GIB:.1f} GiB",
    ]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = dict(
            zip(
                _ESTIMATED,
                pool.map(lambda name: _apart("estimated", name), _ESTIMATED),
                strict=True,
            )
        )
    estimates = [_estimate_row(name, figures) for name, figures in found.items()]
    timed = {name: _apart("timed", name) for name in _TIMED}
    costs = [_cost_row(name, figures) for name, figures in timed.items()]
    cell = _apart("cell", "")
    return _HEAD.format(
        where="\n".join(f"- {line}" for line in where),
        estimates=table(
            [
                "step",
                "estimated",
                "allocated",
                "error",
                "reserved, estimated",
                "reserved",
                "error",
                "took",
            ],
            estimates,
        ),
        rounds=_ROUNDS,
        steps=2 * _STEPS,
        costs=table(
            ["steps", "without", "with", "added", "after them", "sums equal the allocator's peak"],
            costs,
        ),
        cell=f"{cell['bare']:.2f} ms, {cell['added']:+.2f} ms with the extension."
        if cell
        else "no result.",
    )


def _estimate_row(name: str, figures: dict[str, Any]) -> list[str]:
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
    if not figures:
        return [name, *["no result"] * 5]
    without, within, report = (figures[name] for name in ("without", "with", "report"))
    exact = "yes" if figures["exact"] else "**no**"
    times = [f"{without * 1000:.0f} ms", f"{within * 1000:.0f} ms", f"{within / without - 1:+.1%}"]
    return [name, *times, f"{report:.1f} s", exact]


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
