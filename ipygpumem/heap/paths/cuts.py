"""References that a user can remove, and the statement that removes some of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from ipygpumem.introspect import type_name

EACH = "_item"
"""The variable of a loop over items."""
_MOST_KEYS = 4
"""Maximum number of items that a statement names one by one."""
_MOST_POSITIONS = 40
"""Maximum number of positions that a statement lists."""
_MOST_CALLS = 4
"""Maximum number of calls that a statement makes one by one if a loop can make them."""
_CALL_WITH_NUMBER = re.compile(r"([\w.]+)\((\d+)\)")
"""A call such as ``plt.close(3)``."""
_IMPORT = re.compile(r"import ([\w.]+)(?: as (\w+))?; ")
_IMPORTS = re.compile(r"(?:import [\w.]+(?: as \w+)?; )*")


class Kind(Enum):
    """The kind of a reference, which decides how it is removed."""

    NAME = "a variable"
    ITEM = "an item of a list or deque: later items move up"
    KEY = "a key of a dict, with its value"
    ELEMENT = "an element of a set"
    ATTRIBUTE = "an attribute, which stays as None"
    DELETED_ATTRIBUTE = "an attribute that is deleted: it was added, or is made again when read"
    SLOT = "an element of an array of objects"
    COLUMN = "columns of a data frame that share memory"
    CALL = "a registration that a call removes"
    CLOSED = "a registration that a method of the object removes"
    QUEUED = "an item that calls of the container's owner remove, such as that of a queue"


class Listing(Enum):
    """The code that lists a dict in the order of its own entries."""

    PLAIN = "list(items)"
    OF_DICT = "list(dict.keys(items))"
    """For a subclass that lists its keys in another order."""

    def keys_of(self, code: str) -> str:
        """Return the expression for the list of a dict's keys."""
        if self is Listing.PLAIN:
            return f"list({code})"
        return f"list(dict.keys({code}))"

    def values_of(self, code: str) -> str:
        """Return the expression for the list of a dict's values."""
        if self is Listing.PLAIN:
            return f"list({code}.values())"
        return f"list(dict.values({code}))"


WITH_POSITIONS = {Kind.ITEM, Kind.QUEUED}
"""References that code names by a position, which changes if an earlier one is removed."""
_ORDERED = {Kind.ITEM, Kind.KEY, Kind.ELEMENT}
"""References of containers with positions, several of which one statement can remove."""


@dataclass(frozen=True)
class Protocol:
    """The calls by which an owner of a container removes items, which nothing else may remove.

    Each statement is a template: ``{0}`` is the code of the owner, ``{items}`` that of the
    container.

    Attributes:
        removing_all: the statement that removes all items; empty if there is none. In it,
            ``{ending}`` is the call of a method of each item.
        removing_some: the statement that removes some items; empty if there is none. In it,
            ``{deleting}`` deletes the ``{number}`` items at ``{positions}``, which have ``{keys}``.
        is_compound: True if a statement begins a block, so that none can stand in front of it.
        words: the advice if there is no statement.
        keys: for each position, the number by which the owner knows the item.
    """

    removing_all: str
    removing_some: str
    is_compound: bool = False
    words: str = ""
    keys: tuple[object, ...] = ()

    def with_keys(self, keys: Sequence[object]) -> Protocol:
        """Return the protocol of a container whose items have these keys."""
        return replace(self, keys=tuple(keys))

    def statement(self, cut: Cut, positions: Sequence[int]) -> str:
        """Return the statement that removes the items at some positions; empty if there is none.

        Args:
            cut: the reference to one of the items.
            positions: the positions in ascending order.
        """
        imports, owner = split(cut.owner)
        items = split(cut.items)[1]
        if self.is_compound:  # no block can follow an import
            imports, owner, items = "", without_import(cut.owner), without_import(cut.items)
        if len(positions) == cut.size:
            ending = f".{cut.ending}" if cut.ending else ""
            if ending and "{ending}" not in self.removing_all:
                return ""
            statement = self.removing_all.format(owner, items=items, ending=ending)
            return statement and imports + statement
        if cut.ending and "{deleting}" not in self.removing_some:
            return ""
        statement = self.removing_some.format(
            owner,
            items=items,
            deleting=_deleting(items, positions, cut.ending),
            number=len(positions),
            positions=_tuple_of(positions),
            keys=_tuple_of([self.keys[place] for place in positions]) if self.keys else "",
        )
        return statement and imports + statement


