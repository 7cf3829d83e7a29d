"""Cycles of gradients and their graphs: what nobody holds dies, what somebody holds is never touched."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ipygpumem.freeing import cycles
from ipygpumem.objects.garbage import Garbage
from tests.fakes import fake_module

torch: Any = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _nothing_of_other_tests() -> None:
    gc.collect()
    cycles.collect(Garbage())


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of create_graph=True
        yield


class Double(torch.autograd.Function):  # type: ignore[misc, name-defined]  # torch may be missing
    """A function of the user's, with attributes on its context."""

    @staticmethod
    def forward(ctx: Any, value: Any) -> Any:
        ctx.save_for_backward(value)
        ctx.value = value
        return value * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2 + 0 * ctx.saved_tensors[0]


class Trained:
    """A leaf with a gradient that has a graph, and what belongs to it."""

    def __init__(self, step: Callable[[Any], Any] = torch.exp) -> None:
        self.leaf = torch.ones(1000, requires_grad=True)
        self.loss = (step(self.leaf) * torch.ones(1000)).sum()
        self.loss.backward(create_graph=True)


def watched(tensor: Any) -> Callable[[], bool]:
    """Return a function that says whether a tensor's storage is gone."""
    reference = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
    expired: Callable[[], bool] = reference.expired
    return expired


STEPS: dict[str, Callable[[Any], Any]] = {
    "exp": torch.exp,
    "saved twice": lambda x: x * x,
    "a view": lambda x: x.view(10, 100).t().reshape(-1) * x,
    "a change in place": lambda x: x.clone().mul_(x),
    "a change of a view in place": lambda x: (y := x.clone(), y[:5].mul_(x[:5]), y)[-1],
    "a function of the user's": Double.apply,
    "an inner gradient": lambda x: x * torch.autograd.grad(x.exp().sum(), x, create_graph=True)[0],
}


@pytest.mark.parametrize("name", STEPS)
def test_what_only_its_own_gradient_keeps_is_freed(name: str) -> None:
    trained = Trained(STEPS[name])
    gone = watched(trained.leaf), watched(trained.leaf.grad)
    del trained
    gc.collect()
    assert not any(is_gone() for is_gone in gone)
    cycles.collect(Garbage())
    assert all(is_gone() for is_gone in gone)


def test_a_model_goes_with_all_its_parameters() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv1d(3, 5, 3), torch.nn.BatchNorm1d(5), torch.nn.GELU(), torch.nn.Flatten(), torch.nn.Linear(40, 7)
    )
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 3, 10)).pow(2).mean().backward(create_graph=True)
        optimizer.step()
    gone = [watched(parameter) for parameter in model.parameters()]
    assert cycles.collect(Garbage()) == 0
    del model, optimizer
    gc.collect()
    assert cycles.collect(Garbage()) == len(gone)
    assert all(is_gone() for is_gone in gone)


def test_a_gradient_that_a_tensor_within_a_graph_retains_is_a_cycle_too() -> None:
    leaf = torch.ones(5, requires_grad=True)
    inner = leaf.exp()
    inner.retain_grad()
    (inner * inner).exp().sum().backward(create_graph=True)
    gone = watched(inner)
    del inner, leaf
    gc.collect()
    assert cycles.collect(Garbage()) == 2
    assert gone()


def hold_in_thread(trained: Trained) -> Callable[[], object]:
    """Hold the leaf in nothing but a local name of a running thread."""
    ready, end = threading.Event(), threading.Event()

    def work(box: list[Any]) -> None:
        leaf = box.pop()
        ready.set()
        end.wait(60)
        del leaf

    thread = threading.Thread(target=work, args=([trained.leaf],))
    thread.start()
    ready.wait(60)
    return lambda: (end.set(), thread.join())


def hold_in_generator(trained: Trained) -> Iterator[int]:
    """Hold the loss in nothing but a local name of a suspended generator."""

    def batches(loss: Any) -> Iterator[int]:
        yield 1
        del loss

    found = batches(trained.loss)
    next(found)
    return found


def outer_with_its_gradient(trained: Trained) -> Any:
    """Hold another leaf, whose gradient has a graph that leads to the leaf."""
    outer = torch.ones(1000, requires_grad=True)
    (outer.exp() * trained.leaf.exp()).sum().backward(create_graph=True, inputs=[outer])
    return outer


def view_without_graph(trained: Trained) -> Any:
    with torch.no_grad():
        return trained.leaf[:3]


def packed_by_hooks(trained: Trained) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: [x], lambda box: box[0]):
        return (torch.ones(1000, requires_grad=True) * trained.leaf).sum()


