"""Estimates of training and inference at real size, against torch's own CUDA allocator on a
simulated card.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
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
_THEIRS = [
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
_THEIRS += ["frozendict", "loguru"]
_GIB = 2**30
_MEDIAN = 0.001
_LOW = -0.02
_REFUSED = 5
_QUICK = 4
_AT_ONCE = 2
_OTHERS = ("MemTracker", "accelerate", "DeepSpeed", "torchinfo")
_WAYS = {"card": "with a card", "hidden": "CUDA hidden"}

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
    names = json.loads(_python("--list").stdout.splitlines()[-1])[: _QUICK if quick else None]
    found = _all_figures(names)
    if not quick:
        PAGE.write_text(_page(found), encoding="utf-8")
    return Section(title, _METHOD, tuple(_rows(found)), control="CUDA hidden")


def _install() -> None:
    """Install the models' libraries beside the simulated torch; their own requirements would bring
    another torch.
    """
    pip = [str(_PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", *_PACKAGES], check=True)
    subprocess.run([*pip, *_THEIRS], check=True)


# -- figures ------------------------------------------------------------------------------------


def _settings() -> dict[str, Any]:
    quiet = {
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": str(_HOME),
    }
    return {"env": {**os.environ, **quiet}, "text": True, "stdout": subprocess.PIPE}


def _python(*arguments: str) -> Any:
    command = [str(_PYTHON), "-m", "benchmarks.cuda_figures", *arguments]
    return subprocess.run(command, **_settings(), check=True)


def _all_figures(names: list[str]) -> dict[str, dict[str, Any]]:
    """Return the figures of each step, from processes that take the next one when they are done
    with one.
    """
    waiting = names[::-1]
    found: dict[str, dict[str, Any]] = {name: {} for name in names}

    def serve(_: int) -> None:
        command = [str(_PYTHON), "-m", "benchmarks.cuda_figures"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, **_settings()) as process:
            assert process.stdin
            assert process.stdout
            while waiting:
                name = waiting.pop()
                process.stdin.write(f"{name}\n")
                process.stdin.flush()
                found[name] = json.loads(process.stdout.readline())
                print(json.dumps({name: found[name]}), file=sys.stderr, flush=True)
            process.stdin.close()

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(serve, range(_AT_ONCE)))
    return found


def _error(
    figures: dict[str, Any], way: str, estimated: str = "peak", seen: str = "allocated"
) -> float | None:
    value = figures.get(way, {}).get(estimated)
    return value / figures["run"][seen] - 1 if value and figures["run"].get("ran") else None


def _errors(found: dict[str, dict[str, Any]], *asked: str) -> list[float]:
    return [error for figures in found.values() if (error := _error(figures, *asked)) is not None]


def _other_errors(found: dict[str, dict[str, Any]], tool: str) -> list[float]:
    return _errors(found, "others", tool)


# -- tables -------------------------------------------------------------------------------------


def _rows(found: dict[str, dict[str, Any]]) -> list[Row]:
    """Return the totals: left with a card, right with CUDA hidden."""

    def row(
        figure: str,
        target: str,
        of: Callable[[str], Any],
        met: Callable[[Any], bool],
        text: str = "{}",
    ) -> Row:
        values = [of(way) for way in _WAYS]
        return Row(
            figure,
            target,
            text.format(values[0]),
            "",
            text.format(values[1]),
            all(map(met, values)),
        )

    def sizes(way: str, asked: str) -> int:
        return sum(
            figures.get(way, {}).get(asked) is (asked == "unfit_ran") for figures in found.values()
        )

    steps = len(found)
    return [
        row(
            "median error of the peak",
            "0.1 %",
            lambda way: _middle(_errors(found, way)),
            _MEDIAN.__ge__,
            "{:.4%}",
        ),
        row("highest", "", lambda way: max(_errors(found, way)), bool, "{:+.2%}"),
        row("lowest", "-2 %", lambda way: min(_errors(found, way)), _LOW.__le__, "{:+.2%}"),
        row(
            "median error of reserved memory",
            "",
            lambda way: _middle(_errors(found, way, "reserved", "reserved")),
            bool,
            "{:.4%}",
        ),
        row('"fits" that were false', "0", lambda way: sizes(way, "fits_ran"), (0).__ge__),
        row('"does not fit" that ran at that size', "", lambda way: sizes(way, "unfit_ran"), bool),
        row(
            f"refused, of {steps} steps",
            "5",
            lambda way: len(_refused(found, way)),
            _REFUSED.__ge__,
        ),
    ]


def _middle(errors: list[float]) -> float:
    return median(map(abs, errors))


def _refused(found: dict[str, dict[str, Any]], way: str) -> list[str]:
    return [name for name, figures in found.items() if "refused" in figures.get(way, figures)]


def _page(found: dict[str, dict[str, Any]]) -> str:
    where = "\n".join(f"- {line}" for line in environment.describe())
    totals = [(row.figure, row.target, row.ours, row.control) for row in _rows(found)]
    totals += [("steps", "50", str(len(found)), str(len(found)))]
    others = [(tool, *_spread(_other_errors(found, tool))) for tool in _OTHERS]
    others = [
        ("ipygpumem, " + text, *_spread(_errors(found, way))) for way, text in _WAYS.items()
    ] + others
    lines = [_line(name, figures) for name, figures in found.items()]
    heads = (
        "step",
        "run: allocated, reserved",
        "with a card",
        "CUDA hidden",
        "fits from: ran",
        *_OTHERS,
    )
    parts = [
        _HEAD.format(where=where),
        table(("figure", "target", *_WAYS.values()), totals),
        "",
        table(("error of the peak", "steps", "median", "highest", "lowest"), others),
        "",
        table(heads, lines),
        "",
        *_remarks(found),
    ]
    return "\n".join(parts) + "\n"


def _spread(errors: list[float]) -> tuple[str, ...]:
    if not errors:
        return ("0", "", "", "")
    return (
        str(len(errors)),
        f"{_middle(errors):.4%}",
        f"{max(errors):+.2%}",
        f"{min(errors):+.2%}",
    )


def _line(name: str, figures: dict[str, Any]) -> tuple[str, ...]:
    seen = figures.get("run", {})
    if not seen.get("ran"):
        return (name, "does not run here", *[""] * 7)
    fits = "; ".join(_verdict(figures[way]) for way in _WAYS)
    ours = [_ours(figures, way) for way in _WAYS]
    others = [_percent(_error(figures, "others", tool)) for tool in _OTHERS]
    return (name, f"{_size(seen['allocated'])}, {_size(seen['reserved'])}", *ours, fits, *others)


def _ours(figures: dict[str, Any], way: str) -> str:
    if "refused" in figures[way]:
        return "refused"
    return (
        f"{_percent(_error(figures, way))}, r "
        f"{_percent(_error(figures, way, 'reserved', 'reserved'))}"
    )


def _verdict(figures: dict[str, Any]) -> str:
    if not figures.get("fits_mib"):
        return "-"
    return f"{figures['fits_mib'] / 1024:.2f} GiB: {'yes' if figures['fits_ran'] else '**no**'}"


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.2%}"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.2f} GiB"


def _remarks(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return why steps have no figure."""
    remarks = []
    for name, figures in found.items():
        for way, text in {**_WAYS, "others": "MemTracker"}.items():
            if why := figures.get(way, figures).get("refused"):
                remarks.append(f"- {name}, {text}: {why.splitlines()[0][:160]}")
    return remarks
