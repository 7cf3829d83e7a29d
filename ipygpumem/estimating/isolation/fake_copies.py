"""Copies the objects that code works on, with a fake tensor for each tensor. The originals are
never changed.

All copies share one memo: tensors that share a storage have copies that share one, and an
optimizer's copy steps the parameters of the model's copy. Modules, classes, NumPy arrays, files and
objects of C extensions are shared, not copied.
"""

from __future__ import annotations

import copyreg
import operator
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from ipygpumem.errors import EstimateError
from ipygpumem.estimating.devices.devices import Devices
from ipygpumem.estimating.devices.named_devices import from_notebook
from ipygpumem.estimating.isolation.copied_names import Namespace
from ipygpumem.estimating.isolation.patches import MOST_VALUES, NO_PROCESSES, fake_parameter
from ipygpumem.estimating.isolation.rollback import Rollback
from ipygpumem.estimating.memory.storages import GRADIENTS, PARAMETERS, StorageLog
from ipygpumem.estimating.operators.sparse import is_sparse, parts_of, sparse_tensor
from ipygpumem.estimating.unfollowed import Unfollowed, is_script, runs_eagerly
from ipygpumem.introspect import (
    class_dict,
    instance_dict,
    is_atom,
    is_exactly,
    is_instance,
    module_of,
    solid_base,
    type_name,
)

_HOST = torch.device("cpu")
_OWN_REFERENCES = next(map(sys.getrefcount, [object()])) + 1
"""References to an original that ``_Memo.forget_dead_copies`` finds if nothing else leads to it:
its own, and that in ``originals``.
"""
_SHARED_MODULES = {
    "IPython",
    "ipykernel",
    "ipygpumem",
    "numpy",
    "pandas",
    "matplotlib",
    "logging",
    "threading",
}
_SHARED_MODULES |= {"torch.distributed.device_mesh", "torch.distributed.tensor._dtensor_spec"}
"""Libraries and modules whose objects are not copied: they belong to the whole process."""


class _Memo:
    """The copies of objects except tensors, and how many references to each original are copied.

    If all of them are, nothing will look the copy up again, and it can be forgotten: then it dies
    when the code drops it, as its original would.
    """

    def __init__(self) -> None:
        self.copies: dict[int, Any] = {}
        """Copies by the identity of the original."""
        self.originals: dict[int, Any] = {}
        """Originals of these copies and of tensors: an identity is unique only while its object is
        alive.
        """
        self._copied_references: defaultdict[int, int] = defaultdict(int)
        """Numbers of references to an original that are copied, by its identity."""
        self._newly_copied: set[int] = set()
        """Identities of the originals to which a reference was copied since the last
        ``forget_dead_copies``.
        """

    def keep(self, original: Any, copy: Any) -> Any:
        """Keep the copy of an object for later uses of the object, and return it."""
        self.copies[id(original)] = copy
        self.originals[id(original)] = original
        return copy

    def count_reference(self, original: Any) -> None:
        """Note that one more reference to an original is copied."""
        self._copied_references[id(original)] += 1
        self._newly_copied.add(id(original))

    def uncount_reference(self, original: Any) -> None:
        """Note that the last counted reference is not one of the original's own references."""
        self._copied_references[id(original)] -= 1

    def forget_dead_copies(self) -> None:
        """Forget the copies of originals whose references are all copied.

        A copy is kept if something else leads to its original, such as a name that the code may
        look up later.
        """
        keys = [key for key in self._newly_copied if key in self.copies]
        # No name of ours may refer to an original while its references are counted.
        counts = map(sys.getrefcount, [self.originals[key] for key in keys])
        for key, count in zip(keys, counts, strict=True):
            if self._copied_references[key] >= count - _OWN_REFERENCES:
                del self.copies[key]
                del self.originals[key]
                del self._copied_references[key]
        self._newly_copied.clear()

    def clear(self) -> None:
        """Drop all copies."""
        self.copies.clear()
        self.originals.clear()
        self._copied_references.clear()
        self._newly_copied.clear()


