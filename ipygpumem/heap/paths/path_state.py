"""A path to an object as it is written step by step, and the ways that such paths describe."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from ipygpumem.heap.paths.cuts import Cut, Kind, in_sequence, split, statement_of
from ipygpumem.heap.paths.literals import literal
from ipygpumem.heap.paths.roots import NOTEBOOK, REMOVE, REMOVE_THEM, Root
from ipygpumem.records import COMMENT, ReferencePath, line_of

LONGEST_PATH = 240


_CALLS = {Kind.CALL, Kind.QUEUED}
"""References that the owner's own calls remove."""
_STEP = re.compile(r"[.\[]|: |, ")


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
    removed: frozenset[tuple[int, int]] = frozenset()
    """The references that the advice removes, as the identities of both objects; 0 stands for all
    objects to which the first one refers, such as those of a generator that is closed.
    """
    words: str = ""
    """The advice if no line removes the object from any place."""

    @property
    def cut(self) -> Cut | None:
        """The reference, if it is only one."""
        return self.cuts[0] if len(self.cuts) == 1 else None

    def is_ended_by(self, removed: Set[tuple[int, int]]) -> bool:
        """Return True if some removed references include one of this way."""
        if not removed.isdisjoint(itertools.pairwise(self.step_ids)):
            return True
        return any((step_id, 0) in removed for step_id in self.step_ids[:-1])


class Path:
    """A path under construction, and how to free its target.

    Attributes:
        text: the path so far.
        code: code of the path's target; empty if it cannot be typed.
        cut: the reference to remove, so that the target dies; None if there is none, or no code for
            it.
        is_fixed: True if the reference to the target itself cannot be removed, such as that of a
            tuple.
        advice: the statement that frees the target, or words, if a step knew one.
        is_lost: True if a step cannot be typed: the text ends there.
        is_own: True if the target is a model's own part, which users do not remove.
        is_of_library: True if the target is an object of a library, whose code may need each
            reference.
        is_ending: True if the advice ends the target of that time, such as a generator's
            ``close()``: it refers to nothing any more.
        ended: the object that the advice ends, if it is another one; else None.
    """

    def __init__(self, root: Root, text: str) -> None:
        self.text = text
        self.code = root.code
        self.cut = root.cut
        self.is_fixed = False
        self.advice = ""
        if root.advice != REMOVE and not root.code:
            self.advice = root.advice
        self.is_lost = root.is_all
        self._is_all = root.is_all
        self.is_of_library = root.advice == REMOVE
        self.is_own = False
        self.is_ending = False
        self.ended: object = None
        self._advised_cut: Cut | None = None
        self._advised_code = ""
        self._unless_cut: Cut | None = None
        self._unless = ""
        """Advice for a target to which no reference can be removed inside a function."""

    def note_own(self) -> None:
        """Note that the next step leads to a part of a model or optimizer."""
        self.is_own = True

    def fixed(self, shown: str, code: str = "") -> None:
        """Append a reference that cannot be removed: that to its object is."""
        self._append(shown, code)
        self.is_fixed = True

    def enter(self, shown: str, code: str, cut: Cut | None) -> None:
        """Append a reference that can be removed, by ``cut`` if there is code for it."""
        was_out_of_reach = self.is_fixed and self.is_lost
        self._append(shown, code)
        if self._is_all or (cut is None and (self._unless or was_out_of_reach)):
            return
        if self.is_of_library and cut is not None and cut.kind not in _CALLS:
            cut = None  # the library's code may need it
        if cut is not None:
            outer = None if self.is_fixed else self.cut
            cut = replace(cut, outer=outer)
            self._unless = ""
        self.cut = cut
        self.is_fixed = False

    def _append(self, shown: str, code: str) -> None:
        if not self.is_lost:
            self.text += shown
            self.is_lost = shown.startswith(" (")
        self.code = code

    def say(self, words: str, code: str = "") -> None:
        """Append a step that only words can describe."""
        self.text += words
        self.code = code
        self.is_fixed = True
        self.is_lost = self._is_all

    def statement(self, template: str) -> str:
        """Return a statement about the path's target, with its import; empty if there is no code
        for it.
        """
        imports, code = split(self.code)
        return imports + template.format(code) if code else ""

    @property
    def removal(self) -> str:
        """The statement that removes the target, or the nearest object that can be removed; may be
        empty.
        """
        if self.cut is None:
            return ""
        if self.cut.kind is Kind.NAME and not self.is_fixed:
            imports, code = split(self.cut.target)
            return f"{imports}{code} = None"
        return self.cut.statement

    def advise(self, advice: str, words: str) -> None:
        """Record how to free the path's target, unless that is known: by a statement, or else in
        words.
        """
        if self.advice:
            return
        self.advice = advice or words
        self.is_ending = advice != "" and line_of(advice) != self.removal
        self._advised_cut = self.cut
        self._advised_code = self.code

    def advise_unless(self, comment: str, words: str) -> None:
        """Remove the current target unless the final one can be removed from an object further
        along the path.
        """
        if self._unless or self._is_all:
            return
        line = self.removal
        if self.cut is not None and self.cut.kind is Kind.NAME and "." not in self.cut.target:
            line = self.cut.statement  # as ``why`` deletes a variable of the notebook
        self._unless = f"{line}{comment}" if line else words
        self._unless_cut = self.cut

    def _advised_cuts(self, ended_id: int) -> tuple[Cut, ...]:
        """Return the reference that the advice removes, or the call that ends an object."""
        cut = self._advised_cut
        if self.is_ending and self.advice and COMMENT not in self.advice:
            return (Cut(Kind.CALL, ended_id, self._advised_code, self.advice, outer=cut),)
        if cut is None or cut.kind is Kind.NAME or line_of(self.advice) != cut.statement:
            return ()
        return (cut,)

    def way(self, root: Root, *, is_root_itself: bool, ended_id: int) -> Way:
        """Return the path with its advice.

        Args:
            root: the root, which may have advice of its own.
            is_root_itself: True if the path ends at the root's object.
            ended_id: the identity of the object that the advice ends; 0 if it ends none.
        """
        text = ended(self.text)
        if self.advice:
            return Way(
                ReferencePath(text, self.advice), self._advised_cuts(ended_id), is_advised=True
            )
        if self._unless:
            cuts = () if self._unless_cut is None else (self._unless_cut,)
            return Way(ReferencePath(text, self._unless), cuts)
        if self.cut is not None:
            # A name may lead to much that is older: only the caller knows if all of it is unwanted.
            is_name = self.cut.kind is Kind.NAME and not self.is_fixed
            is_direct = not self.is_fixed and (is_root_itself or not self._is_all)
            advice = "" if is_name else self.cut.statement
            return Way(ReferencePath(text, advice), (self.cut,), is_direct)
        return Way(ReferencePath(text, root.advice or REMOVE))


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


_REFERENCES = {Kind.NAME, Kind.ITEM, Kind.KEY, Kind.ATTRIBUTE, Kind.MADE, Kind.SLOT}
"""Kinds of references whose target is the code of an object."""


def ended(path: str) -> str:
    """Return a path up to the name or item before it becomes too long to read."""
    if len(path) <= LONGEST_PATH:
        return path
    steps = [match.start() for match in _STEP.finditer(path, 0, LONGEST_PATH)]
    return f"{path[: steps[-1] if steps else LONGEST_PATH]} …"
