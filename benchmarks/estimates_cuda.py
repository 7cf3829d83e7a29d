"""Measures the errors of estimates of training and inference at real size.

Errors are shares of the peak of torch's own CUDA allocator on a simulated card. Each step's figures
come from cuda_figures.py: dicts for ``card`` (an estimate with a visible card), ``hidden`` (one
with CUDA hidden), ``run`` (the allocator's counters) and ``others`` (other tools' peaks), in bytes;
or ``refused`` with the reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import environment
from benchmarks.report import Row, Section, table

_HOME = Path(__file__).parent.parent
PAGE = _HOME / "docs" / "measured" / "estimates.md"
_PYTHON = _HOME / "build" / "simgpu" / "python"
_PACKAGES = [
    "timm",
    "torchvision==0.26.0",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface_hub<2",
]
_PACKAGES += [
    "peft",
    "accelerate",
    "diffusers",
    "torch_geometric",
    "lightning",
    "lightning-utilities",
    "torchmetrics",
]
_PACKAGES += ["x-transformers", "einx", "einops", "torch_einops_utils", "torchinfo"]
_THEIR_REQUIREMENTS = [
    "pyyaml",
    "regex",
    "requests",
    "pillow",
    "importlib_metadata",
    "typer",
    "httpx",
    "hf-xet",
    "xxhash",
    "aiohttp",
]
_THEIR_REQUIREMENTS += ["frozendict", "loguru"]
_GIB = 2**30
_MEDIAN = 0.001
"""Largest median error that meets its target."""
_LOW = -0.02
"""Lowest error of a peak that meets its target."""
_REFUSED = 5
"""Number of refused steps that meets its target."""
_QUICK = 4
"""Number of steps of a quick run."""
_AT_ONCE = 2
"""Number of processes that take steps at the same time."""
_OTHERS = ("MemTracker", "accelerate", "DeepSpeed", "torchinfo")
_WAYS = {"card": "with a card", "hidden": "CUDA hidden"}
"""Ways to estimate, and their columns' titles."""
_Figures = dict[str, dict[str, Any]]
"""Each step's figures, by the step's name."""

_METHOD = """\
Two steps of each model with random weights, once with a card that is visible and once with CUDA hidden, against
`max_memory_allocated` and `max_memory_reserved` of a run on the simulated card; the steps one by one, and what other
tools say, are in [estimates.md](estimates.md)."""  # noqa: E501

_HEAD = """\
# Estimates at real size

Written by `make bench-estimates`.

{where}

Two steps of each model with random weights: estimated by `ipygpumem.estimate` in a process that sees a card, estimated
with CUDA hidden (`device="cuda:0"`), and run on the [simulated card](../../tests/simulated_gpu/README.md). torch's
allocator is the real one there; kernels compute nothing. An error is the estimate's peak against the run's
`max_memory_allocated`, with "r" that of the reserved memory.

"Fits from" is the smallest card, to the MiB, on which the estimate says that the step fits: the step is run on a card
of exactly this size, and on one of the largest size of which the estimate says that it does not fit. With a card
visible the size contains the 668 MiB of context and driver that the simulated card takes, with CUDA hidden the assumed
context.

The other tools' errors are of the same peak, where the tool applies: torch's `MemTracker` follows the run on the card,
with each model's statistics reset between calls; accelerate's `estimate-memory` (the sizes of its column for training
with Adam, or of the weights for inference) and DeepSpeed's `estimate_zero2_model_states_mem_needs` (its formula for one
card without offloading, 20 bytes for each parameter; the package is not installed) do not know of activations;
torchinfo's total has no optimizer. The formulas are left out for other optimizers and for steps of two models. Five
steps with each tool's CPU time are in [estimators.md](estimators.md).

Not compared: bitsandbytes, whose CUDA library does not load on the simulated card; Mask R-CNN's training, which needs
values that only kernels compute; what cuDNN takes, which is off there. A step that another tool fails on, or that
an estimate refuses, says so below the table.
"""  # noqa: E501


def run(*, quick: bool) -> Section:
    """Compare estimates with the counters of torch's allocator, and write the page of all steps."""
    title = "Estimates at real size"
    if not _PYTHON.exists():
        return Section(
            title, f"{_METHOD}\n\nThere is no simulated card here: `make gpu-sim` builds it.", ()
        )
    _install()
    names = json.loads(_python("--list").stdout.splitlines()[-1])
    if quick:
        names = names[:_QUICK]
    figures_by_step = _all_figures(names)
    if not quick:
        PAGE.write_text(_page(figures_by_step), encoding="utf-8")
    return Section(title, _METHOD, tuple(_rows(figures_by_step)), control="CUDA hidden")


