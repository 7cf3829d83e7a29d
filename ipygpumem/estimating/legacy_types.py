"""Replaces the old classes of tensors on CUDA, such as torch.cuda.FloatTensor."""

from __future__ import annotations

from typing import Any

import torch

DTYPES = {
    f"{name}Tensor": getattr(torch, f"{name}Tensor").dtype
    for name in ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
}
"""What the classes that are called like this have, on the host as on CUDA."""


class _LegacyType(type):
    """The class of classes such as torch.cuda.FloatTensor, which is called with sizes or with data."""

    dtype: Any

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.dtype is cls.dtype and value.device.type != "cpu"

    def __call__(cls, *args: Any, device: Any = "cuda") -> Any:
        if len(args) == 1 and not isinstance(args[0], int):
            return torch.as_tensor(args[0], dtype=cls.dtype, device=device)
        return torch.empty(args or (0,), dtype=cls.dtype, device=device)


def legacy_type(name: str) -> type:
    """Return what stands in for the class of that name."""
    return _LegacyType(name, (), {"dtype": DTYPES[name], "__module__": "torch.cuda"})


def legacy_dtype(value: Any) -> Any:
    """Return the dtype that ``tensor.type(value)`` asks for on CUDA; None if it is something else."""
    if isinstance(value, _LegacyType):
        return value.dtype
    if isinstance(value, str) and value.startswith("torch.cuda."):
        return DTYPES.get(value.rpartition(".")[2])
    return None
