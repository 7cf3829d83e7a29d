"""A path to an object while ``PathWriter`` writes it, step by step.

Each step tells a ``Path`` the text and the code that it adds, and the reference that a line could
remove. At the end, ``Path.way`` decides which of these references the line is about.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ipygpumem.heap.paths.cuts import Cut, Kind, split
from ipygpumem.heap.paths.remedies import NO_REMEDY, REMOVE, Holder, Remedy
from ipygpumem.heap.paths.roots import NO_ROOT, Root
from ipygpumem.heap.paths.ways import Way

LONGEST_PATH = 240
"""Maximum number of characters of a path in a report."""


ASSIGNED = {Kind.NAME, Kind.ITEM, Kind.KEY, Kind.ATTRIBUTE, Kind.SLOT}
"""Kinds of references that an assignment replaces."""
_CALLS = {Kind.CALL, Kind.QUEUED}
"""Kinds of references that the owner's own calls remove."""
_STEP = re.compile(r"[.\[]|: |, ")
"""The beginning of a step in the text of a path."""


class PathText:
    """The text of a path, as reports show it: ``notebook variable runs[0]["x"]``.

    Attributes:
        shown: the text so far.
        begins_at_root: False if words about a part of an object are in the place of the root:
            ``forward hook on model``.
        is_lost: True if a step cannot be typed: the text ends there, except for words.
    """

    def __init__(self, shown: str, *, is_lost: bool) -> None:
        self.shown = shown
        self.begins_at_root = True
        self.is_lost = is_lost

    def append(self, step: str) -> None:
        """Append the text of a step, ``["x"]``, unless the text is lost: a step that cannot be
        typed, such as " (dict_values)", is the last one.
        """
        if not self.is_lost:
            self.shown += step
            self.is_lost = step.startswith(" (")

    def replace_by_words(self, words: str) -> None:
        """Replace the text by words, without a root, after which only words follow."""
        self.shown = words
        self.begins_at_root = False
        self.is_lost = True


@dataclass(frozen=True, eq=False)
class Advice:
    """How to free an object on the way of a path, as the step through it has advised: a statement,
    such as ``gen.close()`` for a generator, or words.

    Attributes:
        remedy: the statement, or words; empty if no step has advised any.
        cut: the reference to the object, as the ``cut`` of a path; None if there is none.
        code: the code of the object; empty if it cannot be typed.
        is_ending: True if the remedy ends an object, such as a generator by ``close()``, which then
            refers to nothing.
        ended_object: the object that the remedy ends; None if it is the one that the advice is for.
    """

    remedy: Remedy = NO_REMEDY
    cut: Cut | None = None
    code: str = ""
    is_ending: bool = False
    ended_object: object = None

    def cuts(self, ended_id: int) -> tuple[Cut, ...]:
        """Return the reference that the advised line removes, or the call by which it ends an
        object, so that the line can be joined with further ones; none if it does anything else.

        Args:
            ended_id: the identity of the object that the line ends; 0 if it ends none.
        """
        line = self.remedy.line
        if self.is_ending and not self.remedy.comment:  # gen.close()
            return (Cut(Kind.CALL, ended_id, self.code, line, outer=self.cut),)
        # A variable may lead to much else; any other line does more than to remove the reference.
        if self.cut is None or self.cut.kind is Kind.NAME or line != self.cut.statement:
            return ()
        return (self.cut,)


