"""References that a user can remove, and the statement that removes some of one object's
references.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

_MOST_KEYS = 4
"""Maximum number of items that a statement names one by one."""
_MOST_POSITIONS = 40
"""Maximum number of positions that a statement lists."""


class Kind(Enum):
    """The kind of a reference, which decides how it is removed."""

    NAME = "a variable"
    ITEM = "an item of a list or deque: later items move up"
    KEY = "a key of a dict, with its value"
    ENTRY = "a value of a dict that other code looks up: its key stays"
    ELEMENT = "an element of a set"
    ATTRIBUTE = "an attribute, which stays as None"
    MADE = "an attribute that is made again when it is read, or a method"
    SLOT = "an element of an array of objects"
    FIGURE = "a figure of pyplot"
    CALL = "a registration that a method call removes"


_ORDERED = {Kind.ITEM, Kind.KEY, Kind.ELEMENT}
"""References of containers with positions, several of which one statement can remove."""


@dataclass(frozen=True)
class Cut:
    """A reference that a user can remove.

    Attributes:
        kind: its kind.
        owner_id: identity of the object that refers.
        owner: code of that object; empty for a variable.
        target: code of the object that it refers to, or the call that removes it.
        position: position among the references of a container.
        size: number of references of the container; 0 if its object has other references.
        outer: the reference to the owner itself, if that is an item of a container.
    """

    kind: Kind
    owner_id: int
    owner: str
    target: str
    position: int = 0
    size: int = 0
    outer: Cut | None = None

    @property
    def statement(self) -> str:
        """The statement that removes it."""
        imports, code = split(self.target)
        match self.kind:
            case Kind.ATTRIBUTE | Kind.ENTRY | Kind.SLOT:
                return f"{imports}{code} = None"
            case Kind.ELEMENT:
                return f"{imports}{split(self.owner)[1]}.remove({code})"
            case Kind.CALL | Kind.FIGURE:
                return f"{imports}{code}"
            case _:
                return f"{imports}del {code}"


def split(code: str) -> tuple[str, str]:
    """Return the imports that code begins with, and the rest: ``import m; `` and ``m.x``."""
    imports, semicolon, rest = code.rpartition("; ")
    return imports + semicolon, rest


def statement_of(cuts: Sequence[Cut]) -> str:
    """Return one statement that removes all of some references, however many; empty if there is
    none.
    """
    if not cuts:
        return ""
    of_owner = dict[int, list[Cut]]()
    for cut in dict.fromkeys(cuts):
        of_owner.setdefault(cut.owner_id, []).append(cut)
    inner = _in_each(list(of_owner.values()))
    if inner:
        return inner
    if len(of_owner) > _MOST_KEYS:
        return ""
    statements = [_of_one_owner(same) for same in _inner_first(list(of_owner.values()))]
    return "; ".join(statements) if all(statements) else ""


def _inner_first(groups: list[list[Cut]]) -> list[list[Cut]]:
    """Return the groups so that no statement moves an item that a later statement names by its
    position.
    """
    return sorted(groups, key=lambda group: _positions(group[0]), reverse=True)


def _positions(cut: Cut) -> tuple[int, ...]:
    """Return the positions on the way to a reference, the outermost first."""
    before = () if cut.outer is None else _positions(cut.outer)
    return (*before, cut.position)


def _of_one_owner(cuts: list[Cut]) -> str:
    """Return the statement that removes some references of one object."""
    first = cuts[0]
    if len(cuts) == 1 and not (first.kind is Kind.ELEMENT and first.size == 1):
        return first.statement
    imports, owner = split(first.owner)
    if first.kind is Kind.FIGURE and len(cuts) == first.size:
        return f'{imports}{owner}.close("all")'
    is_ordered = all(cut.kind is first.kind for cut in cuts) and first.kind in _ORDERED
    if is_ordered and len(cuts) == first.size:
        return f"{imports}{owner}.clear()"
    positions = sorted(cut.position for cut in cuts)
    start, end = positions[0], positions[-1] + 1
    if is_ordered and end - start == len(cuts):
        return imports + _of_span(first.kind, owner, start, end, first.size)
    last_first = sorted(cuts, key=lambda cut: cut.position, reverse=True)
    if len(cuts) <= _MOST_KEYS or first.kind is Kind.FIGURE:
        return "; ".join(dict.fromkeys(cut.statement for cut in last_first))
    if first.kind is Kind.ITEM and len(cuts) <= _MOST_POSITIONS:
        listed = ", ".join(str(cut.position) for cut in last_first)
        return f"{imports}for position in {listed}: del {owner}[position]"
    return ""


def _of_span(kind: Kind, owner: str, start: int, end: int, size: int) -> str:
    """Return the statement that removes neighbouring items of a container."""
    span = f"[{start}:]" if end == size else f"[{start}:{end}]"
    match kind:
        case Kind.ITEM:
            return f"del {owner}{span}"
        case Kind.KEY:
            return f"for key in list({owner}){span}: del {owner}[key]"
        case _:
            return f"{owner}.difference_update(list({owner}){span})"


def _in_each(groups: list[list[Cut]]) -> str:
    """Return the loop that removes the same reference of neighbouring items of a list; empty if
    they differ.

    An example is a list of results, each of which holds an array: ``for item in runs: del
    item["data"]``.
    """
    firsts = [group[0] for group in groups]
    outer = [cut.outer for cut in firsts if cut.outer is not None]
    if len(groups) < 2 or len(outer) < len(groups) or any(len(group) > 1 for group in groups):
        return ""
    first = outer[0]
    if first.kind is not Kind.ITEM or any(cut.owner_id != first.owner_id for cut in outer):
        return ""
    inner = {inside(cut, first) for cut, first in zip(firsts, outer, strict=True)}
    positions = sorted(cut.position for cut in outer)
    start, end = positions[0], positions[-1] + 1
    if len(inner) > 1 or end - start != len(groups):
        return ""
    imports, owner = split(first.owner)
    span = f"[{start}:]" if end == first.size else f"[{start}:{end}]"
    if len(groups) == first.size:
        span = ""
    return f"{imports}for item in {owner}{span}: {inner.pop()}"


def inside(cut: Cut, outer: Cut) -> str:
    """Return the statement that removes a reference of an item that is called ``item``."""
    prefix = outer.target
    if not cut.owner.startswith(prefix) or not cut.target.startswith(prefix):
        return cut.statement
    owner = f"item{cut.owner[len(prefix) :]}"
    return replace(cut, owner=owner, target=f"item{cut.target[len(prefix) :]}").statement
