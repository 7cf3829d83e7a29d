"""Measures and drops the texts that IPython 9 keeps of everything that cells print, display and
raise.

``print`` of 40 MiB keeps 40 MiB: since 9.1, IPython adds each printed text to
``history_manager.outputs``, from which only ``%notebook`` reads. Results' texts and errors'
messages are kept next to it.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, NamedTuple

from ipygpumem.heap.bulk import of_types, types_of
from ipygpumem.heap.kinds.arrays import is_of_library
from ipygpumem.report.leaks import ReclaimableItem
from ipygpumem.report.words import count

REMEDY = "%gpumem free"
_OUTPUTS = "outputs"
_BY_NUMBER = (_OUTPUTS, "exceptions", "output_hist_reprs")
"""The history manager's dicts by cell number: printed output, errors' messages, and the text of
results.
"""
_MOST_CELLS_NAMED = 3
_TEXT_TYPES = {id(str), id(bytes)}
"""Identities of the types of texts."""


class OutputExtent(NamedTuple):
    """The extent of a cell's printed output at a moment."""

    outputs: int
    """Number of its outputs: IPython joins texts printed one after another."""
    texts: int
    """Number of texts in its last output, to which the running cell adds."""


class PrintedMark(NamedTuple):
    """The extent of all cells' printed output at a moment, without the output itself."""

    numbers: dict[str, set[int]]
    """For each of the history manager's dicts, the numbers of the cells in it."""
    extents: dict[int, OutputExtent]
    """The output of the cells that may still print: the running one, and its nested cells."""


