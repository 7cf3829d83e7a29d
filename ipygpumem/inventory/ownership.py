"""Computes the memory that deleting a name would free, and finds the holders of the rest."""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from types import FrameType, TracebackType
from typing import Any

from ipygpumem.heap.arrays import storage_key
from ipygpumem.heap.bulk import of_types
from ipygpumem.heap.closure import MOST_OWNED, Closure, is_left_out
from ipygpumem.heap.heap import Heap, undisturbed
from ipygpumem.heap.holders.frames import peek
from ipygpumem.heap.holders.search import EVENT_LOOP, NOTEBOOK, PathWriter, Root, Roots, Search, explain
from ipygpumem.heap.holders.tasks import is_pending
from ipygpumem.heap.libraries import OUTLIVES, Piece, is_segment, segments
from ipygpumem.heap.sizes import Sizes
from ipygpumem.introspect import is_atom, is_exactly, is_instance, is_users_class, module_of, target_of, type_name
from ipygpumem.records import Record, ReferencePath

_MOST_SEARCHED = 2000
"""Maximum number of objects whose holders are searched, the nearest first."""
_MOST_STEPS = 1_000_000
"""Maximum number of steps to find the objects that wake tasks."""
_MOST_ALONE = 100
"""Maximum number of objects to measure one by one."""
_OF_IPYTHON, _MOST_ALIASES = 3, 4
"""The rank of IPython's own copies, whose variables users should keep; maximum number of names in a row."""
_LEAST_BYTES = 1 << 12
"""Minimum bytes of a holder's part for advice."""
_MOST_PLACES = 4
"""Maximum number of places in one variable to name."""
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_PARTS_SHOWN, _LEAST_SHARE = 5, 0.01
_SMALL = ReferencePath("smaller objects, which something else uses too", "")
_UNSEEN = ReferencePath("something that cannot be seen from Python: a running function or compiled code", "")


@dataclass
class _Row:
    """One holder, with the advice for one object and for several, and the objects that it holds."""

    one: ReferencePath
    several: ReferencePath
    more: int
    """Number of further references of the same root to one object."""
    keys: set[int | Piece] = field(default_factory=set)

    @property
    def holder(self) -> ReferencePath:
        """The holder with the number of its references."""
        found = self.one if len(self.keys) == 1 else self.several
        return replace(found, path=f"{found.path}, and {self.more:,} more there") if self.more else found


@dataclass(frozen=True)
class HeldPart(Record):
    """Memory behind a name that something else keeps alive too."""

    holder: ReferencePath
    """The holder of the largest object; ``advice`` is the line that frees it."""
    objects: int
    """Number of objects to which it refers; they lead to the rest."""
    device_bytes: dict[str, int]
    """Bytes by device that no earlier part counts."""
    is_shared: bool = False
    """True if an earlier part counts memory that this holder keeps alive too."""

    @property
    def size_bytes(self) -> int:
        """Bytes on all devices."""
        return sum(self.device_bytes.values())


@dataclass(frozen=True)
class Ownership(Record):
    """The memory behind an object, the part that deleting its name frees, and the holders of the rest."""

    _report = "report.inventory.why_report"

    name: str
    """The name or expression."""
    is_name: bool
    """True if a name refers to the object; it does not count as a holder."""
    type_name: str
    device_bytes: dict[str, int]
    """Bytes by device that the object leads to."""
    freed_bytes: dict[str, int]
    """Bytes by device that deleting the name frees; of an expression, those that nothing else holds."""
    parts: tuple[tuple[str, int], ...]
    """The largest parts of the object with their bytes."""
    held: tuple[HeldPart, ...] = ()
    """Other holders, the largest first."""
    complete: bool = True
    """False if there were too many objects to follow all; then ``freed_bytes`` is empty."""
    followed: bool = True
    """False for a module, class, frame or part of IPython: its content is not counted."""

    @property
    def size_bytes(self) -> int:
        """Bytes on all devices."""
        return sum(self.device_bytes.values())