def _deleting(items: str, positions: Sequence[int], ending: str) -> str:
    """Return the statement that deletes the items at some positions, the last one first."""
    if len(positions) > 1:
        removal = f"{items}.__delitem__(place)"
        if ending:
            removal = f"({items}[place].{ending}, {removal})"
        return f"[{removal} for place in {_tuple_of(positions[::-1])}]"
    item = f"{items}[{positions[0]}]"
    return f"{item}.{ending}; del {item}" if ending else f"del {item}"


def _tuple_of(values: Sequence[object]) -> str:
    """Return the code of a tuple of numbers."""
    return f"({values[0]},)" if len(values) == 1 else f"({', '.join(map(str, values))})"


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
        all_of: the statement that removes all references of a registry; empty if there is none.
        ending: the call of a method that ends the object first, such as ``cancel()`` of a task.
        columns: the code of the label of each column.
        listing: how code lists the keys of a dict by their positions.
        has_slices: False for a deque, whose items are deleted one at a time.
        repeated: the owner's other references to the same object, such as those of its other
            attributes: the object dies only without all of them.
        items: the code of the container, if another object owns it.
        protocol: the calls by which that owner removes items.
        is_detached: True if the line replaces a tensor by one without its graph instead of removing
            it.
        copied_by: the code of a function whose copy of the object takes its place, such as
            ``sklearn.base.clone``; empty if the reference is removed.
        also_removed: other references that a call removes, as the identities of both objects.
        is_only_there: True if all other items of the list around the owner have none in this
            place.
        removed_id: identity of the object to which the reference leads; 0 if it is unknown, or if
            a call ends the owner, which then refers to nothing.
        is_replaced: True for an item of a list that is as long as it was before: it has the place
            of an older item, and later ones would move up if it were deleted.
    """

    kind: Kind
    owner_id: int
    owner: str
    target: str
    position: int = 0
    size: int = 0
    outer: Cut | None = None
    all_of: str = ""
    ending: str = ""
    columns: tuple[str, ...] = ()
    listing: Listing = Listing.PLAIN
    has_slices: bool = True
    repeated: tuple[Cut, ...] = ()
    items: str = ""
    protocol: Protocol | None = None
    is_detached: bool = False
    copied_by: str = ""
    also_removed: frozenset[tuple[int, int]] = field(default=frozenset(), compare=False)
    is_only_there: bool = field(default=False, compare=False)
    removed_id: int = field(default=0, compare=False)
    is_replaced: bool = field(default=False, compare=False)

    def __hash__(self) -> int:
        """Return a hash of few attributes: a set of a million references takes half the time."""
        return hash((self.owner_id, self.position, self.target))

    def of_item(self, position: int, item: object) -> Cut:
        """Return the reference to another item of the same container, which has no code.

        ``replace`` takes ten times as long: a second for 200,000 items.
        """
        cut = object.__new__(Cut)
        attributes = vars(self) | {"position": position, "target": "", "removed_id": id(item)}
        vars(cut).update(attributes)
        return cut

    def of_other_item(
        self, position: int, item: object, part: object, place: int, size: int
    ) -> Cut:
        """Return the reference of another item of the list around its owner, to use in a loop over
        that list: it has the code of this one.

        Args:
            position: the position of the item in the list.
            item: the item, which has the reference in the same place.
            part: the object to which it refers.
            place: the position of the reference in the item.
            size: the number of references of the item, if it is a container.
        """
        assert self.outer is not None
        outer = self.outer.of_item(position, item)
        vars(outer)["target"] = self.outer.target
        cut = object.__new__(Cut)
        changed = {"outer": outer, "owner_id": id(item), "removed_id": id(part)}
        vars(cut).update(vars(self) | changed | {"position": place, "size": size})
        return cut

    @property
    def statement(self) -> str:
        """The statement that removes it, and the owner's other references to the same object."""
        return in_sequence([cut._statement_of_one() for cut in self.each()])

    @property
    def statement_if_there(self) -> str:
        """The statement that removes a key or attribute of an owner if it has one; empty if there
        is none.
        """
        name = self.target.removeprefix(self.owner)
        if self.repeated or self.ending or self.copied_by or name == self.target:
            return ""
        if self.kind is Kind.KEY and self.listing is Listing.PLAIN:
            return f"{self.owner}.pop({name[1:-1]}, None)"
        if self.kind in (Kind.ATTRIBUTE, Kind.DELETED_ATTRIBUTE):
            return f'vars({self.owner}).pop("{name[1:]}", None)'
        return ""

    def each(self) -> list[Cut]:
        """Return the reference, and the owner's other references to the same object."""
        if not self.repeated:
            return [self]
        more = list[Cut]()
        for other in self.repeated:
            more.append(
                replace(
                    other,
                    outer=self.outer,
                    is_detached=self.is_detached,
                    copied_by=self.copied_by,
                    removed_id=self.removed_id,
                )
            )
        return [replace(self, repeated=()), *more]

    def _statement_of_one(self) -> str:
        """Return the statement that removes this reference alone, without its repetitions."""
        if self.columns:
            return _without_columns(self.owner, self.columns)
        if self.protocol is not None:
            return self.protocol.statement(self, [self.position])
        if self.is_detached or self.copied_by:
            return self._statement_with_copy()
        imports, code = split(self.target)
        if self.kind is Kind.CLOSED:
            return self.all_of if self.size == 1 else f"{imports}{code}.{self.ending}"
        if self.ending:
            imports += f"{code}.{self.ending}; "
        match self.kind:
            case Kind.ATTRIBUTE | Kind.SLOT:
                return f"{imports}{code} = None"
            case Kind.ITEM if self.is_replaced:
                return f"{imports}{code} = None"
            case Kind.ELEMENT:
                return f"{imports}{split(self.owner)[1]}.remove({code})"
            case Kind.CALL:
                return f"{imports}{code}"
            case _:
                return f"{imports}del {code}"

    def _statement_with_copy(self) -> str:
        """Return the statement that puts a copy in the place of the object."""
        imports, code = split(self.target)
        if self.is_detached:
            return f"{imports}{code} = {code}.detach()"
        import_of_function, function = split(self.copied_by)
        return f"{imports}{import_of_function}{code} = {function}({code})"


