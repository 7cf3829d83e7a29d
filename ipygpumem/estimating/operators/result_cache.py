"""Repeats the results of operations on fake tensors, without asking torch again.

The result of an operation on fake tensors depends on the shapes, types and devices of its arguments
only. Two steps of a model with 24 equal layers repeat most of their operations. torch's
FakeTensorMode has a cache, too, but a hit in it takes 0.1 ms of CPU (torch 2.11), ten times as long
as to make the result.

The first call of an operation goes to torch. Its result becomes a recipe, such as "a view of the
first argument, of this shape", and further calls with the same key follow the recipe.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

_ATEN = torch.ops.aten
_LIFT = _ATEN.lift_fresh.default
_LIBRARIES = frozenset({"aten", "prims"})
"""Namespaces of operators whose results depend on nothing but their arguments."""
_NOT_REPEATED = frozenset(
    {
        _ATEN.as_strided.default,  # depends on the size of the storage
        _ATEN.lift.default,
        _LIFT,  # has real tensors as arguments
    }
)
_COMPARED_BY_VALUE = frozenset(
    {
        bool,
        float,
        int,
        str,
        torch.device,
        torch.dtype,
        torch.layout,
        torch.memory_format,
        type(None),
    }
)
"""Types of arguments that are compared by their values."""
_TYPES_OF_SEQUENCES = frozenset({list, tuple})
_TYPES_OF_NUMBERS = frozenset({bool, float, int})


class _ArgumentItself(NamedTuple):
    """The result is an argument itself, as that of ``x.add_(y)``."""

    number: int
    """The position among the tensors of the arguments."""


class _View(NamedTuple):
    """The result is a new tensor in the storage of an argument."""

    number: int
    """The position among the tensors of the arguments."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class _NewTensor(NamedTuple):
    """The result is a new tensor in a storage of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_TensorRecipe = _ArgumentItself | _View | _NewTensor | None
"""How to make one tensor of a result; None for a None in its place."""


class _Recipe(NamedTuple):
    """How to make the result of an operation from its arguments."""

    parts: tuple[_TensorRecipe, ...]
    container: type | None
    """The type of a result of several tensors; None for a single one."""


class _NotRepeatableError(Exception):
    """The result of an operation has to come from torch each time."""


class ResultCache:
    """Runs operators on the fake tensors of a mode, and makes repeated results itself.

    It holds no tensors: keys and recipes are numbers and types.
    """

    def __init__(self, fakes: FakeTensorMode) -> None:
        self._fakes = fakes
        self._recipes: dict[tuple[Any, ...], _Recipe | None] = {}
        """Recipes by operation; None for a result that has to come from torch each time."""
        self._list_operators: dict[Any, bool] = {}
        """Operators, and True for those that only change lists of tensors."""

    def run(self, func: Any, operator: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation on fake tensors.

        ``operator`` is called for the operation ``func``; it may be another function.
        """
        if operator is not func:
            return operator(*args, **kwargs)
        if self._changes_lists(func) and self._are_lists_accepted(args, kwargs):
            return None
        if func is _LIFT and _is_number(args[0]):
            return self._fake_number(args[0])
        try:
            key, tensors = self._key_and_tensors(func, args, kwargs)
        except _NotRepeatableError:
            return func(*args, **kwargs)
        if key not in self._recipes:
            result = func(*args, **kwargs)
            self._recipes[key] = self._checked_recipe(func, args, kwargs, key, tensors, result)
            return result
        recipe = self._recipes[key]
        if recipe is None:
            return func(*args, **kwargs)
        return self._make_result(recipe, tensors)

    def _fake_number(self, tensor: Any) -> Any:
        """Return a fake tensor with the value of a real one, which the code made from a number.

        torch would describe the real tensor in full. Optimizers make a number for each parameter.
        """
        with no_dispatch():
            value = tensor.clone()
            empty = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )
        number = FakeTensor(self._fakes, empty, tensor.device, constant=value)
        self._fakes.fake_tensor_converter.add_constant_storage_mapping(number)
        return number

    # -- operators on lists ------------------------------------------------------------------------

    def _changes_lists(self, func: Any) -> bool:
        """Return True for an operator that changes lists of tensors in place, and returns nothing.

        Optimizers call them with other numbers in each step, so that no key repeats.
        """
        changes_lists = self._list_operators.get(func)
        if changes_lists is None:
            changes_lists = func.__name__.startswith("_foreach_") and not func._schema.returns
            self._list_operators[func] = changes_lists
        return changes_lists

    def _are_lists_accepted(self, args: Any, kwargs: Any) -> bool:
        """Return True if torch certainly accepts the arguments of an operator on lists.

        The lists must be of one length, and their tensors at each position alike.
        """
        if kwargs:
            return False
        lists = [argument for argument in args if type(argument) is list]
        numbers = [argument for argument in args if type(argument) is not list]
        if not lists or not _are_numbers(numbers):
            return False
        if len(set(map(len, lists))) > 1:
            return False
        lists_of_tensors = [items for items in lists if not _are_numbers(items)]
        return all(map(self._are_alike_and_unknown, zip(*lists_of_tensors, strict=True)))

    def _are_alike_and_unknown(self, items: tuple[Any, ...]) -> bool:
        """Return True for floating-point tensors of one shape, type and device, without values."""
        properties = set()
        for item in items:
            if type(item) is not FakeTensor or item.constant is not None:
                return False
            properties.add((item.shape, item.dtype, item.fake_device))
        return len(properties) == 1 and items[0].is_floating_point()

    # -- keys --------------------------------------------------------------------------------------

    def _key_and_tensors(
        self, func: Any, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], list[Any]]:
        """Return the key of an operation, and the tensors among its arguments.

        The key has all that decides the result: the operator, properties of tensors, other
        arguments, and torch's settings.

        Raises:
            _NotRepeatableError: the result depends on more than that.
        """
        if func in _NOT_REPEATED:
            raise _NotRepeatableError
        key: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        tensors: list[Any] = []
        self._describe_all(args, key, tensors)
        for name, value in kwargs.items():
            key.append(name)
            self._describe(value, key, tensors)
        return tuple(key), tensors

    def _describe_all(self, values: Iterable[Any], key: list[Any], tensors: list[Any]) -> None:
        """Add the descriptions of arguments to the key, and their tensors to ``tensors``."""
        for value in values:
            self._describe(value, key, tensors)

    def _describe(self, value: Any, key: list[Any], tensors: list[Any]) -> None:
        """Add the description of an argument to the key, and its tensors to ``tensors``."""
        kind = type(value)
        if kind is FakeTensor:
            # torch computes with known values, and forgets them when they change.
            if value.constant is not None or value.fake_mode is not self._fakes:
                raise _NotRepeatableError
            if value.layout is not torch.strided:  # its shape does not say how large it is
                raise _NotRepeatableError
            tensors.append(value)
            key += _description(value)
        elif kind in _COMPARED_BY_VALUE:
            key += (kind, value)  # 1 == 1.0 == True
        elif kind in _TYPES_OF_SEQUENCES:
            key += (kind, len(value))
            self._describe_all(value, key, tensors)
        else:
            raise _NotRepeatableError

    # -- recipes -----------------------------------------------------------------------------------

    def _checked_recipe(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        key: tuple[Any, ...],
        tensors: list[Any],
        result: Any,
    ) -> _Recipe | None:
        """Return the recipe that makes a result again; None if it has to come from torch each time.

        That is so if the recipe, which is tried here, makes another result, or if the result may
        depend on more than the arguments.

        Args:
            func: the operator.
            args: its arguments, after the call.
            kwargs: its named arguments, after the call.
            key: the key of the operation, made before the call.
            tensors: the tensors among the arguments.
            result: the result that torch has returned.
        """
        if func.namespace not in _LIBRARIES:
            return None
        try:
            key_after_call, _ = self._key_and_tensors(func, args, kwargs)
            if key_after_call != key:  # an operator such as ``t_`` has changed its argument
                return None
            recipe = _recipe_of(result, tensors)
            if not _is_made_alike(result, self._make_result(recipe, tensors)):
                return None
        except _NotRepeatableError:
            return None
        return recipe

    def _make_result(self, recipe: _Recipe, tensors: list[Any]) -> Any:
        """Return a new result of an operation on ``tensors``."""
        if recipe.container is None:
            return self._make_tensor(recipe.parts[0], tensors)
        return recipe.container([self._make_tensor(part, tensors) for part in recipe.parts])

    def _make_tensor(self, part: _TensorRecipe, tensors: list[Any]) -> Any:
        """Return one tensor of a new result; None for a None."""
        if part is None:
            return None
        if isinstance(part, _ArgumentItself):
            return tensors[part.number]
        with no_dispatch():
            if isinstance(part, _View):
                storage = tensors[part.number].untyped_storage()
                made = torch.empty(0, dtype=part.dtype, device="meta")
                made.set_(storage, part.offset, part.shape, part.stride)
            else:
                made = torch.empty_strided(part.shape, part.stride, dtype=part.dtype, device="meta")
        return FakeTensor(self._fakes, made, part.device)


