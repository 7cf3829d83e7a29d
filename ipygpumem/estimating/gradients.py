"""Recognises sums of gradients that autograd makes in place, but not with fake tensors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from ipygpumem.introspect import is_ours
from ipygpumem.objects.holders.frames import stack

_MOST_USES, _MOST_OF_STORAGE = 4, 2
"""Uses of a tensor that autograd alone has, and of its storage, as they are seen while it adds to it."""
_CAN_COUNT = hasattr(torch.Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")  # not in the oldest ones
_HERE = Path(torch.__file__).parent
_WRAPPERS = {*(str(_HERE / name) for name in ("_compile.py", "_dynamo/eval_frame.py", "utils/_python_dispatch.py"))}
_STARTERS = {*(str(_HERE / "autograd" / name) for name in ("graph.py", "__init__.py"))}


def accumulates_in_place(args: Any) -> bool:
    """Whether a sum in a backward pass is autograd's own, of gradients that meet, and needs no memory."""
    first = args[0]
    return (
        _CAN_COUNT
        and not torch.is_grad_enabled()
        and isinstance(args[1], torch.Tensor)
        and first.shape == args[1].shape
        and first.layout is torch.strided
        and first._use_count() <= _MOST_USES
        and torch._C._storage_Use_Count(first.untyped_storage()._cdata) <= _MOST_OF_STORAGE
        and first.untyped_storage().nbytes() == first.nbytes  # neither a part nor an expanded one
        and _is_called_by_autograd()
    )


def _is_called_by_autograd() -> bool:
    """Whether autograd has called the operation: Python only began the backward pass, or has no part in its thread."""
    files = (frame.f_code.co_filename for frame in stack(sys._getframe(1)))
    caller = next((file for file in files if file not in _WRAPPERS and not is_ours(file)), None)
    return caller is None or caller in _STARTERS
