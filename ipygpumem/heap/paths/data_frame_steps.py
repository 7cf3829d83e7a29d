"""Writes the steps of paths through pandas' data frames: columns, ``frame["a"]``, cells and the
index.

A frame has a *manager*, which has the labels of the columns and a tuple of *blocks*; a block has
one array for all columns of one type.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from ipygpumem.heap.bulk import one_of_each
from ipygpumem.heap.kinds.arrays import (
    elements,
    has_objects,
    is_array,
    is_of_library,
    is_of_pandas,
    read_array,
    storage_key,
)
from ipygpumem.heap.kinds.libraries import library_of
from ipygpumem.heap.paths.ages import Ages
from ipygpumem.heap.paths.cuts import Cut, Kind, as_one_cut
from ipygpumem.heap.paths.items_and_attributes import attribute_text
from ipygpumem.heap.paths.literals import literal
from ipygpumem.heap.paths.path_state import Path
from ipygpumem.introspect import instance_dict, is_exactly, type_name

_MOST_COLUMNS = 20_000
"""Maximum number of columns of a frame whose labels are read."""
_MOST_LABELS = 1000
"""Maximum number of columns of a frame whose labels are recorded."""
_MOST_NAMED_COLUMNS = 40
"""Maximum number of columns that one array may have to be removed by their names."""
_OLDER_COLUMN = "the column was there before"
_FRAMES = {"DataFrame", "Series"}
"""Names of pandas' classes with cells."""
_MOST_CELLS = 10
"""Maximum number of cells with one object that a line empties one by one."""


def append_frame_step(path: Path, steps: Sequence[object], ages: Ages) -> int:
    """Append the way through a data frame or series as one step, because users write no names for
    the objects inside; return the number of references, 0 if the first object is neither.

    Args:
        path: the path.
        steps: the frame and the objects after it.
        ages: tells which columns are older than the memory to free.
    """
    frame = steps[0]
    if type_name(frame) not in _FRAMES or not is_of_pandas(frame):
        return 0
    if _append_attribute_of_user(path, frame, steps[1]):
        return 1
    number = _number_of_steps_inside(steps)
    inside = steps[: number + 1]
    way = _WayInside.of(inside)
    if way is None:  # such as a cached column: the frame is removed
        path.append_removable("")
    elif way.block is None:  # frame.index
        _append_index(path, frame)
    elif elements(inside[-2]) is not None:  # frame.iat[3, 0], from an array of objects
        _append_cell(path, array=inside[-2], child=inside[-1], way=way)
    elif is_of_library(frame, "pandas", "Series"):  # its only array
        path.append_fixed("")
    else:  # frame["a"]
        _append_columns(path, frame, way, steps[-1])
        _advise_if_columns_are_older(path, frame, way, ages)
    return number


def _append_attribute_of_user(path: Path, frame: object, child: object) -> bool:
    """Append ``frame.attrs``, or an attribute that the user has added to a frame; return False if
    the next object is neither.
    """
    name = attribute_text(frame, child)
    if name == "._attrs":
        path.append_fixed(".attrs", path.code and f"{path.code}.attrs")
        return True
    if not name.startswith(".") or name.startswith("._"):  # pandas' own
        return False
    target = path.code and f"{path.code}{name}"
    cut = Cut(Kind.DELETED_ATTRIBUTE, id(frame), path.code, target) if target else None
    path.append_removable(name, target, cut)
    return True


def _advise_if_columns_are_older(path: Path, frame: object, way: _WayInside, ages: Ages) -> None:
    """If columns are older than the memory to free, advise the line that removes them with a
    comment, ``"image" was there before``: new cells in them are to be freed.

    Adding a column makes a new object with the labels of all columns. If that object is older, so
    are all columns.
    """
    has_old_labels = ages.learn_if_older(way.manager.items)  # for later searches in any case
    if not path.removal:
        return
    if has_old_labels:
        path.advise(path.removal, comment=_OLDER_COLUMN)
    elif path.cut is not None and path.cut.owner_id == id(frame):
        older = sorted(set(ages.learn_columns(frame)).intersection(path.cut.columns))
        if older:
            verb = "was" if len(older) == 1 else "were"
            path.advise(path.removal, comment=f"{', '.join(older)} {verb} there before")


