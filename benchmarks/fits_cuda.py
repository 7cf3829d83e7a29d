"""Runs of the changes of ``%%estimate --fit``: each is pasted into its cell, and run on a card of
the stated size.

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
    model, batch = _MODELS[name]
    loss = "model(**batch, return_loss=True).loss" if "CLIP" in name else "model(**batch).loss"
    return _CELL.format(model=model, batch=batch, loss=loss)


def _pasted(cell: str, change: dict[str, str]) -> str:
    """Return a cell with a suggested line where a user writes it."""
    line, kind = change["line"], change["kind"]
    assert not line.startswith("#")
    loss = re.search(r"loss = (.*)", cell)[1]  # type: ignore[index]
    if kind == "batch":
        keys, passes = re.findall(r"batch\['(\w+)'\]", line), re.search(r"loss / (\d+)", line)[1]  # type: ignore[index]
        one = f"dict(zip({keys}, parts))" if len(keys) > 1 else f"{{{keys[0]!r}: part}}"
        body = line.replace(
            "...", f"({loss.replace('**batch', f'**{one}')} / {passes}).backward()", 1
        )
        return cell.replace(f"loss = {loss}\n    loss.backward()", body)
    if kind == "autocast":
        return cell.replace(f"loss = {loss}", line.replace("...", f"loss = {loss}", 1))
    place = "#MODEL" if kind in ("checkpoint", "trained") else "#OPTIMIZER"
    return cell.replace(place, line)


def _searched(name: str) -> list[dict[str, Any]]:
    """Return the changes that help, each with the smallest card on which the estimate says that it
    fits.
    """
    from benchmarks.harness.fit_search import search

    found = search(_cell(name).replace("PLACE", "cpu"), "1TiB", run=False, timeout=3600)
    base = found.trial_with(found.unchanged)
    found._room_bytes = int(_SHARE * base.device.required_bytes)
    found.run(base, lambda _: None)
    print(name, found.useless, found.failed, file=sys.stderr)
    sizes = range(1024, 160 * 1024)
    changes = []
    for trial in found.trials:
        turn = bisect_left(
            sizes,
            True,
            key=lambda mib: replace(trial.device, room_bytes=mib * _MIB).verdict == "fits",
        )
        kind = trial.changes[0].excludes or (
            "autocast" if "autocast" in trial.title else "optimizer"
        )
        changes.append(
            {"title": trial.title, "kind": kind, "line": trial.changes[0].line, "mib": sizes[turn]}
        )
    return changes


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
    return json.loads(text) if text else None


def main() -> None:
    """Write the page."""
    rows = []
    for name in _MODELS:
        for change in _apart(lambda name=name: _searched(name), 0) or ():
            cell = _pasted(_cell(name), change)
            ran = _apart(lambda cell=cell: _run(cell), change["mib"])
            used = f"{ran['reserved'] / _MIB:,.0f} MiB" if ran else ""
            rows.append(
                (name, change["title"], f"{change['mib']:,} MiB", used, "yes" if ran else "**no**")
            )
            print(rows[-1], file=sys.stderr, flush=True)
    PAGE.write_text(_page(rows), encoding="utf-8")


def _page(rows: list[tuple[str, ...]]) -> str:
    where = "\n".join(f"- {line}" for line in environment.describe())
    ran = sum(row[-1] == "yes" for row in rows)
    head = _HEAD.format(
        where=where, share=_SHARE, ran=ran, all=len(rows), models=len({row[0] for row in rows})
    )
    heads = ("model", "change", "card", "reserved in the run", "ran")
    return f"{head}\n{table(heads, rows)}\n"


if __name__ == "__main__":
    main()
