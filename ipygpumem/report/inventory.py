"""Reports inventories: tensors and arrays, the names that hold the most, and what deleting a name
would free.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, islice, repeat
from operator import attrgetter, is_
from typing import NamedTuple

from ipygpumem.heap.parts import CACHED
from ipygpumem.heap.paths.remedies import Remedy
from ipygpumem.heap.paths.roots import NOTEBOOK
from ipygpumem.heap.sizes import Share
from ipygpumem.introspect import target_of
from ipygpumem.inventory.one_line import lines_for_all
from ipygpumem.inventory.ownership import HeldPart, Ownership
from ipygpumem.inventory.records import Inventory, InventoryDiff, TensorGroup, TensorRecord
from ipygpumem.inventory.top import SMALLEST, LargestNames, NamedSize
from ipygpumem.records import COMMENT, OUTSIDE, ReferencePath, RetainedArray
from ipygpumem.report import layout
from ipygpumem.report.layout import (
    IN_ONE_LINE,
    SEPARATOR,
    TO_FREE,
    Listing,
    Report,
    Table,
    accelerator,
    and_more,
    clean,
    clean_name,
    count,
    device_label,
    listed,
    number_text,
    row_of_more,
    sizes,
)
from ipygpumem.report.leaks import LAST_INDEX, leak_table
from ipygpumem.report.registration import shows
from ipygpumem.units import format_at_least, format_bytes, format_change

_NOTES_SHOWN = 10
"""Maximum number of the largest tensors whose notes are shown."""
_MOST_GROUPED = 10_000
"""Maximum number of the largest tensors that are compared with each other."""
_PARTS_SHOWN = 3
_HOLDERS_SHOWN = 10
_LEAST_SHARE = 0.01
"""Parts and holders with a smaller share of the object are not shown."""
_LEAST_FREE_SHARE = 0.05
"""Smallest share of RAM at which free heap pages are mentioned: a few MiB are always free."""

_SHARING_SHOWN = 2
"""Maximum number of holders to name that share parts of an object."""
_NEARLY_ALL = 0.99
"""Minimum share of an object's memory that a holder keeps as a whole."""

# -- tensors and arrays --------------------------------------------------------------------------


@shows(Inventory)
def tensors_report(
    inventory: Inventory, *, top: int = 20, holders: Mapping[tuple[str, int], str] | None = None
) -> Report:
    """Return the ``top`` largest tensors, and the sum of the rest.

    ``holders`` has the holders of tensors without a name, by library and storage.
    """
    return _inventory_report(
        inventory, _table_of_tensors("", inventory.tensors, top, holders or {})
    )


def groups_report(
    inventory: Inventory, by: str, groups: Sequence[TensorGroup], *, top: int
) -> Report:
    """Return the ``top`` largest groups of tensors, and the sum of the rest."""
    rows = [_group_row(group, by) for group in groups[:top]]
    remaining = groups[top:]
    if remaining:
        number = sum(group.tensors for group in remaining)
        size = sum(group.size_bytes for group in remaining)
        sums = TensorGroup(and_more(len(remaining)), number, size)
        rows.append(_group_row(sums, by))
    return _inventory_report(inventory, Table.of(rows, {"tensors", "size"}))


def _group_row(group: TensorGroup, by: str) -> dict[str, str]:
    return {
        "size": format_bytes(group.size_bytes),
        "tensors": str(group.tensors),
        by: clean(group.label),
    }


def _inventory_report(inventory: Inventory, table: Table) -> Report:
    """Return a report of an inventory, with the notes on its largest tensors."""
    number = count(len(inventory.tensors), "storage")
    head = [f"tensors and arrays: {number}", *sizes(inventory.device_bytes)]
    lines = list(map(clean, inventory.notes))
    for row in inventory.tensors[:_NOTES_SHOWN]:
        if row.note:
            name = row.name or row.type_name
            lines.append(clean(f"{name}: {row.note}"))
    return Report("tensors", SEPARATOR.join(head), lines, [table], records=[inventory])