def take(name: str, holding: list[object], roots: Roots, references: int, *, is_name: bool) -> Ownership:
    """Return the memory behind an object, the part that only its name keeps alive, and the holders of the rest.

    Args:
        name: the name of the object, or the expression for it.
        holding: a list of the object alone: the only reference to it that our callers hold.
        roots: the names and objects from which the user can reach objects.
        references: number of references to the object that do not count: of the list, and of the name.
        is_name: True if the name does not count as a holder.
    """
    with undisturbed():
        whole = Sizes(limit=MOST_OWNED)
        size = whole.measure(holding[0])  # before the closure refers to each object: shared ones take longer
        whole.drop()
        closure = Closure(holding)
        held = closure.held_from_outside({id(holding[0]): references})
        named, groups = _worth_naming(closure, held, size.size_bytes), dict[ReferencePath, set[int | Piece]]()
        if named or closure.may_share:
            hidden = roots.hidden | {id(closure.objects), id(closure.alone), id(holding)}
            own_name = name if is_name else ""
            namespaces = {key: _without(own_name, root) for key, root in roots.namespaces.items()}
            heap = Heap()  # after counting, because it refers to every object
            partners = closure.partners(heap, held)
            # Of a tensor that a graph has saved, the object itself is held.
            held |= {
                key for key, found in partners.items() if any(same[-1] is closure.objects[key] for _, same in found)
            }
            named = _worth_naming(closure, held, size.size_bytes)
            inside = closure.objects.keys() | set(map(id, closure.alone))  # the closure's objects refer to each other
            outside = replace(roots, namespaces=namespaces, hidden=hidden | inside)
            groups = _by_holder(closure, named, partners, heap, outside, is_name=is_name)
            if is_name and is_pending(holding[0]):  # the loop keeps it, and a done task keeps its error
                advice = f"{target_of(name)}.cancel(); del {target_of(name)}"
                by_loop = {one: replace(one, advice=advice) for one in groups if one.path.startswith(EVENT_LOOP)}
                groups = {by_loop.get(one, one): keys for one, keys in groups.items()}
            groups = {**_of_segments(closure, groups, heap, replace(roots, hidden=hidden)), **groups}
            heap.drop()
        sizes, seen, counted, held_parts = Sizes(), set[int](), set[int | Piece](), dict[ReferencePath, HeldPart]()
        rest: tuple[ReferencePath, Collection[int | Piece]] = _SMALL, held - named
        for holder, keys in [*groups.items(), rest]:
            pieces = [key for key in keys if type(key) is Piece]
            own = {key for key in keys if type(key) is int}
            every = closure.reach(own)
            reached, is_shared = every - seen, not counted.isdisjoint([*keys, *every])
            seen |= reached
            shared = Counter(sizes.of_pieces(pieces)) if pieces else Counter[str]()
            more = Counter(_measure(sizes, closure, own, reached)) + shared
            # A number that the whole process shares is no reason to delete what has it.
            is_large = more.total() >= _LEAST_BYTES
            counted.update([*pieces, *(every & named)] if is_large else ())
            shown = holder if is_large or is_shared else _SMALL
            known = held_parts.get(shown, HeldPart(shown, 0, {}))
            objects, more = known.objects + (len(own) or len(keys)), more + Counter(known.device_bytes)
            held_parts[shown] = HeldPart(shown, objects, dict(more), is_shared and shown is not _SMALL)
        freed = size.device_bytes if closure.complete else {}
        if freed and (groups or closure.tensors()):  # something else holds some of it
            freed = _measure(sizes, closure, {id(holding[0])}, closure.objects.keys() - seen)
        elif freed:
            freed = dict(Counter(freed) - sum((Counter(part.device_bytes) for part in held_parts.values()), Counter()))
        sizes.drop()
    total = sum((Counter(part.device_bytes) for part in held_parts.values()), Counter(freed))
    return Ownership(
        name,
        is_name,
        type_name(holding[0]),
        dict(total) if closure.complete else size.device_bytes,
        freed,
        tuple((part.name, part.size_bytes) for part in size.parts[:_PARTS_SHOWN]),
        tuple(
            sorted(
                (one for one in held_parts.values() if one.size_bytes or one.is_shared), key=lambda one: -one.size_bytes
            )
        ),
        closure.complete and size.complete,
        not is_left_out(holding[0]),
    )


