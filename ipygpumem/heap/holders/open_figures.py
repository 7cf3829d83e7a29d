"""Decides which of pyplot's open figures a line closes: only new ones. From an older figure, a line
takes artists out, such as the image of ``ax.imshow(array)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ipygpumem.heap.holders.referrer_graph import Steps
from ipygpumem.heap.holders.registries import figure_of, roots_of_figures
from ipygpumem.heap.holders.rows import RowHolders
from ipygpumem.heap.kinds.arrays import flat_elements, is_of_library
from ipygpumem.heap.paths.path_writer import PathWriter
from ipygpumem.heap.paths.roots import Root, Roots
from ipygpumem.heap.paths.ways import Way
from ipygpumem.introspect import instance_dict


class ChainInFigure(NamedTuple):
    """A chain of which the beginning may be left out: from an older figure on, or a whole chain."""

    root: Root
    """The root of the whole chain, or that of objects inside the figure, whose code is that of the
    figure: ``plt.figure(1)``.
    """
    steps: Steps
    number_left_out: int
    """The number of objects before the figure; 0 for a whole chain."""


class OpenFigures:
    """The open figures, and which of them stay open.

    Throughout, ``object_id`` is the identity of the object of the row to free; 0 if there is none.

    Args:
        roots: the names and objects from which the user can reach objects.
        writer: writes the ways to figures.
    """

    def __init__(self, roots: Roots, writer: PathWriter) -> None:
        self._figures = roots_of_figures(roots.names)
        self._names = roots.names
        self._ages = roots.lines.ages
        self._removed = roots.lines.removed
        self._writer = writer

    def is_new(self, figure: object, object_id: int) -> bool:
        """Return True if a figure is no older than the row to free."""
        return id(figure) == object_id or id(figure) in self._ages.new()

    def note_removed(self, figure: object) -> None:
        """Note that a line removes a figure as a whole, for later searches, which do not know if it
        is new.
        """
        self._removed.add_module_or_figure(figure)

    def inside_older(self, root: Root, steps: Steps, object_id: int) -> ChainInFigure:
        """Return a chain from pyplot through an older figure, from that figure on, because the line
        is about an object in the figure. Any other chain is returned as it is.

        A new figure on the chain is closed as a whole, which is noted for later searches.

        Args:
            root: the root of the chain.
            steps: the objects of the chain.
            object_id: as in the class.
        """
        for position, item in enumerate(steps[:-1]):
            roots = self._figures.get(id(item))
            if roots is None or roots.closing != root:
                continue
            if self.is_new(item, object_id):
                self.note_removed(item)
            elif self._ages.learn_if_older(item):
                return ChainInFigure(roots.inside, steps[position:], position)
        return ChainInFigure(root, steps, number_left_out=0)

    def ways_to_close(
        self,
        targets: Sequence[object],
        nearest: Way,
        object_id: int,
        rows: RowHolders | None,
    ) -> list[Way]:
        """Return the ways to the open figures that must be closed so that objects die.

        After ``axes.append(plt.subplots()[1])``, the user's list is not the only place of the axes:
        pyplot keeps the figure around them. A figure stays open if it is older, if it has much else
        or a name, or if ``nearest`` leads through it: then an artist is taken out of it.

        Args:
            targets: the objects.
            nearest: the nearest way to one of them.
            object_id: identity of the object of their row.
            rows: tells if a figure has much else; without rows, no figure is closed.
        """
        if not self._figures:
            return []
        figures = self._figures_to_close(targets, nearest, object_id)
        if figures:  # without those that have a name
            for value in list(self._names.values()):
                figures.pop(id(figure_of(value)), None)
        ways = list[Way]()
        for key, figure in figures.items():
            if rows is not None and rows.has_little_else(figure):
                ways.append(self._writer.way(self._figures[key].closing, (figure,)))
        return ways

    def _figures_to_close(
        self, targets: Sequence[object], nearest: Way, object_id: int
    ) -> dict[int, object]:
        """Return the open figures, by identity, that have to be closed so that the targets in them
        die. Older figures stay open, and so do those through which the nearest way leads.

        Args:
            targets: the targets: figures, axes, other artists, and objects of other kinds.
            nearest: the nearest way to one of them.
            object_id: identity of the object of their row.
        """
        # A figure on the nearest way stays open: its line takes an artist out of it.
        ids_on_the_way = set(nearest.step_ids)
        ids_on_the_way.update(owner_id for owner_id, _ in nearest.removed_references)
        ids_on_the_way.difference_update(map(id, targets))
        figures = dict[int, object]()
        for target in targets:
            figure = figure_of(target)
            if id(figure) not in self._figures:
                continue
            if target is not figure:
                # A line or an image may have been drawn in an older figure; only axes, or what
                # stands for the whole figure, are closed with it.
                if not are_axes(target) and id(figure) != object_id:
                    continue
                if self.is_new(figure, object_id):
                    self.note_removed(figure)
                elif self._ages.learn_if_older(figure):
                    continue
            if ids_on_the_way.isdisjoint(_around(target, figure)):
                figures[id(figure)] = figure
        return figures


def are_axes(item: object) -> bool:
    """Return True for matplotlib's axes."""
    return is_of_library(item, "matplotlib.axes", "Axes")


def has_only_axes_of(figure: object, array: object) -> bool:
    """Return True for an array of objects with nothing but axes of a figure."""
    elements = flat_elements(array)
    if elements is None:
        return False
    return all(element is None or figure_of(element) is figure for element in elements)


def _around(artist: object, figure: object) -> set[int]:
    """Return the identities of the axes and the figure around an artist, and of the values of their
    attributes, such as the list of lines.
    """
    ids = set[int]()
    for owner in ((instance_dict(artist) or {}).get("axes"), figure):
        if owner is not None and owner is not artist:
            ids.add(id(owner))
            ids.update(map(id, (instance_dict(owner) or {}).values()))
    return ids
