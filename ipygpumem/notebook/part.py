"""Defines the hooks of what goes along with a shell's cells; they do nothing by default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipygpumem.model import CellRecord
from ipygpumem.notebook.cell import Cell
from ipygpumem.reports.layout import Report


class Part:
    """Goes along with cells. The session calls the hooks of all parts, in this order, in the cell's own thread."""

    def cell_begins(self, cell: Cell) -> None:
        """Prepare for a cell; it has been measured, and its time is not counted yet."""

    def code_seen(self, tree: Any, *, may_change: bool, is_timed: bool) -> None:
        """Note code that runs next.

        Args:
            tree: its syntax tree.
            may_change: nobody else changes the tree after us.
            is_timed: %timeit runs it: its names never reach the notebook, and it must not get slower.
        """

    def code_ended(self, cell: Cell, *, failed: bool) -> None:
        """Note that a cell's code is over; nothing has been given back yet."""

    def give_back(self, cell: Cell) -> None:
        """Give back what ends with a cell; what its error held has been released."""

    def remarks(self, record: CellRecord) -> Sequence[str]:
        """Return what to add to the line of a cell that is over; the line is shown if anybody adds to it."""
        return ()

    def cell_ended(self, cell: Cell, record: CellRecord | None) -> Sequence[Report]:
        """Return what to show below a cell's line.

        Args:
            cell: what is over.
            record: what it cost; None inside another cell, whose record has it, and after an interrupt.
        """
        return ()

    def shown(self) -> None:
        """Note that a cell's reports have been shown; the cell that loads us has no other hook."""

    def close(self) -> None:
        """Undo what is still in force: the extension is being unloaded."""