def _is_number(tensor: Any) -> bool:
    """Return True for a real tensor of one element on the host, without a gradient."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    return bool(tensor.numel() == 1 and tensor.device.type == "cpu" and not tensor.requires_grad)


def _are_numbers(values: list[Any]) -> bool:
    """Return True if all values are Python's own numbers."""
    return set(map(type, values)) <= _TYPES_OF_NUMBERS


def _description(tensor: Any) -> tuple[Any, ...]:
    """Return the properties of a fake tensor that decide the results of operations."""
    return (
        tensor.dtype,
        tensor.fake_device,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        # These also say if it is conjugated, or was made in inference mode.
        torch._C._dispatch_keys(tensor).raw_repr(),
    )


def _recipe_of(result: Any, tensors: list[Any]) -> _Recipe:
    """Return how to make a result from the tensors among the arguments."""
    numbers = _ArgumentNumbers(tensors)
    kind = type(result)
    if kind not in _TYPES_OF_SEQUENCES:
        return _Recipe((_tensor_recipe(result, numbers),), container=None)
    parts = tuple(_tensor_recipe(item, numbers) for item in result)
    storages = [
        item.untyped_storage()._cdata
        for item, part in zip(result, parts, strict=True)
        if isinstance(part, _NewTensor)
    ]
    if len(set(storages)) < len(storages):  # results that share a new storage
        raise _NotRepeatableError
    return _Recipe(parts, kind)


