"""The largest batch by estimates alone, without a card, against the largest that runs on the
simulated card.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import estimates_cuda
from benchmarks.report import Row, Section

_GIB = 24
_METHOD = f"""\
`ipygpumem.autofit` searches by estimates alone, with CUDA hidden, for the largest batch with which two training steps
(AdamW) fit a card of {_GIB} GiB. The true maximum is the largest that runs, each in a fresh process, on a simulated
card of this size."""  # noqa: E501


def _models() -> dict[str, tuple[Callable[[], Any], Callable[[Any, int], Any], int]]:
    """Return for each model its construction, the loss of a batch, and the batch to start from."""
    import timm
    import torch
    import torchvision
    import transformers

    from benchmarks.cuda_models import UNet, gpt2, small

    def images(model: Any, n: int, wide: int = 224) -> Any:
        return model(torch.zeros(n, 3, wide, wide, device="cuda")).float().mean()

    def words(model: Any, n: int, length: int = 512) -> Any:
        text = torch.zeros(n, length, dtype=torch.long, device="cuda")
        return model(input_ids=text, labels=text).loss

    def bert() -> Any:
        return transformers.BertForMaskedLM(transformers.BertConfig())

    def t5() -> Any:
        config = transformers.T5Config(
            d_model=768, d_ff=3072, num_layers=12, decoder_start_token_id=0
        )
        return transformers.T5ForConditionalGeneration(config)

    def timms(name: str) -> Any:
        return timm.create_model(name)

    return {
        "GPT-2 medium": (partial(gpt2, 1024, 24, 16), partial(words, length=1024), 64),
        "BERT base": (bert, words, 256),
        "LLaMA 1B, bf16": (small, partial(words, length=2048), 32),
        "T5": (t5, words, 256),
        "UNet": (partial(UNet, 64, 128, 256, 512), partial(images, wide=512), 64),
        "ViT large": (partial(timms, "vit_large_patch16_384"), partial(images, wide=384), 128),
        "ConvNeXt large": (partial(timms, "convnext_large"), partial(images, wide=384), 128),
        "Swin large": (
            partial(timms, "swin_large_patch4_window12_384"),
            partial(images, wide=384),
            128,
        ),
        "DenseNet-161": (torchvision.models.densenet161, partial(images, wide=512), 64),
    }


def _child(name: str, batch: int) -> object:
    """Return the batch found for a model; or, if one is given, whether it runs."""
    import torch

    import ipygpumem

    make, loss, start = _models()[name]

    def step(n: int) -> None:
        model = make().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            loss(model, n).backward()
            optimizer.step()

    if not batch:
        estimated = partial(ipygpumem.estimate, step, device="cuda", device_memory=f"{_GIB}GiB")
        found: Any = ipygpumem.autofit(lambda n: estimated(n), n=start)
        return [found.value, len(found.tries)]
    try:
        step(batch)
    except torch.OutOfMemoryError:
        return False
    return True


def _in_child(name: str, batch: int = 0) -> Any:
    hidden = {} if batch else {"CUDA_VISIBLE_DEVICES": ""}
    command = [
        str(estimates_cuda._PYTHON),
        "-W",
        "ignore",
        "-m",
        "benchmarks.batches_cuda",
        name,
        str(batch),
    ]
    home = str(estimates_cuda._HOME)
    with tempfile.NamedTemporaryFile() as table:  # the simulated machine is this process's own
        settings = {"SIM_TOTAL_MIB": str(_GIB * 1024), "SIM_TABLE": table.name, "PYTHONPATH": home}
        env = {**os.environ, **settings, **hidden}
        done = subprocess.run(
            command, env=env, cwd=home, check=True, text=True, stdout=subprocess.PIPE
        )
    return json.loads(done.stdout.splitlines()[-1])


def _true_maximum(name: str, found: int) -> int:
    """Return the largest batch that runs, from the one that was found on."""
    low = 0
    high = 0
    width = 1
    if _in_child(name, found):
        low = found
        while not high:
            low, high = (low + width, 0) if _in_child(name, low + width) else (low, low + width)
            width *= 2
    else:
        high = found
        while not low:
            low, high = (
                (high - width, high) if _in_child(name, max(1, high - width)) else (0, high - width)
            )
            width *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _in_child(name, middle) else (low, middle)
    return low


def run(*, quick: bool) -> Section:
    """Return the batch found for each model beside the largest that runs."""
    title = "Largest batch by estimates alone"
    if not estimates_cuda._PYTHON.exists():
        return Section(
            title, f"{_METHOD}\n\nThere is no simulated card here: `make gpu-sim` builds it.", ()
        )
    names = [
        "GPT-2 medium",
        "BERT base",
        "LLaMA 1B, bf16",
        "T5",
        "UNet",
        "ViT large",
        "ConvNeXt large",
        "Swin large",
    ]
    names += ["DenseNet-161"]
    rows = []
    for name in names[: 2 if quick else None]:
        found, tries = _in_child(name)
        true = _true_maximum(name, found)
        rows.append(
            Row(
                name,
                "within 1",
                f"{found} by {tries} estimates",
                "",
                f"{true} runs",
                abs(found - true) <= 1,
            )
        )
    return Section(title, _METHOD, tuple(rows), control="simulated card")


if __name__ == "__main__":
    print(json.dumps(_child(sys.argv[1], int(sys.argv[2]))))  # to the parent
