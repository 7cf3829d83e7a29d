"""Writes the steps of paths through figures of matplotlib, whose ``remove()`` takes out artists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipygpumem.heap.paths.cuts import Cut, Kind, condition_of, split
from ipygpumem.heap.paths.items_and_attributes import position_of
from ipygpumem.heap.paths.path_state import Path
from ipygpumem.introspect import instance_dict, is_exactly, is_instance


def append_artist(path: Path, steps: Sequence[object]) -> int:
    """Append an artist of axes, such as a line or an image; return the number of references.

    The number is 0 if there is none on the way. The axes have several lists of the artist, and its
    ``remove()`` takes it out of all of them. One of several artists in a container, such as those
    of error bars, is removed with the container, which refers to it.
    """
    axes = steps[0]
    artists = _list_of_axes(axes, "_children")
    containers = _list_of_axes(axes, "containers")
    for taken, item in enumerate(steps[1:], start=1):
        is_artist = any(artist is item for artist in artists)
        for container in containers:
            if container is item or (is_artist and _contains(container, item)):
                _enter_artist(path, axes, "containers", container)
                return taken
        if is_artist:
            _enter_artist(path, axes, "_children", item)
            return taken
    return 0


def _list_of_axes(axes: object, name: str) -> list[object]:
    """Return a list that axes have; an empty one if it is another object."""
    items: Any = (instance_dict(axes) or {}).get(name)
    if not is_exactly(items, list):
        return []
    return items  # type: ignore[no-any-return]  # a list


def _enter_artist(path: Path, axes: object, name: str, artist: object) -> None:
    """Append an artist, or a container of several, which ``remove()`` takes out of the axes.

    Args:
        path: the path to the axes.
        axes: the axes.
        name: the name of the list that has the artist.
        artist: the artist or container.
    """
    artists = _list_of_axes(axes, name)
    position = position_of(artists, artist)
    imports, owner = split(path.code)
    code = f"{owner}.{name}[0]"
    call = f"{code}.remove()"
    if len(artists) > 1:  # a position would be that of another artist after its removal
        of_artist = f"artist in {owner}.{name}[:] if {condition_of(artist, artists, 'artist')}"
        code = f"next(artist for {of_artist})"
        call = f"[artist.remove() for {of_artist}];"
    cut = Cut(Kind.CALL, id(artists), path.code, f"{imports}{call}", position, len(artists))
    path.enter(f".{name}[{position}]", f"{imports}{code}", cut)


def _contains(container: object, artist: object) -> bool:
    """Return True if a container of matplotlib has an artist, directly, in an inner tuple or as
    error bars of its own.
    """
    if container is artist:
        return True
    items = list[object]()
    if is_instance(container, tuple):
        items += tuple.__iter__(container)  # type: ignore[arg-type]  # is_instance says so
    items.append((instance_dict(container) or {}).get("errorbar"))
    return any(item is not None and _contains(item, artist) for item in items)