def scripted(trained: Trained) -> Any:
    """Hold a tensor that only TorchScript has ever seen."""

    class Keeps(torch.nn.Module):  # type: ignore[misc, name-defined]  # torch may be missing
        def __init__(self) -> None:
            super().__init__()
            self.kept = torch.zeros(1)

        def forward(self, x: torch.Tensor) -> int:
            self.kept = x * 2
            return 1

    module = torch.jit.script(Keeps())
    module(trained.leaf)
    return module


def hook_on_outer_tensor(trained: Trained) -> Any:
    outer, leaf = torch.ones(1, requires_grad=True), trained.leaf
    outer.register_hook(lambda grad: leaf)
    return outer


HOLDERS: dict[str, Callable[[Trained], object]] = {
    "the leaf": lambda it: it.leaf,
    "the loss": lambda it: [it.loss],
    "the gradient": lambda it: {"grad": it.leaf.grad},
    "a tensor made from the gradient": lambda it: it.leaf.grad * 2,
    "a node of the graph": lambda it: it.loss.grad_fn,
    "the last node of the graph": lambda it: it.loss.grad_fn.next_functions[0][0].next_functions[0][0],
    "a node of the gradient's graph": lambda it: it.leaf.grad.grad_fn,
    "an edge": lambda it: torch.autograd.graph.get_gradient_edge(it.leaf),
    "an optimizer": lambda it: torch.optim.SGD([it.leaf], lr=1),
    "an outer tensor whose gradient leads there": outer_with_its_gradient,
    "a view without a graph": view_without_graph,
    "a view of the gradient": lambda it: it.leaf.grad[:1],
    "a graph that saved it by hooks": packed_by_hooks,
    "another graph": lambda it: (it.leaf * 3).sum(),
    "a saved tensor": lambda it: Double.apply(it.leaf).grad_fn.saved_tensors,
    "the context of a function": lambda it: Double.apply(it.leaf).grad_fn,
    "a tensor that is only TorchScript's": scripted,
    "a hook on an outer tensor": hook_on_outer_tensor,
    "a suspended generator": hold_in_generator,
}


@pytest.mark.parametrize("name", HOLDERS)
def test_what_somebody_holds_is_not_touched(name: str) -> None:
    trained = Trained()
    gone = watched(trained.leaf), watched(trained.leaf.grad)
    kept = HOLDERS[name](trained)
    del trained
    gc.collect()
    assert cycles.cut(Garbage()) == 0
    assert not any(is_gone() for is_gone in gone)
    del kept
    gc.collect()
    cycles.collect(Garbage())
    assert all(is_gone() for is_gone in gone)


def test_what_a_running_thread_holds_is_not_touched() -> None:
    trained = Trained()
    gone = watched(trained.leaf)
    end = hold_in_thread(trained)
    del trained
    gc.collect()
    assert cycles.cut(Garbage()) == 0
    end()
    cycles.collect(Garbage())
    assert gone()


def test_only_what_is_garbage_is_cut_of_several_that_share_a_graph() -> None:
    """Kept by name is one of two leaves: its graph leads to the other, which must keep its gradient, too."""
    first, second, third = (torch.full((10,), value, requires_grad=True) for value in (1.0, 2.0, 3.0))
    (first * second).sum().backward(create_graph=True)
    third.exp().sum().backward(create_graph=True)
    gone = watched(second), watched(third)
    del second, third
    gc.collect()
    assert cycles.collect(Garbage()) == 1
    assert [is_gone() for is_gone in gone] == [False, True]
    assert seen_from([first.grad]) == {1.0: True, 2.0: True}


