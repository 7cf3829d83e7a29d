"""The holder of an object as reports show it, ``notebook variable runs[3]``, and the remedy that
frees the object: a line, ``del runs[3]``, or words.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from ipygpumem.heap.paths.cuts import Cut
from ipygpumem.heap.paths.literals import call_of_magic
from ipygpumem.heap.paths.loop_variables import with_free_variable
from ipygpumem.heap.paths.roots import NO_ROOT, Rank, Root, without_keys
from ipygpumem.records import COMMENT, ReferencePath

MORE_THERE = " more there"
"""Ends the path of a holder with further references."""
_BLOCKS = (ast.For, ast.While, ast.With)
_DELETING = "del "
_DELETING_OUTPUT = "%xdel "
_DELETED_ITEM = re.compile(r"del (?P<owner>[^;#]+)\[(?P<position>\d+)\](?P<ending>)")
_CLEARED_ITEM = re.compile(
    r"(?P<owner>[^;#]+)\[(?P<position>\d+)\](?P<ending>\.zero_grad\(\)|\.grad = None)"
)


class ItemLine(NamedTuple):
    """The parts of a line about one item of a list: ``del runs[3]``, ``models[3].zero_grad()``."""

    owner: str
    """The code of the list."""
    position: int
    ending: str
    """Empty to delete the item, else the code after it, such as ``.zero_grad()``."""


@dataclass(frozen=True)
class Remedy:
    """A line of code that frees an object, or words that say how to free it.

    Attributes:
        line: a line of code, a magic, or words; empty if there is no advice.
        comment: the comment on the line; empty if there is none.
        cuts: the references that the line removes, if it does nothing else. Without a line they are
            those that could be removed, such as that of a variable: only the caller knows if all
            that the variable leads to may be freed.
    """

    line: str
    comment: str = ""
    cuts: tuple[Cut, ...] = field(default=(), compare=False)

    @classmethod
    def of_text(cls, text: str, cuts: Iterable[Cut] = ()) -> Remedy:
        """Return the remedy of a line that may have a comment."""
        line, _, comment = text.partition(COMMENT)
        return cls(line, comment, tuple(cuts))

    @property
    def text(self) -> str:
        """The line with its comment."""
        return self.line + COMMENT + self.comment if self.comment else self.line

    @property
    def removed(self) -> tuple[Cut, ...]:
        """The references that the line removes; none for words, and for a line that does anything
        else.
        """
        return self.cuts if self.line else ()

    @property
    def is_magic(self) -> bool:
        """True for a magic, after which no statement can follow."""
        return self.line.startswith("%")

    @property
    def is_code(self) -> bool:
        """True for Python code or a magic, False for words."""
        return self.is_magic or bool(self._statements)

    @property
    def is_simple(self) -> bool:
        """True for code to which further statements can be appended: no words, magic or loop."""
        return bool(self._statements) and not any(
            isinstance(statement, _BLOCKS) for statement in self._statements
        )

    @property
    def deleted_output(self) -> str:
        """IPython's name for the output that the line deletes; empty if it does something else."""
        if not self.line.startswith(_DELETING_OUTPUT):
            return ""
        return self.line.removeprefix(_DELETING_OUTPUT)

    @property
    def deleted_code(self) -> str:
        """The code after ``del``; empty if the line begins in another way."""
        return self.line.removeprefix(_DELETING) if self.deletes else ""

    @property
    def deletes(self) -> bool:
        """True if the line begins with a deletion."""
        return self.line.startswith(_DELETING)

    @property
    def works_once(self) -> bool:
        """True if the line would fail or free nothing when it is run again, such as ``del x``."""
        return self.deletes or bool(self.deleted_output) or self.line.endswith(".zero_grad()")

    @property
    def item(self) -> ItemLine | None:
        """The item of a list that the line deletes, or whose gradients it clears; None for another
        line.
        """
        if not self.is_simple:
            return None
        for pattern in (_DELETED_ITEM, _CLEARED_ITEM):
            match = pattern.fullmatch(self.line)
            if match is not None:
                return ItemLine(match["owner"], int(match["position"]), match["ending"])
        return None

    @property
    def deleted_names(self) -> set[str]:
        """The variables that the line deletes, if it does nothing else."""
        names = set[str]()
        for statement in self._statements:
            if not isinstance(statement, ast.Delete):
                return set()
            for target in statement.targets:
                if not isinstance(target, ast.Name):
                    return set()
                names.add(target.id)
        return names

    @property
    def as_code(self) -> str:
        """The line as Python code: a magic becomes a call of ``run_line_magic``."""
        return call_of_magic(self.line) if self.is_magic else self.line

    @cached_property
    def _statements(self) -> list[ast.stmt]:
        """The statements of the line; none for words."""
        try:
            return ast.parse(self.line).body
        except (SyntaxError, ValueError):  # the latter for half a surrogate pair in a user's text
            return []

    def with_comment(self, comment: str) -> Remedy:
        """Return the remedy with a further comment. Words get none, and neither does a magic, which
        would take the comment for its argument.
        """
        if not comment or not self._statements:
            return self
        comments = f"{self.comment}; {comment}" if self.comment else comment
        return replace(self, comment=comments)