class FakeCopies:
    """Makes one fake copy of each object.

    Args:
        log: gets the storages of copied tensors, as ones that exist before the code runs.
        devices: the devices of the estimate.
        fakes: torch's mode of the fake tensors.
        unfollowed: gets the kinds of objects whose memory is not followed, such as scripts.
    """

    def __init__(
        self, log: StorageLog, devices: Devices, fakes: FakeTensorMode, unfollowed: Unfollowed
    ) -> None:
        self._log = log
        self._devices = devices
        self._fakes = fakes
        self._unfollowed = unfollowed
        self.rollback: Rollback | None = None
        """Saves the state of shared objects before code can change them."""
        self.lock = threading.RLock()
        """Held during each operation, because a fake mode is not thread-safe."""
        self.paused = False
        """True while a copy is made: the operations for it are not logged."""
        self.originals_bytes: dict[str, int] = {}
        """Bytes of the originals, by device."""
        self.optimizers: list[weakref.ref[Any]] = []
        """The copies of optimizers."""
        self._memo = _Memo()
        self._tensors: dict[int, Any] = {}
        """Weak references to the copies of tensors, by the identity of the original: a copy that
        code drops, such as an old gradient, must be freed.
        """
        self._storages: dict[int, Any] = {}
        """Weak references to the copies of storages, by torch's identity of the original."""
        self._namespaces: dict[int, dict[str, Any]] = {}
        """Copies of namespaces, by the identity of the original."""

    def forget(self) -> None:
        """Drop all copies at the end of the estimate."""
        self._memo.clear()
        self._tensors.clear()
        self._storages.clear()
        self._namespaces.clear()
        self.optimizers.clear()
        self.rollback = None

    def forget_dead_copies(self) -> None:
        """Forget the copies that nothing will look up again, so that the code can free them."""
        self._memo.forget_dead_copies()

    def share(self, value: Any) -> Any:
        """Return ``value`` itself instead of a copy; save its state, which code may change."""
        if self.rollback is not None:
            self.rollback.save(value)
        return value

    def namespace(self, original: dict[str, Any]) -> dict[str, Any]:
        """Return the copy of a namespace; its values are copied when their names are looked up."""
        if id(original) not in self._namespaces:
            self._namespaces[id(original)] = Namespace(original, self)
        return self._namespaces[id(original)]

    def of(self, value: Any) -> Any:
        """Return the copy of ``value``, or ``value`` itself if it is shared."""
        if self._devices.cpu_is_ambiguous:
            value = from_notebook(value)
        if is_atom(value):
            return value
        if is_instance(value, type):
            return self.share(value)
        if is_instance(value, torch.Tensor):
            copy = _object_of(self._tensors.get(id(value)))
            if copy is None:
                copy = self._copy_tensor(value)
            return copy
        copies = self._memo.copies
        if id(value) not in copies:
            copy = _copying_function(value)(self, value)
            if id(value) not in copies:  # such as a module, which is shared
                return copy
        self._memo.count_reference(value)
        return copies[id(value)]

    def _copy_uncounted(self, value: Any) -> Any:
        """Return the copy of ``value`` for a method or a weak reference.

        Its reference does not count as copied, because a method may be copied more than once, and a
        weak reference keeps nothing alive.
        """
        copy = self.of(value)
        self._memo.uncount_reference(value)
        return copy

    # -- tensors ---------------------------------------------------------------------------------

    def _copy_tensor(self, tensor: Any) -> Any:
        """Make and return the copy of a tensor, with copies of its gradient and its attributes.

        A fake tensor of the running code is its own copy.
        """
        if is_instance(tensor, FakeTensor):
            return tensor
        if _is_composite(type(tensor)):
            return self._copy_composite(tensor)
        if is_exactly(tensor, torch.Tensor) and is_sparse(tensor):
            return self._copy_sparse(tensor)
        _refuse_unfollowed(tensor)
        copy = self._fake_like(tensor)
        if _may_hold_sizes(tensor, copy):
            self._give_values(tensor, copy)
        self._log_original(tensor, copy)
        self._keep_tensor_copy(tensor, copy)
        vars(copy).update(self.of(vars(tensor)))
        return copy

    def _fake_like(self, tensor: Any) -> Any:
        """Return a fake tensor or parameter like a real one, in the copy of its storage."""
        kind: Any = type(tensor)
        with self._unlogged(), torch.no_grad(), torch._C.DisableTorchFunction():
            copy = self._fake_with_strides(tensor)
            if kind is torch.nn.Parameter:
                copy._is_param = True  # as torch.nn.Parameter does, which makes another one first
            elif is_instance(tensor, torch.nn.Parameter):  # such as a bitsandbytes parameter
                copy = fake_parameter(kind, copy, requires_grad=tensor.requires_grad)
            copy.requires_grad_(tensor.requires_grad)
        return copy

    def _log_original(self, tensor: Any, copy: Any) -> None:
        """Log the copy's storage as one that exists before the code runs."""
        with torch._C.DisableTorchFunction():
            self._log_copied_storage(tensor, copy)

    def _log_copied_storage(self, tensor: Any, copy: Any) -> None:
        """Log the storage of a tensor's copy and count its bytes, unless another copy shares it."""
        life = self._log.log_tensor(
            copy, self._devices.name_in_log(copy.device), existed_before=True
        )
        if life is None:
            return
        if tensor.is_cuda:
            life.address = tensor.untyped_storage().data_ptr()
        device = str(tensor.device)
        earlier_bytes = self.originals_bytes.get(device, 0)
        self.originals_bytes[device] = earlier_bytes + life.size_bytes

    def _keep_tensor_copy(self, tensor: Any, copy: Any) -> None:
        """Keep the copy of a tensor for later uses of the tensor, and copy its gradient.

        The reference to the copy is weak, so that the copy dies when the code drops it.
        """
        if isinstance(copy, torch.nn.Parameter):
            self._log.mark(copy, PARAMETERS)
        self._tensors[id(tensor)] = weakref.ref(copy)
        self._memo.originals[id(tensor)] = tensor
        if tensor.is_leaf and tensor.grad is not None:
            copy.grad = self.of(tensor.grad)

    def _copy_composite(self, tensor: Any) -> Any:
        """Return the copy of a composite tensor, such as a DTensor, with copies of its parts."""
        names, context = tensor.__tensor_flatten__()
        self.share(context)
        inner = {}
        for name in names:
            part = getattr(tensor, name)
            inner[name] = self.of(part)
        rebuild = type(tensor).__tensor_unflatten__
        with torch.no_grad():
            copy = rebuild(inner, context, tensor.size(), tensor.stride())
        if isinstance(tensor, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy.detach(), tensor.requires_grad)
        if copy.is_leaf and copy.requires_grad:
            copy.register_post_accumulate_grad_hook(self._mark_gradient)
        self._keep_tensor_copy(tensor, copy)
        return copy

    def _mark_gradient(self, leaf: Any) -> None:
        """Mark the gradient of a leaf in the log: torch calls this when it has added to it."""
        self._log.mark(leaf.grad, GRADIENTS)

    def _copy_sparse(self, tensor: Any) -> Any:
        """Return the copy of a sparse tensor, with copies of its indices and values."""
        with no_dispatch():
            parts = parts_of(tensor)
        with torch.no_grad():
            indices, values = map(self.of, parts)
            with self._unlogged():
                copy = sparse_tensor(
                    indices, values, tensor.shape, is_coalesced=tensor.is_coalesced()
                )
        self._keep_tensor_copy(tensor, copy)
        return copy

    def _give_values(self, tensor: Any, copy: Any) -> None:
        """Give a copy the values of its original as known values, unless these are many."""
        if tensor.numel() <= MOST_VALUES:
            with torch._C._DisableTorchDispatch():
                copy.constant = tensor.detach().clone()
            self._fakes.fake_tensor_converter.add_constant_storage_mapping(copy)

    @contextmanager
    def _unlogged(self) -> Iterator[None]:
        """Make a copy inside the block: its operations are not logged, transformed or cached."""
        # A copy made inside torch.func's grad or vmap must not be wrapped by it.
        with self.lock, torch._C._DisableFuncTorch(), _gradients_allowed():
            was_paused = self.paused
            was_caching = getattr(self._fakes, "cache_enabled", False)
            self.paused = True
            # torch's cache of results would keep a copy's storage alive.
            self._fakes.cache_enabled = False
            try:
                yield
            finally:
                self.paused = was_paused
                self._fakes.cache_enabled = was_caching

    def _fake_with_strides(self, tensor: Any) -> Any:
        """Return a fake tensor with the strides and offset of ``tensor``, in the copy of its
        storage, which is made for the first of the tensors that share it.
        """
        device = self._devices.real_device_of_copy(tensor.device)
        key = tensor.untyped_storage()._cdata
        storage = _object_of(self._storages.get(key))
        if storage is None:
            if tensor.device == device == _HOST and _fills_storage(tensor):
                return self._fake_with_value(tensor)
            size_bytes = tensor.untyped_storage().nbytes()
            storage = torch.UntypedStorage(size_bytes, device="meta")
            self._storages[key] = weakref.ref(storage)
        # Operations on fake tensors would take four times as long.
        with no_dispatch():
            empty = torch.empty(0, dtype=tensor.dtype, device="meta")
            empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        return FakeTensor(self._fakes, empty, device)

    def _fake_with_value(self, tensor: Any) -> Any:
        """Return a fake tensor that keeps the value of a tensor with a single element.

        It is in a new copy of the storage.
        """
        with no_dispatch():
            value = tensor.detach().clone()
        converter = self._fakes.fake_tensor_converter
        copy = converter.from_real_tensor(self._fakes, value, make_constant=True)
        key = tensor.untyped_storage()._cdata
        self._storages[key] = weakref.ref(copy.untyped_storage())
        return copy

    # -- containers and objects ------------------------------------------------------------------

    def _copy_container(self, value: Any) -> Any:
        """Return the copy of a list, dict, set or deque, with copies of its items."""
        copy = _new_container(value)
        self._memo.keep(value, copy)  # before its items, which may lead back to it
        # The base class's methods, because a user's class may override them.
        base = _container_class(value)
        if base is deque:
            deque.__init__(copy, (), value.maxlen)
        elif is_instance(value, defaultdict):
            copy.default_factory = self.of(value.default_factory)
        if issubclass(base, dict):
            for key, item in list(base.items(value)):
                key_copy = self.of(key)
                base.__setitem__(copy, key_copy, self.of(item))
        else:
            items = list(base.__iter__(value))  # in one step: a thread may change it
            copies = map(self.of, items)
            if base is set:
                set.update(copy, copies)
            else:
                base.extend(copy, copies)
        self._copy_attributes(value, copy)
        return copy

    def _copy_items(self, value: Any) -> Any:
        """Return a tuple or frozen set of copied items, or the original if all items are shared."""
        base: Any = tuple if is_instance(value, tuple) else frozenset
        items = list(base.__iter__(value))
        copies = [self.of(item) for item in items]
        if all(map(operator.is_, copies, items)):
            return self._memo.keep(value, value)
        copy = _new_container(value, copies)
        return self._memo.keep(value, copy)

    def _copy_instance(self, value: Any) -> Any:
        """Return the copy of an object with copies of its attributes, or the object itself if it
        cannot be copied. For a model that ``torch.compile`` returned, that is a copy of the model
        inside.
        """
        if is_script(value):
            self._unfollowed.note_script()
        if not _can_be_copied(type(value), module_of(value)):
            return self._memo.keep(value, self.share(value))
        model = _compiled_model(value)
        if model is not None:
            copy = self._copy_uncompiled(value, model)
            return self._memo.keep(value, copy)
        try:
            copy = object.__new__(type(value))
        except TypeError:  # made in C, such as a lock
            return self._memo.keep(value, self.share(value))
        self.share(type(value))
        self._memo.keep(value, copy)  # before its attributes, which may lead back to it
        self._copy_attributes(value, copy)
        self._adapt_library_copy(value, copy)
        return copy

    def _copy_uncompiled(self, value: Any, model: Any) -> Any:
        """Return the copy of the model in an object that ``torch.compile`` returned."""
        attributes = instance_dict(value) or {}
        # ``torch.compiler.disable`` wraps a module in the same class.
        if type_name(attributes.get("dynamo_ctx")) != "DisableContext":
            self._unfollowed.note_compiled(is_eager=runs_eagerly(value))
        return self.of(model)

    def _adapt_library_copy(self, value: Any, copy: Any) -> None:
        """Adapt the copies of three kinds of library objects.

        Optimizers are remembered for their state; data loaders start no processes; modules are not
        compiled.
        """
        if is_instance(value, torch.optim.Optimizer):
            self.optimizers.append(weakref.ref(copy))
        elif is_instance(value, torch.utils.data.DataLoader):
            vars(copy).update(NO_PROCESSES)
        elif is_instance(value, torch.nn.Module):
            self._forget_compiled_call(value, copy)

    def _forget_compiled_call(self, module: Any, copy: Any) -> None:
        """Let the copy of a module on which ``compile()`` was called run without compiling."""
        attributes = instance_dict(module) or {}
        compiled = attributes.get("_compiled_call_impl")
        if compiled is not None:
            self._unfollowed.note_compiled(is_eager=runs_eagerly(compiled))
            vars(copy)["_compiled_call_impl"] = None

    def _copy_attributes(self, value: Any, copy: Any) -> None:
        """Set copies of an object's attributes on its copy."""
        attributes = instance_dict(value)
        if attributes:
            items = list(attributes.items())  # in one step: a thread may change it
            copies = {name: self.of(item) for name, item in items}
            instance_dict(copy).update(copies)  # type: ignore[union-attr]  # of the same class
        for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]
            if name in ("__dict__", "__weakref__"):
                continue
            if hasattr(value, name):
                item = getattr(value, name)
                object.__setattr__(copy, name, self.of(item))

    # -- code ------------------------------------------------------------------------------------

    def _copy_function(self, value: Any) -> Any:
        """Return the copy of a function; for a compiled one, that of the function inside.

        A function without a closure, defaults, attributes or names of the notebook has no state
        that code could change: it is shared.
        """
        attributes = value.__dict__
        compiled = attributes.get("_torchdynamo_orig_callable")
        if compiled is not None:
            stays_eager = attributes.get("_torchdynamo_disable")  # ``torch.compiler.disable``
            if not stays_eager:
                self._unfollowed.note_compiled(is_eager=runs_eagerly(value))
            return self._memo.keep(value, self.of(compiled))
        self.share(value)
        has_state = value.__closure__ or value.__defaults__ or attributes
        in_notebook = id(value.__globals__) in self._namespaces
        if not has_state and not in_notebook:
            return self._memo.keep(value, value)
        return self._rebuild_function(value)

    def _rebuild_function(self, value: Any) -> Any:
        """Return a function with copies of its closure, its defaults and its attributes.

        All of these may lead back to the function, so that its copy is kept before they are copied.
        """
        closure = value.__closure__ or ()
        new_cells = self._make_empty_cells(closure)
        cells = tuple(self.of(cell) for cell in closure)
        original_space = value.__globals__
        space = self._namespaces.get(id(original_space), original_space)
        copy = types.FunctionType(value.__code__, space, value.__name__, None, cells or None)
        self._memo.keep(value, copy)
        for cell in new_cells:
            with suppress(ValueError):  # an empty cell
                contents = self.of(cell.cell_contents)
                self._memo.copies[id(cell)].cell_contents = contents
        copy.__defaults__ = self.of(value.__defaults__)
        copy.__kwdefaults__ = self.of(value.__kwdefaults__)
        attributes = self.of(value.__dict__)
        copy.__dict__.update(attributes)
        copy.__module__ = value.__module__
        copy.__qualname__ = value.__qualname__
        copy.__doc__ = value.__doc__
        return copy

    def _make_empty_cells(self, closure: tuple[types.CellType, ...]) -> list[types.CellType]:
        """Make an empty copy of each cell that has no copy yet, and return the cells to fill.

        Functions that are defined in one function share its cells.
        """
        new_cells = [cell for cell in closure if id(cell) not in self._memo.copies]
        for cell in new_cells:
            self._memo.keep(cell, types.CellType())
        return new_cells

    def _copy_method(self, value: Any) -> Any:
        """Return a method of the copy of an object."""
        function = self.of(value.__func__)
        bound_to = self._copy_uncounted(value.__self__)
        return types.MethodType(function, bound_to)

    def _copy_weak_reference(self, value: Any) -> Any:
        """Return a weak reference to the copy of its object; a dead one or a proxy is shared."""
        target = None
        if type(value) is weakref.ref:
            target = value()
        if target is None:
            return self._memo.keep(value, value)
        copy = self._copy_uncounted(target)
        return self._memo.keep(value, weakref.ref(copy))


