"""Recovery from real allocation failures of torch on the CPU, and data loaders."""

from __future__ import annotations

import re

import pytest

from tests.kernel import Kernel
from tests.steps import recovery, works

pytest.importorskip("torch", reason="these tests need torch, which comes with the extra 'torch'")


def test_torchs_cpu_allocator_refusing_is_an_oom_with_its_size(notebook: Kernel) -> None:
    works(
        notebook,
        "watched.clear()\n"
        "def train(size):\n"
        "    model = nn.Linear(1024, 1024)\n"
        "    batch = torch.ones(256, 1024)\n"
        "    loss = model(batch).square().mean()\n"
        "    watch(model=model, batch=batch, loss=loss, weight=model.weight)\n"
        "    big = torch.empty(size, dtype=torch.uint8)\n"
        "    return 'trained'",
    )
    text = recovery(notebook, "train(1 << 50)")
    assert "out of memory (RuntimeError)" in text
    assert "asked for 1.00 PiB" in text
    rows = [" ".join(line.split()) for line in text.splitlines() if line.split()[2:3] == ["train"]]
    assert len(rows) == 2
    assert re.fullmatch(r"4 MiB train \d+ model Linear 2 arrays float32 cpu", rows[0])
    assert re.fullmatch(r"1 MiB train \d+ batch Tensor 256 × 1024 float32 cpu", rows[1])
    assert notebook.value("alive()") == []
    assert works(notebook, "train(1 << 20)").result == "'trained'"


def test_an_optimizer_that_keeps_half_of_its_state_is_reported(notebook: Kernel) -> None:
    works(
        notebook,
        "def step(optimizer, fails):\n"
        "    zeros = torch.zeros_like\n"
        "    def fail(*args, **options):\n        raise torch.OutOfMemoryError('CUDA out of memory.')\n"
        "    try:\n        torch.zeros_like = fail if fails else zeros\n        optimizer.step()\n"
        "    finally:\n        torch.zeros_like = zeros\n"
        "def made(kind):\n"
        "    model = nn.Linear(4, 4)\n    model(torch.ones(1, 4)).sum().backward()\n"
        "    return kind(model.parameters(), lr=0.1)\n"
        "kept = made(torch.optim.AdamW)",
    )
    advice = "Make a new optimizer, or call its state.clear()"
    assert f"AdamW has only half of its state: its next step fails on that (KeyError). {advice}." in recovery(
        notebook, "step(kept, True)"
    )
    assert notebook.run("kept.step()").error == "KeyError"
    works(notebook, "kept.state.clear(); kept.step()")
    assert advice not in recovery(notebook, "step(made(torch.optim.AdamW), True)")  # nobody can use that one again
    assert advice not in recovery(notebook, "step(kept, False); torch.empty(1 << 50)")


def test_an_oom_in_a_data_loaders_dataset_leaves_no_batch(notebook: Kernel) -> None:
    works(notebook, "watched.clear()")
    recovery(
        notebook,
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Images(Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, index):\n"
        "        if index == 3: raise MemoryError\n"
        "        image = torch.ones(1 << 18); watch(image=image)\n        return image\n"
        "def train():\n    for batch in DataLoader(Images(), batch_size=2): watch(batch=batch)\ntrain()",
    )
    assert notebook.value("alive()") == []


def test_forked_data_loader_workers_in_a_scope_end_with_it(notebook: Kernel) -> None:
    works(notebook, "x = 'old'\nfrom torch.utils.data import DataLoader")
    works(
        notebook,
        "%%experiment a\nx = 'new'\nloader = DataLoader(torch.arange(64.), batch_size=8, num_workers=1)\n"
        "total = sum(batch.sum().item() for batch in loader)\nassert total == 2016",
        timeout=60,
    )
    assert notebook.value("x") == "old"
