"""Empties objects that are to go, and says what became of what they held.

Only the object itself is emptied, and only if nothing else would find it empty. What only it held dies of that; what
anything else holds too lives on. What is left of the object is a shell that says so to whoever uses it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from types import GetSetDescriptorType
from typing import Any, Generic, NoReturn, Protocol

from ipygpumem.errors import GpuMemError, ReleasedError, said
from ipygpumem.freeing.reclaim import current, fallen, run_steps, steps_that_free, trim_host_heap
from ipygpumem.freeing.records import ReleaseRecord
from ipygpumem.introspect import class_dict, instance_dict, is_instance, module_of, solid_base, type_name
from ipygpumem.measuring.meter import Meter
from ipygpumem.model import Held, ReclaimStep
from ipygpumem.objects.arrays import (
    TOOLS,
    Array,
    describe,
    is_of_library,
    library_type,
    slot_descriptors,
    slots,
    watch,
)
from ipygpumem.objects.garbage import Garbage
from ipygpumem.objects.heap import Heap, undisturbed
from ipygpumem.objects.holders.frames import running_locals
from ipygpumem.objects.holders.search import Roots, explain, others
from ipygpumem.objects.progress import Progress, part, unseen
from ipygpumem.objects.traced import refuse_while_traced
from ipygpumem.objects.walk import ArraySearch
from ipygpumem.units import format_bytes

_MODULE_PARTS = ("_parameters", "_buffers", "_modules")
_SAYS = "_ipygpumem_says"
_SET_CLASS: Any = object.__dict__["__class__"].__set__


def _refuse(shell: Any, *_: object, **__: object) -> NoReturn:
    raise ReleasedError(_said(shell))


def _said(shell: Any) -> str:
    return str(class_dict(type(shell)).get(_SAYS, "this object was released by ipygpumem"))


class Released:
    """What is left of an object that was released: whatever is done with it says so."""

    __slots__ = ()
    __call__ = __len__ = __iter__ = __next__ = __bool__ = _refuse
    __getitem__ = __setitem__ = __delitem__ = __contains__ = __enter__ = __exit__ = _refuse
    __setattr__ = __delattr__ = __reduce_ex__ = __copy__ = __deepcopy__ = _refuse
    __eq__, __hash__, __format__ = object.__eq__, object.__hash__, object.__format__

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name.startswith("__") and name.endswith("__") else _refuse(self)

    def __dir__(self) -> list[str]:
        return []

    def __repr__(self) -> str:
        return f"<{_said(self)}>"

    __str__ = __repr__


def _shell_class(item: object) -> type | None:
    """Return a class for what is left of an object; None if Python gives the object no other class.

    It does so only if both have the same room for attributes. Where a plain class has another, the shell's derives
    from the object's, past its metaclass, unless code of the user's would hear of that.
    """
    kind = type(item)
    bases = type.mro(kind)
    if solid_base(kind) is not object or _is_of(item, (Enum,)):
        return None
    names = {name: value for name, value in class_dict(Released).items() if name not in ("__module__", "__doc__")}
    if any("__del__" in class_dict(base) for base in bases):
        names["__del__"] = lambda shell: None  # it has run
    names["__module__"] = __name__
    plain = type("Released", (), {name: value for name, value in names.items() if name != "__slots__"})
    if _takes(item, plain):
        return plain
    told = [base for base in bases[:-1] if "__init_subclass__" in class_dict(base)]
    hears = any(base is not Generic and base is not Protocol for base in told)
    with contextlib.suppress(TypeError):  # a class that takes none below it
        derived = None if hears else type.__new__(type(kind), "Released", (kind,), names)
        return derived if derived is not None and _takes(item, derived) else None
    return None


def _takes(item: object, shell: type) -> bool:
    """Whether Python lets an object become one of class ``shell``; it is what it was afterwards."""
    kind = type(item)
    try:
        _SET_CLASS(item, shell)
    except TypeError:
        return False
    _SET_CLASS(item, kind)
    return True


class _Target:
    """One object that is to be emptied, and what it is called."""

    __slots__ = ("_shell", "item", "name")

    def __init__(self, name: str, item: object) -> None:
        self.name, self.item = name, item
        self._shell: Any = None

    def check(self) -> None:
        """Raise GpuMemError if the object cannot be emptied, or if that would harm more than it."""
        item, what = self.item, f"`{self.name}` ({type_name(self.item)})"
        if _SAYS in class_dict(type(item)):
            raise GpuMemError(_said(item))
        if describe(item) is not None:
            raise GpuMemError(f"{what} has nothing to empty: its memory goes with its last name")
        library = module_of(item).partition(".")[0]
        if library in TOOLS:
            raise GpuMemError(f"{what} cannot be released: it is a part of {library}")
        if library not in sys.stdlib_module_names:
            self._shell = _shell_class(item)
        if self._shell is None:
            raise GpuMemError(f"{what} cannot be emptied: delete its name instead")

    def parts(self) -> Iterator[tuple[str, object]]:
        """Yield what the object holds, by name."""
        for key, value in [*(instance_dict(self.item) or {}).items(), *slots(self.item).items()]:
            if key in _MODULE_PARTS and is_instance(value, dict):
                yield from [(f"{self.name}.{inner}", part) for inner, part in list(dict.items(value))]
            else:
                yield f"{self.name}.{key}", value

    def empty(self, says: str) -> str:
        """Empty the object, and leave a shell; return what its own finaliser complained about."""
        item: Any = self.item
        complaint = ""
        finish = next(
            (class_dict(kind)["__del__"] for kind in type.mro(type(item)) if "__del__" in class_dict(kind)), None
        )
        if finish is not None:  # as at its end: nothing will be left of it then
            try:
                finish(item)
            except Exception as error:
                complaint = f"its __del__ failed: {said(error)}"
        places = slot_descriptors(type(item))
        _SET_CLASS(item, self._shell)
        self.say(says)
        _drop_attributes(item)
        for name, place in places.items():
            with contextlib.suppress(AttributeError):  # it is empty already
                if name != "__weakref__":
                    place.__delete__(item)
        return complaint

    def say(self, says: str) -> None:
        """Let the shell say this from now on."""
        type.__setattr__(self._shell, _SAYS, says)


def _drop_attributes(item: object) -> None:
    """Give an object another dict for its attributes: the old one may be another object's, too."""
    for kind in type.mro(type(item)):
        place = class_dict(kind).get("__dict__")
        if type(place) is GetSetDescriptorType:
            place.__set__(item, {})
            return


