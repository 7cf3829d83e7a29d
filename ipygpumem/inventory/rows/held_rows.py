"""Rows of memory with their holders, while the lines that free the memory are still written."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

from ipygpumem.heap.paths.cuts import Cut
from ipygpumem.heap.paths.remedies import Holder, Remedy
from ipygpumem.records import RetainedArray


@dataclass(frozen=True)
class HeldRow:
    """A row of memory with its holder.

    Attributes:
        row: the name, size and types of the memory, without its holder.
        holder: the holder; None if it was not searched.
    """

    row: RetainedArray
    holder: Holder | None

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """The references that the row's line is known to remove."""
        return () if self.holder is None else self.holder.remedy.removed

    @property
    def line(self) -> str:
        """The line that frees the row, or words; empty if there is none."""
        return "" if self.holder is None else self.holder.remedy.line

    def with_remedy(self, remedy: Remedy) -> HeldRow:
        """Return the row with another remedy of its holder, if that is known."""
        if self.holder is None:
            return self
        return replace(self, holder=replace(self.holder, remedy=remedy))

    def with_comment(self, comment: str) -> HeldRow:
        """Return the row with a further comment on its line, if that takes one."""
        if self.holder is None:
            return self
        return self.with_remedy(self.holder.remedy.with_comment(comment))

    def without_cuts(self) -> HeldRow:
        """Return the row for later reports, in which its line may remove something else."""
        if self.holder is None:
            return self
        return self.with_remedy(replace(self.holder.remedy, cuts=()))

    def record(self, names: Container[str] = ()) -> RetainedArray:
        """Return the row with its holder as plain text; its line binds none of the ``names``."""
        if self.holder is None:
            return self.row
        return replace(self.row, holder=self.holder.record(names))
