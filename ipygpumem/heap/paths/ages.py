"""Tells which objects are older than the memory that a line frees.

A line keeps older objects, or its comment names them. If an experiment draws into an older figure,
for instance, the line removes the new artists and leaves the figure open.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from ipygpumem.heap.kinds.arrays import Array
from ipygpumem.heap.live.garbage import lasting_weak


@dataclass
class LearnedAges:
    """The older objects that searches at the ends of experiments have found, such as open figures.

    A later search, such as that of ``%gpumem leaks``, has no baseline to tell the age of a figure.
    It writes the same line as the report of the experiment, because it reads these ages.
    """

    objects: list[weakref.ref[Any]] = field(default_factory=list)
    """Older open figures, objects of libraries, labels of columns and gradients."""
    lengths: dict[int, int] = field(default_factory=dict)
    """The length of each older list that had it before and after the experiment, by the identity of
    the list.
    """
    columns: dict[int, Sequence[str]] = field(default_factory=dict)
    """The code of the labels of the columns that an older data frame had before the experiment, by
    the identity of the frame.
    """

    def add(self, item: object) -> None:
        """Add an older object, if weak references to it are possible."""
        reference = lasting_weak(item)
        if reference is not None:
            self.objects.append(reference)

    def has(self, item: object) -> bool:
        """Return True if an object is one of the older ``objects``."""
        return any(reference() is item for reference in self.objects)

    def forget_dead(self) -> None:
        """Drop the references to objects that are no longer alive."""
        self.objects = [reference for reference in self.objects if reference() is not None]


@dataclass(frozen=True)
class Ages:
    """Tells which objects are older than the memory to free.

    The search at the end of an experiment knows all ages, because it has the baseline of the start.
    A later search, such as that of ``%gpumem leaks``, only has what earlier ones have ``learned``.
    So a search that uses the age of an object calls a ``learn`` method, which also notes the age.

    Attributes:
        are_known: True if every object that is not ``new`` is older than the memory to free; False
            if the age of these objects is unknown.
        new: returns the identities of objects that are no older than the memory to free, such as
            all that an experiment has made.
        may_be_older_array: returns True for an array (or tensor) and its description, if it may be
            older; asked only if ``are_known``.
        length_before: returns the length that an older list had before the experiment; None if it
            is unknown.
        columns_before: returns the code of the label of each column that an older data frame had
            before the experiment; none if they are unknown.
        learned: the older objects that searches at the ends of experiments have found.
    """

    are_known: bool = False
    new: Callable[[], Container[int]] = frozenset
    may_be_older_array: Callable[[object, Array], bool] = lambda item, array: True
    length_before: Callable[[object], int | None] = lambda item: None
    columns_before: Callable[[object], Sequence[str]] = lambda frame: ()
    learned: LearnedAges = field(default_factory=LearnedAges)

    def learn_if_older(self, item: object) -> bool:
        """Add an object to ``learned`` if it is older than the memory to free.

        Returns:
            True if it is older; False if it is no older, or if its age is unknown.
        """
        if self.learned.has(item):
            return True
        if not self._is_known_to_be_old(item):
            return False
        self.learned.add(item)
        return True

    def learn_columns(self, frame: object) -> Sequence[str]:
        """Add the columns that an older data frame had before the experiment to ``learned``.

        Returns:
            The code of the label of each of these columns; none for any other frame.
        """
        if self._is_known_to_be_old(frame):
            columns = self.columns_before(frame)
            if columns:
                self.learned.columns[id(frame)] = columns
        elif self.are_known:  # another frame had its identity
            self.learned.columns.pop(id(frame), None)
        return self.learned.columns.get(id(frame), ())

    def learn_length(self, items: list[Any]) -> bool:
        """Add the length of a list to ``learned`` if it is older and still has the length that it
        had before: its new items have taken the places of older ones, as by ``rows[3] = x``.

        Returns:
            True if it has that length; False if it is another one, or unknown.
        """
        length = list.__len__(items)
        if self.are_known:
            self._update_length(items, length)
        return self.learned.lengths.get(id(items)) == length

    def _update_length(self, items: list[Any], length: int) -> None:
        """Add the length of an older list that still has it to ``learned``, and forget that of a
        dead list with the same identity.
        """
        length_before = self.length_before(items)
        is_new = id(items) in self.new()
        if is_new or length_before not in (None, length):
            self.learned.lengths.pop(id(items), None)
        elif length_before == length:
            self.learned.lengths[id(items)] = length

    def _is_known_to_be_old(self, item: object) -> bool:
        """Return True if the ages of all objects are known, and this one is not ``new``."""
        return self.are_known and id(item) not in self.new()