def condition_of(item: object, items: Sequence[object], variable: str) -> str:
    """Return the expression that is true for one of several objects in a registry.

    A position would be that of another object once a line has removed an earlier one.

    Args:
        item: the object.
        items: all objects in the registry.
        variable: the name of a loop's variable that refers to each of them.
    """
    name = type_name(item)
    if [type_name(other) for other in items].count(name) == 1:
        return f'type({variable}).__name__ == "{name}"'
    return f"id({variable}) == {id(item)}"


def with_repeated(cuts: Sequence[Cut]) -> Cut | None:
    """Return the first of an owner's references to one object, which has the remaining ones; None
    if there are none.
    """
    if not cuts:
        return None
    return replace(cuts[0], repeated=tuple(cuts[1:]))


def _without_columns(owner: str, labels: Sequence[str]) -> str:
    """Return the statement that drops columns of a data frame."""
    imports, code = split(owner)
    return f"{imports}del {', '.join(f'{code}[{label}]' for label in labels)}"


def split(code: str) -> tuple[str, str]:
    """Return the imports that code begins with, and the rest: ``import m; `` and ``m.x``."""
    # A key may have a semicolon, too: ``outer["a; b"]``.
    imports = _IMPORTS.match(code).group()  # type: ignore[union-attr]  # it matches any text
    return imports, code[len(imports) :]


def without_import(code: str) -> str:
    """Return an expression for ``import m; m.x``, because no loop can follow an import."""
    match = _IMPORT.match(code)
    if match is None:
        return code
    module, alias = match.groups()
    first, _, inner = module.partition(".")
    expression = code[match.end() :]
    if alias is None:
        return f'__import__("{module}"){expression.removeprefix(first)}'
    path = f".{inner}" if inner else ""
    return f'__import__("{module}"){path}{expression.removeprefix(alias)}'