class Path:
    """A path under construction, and how to free its target: the object to which it leads so far.

    Each step appends a reference from the target to the next object, which becomes the target.
    There are three kinds of references: those that a line can remove (``runs["a"]``), fixed ones
    (an item of a tuple), and those that only words describe (``: closure of function f``).

    Attributes:
        root: the root at which the path begins.
        text: the path so far, as reports show it.
        code: code of the path's target; empty if it cannot be typed.
        cut: the reference to remove, so that the target dies; None if there is none, or no code for
            it.
        is_fixed: True if the reference to the target itself cannot be removed, so that ``cut`` is
            one before it.
        is_in_model: True if the target is a part of a model or optimizer, which users do not
            remove.
        is_of_library: True if the target is an object of a library, whose code may need each
            reference.
        advice: how to free an object on the way, if a step or the root has advised it.
    """

    def __init__(self, root: Root, text: str) -> None:
        self.root = root
        self.text = PathText(text, is_lost=root.is_removed_as_whole)
        self.code = root.code
        self.cut = root.cut
        self.is_fixed = False
        self.is_in_model = False
        self.is_of_library = root.is_of_library
        self.advice = Advice()
        if not root.is_of_library and not root.code:  # no step can be typed: thread "loader"
            self.advice = Advice(Remedy(root.advice))
        self._is_removed_as_whole = root.is_removed_as_whole
        """True if ``cut`` removes all objects to which later steps lead."""
        self._fallback = NO_REMEDY
        """The remedy if no later step has a reference that can be removed: to remove an earlier
        object, such as the function with the closure that has the target.
        """

    def replace_by_copy(self, function: str, other_names: Sequence[Cut]) -> None:
        """Record that the line puts a copy in the place of the current target, ``model =
        sklearn.base.clone(model)``. All objects to which later steps lead die with the target.

        Args:
            function: the code of the function that makes the copy.
            other_names: the references of further variables to the target.
        """
        if self.cut is None or self.is_fixed or self._is_removed_as_whole:
            return
        if self.cut.kind in ASSIGNED and self.cut.target == self.code:
            repeated = (*self.cut.repeated, *other_names)
            self.cut = replace(self.cut, copied_by=function, repeated=repeated)
            self._is_removed_as_whole = True

    def append_fixed(self, shown: str, code: str = "") -> None:
        """Append a reference that cannot be removed: the line removes the one before it.

        Args:
            shown: the text, such as ``[3]``; one that begins with " (" cannot be typed.
            code: the code of the new target; empty if there is none.
        """
        self._append(shown, code)
        self.is_fixed = True

    def append_removable(self, shown: str, code: str = "", cut: Cut | None = None) -> None:
        """Append a reference that users can remove.

        Args:
            shown: the text, such as ``["key"]``; one that begins with " (" cannot be typed.
            code: the code of the new target; empty if there is none.
            cut: the reference; None if there is no code for it.
        """
        is_owner_out_of_reach = self.is_fixed and self.text.is_lost
        self._append(shown, code)
        if self._is_removed_as_whole:
            return  # the line removes an earlier object with all that it leads to
        if cut is None and (self._fallback.line or is_owner_out_of_reach):
            return  # ``self.cut`` stays: the line removes an earlier object
        if self.is_of_library and cut is not None and cut.kind not in _CALLS:
            cut = None  # the library's code may need it
        if cut is not None:
            # After a fixed step, ``self.cut`` is not the reference to the owner of this one.
            outer = None if self.is_fixed else self.cut
            cut = replace(cut, outer=outer)
            self._fallback = NO_REMEDY
        # Without a cut, the path has none: it leads out of the object that an earlier one removes.
        self.cut = cut
        self.is_fixed = False

    def append_words(self, words: str, code: str = "") -> None:
        """Append a reference that only words can describe, ``: closure of function f``.

        They are shown even after a step that cannot be typed, and later steps are shown again.
        """
        self.text.shown += words
        self.text.is_lost = self._is_removed_as_whole
        self.code = code
        self.is_fixed = True

    def _append(self, shown: str, code: str) -> None:
        """Append the text of a step, and set the code of the new target."""
        self.text.append(shown)
        self.code = code

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

    def advise(
        self,
        statement: str = "",
        *,
        words: str = "",
        comment: str = "",
        ended_object: object = None,
    ) -> None:
        """Record how to free the current target, unless an earlier step has advised a remedy: the
        outermost object that has to be ended counts.

        Args:
            statement: the statement that frees it; empty if there is none.
            words: the advice if there is no statement.
            comment: the comment on the statement.
            ended_object: the object that the statement ends; None if it is the target.
        """
        if self.advice.remedy.line:
            return
        remedy = Remedy(statement, comment) if statement else Remedy(words)
        is_ending = statement not in ("", self.removal)
        self.advice = Advice(remedy, self.cut, self.code, is_ending, ended_object)

    def replace_advised(self, remedy: Remedy) -> None:
        """Replace the remedy that a step has advised, if any, by another one."""
        self.advice = replace(self.advice, remedy=remedy)

    def set_fallback(self, comment: str, words: str) -> None:
        """Record that the remedy is to remove the current target, if no later step has a reference
        that can be removed: a function, if nothing can be taken out of its closure.

        Args:
            comment: the comment on the line that removes it.
            words: the advice if there is no such line.
        """
        if self._fallback.line or self._is_removed_as_whole:
            return
        line = self.removal
        if self.cut is not None and self.cut.kind is Kind.NAME and "." not in self.cut.target:
            line = self.cut.statement  # ``del f`` instead of ``f = None``, as in %gpumem why
        cuts = () if self.cut is None else (self.cut,)
        self._fallback = Remedy(line, comment, cuts) if line else Remedy(words, cuts=cuts)

    def way(self, *, is_root_itself: bool, ended_id: int) -> Way:
        """Return the finished path with its remedy.

        The remedy is, in this order: the one that a step has advised; the fallback; the statement
        that removes the reference; the root's advice.

        Args:
            is_root_itself: True if the path ends at the root's object.
            ended_id: the identity of the object that the advice ends; 0 if it ends none.
        """
        if self.advice.remedy.line:
            remedy = replace(self.advice.remedy, cuts=self.advice.cuts(ended_id))
            return Way(self.holder(remedy), is_advised=True)
        if self._fallback.line:
            return Way(self.holder(self._fallback))
        if self.cut is not None:
            # A name may lead to much that is older. Only the caller knows if all of it may be
            # freed, so a name has no statement here.
            is_name = self.cut.kind is Kind.NAME and not self.is_fixed and not self.cut.copied_by
            is_direct = not self.is_fixed and (is_root_itself or not self._is_removed_as_whole)
            statement = "" if is_name else self.cut.statement
            return Way(self.holder(Remedy(statement, cuts=(self.cut,))), is_direct)
        return Way(self.holder(Remedy(self.root.advice) if self.root.advice else REMOVE))

    def holder(self, remedy: Remedy) -> Holder:
        """Return the path with a remedy."""
        root = self.root if self.text.begins_at_root else NO_ROOT
        return Holder(shorten_path(self.text.shown), remedy, (root,))


def shorten_path(path: str) -> str:
    """Return a path, cut off after a name or item if it is too long to read."""
    if len(path) <= LONGEST_PATH:
        return path
    steps = [match.start() for match in _STEP.finditer(path, 0, LONGEST_PATH)]
    return f"{path[: steps[-1] if steps else LONGEST_PATH]} …"