@contextmanager
def _gradients_allowed() -> Iterator[None]:
    """Let a copy require gradients inside torch.func's transforms, which refuse it otherwise.

    For instance, the code of ``vmap(grad(f))`` may be the first to look up a model, whose
    parameters are copied then.
    """
    transforms = torch._C._functorch
    is_allowed = transforms.get_inplace_requires_grad_allowed()
    transforms.set_inplace_requires_grad_allowed(True)
    try:
        yield
    finally:
        transforms.set_inplace_requires_grad_allowed(is_allowed)


def _object_of(reference: Any) -> Any:
    """Return the object of a weak reference; None if it is freed, or there is no reference."""
    if reference is None:
        return None
    return reference()


def _new_container(value: Any, *args: Any) -> Any:
    """Return a new object of a container's class, made by ``__new__`` of its built-in base."""
    kind: Any = type(value)
    return solid_base(kind).__new__(kind, *args)


def _is_composite(kind: type) -> bool:
    """Return True for a class of tensors that consist of other tensors, such as DTensor."""
    return _defines("__tensor_flatten__", kind)


def _defines(name: str, kind: type) -> bool:
    """Return True if a class or one of its bases defines a name; runs no code of the class."""
    return any(name in class_dict(base) for base in type.mro(kind))


def _refuse_unfollowed(tensor: Any) -> None:
    """Raise an EstimateError for a tensor that no fake tensor can stand for."""
    transform = _transform_of(tensor)
    if transform:
        raise EstimateError(
            f"an estimate inside torch.func.{transform} cannot follow its tensors: estimate a "
            f"function that makes the call, around the transform"
        )
    is_parameter = is_instance(tensor, torch.nn.Parameter)
    if not is_parameter and not is_exactly(tensor, torch.Tensor):
        raise EstimateError(
            f"an estimate cannot follow a {type_name(tensor)}: only plain tensors have fake copies"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise EstimateError("an estimate cannot follow compressed or quantized tensors")


def _transform_of(tensor: Any) -> str:
    """Return the transform of torch.func whose tensor this is, such as ``vmap``; empty if none."""
    functorch = torch._C._functorch
    if functorch.is_batchedtensor(tensor):
        return "vmap"
    if functorch.is_functionaltensor(tensor):
        return "functionalize"
    if functorch.is_gradtrackingtensor(tensor):
        return "grad"
    return ""


def _may_hold_sizes(tensor: Any, copy: Any) -> bool:
    """Return True for a tensor of integers on the host: its values may be sizes or positions."""
    if is_instance(tensor, torch.nn.Parameter):
        return False
    if copy.is_floating_point():
        return False
    return bool(tensor.device.type == copy.device.type == "cpu")


def _fills_storage(tensor: Any) -> bool:
    """Return True if a tensor's single element is all that is in its storage."""
    return bool(tensor.untyped_storage().nbytes() == tensor.itemsize)


def _container_class(value: Any) -> Any:
    """Return the built-in class of a container that has its methods."""
    for kind in (OrderedDict, dict, deque, list):
        if is_instance(value, kind):
            return kind
    return set


def _compiled_model(value: Any) -> Any:
    """Return the model in an object that ``torch.compile`` returned; None for other objects."""
    if type_name(value) != "OptimizedModule":
        return None
    attributes = instance_dict(value) or {}
    modules = attributes.get("_modules", {})
    return modules.get("_orig_mod")


def _can_be_copied(kind: type, module: str) -> bool:
    """Return True if copies of an object's attributes make a copy of the object.

    That is not so for a class in C, whose objects have further state, for one with its own
    ``__new__``, and for one with ``__del__``, which would run twice.
    """
    library, _, _ = module.partition(".")
    if module in _SHARED_MODULES or library in _SHARED_MODULES:
        return False
    if _defines("__del__", kind):
        return False
    if solid_base(kind) is not object:
        return False
    return type.__getattribute__(kind, "__new__") is object.__new__


_COPYING_FUNCTIONS: dict[type, Callable[[FakeCopies, Any], Any]] = {
    dict: FakeCopies._copy_container,
    list: FakeCopies._copy_container,
    deque: FakeCopies._copy_container,
    set: FakeCopies._copy_container,
    tuple: FakeCopies._copy_items,
    frozenset: FakeCopies._copy_items,
    types.FunctionType: FakeCopies._copy_function,
    types.MethodType: FakeCopies._copy_method,
    weakref.ReferenceType: FakeCopies._copy_weak_reference,
    types.ModuleType: FakeCopies.share,
    types.CodeType: FakeCopies.share,
}


def _copying_function(value: Any) -> Callable[[FakeCopies, Any], Any]:
    """Return the method that copies an object, by its type."""
    for kind, copy_object in _COPYING_FUNCTIONS.items():
        if is_instance(value, kind):
            return copy_object
    return FakeCopies._copy_instance