def _is_of(item: object, kinds: Sequence[type]) -> bool:
    return any(is_instance(item, kind) for kind in kinds)


def release(
    named: Sequence[tuple[str, object]],
    where: str,
    meter: Meter,
    garbage: Garbage,
    roots: Callable[[], Roots] = Roots,
    progress: Progress = unseen,
) -> ReleaseRecord:
    """Empty objects, give back what only they held, and return what became of it.

    Args:
        named: the objects with their names.
        where: the cell or line that asks for it.
        meter: measures.
        garbage: collects.
        roots: what the user can name.
        progress: gets how much of the search for holders is done.

    Raises:
        GpuMemError: one of them cannot be released, or torch is tracing the code that asks; then none is.
    """
    refuse_while_traced("release")
    targets = [_Target(name, item) for name, item in named]
    del named
    _check(targets, roots(), part(progress, 0.0, 0.5))
    watched = _watched(targets)
    workers = _workers()
    before = current(meter.now())
    notes: list[str] = []
    says = [f"`{target.name}` was released by ipygpumem at {where}" for target in targets]

    def empty() -> None:
        for target, text in zip(targets, says, strict=True):
            notes.extend(filter(None, [target.empty(text)]))

    steps: list[ReclaimStep] = []
    run_steps(meter, [("references", empty), *steps_that_free(garbage)], steps)
    reclaimed = fallen(before, current(meter.now()))
    freed, left = _sorted_out(watched, roots, part(progress, 0.5, 1.0))
    trim_host_heap()  # what the search for holders took
    record = ReleaseRecord(
        tuple(target.name for target in targets),
        where,
        freed,
        left,
        max(0, workers - _workers()),
        reclaimed,
        tuple(steps),
        tuple(notes),
    )
    for target, text in zip(targets, says, strict=True):
        target.say(f"{text}; {format_bytes(record.freed_bytes)} of tensors and arrays were freed")
    return record


