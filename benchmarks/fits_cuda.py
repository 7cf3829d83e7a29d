"""Checks that a cell fits on a card of the stated size after a change that ``%%estimate --fit``
suggests.

Each change is pasted into its cell, which runs on a simulated card of this size in MiB.

``python -m benchmarks.fits_cuda`` runs in the environment of the simulated card, and writes
docs/measured/fits.md.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import tempfile
import traceback
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers.modeling_utils  # noqa: F401  # loaded once, where it does not ask for a card

from benchmarks import environment
from benchmarks.report import table

PAGE = Path(__file__).parent.parent / "docs" / "measured" / "fits.md"
_MIB = 2**20
_SHARE = 0.8
"""Share of the memory of the unchanged cell that the search is given."""
_CELL = """
import torch, transformers
with torch.device("PLACE"):
    model = transformers.{model}
    batch = {batch}
#MODEL
optimizer = torch.optim.AdamW(model.parameters())
#OPTIMIZER
for _ in range(2):
    loss = {loss}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_WORDS = (
    '{"input_ids": torch.zeros(ROWS, dtype=torch.long), "labels": torch.zeros(ROWS, '
    "dtype=torch.long)}"
)
_MODELS = {
    "T5, 4 layers, batch 16": (
        "T5ForConditionalGeneration(transformers.T5Config(num_layers=4, decoder_start_token_id=0))",
        _WORDS.replace("ROWS", "16, 256"),
    ),
    "ViT-B/16, 4 layers, batch 32": (
        "ViTForImageClassification(transformers.ViTConfig(num_hidden_layers=4))",
        '{"pixel_values": torch.randn(32, 3, 224, 224), "labels": torch.zeros(32, '
        "dtype=torch.long)}",
    ),
    "Whisper tiny, batch 8": (
        "WhisperForConditionalGeneration(transformers.WhisperConfig())",
        '{"input_features": torch.randn(8, 80, 3000), "labels": torch.zeros(8, 64, '
        "dtype=torch.long)}",
    ),
    "CLIP ViT-B/32, 3 + 3 layers, batch 64": (
        "CLIPModel(transformers.CLIPConfig(text_config={'num_hidden_layers': 3}, "
        "vision_config={'num_hidden_layers': 3}))",
        '{"input_ids": torch.zeros(64, 77, dtype=torch.long), "pixel_values": torch.randn(64, 3, '
        "224, 224)}",
    ),
    "Mamba, 2 layers, batch 8": (
        "MambaForCausalLM(transformers.MambaConfig(num_hidden_layers=2))",
        _WORDS.replace("ROWS", "8, 64"),
    ),
}
_HEAD = """\
# Changes that make it fit

Written by `python -m benchmarks.fits_cuda`.

{where}

Two steps of each model with random weights and AdamW. `%%estimate --fit` searches with {share:.0%} of the memory that
the unchanged cell needs. Each line that it suggests is pasted into the cell, and the cell is run on a
[simulated card](../../tests/simulated_gpu/README.md) of exactly the size, to the MiB, from which on the estimate says
that it fits. {ran} of {all} ran, of {models} models.
"""  # noqa: E501


def _cell(name: str) -> str:
    """Return the cell that trains a model, with places for changes (#MODEL, #OPTIMIZER)."""
    model, batch = _MODELS[name]
    loss = "model(**batch).loss"
    if "CLIP" in name:
        loss = "model(**batch, return_loss=True).loss"
    return _CELL.format(model=model, batch=batch, loss=loss)


def _pasted(cell: str, change: dict[str, Any]) -> str:
    """Return a cell with a suggested line where a user writes it."""
    line = change["line"]
    assert not line.startswith("#")
    loss = re.search(r"loss = (.*)", cell)[1]  # type: ignore[index]
    match change["kind"]:
        case "batch":
            return cell.replace(f"loss = {loss}\n    loss.backward()", _part_loop(line, loss))
        case "autocast":
            return cell.replace(f"loss = {loss}", line.replace("...", f"loss = {loss}", 1))
        case "checkpoint" | "trained":
            return cell.replace("#MODEL", line)
    return cell.replace("#OPTIMIZER", line)