@shows(InventoryDiff)
def difference_report(difference: InventoryDiff, *, top: int = 20) -> Report:
    """Return the ``top`` largest tensors that were added, as many removed ones, and the sources of
    the inventories.
    """
    before = difference.before or "before"
    after = difference.after or "after"
    changes = sizes(difference.changed_bytes, format_change) or ["no change"]
    places = clean(f"from {before} to {after}")
    headline = SEPARATOR.join(["tensors and arrays", places, *changes])
    tables = changed_tables(difference, top)
    return Report("difference", headline, (), tables, records=[difference])


def changed_tables(difference: InventoryDiff, top: int) -> list[Table]:
    """Return a table of the ``top`` largest tensors that were added, and one of the
    removed ones.
    """
    tables = []
    for change, tensors in (("added", difference.added), ("removed", difference.removed)):
        title = f"{change}: {len(tensors):,}"
        tables.append(_table_of_tensors(title, tensors, top))
    return tables


def _table_of_tensors(
    title: str,
    tensors: Sequence[TensorRecord],
    top: int,
    holders: Mapping[tuple[str, int], str] | None = None,
) -> Table:
    """Return the table of the ``top`` largest rows, with one row for equal tensors without a
    name.
    """
    names = list(map(attrgetter("name"), tensors))  # in C: there may be a million
    are_nameless = list(map(is_, names, repeat(None)))
    nameless = list(islice(compress(tensors, are_nameless), _MOST_GROUPED))
    named = islice(compress(tensors, names), top)
    groups = [_EqualTensors([tensor], "") for tensor in named]
    groups += _groups_of_equal(nameless, holders or {})
    groups.sort(key=attrgetter("size_bytes"), reverse=True)
    rows = []
    number = len(tensors)
    size_bytes = sum(map(attrgetter("size_bytes"), tensors))
    for group in groups[:top]:
        rows.append(_tensor_row(group))
        number -= len(group.tensors)
        size_bytes -= group.size_bytes
    if number:
        rows.append(row_of_more(number, size_bytes, "name"))
    expendable = ("cell", "grad", "kind", "dtype", "type", "device")
    return Table.of(rows, {"cell", "size"}, title, expendable=expendable)


class _EqualTensors(NamedTuple):
    """Tensors that a table shows in one row: equal ones without a name, or one with a name."""

    tensors: list[TensorRecord]
    holder: str

    @property
    def size_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(tensor.size_bytes for tensor in self.tensors)


def _groups_of_equal(
    nameless: Sequence[TensorRecord], holders: Mapping[tuple[str, int], str]
) -> list[_EqualTensors]:
    """Return the rows of tensors without a name: those in one container together."""
    groups: dict[object, _EqualTensors] = {}
    for tensor in nameless:
        holder = holders.get((tensor.library, tensor.storage), "")
        container = LAST_INDEX.sub("[…]", holder) if holder else ""
        equal = (container, *tensor[_TYPE:_STORAGE], tensor.note)
        group = groups.get(equal)
        if group is None:
            groups[equal] = _EqualTensors([tensor], holder)
            continue
        if len(group.tensors) == 1:
            group = groups[equal] = _EqualTensors(group.tensors, container)
        group.tensors.append(tensor)
    return list(groups.values())


_TYPE = TensorRecord._fields.index("type_name")
_STORAGE = TensorRecord._fields.index("storage")
"""Equal tensors have the same fields from the first of these to the second."""


def _tensor_row(group: _EqualTensors) -> dict[str, str]:
    """Return the row of a tensor, or of equal ones without a name."""
    row = group.tensors[0]
    size = format_bytes(group.size_bytes)
    if row.note.startswith("could not"):  # be read
        size = "?"
    shape = ""
    if row.shape is not None:
        shape = layout.shape_label(row.shape)
    name = _tensor_name(row)
    if len(group.tensors) > 1:
        name = f"{len(group.tensors):,} × {name}"
    return {
        "size": size,
        "name": name,
        "type": clean(row.type_name),
        "shape": shape,
        "dtype": clean(row.dtype),
        "device": clean(row.device),
        "kind": row.kind,
        "grad": _gradient_label(row),
        "cell": number_text(row.cell),
        "held by": clean(group.holder),
    }