def _check(targets: Sequence[_Target], roots: Roots, progress: Progress) -> None:
    """Raise GpuMemError if one cannot go, or if something of the user's that stays would find a shell."""
    for target in targets:
        target.check()
    with undisturbed():
        heap = Heap(running_locals(), progress)
        try:
            for target in targets:
                names = [other.name for other in targets if other.item is target.item]
                where = others(target.item, names, heap, roots, [other.item for other in targets])
                if where is not None:
                    ways = "release both, or let go of it there first"
                    raise GpuMemError(f"{where} would find `{target.name}` empty: {ways}")
        finally:
            heap.drop()
            trim_host_heap()  # or the report would say that release freed it


_Part = tuple[Held, list[tuple[Callable[[], bool], Array]]]


def _watched(targets: Sequence[_Target]) -> list[_Part]:
    """Return what the objects hold, part by part, to be watched without keeping it alive."""
    search, found = ArraySearch(), list[_Part]()
    for target in targets:
        search.pass_over(target.item)  # what leads back to it holds none of its parts
    for target in targets:
        for name, value in sorted(target.parts(), key=_depth):
            pairs = [pair for item, array in search.find(value) for pair in ((item, array), *_gradient(item, search))]
            if pairs:
                alone = describe(value) is not None
                held = Held(name, type_name(value), pairs[0][1].shape if alone else None, "", "", 0)
                found.append((held, [(watch(item), array) for item, array in pairs]))
    return found


def _depth(part: tuple[str, object]) -> int:
    """Order parts: what others lead to first, or all of a trainer would count as its first callback's."""
    kinds = (
        ("torch", "Tensor"),
        ("torch.nn", "Module"),
        ("torch.optim", "Optimizer"),
        ("torch.utils.data", "DataLoader"),
    )
    return next((place for place, kind in enumerate(kinds) if is_of_library(part[1], *kind)), len(kinds))


def _gradient(item: Any, search: ArraySearch) -> list[tuple[object, Array]]:
    """Return the gradient of a parameter: the collector does not see it."""
    base: Any = library_type("torch", "Tensor")
    if base is None or not is_instance(item, base):
        return []
    with sys.modules["torch"]._C.DisableTorchFunction():
        gradient = base.grad.__get__(item) if base.is_leaf.__get__(item) else None
    return [] if gradient is None else list(search.find(gradient))


def _sorted_out(
    watched: Sequence[_Part], roots: Callable[[], Roots], progress: Progress
) -> tuple[tuple[Held, ...], tuple[Held, ...]]:
    """Return what is gone of each part, and what is left of it with who holds that, the largest first."""
    gone, left = list[Held](), list[tuple[Held, Array]]()
    for held, arrays in watched:
        alive = [array for is_alive, array in arrays if is_alive()]
        dead = [array for array in (array for _, array in arrays) if all(array is not other for other in alive)]
        if dead:
            gone.append(_sized(held, dead))
        if alive:
            left.append((_sized(held, alive), max(alive, key=lambda array: array.size_bytes)))
    if left:
        with undisturbed():
            heap = Heap(running_locals(), part(progress, 0.0, 0.3))
            keys = [largest.storage for _, largest in left]
            holders = explain(keys, heap, roots(), progress=part(progress, 0.3, 1.0))
            heap.drop()
        left = [(replace(held, holder=holders[largest.storage]), largest) for held, largest in left]
    return _ordered(gone), _ordered([held for held, _ in left])


def _ordered(held: list[Held]) -> tuple[Held, ...]:
    return tuple(sorted(held, key=lambda item: -item.size_bytes))


def _sized(held: Held, arrays: Sequence[Array]) -> Held:
    def words(values: Iterator[str]) -> str:
        return ", ".join(sorted(set(values)))

    return replace(
        held,
        shape=held.shape if len(arrays) == 1 else None,
        dtype=words(array.dtype for array in arrays),
        device=words(array.device for array in arrays),
        size_bytes=sum(array.size_bytes for array in arrays),
        arrays=len(arrays),
    )


def _workers() -> int:
    """Return how many child processes of ``multiprocessing`` are alive."""
    module: Any = sys.modules.get("multiprocessing")
    return 0 if module is None else len(module.active_children())
