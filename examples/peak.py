"""Makes the picture of ``%%peak`` in docs/memory.md: ``python examples/peak.py docs/img``. It runs
the page's example.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import ipygpumem

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
optimizer = torch.optim.Adam(model.parameters())
images = torch.randn(2048, 256)

with ipygpumem.peak() as found:
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(images).square().mean()
        loss.backward()
        optimizer.step()

found.record.picture().savefig(Path(sys.argv[1]) / "peak.png")
