"""Cuts: references that a user can remove, each with the statement that removes it, such as
``del runs[3]``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum

from ipygpumem.introspect import type_name

_IMPORT = re.compile(r"import ([\w.]+)(?: as (\w+))?; ")
_IMPORTS = re.compile(r"(?:import [\w.]+(?: as \w+)?; )*")


class Kind(Enum):
    """The kind of a reference, which decides how a line removes it: ``del`` for an item, ``=
    None`` for an attribute.
    """

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


class DictListing(Enum):
    """The code that lists the keys and values of a dict in the order of its own entries."""

    PLAIN = "list(items)"
    OF_DICT = "list(dict.keys(items))"
    """For a subclass that lists its keys in another order."""

    def keys_of(self, code: str) -> str:
        """Return the expression for the list of a dict's keys."""
        if self is DictListing.PLAIN:
            return f"list({code})"
        return f"list(dict.keys({code}))"

    def values_of(self, code: str) -> str:
        """Return the expression for the list of a dict's values."""
        if self is DictListing.PLAIN:
            return f"list({code}.values())"
        return f"list(dict.values({code}))"


WITH_POSITIONS = {Kind.ITEM, Kind.QUEUED}
"""References that code names by a position, which changes if an earlier one is removed."""


@dataclass(frozen=True)
class Protocol:
    """The calls by which an owner of a container removes items, which nothing else may remove.

    An example is a ``queue.Queue``, which counts its items: ``del q.queue[1]`` would break it.
    Each statement is a template: ``{0}`` is the code of the owner, ``q``, and ``{items}`` that of
    the container, ``q.queue``.

    Attributes:
        removing_all: the statement that removes all items; empty if there is none. In it,
            ``{ending}`` is the call of a method of each item.
        removing_some: the statement that removes some items; empty if there is none. In it,
            ``{deleting}`` deletes the ``{number}`` items at ``{positions}``, which have ``{keys}``.
        is_compound: True if a statement begins a block, so that none can stand in front of it.
        words: the advice if there is no statement.
        container: the code of the container; empty in the constants, which are for any container.
        keys: for each position, the number by which the owner knows the item.
    """

    removing_all: str = ""
    removing_some: str = ""
    is_compound: bool = False
    words: str = ""
    container: str = ""
    keys: tuple[object, ...] = ()

    def of_container(self, code: str) -> Protocol:
        """Return the same calls for the container with the given code."""
        return replace(self, container=code)

    def with_keys(self, keys: Sequence[object]) -> Protocol:
        """Return the same calls for a container whose items have the given keys."""
        return replace(self, keys=tuple(keys))

    def statement(self, cut: Cut, positions: Sequence[int]) -> str:
        """Return the statement that removes the items at the positions; empty if there is none.

        Args:
            cut: the reference to one of the items.
            positions: the positions in ascending order.
        """
        imports, owner = split(cut.owner)
        items = split(self.container)[1]
        if self.is_compound:  # ``with q.mutex: ...``, which cannot follow an import
            imports, owner, items = "", without_import(cut.owner), without_import(self.container)
        if len(positions) == cut.size:
            if cut.ending and "{ending}" not in self.removing_all:
                return ""  # it would not end the items
            ending = f".{cut.ending}" if cut.ending else ""
            statement = self.removing_all.format(owner, items=items, ending=ending)
        else:
            if cut.ending and "{deleting}" not in self.removing_some:
                return ""
            statement = self.removing_some.format(
                owner,
                items=items,
                deleting=_deleting(items, positions, cut.ending),
                number=len(positions),
                positions=tuple_of(positions),
                keys=tuple_of([self.keys[position] for position in positions]) if self.keys else "",
            )
        return statement and imports + statement


def _deleting(items: str, positions: Sequence[int], ending: str) -> str:
    """Return the statement that deletes the items at the positions, the last one first.

    Args:
        items: the code of the container.
        positions: the positions in ascending order.
        ending: the call that ends each item first; empty if there is none.
    """
    if len(positions) > 1:
        removal = f"{items}.__delitem__(place)"
        if ending:
            removal = f"({items}[place].{ending}, {removal})"
        return f"[{removal} for place in {tuple_of(positions[::-1])}]"
    item = f"{items}[{positions[0]}]"
    return f"{item}.{ending}; del {item}" if ending else f"del {item}"


def tuple_of(values: Sequence[object]) -> str:
    """Return the code of a tuple of numbers: ``(3,)`` or ``(3, 4)``."""
    return f"({values[0]},)" if len(values) == 1 else f"({', '.join(map(str, values))})"


