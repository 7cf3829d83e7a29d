"""What functions of torch's keep on a CUDA device, for one that is not here: on the CPU some keep more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional


def functions_there(is_elsewhere: Callable[[], bool]) -> list[tuple[Any, str, Any]]:
    """Return where functions are, what they are called there and what stands in for them.

    Args:
        is_elsewhere: whether code runs now as if it were on another device than the CPU.
    """
    attend: Any = getattr(functional, "scaled_dot_product_attention", None)
    drop = functional.dropout

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **more: Any
    ) -> Any:
        # With dropout the CPU has no kernel that leaves the matrix of weights out; CUDA has.
        return attend(query, key, value, attn_mask, 0.0 if is_elsewhere() else dropout_p, *rest, **more)

    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: A002  # torch's
        if training and 0 < p < 1 and not inplace and is_elsewhere():
            return torch.native_dropout(input, p, True)[0]  # it keeps a byte for each number; the CPU's keeps a number
        return drop(input, p, training, inplace)

    return [(functional, "dropout", dropout), *([(functional, attend.__name__, attention)] if attend else [])]
