"""Measures and drops what IPython 9 keeps of what cells print, display and raise.

``print`` of 40 MiB keeps 40 MiB: since 9.1, IPython adds each printed text to
``history_manager.outputs``, from which only ``%notebook`` reads. Results' texts and errors'
messages are kept next to it.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, NamedTuple

from ipygpumem.heap.arrays import is_of_library
from ipygpumem.heap.bulk import of_types, types_of
from ipygpumem.report.layout import count
from ipygpumem.report.leaks import ReclaimableItem

REMEDY = "%gpumem free"
_OUTPUTS = "outputs"
_BY_NUMBER = (_OUTPUTS, "exceptions", "output_hist_reprs")
"""The history manager's dicts by cell number: printed output, errors' messages, and the text of
results.
"""
_CELLS_NAMED = 3
_TEXTS = {id(str), id(bytes)}


class Length(NamedTuple):
    """The extent of a cell's printed output at some moment."""

    outputs: int
    texts: int
    """Number of texts in its last output, to which the running cell adds."""


class PrintedMark(NamedTuple):
    """The printed output at some moment."""

    numbers: dict[str, set[int]]
    """The cells in each of the history manager's dicts."""
    lengths: dict[int, Length]
    """The output of the cells that may still print: the running one, and its nested cells."""


class Printed:
    """The printed output that IPython keeps in one shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        manager = getattr(shell, "history_manager", None)
        self._entries: dict[str, dict[int, Any]] = {}
        """The history manager's dicts; empty ones if this IPython has none. IPython never replaces
        them.
        """
        for name in _BY_NUMBER:
            entries = getattr(manager, name, None)
            self._entries[name] = entries if isinstance(entries, dict) else {}
        self._outputs = self._entries[_OUTPUTS]

    # -- experiments -----------------------------------------------------------------------------

    def mark(self) -> PrintedMark:
        """Return the extent of the current output."""
        numbers = {name: set(entries) for name, entries in self._entries.items()}
        lengths = dict[int, Length]()
        if numbers[_OUTPUTS]:
            # A nested cell adds to the output of the cell after the running one, whose number it
            # has.
            first = self._shell.execution_count - 1
            lengths = {
                number: _length(self._outputs[number])
                for number in numbers[_OUTPUTS]
                if number >= first
            }
        return PrintedMark(numbers, lengths)

    def drop_deleted_from(self, mark: PrintedMark) -> None:
        """Remove deleted output from ``mark``, because %reset restarts the count and reuses its
        numbers.
        """
        for name, numbers in mark.numbers.items():
            numbers.intersection_update(self._entries[name])
        for number in mark.lengths.keys() - mark.numbers[_OUTPUTS]:
            del mark.lengths[number]

    def forget_since(self, mark: PrintedMark) -> None:
        """Drop the output added after ``mark``, also that of a cell that had printed before."""
        for name, numbers in mark.numbers.items():
            entries = self._entries[name]
            for number in entries.keys() - numbers:
                entries.pop(number, None)
        for number, length in mark.lengths.items():
            if number in self._outputs:
                _shorten(self._outputs, number, length)

    # -- all of it -------------------------------------------------------------------------------

    def forget(self) -> int:
        """Drop all output, and return the number of cells that had some."""
        dropped = len(self._outputs)
        for entries in self._entries.values():
            entries.clear()
        return dropped

    def texts(self) -> list[object]:
        """Return the texts and bytes that IPython keeps, as often as it refers to them."""
        outputs = list[object]()
        for entries in self._entries.values():
            outputs += entries.values()
        return _printed_texts(outputs)

    def own_texts(self) -> list[object]:
        """Return the texts that dropping all of it frees, each once: those of the user's objects
        stay alive.
        """
        return _without_other_references(self.texts())

    def size_bytes(self) -> int:
        """Return the bytes that dropping all of it frees."""
        return sum(map(sys.getsizeof, self.own_texts()))

    def by_cell(self) -> dict[int, int]:
        """Return the bytes of each cell's output, the largest first; texts shared by two cells
        count in both.
        """
        size_by_cell = Counter[int]()
        for entries in self._entries.values():
            for number in list(entries):
                texts = _printed_texts([entries[number]])
                size_by_cell[number] += sum(map(sys.getsizeof, texts))
        return dict(size_by_cell.most_common())

    def reclaimable(self, smallest: int) -> ReclaimableItem | None:
        """Return the item of ``%gpumem leaks`` on printed output; None below ``smallest`` bytes."""
        size = self.size_bytes()
        if size < smallest:
            return None
        cells = list(self.by_cell())
        numbers = ", ".join(map(str, sorted(cells[:_CELLS_NAMED])))
        more = ""
        if len(cells) > _CELLS_NAMED:
            more = f" and {count(len(cells) - _CELLS_NAMED, 'smaller one')}"
        word = "cell" if len(cells) == 1 else "cells"
        what = f"printed and displayed by {word} {numbers}{more}, kept by IPython for %notebook"
        return ReclaimableItem(size, "cpu", what, REMEDY, size)


def _length(outputs: list[Any]) -> Length:
    if not outputs:
        return Length(0, 0)
    stream = _stream(outputs[-1])
    texts = 0 if stream is None else len(stream)
    return Length(len(outputs), texts)


def _stream(output: Any) -> list[str] | None:
    """Return the texts of an output to which IPython adds: printed ones, not those displayed."""
    stream = output.bundle.get("stream")
    return stream if type(stream) is list else None


def _shorten(outputs: dict[int, list[Any]], number: int, length: Length) -> None:
    """Drop the output of a cell beyond ``length``.

    IPython adds to the last output of a cell and fails if the list is empty, so that an empty list
    goes, too.
    """
    if not length.outputs:
        outputs.pop(number, None)
        return
    of_cell = outputs[number]
    del of_cell[length.outputs :]
    stream = _stream(of_cell[-1])
    if stream is not None:
        del stream[length.texts :]


def _printed_texts(level: list[object]) -> list[object]:
    """Return the texts and bytes below some objects of IPython: in its lists, dicts and outputs, as
    often as they occur there.

    Data that also belongs to the user, as in ``JSON(data)``, is left out.
    """
    texts = list[object]()
    while level:
        # In bulk, without a step for each of a million printed lines.
        texts += of_types(_TEXTS, level)
        following = list[object]()
        for item in of_types(types_of(level) - _TEXTS, level):
            # The references of IPython's container, two lists here, the loop and the call.
            is_shared = sys.getrefcount(item) > 5
            if type(item) is list and not is_shared:
                following += item
            elif type(item) is dict and not is_shared:
                following += item.values()
            elif is_of_library(item, "IPython.core.history", "HistoryOutput"):
                following += item.bundle.values()  # type: ignore[attr-defined]  # of HistoryOutput
        level = following
    return texts


def _without_other_references(leaves: list[object]) -> list[object]:
    """Return the texts to which only IPython refers, each once."""
    unshared = list[object]()
    occurrences = Counter(map(id, leaves))
    unique = dict(zip(map(id, leaves), leaves, strict=True))
    for leaf in unique.values():
        # The references of IPython, as many in ``leaves``, one in ``unique``, those of the loop and
        # of the call.
        if sys.getrefcount(leaf) <= 2 * occurrences[id(leaf)] + 3:
            unshared.append(leaf)
    return unshared
