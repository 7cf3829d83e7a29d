"""Knows some values of fake tensors. All are taken to be finite, so a search for NaN finds none."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

_NEVER = frozenset({"isnan", "isinf", "isposinf", "isneginf"})
_NOT = frozenset({"logical_not", "bitwise_not"})
_AND = frozenset({"logical_and", "bitwise_and", "mul"})
_OR = frozenset({"logical_or", "bitwise_or"})
_COMPARED = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_SAME = frozenset(
    [
        *("alias", "detach", "clone", "_to_copy", "view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "expand"),
        *("all", "any", "_is_all_true", "_is_any_true", "select", "slice", "permute", "transpose", "t"),
        *("max", "min", "amax", "amin", "prod"),
    ]
)
"""Their results have the values of their arguments."""
_COUNTS = frozenset({"sum", "count_nonzero"})


class KnownValues:
    """Remembers tensors whose elements are all taken to be True, or all False, for as long as they live."""

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()

    def of(self, value: Any) -> bool | None:
        """Return what all elements of a tensor are taken to be, if it is one of these."""
        return self._known.get(value) if isinstance(value, torch.Tensor) else None

    def see(self, func: Any, args: Any, result: Any) -> None:
        """Remember what an operation gives, or forget what was known of a tensor that it changed."""
        if not isinstance(result, torch.Tensor) or not args:
            return
        truth = self._given_by(func.__name__.partition(".")[0].rstrip("_"), *args[:2])
        if truth is not None:
            self._known[result] = truth
        else:
            self._known.pop(result, None)

    def _given_by(self, name: str, first: Any, second: Any = None) -> bool | None:
        known = self.of(first)
        if name in _NEVER:
            return False
        if name in _NOT:
            return None if known is None else not known
        if name in _AND or name in _OR:
            decides = name in _OR
            both = (known, self.of(second))
            return decides if decides in both else None if None in both else not decides
        if name in _COMPARED:
            return self._compared(name, first, second)
        if name in _COUNTS:
            return False if known is False else None
        return known if name in _SAME else None

    def _compared(self, name: str, first: Any, second: Any) -> bool | None:
        """Return what a comparison says of a known tensor, of NaN or of infinity."""
        known = self.of(first)
        if isinstance(second, (int, float)) and known is not None:
            return bool(_COMPARED[name](known, second))
        asks_for_odd = first is second or (isinstance(second, float) and math.isinf(second))
        if asks_for_odd and name in ("eq", "ne"):
            return (name == "eq") is (first is second)
        return None