def _tensor_name(row: TensorRecord) -> str:
    """Return a tensor's name, the number of its other names, and whether it is shared."""
    name = row.name or "(no name)"
    if row.aliases:
        name += f" +{row.aliases}"
    if row.shared:
        return f"{clean(name)} shared"
    return clean(name)


def _gradient_label(row: TensorRecord) -> str:
    if row.in_graph:
        return "graph"
    if row.requires_grad:
        return "requires"
    return ""


# -- names --------------------------------------------------------------------------------------


_LIBRARIES = "libraries"
_ATTRIBUTES = re.compile(r"\w+(\.\w+)*")
"""A name with attributes."""
_COUNTED_ONCE = "memory of several names is counted once; %gpumem why NAME counts all of it"

_DELETES_ALL = "a row with several names: its line deletes all of them"


@shows(LargestNames)
def top_report(names: LargestNames, *, top: int = 20, small: Sequence[str] = ()) -> Report:
    """Return the ``top`` largest names, and the sum of the rest; ``small`` are names that the user
    asked for and that hold hardly any memory.
    """
    shares = _shares(names)
    rows = [_name_row(share, names.used_bytes) for share in shares[:top]]
    remaining = shares[top:]
    if remaining:
        size_bytes = sum(share.size_bytes for share in remaining)
        rows.append(row_of_more(len(remaining), size_bytes, "name"))
    rows += _rows_without_name(names)
    shown = list({share.row.name: share.row for share in shares[:top]}.values())
    lines = list(map(clean, names.notes))
    if any(row.held_by for row in shown):
        lines.append(_COUNTED_ONCE)
    if any(row.same for row in shown):
        lines.append(_DELETES_ALL)
    if small:
        lines.append(clean(f"{listed(small)}: less than {format_bytes(SMALLEST)}"))
    for row in shown:
        lines += [clean(f"{row.name}: {note}") for note in row.notes]
    numbers = {"cell", "size", "share", "del frees"}
    expendable = ("share", "cell", "type", "content")
    table = Table.of(rows, numbers, code={TO_FREE}, whole={TO_FREE}, expendable=expendable)
    deletions = [f"del {row.name}" for row in shown]
    return Report("top", _top_head(names), lines, [table], records=[names], advised=deletions)


def _top_head(names: LargestNames) -> list[str]:
    """Return the number of names, and the memory of each device that they hold."""
    head = [f"memory by name: {count(len(names.names), 'name')}"]
    for device in dict.fromkeys([*names.used_bytes, *names.device_bytes]):
        size = names.device_bytes.get(device, 0)
        if not layout.is_worth_a_row(device, size):
            continue
        text = f"{device_label(device)} {format_bytes(size)}"
        if device in names.used_bytes:
            text += f" of {format_bytes(names.used_bytes[device])}"
        head.append(text)
    return head


class _DeviceShare(NamedTuple):
    """The memory of a name on one device."""

    row: NamedSize
    device: str
    size_bytes: int


def _shares(names: LargestNames) -> list[_DeviceShare]:
    """Return the memory of each name on each device, the largest first; small parts of a name are
    left out.
    """
    shares = []
    for row in names.names:
        least = _LEAST_SHARE * row.size_bytes
        for device, size in row.device_bytes.items():
            if size >= least:
                shares.append(_DeviceShare(row, device, size))
    return sorted(shares, key=attrgetter("size_bytes"), reverse=True)