class _ArgumentNumbers:
    """The positions of tensors among the arguments, by their identities and their storages'.

    A tensor that is passed twice, or shares its storage with another one, has several.
    """

    def __init__(self, tensors: list[Any]) -> None:
        self.of_tensors: dict[int, list[int]] = {}
        self.of_storages: dict[int, list[int]] = {}
        for number, tensor in enumerate(tensors):
            self.of_tensors.setdefault(id(tensor), []).append(number)
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                self.of_storages.setdefault(storage._cdata, []).append(number)


def _tensor_recipe(value: Any, numbers: _ArgumentNumbers) -> _TensorRecipe:
    """Return how to make one tensor of a result: it is an argument, a view of an argument, or a
    tensor with a storage of its own.
    """
    if value is None:
        return None
    if type(value) is not FakeTensor or value.constant is not None:
        raise _NotRepeatableError
    if value.layout is not torch.strided:
        raise _NotRepeatableError
    same = numbers.of_tensors.get(id(value))
    if same is not None:
        return _ArgumentItself(_only_number(same))
    if value.requires_grad:
        raise _NotRepeatableError
    shape = tuple(value.shape)
    stride = value.stride()
    sharing = numbers.of_storages.get(value.untyped_storage()._cdata)
    if sharing is not None:
        offset = value.storage_offset()
        return _View(_only_number(sharing), shape, stride, offset, value.dtype, value.fake_device)
    return _NewTensor(shape, stride, value.dtype, value.fake_device)


def _only_number(numbers: list[int]) -> int:
    """Return the only number; with two, it is unclear which argument the next call would mean.

    Raises:
        _NotRepeatableError: there are several.
    """
    if len(numbers) > 1:
        raise _NotRepeatableError
    return numbers[0]


def _is_made_alike(result: Any, made: Any) -> bool:
    """Return True if the tensors of ``made`` are like those of torch's own result."""
    if not isinstance(result, (list, tuple)):
        result, made = [result], [made]
    return all(map(_is_alike, result, made))


def _is_alike(tensor: Any, made: Any) -> bool:
    """Return True if two tensors have equal properties, and storages of one size."""
    if tensor is made:
        return True
    if _storage_bytes(tensor) != _storage_bytes(made):
        return False
    return _description(tensor) == _description(made)


def _storage_bytes(tensor: Any) -> int:
    return int(tensor.untyped_storage().nbytes())
