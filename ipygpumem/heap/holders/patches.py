"""Reads the patches of ``unittest.mock`` that were started and not stopped."""

from __future__ import annotations

from typing import Any

from ipygpumem.heap.arrays import library_type
from ipygpumem.introspect import attribute_of, class_dict, is_exactly


def started_patches() -> list[object]:
    """Return the patches that ``start()`` has begun, and ``stop()`` not ended."""
    kind: Any = library_type("unittest.mock", "_patch")
    active: Any = None if kind is None else class_dict(kind).get("_active_patches")
    return list(active) if is_exactly(active, list) else []


def is_started_patch(item: object) -> bool:
    """Return True for a patch whose ``stop()`` puts the original back."""
    return any(patch is item for patch in started_patches())


def patch_of(owner: object, name: str) -> object:
    """Return the started patch that has replaced an attribute; None if there is none."""
    for patch in started_patches():
        if attribute_of(patch, "target") is owner and attribute_of(patch, "attribute") == name:
            return patch
    return None


def stopping(patch: object) -> str:
    """Return the line that stops a started patch without a name."""
    patches = started_patches()
    if len(patches) == 1:
        return "import unittest.mock; unittest.mock.patch.stopall()"
    position = next(place for place, other in enumerate(patches) if other is patch)
    return f"import unittest.mock; unittest.mock._patch._active_patches[{position}].stop()"