def _part_loop(line: str, loss: str) -> str:
    """Return a suggested loop over parts of the batch, with the loss of a part in its body.

    Args:
        line: the suggestion, which has ``...`` for the body.
        loss: the expression of the whole batch's loss, such as ``model(**batch).loss``.
    """
    keys = re.findall(r"batch\['(\w+)'\]", line)
    passes = re.search(r"loss / (\d+)", line)[1]  # type: ignore[index]
    part = f"{{{keys[0]!r}: part}}"
    if len(keys) > 1:
        part = f"dict(zip({keys}, parts))"
    part_loss = loss.replace("**batch", f"**{part}")
    return line.replace("...", f"({part_loss} / {passes}).backward()", 1)


def _changes(name: str) -> list[dict[str, Any]]:
    """Return the changes that help a model's cell, each with the smallest card in MiB on which the
    estimate says that it fits.
    """
    from benchmarks.harness import fit_search

    cell = _cell(name).replace("PLACE", "cpu")
    search = fit_search.search(cell, "1TiB", run=False, timeout=3600)
    base = search.trial_with(search.unchanged)
    search._room_bytes = int(_SHARE * base.device.required_bytes)
    search.run(base, lambda _: None)
    print(name, search.useless, search.failed, file=sys.stderr)
    changes = []
    for trial in search.trials:
        kind = trial.changes[0].excludes
        if not kind:
            kind = "autocast" if "autocast" in trial.title else "optimizer"
        changes.append(
            {
                "title": trial.title,
                "kind": kind,
                "line": trial.changes[0].line,
                "mib": _smallest_card_mib(trial.device),
            }
        )
    return changes


def _smallest_card_mib(device: Any) -> int:
    """Return the smallest room in MiB with which the estimate says that a device suffices."""
    sizes_mib = range(1024, 160 * 1024)

    def fits(mib: int) -> bool:
        return bool(replace(device, room_bytes=mib * _MIB).verdict == "fits")

    return sizes_mib[bisect_left(sizes_mib, True, key=fits)]


def _run(cell: str) -> dict[str, Any]:
    """Return the counters of the card's allocator after a cell."""
    # Weights have no values on the card, and erfinv_ needs a compiler.
    with patch.object(torch.Tensor, "erfinv_", lambda tensor: tensor):
        exec(cell.replace("PLACE", "cuda"), {})
    return {"reserved": torch.cuda.max_memory_reserved()}


def _apart(work: Callable[[], Any], card_mib: int) -> Any:
    """Return the result of ``work`` in a process of its own with one card of this size, or with
    none for 0.
    """
    with tempfile.NamedTemporaryFile() as table_file, tempfile.NamedTemporaryFile("r") as answer:
        child = os.fork()
        if not child:
            os.environ |= {"SIM_TABLE": table_file.name, "SIM_TOTAL_MIB": str(card_mib or 1024)}
            os.environ["CUDA_VISIBLE_DEVICES"] = "0" if card_mib else ""
            ctypes.CDLL("libcudart.so.13").simulate_error(0)  # else it refuses a forked process
            try:
                Path(answer.name).write_text(json.dumps(work()), encoding="utf-8")
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        text = answer.read()
    if not text:
        return None
    return json.loads(text)


def main() -> None:
    """Run each model's cell with each change, and write the page."""
    rows = []
    for name in _MODELS:
        changes = _apart(partial(_changes, name), 0) or ()
        for change in changes:
            row = _row(name, change)
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    PAGE.write_text(_page(rows), encoding="utf-8")


def _row(name: str, change: dict[str, Any]) -> tuple[str, ...]:
    """Run a model's cell with a change, on a card of the stated size; return its row."""
    cell = _pasted(_cell(name), change)
    counters = _apart(partial(_run, cell), change["mib"])
    reserved = ""
    ran = "**no**"
    if counters:
        reserved = f"{counters['reserved'] / _MIB:,.0f} MiB"
        ran = "yes"
    return (name, change["title"], f"{change['mib']:,} MiB", reserved, ran)


def _page(rows: list[tuple[str, ...]]) -> str:
    """Return the page of all rows."""
    head = _HEAD.format(
        where=environment.describe_as_list(),
        share=_SHARE,
        ran=sum(row[-1] == "yes" for row in rows),
        all=len(rows),
        models=len({row[0] for row in rows}),
    )
    heads = ("model", "change", "card", "reserved in the run", "ran")
    return f"{head}\n{table(heads, rows)}\n"


if __name__ == "__main__":
    main()
