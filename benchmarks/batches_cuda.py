"""Compares the largest batch that ``autofit`` finds by estimates alone with the largest that runs.

The search has no card; the batches run on a simulated card of 24 GiB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from benchmarks import estimates_cuda
from benchmarks.report import Row, Section

_GIB = 24
_METHOD = f"""\
`ipygpumem.autofit` searches by estimates alone, with CUDA hidden, for the largest batch with which two training steps
(AdamW) fit a card of {_GIB} GiB. The true maximum is the largest that runs, each in a fresh process, on a simulated
card of this size."""  # noqa: E501


class _Model(NamedTuple):
    """A model to train: its construction, the loss of a batch, and the first batch to try."""

    make: Callable[[], Any]
    loss: Callable[[Any, int], Any]
    first_batch: int


_NAMES = (
    "GPT-2 medium",
    "BERT base",
    "LLaMA 1B, bf16",
    "T5",
    "UNet",
    "ViT large",
    "ConvNeXt large",
    "Swin large",
    "DenseNet-161",
)


def _models() -> dict[str, _Model]:
    """Return all models by name; nothing is made yet."""
    import timm
    import torchvision
    import transformers  # noqa: F401  # loaded before an estimate begins

    from benchmarks.cuda_models import UNet, gpt2, small

    small_images = partial(_image_loss, wide=384)
    large_images = partial(_image_loss, wide=512)
    vit = partial(timm.create_model, "vit_large_patch16_384")
    convnext = partial(timm.create_model, "convnext_large")
    swin = partial(timm.create_model, "swin_large_patch4_window12_384")
    return {
        "GPT-2 medium": _Model(partial(gpt2, 1024, 24, 16), partial(_text_loss, length=1024), 64),
        "BERT base": _Model(_bert, _text_loss, 256),
        "LLaMA 1B, bf16": _Model(small, partial(_text_loss, length=2048), 32),
        "T5": _Model(_t5, _text_loss, 256),
        "UNet": _Model(partial(UNet, 64, 128, 256, 512), large_images, 64),
        "ViT large": _Model(vit, small_images, 128),
        "ConvNeXt large": _Model(convnext, small_images, 128),
        "Swin large": _Model(swin, small_images, 128),
        "DenseNet-161": _Model(torchvision.models.densenet161, large_images, 64),
    }


def _bert() -> Any:
    import transformers

    return transformers.BertForMaskedLM(transformers.BertConfig())


def _t5() -> Any:
    import transformers

    config = transformers.T5Config(d_model=768, d_ff=3072, num_layers=12, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def _image_loss(model: Any, batch: int, wide: int) -> Any:
    """Return a loss of images of ``wide`` pixels."""
    import torch

    images = torch.zeros(batch, 3, wide, wide, device="cuda")
    return model(images).float().mean()


def _text_loss(model: Any, batch: int, length: int = 512) -> Any:
    """Return a language model's loss of texts of ``length`` tokens."""
    import torch

    tokens = torch.zeros(batch, length, dtype=torch.long, device="cuda")
    return model(input_ids=tokens, labels=tokens).loss


# -- processes ----------------------------------------------------------------------------------


def _child(name: str, batch: int) -> object:
    """Return the batch that the search finds and its number of estimates; or, if a batch is given,
    True if it runs.
    """
    import torch

    import ipygpumem

    model_of_name = _models()[name]

    def step(n: int) -> None:
        model = model_of_name.make().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model_of_name.loss(model, n).backward()
            optimizer.step()

    if not batch:
        estimated = partial(ipygpumem.estimate, step, device="cuda", device_memory=f"{_GIB}GiB")
        fit: Any = ipygpumem.autofit(lambda n: estimated(n), n=model_of_name.first_batch)
        return [fit.value, len(fit.tries)]
    try:
        step(batch)
    except torch.OutOfMemoryError:
        return False
    return True


def _searched(name: str) -> tuple[int, int]:
    """Return the batch that the search finds with CUDA hidden, and its number of estimates."""
    batch, tries = _in_child(name, 0, {"CUDA_VISIBLE_DEVICES": ""})
    return batch, tries


def _runs(name: str, batch: int) -> bool:
    """Return True if two steps with a batch run on the card."""
    return bool(_in_child(name, batch, {}))


def _in_child(name: str, batch: int, variables: dict[str, str]) -> Any:
    """Return the result of ``_child`` in a new process on a simulated machine of its own."""
    python = str(estimates_cuda._PYTHON)
    command = [python, "-W", "ignore", "-m", "benchmarks.batches_cuda", name, str(batch)]
    home = str(estimates_cuda._HOME)
    with tempfile.NamedTemporaryFile() as table:  # the simulated machine is this process's own
        settings = {"SIM_TOTAL_MIB": str(_GIB * 1024), "SIM_TABLE": table.name, "PYTHONPATH": home}
        env = {**os.environ, **settings, **variables}
        done = subprocess.run(
            command, env=env, cwd=home, check=True, text=True, stdout=subprocess.PIPE
        )
    return json.loads(done.stdout.splitlines()[-1])


def _true_maximum(name: str, estimated: int) -> int:
    """Return the largest batch that runs, searched from the estimated one on; 0 if not even a batch
    of 1 does.
    """
    runs_up_to = 0
    fails_from = 0
    width = 1
    # Steps that double, until one batch runs and a larger one fails.
    if _runs(name, estimated):
        runs_up_to = estimated
        while not fails_from:
            if _runs(name, runs_up_to + width):
                runs_up_to += width
            else:
                fails_from = runs_up_to + width
            width *= 2
    else:
        fails_from = estimated
        while not runs_up_to and fails_from > 1:
            smaller = max(1, fails_from - width)
            if _runs(name, smaller):
                runs_up_to = smaller
            else:
                fails_from = smaller
            width *= 2
    while fails_from - runs_up_to > 1:
        middle = (runs_up_to + fails_from) // 2
        if _runs(name, middle):
            runs_up_to = middle
        else:
            fails_from = middle
    return runs_up_to


def run(*, quick: bool) -> Section:
    """Return the batch that the search finds for each model, next to the largest that runs."""
    title = "Largest batch by estimates alone"
    if not estimates_cuda._PYTHON.exists():
        return Section(
            title, f"{_METHOD}\n\nThere is no simulated card here: `make gpu-sim` builds it.", ()
        )
    names = _NAMES[:2] if quick else _NAMES
    rows = tuple(_row(name) for name in names)
    return Section(title, _METHOD, rows, control="simulated card")


def _row(name: str) -> Row:
    """Search a model's batch with estimates and on the card; return its row."""
    estimated, tries = _searched(name)
    largest = _true_maximum(name, estimated)
    ours = f"{estimated} by {tries} estimates"
    met = abs(estimated - largest) <= 1
    return Row(name, "within 1", ours, "", f"{largest} runs", met)


if __name__ == "__main__":
    print(json.dumps(_child(sys.argv[1], int(sys.argv[2]))))  # to the parent
