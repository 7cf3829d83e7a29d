"""Writes the steps of paths through figures of matplotlib, whose artists have a method to remove
them: ``fig.axes[0]._children[0].remove()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipygpumem.heap.kinds.arrays import is_of_library
from ipygpumem.heap.paths.cuts import Cut, Kind, condition_of, split
from ipygpumem.heap.paths.items_and_attributes import attribute_names, position_of
from ipygpumem.heap.paths.path_state import Path
from ipygpumem.introspect import attribute_of, instance_dict, is_exactly, is_instance

_FROM_FIGURE_TO_AXES = 4
"""Maximum number of references from a figure to its axes: ``_axstack``, ``_axes``, its keys."""


def append_figure_step(path: Path, steps: Sequence[object]) -> int:
    """Append the step from a figure to axes, or from axes to an artist, such as a line or an image;
    return the number of references, 0 if the chain leads to neither.

    Args:
        path: the path to the figure or axes.
        steps: the figure or axes, and the objects after it.
    """
    if is_of_library(steps[0], "matplotlib.axes", "Axes"):
        return _append_artist(path, steps) or _append_artist_of_colorbar(path, steps)
    if is_of_library(steps[0], "matplotlib.figure", "FigureBase"):
        return _append_axes(path, steps)
    return 0


def _append_axes(path: Path, steps: Sequence[object]) -> int:
    """Append the axes of a figure, which has them in several places; return the number of
    references, 0 if the chain does not lead to axes.
    """
    all_axes = _axes_of(steps[0])
    for number, item in enumerate(steps[1:_FROM_FIGURE_TO_AXES], start=1):
        if any(axes is item for axes in all_axes):
            position = position_of(all_axes, item)
            imports, owner = split(path.code)
            code = f"{owner}.axes[{position}]"
            if any(_colorbar_in(axes) is not None for axes in all_axes[:position]):
                # The line for an earlier colorbar removes its axes, so the position would change.
                code = f"next(axes for axes in {owner}.axes if id(axes) == {id(item)})"
            call = f"{imports}{code}.remove()"
            if _colorbar_in(item) is not None:
                call = f"{imports}{code}._colorbar.remove()"
            cut = Cut(
                Kind.CALL,
                id(steps[number - 1]),
                path.code,
                call,
                position,
                len(all_axes),
                also_removed=_references_to_axes(item),
            )
            path.append_removable(f".axes[{position}]", f"{imports}{code}", cut)
            return number
    return 0


def _axes_of(figure: object) -> list[object]:
    """Return the axes of a figure in the order of its attribute ``axes``."""
    in_stack = attribute_of(attribute_of(figure, "_axstack"), "_axes")
    if is_of_library(figure, "matplotlib.figure", "Figure") and is_exactly(in_stack, dict):
        return list(in_stack)
    return list(_list_in(figure, "_localaxes"))


def _append_artist(path: Path, steps: Sequence[object]) -> int:
    """Append an artist of axes, such as a line or an image; return the number of references, 0 if
    the chain leads to none.

    Axes have an artist in several lists, and its ``remove()`` takes it out of all of them. A
    container of several artists, such as that of error bars, refers to them, so each of them is
    removed with the container.
    """
    axes = steps[0]
    artists = _list_in(axes, "_children")
    containers = _list_in(axes, "containers")
    for number, item in enumerate(steps[1:], start=1):
        is_artist = any(artist is item for artist in artists)
        for container in containers:
            if container is item or (is_artist and _contains(container, item)):
                _append_from_list(path, axes, "containers", container)
                return number
        if is_artist:
            _append_from_list(path, axes, "_children", item)
            return number
    return 0


def _append_artist_of_colorbar(path: Path, steps: Sequence[object]) -> int:
    """Append the artist, such as an image, to which the colorbar in axes belongs; return 2, the
    number of references, or 0 if the chain leads to none.
    """
    if len(steps) < 3 or _colorbar_in(steps[0]) is not steps[1]:
        return 0
    colorbar, artist = steps[1:3]
    axes = attribute_of(artist, "axes")
    is_shown = any(item is artist for item in _list_in(axes, "_children"))
    is_of_colorbar = attribute_of(colorbar, "mappable") is artist
    if not is_of_colorbar or not is_shown:
        return 0
    imports, owner = split(path.code)
    code = f"{owner}._colorbar.mappable"
    call = _removal_of(artist, axes, f"artist in [{code}]")
    cut = Cut(
        Kind.CALL,
        id(colorbar),
        path.code,
        f"{imports}{call}",
        also_removed=_references_to_artist(artist, axes),
    )
    path.append_removable("._colorbar.mappable", f"{imports}{code}", cut)
    return 2


def _list_in(owner: object, name: str) -> list[object]:
    """Return the list in an attribute of axes or a figure; an empty one if they have none."""
    items: Any = (instance_dict(owner) or {}).get(name)
    if not is_exactly(items, list):
        return []
    return items  # type: ignore[no-any-return]  # a list


def _append_from_list(path: Path, axes: object, name: str, artist: object) -> None:
    """Append an artist, or a container of several, which ``remove()`` takes out of its axes.

    Args:
        path: the path to the axes.
        axes: the axes.
        name: the attribute with the list of the artist: ``_children`` or ``containers``.
        artist: the artist or container.
    """
    artists = _list_in(axes, name)
    position = position_of(artists, artist)
    imports, owner = split(path.code)
    code = f"{owner}.{name}[0]"
    loop = f"artist in {owner}.{name}[:]"
    if len(artists) > 1:  # a position would be that of another artist after its removal
        loop += f" if {condition_of(artist, artists, 'artist')}"
        code = f"next(artist for {loop})"
    call = _removal_of(artist, axes, loop)
    if len(artists) == 1 and not _calls_before_removal(artist, axes):
        call = f"{code}.remove()"
    cut = Cut(
        Kind.CALL,
        id(artists),
        path.code,
        f"{imports}{call}",
        position,
        len(artists),
        also_removed=_references_to_artist(artist, axes),
    )
    path.append_removable(f".{name}[{position}]", f"{imports}{code}", cut)


def _removal_of(artist: object, axes: object, loop: str) -> str:
    """Return the statement that removes an artist from its axes, also from places where its
    ``remove()`` would leave it.

    Args:
        artist: the artist.
        axes: its axes.
        loop: the code of the loop over the artist, ``artist in ax.containers[:]``.
    """
    calls = _calls_before_removal(artist, axes)
    if not calls:
        return f"[artist.remove() for {loop}];"
    return f"[({', '.join(calls)}, artist.remove()) for {loop}];"


def _calls_before_removal(artist: object, axes: object) -> list[str]:
    """Return the calls that remove an artist from attributes of its axes, and its colorbar.

    Its ``remove()`` does neither. The axes' attribute ``_current_image``, for instance, refers to
    the image of ``plt.imshow``.
    """
    calls = list[str]()
    for name in attribute_names(axes, artist):
        calls.append(f'setattr(artist.axes, "{name}", None)')
    if _axes_of_colorbar(artist) is not None:
        # An earlier statement may have removed it; it needs the axes of its artist.
        calls.append("artist.colorbar and artist.colorbar.remove()")
    return calls


def _colorbar_in(axes: object) -> object:
    """Return the colorbar that axes show; None if they show data."""
    return attribute_of(axes, "_colorbar")


def _axes_of_colorbar(artist: object) -> object:
    """Return the axes of an artist's colorbar; None if it has none."""
    attributes = instance_dict(artist) or {}
    colorbar = attributes.get("colorbar")
    if colorbar is None:  # since matplotlib 3.11
        colorbar = attribute_of(attributes.get("_colorizer"), "colorbar")
    if attribute_of(colorbar, "mappable") is not artist:
        return None
    return attribute_of(colorbar, "ax")


