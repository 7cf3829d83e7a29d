"""Twins: a copy of what code works on, in which each tensor is a fake one, so that the originals are never touched.

One memo serves all: tensors that share a storage have twins that share one, and an optimizer's twin steps the
parameters of the model's twin. What holds no tensor of the notebook is shared: modules, classes, NumPy arrays,
files, objects of C extensions.
"""

from __future__ import annotations

import copyreg
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ipygpumem.errors import EstimateError
from ipygpumem.estimating.patches import COMPILED, NO_PROCESSES
from ipygpumem.introspect import instance_dict, is_atom, is_instance, module_of, type_name

_SHARED_MODULES = {"IPython", "ipykernel", "ipygpumem", "numpy", "pandas", "matplotlib", "logging", "threading"}
_HEAP_TYPE = 1 << 9
"""CPython's flag of classes that are made at run time."""
_POINTER = 8
"""Bytes of a slot; a class may add two of its own, for attributes and weak references."""


class Twins:
    """Makes twins, each once.

    Args:
        made: is called with each tensor and its twin.
        device: says where a twin is, by where the original is.
        quietly: a context in which operations on tensors are no part of what is followed.
        shared: is called with what has no twin and may change, before code gets it.
        note: takes what the report is to say.
    """

    def __init__(
        self,
        made: Callable[[Any, Any], None],
        device: Callable[[Any], Any],
        quietly: Callable[[], Any],
        *,
        shared: Callable[[Any], None],
        note: Callable[[str], None],
    ) -> None:
        self._made = made
        self._share = shared
        self._note = note
        self._quietly = quietly
        self._device = device
        self._memo: dict[int, Any] = {}
        self._originals: list[Any] = []
        # Weakly: what code lets go of, such as a gradient that was there before, is gone.
        self._tensors: dict[int, Any] = {}
        self._storages: dict[int, Any] = {}
        self._namespaces: dict[int, dict[str, Any]] = {}
        self.optimizers: list[Any] = []

    def forget(self) -> None:
        """Keep no twin."""
        for kept in (self._memo, self._originals, self._tensors, self._storages, self._namespaces, self.optimizers):
            kept.clear()

    def namespace(self, original: dict[str, Any]) -> dict[str, Any]:
        """Return the twin of a namespace, in which names are twinned when they are looked up."""
        if id(original) not in self._namespaces:
            self._namespaces[id(original)] = Namespace(original, self)
        return self._namespaces[id(original)]

    def of(self, value: Any) -> Any:
        """Return the twin of ``value``, or ``value`` itself where it can be shared."""
        if is_atom(value):
            return value
        if is_instance(value, type):
            return self._shared(value)
        if id(value) in self._memo:
            return self._memo[id(value)]
        if is_instance(value, torch.Tensor):
            known = self._tensors.get(id(value))
            twin = known() if known is not None else None
            return self._tensor(value) if twin is None else twin
        for kind, make in _MAKERS:
            if is_instance(value, kind):
                return make(self, value)
        return self._instance(value)

    def _keep(self, value: Any, twin: Any) -> Any:
        self._memo[id(value)] = twin
        self._originals.append(value)  # an id says who it is only while the object lives
        return twin

    # -- tensors ----------------------------------------------------------------------------------------------

    def _tensor(self, tensor: Any) -> Any:
        if is_instance(tensor, FakeTensor):
            return tensor
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise EstimateError(f"an estimate cannot follow a {type_name(tensor)}: only plain tensors have fake twins")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise EstimateError("an estimate cannot follow sparse or quantized tensors")
        with self._quietly(), torch.no_grad():
            twin = self._strided(tensor)
            if type(tensor) is torch.nn.Parameter:
                twin = torch.nn.Parameter(twin, requires_grad=tensor.requires_grad)
            elif tensor.requires_grad:
                twin.requires_grad_()
        self._made(tensor, twin)
        self._tensors[id(tensor)] = weakref.ref(twin)
        self._originals.append(tensor)
        if tensor.is_leaf and tensor.grad is not None:
            twin.grad = self.of(tensor.grad)
        vars(twin).update(self.of(vars(tensor)))
        return twin

    def _strided(self, tensor: Any) -> Any:
        """Return a fake tensor that lies in its storage as ``tensor`` does in its own."""
        key = tensor.untyped_storage()._cdata
        size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        known = self._storages.get(key)
        storage, device = known() if known is not None else None, self._device(tensor.device)
        if storage is None:
            size_bytes = tensor.untyped_storage().nbytes()
            storage = torch.empty(size_bytes, dtype=torch.uint8, device=device).untyped_storage()
            self._storages[key] = weakref.ref(storage)
        return torch.empty(0, dtype=tensor.dtype, device=device).set_(storage, offset, size, stride)

    # -- containers and objects -------------------------------------------------------------------------------

    def _dict(self, value: Any) -> Any:
        twin = self._keep(value, self._blank(value))
        base: Any = OrderedDict if is_instance(value, OrderedDict) else dict
        for key, item in list(base.items(value)):
            base.__setitem__(twin, self.of(key), self.of(item))
        self._fill(value, twin)
        return twin

    def _list(self, value: Any) -> Any:
        twin = self._keep(value, self._blank(value))
        base: Any = deque if is_instance(value, deque) else list
        base.extend(twin, [self.of(item) for item in base.__iter__(value)])
        self._fill(value, twin)
        return twin

    def _items(self, value: Any) -> Any:
        """Return a tuple or set with the twins of its items; itself if all are shared and it cannot change."""
        base: Any = next(kind for kind in (tuple, set, frozenset) if is_instance(value, kind))
        items = list(base.__iter__(value))
        twins = [self.of(item) for item in items]
        if base is set:
            twin = self._keep(value, _solid(type(value)).__new__(type(value)))
            set.update(twin, twins)
            return twin
        shared = all(twin is item for twin, item in zip(twins, items, strict=True))
        return self._keep(value, value if shared else _solid(type(value)).__new__(type(value), twins))

    def _instance(self, value: Any) -> Any:
        if not _can_be_copied(type(value), module_of(value)):
            return self._keep(value, self._shared(value))
        if type_name(value) == "OptimizedModule" and "_orig_mod" in (instance_dict(value) or {}).get("_modules", {}):
            self._note(COMPILED)
            return self._keep(value, self.of(instance_dict(value)["_modules"]["_orig_mod"]))  # type: ignore[index]
        try:
            twin = object.__new__(type(value))
        except TypeError:  # made in C, such as a lock
            return self._keep(value, self._shared(value))
        self._shared(type(value))
        self._keep(value, twin)
        self._fill(value, twin)
        if is_instance(value, torch.optim.Optimizer):
            self.optimizers.append(twin)
        elif is_instance(value, torch.utils.data.DataLoader):
            vars(twin).update(NO_PROCESSES)
        elif is_instance(value, torch.nn.Module) and vars(twin).get("_compiled_call_impl") is not None:
            self._note(COMPILED)
            vars(twin)["_compiled_call_impl"] = None
        return twin

    def _blank(self, value: Any) -> Any:
        """Return an empty container of the type of ``value``."""
        twin = _solid(type(value)).__new__(type(value))
        if is_instance(value, deque):
            deque.__init__(twin, (), value.maxlen)
        elif is_instance(value, defaultdict):
            twin.default_factory = self.of(value.default_factory)
        return twin

    def _fill(self, value: Any, twin: Any) -> None:
        """Give a copy the twins of an object's attributes."""
        attributes = instance_dict(value)
        if attributes:
            instance_dict(twin).update({name: self.of(item) for name, item in list(attributes.items())})  # type: ignore[union-attr]  # of the same class
        for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                object.__setattr__(twin, name, self.of(getattr(value, name)))

    # -- code -------------------------------------------------------------------------------------------------

    def _function(self, value: Any) -> Any:
        compiled = value.__dict__.get("_torchdynamo_orig_callable")
        if compiled is not None:
            self._note(COMPILED)
            return self._keep(value, self.of(compiled))
        self._shared(value)
        in_notebook = id(value.__globals__) in self._namespaces
        if not in_notebook and not value.__closure__ and not value.__defaults__ and not value.__dict__:
            return self._keep(value, value)
        space = self._namespaces.get(id(value.__globals__), value.__globals__)
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        twin = types.FunctionType(value.__code__, space, value.__name__, None, cells or None)
        self._keep(value, twin)
        for cell, original in zip(cells, value.__closure__ or (), strict=True):
            self._keep(original, cell)
            try:
                cell.cell_contents = self.of(original.cell_contents)
            except ValueError:  # an empty cell
                continue
        twin.__defaults__, twin.__kwdefaults__ = self.of(value.__defaults__), self.of(value.__kwdefaults__)
        twin.__dict__.update(self.of(value.__dict__))
        twin.__module__, twin.__qualname__, twin.__doc__ = value.__module__, value.__qualname__, value.__doc__
        return twin

    def _method(self, value: Any) -> Any:
        return types.MethodType(self.of(value.__func__), self.of(value.__self__))

    def _weak_reference(self, value: Any) -> Any:
        target = value()
        return self._keep(
            value, value if target is None or type(value) is not weakref.ref else weakref.ref(self.of(target))
        )

    def _shared(self, value: Any) -> Any:
        self._share(value)
        return value


