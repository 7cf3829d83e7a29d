"""Ways: finished paths to an object, each with the line that frees it there, and one line for all
ways to an object, such as ``del outer["x"]; runs.clear()``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from ipygpumem.heap.paths.cuts import Cut, Kind, in_sequence
from ipygpumem.heap.paths.remedies import (
    MORE_THERE,
    REMOVE,
    REMOVE_THEM,
    Holder,
    Remedy,
    comments_of,
)
from ipygpumem.heap.paths.roots import NOTEBOOK
from ipygpumem.heap.paths.statements import statement_of

ALL_REFERENCES = 0
"""Stands for the second object of a removed reference if the first one loses all its references."""


@dataclass(frozen=True)
class Way:
    """A finished path to an object, with the line that removes it from there."""

    holder: Holder
    """The path as text, and its remedy."""
    is_direct: bool = False
    """True if the line removes only the reference to the object itself, and keeps the object that
    refers to it: ``del runs[3]`` for ``runs[3]``, but not for ``runs[3][0]`` of a tuple.
    """
    is_advised: bool = False
    """True if the remedy is that of a step, such as ``load.cache_clear()``; False if it removes a
    reference on the way.
    """
    step_ids: tuple[int, ...] = ()
    """The identities of the objects on the way, the last of which is the object itself."""
    removed_references: frozenset[tuple[int, int]] = frozenset()
    """The references that the advice removes, as the identities of both objects. The second is
    ``ALL_REFERENCES`` if the first object loses all of them, as a generator that is closed does.
    """
    words: str = ""
    """The advice if no line removes the object from any of its places, as for a parameter of an
    optimizer; empty if there is none.
    """

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """The references that the line removes, if it does nothing else; without a line, those
        that could be removed (see ``Remedy``).
        """
        return self.holder.remedy.cuts

    @property
    def cut(self) -> Cut | None:
        """The only one of ``cuts``; None if there are none or several."""
        return self.cuts[0] if len(self.cuts) == 1 else None

    def ids_above(self) -> set[int]:
        """Return the identities of the objects on the way that the line keeps: those before the
        reference that it removes. It is empty if the line removes no reference of the way.
        """
        above = set[int]()
        for owner_id, item_id in itertools.pairwise(self.step_ids):
            above.add(owner_id)
            ending = {(owner_id, item_id), (owner_id, ALL_REFERENCES)}
            if not self.removed_references.isdisjoint(ending):
                return above
        return set()

    def is_ended_by(self, removed_references: Set[tuple[int, int]]) -> bool:
        """Return True if lines remove a reference of this way, so that it no longer leads to the
        object.

        Args:
            removed_references: the references that the lines remove, as in ``removed_references``
                of a way.
        """
        if not removed_references.isdisjoint(itertools.pairwise(self.step_ids)):
            return True
        owner_ids = self.step_ids[:-1]
        return any((owner_id, ALL_REFERENCES) in removed_references for owner_id in owner_ids)


_MOST_WAYS = 4
"""Maximum number of places to name that hold one object."""


def joined(ways: Sequence[Way], unwritten: int = 0) -> Way:
    """Return one way for all ways to an object, with the line that removes it from all places.

    There are four results: one statement for all references, ``del a["x"]; b.clear()``; several
    lines as one; a statement with words in its comment, for places without a line, ``del a["x"]  #
    and let the function return``; or only words.

    Args:
        ways: the way from each holder.
        unwritten: the number of further holders, without a line.
    """
    holder = _listed_holder(ways, unwritten)
    if unwritten:
        return Way(holder)
    removable = [way for way in ways if way.cuts]
    cuts = _ended_first(removable, [cut for way in removable for cut in way.cuts])
    # One statement for all, because separate lines may not work after each other: ``del runs[0]``
    # moves the item of ``del runs[1]``.
    statement = statement_of(cuts)
    remedies = [way.holder.remedy for way in ways]
    if statement and len(removable) == len(ways):  # del a["x"]; b.clear()
        remedy = Remedy(statement, comments_of(remedies), tuple(cuts))
        return Way(replace(holder, remedy=remedy))
    if len(ways) > _MOST_WAYS:
        return Way(holder)  # with words
    without_statement = [way for way in ways if not (statement and way.cuts)]
    lines, words = _lines_and_words(without_statement)
    if statement and not lines:  # del a["x"]  # and remove it from b
        comment = comments_of(remedies, first=f"and {', and '.join(words)}")
        return Way(replace(holder, remedy=Remedy(statement, comment, tuple(cuts))))
    if statement:
        lines.insert(0, Remedy(statement))
    return Way(replace(holder, remedy=_as_one_line(lines, words, remedies)))


def _listed_holder(ways: Sequence[Way], unwritten: int) -> Holder:
    """Return one holder for several ways: its path lists their paths, ``notebook variable a,
    notebook variable b, and 3 more``, and its remedy is words.
    """
    named = [way.holder for way in ways[:_MOST_WAYS]]
    paths = [holder.path for holder in named]
    path = ", ".join(inner for inner in paths if not _are_items_of(inner, paths))
    roots = tuple(root for holder in named for root in holder.roots)
    number_unnamed = max(0, len(ways) - _MOST_WAYS) + unwritten
    if number_unnamed:
        path += f", and {number_unnamed} more"
    return Holder(path, _REMOVE_FROM_ALL, roots)


def _are_items_of(path: str, containers: Iterable[str]) -> bool:
    """Return True if a path to several items, ``runs[0], and 7 more there``, begins with the path
    to one of the containers, ``runs``.
    """
    if not path.endswith(MORE_THERE):
        return False
    return any(path.startswith(f"{container}[") for container in containers)


_REMOVE_FROM_ALL = Remedy("remove it from all of these")


def _lines_and_words(ways: Sequence[Way]) -> tuple[list[Remedy], list[str]]:
    """Return the lines of some ways, and words for each way without a line."""
    lines = list[Remedy]()
    words = list[str]()
    for way in ways:
        remedy = way.holder.remedy
        if remedy.line in ("", REMOVE.line, REMOVE_THEM.line):
            path = way.holder.path.removeprefix(NOTEBOOK)
            words.append(f"remove it from {path}")
        elif remedy.is_code:
            lines.append(Remedy(remedy.as_code))
        else:
            words.append(remedy.line)
    return lines, words


def _as_one_line(
    lines: Sequence[Remedy], words: Sequence[str], remedies: Sequence[Remedy]
) -> Remedy:
    """Return lines as one, with words in its comment; everything in words if a line is a magic or a
    loop, to which no statement can be appended.

    Args:
        lines: the lines.
        words: the advice for places without a line.
        remedies: the remedies of all places, for their comments and words.
    """
    if lines and all(line.is_simple for line in lines):
        first = f"and {', and '.join(words)}" if words else ""
        statement = in_sequence([remedy.line for remedy in _used_first(lines)])
        return Remedy(statement, comments_of(remedies, first=first))
    with_advice = [remedy for remedy in remedies if remedy.text]
    return Remedy(", and ".join(remedy.as_code for remedy in _used_first(with_advice)))


def _used_first(remedies: Sequence[Remedy]) -> list[Remedy]:
    """Return remedies in an order in which none deletes an object that a later one names:
    ``a.x = None`` before ``del a``.
    """

    def is_named_elsewhere(remedy: Remedy) -> bool:
        """Return True if another line names the object that a line deletes."""
        deleted = remedy.deleted_code
        lines = [other.line for other in remedies if other.line != remedy.line]
        return deleted != "" and any(deleted in line for line in lines)

    return sorted(remedies, key=is_named_elsewhere)


def _ended_first(ways: Sequence[Way], cuts: list[Cut]) -> list[Cut]:
    """Return the references to one object in a form for one line, if a registry has it until a
    method of the object is called, such as ``close()`` of a widget.

    The line is ``outer["w"].close(); del outer["w"]``: that of the registry is left out, and the
    reference of ``outer`` gets the call. Without such a registry, the references are unchanged.

    Args:
        ways: the ways to the object.
        cuts: the references that they remove.
    """
    direct_cuts = [way.cut for way in ways if way.is_direct and way.cut is not None]
    registrations = [cut for cut in direct_cuts if cut.kind is Kind.CLOSED]
    references_with_code = [cut for cut in direct_cuts if cut.kind in _REFERENCES]
    if not registrations or not references_with_code:
        return cuts
    registration, reference = registrations[0], references_with_code[0]
    ended = replace(reference, ending=registration.ending)
    return [ended, *(cut for cut in cuts if cut not in (registration, reference))]


_REFERENCES = {Kind.NAME, Kind.ITEM, Kind.KEY, Kind.ATTRIBUTE, Kind.DELETED_ATTRIBUTE, Kind.SLOT}
"""Kinds of references whose target is the code of an object."""