def _references_to_artist(artist: object, axes: object) -> frozenset[tuple[int, int]]:
    """Return the references that the statement for an artist removes, as the identities of both
    objects: those to the artist, and those to the axes of its colorbar.
    """
    references = {(id(axes), id(artist)), (id(_list_in(axes, "_children")), id(artist))}
    axes_of_colorbar = _axes_of_colorbar(artist)
    if axes_of_colorbar is not None:
        references |= _references_to_axes(axes_of_colorbar)
    return frozenset(references)


def _references_to_axes(axes: object) -> frozenset[tuple[int, int]]:
    """Return the references that ``remove()`` of axes removes, as the identities of both objects.

    These are those from the figure. The axes of a colorbar are also in a list of the axes to which
    the colorbar belongs.
    """
    references = set[tuple[int, int]]()
    figure = attribute_of(axes, "_parent_figure") or attribute_of(axes, "figure")
    owners = [
        _list_in(figure, "_localaxes"),
        attribute_of(attribute_of(figure, "_axstack"), "_axes"),
    ]
    owners += [_list_in(other, "_colorbars") for other in _axes_of(figure)]
    for owner in owners:
        references.add((id(owner), id(axes)))
    return frozenset(references)


def _contains(container: object, artist: object) -> bool:
    """Return True if a container of matplotlib, such as that of a bar chart, has an artist: as an
    item, in an inner tuple, or among its error bars.
    """
    if container is artist:
        return True
    items = list[object]()
    if is_instance(container, tuple):
        items += tuple.__iter__(container)  # type: ignore[arg-type]  # is_instance says so
    items.append((instance_dict(container) or {}).get("errorbar"))
    return any(item is not None and _contains(item, artist) for item in items)
