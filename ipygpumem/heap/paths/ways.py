"""The holders of an object as text, each with its line, and one line for several of them."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from ipygpumem.heap.paths.cuts import Cut, Kind, in_sequence, statement_of
from ipygpumem.heap.paths.literals import literal
from ipygpumem.heap.paths.roots import NOTEBOOK, REMOVE, REMOVE_THEM
from ipygpumem.records import COMMENT, ReferencePath, line_of


@dataclass(frozen=True)
class Way:
    """A path to an object, and the references that its advice removes, if it does that alone."""

    holder: ReferencePath
    cuts: tuple[Cut, ...] = ()
    is_direct: bool = False
    """True if the only reference removed is the one to the object itself."""
    is_advised: bool = False
    """True if a step on the way said how to free the object, such as that of a traceback."""
    step_ids: tuple[int, ...] = ()
    """The identities of the objects on the way, the last of which is the object itself."""
    removed_references: frozenset[tuple[int, int]] = frozenset()
    """The references that the advice removes, as the identities of both objects; 0 stands for all
    objects to which the first one refers, such as those of a generator that is closed.
    """
    words: str = ""
    """The advice if no line removes the object from any place."""

    @property
    def cut(self) -> Cut | None:
        """The reference, if it is only one."""
        return self.cuts[0] if len(self.cuts) == 1 else None

    def is_ended_by(self, removed_references: Set[tuple[int, int]]) -> bool:
        """Return True if some removed references include one of this way."""
        if not removed_references.isdisjoint(itertools.pairwise(self.step_ids)):
            return True
        return any((step_id, 0) in removed_references for step_id in self.step_ids[:-1])


MORE_THERE = " more there"
"""Ends the path of a holder with further references."""
_MOST_WAYS = 4
"""Maximum number of places to name that hold one object."""


def joined(ways: Sequence[Way], unwritten: int = 0) -> Way:
    """Return the holders of one object as one, with the line that removes it from all of them.

    Args:
        ways: the way from each holder.
        unwritten: the number of further holders, without a line.
    """
    path = ", ".join(way.holder.path for way in ways[:_MOST_WAYS])
    more = max(0, len(ways) - _MOST_WAYS) + unwritten
    if more:
        path += f", and {more} more"
    if unwritten:
        return Way(ReferencePath(path, _REMOVE_FROM_ALL))
    removable = [way for way in ways if way.cuts]
    cuts = _ended_first(removable, [cut for way in removable for cut in way.cuts])
    # One statement for all: a line of each reference would move the items of the next one's list.
    statement = statement_of(cuts)
    if statement and len(removable) == len(ways):
        advice = statement + comments_of(way.holder.advice for way in ways)
        return Way(ReferencePath(path, advice), tuple(cuts))
    if len(ways) > _MOST_WAYS:
        return Way(ReferencePath(path, _REMOVE_FROM_ALL))
    lines, words = _lines_and_words([way for way in ways if not (statement and way.cuts)])
    if statement and not lines:
        advices = [f"{COMMENT}and {', and '.join(words)}", *(way.holder.advice for way in ways)]
        return Way(ReferencePath(path, statement + comments_of(advices)), tuple(cuts))
    if statement:
        lines.insert(0, statement)
    return Way(ReferencePath(path, _as_one_line(lines, words, ways)))


_REMOVE_FROM_ALL = "remove it from all of these"


def _lines_and_words(ways: Sequence[Way]) -> tuple[list[str], list[str]]:
    """Return the lines of some holders, and words for those without a line."""
    lines = list[str]()
    words = list[str]()
    for way in ways:
        line = line_of(way.holder.advice)
        if line in ("", REMOVE, REMOVE_THEM):
            place = way.holder.path.removeprefix(NOTEBOOK)
            words.append(f"remove it from {place}")
        elif is_code(line):
            lines.append(as_code(line))
        else:
            words.append(line)
    return lines, words


def _as_one_line(lines: Sequence[str], words: Sequence[str], ways: Sequence[Way]) -> str:
    """Return lines as one, with words in its comment; everything in words if no line can be joined
    with another one.
    """
    if lines and all(map(is_simple, lines)):
        advice = in_sequence(_used_first(lines))
        comments = [f"{COMMENT}and {', and '.join(words)}"] if words else []
        return advice + comments_of([*comments, *(way.holder.advice for way in ways)])
    advices = [line_of(way.holder.advice) for way in ways if way.holder.advice]
    return ", and ".join(map(as_code, _used_first(advices)))


def comments_of(advices: Iterable[str]) -> str:
    """Return the comments of some lines as one, each once; empty if there are none."""
    comments = dict[str, None]()
    for advice in advices:
        _, _, comment = advice.partition(COMMENT)
        if comment:
            comments[comment] = None
    return COMMENT + "; ".join(comments) if comments else ""


def as_code(line: str) -> str:
    """Return a line with a call instead of a magic, after which no statement can follow."""
    if not line.startswith("%"):
        return line
    name, _, argument = line[1:].partition(" ")
    return f"get_ipython().run_line_magic({literal(name)}, {literal(argument)})"


def is_code(line: str) -> bool:
    """Return True for Python code or a magic, False for words."""
    return line.startswith("%") or bool(_statements(line))


def is_simple(line: str) -> bool:
    """Return True for code to which other statements can be appended: no words, magic or loop."""
    body = _statements(line)
    return bool(body) and not any(isinstance(statement, _BLOCKS) for statement in body)


def _statements(line: str) -> list[ast.stmt]:
    """Return the statements of a line; none for words."""
    try:
        return ast.parse(line).body
    except (SyntaxError, ValueError):  # the latter for half a surrogate pair in a user's text
        return []


_BLOCKS = (ast.For, ast.While, ast.With)


def _used_first(lines: Sequence[str]) -> list[str]:
    """Return lines so that none deletes an object which a later one names."""

    def is_named_elsewhere(line: str) -> bool:
        deleted = line.removeprefix("del ")
        return deleted != line and any(deleted in text for text in lines if text != line)

    return sorted(lines, key=is_named_elsewhere)


def _ended_first(ways: Sequence[Way], cuts: list[Cut]) -> list[Cut]:
    """Return the references to one object, which a user ends by its name if it has to be ended.

    An example is a widget in a dict: ``outer["w"].close(); del outer["w"]``.
    """
    direct = [way.cut for way in ways if way.is_direct and way.cut is not None]
    closing = [cut for cut in direct if cut.kind is Kind.CLOSED]
    named = [cut for cut in direct if cut.kind in _REFERENCES]
    if not closing or not named:
        return cuts
    ended = replace(named[0], ending=closing[0].ending)
    return [ended, *(cut for cut in cuts if cut not in (closing[0], named[0]))]


_REFERENCES = {Kind.NAME, Kind.ITEM, Kind.KEY, Kind.ATTRIBUTE, Kind.DELETED_ATTRIBUTE, Kind.SLOT}
"""Kinds of references whose target is the code of an object."""