def _name_row(share: _DeviceShare, used_bytes: Mapping[str, int]) -> dict[str, str]:
    """Return the row of a name on one device, on which ``used_bytes`` are in use."""
    row = share.row
    device = share.device
    freed = ""
    if row.freed_bytes is not None:
        freed = format_at_least(row.freed_bytes.get(device, 0), is_at_least=row.is_at_least)
    names = [row.name, *row.same]
    return {
        "size": format_at_least(share.size_bytes, is_at_least=row.is_at_least),
        "share": _share_text(share.size_bytes, used_bytes.get(device, 0)),
        "del frees": freed,
        "name": clean(", ".join(names)),
        "device": accelerator(device),
        "type": clean(row.type_name),
        "content": content_of(row),
        "cell": number_text(row.cell),
        TO_FREE: _remedy_text(row),
    }


def _share_text(size: int, used: int) -> str:
    """Return a share of the memory in use; empty if it is unknown or rounds to nothing."""
    if not used:
        return ""
    share = f"{size / used:.0%}"
    return "" if share == "0%" else share


def _remedy_text(row: NamedSize) -> str:
    """Return the line that frees a name's memory, with the other names that refer to it in its
    comment.
    """
    if not row.held_by:
        return clean(row.remedy)
    words = f"also held by {listed(row.held_by, 3)}"
    if not row.remedy:
        return clean(words)
    remedy = Remedy(row.remedy)
    joint = COMMENT if remedy.is_code else "; "
    # A magic would take the comment as its argument.
    return clean(remedy.as_code + joint + words)


def _rows_without_name(names: LargestNames) -> list[dict[str, str]]:
    """Return a row for each device with memory in no name, and the command that shows it."""
    rows = []
    for device, size in names.unnamed_bytes.items():
        used = names.used_bytes.get(device, 0)
        if device in OUTSIDE or not used or size < _LEAST_SHARE * used:
            continue
        row = {
            "size": format_bytes(size),
            "share": f"{size / used:.0%}",
            "name": "(no name)",
            "device": accelerator(device),
            "content": "see %gpumem leaks",
        }
        if device == "cpu":
            row.update(_host_memory_without_name(names, size))
        rows.append(row)
    return rows


def _host_memory_without_name(names: LargestNames, size: int) -> dict[str, str]:
    """Return the cells on the RAM in no name: its free part, and the line that returns that."""
    free = min(size, names.free_heap_bytes)
    if free < _LEAST_FREE_SHARE * names.used_bytes["cpu"]:
        return {"content": "see %gpumem status"}
    return {
        "content": f"{format_bytes(free)} of free heap pages; see %gpumem status",
        TO_FREE: "%gpumem free",
    }


def content_of(row: NamedSize) -> str:
    """Return the largest parts of an object and their sizes, such as ``3 columns: text 120 MiB,
    number 8 MiB``.
    """
    large = _large_parts(row) or list(row.parts[:1])
    shown = large[:_PARTS_SHOWN]
    if not shown:
        return ""
    kind = _kind_of_parts(shown)
    texts = []
    for part in shown:
        text = part.name
        if kind == "items":
            text = f"{part.items:,} {part.name}"
            if part.name == CACHED:
                text = count(part.items, CACHED.removesuffix("s"))
        if kind != "items" or row.part_count > 1:
            text += f" {format_bytes(part.size_bytes)}"
        texts.append(clean_name(text))
    content = ", ".join(texts)
    if kind in ("columns", "variables", "keys"):
        content = f"{_number_of_parts(row, kind)}: {content}"
    if len(large) > len(shown):
        content += ", …"
    return content


def _kind_of_parts(parts: Sequence[Share]) -> str:
    """Return the kind of the first part that is not an index; empty if there is none."""
    for part in parts:
        if part.kind != "index":
            return part.kind
    return ""


def _large_parts(row: NamedSize) -> list[Share]:
    """Return the parts of an object that have at least a hundredth of its memory."""
    least = _LEAST_SHARE * row.size_bytes
    return [part for part in row.parts if part.size_bytes >= least]


