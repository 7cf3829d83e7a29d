"""Makes small networks to train, and measures the bytes of their real storages: estimates are
compared with them.
"""

import inspect
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint


class RealStorages(TorchDispatchMode):
    """The bytes of real storages while code runs, each rounded up to 512, as torch's allocator
    rounds: ``now`` and at their ``peak``.
    """

    def __init__(self, *before: torch.Tensor) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[Any]] = {}
        self.now = self.peak = 0
        for tensor in before:
            self._follow(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._follow(value)
        return result

    def _follow(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, unless it is counted, until it is freed."""
        if tensor.layout is torch.sparse_coo:
            self._follow(tensor._indices())
            self._follow(tensor._values())
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = -(-storage.nbytes() // 512) * 512
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._forget(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def _forget(self, key: int, size: int) -> None:
        del self._alive[key]
        self.now -= size


class Residual(nn.Module):
    """A residual block that halves the size of pictures."""

    def __init__(self, given: int, wide: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(given, wide, 3, 2, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(inplace=True),
            nn.Conv2d(wide, wide, 3, 1, 1),
            nn.BatchNorm2d(wide),
        )
        self.short = nn.Conv2d(given, wide, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.short(x))


class Transformer(nn.Module):
    """Three layers of a transformer with a head; a decoder if it is ``causal``."""

    def __init__(self, *, causal: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(500, 64)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(3)]
        )
        self.head = nn.Linear(64, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        mask = None
        if self.causal:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(layer, x, mask, use_reentrant=False)
            else:
                x = layer(x, mask)
        return self.head(x).flatten(0, -2)


def convolutional() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(
        first,
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(16 * 256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def residual() -> nn.Module:
    return nn.Sequential(
        Residual(3, 32), Residual(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    )


def images() -> torch.Tensor:
    return torch.randn(32, 3, 32, 32)


def tokens() -> torch.Tensor:
    return torch.randint(0, 500, (16, 32))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "CNN": (convolutional, images),
    "ResNet": (residual, images),
    "decoder": (partial(Transformer, causal=True), tokens),
    "checkpointing": (partial(Transformer, checkpointed=True), tokens),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": Adam,
    "SGD": partial(SGD, lr=0.1, momentum=0.9),
    "AdamW foreach": partial(AdamW, foreach=True),
    "AdamW fused": partial(AdamW, fused=True),
}


def training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    *,
    mixed: bool = False,
    rounds: int = 1,
) -> float:
    """Train two steps, and return the last loss.

    Args:
        model: a classifier whose outputs are compared with class 0.
        optimizer: the optimizer of its parameters.
        x: the input.
        mixed: True for autocast with bfloat16.
        rounds: number of backward passes in a step.
    """
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(rounds):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
                y = model(x)
                loss = functional.cross_entropy(y, torch.zeros(len(y), dtype=torch.long))
            loss.backward()
        optimizer.step()
    return loss.item()


def every_optimizer(place: str = "cpu") -> list[Any]:
    """Return torch's optimizers with each option that chooses how they step, as far as ``place``
    supports it.
    """
    optimizers = []
    for kind in vars(torch.optim).values():
        if not isinstance(kind, type) or kind in (torch.optim.Optimizer, torch.optim.SparseAdam):
            continue
        for options in _OPTIMIZER_OPTIONS:
            if _supports(kind, options, place):
                weights = [nn.Parameter(torch.ones(64, 64, device=place)) for _ in range(2)]
                for weight in weights:
                    weight.grad = torch.ones_like(weight)
                optimizers.append(kind(weights, **options))
    return optimizers


_OPTIMIZER_OPTIONS: tuple[dict[str, bool], ...] = (
    {},
    {"fused": True},
    {"foreach": True},
    {"foreach": False},
    {"capturable": True},
    {"amsgrad": True},
)


def _supports(kind: Any, options: dict[str, bool], place: str) -> bool:
    """Return True if an optimizer's class takes the options and has a kernel for ``place``."""
    if kind is torch.optim.Adagrad and "fused" in options and place != "cpu":
        return False  # before torch 2.12
    return options.keys() <= inspect.signature(kind).parameters.keys()