class Printed:
    """The printed output that IPython keeps in one shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        manager = getattr(shell, "history_manager", None)
        self._entries: dict[str, dict[int, Any]] = {}
        """The history manager's dicts by name, each with the output of cells by number; empty ones
        if this IPython has none. IPython never replaces them.
        """
        for name in _BY_NUMBER:
            entries = getattr(manager, name, None)
            self._entries[name] = entries if isinstance(entries, dict) else {}
        self._outputs = self._entries[_OUTPUTS]

    # -- experiments -----------------------------------------------------------------------------

    def mark(self) -> PrintedMark:
        """Return the extent of the current output."""
        numbers = {name: set(entries) for name, entries in self._entries.items()}
        extents = dict[int, OutputExtent]()
        if numbers[_OUTPUTS]:
            # A nested cell adds to the output of the cell after the running one, whose number it
            # has.
            running = self._shell.execution_count - 1
            for number in numbers[_OUTPUTS]:
                if number >= running:
                    extents[number] = _extent_of(self._outputs[number])
        return PrintedMark(numbers, extents)

    def drop_deleted_from(self, mark: PrintedMark) -> None:
        """Remove deleted output from ``mark``, because %reset restarts the count and reuses its
        numbers.
        """
        for name, numbers in mark.numbers.items():
            numbers.intersection_update(self._entries[name])
        for number in mark.extents.keys() - mark.numbers[_OUTPUTS]:
            del mark.extents[number]

    def forget_since(self, mark: PrintedMark) -> None:
        """Drop the output that was added after ``mark``, including output that older cells have
        added since.
        """
        for name, numbers in mark.numbers.items():
            entries = self._entries[name]
            for number in entries.keys() - numbers:
                entries.pop(number, None)
        for number, extent in mark.extents.items():
            if number in self._outputs:
                _shorten(self._outputs, number, extent)

    # -- all output ------------------------------------------------------------------------------

    def forget(self) -> int:
        """Drop all output; return the number of cells that had printed or displayed anything."""
        number_of_cells = len(self._outputs)
        for entries in self._entries.values():
            entries.clear()
        return number_of_cells

    def texts(self) -> list[object]:
        """Return the texts and bytes that IPython keeps, as often as it refers to them."""
        outputs = list[object]()
        for entries in self._entries.values():
            outputs += entries.values()
        return _printed_texts(outputs)

    def own_texts(self) -> list[object]:
        """Return the texts that ``forget`` frees, each once: texts to which the user's objects
        refer stay alive.
        """
        return _without_other_references(self.texts())

    def size_bytes(self) -> int:
        """Return the bytes that ``forget`` frees."""
        return sum(map(sys.getsizeof, self.own_texts()))

    def by_cell(self) -> dict[int, int]:
        """Return the bytes of each cell's output by the cell's number, the largest first; texts
        shared by two cells count in both.
        """
        size_by_cell = Counter[int]()
        for entries in self._entries.values():
            for number in list(entries):
                texts = _printed_texts([entries[number]])
                size_by_cell[number] += sum(map(sys.getsizeof, texts))
        return dict(size_by_cell.most_common())

    def reclaimable(self, smallest: int) -> ReclaimableItem | None:
        """Return the row of ``%gpumem leaks`` on printed output; None below ``smallest`` bytes."""
        size = self.size_bytes()
        if size < smallest:
            return None
        cells = list(self.by_cell())
        numbers = ", ".join(map(str, sorted(cells[:_MOST_CELLS_NAMED])))
        smaller_cells = ""
        if len(cells) > _MOST_CELLS_NAMED:
            smaller_cells = f" and {count(len(cells) - _MOST_CELLS_NAMED, 'smaller one')}"
        word = "cell" if len(cells) == 1 else "cells"
        what = (
            f"printed and displayed by {word} {numbers}{smaller_cells}, kept by IPython for "
            f"%notebook"
        )
        return ReclaimableItem(size, "cpu", what, REMEDY, size)


def _extent_of(outputs: list[Any]) -> OutputExtent:
    """Return the extent of the outputs of one cell."""
    if not outputs:
        return OutputExtent(outputs=0, texts=0)
    printed_texts = _printed_by(outputs[-1])
    number_of_texts = 0 if printed_texts is None else len(printed_texts)
    return OutputExtent(len(outputs), number_of_texts)


def _printed_by(output: Any) -> list[str] | None:
    """Return IPython's list of the printed texts of an output, to which the running cell adds; None
    for an output that was displayed.
    """
    texts = output.bundle.get("stream")
    return texts if type(texts) is list else None


def _shorten(outputs: dict[int, list[Any]], number: int, extent: OutputExtent) -> None:
    """Drop the output of a cell beyond ``extent``.

    Args:
        outputs: IPython's outputs of cells, by number.
        number: the cell's number.
        extent: the extent of the output that stays.
    """
    if not extent.outputs:
        # No empty list stays: IPython adds to the last output in a list, and would fail.
        outputs.pop(number, None)
        return
    of_cell = outputs[number]
    del of_cell[extent.outputs :]
    printed_texts = _printed_by(of_cell[-1])
    if printed_texts is not None:
        del printed_texts[extent.texts :]


def _printed_texts(level: list[object]) -> list[object]:
    """Return the texts and bytes below some objects of IPython: in its lists, dicts and outputs, as
    often as they occur there.

    Data that also belongs to the user, as in ``JSON(data)``, is left out.
    """
    texts = list[object]()
    while level:
        # In bulk, without a step for each of a million printed lines.
        texts += of_types(_TEXT_TYPES, level)
        next_level = list[object]()
        for item in of_types(types_of(level) - _TEXT_TYPES, level):
            # The references of IPython's container, two lists here, the loop and the call.
            is_shared = sys.getrefcount(item) > 5
            if type(item) is list and not is_shared:
                next_level += item
            elif type(item) is dict and not is_shared:
                next_level += item.values()
            elif is_of_library(item, "IPython.core.history", "HistoryOutput"):
                next_level += item.bundle.values()  # type: ignore[attr-defined]  # of HistoryOutput
        level = next_level
    return texts


def _without_other_references(texts: list[object]) -> list[object]:
    """Return the texts to which only IPython refers, each once.

    Args:
        texts: the texts, each as often as IPython refers to it.
    """
    unshared = list[object]()
    occurrences = Counter(map(id, texts))
    unique = dict(zip(map(id, texts), texts, strict=True))
    for text in unique.values():
        # The references of IPython, as many in ``texts``, one in ``unique``, those of the loop and
        # of the call.
        if sys.getrefcount(text) <= 2 * occurrences[id(text)] + 3:
            unshared.append(text)
    return unshared