class Chance:
    """Leaves, graphs and gradients made at random, some of which are kept."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        leaves = [torch.full((4,), float(number), requires_grad=True) for number in range(1, 7)]
        values = list(leaves)
        for _ in range(chance.randint(2, 12)):
            a, b = chance.choice(values), chance.choice(values)
            made = chance.choice([a * b, a.exp(), a + b, a.view(2, 2).t().reshape(-1), Double.apply(a), a[:] * 2, a])
            values.append(made)
            if not made.is_leaf and chance.random() < 0.1:
                made.retain_grad()
        for value in chance.sample(values, chance.randint(1, 3)):
            value.sum().backward(create_graph=chance.random() < 0.8, retain_graph=True)
        kinds: list[Callable[[Any], Any]] = [
            lambda x: x,
            lambda x: x.grad_fn,
            lambda x: x.grad if x.is_leaf else None,
            lambda x: x.detach(),
            lambda x: x.grad.grad_fn if x.is_leaf and x.grad is not None else None,
        ]
        self.kept = [chance.choice(kinds)(chance.choice(values)) for _ in range(chance.randint(0, 3))]
        self.gone = {leaf[0].item(): watched(leaf) for leaf in leaves}
        self.in_view = seen_from(self.kept)


def seen_from(kept: list[Any]) -> dict[float, bool]:
    """Return which leaves the user can get at, and whether they have a gradient."""
    found: dict[float, bool] = {}
    waiting, seen = [item for item in kept if item is not None], []
    while waiting:
        item = waiting.pop()
        if any(item is other for other in seen):
            continue
        seen.append(item)
        if isinstance(item, torch.Tensor):
            if item.is_leaf and item.requires_grad:
                found[item.flatten()[0].item()] = item.grad is not None
            waiting += [item.grad] if (item.is_leaf or item.retains_grad) and item.grad is not None else []
            waiting += [item.grad_fn] if item.grad_fn is not None else []
        else:
            waiting += [following for following, _ in item.next_functions if following is not None]
            waiting += [item.variable] if hasattr(item, "variable") else []
            for name in dir(item):
                if name.startswith("_saved_") and isinstance(saved := getattr(item, name), torch.Tensor):
                    waiting.append(saved)
    return found


def test_graphs_made_at_random_lose_nothing_that_can_be_reached_and_keep_nothing_else() -> None:
    """What can be reached is found by another walk than the one that is tested."""
    for seed in range(15):
        made = Chance(seed)
        gc.collect()
        cycles.collect(Garbage())
        assert seen_from(made.kept) == made.in_view, seed
        kept = {value for value, is_gone in made.gone.items() if not is_gone()}
        shares = {item.flatten()[0].item() for item in made.kept if isinstance(item, torch.Tensor) and item.is_leaf}
        assert made.in_view.keys() <= kept <= made.in_view.keys() | shares, seed


def test_without_a_gradient_that_has_a_graph_nobody_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = torch.ones(5, requires_grad=True)
    leaf.exp().sum().backward()
    monkeypatch.setattr(cycles, "_Accounts", lambda *_: pytest.fail("counted"))
    assert cycles.collect(Garbage()) == 0


def test_a_mode_and_a_subclass_of_the_users_do_not_run() -> None:
    class Mode(torch.overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]  # torch may be missing
        def __torch_function__(self, *_: Any) -> Any:
            pytest.fail("the mode ran")

    class Mine(torch.Tensor):  # type: ignore[misc, name-defined]  # torch may be missing
        @classmethod
        def __torch_function__(cls, *_: Any) -> Any:
            pytest.fail("the subclass ran")

    trained = Trained()
    mine = torch.Tensor._make_subclass(Mine, torch.ones(3), True)
    gone = watched(trained.leaf)
    del trained
    with Mode():
        assert cycles.cut(Garbage()) == 1
    assert gone()
    del mine


class Dispatch(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined]  # as above
    """A mode that sees every operation; it may keep what it sees."""


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Let the collector see nothing that is alive."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("mode", [Dispatch, torch.autograd.forward_ad.dual_level, frozen])
def test_where_not_all_can_be_counted_nothing_is_touched(mode: Callable[[], Any]) -> None:
    trained = Trained()
    gone = watched(trained.leaf)
    del trained
    gc.collect()
    with mode():
        assert cycles.cut(Garbage()) == 0
    assert not gone()
    assert cycles.cut(Garbage()) == 1


def test_a_search_that_takes_too_long_changes_nothing() -> None:
    trained = Trained()
    gone = watched(trained.leaf)
    del trained
    gc.collect()
    assert cycles.cut(Garbage(), steps=1) == 0
    assert not gone()
    assert cycles.cut(Garbage()) == 1


def test_what_a_thread_takes_meanwhile_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a weak reference anybody may get hold of a tensor that nobody holds."""
    trained = Trained()
    gone = watched(trained.leaf)
    leaf = weakref.ref(trained.leaf)
    del trained
    gc.collect()
    taken: list[Any] = []
    garbage = cycles._Accounts.garbage
    monkeypatch.setattr(cycles._Accounts, "garbage", lambda self: (taken.append(leaf()), garbage(self))[1])
    assert cycles.cut(Garbage()) == 0
    assert not gone()
    assert taken[0].grad is not None


def test_without_torch_or_with_an_old_one_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_module(Tensor=type("Tensor", (), {})))
    assert cycles.collect(Garbage()) == 0
    monkeypatch.delitem(sys.modules, "torch")
    assert cycles.collect(Garbage()) == 0