def _number_of_parts(row: NamedSize, kind: str) -> str:
    """Return ``3 columns``, or ``3 str`` for keys of one type."""
    type_names = {part.type_name for part in row.parts}
    if kind == "keys" and len(type_names) == 1:
        return f"{row.part_count} {type_names.pop()}"
    return count(row.part_count, kind[:-1])


def kind_of(row: NamedSize) -> str:
    """Return the type of an object and its largest parts, without figures: ``list of str``,
    ``DataFrame: text``.
    """
    names = []
    types: dict[str, None] = {}
    has_items = False
    for part in _large_parts(row):
        if part.kind == "index":
            continue
        names.append(part.name)
        if part.kind == "items":
            has_items = True
        if part.kind in ("items", "keys") and part.name != CACHED:
            types[part.type_name] = None
    separator = ": "
    if has_items or len(types) == 1:
        names = list(types)
        separator = " of "
    type_name = clean_name(row.type_name)
    if not names:
        return type_name
    shown = ", ".join(map(clean_name, names[:_PARTS_SHOWN]))
    return f"{type_name}{separator}{shown}"


# -- holders ------------------------------------------------------------------------------------


@shows(Ownership)
def why_report(ownership: Ownership) -> Report:
    """Return the report on a name or an expression."""
    least = _LEAST_SHARE * ownership.size_bytes
    # A holder with a small row may still keep nearly all of the object, as earlier rows do.
    least_shared = _NEARLY_ALL * sum(part.size_bytes for part in ownership.held)
    holders = []
    sharing = []
    for part in ownership.held:
        if part.size_bytes >= least or (part.is_shared and part.shared_bytes >= least_shared):
            holders.append(part)
        elif part.is_shared:
            sharing.append(part)
    if ownership.held and ownership.is_small:
        line = "it is too small to search for what else uses it"
        return Report("why", _head_of_why(ownership), [line], records=[ownership])
    rows = [_row_of_holder(part, least) for part in holders[:_HOLDERS_SHOWN]]
    table = Table.of(rows, {"still held"}, code={"freed by"}, whole={"freed by"})
    lines = _lines_of_holders(holders, sharing)
    code = lines_for_all(ownership)
    listings = []
    if len(code) == 1:
        lines.append(IN_ONE_LINE + clean(code[0]))
    elif code:
        listings.append(Listing("in one cell", code, code=True))
    lines += _lines_of_content(ownership)
    deletion = f"del {target_of(ownership.name)}"
    return Report(
        "why",
        _head_of_why(ownership),
        lines,
        [table],
        listings=listings,
        records=[ownership],
        advised=[deletion],
    )


def outputs_report(names: LargestNames, number: int) -> Report:
    """Return the report on IPython's ``Out``, which has a ``number`` of outputs.

    Deleting that name frees nothing, because IPython keeps them under other names, too.
    """
    report = top_report(names)
    memory = sizes(names.device_bytes) or ["less than 1 KiB"]
    head = ["Out", count(number, "output"), *memory, "del Out frees 0 B"]
    lines = [*report.lines, "to free all outputs: %reset -f out, then %gpumem free"]
    return Report("why", head, lines, report.tables, records=[names])


def of_ipython_report(name: str, type_name: str, made: str) -> Report:
    """Return the report on an object that IPython has made and keeps."""
    return Report("why", [clean_name(name), clean_name(type_name), made])


def _lines_of_holders(holders: Sequence[HeldPart], sharing: Sequence[HeldPart]) -> list[str]:
    """Return lines about holders without a row, and about those that share small parts."""
    lines = []
    more = len(holders) - _HOLDERS_SHOWN
    if more > 0:
        lines.append(f"and {count(more, 'more holder')}")
    if sharing:
        names = _beginnings([part.holder for part in sharing])
        verb = "shares" if len(names) == 1 and names != [_LIBRARIES] else "share"
        lines.append(f"{listed(names, _SHARING_SHOWN)} {verb} parts of it")
    return lines