def labels_of_columns(frame: object) -> list[str]:
    """Return the code of the label of each column of a data frame; nothing if there are too many
    columns, or if a label has no code.
    """
    manager = _manager_of(frame) if type_name(frame) == "DataFrame" else None
    if manager is None or len(manager.items) > _MOST_LABELS:
        return []
    return _code_of_labels(manager.items)


def arrays_of_cells(frame: object) -> list[Any]:
    """Return the arrays with the objects in the cells of a data frame or series."""
    if type_name(frame) not in _FRAMES or not is_of_pandas(frame):
        return []
    manager = _manager_of(frame)
    blocks = () if manager is None else manager.blocks
    return [block.values for block in blocks if has_objects(block.values)]


def columns_in_frame(chain: Sequence[object]) -> Sequence[int] | None:
    """Return the position in the data frame of each column that an array has.

    There are none for the array of a series. The result is None for an array of no frame.

    Args:
        chain: the objects up to the array, one of which may be the frame.
    """
    for position in reversed(range(len(chain) - 1)):
        frame = chain[position]
        if type_name(frame) in _FRAMES and is_of_pandas(frame):
            way = _WayInside.of(chain[position:])
            if way is None or way.block is None or way.block.values is not chain[-1]:
                return None
            return [] if way.manager.ndim == 1 else list(way.block.mgr_locs)
    return None


def is_removable_from(frame: object) -> bool:
    """Return True for a data frame whose columns can be removed one by one."""
    return is_of_library(frame, "pandas", "DataFrame") and _manager_of(frame) is not None


def without_old_blocks(items: Sequence[object], new: Container[int]) -> list[object]:
    """Return objects, in which new blocks stand for their frame: instead of a frame's manager, or
    of its tuple of blocks, the arrays of the new blocks.

    After ``df["image"] = images``, the tuple of blocks is new, but the blocks of the columns before
    are old. A series gets a new manager when it is copied on write.

    Args:
        items: the objects.
        new: the identities of new objects.
    """
    examples = one_of_each(items)
    managers = {type_id for type_id, example in examples.items() if _is_manager(example)}
    if not managers and id(tuple) not in examples:
        return list(items)
    without = list[object]()
    for item in items:
        blocks: Any = item
        if id(type(item)) in managers:
            blocks = item.blocks  # type: ignore[attr-defined]  # of pandas' own class
        if are_blocks(blocks):
            without += [block.values for block in blocks if id(block) in new]
        else:
            without.append(item)
    return without


def are_blocks(item: object) -> TypeGuard[tuple[Any, ...]]:
    """Return True for the tuple with all blocks of a data frame or series."""
    return type(item) is tuple and len(item) > 0 and all(map(_is_block, item))


def number_of_steps_to_blocks(steps: Sequence[object]) -> int:
    """Return the number of references from a data frame to the tuple with its blocks; 0 if a chain
    does not lead through the tuple.
    """
    return next((number for number, item in enumerate(steps[:-1]) if are_blocks(item)), 0)


def _is_manager(item: object) -> bool:
    """Return True for the manager of a data frame or series."""
    return is_of_pandas(item) and type_name(item).endswith("BlockManager")


def _is_block(item: object) -> bool:
    """Return True for a block of a data frame or series."""
    return is_of_pandas(item) and type_name(item).endswith("Block")


def _number_of_steps_inside(steps: Sequence[object]) -> int:
    """Return the number of references from a frame to the first object that is not pandas' own: the
    array of a block, or the object in a cell.

    An array of objects counts as pandas' own. The object after it is in a cell, even if it is of a
    type that pandas has inside, too, such as a list or another frame.
    """
    is_after_array = False
    for number, item in enumerate(steps[:-1]):
        is_in_cell = is_after_array
        is_after_array = is_array(item) and elements(item) is not None
        if is_after_array:
            continue
        is_cache = type(item) is dict and number > 0 and _is_manager(steps[number - 1])
        is_of_frame = is_cache or _is_inside(item)
        if is_in_cell or not is_of_frame:
            return number
    return len(steps) - 1


def _is_inside(item: object) -> bool:
    """Return True for an object of a type that pandas has inside a frame."""
    return is_of_pandas(item) or is_exactly(item, tuple, list)


