"""Empties objects that are to go, and says what became of what they held.

Only the object itself is emptied, and only if nothing else would find it empty. What only it held dies of that; what
anything else holds too lives on. What is left of the object is a shell that says so to whoever uses it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import GetSetDescriptorType
from typing import Any, Generic, NoReturn, Protocol

from ipygpumem.errors import GpuMemError, ReleasedError
from ipygpumem.freeing.reclaim import current, fallen, run_steps, steps_that_free, trim_host_heap
from ipygpumem.introspect import class_dict, instance_dict, is_instance, module_of, solid_base, type_name
from ipygpumem.measuring.meter import Meter
from ipygpumem.model import Held, ReclaimStep
from ipygpumem.objects.arrays import TOOLS, Array, describe, is_of_library, library_type, watch
from ipygpumem.objects.garbage import Garbage
from ipygpumem.objects.heap import Heap, undisturbed
from ipygpumem.objects.holders.frames import running_locals
from ipygpumem.objects.holders.search import Roots, explain, others
from ipygpumem.objects.traced import refuse_while_traced
from ipygpumem.objects.walk import ArraySearch
from ipygpumem.record import Record
from ipygpumem.units import format_bytes

_MODULE_PARTS = ("_parameters", "_buffers", "_modules")
_KINDS = (("torch", "Tensor"), ("torch.nn", "Module"), ("torch.optim", "Optimizer"), ("torch.utils.data", "DataLoader"))
"""Parts that are looked at before others: what leads to all of a trainer, as a callback does, would count it as its."""
_SAYS = "_ipygpumem_says"
_SET_CLASS: Any = object.__dict__["__class__"].__set__


@dataclass(frozen=True)
class ReleaseRecord(Record):
    """What became of an object that was released, and of what it held."""

    names: tuple[str, ...]
    where: str
    """The cell, or the script and its line."""
    freed: tuple[Held, ...]
    """The parts whose memory is gone, the largest first; in ``size_bytes`` that of the tensors and arrays that died."""
    left: tuple[Held, ...]
    """The parts, or what is left of them, that something else holds, and what that is."""
    reclaimed: dict[str, int]
    """Per device, how far its memory fell: RSS for the host, live tensors for an accelerator."""
    steps: tuple[ReclaimStep, ...] = ()

    @property
    def freed_bytes(self) -> int:
        """The memory of all tensors and arrays that are gone."""
        return sum(held.size_bytes for held in self.freed)


def _refuse(shell: Any, *_: object, **__: object) -> NoReturn:
    raise ReleasedError(_said(shell))


def _said(shell: Any) -> str:
    return str(class_dict(type(shell))[_SAYS])


class Released:
    """What is left of an object that was released: whatever is done with it says so."""

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


def _shell_of(name: str, item: object) -> type:
    """Return a class for what will be left of an object; raise GpuMemError if it cannot be emptied."""
    kind, what = type(item), f"`{name}` ({type_name(item)})"
    if _SAYS in class_dict(kind):
        raise GpuMemError(_said(item))
    if describe(item) is not None:
        raise GpuMemError(f"{what} has nothing to empty: its memory goes with its last name")
    library = module_of(item).partition(".")[0]
    if library in TOOLS:
        raise GpuMemError(f"{what} cannot be released: it is a part of {library}")
    shells = list(_shell_classes(kind))
    if library in sys.stdlib_module_names or solid_base(kind) is not object or is_instance(item, Enum):
        shells = []
    for shell in shells:
        with contextlib.suppress(TypeError):  # both must have the same room for attributes
            _SET_CLASS(item, shell)
            _SET_CLASS(item, kind)
            return shell
    raise GpuMemError(f"{what} cannot be emptied: delete its name instead")


def _shell_classes(kind: type) -> Iterator[type]:
    """Yield a plain class, then one below ``kind``, past its metaclass, if no code of the user hears of that."""
    bases = type.mro(kind)
    if any("__del__" in class_dict(base) for base in bases):
        return
    yield type("Released", (Released,), {"__module__": __name__, _SAYS: ""})
    told = [base for base in bases[:-1] if "__init_subclass__" in class_dict(base)]
    if all(base is Generic or base is Protocol for base in told):
        names = {name: value for name, value in class_dict(Released).items() if name not in ("__dict__", "__weakref__")}
        with contextlib.suppress(TypeError):  # a class that takes none below it
            yield type.__new__(type(kind), "Released", (kind,), {**names, _SAYS: ""})


def _parts(name: str, item: object) -> Iterator[tuple[str, object]]:
    """Yield what an object holds, by name."""
    for key, value in (instance_dict(item) or {}).items():
        if key in _MODULE_PARTS and is_instance(value, dict):
            yield from [(f"{name}.{inner}", part) for inner, part in list(dict.items(value))]
        else:
            yield f"{name}.{key}", value


def release(
    named: Sequence[tuple[str, object]],
    where: str,
    meter: Meter,
    garbage: Garbage,
    roots: Callable[[], Roots] = Roots,
) -> ReleaseRecord:
    """Empty objects, give back what only they held, and return what became of it.

    Args:
        named: the objects with their names.
        where: the cell or line that asks for it.
        meter: measures.
        garbage: collects.
        roots: what the user can name.

    Raises:
        GpuMemError: one of them cannot be released, or torch is tracing the code that asks; then none is.
    """
    refuse_while_traced("release")
    shells = [_shell_of(name, item) for name, item in named]
    _refuse_if_needed(named, roots())
    watched = _watched(named)
    before = current(meter.now())
    says = [f"`{name}` was released by ipygpumem at {where}" for name, _ in named]

    def empty() -> None:
        for (_, item), shell, text in zip(named, shells, says, strict=True):
            type.__setattr__(shell, _SAYS, text)
            _SET_CLASS(item, shell)
            places = (class_dict(base).get("__dict__") for base in type.mro(shell))
            place = next(place for place in places if type(place) is GetSetDescriptorType)
            place.__set__(item, {})  # another dict: the old one may be another object's, too

    steps: list[ReclaimStep] = []
    run_steps(meter, [("references", empty), *steps_that_free(garbage)], steps)
    reclaimed = fallen(before, current(meter.now()))
    freed, left = _sorted_out(watched, roots)
    trim_host_heap()  # what the search for holders took
    record = ReleaseRecord(tuple(name for name, _ in named), where, freed, left, reclaimed, tuple(steps))
    for shell, text in zip(shells, says, strict=True):
        type.__setattr__(shell, _SAYS, f"{text}; {format_bytes(record.freed_bytes)} of tensors and arrays were freed")
    return record


def _refuse_if_needed(named: Sequence[tuple[str, object]], roots: Roots) -> None:
    """Raise GpuMemError if something of the user's that stays would find a shell."""
    with undisturbed():
        heap = Heap(running_locals())
        try:
            for name, item in named:
                names = [other for other, same in named if same is item]
                where = others(item, names, heap, roots, [other for _, other in named])
                if where is not None:
                    ways = "release both, or let go of it there first"
                    raise GpuMemError(f"{where} would find `{name}` empty: {ways}")
        finally:
            heap.drop()
            trim_host_heap()  # or the report would say that release freed it


