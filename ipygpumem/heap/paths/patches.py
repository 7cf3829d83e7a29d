"""Finds patches of ``unittest.mock`` that were started and not stopped, and writes the line that
stops one.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ipygpumem.heap.kinds.arrays import library_type
from ipygpumem.heap.paths.literals import literal
from ipygpumem.introspect import (
    attribute_of,
    class_dict,
    is_exactly,
    is_instance,
    module_dict,
    name_of,
    text_of,
)


def started_patches() -> list[object]:
    """Return the patches that ``start()`` has begun, and ``stop()`` not ended."""
    kind: Any = library_type("unittest.mock", "_patch")
    active: Any = None if kind is None else class_dict(kind).get("_active_patches")
    return list(active) if is_exactly(active, list) else []


def is_started_patch(item: object) -> bool:
    """Return True for a patch whose ``stop()`` puts the original back."""
    return any(patch is item for patch in started_patches())


def patch_of(owner: object, name: str) -> object:
    """Return the started patch that has replaced an attribute of a module, class or object; None if
    there is none.
    """
    for patch in started_patches():
        if attribute_of(patch, "target") is owner and attribute_of(patch, "attribute") == name:
            return patch
    return None


def line_that_stops(patch: object) -> str:
    """Return the line that stops a started patch to which no name refers.

    It names no position in the list of started patches, which another line may have changed. If
    several patches replace one attribute, it stops all of them, the last one first: any other
    order would put a replacement back instead of the original.
    """
    patches = started_patches()
    if len(patches) == 1:
        return "import unittest.mock; unittest.mock.patch.stopall()"
    last_first = "for patch in unittest.mock._patch._active_patches[::-1]"
    condition = _condition_for_patch(patch, patches)
    return f"import unittest.mock; [patch.stop() {last_first} if {condition}];"


def _condition_for_patch(patch: object, patches: Sequence[object]) -> str:
    """Return the expression that is true for a patch, and for each further one of the same
    attribute: ``getattr(patch, "attribute", None) == "load"``.

    Args:
        patch: the patch.
        patches: all started patches.
    """
    attribute = attribute_of(patch, "attribute")
    target = attribute_of(patch, "target")
    if type(attribute) is str:  # ``patch.dict`` has none
        condition = f'getattr(patch, "attribute", None) == {literal(attribute)}'
        # The name is enough unless patches of further objects have it, too.
        same_name = [other for other in patches if attribute_of(other, "attribute") == attribute]
        targets = [attribute_of(other, "target") for other in same_name]
        further_targets = [other for other in targets if other is not target]
        if not further_targets:
            return condition
        name = _name_of_target(target)
        if name and name not in map(_name_of_target, further_targets):
            return f'{condition} and getattr(patch.target, "__name__", None) == {literal(name)}'
    return f"id(patch) == {id(patch)}"


def _name_of_target(target: Any) -> str:
    """Return the name of a module or class; empty for another object."""
    if is_instance(target, ModuleType):
        return text_of(module_dict(target).get("__name__"))
    if is_instance(target, type):
        return name_of(target)
    return ""
