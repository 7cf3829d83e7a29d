"""A row of memory with its holder, as it passes through the steps that still change its line: rows
are merged, cycles are ended, remarks are added. At the end, ``record`` makes plain data of it.
"""

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
        """Return the row with another remedy; unchanged if its holder was not searched."""
        if self.holder is None:
            return self
        return replace(self, holder=replace(self.holder, remedy=remedy))

    def with_comment(self, comment: str) -> HeldRow:
        """Return the row with a further comment on its line; unchanged if the line takes none, such
        as a magic.
        """
        if self.holder is None:
            return self
        return self.with_remedy(self.holder.remedy.with_comment(comment))

    def without_cuts(self) -> HeldRow:
        """Return the row for later reports. It no longer says which references its line removes: by
        then, ``del runs[0]`` may remove another item.
        """
        if self.holder is None:
            return self
        return self.with_remedy(replace(self.holder.remedy, cuts=()))

    def record(self, names: Container[str] = ()) -> RetainedArray:
        """Return the row as plain data, with its holder in words. Names that its line binds, such
        as the variable of a loop, are none of the ``names``.
        """
        if self.holder is None:
            return self.row
        return replace(self.row, holder=self.holder.record(names))