def in_sequence(statements: Sequence[str]) -> str:
    """Return statements as one line, with each import once."""
    imported = set[str]()
    parts = list[str]()
    for statement in filter(None, statements):
        imports, code = split(statement)
        parts.append(code if imports in imported else statement)
        imported.add(imports)
    # ``var.set(None);`` ends with a semicolon, so that IPython keeps no output.
    inner = [statement.removesuffix(";") for statement in parts[:-1]]
    return "; ".join([*inner, *parts[-1:]])


def statement_of(cuts: Sequence[Cut], *, most_owners: int = _MOST_KEYS) -> str:
    """Return one statement that removes all of some references; empty if there is none.

    Args:
        cuts: the references.
        most_owners: maximum number of objects that refer, one statement for each.
    """
    if not cuts:
        return ""
    of_owner = dict[int, list[Cut]]()
    for cut in outermost(cuts):
        of_owner.setdefault(cut.owner_id, []).append(cut)
    groups = list(of_owner.values())
    loop = _in_each(groups)
    if loop:
        return loop
    if len(groups) > most_owners:
        return ""
    is_alone = len(groups) == 1
    statements = [
        _statement_for_one_owner(group, is_alone=is_alone) for group in _inner_first(groups)
    ]
    return in_sequence(statements) if all(statements) else ""


def outermost(cuts: Sequence[Cut]) -> list[Cut]:
    """Return the references, each once, without those of objects that another one removes."""
    unique = dict[Cut, None]()
    for cut in cuts:
        for reference in cut.each():
            unique[reference] = None
    outermost = list[Cut]()
    # By the identity of each outer reference, which a million items of a list may share.
    are_removed = dict[int, bool]()
    for cut in unique:
        outer = cut.outer
        if id(outer) not in are_removed:
            are_removed[id(outer)] = _is_any_among(outer, unique)
        if not are_removed[id(outer)]:
            outermost.append(cut)
    return outermost


def _is_any_among(outer: Cut | None, cuts: Mapping[Cut, None]) -> bool:
    """Return True if a reference, or one further out, is among some references."""
    while outer is not None:
        if not cuts.keys().isdisjoint(outer.each()):
            return True
        outer = outer.outer
    return False


def _inner_first(groups: list[list[Cut]]) -> list[list[Cut]]:
    """Return the groups in an order in which each statement still works after the earlier ones:
    later positions first, variables last.
    """
    last_first = sorted(groups, key=lambda group: _positions(group[0]), reverse=True)

    def names_it_deletes(group: list[Cut]) -> int:
        """Return the number of groups whose code begins with an object that a group removes."""
        return sum(_is_below(other, group) for other in groups if other is not group)

    return sorted(
        last_first, key=lambda group: (group[0].kind is Kind.NAME, names_it_deletes(group))
    )


def _is_below(group: list[Cut], outer: list[Cut]) -> bool:
    """Return True if a statement for ``outer`` would break the code of ``group``: it removes the
    object at which that code begins, or moves an item that it names by position.
    """
    owners = {cut.owner for cut in group}  # often one for thousands of references
    for prefix in {cut.target for cut in outer}:
        for owner in owners:
            after = owner.removeprefix(prefix)
            if prefix and after != owner and after[:1] in ("", ".", "["):
                return True
    lists = {f"{cut.owner}[" for cut in outer if cut.kind in WITH_POSITIONS}
    return any(owner.startswith(tuple(lists)) for owner in owners)


def _positions(cut: Cut) -> tuple[int, ...]:
    """Return the positions on the way to a reference, the outermost first."""
    before = () if cut.outer is None else _positions(cut.outer)
    return (*before, cut.position)


def _statement_for_one_owner(cuts: list[Cut], *, is_alone: bool) -> str:
    """Return the statement that removes some references of one object; empty if there is none.

    It is a loop only if it stands alone: no loop can follow another statement in a line.
    """
    first = cuts[0]
    if first.protocol is not None:  # such as ``queue.get()``
        if first.protocol.is_compound and not is_alone:
            return ""
        positions = sorted({cut.position for cut in cuts})
        return first.protocol.statement(first, positions)
    # The only element of a set has no name: ``items.clear()``.
    is_only_element = first.kind is Kind.ELEMENT and first.size == 1
    if len(cuts) == 1 and not is_only_element:
        return first.statement
    if len(cuts) == first.size and first.all_of:  # such as ``plt.close("all")``
        return first.all_of
    if first.kind is Kind.COLUMN:
        return _of_columns(cuts)
    if any(cut.copied_by for cut in cuts):
        return _one_by_one(cuts) if len(cuts) <= _MOST_KEYS else ""
    if all(_is_alike(cut, first) for cut in cuts):
        statement = _of_alike(cuts, is_alone=is_alone)
        if statement:
            return statement
    if len(cuts) <= _MOST_KEYS or first.kind in (Kind.CALL, Kind.CLOSED):
        return _one_by_one(cuts)
    return ""