def _solid(kind: type) -> Any:
    """Return the first base of a class that is built in: it makes the objects."""
    return next(base for base in type.mro(kind) if not _is_heap_type(base))


def _is_heap_type(kind: type) -> bool:
    """Whether a class was made by a ``class`` statement: some in C are on the heap too, with a state of their own."""
    of = type.__dict__
    added = of["__basicsize__"].__get__(kind) - of["__basicsize__"].__get__(of["__base__"].__get__(kind) or object)
    slots = sum(type(item) is types.MemberDescriptorType for item in of["__dict__"].__get__(kind).values())
    return bool(of["__flags__"].__get__(kind) & _HEAP_TYPE) and added <= _POINTER * (slots + 2)


def _can_be_copied(kind: type, module: str) -> bool:
    """Whether an object is no more than its attributes, so that a copy of them is a copy of it."""
    plain = _solid(kind) is object and type.__getattribute__(kind, "__new__") is object.__new__
    finalised = any("__del__" in type.__dict__["__dict__"].__get__(base) for base in type.mro(kind))
    return plain and not finalised and module.partition(".")[0] not in _SHARED_MODULES


class Namespace(dict[str, Any]):
    """The twin of a namespace: a name is twinned when code looks it up, and what code binds stays here."""

    def __init__(self, original: dict[str, Any], twins: Twins) -> None:
        # What Python itself looks up in a namespace, past ``__missing__``: classes have their module's name from it.
        super().__init__({name: original[name] for name in ("__name__",) if name in original})
        self._original = original
        self._twins = twins
        self._deleted: set[str] = set()

    def __missing__(self, name: str) -> Any:
        if name in self._deleted:
            raise KeyError(name)
        self[name] = twin = self._twins.of(self._original[name])
        return twin

    def __delitem__(self, name: str) -> None:
        self._deleted.add(name)
        super().pop(name, None)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (name in self._original and name not in self._deleted)


_MAKERS: tuple[tuple[type, Callable[[Twins, Any], Any]], ...] = (
    (dict, Twins._dict),
    (list, Twins._list),
    (deque, Twins._list),
    (tuple, Twins._items),
    (set, Twins._items),
    (frozenset, Twins._items),
    (types.FunctionType, Twins._function),
    (types.MethodType, Twins._method),
    (weakref.ReferenceType, Twins._weak_reference),
    (types.ModuleType, Twins._shared),
    (types.CodeType, Twins._shared),
)