def _worth_naming(closure: Closure, held: set[int], total: int) -> set[int]:
    """Return the objects held from outside, without those that are a small part of ``total``, such as a dtype."""
    if len(held) > _MOST_SEARCHED:
        return held
    found, sizes = dict.fromkeys((key for key in closure.objects if key in held), 0), Sizes()
    is_quick = len(found) * len(closure.objects) <= _MOST_STEPS
    for key in found:  # alone, because each may hold most of it
        if is_quick and len(found) <= _MOST_ALONE:
            sizes.drop()
            sizes = Sizes()
        found[key] = sizes.measure(closure.objects[key]).size_bytes
    sizes.drop()
    unsized = {key for key in found if is_exactly(closure.objects[key], FrameType, TracebackType)}
    waiting = set(map(id, closure.pending()))
    if waiting and is_quick:  # sizes are without the tasks
        unsized |= {key for key in found if not waiting.isdisjoint(closure.reach([key]))}
    return unsized | {key for key, size in found.items() if size * len(found) >= _LEAST_SHARE * total}


def _measure(sizes: Sizes, closure: Closure, keys: Collection[int], reached: Collection[int]) -> dict[str, int]:
    """Return the bytes behind some objects, those of frames, of tasks, and of tensors that only C++ code reaches."""
    known = [closure.objects[key] for key in closure.objects.keys() & reached]
    frames: list[Any] = of_types({id(FrameType)}, known)
    local = [value for frame in frames for value in peek(frame).values()]
    tasks = [task for task in closure.pending() if id(task) in reached]
    items = [*(closure.objects[key] for key in keys), *local, *tasks, *closure.tensors(reached)]
    return sizes.measure(items).device_bytes if items else {}


def _without(name: str, root: Callable[[object], Root | None]) -> Callable[[object], Root | None]:
    own = f"{NOTEBOOK}{name}"  # a module of %run may have a global of the same name
    return lambda key: None if (found := root(key)) is None or found.text == own else found