def _of_alike(cuts: list[Cut], *, is_alone: bool) -> str:
    """Return the statement that removes some alike references of one object at once, such as
    ``rows.clear()``, ``del rows[3:7]``, or a loop; empty if there is none.
    """
    first = cuts[0]
    if first.is_detached:
        is_short = first.kind is not Kind.KEY or len(cuts) <= _MOST_KEYS
        return "" if is_short else _of_detached(cuts)
    if first.kind is Kind.CALL and is_alone and len(cuts) > _MOST_CALLS:
        return _loop_of_calls(cuts)
    if first.kind not in _ORDERED:
        return ""
    # A reference may occur twice: as the only one, and as one of many, which has no code.
    positions = sorted({cut.position for cut in cuts})
    return _of_positions(first, positions, is_alone=is_alone)


def _one_by_one(cuts: Sequence[Cut]) -> str:
    """Return the statements that remove some references of one object, the last one first."""
    last_first = sorted(cuts, key=lambda cut: cut.position, reverse=True)
    return in_sequence(list(dict.fromkeys(cut.statement for cut in last_first)))


def _loop_of_calls(cuts: Sequence[Cut]) -> str:
    """Return the loop for calls with a number each, such as ``plt.close(3)``; empty if there is
    none.
    """
    numbers = set[int]()
    calls = set[tuple[str, str]]()
    for cut in cuts:
        imports, code = split(cut.target)
        call = _CALL_WITH_NUMBER.fullmatch(code)
        if call is None:
            return ""
        calls.add((imports, call[1]))
        numbers.add(int(call[2]))
    if len(calls) != 1:
        return ""
    imports, function = calls.pop()
    first, last = min(numbers), max(numbers)
    values = _tuple_of(sorted(numbers))
    if len(numbers) == last - first + 1:
        values = f"range({first}, {last + 1})"
    if imports:  # no block can follow an import
        return f"{imports}[{function}(number) for number in {values}]"
    return f"for number in {values}: {function}(number)"


def _of_columns(cuts: Sequence[Cut]) -> str:
    """Return the statement that removes some columns of a frame, or the frame if these are all."""
    first = cuts[0]
    labels = list(dict.fromkeys(label for cut in cuts for label in cut.columns))
    is_name = first.outer is None or first.outer.kind is Kind.NAME
    if len(labels) == first.size and first.outer is not None and not is_name:
        return first.outer.statement
    return _without_columns(first.owner, labels)


def _is_alike(cut: Cut, other: Cut) -> bool:
    kinds = [(each.kind, each.ending, each.is_detached, each.is_replaced) for each in (cut, other)]
    return kinds[0] == kinds[1]


def _of_detached(cuts: Sequence[Cut]) -> str:
    """Return the statement that replaces neighbouring values of a dict by tensors without graphs;
    empty if there are other values between them.
    """
    first = cuts[0]
    positions = sorted(cut.position for cut in cuts)
    start, end = positions[0], positions[-1] + 1
    if end - start != len(positions):
        return ""
    imports, owner = split(first.owner)
    keys = first.listing.keys_of(owner)
    if len(positions) < first.size:
        keys += f"[{start}:{end}]"
    return f"{imports}{owner}.update({{key: {owner}[key].detach() for key in {keys}}})"


