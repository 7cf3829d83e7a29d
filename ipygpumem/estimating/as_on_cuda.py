"""Makes torch compute as on a CUDA device that is not here: some ways of the CPU take more memory."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn import functional

from ipygpumem.estimating.devices import Devices


def functions_as_there(devices: Devices) -> list[tuple[Any, str, Any]]:
    """Return where functions are, what they are called there and what stands in for them."""
    attend: Any = getattr(functional, "scaled_dot_product_attention", None)
    drop = functional.dropout

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **more: Any
    ) -> Any:
        # With dropout the CPU has no kernel that leaves the matrix of weights out; CUDA has.
        return attend(query, key, value, attn_mask, 0.0 if devices.is_elsewhere else dropout_p, *rest, **more)

    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: A002  # torch's
        if training and 0 < p < 1 and not inplace and devices.is_elsewhere:
            return torch.native_dropout(input, p, True)[0]  # it keeps a byte for each number; the CPU's keeps a number
        return drop(input, p, training, inplace)

    return [(functional, "dropout", dropout), *([(functional, attend.__name__, attention)] if attend else [])]


def choose_loop(optimizer: Any, devices: Devices) -> None:
    """Choose an optimizer's loop as torch does on accelerators: it sees that the parameters are fake."""
    kinds = type.mro(type(optimizer))
    modules = [sys.modules.get(kind.__module__) for kind in kinds if kind is not torch.optim.Optimizer]
    if not any(hasattr(module, "_default_to_fused_or_foreach") for module in modules):
        return  # such as Adafactor, which takes the plain loop everywhere
    named = (devices.named or "cpu").partition(":")[0]
    for group in optimizer.param_groups:
        is_chosen = group.get("fused") or group.get("differentiable") or group.get("foreach", False) is not None
        if not is_chosen and any(name != "cpu" for name in (named, *(item.device.type for item in group["params"]))):
            group["foreach"] = True