def _by_holder(
    closure: Closure,
    held: set[int],
    partners: Mapping[int, Sequence[tuple[Piece, list[object]]]],
    heap: Heap,
    roots: Roots,
    *,
    is_name: bool,
) -> dict[ReferencePath, set[int | Piece]]:
    """Return the held objects' identities, and memory that partners share, by holder; variables first."""
    nearest = [key for key in closure.objects if key in held]
    rest = set[int | Piece](nearest[_MOST_SEARCHED:])
    searched: dict[int | Piece, Sequence[object]] = {
        key: [closure.objects[key], *(one for _, same in partners.get(key, ()) for one in same)]
        for key in nearest[:_MOST_SEARCHED]
    }
    known = closure.reach(held)
    not_held = [key for key in partners if key not in known and not is_atom(closure.objects[key])]
    searched.update(islice((pair for key in not_held for pair in partners[key]), _MOST_SEARCHED))
    search = Search([item for items in searched.values() for item in items], heap, roots, for_all=True)
    writer = PathWriter(roots)
    by_root: dict[str, list[_Row]] = {}
    """The holders by their root, one for each place in which it holds an object."""
    for key, items in searched.items():
        chains = [way for item in items if (way := search.chain(item, search.unnamed)) is not None]
        ways = search.ways_to(items) or [([root], steps, 1) for root, steps in chains[:1]]
        if not ways:
            # An object to which nothing visible refers, such as an array in a tensor, belongs to its partner here.
            rest.update([key] * (type(key) is int or search.is_cut))
        for names, steps, number in ways:
            root, rows = names[0], by_root.setdefault(names[0].text or str(id(steps[0])), [])
            row = next((row for row in rows if key not in row.keys), None)
            if row is None and len(rows) == _MOST_PLACES:
                rows[-1].more += number
                continue
            if row is None:
                holder = writer.holder(root, steps)
                every = search.roots_of(steps[0])
                is_copied = any(other.rank == _OF_IPYTHON for other in every)
                is_output = any(other.advice.startswith("%xdel") for other in every)
                may_delete = not is_segment(steps[0]) and (is_output or not is_copied)
                is_whole = len(steps) == 1 or (is_name and not _is_users(steps[0]))
                is_whole |= number > 1 and _is_container(steps[0]) and number == len(gc.get_referents(steps[0]))
                one, several = (
                    _named(holder, root, names, may_delete=may_delete and all_of_it, is_pending=is_pending(steps[0]))
                    for all_of_it in (is_whole, is_whole or _is_container(steps[0]))
                )
                is_same = one.advice.startswith("del ")  # another way through an object that is deleted as a whole
                row = next((row for row in rows if is_same and row.one.advice == one.advice), None)
                if row is None:
                    row = _Row(one, several, number - 1)
                    rows.append(row)
            row.keys.add(key)
            if rest and len(steps) > 1:  # the container of one searched object may hold many more
                neighbours = rest.intersection(map(id, gc.get_referents(steps[-2])))
                row.keys.update(neighbours)
                rest -= neighbours
    groups = dict[ReferencePath, set[int | Piece]]()
    for row in sorted(chain.from_iterable(by_root.values()), key=lambda row: not row.one.path.startswith(NOTEBOOK)):
        groups.setdefault(row.holder, set()).update(row.keys)
    keys = [(storage_key(tensor), id(tensor)) for tensor in closure.tensors({key for key in rest if type(key) is int})]
    of_graphs = {storage: key for storage, key in keys if storage is not None}
    for storage, holder in explain(of_graphs, heap, roots).items() if of_graphs else ():
        groups.setdefault(holder, set()).add(of_graphs[storage])
    rest -= set(of_graphs.values())
    return {**groups, **({_UNSEEN: rest} if rest else {})}


def _of_segments(
    closure: Closure, groups: Mapping[ReferencePath, set[int | Piece]], heap: Heap, roots: Roots
) -> dict[ReferencePath, set[int | Piece]]:
    """Return the shared memory, which stays until it is unlinked, and the line that frees it after all views of it."""
    found = dict[ReferencePath, set[int | Piece]]()
    inside = segments(list(closure.objects.values()))
    holders = explain((), heap, roots, more=inside) if inside else {}
    for segment in inside:
        holder, reached = holders["object", id(segment)], closure.reach([id(segment)])
        views = [other.advice for other, keys in groups.items() if keys & reached and other.advice.startswith("del ")]
        path = f"{OUTLIVES}: {holder.path}"
        found[ReferencePath(path, "; ".join([*views, holder.advice]))] = {id(segment)}
    return found


def _is_users(item: object) -> bool:
    """Return True for a container or a user's object: it may hold more, so that no advice deletes all of it."""
    return _is_container(item) or is_users_class(type(item))


def _is_container(item: object) -> bool:
    return module_of(item) == "collections" or any(is_instance(item, kind) for kind in _CONTAINERS)


def _named(
    holder: ReferencePath, root: Root, roots: Sequence[Root], *, may_delete: bool, is_pending: bool
) -> ReferencePath:
    """Return a holder with all names that refer to its object directly, and the line that deletes these variables."""
    variables = [other.code for other in (root, *roots) if other.rank == 0 and other.code]
    if may_delete and root.rank == 0 and variables:
        cancel = f"{variables[0]}.cancel(); " * is_pending
        holder = replace(holder, advice=f"{cancel}del {', '.join(dict.fromkeys(variables))}")
    aliases = list(dict.fromkeys(other.text for other in roots if other.text != root.text))
    more = [f"{len(aliases) - _MOST_ALIASES} more names"] if len(aliases) > _MOST_ALIASES else []
    return replace(holder, path=", ".join([holder.path, *aliases[:_MOST_ALIASES], *more]))