def _of_positions(first: Cut, positions: list[int], *, is_alone: bool) -> str:
    """Return the statement that removes the references of a container at some positions."""
    if first.is_replaced:
        return _of_replaced(first, positions, is_alone=is_alone)
    imports, owner = split(first.owner)
    start, end = positions[0], positions[-1] + 1
    is_span = end - start == len(positions)
    if len(positions) == first.size:
        if first.ending:
            return _ending_all(first, is_alone=is_alone)
        return f"{imports}{owner}.clear()"
    if is_span:
        return _of_span(first, start, end, is_alone=is_alone)
    may_list = _MOST_KEYS < len(positions) <= _MOST_POSITIONS
    if first.kind is Kind.ITEM and may_list and not first.ending:
        listed = ", ".join(map(str, reversed(positions)))
        in_loop = without_import(first.owner)
        if is_alone:
            return f"for _position in {listed}: del {in_loop}[_position], _position"
        return f"[{in_loop}.__delitem__(position) for position in ({listed})];"
    spans = _spans(positions)
    if len(spans) > _MOST_KEYS or len(positions) <= _MOST_KEYS:
        return ""
    if first.kind is Kind.ELEMENT:
        return _of_elements(first, spans)
    last_first = [_of_span(first, *span, is_alone=False) for span in reversed(spans)]
    return in_sequence(last_first) if all(last_first) else ""


def _of_replaced(first: Cut, positions: list[int], *, is_alone: bool) -> str:
    """Return the statement that sets the items of a list at some positions to None; empty if they
    are too many or too few for it.
    """
    imports, owner = split(first.owner)
    spans = _spans(positions)
    if len(positions) == first.size:
        return f"{imports}{owner}[:] = [None] * len({owner})"
    if len(spans) > 1 and len(positions) <= _MOST_KEYS:
        return ""
    if len(spans) <= _MOST_KEYS:
        statements = list[str]()
        for start, end in spans:
            place = f"[{start}:{end}] = [None] * {end - start}"
            if end - start == 1:
                place = f"[{start}] = None"
            statements.append(f"{owner}{place}")
        return imports + in_sequence(statements)
    if len(positions) > _MOST_POSITIONS:
        return ""
    listed = ", ".join(map(str, positions))
    in_loop = without_import(first.owner)
    if is_alone:
        return f"for _position in {listed}: {in_loop}[_position] = None; del _position"
    return f"[{in_loop}.__setitem__(position, None) for position in ({listed})];"


