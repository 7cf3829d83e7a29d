"""A training cell, and the cells that a user would write by hand for each change of ``--fit``."""

from __future__ import annotations

from benchmarks.harness.fit_search import FILE
from ipygpumem.estimating.records import Estimate
from ipygpumem.estimating.running import Estimation

NET = """
import torch
from functools import partial
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(256, 1024), nn.Linear(1024, 256), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(functional.gelu(self.up(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block(), Block()), nn.Linear(256, 10)

    def forward(self, x):
        return self.head(self.blocks(x))
"""
CELL = f"""{NET}
torch.manual_seed(0)
model = Net()
{{}}
optimizer = {{}}
x, y = torch.randn(8, 512, 256), torch.zeros(4096, dtype=torch.long)
for _ in range(2):
    {{}}
    optimizer.step()
    optimizer.zero_grad()
"""
ADAM = "torch.optim.AdamW(model.parameters())"
LOSS = "functional.cross_entropy(model(x).flatten(0, 1), y)"
PART = "functional.cross_entropy(model(a).flatten(0, 1), b) / 2"
PLAIN = CELL.format("", ADAM, f"loss = {LOSS}; loss.backward()")
BY_HAND = {
    "foreach=False": CELL.format(
        "", ADAM.replace("())", "(), foreach=False)"), f"{LOSS}.backward()"
    ),
    "batch 4 instead of 8": CELL.format(
        "", ADAM, f"for a, b in zip(x.split(4), y.split(2048)): ({PART}).backward()"
    ),
    "checkpoint 3 Block": CELL.format("LINE", ADAM, f"{LOSS}.backward()"),
    "bfloat16 autocast": CELL.format(
        "",
        ADAM,
        f"with torch.autocast('cuda', dtype=torch.bfloat16): loss = {LOSS}\n    loss.backward()",
    ),
    "torch.optim.Adafactor": CELL.format(
        "", ADAM.replace("AdamW", "Adafactor"), f"{LOSS}.backward()"
    ),
    "torch.optim.SGD": CELL.format("", ADAM.replace("AdamW", "SGD"), f"{LOSS}.backward()"),
    "freeze all but the last layer": CELL.format("LINE", ADAM, f"{LOSS}.backward()"),
}


def estimated(cell: str) -> Estimate:
    return Estimation("cuda", 1 << 40).of_code(compile(cell, FILE, "exec"), {})
