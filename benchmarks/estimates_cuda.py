"""Estimates of training and inference at real size, against torch's own CUDA allocator on a simulated card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Row, Section

_HOME = Path(__file__).parent.parent
_PYTHON = _HOME / "build" / "simgpu" / "python"
_PACKAGES = ["timm", "torchvision==0.26.0", "transformers", "tokenizers", "safetensors", "huggingface_hub<2"]
_PACKAGES += ["peft", "accelerate", "diffusers"]
_THEIRS = ["pyyaml", "regex", "requests", "pillow", "importlib_metadata", "typer", "httpx", "hf-xet"]
_GIB, _MIB = 2**30, 2**20
_CONTEXT_BYTES = 768 * _MIB
"""What the package sets aside for a context; it would have to be imported with torch."""
_LARGEST_MIB, _CARDS_GIB = 160 * 1024, (8, 16, 24, 40, 80)
_TARGET, _WORST, _MEDIAN = "within 3 %, true", 0.03, 0.005
_QUICK, _AT_ONCE = 4, 2
_SECONDS = 600

_METHOD = """\
Two steps of each model, random weights, in a process of its own on the simulated card (`make gpu-sim`): first estimated
by `ipygpumem.estimate`, then run. torch's allocator is the real one there, kernels compute nothing. Left the estimate,
right `max_memory_allocated` and `max_memory_reserved` of the run. Then each runs on a card that has no more than the
estimate says is needed, 768 MiB for a context among it, and has to get through; and what the estimate says of cards of
8, 16, 24, 40 and 80 GiB ("fits" or not) is held against the run, and against one on a card of that size where that
alone does not tell. cuDNN is off on the simulated card: convolutions go through torch's own kernels, whose columns
estimates count there; on hardware they go through cuDNN, whose workspaces they do not count. A context takes 668 MiB
there, with the part of the driver. States of 8 bits are missing: bitsandbytes installs, and its library does not load
there."""


def run(*, quick: bool) -> Section:
    """Return how far estimates are from the counters of torch's allocator."""
    title = "Estimates at real size"
    if not _PYTHON.exists():
        return Section(title, f"{_METHOD}\n\nThere is no simulated card here: `make gpu-sim` builds it.", ())
    _install()
    names = json.loads(
        _python("-c", "import json; from benchmarks.cuda_steps import STEPS; print(json.dumps([*STEPS]))")
    )
    names = names[: _QUICK if quick else None]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = dict(zip(names, pool.map(_figures, names), strict=True))
    rows = [_row(name, figures) for name, figures in found.items()]
    return Section(title, _METHOD, (*rows, *_totals([*found.values()])), control="run on the simulated card")


def _install() -> None:
    """Put the models' libraries beside the simulated torch; their own requirements would bring another torch."""
    pip = [str(_PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", *_PACKAGES], check=True)
    subprocess.run([*pip, *_THEIRS], check=True)


def _python(*arguments: str, card_mib: int = _LARGEST_MIB) -> str:
    """Return the last line that a program prints on a machine with one card of this size."""
    with tempfile.NamedTemporaryFile() as table:
        settings = {"SIM_TABLE": table.name, "SIM_TOTAL_MIB": str(card_mib), "PYTHONPATH": str(_HOME)}
        environment = {**os.environ, **settings, "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
        command = [str(_PYTHON), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


def _figures(name: str) -> dict[str, Any]:
    """Return what was estimated and seen, and the verdicts: card in MiB to what was said and whether it ran there."""
    found: dict[str, Any] = json.loads(_python("-m", "benchmarks.cuda_steps", name, "--estimate", "--run"))
    if "refused" in found:
        return found
    needed = -(-(found["needed_bytes"] + found["spare_bytes"] + _CONTEXT_BYTES) // _MIB)
    verdicts = {needed: (True, _runs(name, needed))}
    for size in (gib * 1024 for gib in _CARDS_GIB):
        verdicts[size] = needed <= size, _ran_or_runs(name, size, found, needed)
    print(name, found, verdicts, file=sys.stderr, flush=True)
    return {**found, "verdicts": verdicts}


def _runs(name: str, card_mib: int) -> bool:
    return bool(json.loads(_python("-m", "benchmarks.cuda_steps", name, "--run", card_mib=card_mib))["ran"])


def _ran_or_runs(name: str, card_mib: int, found: dict[str, Any], needed_mib: int) -> bool:
    """Return whether a step runs on a card: with room to spare it does, below its tensors not, else it is tried."""
    if found["reserved"] + _CONTEXT_BYTES <= card_mib * _MIB:
        return True
    return found["allocated"] < card_mib * _MIB and _runs(name, card_mib)


def _row(name: str, found: dict[str, Any]) -> Row:
    if "refused" in found:
        return Row(name, _TARGET, f"refused: {found['refused']}", "", "", met=False)
    ours = f"{_size(found['peak_bytes'])}, {_error(found, 'peak_bytes', 'allocated'):+.2%}; reserved "
    ours += f"{_size(found['reserved_bytes'])}, {_error(found, 'reserved_bytes', 'reserved'):+.2%}; "
    ours += f"needs {_size(found['needed_bytes'])}"
    wrong = [f"{size} MiB" for size, (said, true) in found["verdicts"].items() if said is not true]
    ours += f"; wrong of {', '.join(wrong)}" if wrong else ""
    control = f"{_size(found['allocated'])}; reserved {_size(found['reserved'])}"
    met = abs(_error(found, "peak_bytes", "allocated")) <= _WORST and not _false_fits(found)
    return Row(name, _TARGET, ours, "", control, met)


def _totals(found: list[dict[str, Any]]) -> list[Row]:
    known = [figures for figures in found if "refused" not in figures]
    errors = sorted(abs(_error(figures, "peak_bytes", "allocated")) for figures in known)
    reserved = sorted(abs(_error(figures, "reserved_bytes", "reserved")) for figures in known)
    false = sum(map(_false_fits, known))
    unduly = sum(true and not said for figures in known for said, true in figures["verdicts"].values())
    asked = sum(len(figures["verdicts"]) for figures in known)
    spread = f"{median(errors):.3%}, {errors[-1]:.2%}"
    met = median(errors) <= _MEDIAN and errors[-1] <= _WORST
    return [
        Row("allocated: median error, worst", "0.5 %, 3 %", spread, "", f"{len(known)} steps", met),
        Row("reserved: median error, worst", "", f"{median(reserved):.3%}, {reserved[-1]:.2%}", "", "", None),
        Row('"fits" that were false', "0", str(false), "", f"{asked} verdicts", false == 0),
        Row('"does not fit" that were false', "", str(unduly), "", f"{asked} verdicts", None),
    ]


def _false_fits(found: dict[str, Any]) -> int:
    return sum(said and not true for said, true in found["verdicts"].values())


def _error(found: dict[str, Any], estimated: str, seen: str) -> float:
    return float(found[estimated] / found[seen] - 1)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.2f} GiB"