def _install() -> None:
    """Install the models' libraries beside the simulated torch; their own requirements would bring
    another torch.
    """
    pip = [str(_PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", *_PACKAGES], check=True)
    subprocess.run([*pip, *_THEIR_REQUIREMENTS], check=True)


# -- figures ------------------------------------------------------------------------------------


def _settings() -> dict[str, Any]:
    """Return the options of a process that estimates and runs steps."""
    quiet = {
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": str(_HOME),
    }
    return {"env": {**os.environ, **quiet}, "text": True, "stdout": subprocess.PIPE}


def _python(*arguments: str) -> Any:
    """Run cuda_figures.py with the simulated card's Python, and return the ended process."""
    command = [str(_PYTHON), "-m", "benchmarks.cuda_figures", *arguments]
    return subprocess.run(command, **_settings(), check=True)


def _all_figures(names: list[str]) -> _Figures:
    """Return the figures of each step, from processes that take the next one when they are done
    with one.
    """
    waiting = names[::-1]
    figures_by_step: _Figures = {name: {} for name in names}

    def serve(_: int) -> None:
        command = [str(_PYTHON), "-m", "benchmarks.cuda_figures"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, **_settings()) as process:
            assert process.stdin
            assert process.stdout
            while waiting:
                name = waiting.pop()
                process.stdin.write(f"{name}\n")
                process.stdin.flush()
                figures = json.loads(process.stdout.readline())
                print(json.dumps({name: figures}), file=sys.stderr, flush=True)
                figures_by_step[name] = figures
            process.stdin.close()

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(serve, range(_AT_ONCE)))
    return figures_by_step


def _error(
    figures: dict[str, Any], way: str, estimated: str = "peak", counter: str = "allocated"
) -> float | None:
    """Return the error of a step's estimate as a share of the run's counter; None if either is
    missing.

    Args:
        figures: the step's figures.
        way: ``card`` or ``hidden``, or ``others`` for other tools.
        estimated: ``peak`` or ``reserved``, or the other tool's name.
        counter: ``allocated`` or ``reserved``.
    """
    estimated_bytes = figures.get(way, {}).get(estimated)
    if not estimated_bytes:
        return None
    if not figures["run"].get("ran"):
        return None
    return float(estimated_bytes / figures["run"][counter] - 1)


def _errors(
    figures_by_step: _Figures, way: str, estimated: str = "peak", counter: str = "allocated"
) -> list[float]:
    """Return the errors of all steps that have one; the arguments are those of ``_error``."""
    errors = [_error(figures, way, estimated, counter) for figures in figures_by_step.values()]
    return [error for error in errors if error is not None]


# -- tables -------------------------------------------------------------------------------------


def _rows(figures_by_step: _Figures) -> list[Row]:
    """Return the totals: left with a card, right with CUDA hidden."""
    medians = []
    highest = []
    lowest = []
    reserved_medians = []
    false_fits = []
    false_refusals = []
    refused = []
    for way in _WAYS:
        errors = _errors(figures_by_step, way)
        medians.append(_middle(errors))
        highest.append(max(errors))
        lowest.append(min(errors))
        reserved_medians.append(_middle(_errors(figures_by_step, way, "reserved", "reserved")))
        false_fits.append(_count(figures_by_step, way, "fits_ran", ran=False))
        false_refusals.append(_count(figures_by_step, way, "unfit_ran", ran=True))
        refused.append(len(_refused(figures_by_step, way)))
    return [
        _total("median error of the peak", "0.1 %", medians, "{:.4%}", met=max(medians) <= _MEDIAN),
        _total("highest", "", highest, "{:+.2%}"),
        _total("lowest", "-2 %", lowest, "{:+.2%}", met=min(lowest) >= _LOW),
        _total("median error of reserved memory", "", reserved_medians, "{:.4%}"),
        _total('"fits" that were false', "0", false_fits, met=max(false_fits) <= 0),
        _total('"does not fit" that ran at that size', "", false_refusals),
        _total(
            f"refused, of {len(figures_by_step)} steps",
            "5",
            refused,
            met=max(refused) <= _REFUSED,
        ),
    ]


def _total(
    figure: str,
    target: str,
    values: Sequence[float],
    text: str = "{}",
    *,
    met: bool | None = None,
) -> Row:
    """Return a row of two values, of which each is formatted as ``text``; ``met`` is left out
    where there is no target.
    """
    with_card, hidden = values
    return Row(figure, target, text.format(with_card), "", text.format(hidden), met)


def _count(figures_by_step: _Figures, way: str, key: str, *, ran: bool) -> int:
    """Return the number of steps whose run at a size ended as ``ran`` says.

    Args:
        figures_by_step: all steps' figures.
        way: ``card`` or ``hidden``.
        key: ``fits_ran`` or ``unfit_ran``, which some steps lack.
        ran: the end to count.
    """
    return sum(figures.get(way, {}).get(key) is ran for figures in figures_by_step.values())


def _middle(errors: list[float]) -> float:
    """Return the median of the errors' sizes."""
    return median(map(abs, errors))


def _refused(figures_by_step: _Figures, way: str) -> list[str]:
    """Return the steps that the estimate refuses, or that have no figures at all."""
    names = []
    for name, figures in figures_by_step.items():
        if "refused" in figures.get(way, figures):
            names.append(name)
    return names


def _page(figures_by_step: _Figures) -> str:
    """Return the page: the totals, the tools' errors, each step's figures, and remarks."""
    count = str(len(figures_by_step))
    totals = [(row.figure, row.target, row.ours, row.control) for row in _rows(figures_by_step)]
    totals.append(("steps", "50", count, count))
    errors = {}
    for way, title in _WAYS.items():
        errors[f"ipygpumem, {title}"] = _errors(figures_by_step, way)
    for tool in _OTHERS:
        errors[tool] = _errors(figures_by_step, "others", tool)
    spreads = [(name, *_spread(of_tool)) for name, of_tool in errors.items()]
    lines = [_line(name, figures) for name, figures in figures_by_step.items()]
    heads = ("step", "run: allocated, reserved", *_WAYS.values(), "fits from: ran", *_OTHERS)
    parts = [
        _HEAD.format(where=environment.describe_as_list()),
        table(("figure", "target", *_WAYS.values()), totals),
        "",
        table(("error of the peak", "steps", "median", "highest", "lowest"), spreads),
        "",
        table(heads, lines),
        "",
        *_remarks(figures_by_step),
    ]
    return "\n".join(parts) + "\n"


def _spread(errors: list[float]) -> tuple[str, ...]:
    """Return the number of errors, their median, the highest and the lowest."""
    if not errors:
        return ("0", "", "", "")
    return (
        str(len(errors)),
        f"{_middle(errors):.4%}",
        f"{max(errors):+.2%}",
        f"{min(errors):+.2%}",
    )


def _line(name: str, figures: dict[str, Any]) -> tuple[str, ...]:
    """Return a step's row: its run, both estimates, the verdicts, and the other tools' errors."""
    run_figures = figures.get("run", {})
    if not run_figures.get("ran"):
        return (name, "does not run here", *[""] * 7)
    return (
        name,
        f"{_size(run_figures['allocated'])}, {_size(run_figures['reserved'])}",
        *[_estimate(figures, way) for way in _WAYS],
        "; ".join(_verdict(figures[way]) for way in _WAYS),
        *[_percent(_error(figures, "others", tool)) for tool in _OTHERS],
    )


def _estimate(figures: dict[str, Any], way: str) -> str:
    """Return the errors of an estimate's peak and reserved memory."""
    if "refused" in figures[way]:
        return "refused"
    peak = _percent(_error(figures, way))
    reserved = _percent(_error(figures, way, "reserved", "reserved"))
    return f"{peak}, r {reserved}"


def _verdict(figures: dict[str, Any]) -> str:
    """Return the smallest card on which an estimate says that the step fits, and if it ran."""
    if not figures.get("fits_mib"):
        return "-"
    ran = "yes" if figures["fits_ran"] else "**no**"
    return f"{figures['fits_mib'] / 1024:.2f} GiB: {ran}"


def _percent(error: float | None) -> str:
    if error is None:
        return ""
    return f"{error:+.2%}"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.2f} GiB"


def _remarks(figures_by_step: _Figures) -> list[str]:
    """Return why steps have no figure, a line each."""
    remarks = []
    for name, figures in figures_by_step.items():
        for way, title in {**_WAYS, "others": "MemTracker"}.items():
            reason = figures.get(way, figures).get("refused")
            if reason:
                first_line = reason.splitlines()[0]
                remarks.append(f"- {name}, {title}: {first_line[:160]}")
    return remarks
