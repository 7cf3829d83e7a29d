"""Networks and their training, and what of them is really alive: what estimates are
held against.
"""

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint


class RealStorages(TorchDispatchMode):
    """The bytes of real storages while code runs, in blocks of 512: what estimates are held
    against.
    """

    def __init__(self, *before: torch.Tensor) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[Any]] = {}
        self.now = self.peak = 0
        for tensor in before:
            self._see(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._see(value)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor.layout is torch.sparse_coo:
            self._see(tensor._indices())
            self._see(tensor._values())
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = -(-storage.nbytes() // 512) * 512
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._gone(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def _gone(self, key: int, size: int) -> None:
        del self._alive[key]
        self.now -= size


class Residual(nn.Module):
    def __init__(self, given: int, wide: int) -> None:
        super().__init__()
        first = (
            nn.Conv2d(given, wide, 3, 2, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(inplace=True),
        )
        self.body = nn.Sequential(*first, nn.Conv2d(wide, wide, 3, 1, 1), nn.BatchNorm2d(wide))
        self.short = nn.Conv2d(given, wide, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.short(x))


class Transformer(nn.Module):
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
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        for layer in self.layers:
            x = (
                checkpoint(layer, x, mask, use_reentrant=False)
                if self.checkpointed
                else layer(x, mask)
            )
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
    "decoder": (lambda: Transformer(causal=True), tokens),
    "checkpointing": (lambda: Transformer(checkpointed=True), tokens),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": Adam,
    "SGD": lambda parameters: SGD(parameters, 0.1, momentum=0.9),
    "AdamW foreach": lambda parameters: AdamW(parameters, foreach=True),
    "AdamW fused": lambda parameters: AdamW(parameters, fused=True),
}


def training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    *,
    mixed: bool = False,
    rounds: int = 1,
) -> float:
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
    made = []
    options = (
        {},
        {"fused": True},
        {"foreach": True},
        {"foreach": False},
        {"capturable": True},
        {"amsgrad": True},
    )
    kinds: list[Any] = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    for kind in kinds:
        for chosen in (
            options if kind not in (torch.optim.Optimizer, torch.optim.SparseAdam) else ()
        ):
            # before torch 2.12
            has_no_kernel = kind is torch.optim.Adagrad and "fused" in chosen and place != "cpu"
            if chosen.keys() - inspect.signature(kind).parameters or has_no_kernel:
                continue
            weights = [nn.Parameter(torch.ones(64, 64, device=place)) for _ in range(2)]
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            made.append(kind(weights, **chosen))
    return made
