"""Writes the line that puts something else in the place of tensors: ``x = x.clone()``, or for a whole list or dict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ipygpumem.advising.look import Look
from ipygpumem.advising.places import Spot
from ipygpumem.objects.arrays import library_type

MOST = 1000
"""Tensors that are rewritten one by one; a list counts as one."""


class Rewriting(NamedTuple):
    """A line, and the tensors that it puts others in place of."""

    code: str
    place: str
    """What is rewritten, as code."""
    items: list[Any]
    only: list[Any]
    """Those of the tensors to which nothing else refers."""
    spot: Spot


def rewritings(look: Look, wanted: Sequence[tuple[Any, Spot]], operation: str) -> Iterator[Rewriting]:
    """Yield the lines that apply ``operation`` (``.clone()``) to tensors: those of one list or dict at once.

    Args:
        look: what is alive.
        wanted: the tensors and their places.
        operation: what is written behind each.
    """
    done: set[int] = set()
    by_container: dict[int, set[int]] = {}
    for item, place in wanted:
        by_container.setdefault(id(place.container), set()).add(id(item))
    for item, place in wanted[:MOST]:
        if not place.takes or id(item) in done:
            continue
        container = place.container
        items = [item]
        code = f"{place.code} = {place.code}{operation}"
        if container is not None and len(by_container[id(container)]) > 1:
            all_items: list[Any] = list(container.values() if type(container) is dict else container)  # type: ignore[call-overload]  # a place's is one of both
            if all(type(other) is library_type("torch", "Tensor") for other in all_items):
                items, code = all_items, _of_all(place, operation)
        done |= set(map(id, items))
        only = [other for other in items if look.is_only_at(other, place)]
        yield Rewriting(code, place.code if len(items) == 1 else place.container_code, items, only, place)


def _of_all(place: Spot, operation: str) -> str:
    path = place.container_code
    if type(place.container) is dict:
        return f"{path}.update({{key: item{operation} for key, item in {path}.items()}})"
    return f"{path}[:] = [item{operation} for item in {path}]"