NO_REMEDY = Remedy("")
REMOVE = Remedy("remove it from there")
REMOVE_THEM = Remedy("remove them from there")
"""Advice for references that no line can be written for."""


def comments_of(remedies: Iterable[Remedy], *, first: str = "", last: str = "") -> str:
    """Return the comments of remedies as one, each once; empty if there are none.

    Args:
        remedies: the remedies.
        first: a further comment, which comes first.
        last: a further comment, which comes last.
    """
    comments = dict[str, None]()
    for comment in (first, *(remedy.comment for remedy in remedies), last):
        if comment:
            comments[comment] = None
    return "; ".join(comments)


@dataclass(frozen=True)
class Holder:
    """A path to an object, as reports show it, and how to free the object.

    Attributes:
        path: the path from a root, ``notebook variable runs[0]``; several if the object is in
            several places, ``notebook variable runs[0], notebook variable best``.
        remedy: the line that frees the object, or words.
        roots: the root at which each path begins; ``NO_ROOT`` if that is unknown.
    """

    path: str
    remedy: Remedy
    roots: tuple[Root, ...] = field(default=(NO_ROOT,), compare=False)

    @property
    def advice(self) -> str:
        """The remedy as text."""
        return self.remedy.text

    @property
    def is_kept(self) -> bool:
        """True if its path begins at a name that is kept on purpose."""
        return self.roots[0].rank is Rank.KEPT

    @property
    def is_variable(self) -> bool:
        """True if its path begins at a variable of the notebook."""
        return self.roots[0].is_variable

    @property
    def has_words(self) -> bool:
        """True if a step of its path has words, ``: closure of function f``, and not only the code
        of items and attributes.
        """
        return ": " in without_keys(self.path)  # a key may hold anything

    @property
    def module(self) -> str:
        """The module whose global has the object, by items and attributes only: ``settings`` for
        ``module settings, global cache["x"]``. Empty for any other path.
        """
        root = self.roots[0]
        return "" if ":" in without_keys(self.path) else root.module

    @property
    def has_kept_name(self) -> bool:
        """True if one of its further paths begins at a name that is kept on purpose."""
        return any(root.rank is Rank.KEPT for root in self.roots[1:])

    def with_more(self, number: str) -> Holder:
        """Return the holder with the number of its further references to the object in the path:
        ``runs[0], and 7 more there``.
        """
        return replace(self, path=f"{self.path}, and {number}{MORE_THERE}")

    def record(self, names: Container[str] = ()) -> ReferencePath:
        """Return the holder as plain text for a record.

        Args:
            names: the user's names, none of which a loop in the line may bind.
        """
        remedy = self.remedy
        if remedy.line.startswith("for "):
            remedy = replace(remedy, line=with_free_variable(remedy.line, names))
        return ReferencePath(self.path, remedy.text)