_Part = tuple[Held, list[tuple[Callable[[], bool], Array]]]


def _watched(named: Sequence[tuple[str, object]]) -> list[_Part]:
    """Return what the objects hold, part by part, to be watched without keeping it alive."""
    search, found = ArraySearch(), list[_Part]()
    for _, item in named:
        search.pass_over(item)  # what leads back to it holds none of its parts
    for target in named:
        for name, value in sorted(_parts(*target), key=_rank):
            pairs = [pair for item, array in search.find(value) for pair in ((item, array), *_gradient(item, search))]
            if pairs:
                alone = describe(value) is not None
                held = Held(name, type_name(value), pairs[0][1].shape if alone else None, "", "", 0)
                found.append((held, [(watch(item), array) for item, array in pairs]))
    return found


def _rank(part: tuple[str, object]) -> int:
    return next((place for place, kind in enumerate(_KINDS) if is_of_library(part[1], *kind)), len(_KINDS))


def _gradient(item: Any, search: ArraySearch) -> list[tuple[object, Array]]:
    """Return the gradient of a parameter: the collector does not see it."""
    base: Any = library_type("torch", "Tensor")
    if base is None or not is_instance(item, base):
        return []
    with sys.modules["torch"]._C.DisableTorchFunction():
        gradient = base.grad.__get__(item) if base.is_leaf.__get__(item) else None
    return [] if gradient is None else list(search.find(gradient))


def _sorted_out(watched: Sequence[_Part], roots: Callable[[], Roots]) -> tuple[tuple[Held, ...], tuple[Held, ...]]:
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
            heap = Heap(running_locals())
            keys = [largest.storage for _, largest in left]
            holders = explain(keys, heap, roots())
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