def _spans(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Return the start and end of each run of neighbouring positions.

    >>> _spans([1, 2, 3, 7, 8])
    [(1, 4), (7, 9)]
    """
    spans = list[tuple[int, int]]()
    for position in positions:
        if spans and spans[-1][1] == position:
            spans[-1] = (spans[-1][0], position + 1)
        else:
            spans.append((position, position + 1))
    return spans


def _ending_all(cut: Cut, *, is_alone: bool) -> str:
    """Return the loop that ends and removes all objects of a container."""
    owner = without_import(cut.owner)
    removal = f"{owner}.popitem()[1]" if cut.kind is Kind.KEY else f"{owner}.pop()"
    if is_alone:
        return f"while {owner}: {removal}.{cut.ending}"
    return f"[{removal}.{cut.ending} for _ in range(len({owner}))];"


def _of_span(cut: Cut, start: int, end: int, *, is_alone: bool) -> str:
    """Return the statement that removes neighbouring items of a container."""
    imports, owner = split(cut.owner)
    span = f"[{start}:]" if end == cut.size else f"[{start}:{end}]"
    in_loop = without_import(cut.owner)
    match cut.kind:
        case Kind.ITEM:
            if cut.ending:
                loop = f"for _position in range({end - 1}, {start - 1}, -1)"
                removal = f"{in_loop}.pop(_position).{cut.ending}"
                if is_alone:
                    return f"{loop}: {removal}; del _position"
                return f"[{removal} {loop}];"
            if not cut.has_slices:
                loop = f"for _position in range({end - 1}, {start - 1}, -1)"
                if is_alone:
                    return f"{loop}: del {in_loop}[_position], _position"
                return f"[{in_loop}.__delitem__(_position) {loop}];"
            return f"{imports}del {owner}{span}"
        case Kind.KEY:
            loop = f"for _key in {cut.listing.keys_of(in_loop)}{span}"
            removal = f"{in_loop}.pop(_key)"
            if cut.ending:
                removal += f".{cut.ending}"
            elif is_alone:
                return f"{loop}: del {in_loop}[_key], _key"
            return f"{loop}: {removal}; del _key" if is_alone else f"[{removal} {loop}];"
        case _:
            return _of_elements(cut, [(start, end)])


def _of_elements(cut: Cut, spans: Sequence[tuple[int, int]]) -> str:
    """Return the statement that removes some runs of elements of a set; empty if there is none.

    It is one call, because the first of several would give the other elements new positions.
    """
    if cut.ending:
        return ""
    imports, owner = split(cut.owner)
    runs = list[str]()
    for start, end in spans:
        runs.append(f"list({owner})" + (f"[{start}:]" if end == cut.size else f"[{start}:{end}]"))
    return f"{imports}{owner}.difference_update({', '.join(runs)})"


def _in_each(groups: list[list[Cut]]) -> str:
    """Return the loop that removes the same reference of neighbouring items of a list.

    It is empty if the references differ. An example is a list of results, each of which holds an
    array: ``for _item in runs: del _item["data"]; del _item``.
    """
    outer = _outer_of_each(groups)
    if len(outer) < 2:
        return ""
    first = outer[0]
    if first.kind is not Kind.ITEM or any(cut.owner_id != first.owner_id for cut in outer):
        return ""
    statements = _statements_of_items(groups, outer)
    positions = sorted(cut.position for cut in outer)
    start, end = positions[0], positions[-1] + 1
    if len(statements) == 1 and end - start != len(groups):
        statements = _statements_if_there(groups, outer[0])
        start, end = 0, first.size
    if len(statements) != 1 or not all(statements):
        return ""
    span = f"[{start}:]" if end == first.size else f"[{start}:{end}]"
    if (start, end) == (0, first.size):
        span = ""
    items = without_import(first.owner)
    if span and not first.has_slices:
        items = f"list({items})"
    # The loop takes none of the user's names, and leaves none that keeps the last item.
    body = in_sequence([*statements, f"del {EACH}"])
    return f"for {EACH} in {items}{span}: {body}"


def _statements_of_items(groups: list[list[Cut]], outer: Sequence[Cut]) -> set[str]:
    """Return the statements that remove each group's references in a loop, where all may be alike.

    Args:
        groups: the references of each item.
        outer: the reference to each item.
    """
    statements = set[str]()
    written = set[tuple[object, ...]]()
    for group, around in zip(groups, outer, strict=True):
        code = tuple((cut.target, cut.ending, cut.position, cut.size) for cut in group)
        if (around.target, code) not in written:  # else it has the code of another item
            written.add((around.target, code))
            inner = [inside(cut, around) for cut in group]
            statements.add(_of_one_item(inner))
    return statements


def _statements_if_there(groups: list[list[Cut]], outer: Cut) -> set[str]:
    """Return the statement that removes references from the items that have them, if no other item
    has one there: ``for _item in docs: _item.pop("tokens", None)``.

    Args:
        groups: the references of each item.
        outer: the reference to the item of the first group.
    """
    if not all(cut.is_only_there for group in groups for cut in group):
        return set()
    statements = [inside(cut, outer).statement_if_there for cut in groups[0]]
    return {in_sequence(statements)} if all(statements) else set()


def _of_one_item(cuts: list[Cut]) -> str:
    """Return the statement that removes some references of a loop's item: by their keys, because
    the keys of other items may have other positions.
    """
    if len(cuts) <= _MOST_KEYS and all(cut.kind is Kind.KEY for cut in cuts):
        return in_sequence([cut.statement for cut in cuts])
    return _statement_for_one_owner(cuts, is_alone=False)


def _outer_of_each(groups: list[list[Cut]]) -> list[Cut]:
    """Return the reference to the owner of each group; nothing if some have none."""
    outer = list[Cut]()
    for group in groups:
        around = group[0].outer
        if around is None or any(cut.outer != around for cut in group):
            return []
        outer.append(around)
    return outer


def inside(cut: Cut, outer: Cut) -> Cut:
    """Return a reference of an item that a loop calls ``_item``; as it is if its code differs."""
    prefix = outer.target
    if not prefix or not cut.owner.startswith(prefix) or not cut.target.startswith(prefix):
        return cut
    owner = f"{EACH}{cut.owner[len(prefix) :]}"
    return replace(cut, owner=owner, target=f"{EACH}{cut.target[len(prefix) :]}")
