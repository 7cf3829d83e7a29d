"""Ten small models for %%estimate --fit, and their cells with a written change pasted into them."""

import re

from benchmarks.harness.fit_search import search
from ipygpumem.extras.fit.applying import Change
from ipygpumem.extras.fit.changes import batch_in_parts, candidates
from ipygpumem.extras.fit.fit_command import ChangeSearch

_ENCODER = "nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)"
_SMALL_NETS = """
class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))

class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        return x + self.conv(self.norm(x).relu())
"""
_IMAGES = "torch.randn(8, 3, 16, 16)"
_LABELS = "torch.arange(8) % 10"
_CROSS_ENTROPY = "functional.cross_entropy(model(x), y)"
MODELS = {
    "perceptron": (
        "nn.Sequential(Residual(), Residual(), nn.Linear(64, 10))",
        "torch.randn(8, 64)",
    ),
    "encoder": (f"nn.Sequential({_ENCODER}, {_ENCODER}, nn.Flatten(), nn.Linear(512, 10))",),
    "words": (
        f"nn.Sequential(nn.Embedding(50, 64), {_ENCODER}, {_ENCODER}, nn.Flatten(), "
        "nn.Linear(512, 10))",
        "torch.arange(64).reshape(8, 8) % 50",
    ),
    "images": (
        "nn.Sequential(nn.Conv2d(3, 16, 3), Convolution(), Convolution(), nn.Flatten(), "
        "nn.Linear(3136, 10))",
        _IMAGES,
    ),
    "sum": (
        "nn.Sequential(Residual(), Residual(), nn.Linear(64, 10))",
        "torch.randn(8, 64)",
        "functional.cross_entropy(model(x), y, reduction='sum')",
    ),
    "penalty": (
        "nn.Sequential(Residual(), Residual(), nn.Linear(64, 10))",
        "torch.randn(8, 64)",
        f"{_CROSS_ENTROPY} + 1e-3 * sum(weight.pow(2).sum() for weight in model.parameters())",
    ),
    "dropout": (
        "nn.Sequential(Residual(), nn.Dropout(0.1), Residual(), nn.Linear(64, 10))",
        "torch.randn(8, 64)",
    ),
    "batch norm": (
        "nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(3136, 10))",
        _IMAGES,
    ),
    "autoencoder": (
        "nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 64), Residual(), Residual())",
        "torch.randn(8, 64)",
        "functional.mse_loss(model(x), x) + 0 * y.sum()",
    ),
    "upsampling": (
        "nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), Convolution(), Convolution(), "
        "nn.ConvTranspose2d(16, 3, 4, stride=2))",
        _IMAGES,
        "functional.l1_loss(model(x), x) + 0 * y.sum()",
    ),
}
"""For each model its code, its data, and its loss."""


def _code(name: str) -> tuple[str, str, str]:
    given = MODELS[name]
    defaults = ("", "torch.randn(8, 8, 64)", _CROSS_ENTROPY)
    model, data, loss = (*given, *defaults[len(given) :])
    return model, data, loss


def cell(name: str, line: str = "", step: str = "loss = LOSS; loss.backward()") -> str:
    """Return the cell that trains a model, with a line below the model and the optimizer."""
    model, data, loss = _code(name)
    step = step.replace("LOSS", loss)
    return f"""
import torch
from torch import nn
from torch.nn import functional
{_SMALL_NETS}
torch.manual_seed(0)
model = {model}
optimizer = torch.optim.AdamW(model.parameters())
x, y = {data}, {_LABELS}
whole = x, y
{line}
for _ in range(2):
    optimizer.zero_grad()
    x, y = whole
    {step}
    optimizer.step()
"""


_PARTS = re.compile(r"(for (\w+) in (zip)?.*): \.\.\.  # (.*) for each part, then one step\(\)")


def pasted(name: str, change: Change) -> str:
    """Return the cell of a model with the written lines of a change."""
    *imports, line = change.line.split("\n")
    in_parts = _PARTS.fullmatch(line)
    if in_parts is not None:
        loop, part, is_zipped, backward = in_parts.groups()
        names = "x, y" if is_zipped else "x"
        return cell(name, step=f"{loop}:\n        {names} = {part}; loss = LOSS; {backward}")
    if line.startswith("with "):
        with_block = line.partition(": ...")[0]
        return cell(name, step=f"{with_block}: loss = LOSS\n    loss.backward()")
    return cell(name, "\n".join([*imports, line]))


def changes(name: str) -> tuple[ChangeSearch, list[Change]]:
    """Return the search for a model, and the changes that it offers."""
    fit = search(cell(name), "1GiB", run=False)
    return fit, [*candidates(fit.findings), next(batch_in_parts(fit.findings, None))]