def _beginnings(holders: Iterable[ReferencePath]) -> list[str]:
    """Return the names at which holders' paths begin, each once; libraries, about which a user can
    do nothing, as one.
    """
    names = dict[str, None]()
    has_libraries = False
    for holder in holders:
        if holder.path.startswith("module ") and not holder.advice:
            has_libraries = True
            continue
        name = holder.path.removeprefix(NOTEBOOK)
        chain = _ATTRIBUTES.match(name)
        if chain is not None and holder.path != name:  # of ``ax2.callback: bound method draw, ...``
            name = chain[0]
        names[clean(name)] = None
    return [*names, _LIBRARIES] if has_libraries else list(names)


def _lines_of_content(ownership: Ownership) -> list[str]:
    """Return lines about the object's parts, and about the limits of the figures."""
    lines = []
    parts = []
    least = _LEAST_SHARE * ownership.size_bytes
    for name, size in ownership.parts:
        if size >= least:
            parts.append(f"{clean_name(name)} {format_bytes(size)}")
    if parts:
        lines.append(f"consists of {', '.join(parts)}")
    lines += map(clean, ownership.notes)
    if not ownership.followed and ownership.type_name == "module":
        name = clean_name(ownership.name)
        lines.append(f"its content is not counted: %gpumem why {name}.NAME shows a part of it")
    elif not ownership.followed:
        lines.append("the content of a class, frame or part of IPython is not counted")
    if not ownership.complete:
        lines.append(
            "there are too many objects to follow all: figures are lower bounds, and any of it may "
            "have more holders"
        )
    return lines


def _head_of_why(ownership: Ownership) -> list[str]:
    """Return the headline: the object, its size, and the memory that ``del`` frees."""
    on_devices = sizes(ownership.device_bytes)
    if on_devices and (ownership.is_at_least or not ownership.complete):
        on_devices[0] = f"at least {on_devices[0]}"
    names = map(clean_name, (ownership.name, ownership.type_name))
    if not ownership.followed:
        return list(names)
    head = [*names, *(on_devices or [format_bytes(ownership.size_bytes)])]
    freed = sum(ownership.freed_bytes.values())
    if ownership.is_name and (freed or ownership.complete):
        target = clean_name(target_of(ownership.name))
        head.append(f"del {target} frees {_freed_text(ownership, freed)}")
    return head


def _row_of_holder(part: HeldPart, least: float) -> dict[str, str]:
    """Return the row of a holder, which says "shared" if it adds less than ``least`` bytes."""
    size = "shared"
    if part.size_bytes >= least:
        size = format_bytes(part.size_bytes)
    path = clean(part.holder.path)
    if part.objects > 1:
        path += f", and {count(part.objects - 1, 'more object')}"
    return {"still held": size, "by": path, "freed by": clean(part.holder.advice)}


def _freed_text(ownership: Ownership, freed: int) -> str:
    """Return the bytes that ``del`` frees; all of them only if each byte is known."""
    # If it frees no byte, a known holder keeps the object, with the memory that is not counted.
    has_known_holder = bool(ownership.held) and not ownership.is_small
    if ownership.is_at_least and (freed or not has_known_holder):
        return f"at least {format_bytes(freed)}"
    if ownership.held:
        return format_bytes(freed)
    return "all of it"


def left_report(
    name: str, cell: int | None, left: Sequence[RetainedArray], meant: str = ""
) -> Report:
    """Return the report on a deleted name: its object or arrays that are still alive.

    ``meant`` suggests a similar name.
    """
    headline = f"{clean_name(name)} is not defined{clean(meant)}"
    if cell is not None:
        headline += f"; cell {cell} bound it"
    if left:
        table = leak_table(left, "")
        return Report("why", f"{headline}, but part of it is alive", tables=[table])
    hint = "%gpumem leaks lists memory that no name leads to"
    return Report("why", f"{headline}; none of its memory is known to be alive", [hint])