@dataclass(frozen=True)
class Cut:
    """A reference that a user can remove.

    That of ``runs[3]["x"]`` to an array has the dict as its owner, with the code ``runs[3]``; its
    target is ``runs[3]["x"]``, and its outer reference is that of the list to the dict.

    Most cuts only have the first four attributes, the reference itself. The further ones are in
    groups:

    - ``position`` to ``protocol`` tell where it is among the references of a container, so that one
      statement can remove several.
    - ``outer`` and ``repeated`` are further references, on the way to it and of the same owner.
    - ``ending`` to ``is_replaced`` tell if the line does anything else than deleting it.
    - The last three are identities and findings for the search, which the line does not show.

    Attributes:
        kind: its kind.
        owner_id: identity of the owner, the object that refers.
        owner: code of the owner; empty for a variable.
        target: code of the object to which the owner refers, or the call that removes the
            reference.
        position: position among the references of a container.
        size: number of references of the container; 0 if the owner is no container.
        columns: the code of the label of each column.
        listing: how code lists the keys of a dict by their positions.
        has_slices: False for a deque, whose items are deleted one at a time.
        removal_of_all: the statement that removes all references of a registry; empty if there is
            none.
        protocol: the calls by which the owner of a container removes items, if nothing else may.
        outer: the reference to the owner itself, if that is an item of a container.
        repeated: the owner's further references to the same object, such as those of its other
            attributes: the object dies only without all of them.
        ending: the call of a method that ends the object first, such as ``cancel()`` of a task.
        is_detached: True if the line replaces a tensor by one without its graph instead of removing
            it.
        copied_by: the code of a function whose copy of the object takes its place, such as
            ``sklearn.base.clone``; empty if the reference is removed.
        is_replaced: True for an item of a list that is as long as it was before: it has the
            position of an older item, and later ones would move up if it were deleted.
        also_removed: further references that a call removes, as the identities of both objects.
        removed_id: identity of the object to which the reference leads; 0 if it is unknown, or if
            a call ends the owner, which then refers to nothing.
        is_only_there: True if all other items of the list around the owner have no such reference.
    """

    kind: Kind
    owner_id: int
    owner: str
    target: str
    position: int = 0
    size: int = 0
    _: KW_ONLY
    columns: tuple[str, ...] = ()
    listing: DictListing = DictListing.PLAIN
    has_slices: bool = True
    removal_of_all: str = ""
    protocol: Protocol | None = None
    outer: Cut | None = None
    repeated: tuple[Cut, ...] = ()
    ending: str = ""
    is_detached: bool = False
    copied_by: str = ""
    is_replaced: bool = field(default=False, compare=False)
    also_removed: frozenset[tuple[int, int]] = field(default=frozenset(), compare=False)
    removed_id: int = field(default=0, compare=False)
    is_only_there: bool = field(default=False, compare=False)

    def __hash__(self) -> int:
        """Return a hash of few attributes: a set of a million references takes half the time."""
        return hash((self.owner_id, self.position, self.target))

    @classmethod
    def of_root(cls, kind: Kind, target: str, owner_id: int = 0) -> Cut:
        """Return the reference of a root to its object, for which no code names an owner.

        Args:
            kind: the kind of the reference.
            target: the code of the object, such as the name of a variable, or the call that removes
                the reference.
            owner_id: identity of the owner; 0 if no search has to recognise it.
        """
        return cls(kind, owner_id, "", target)

    def of_item(self, position: int, item: object, target: str = "") -> Cut:
        """Return the reference to another item of the same container.

        ``replace`` takes ten times as long: a second for 200,000 items.

        Args:
            position: the position of the item in the container.
            item: the item.
            target: the code of the item; empty if it is not needed.
        """
        # A frozen dataclass refuses to set attributes: its copy gets them by its dict, unchecked.
        cut = object.__new__(Cut)
        attributes = vars(self) | {"position": position, "target": target, "removed_id": id(item)}
        vars(cut).update(attributes)
        return cut

    def of_same_field(
        self, position: int, item: object, part: object, position_in_item: int, size: int
    ) -> Cut:
        """Return the same reference of another item of a list: if this is that of
        ``runs[0]["model"]`` to a model, that of ``runs[7]["model"]`` to another one.

        It keeps the code of this one, ``runs[0]["model"]``: a loop over the list removes all of
        these references, ``for _item in runs: del _item["model"]``.

        Args:
            position: the position of the item in the list.
            item: the item, which has the same reference.
            part: the object to which it refers.
            position_in_item: the position of the reference in the item.
            size: the number of references of the item, if it is a container.
        """
        assert self.outer is not None
        outer = self.outer.of_item(position, item)
        vars(outer)["target"] = self.outer.target
        cut = object.__new__(Cut)
        changed = {"outer": outer, "owner_id": id(item), "removed_id": id(part)}
        vars(cut).update(vars(self) | changed | {"position": position_in_item, "size": size})
        return cut

    @property
    def statement(self) -> str:
        """The statement that removes it, and the owner's other references to the same object."""
        if self.copied_by:
            return statement_with_copy(self.single_references())
        return in_sequence([cut._statement_of_one() for cut in self.single_references()])

    @property
    def statement_if_there(self) -> str:
        """The statement that removes a key or attribute if the owner has it,
        ``_item.pop("tokens", None)``; empty if there is no such statement.
        """
        name = self.target.removeprefix(self.owner)  # ``["tokens"]``, or ``.tokens``
        does_more_than_delete = self.repeated or self.ending or self.copied_by
        if does_more_than_delete or name == self.target:
            return ""
        if self.kind is Kind.KEY and self.listing is DictListing.PLAIN:
            return f"{self.owner}.pop({name[1:-1]}, None)"
        if self.kind in (Kind.ATTRIBUTE, Kind.DELETED_ATTRIBUTE):
            return f'vars({self.owner}).pop("{name[1:]}", None)'
        return ""

    def single_references(self) -> list[Cut]:
        """Return the reference, and the owner's further references to the same object, as cuts
        without ``repeated``: those of ``run.model`` and ``run.best``.
        """
        if not self.repeated:
            return [self]
        further_references = list[Cut]()
        for other in self.repeated:
            further_references.append(
                replace(
                    other,
                    outer=self.outer,
                    is_detached=self.is_detached,
                    copied_by=self.copied_by,
                    removed_id=self.removed_id,
                )
            )
        return [replace(self, repeated=()), *further_references]

    def _statement_of_one(self) -> str:
        """Return the statement that removes this reference alone, without its repetitions."""
        if self.columns:
            return without_columns(self.owner, self.columns)
        if self.protocol is not None:
            return self.protocol.statement(self, [self.position])
        imports, code = split(self.target)
        if self.is_detached:
            return f"{imports}{code} = {code}.detach()"
        if self.kind is Kind.CLOSED:  # a widget: ``Widget.close_all()`` needs no identifier
            return self.removal_of_all if self.size == 1 else f"{imports}{code}.{self.ending}"
        before = imports
        if self.ending:  # task.cancel(); del task
            before += f"{code}.{self.ending}; "
        match self.kind:
            case Kind.ATTRIBUTE | Kind.SLOT:
                return f"{before}{code} = None"
            case Kind.ITEM if self.is_replaced:
                return f"{before}{code} = None"
            case Kind.ELEMENT:
                return f"{before}{split(self.owner)[1]}.remove({code})"
            case Kind.CALL:
                return f"{before}{code}"
            case _:
                return f"{before}del {code}"


