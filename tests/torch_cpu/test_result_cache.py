"""Results that an estimate repeats without torch: they are as torch makes them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ipygpumem
from ipygpumem.estimating.operators.result_cache import ResultCache

pytestmark = pytest.mark.usefixtures("no_modules_of_users")
ATEN = torch.ops.aten
CASES: dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]] = {
    "a product": (ATEN.mm.default, lambda: (torch.empty(3, 4), torch.empty(4, 5))),
    "a transposed matrix": (ATEN.t.default, lambda: (torch.empty(3, 4),)),
    "a view of a part": (ATEN.view.default, lambda: (torch.empty(4, 6)[2:], [3, 4])),
    "an integer": (ATEN.mul.Tensor, lambda: (torch.ones(3, dtype=torch.long), 2)),
    "a number": (ATEN.mul.Tensor, lambda: (torch.ones(3, dtype=torch.long), 2.0)),
    "a truth value": (ATEN.mul.Tensor, lambda: (torch.ones(3, dtype=torch.long), True)),
    "an addition in place": (ATEN.add_.Tensor, lambda: (torch.empty(3, 4), torch.empty(4))),
    "parts of a tensor": (ATEN.unbind.int, lambda: (torch.empty(3, 4), 1)),
    "several results": (ATEN.max.dim, lambda: (torch.empty(3, 4), 1)),
    "a result that is missing": (
        ATEN.native_layer_norm_backward.default,
        lambda: (
            torch.empty(3, 4),
            torch.empty(3, 4),
            [4],
            torch.empty(3, 1),
            torch.empty(3, 1),
            None,
            None,
            [True, False, False],
        ),
    ),
    "roots of a list": (ATEN._foreach_sqrt.default, lambda: ([torch.empty(3), torch.empty(2, 2)],)),
    "channels last": (
        ATEN.relu.default,
        lambda: (torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last),),
    ),
    "a transposition in place": (ATEN.t_.default, lambda: (torch.empty(3, 4),)),
    "a larger size in place": (ATEN.resize_.default, lambda: (torch.empty(3), [5])),
    "a new tensor": (ATEN.zeros.default, lambda: ([3, 4],)),
    "conjugated numbers": (ATEN._conj.default, lambda: (torch.empty(3, dtype=torch.complex64),)),
    "a sum of one tensor": (ATEN.add_.Tensor, lambda: (twice := torch.empty(3), twice)[:2]),
    "a scalar tensor": (ATEN.add.Tensor, lambda: (torch.empty(3), torch.empty(()))),
}


def described(value: Any, arguments: list[Any]) -> Any:
    """Return the shape, layout and type of a result, and the arguments with which it shares."""
    if isinstance(value, (list, tuple)):
        return [type(value), *(described(item, arguments) for item in value)]
    if value is None:
        return None
    storage = value.untyped_storage()
    sharing = [item.untyped_storage()._cdata == storage._cdata for item in arguments]
    same = [item is value for item in arguments]
    place = (value.shape, value.stride(), value.storage_offset(), storage.nbytes())
    return (*place, value.dtype, value.device, value.is_conj(), sharing, same)


def tensors_of(arguments: Any) -> list[Any]:
    tensors = []
    for argument in arguments:
        if isinstance(argument, list):
            tensors += [item for item in argument if isinstance(item, torch.Tensor)]
        elif isinstance(argument, torch.Tensor):
            tensors.append(argument)
    return tensors


@pytest.mark.parametrize("name", CASES)
def test_repeated_results_are_as_torch_makes_them(name: str) -> None:
    func, arguments = CASES[name]
    with FakeTensorMode() as fakes, torch.no_grad():
        results = ResultCache(fakes)
        for other, others_arguments in CASES.values():  # none must be taken for another
            results.run(other, other, others_arguments(), {})
        for _ in range(3):
            args, same_args = arguments(), arguments()
            repeated = results.run(func, func, args, {})
            wanted = func(*same_args)
            assert described(repeated, tensors_of(args)) == described(wanted, tensors_of(same_args))
            assert [x.shape for x in tensors_of(args)] == [x.shape for x in tensors_of(same_args)]


def test_known_values_are_left_to_torch() -> None:
    with FakeTensorMode() as fakes:
        results = ResultCache(fakes)
        for number in (2, 3):
            known = torch.tensor(number)
            product = results.run(ATEN.mul.Tensor, ATEN.mul.Tensor, (known, 2), {})
            assert product.item() == 2 * number


def test_sparse_tensors_are_left_to_torch() -> None:
    func = ATEN._values.default
    with FakeTensorMode() as fakes, torch.no_grad():
        results = ResultCache(fakes)
        for entries in (2, 3):  # which the shape does not tell
            indices = torch.empty(1, entries, dtype=torch.long)
            values = torch.empty(entries, 4)
            sparse = ATEN._sparse_coo_tensor_with_dims_and_tensors(
                1, 1, [9, 4], indices, values, dtype=torch.float, layout=torch.sparse_coo
            )
            assert results.run(func, func, (sparse,), {}).shape == (entries, 4)


def lists(*shapes: tuple[int, ...]) -> list[Any]:
    return [torch.empty(shape) for shape in shapes]


def test_lists_are_changed_in_place_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    dispatch = FakeTensorMode.dispatch

    def counted(mode: Any, func: Any, *args: Any) -> Any:
        calls.append(func)
        return dispatch(mode, func, *args)

    func = ATEN._foreach_addcdiv_.ScalarList
    with FakeTensorMode() as fakes, torch.no_grad():
        results = ResultCache(fakes)
        args = [lists((3,), (2, 2)) for _ in range(3)]
        monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
        for step in (1.0, 2.0):
            assert results.run(func, func, (*args, [step, step]), {}) is None
    assert not calls


@pytest.mark.parametrize(
    "args",
    [
        (lists((3,), (2, 2)), lists((3,), (2, 3))),
        (lists((3,), (2, 2)), lists((3,))),
    ],
)
def test_lists_that_torch_refuses_are_refused(args: Any) -> None:
    func = ATEN._foreach_mul_.List
    with FakeTensorMode() as fakes, torch.no_grad():
        copies = [list(map(fakes.from_tensor, items)) for items in args]
        with pytest.raises(RuntimeError):
            ResultCache(fakes).run(func, func, copies, {})


class Layers(nn.Module):
    """Equal layers, whose operations repeat those of the first."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(number)]
        )

    def forward(self, x: Any) -> Any:
        return self.layers(x)


def test_equal_layers_are_computed_by_torch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    dispatch = FakeTensorMode.dispatch

    def counted(mode: Any, func: Any, *args: Any) -> Any:
        calls.append(func)
        return dispatch(mode, func, *args)

    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
    numbers = []

    # Two layers, and eight of the same shape.
    for layers in (2, 8):
        model = Layers(layers)
        x = torch.zeros(2, 8, 32)
        calls.clear()
        ipygpumem.estimate(lambda: model(x).sum().backward())  # noqa: B023  # called at once
        numbers.append(len(calls))
    two, eight = numbers
    assert eight < 1.2 * two