@dataclass(frozen=True)
class _WayInside:
    """The way of a chain through the manager of a data frame or series.

    Attributes:
        manager: the manager of the blocks and axes.
        block: the block on the way; None if the way leads to the index.
    """

    manager: Any
    block: Any

    @classmethod
    def of(cls, steps: Sequence[object]) -> _WayInside | None:
        """Return the way along which steps lead from a frame; None if it does not lead through the
        frame's manager, such as the way to a cached column.
        """
        manager = _manager_of(steps[0])
        if manager is None:
            return None
        passed = set(map(id, steps))
        for block in manager.blocks:
            if id(block) in passed or id(block.values) in passed:
                return cls(manager, block)
        return cls(manager, None) if id(manager.axes[-1]) in passed else None


def _manager_of(frame: object) -> Any:
    """Return the manager of a frame; None if it is not pandas' own."""
    manager: Any = (instance_dict(frame) or {}).get("_mgr")
    # It may be the object of another library, whose attributes may run code.
    if library_of(type(manager)) != "pandas" or library_of(type(manager.items)) != "pandas":
        return None
    return manager


def _append_index(path: Path, frame: object) -> None:
    """Append the index of a frame, which a line replaces by positions: ``df.index =
    range(len(df))``.
    """
    call = path.statement("{0}.index = range(len({0}))")
    cut = Cut(Kind.CALL, id(frame), path.code, call) if call else None
    path.append_removable(".index", path.code and f"{path.code}.index", cut)


def _append_cell(path: Path, *, array: Any, child: object, way: _WayInside) -> None:
    """Append the cells of an array that are one object, such as ``frame.iat[3, 0]``: by their
    positions, because labels may occur twice.

    Args:
        path: the path to the frame or series.
        array: the array of objects in its block.
        child: the object.
        way: the way through the block.
    """
    rows = elements(array) or []
    if read_array("ndim", array) == 1:
        rows = [rows]  # an array of one column
    cuts = list[Cut]()
    for column, cells in zip(list(way.block.mgr_locs), rows, strict=False):
        for row, cell in enumerate(cells):
            if cell is child and path.code:
                where = f"{row}, {column}"
                if way.manager.ndim == 1:
                    where = f"{row}"
                cuts.append(Cut(Kind.SLOT, id(array), path.code, f"{path.code}.iat[{where}]"))
    if len(cuts) > _MOST_CELLS:
        cuts.clear()  # the frame is removed instead
    target = cuts[0].target if cuts else ""
    path.append_removable(" (in a column)", target, as_one_cut(cuts))


def _append_columns(path: Path, frame: object, way: _WayInside, target: object) -> None:
    """Append the columns of a frame that have the memory of an array: ``["a"]``, or ``[["a",
    "b"]]`` for several in one block, and for blocks that share their memory.

    Args:
        path: the path to the frame.
        frame: the frame.
        way: the way to the array.
        target: the array, or the object at the end of the chain.
    """
    positions = sorted(
        position for block in _blocks_with(way, target) for position in block.mgr_locs
    )
    labels = _code_of_labels(way.manager.items)
    if len(positions) == len(way.manager.items):
        path.append_fixed("")  # all of the frame's data
        return
    if not labels or len(positions) > _MOST_NAMED_COLUMNS:  # the frame is removed
        path.append_removable("")
        return
    names = tuple(labels[position] for position in positions)
    shown = f"[{names[0]}]"
    if len(names) > 1:
        shown = f"[[{', '.join(names)}]]"
    code = path.code and f"{path.code}{shown}"
    cut = None
    if code:
        cut = Cut(Kind.COLUMN, id(frame), path.code, code, positions[0], len(labels), columns=names)
    path.append_removable(shown, code, cut)


def _blocks_with(way: _WayInside, target: object) -> list[Any]:
    """Return the block on a way, and further blocks that share the memory of an array."""
    key = storage_key(target) if is_array(target) else None
    blocks = [way.block]
    for block in way.manager.blocks:
        is_shared = key is not None and is_array(block.values) and storage_key(block.values) == key
        if is_shared and block is not way.block:
            blocks.append(block)
    return blocks


def _code_of_labels(labels: Any) -> list[str]:
    """Return the code of the label of each column; nothing if a label has no code, or if two labels
    are equal.
    """
    if len(labels) > _MOST_COLUMNS:
        return []
    literals = [literal(label) for label in labels]
    if not all(literals) or len(set(literals)) < len(literals):
        return []
    return literals