def statement_with_copy(cuts: Sequence[Cut]) -> str:
    """Return the statement that puts one copy of an object in all of its places.

    Args:
        cuts: the references to the object, which have the function that copies it.
    """
    imports = dict[str, None]()
    targets = list[str]()
    for cut in cuts:
        import_of_owner, target = split(cut.target)
        imports[import_of_owner] = None
        targets.append(target)
    import_of_function, function = split(cuts[0].copied_by)
    imports[import_of_function] = None
    assigned = " = ".join(targets)
    return f"{''.join(imports)}{assigned} = {function}({targets[0]})"


def condition_of(item: object, items: Sequence[object], variable: str) -> str:
    """Return the expression that is true for only one of the objects in a registry,
    ``type(item).__name__ == "Handler"``.

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


def as_one_cut(cuts: Sequence[Cut]) -> Cut | None:
    """Return all of an owner's references to one object as one cut: the first, with the remaining
    ones as its ``repeated``. None if there are none.
    """
    if not cuts:
        return None
    return replace(cuts[0], repeated=tuple(cuts[1:]))


def without_columns(owner: str, labels: Sequence[str]) -> str:
    """Return the statement that drops columns of a data frame."""
    imports, code = split(owner)
    return f"{imports}del {', '.join(f'{code}[{label}]' for label in labels)}"


def split(code: str) -> tuple[str, str]:
    """Return the imports with which code begins, and the code after them: ``import m; `` and
    ``m.x`` of ``import m; m.x``.
    """
    # Not at a semicolon, which a key may have, too: ``outer["a; b"]``.
    imports = _IMPORTS.match(code).group()  # type: ignore[union-attr]  # it matches any text
    return imports, code[len(imports) :]


def without_import(code: str) -> str:
    """Return code as one expression, ``__import__("m").x`` instead of ``import m; m.x``.

    A loop needs one, because ``import m; for ...`` is a syntax error.
    """
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
    """Return statements as one line, with each import once: ``import m; del m.x; del m.y``."""
    imported = set[str]()  # the texts of imports that earlier statements begin with
    parts = list[str]()
    for statement in filter(None, statements):
        imports, code = split(statement)
        parts.append(code if imports in imported else statement)
        imported.add(imports)
    # ``var.set(None);`` ends with a semicolon, so that IPython keeps no output.
    all_but_last = [statement.removesuffix(";") for statement in parts[:-1]]
    return "; ".join([*all_but_last, *parts[-1:]])
