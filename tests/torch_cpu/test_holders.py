"""Holders of an array: one case per kind of reference, each named from the outside in."""

import collections
import functools
import gc
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch

import ipygpumem
from ipygpumem.heap.holders.search import explain
from ipygpumem.heap.kinds.arrays import storage_key
from ipygpumem.heap.live.heap import Heap
from ipygpumem.heap.paths.roots import Root, Roots
from tests import hostile

pytestmark = pytest.mark.usefixtures("others_out_of_sight")


class Thing:
    """Something with attributes."""


class Slotted:
    """Something without a dict."""

    __slots__ = ("part",)


@pytest.fixture
def names() -> dict[str, Any]:
    return {}


@pytest.fixture
def path(names: dict[str, Any]) -> Callable[..., str]:
    """Return a function that says by which path what a function keeps in its namespace is held."""

    def path_of(keep: Callable[[Any], object], kind: str = "numpy", **options: Any) -> str:
        array, kept = put_new_array(keep, kind)
        heap = Heap()
        roots = Roots(
            {id(names): Root.of_variable}, hidden=frozenset({id(sys._getframe())}), **options
        )
        holder = explain([array], heap, roots)[array]
        del kept
        return holder.path

    return path_of


def put_new_array(keep: Callable[[Any], object], kind: str) -> tuple[tuple[str, int], object]:
    """Let ``keep`` put a new array somewhere; return the identity of its storage."""
    value: Any = numpy.zeros(100) if kind == "numpy" else torch.zeros(100)
    key = storage_key(value)
    assert key is not None
    return key, keep(value)


def _with_attribute(x: Any, holder: Any, name: str) -> Any:
    setattr(holder, name, x)
    return holder


def _closure(batch: Any) -> Callable[[], Any]:
    def make_batch() -> Any:
        return batch

    return make_batch


def _default(x: Any) -> Callable[..., Any]:
    def step(*, first: Any = x) -> Any:
        return first

    return step


def _cached(x: Any, size: int | None) -> Callable[[], Any]:
    given = [x]

    @functools.lru_cache(maxsize=size)
    def load() -> Any:
        return given.pop()

    load()
    return load


class Trainer:
    """It has a method that a notebook keeps."""

    def on_end(self) -> None:
        """Do nothing."""


class Key:
    """It is not to be asked for its repr."""

    def __repr__(self) -> str:
        pytest.fail("asked for its repr")


def _suspended(data: Any) -> Iterator[int]:
    def batches(data: Any) -> Iterator[int]:
        yield 1
        del data

    loader = batches(data)
    next(loader)
    return loader


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda x: x, ""),
        (lambda x: {"run3": [0, (x,)]}, '["run3"][1][0]'),
        (lambda x: {Key(): x}, " (under a key of type Key)"),
        (lambda x: {"a": {frozenset(): {"b c": [x]}}}, '["a"] (under a key of type frozenset)'),
        (lambda x: {'q"x': [x]}, "['q\"x'][0]"),
        (lambda x: {float("nan"): [x]}, " (under a key of type float)"),
        (lambda x: [_with_attribute([x], Thing(), "weird key")], "[0] (in an attribute)"),
        (lambda x: [_with_attribute([x], Thing(), "class")], "[0] (in an attribute)"),
        (
            lambda x: {Key(): _closure([x])},
            " (under a key of type Key): closure of function make_batch (cell 4), variable batch[0]",  # noqa: E501
        ),
        (lambda x: collections.deque([0, x]), "[1]"),
        (lambda x: _with_attribute([x], Thing(), "field"), ".field[0]"),
        (lambda x: _with_attribute(x, Slotted(), "part"), ".part"),
        (lambda x: type("Config", (), {"value": x}), ".value"),
        (lambda x: [_closure(x)], "[0]: closure of function make_batch (cell 4), variable batch"),
        (lambda x: lambda first=x: first, ": default argument of function <lambda> (cell 4)"),
        (_default, ": default argument of function step (cell 4)"),
        (
            lambda x: _with_attribute(x, Trainer(), "w").on_end,
            ": bound method on_end (cell 4), its object.w",
        ),
        (lambda x: _cached(x, 8), ": lru_cache of function load (cell 4)"),
        (lambda x: _cached(x, None), ": lru_cache of function load (cell 4)"),
        (_suspended, ": suspended generator batches (cell 4), local data"),
    ],
)
def test_the_path_from_a_notebook_variable_is_named(
    path: Callable[..., str],
    names: dict[str, Any],
    kind: str,
    make: Callable[[Any], Any],
    expected: str,
) -> None:
    holder_path = path(lambda x: names.update(v=make(x)), kind, cell_of=lambda filename: 4)
    assert holder_path == f"notebook variable v{expected}"


def test_the_frames_of_a_kept_exception(path: Callable[..., str], names: dict[str, Any]) -> None:
    def train(batch: Any) -> None:
        raise ValueError

    def keep(x: Any) -> None:
        try:
            train(x)
        except ValueError as error:
            # the test's own frames are no part of it
            error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None
            names["errors"] = [error]

    line = train.__code__.co_firstlineno + 1
    assert (
        path(keep)
        == f"notebook variable errors[0]: saved traceback, train line {line}, local batch"
    )


def test_memory_held_only_by_cpp_is_named_so(path: Callable[..., str]) -> None:
    storage = torch.zeros(100).untyped_storage()
    holders = explain([("torch", storage._cdata)], Heap(), Roots())
    assert [holder.path for holder in holders.values()] == ["no Python object: C++ code keeps it"]


def _advice(names: dict[str, Any], keep: Callable[[Any], object]) -> str:
    key, kept = put_new_array(keep, "torch")
    roots = Roots(
        {id(names): Root.of_variable}, hidden=frozenset({id(sys._getframe())}), names=names
    )
    advice = explain([key], Heap(), roots)[key].advice
    del kept
    return advice


def test_advice_calls_the_handle_of_a_hook_if_it_has_a_name(names: dict[str, Any]) -> None:
    names["model"] = torch.nn.Sequential(torch.nn.Linear(2, 2))

    def keep(x: Any) -> None:
        names["model"][0].register_forward_hook(lambda *_: x)

    def keep_with_handle(x: Any) -> None:
        names["mine"] = names["model"][0].register_forward_hook(lambda *_: x)

    assert _advice(names, keep) == "model[0]._forward_hooks.clear()"
    names["other"] = names["model"].register_forward_hook(print)
    assert _advice(names, keep_with_handle) == "mine.remove()"


@pytest.mark.parametrize(
    ("register", "told"),
    [
        ("lin.register_forward_hook", "lin._forward_hooks.clear()"),
        ("lin.register_full_backward_pre_hook", "lin._backward_pre_hooks.clear()"),
        ("lin.register_load_state_dict_post_hook", "lin._load_state_dict_post_hooks.clear()"),
        ("lin.weight.register_hook", "lin.weight._backward_hooks.clear()"),
        (
            "lin.bias.register_post_accumulate_grad_hook",
            "lin.bias._post_accumulate_grad_hooks.clear()",
        ),
        ("sgd.register_step_post_hook", "sgd._optimizer_step_post_hooks.clear()"),
        (
            "lin.register_forward_pre_hook(print); lin.register_forward_pre_hook",
            "del lin._forward_pre_hooks[",
        ),
    ],
)
def test_advice_removes_a_hook_without_a_kept_handle(
    names: dict[str, Any], register: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names["lin"] = torch.nn.Linear(2, 2)
    names["sgd"] = torch.optim.SGD(names["lin"].parameters())
    alive: list[weakref.ref[Any]] = []

    def keep(x: Any) -> None:
        alive.append(weakref.ref(x))
        exec(f"{register}(hook)", {**names, "hook": _closure(x)})

    advice = _advice(names, keep)
    assert advice.startswith(told)

    # The advised line, as a cell would run it.
    results = list[object]()
    monkeypatch.setattr(sys, "displayhook", results.append)
    exec(compile(advice, "a cell", "single"), names)
    assert results in ([], [None])  # IPython would keep another result in Out
    del results
    gc.collect()
    assert alive[0]() is None


def _trained_deep_model() -> dict[str, Any]:
    """Return a model whose parameters are nearer to its optimizer's name than to its own."""
    net = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2))))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 2)).sum().backward()
    sgd.step()
    return {"net": net, "sgd": sgd}


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            "weight.register_hook(hook)",
            'sgd.param_groups[0]["params"][0]._backward_hooks.clear()',
        ),
        (
            "weight.register_post_accumulate_grad_hook(hook)",
            'sgd.param_groups[0]["params"][0]._post_accumulate_grad_hooks.clear()',
        ),
        ("weight.mine = hook", 'sgd.param_groups[0]["params"][0].mine = None'),
    ],
)
def test_objects_of_a_parameter_are_no_optimizer_state(
    names: dict[str, Any], code: str, told: str
) -> None:
    names.update(_trained_deep_model())
    alive: list[weakref.ref[Any]] = []

    def keep(x: Any) -> None:
        alive.append(weakref.ref(x))
        exec(code, {"weight": names["net"][0][0][0].weight, "hook": _closure(x)})

    advice = _advice(names, keep)
    assert advice.startswith(told)
    exec(advice, names)
    gc.collect()
    assert alive[0]() is None
    assert len(names["sgd"].state) == 2


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda x: (1, x), "del v"),
        (lambda x: {"a": [0, (x,)]}, 'del v["a"][1]'),
        (lambda x: {"a": functools.partial(print, x)}, 'del v["a"]'),
        (lambda x: {(x, 1): 0}, "del v[list(v)[0]]"),
        (lambda x: frozenset([(x,)]), "del v"),
        (lambda x: [iter([x])], "del v[0]"),
        (lambda x: (_closure(x),), "del v  # when you no longer need the function"),
        (lambda x: [x], "del v[0]"),
        (lambda x: ([x],), "del v[0][0]"),
        (lambda x: {x: 1}, "del v[list(v)[0]]"),
    ],
)
def test_advice_deletes_from_the_nearest_container(
    names: dict[str, Any], make: Callable[[Any], Any], told: str
) -> None:
    assert _advice(names, lambda x: names.update(v=make(x))) == told


@pytest.mark.xfail(strict=True, reason="a model's or optimizer's new part may be an old one")
@pytest.mark.parametrize(
    ("make", "keep", "told"),
    [
        (torch.nn.ParameterList, lambda owner, x: owner.append(x), "del owner[0]"),
        (
            lambda: torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1),
            lambda owner, x: owner.add_param_group({"params": [x, torch.nn.Parameter(x[:1])]}),
            "del owner.param_groups[1]",
        ),
    ],
)
def test_a_new_part_of_an_older_owner_is_removed(
    names: dict[str, Any],
    make: Callable[[], Any],
    keep: Callable[[Any, Any], None],
    told: str,
) -> None:
    names["owner"] = make()
    assert _advice(names, lambda x: keep(names["owner"], torch.nn.Parameter(x))) == told


def test_advice_deletes_a_tuple_with_an_exception(names: dict[str, Any]) -> None:
    def keep(x: Any) -> None:
        try:
            raise ValueError
        except ValueError:
            names["info"] = sys.exc_info()

    assert _advice(names, keep) == "del info  # once you have read it"


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (lambda x: functools.partial(print, {"a": x}), ""),
        (lambda x: _with_attribute([x], type("Recorder", (), {"__call__": print})(), "kept"), ""),
        (lambda x: _closure([x]), ": closure of function make_batch, variable batch[0]"),
    ],
)
def test_a_hook_is_where_a_path_ends(
    path: Callable[..., str], names: dict[str, Any], hook: Callable[[Any], Any], expected: str
) -> None:
    names["lin"] = torch.nn.Linear(2, 2)

    def keep(x: Any) -> None:
        names["lin"].register_forward_hook(hook(x))

    assert path(keep) == f"forward hook on lin{expected}"


@pytest.mark.parametrize(
    ("keep", "told"),
    [
        (lambda loss: {"losses": [loss]}, "del losses[0]"),
        (lambda loss: {"losses": {"a": [0, loss]}}, 'del losses["a"][1]'),
        (lambda loss: {"losses": {"a": loss}}, 'losses["a"] = losses["a"].detach()'),
        (lambda loss: {"loss": loss}, "loss = loss.detach()"),
        (lambda loss: {"losses": (loss,)}, "del losses"),
    ],
)
def test_advice_about_a_graph_can_be_pasted(
    names: dict[str, Any], keep: Callable[[Any], Any], told: str
) -> None:
    advice = _advice(
        names, lambda x: names.update(keep((torch.ones(100, requires_grad=True) * x).sum()))
    )
    comment = "and keep loss.item() or tensor.detach() instead of a tensor with its graph"
    assert advice == f"{told}  # {comment}"


def test_many_graphs_that_keep_a_tensor_are_removed_in_words(
    names: dict[str, Any],
) -> None:
    def keep(x: Any) -> None:
        for number in range(30):
            loss = (torch.ones(100, requires_grad=True) * x).sum()
            names[f"of_{number}"] = {"number": number, "loss": loss}

    assert _advice(names, keep).startswith("remove all of these tensors")


def test_advice_about_a_model_in_the_last_error_is_kept(
    names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:

    def train(model: Any) -> None:
        raise ValueError

    def keep(x: Any) -> None:
        model = torch.nn.Linear(2, 2)
        model.weight = torch.nn.Parameter(x)
        try:
            train(model)
        except ValueError as error:
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            monkeypatch.setattr(sys, "last_value", error, raising=False)

    gc.unfreeze()  # what the interpreter itself holds is asked for
    assert _advice(names, keep) == "%gpumem free"


@pytest.mark.parametrize(("position", "first"), [(0, "losses[0]"), (249, "losses[249]")])
def test_all_of_many_graphs_that_keep_a_tensor_are_named(
    names: dict[str, Any], position: int, first: str
) -> None:
    weight = torch.ones(10, requires_grad=True)
    losses = [(weight * number).exp().sum() for number in range(250)]
    names["losses"], names["totals"] = losses, [sum(losses)]
    key = storage_key(losses[position].grad_fn.next_functions[0][0]._saved_result)  # type: ignore[union-attr]
    assert key is not None
    hidden = frozenset({id(sys._getframe())})
    (holder,) = explain([key], Heap(), Roots({id(names): Root.of_variable}, hidden=hidden)).values()
    assert holder.remedy.line == f"del {first}; del totals[0]"


def test_a_line_says_if_more_graphs_may_keep_a_tensor(
    names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ipygpumem.heap.holders.graph_keepers._MOST_PAIRS", 1)
    names["loss"] = [torch.ones(10, requires_grad=True).exp().sum()]
    names["more"] = [names["loss"][0] * 2]
    key = storage_key(names["loss"][0].grad_fn.next_functions[0][0]._saved_result)
    assert key is not None
    hidden = frozenset({id(sys._getframe())})
    (holder,) = explain([key], Heap(), Roots({id(names): Root.of_variable}, hidden=hidden)).values()
    assert "other graphs may keep it, too" in holder.remedy.comment


@pytest.mark.filterwarnings("ignore:Using backward")  # torch's, of create_graph
def test_a_cycle_in_cpp_is_reported_where_everything_was_seen(names: dict[str, Any]) -> None:
    gc.unfreeze()  # what the interpreter itself holds is asked for
    leaf = torch.ones(100, requires_grad=True)
    leaf.exp().sum().backward(create_graph=True)
    key = storage_key(leaf.grad)
    alive = weakref.ref(leaf)
    del leaf
    assert key is not None
    (holder,) = explain([key], Heap(), Roots({id(names): Root.of_variable})).values()
    assert holder.path.startswith("a cycle in torch's own C++ code")
    (holder,) = explain([key], Heap(), Roots({id(names): Root.of_variable}), max_visits=0).values()
    assert "not reach" in holder.path
    alive().grad = None
    assert alive() is None


def test_an_object_is_followed_after_a_search_made_its_dict(names: dict[str, Any]) -> None:
    layer = torch.nn.Linear(10, 10)
    layer(torch.zeros(1, 10)).sum().backward()
    weight = storage_key(layer.weight)
    gradient = storage_key(layer.weight.grad)
    assert weight is not None
    assert gradient is not None
    names["trainer"] = Thing()
    # CPython 3.11 and 3.12 make the trainer's dict when somebody asks
    names["trainer"].weights = [layer.weight]
    del layer
    heap = Heap()
    roots = Roots({id(names): Root.of_variable}, hidden=frozenset({id(sys._getframe())}))
    holders = explain([weight, gradient], heap, roots)
    assert holders[weight].path == "notebook variable trainer.weights[0]"
    assert holders[gradient].path == "notebook variable trainer.weights[0].grad"


def test_explaining_leaves_no_garbage_behind(names: dict[str, Any]) -> None:
    array = numpy.zeros(100)
    names["v"] = [array]
    key = storage_key(array)
    assert key is not None
    gc.collect()
    gc.disable()
    try:
        before = (sys.getrefcount(array), gc.get_threshold())
        frozen = gc.get_freeze_count()
        explain([key], Heap(), Roots({id(names): Root.of_variable}))
        assert (sys.getrefcount(array), gc.get_threshold()) == before
        # what was frozen of other tests may die meanwhile
        assert 0 < gc.get_freeze_count() <= frozen
    finally:
        gc.enable()


def test_a_running_function_does_not_keep_its_explained_argument() -> None:
    started, drop, dropped, end = (threading.Event() for _ in range(4))
    alive: list[weakref.ref[Any]] = []

    def work() -> None:
        data = Thing()
        alive.append(weakref.ref(data))
        started.set()
        drop.wait(60)
        data = None  # type: ignore[assignment]
        dropped.set()
        end.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(60)

    # A search runs while the argument is alive, and is over before it dies.
    array = numpy.zeros(100)
    key = storage_key(array)
    assert key is not None
    explain([key], Heap(), Roots())
    drop.set()
    dropped.wait(60)
    gc.collect()
    try:
        assert alive[0]() is None
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_the_order_of_the_collectors_list_changes_no_path(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    key, shared = put_new_array(lambda x: [x], kind)
    for name in ("mylib", "another"):
        module: Any = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        module.one = [shared]
    del module
    del shared
    roots = Roots(hidden=frozenset({id(sys._getframe())}))

    # The heap in its order, and backwards.
    holder_paths = set()
    referrers = Heap.referrers
    for step in (1, -1):
        monkeypatch.setattr(
            Heap, "referrers", lambda *args, step=step: iter(list(referrers(*args))[::step])
        )
        heap = Heap()
        holder_paths.add(explain([key], heap, roots)[key].path)
        heap.drop()
    assert holder_paths == {"module another, global one[0][0]"}


def test_a_hostile_holder_is_not_asked(path: Callable[..., str], names: dict[str, Any]) -> None:
    def hold(x: Any) -> None:
        names["box"] = [hostile.made(hostile.Hostile, [x])]

    with hostile.untouched():
        assert path(hold) == "notebook variable box[0].content[0]"


def test_the_graph_that_a_loop_grows_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    weight = torch.ones(1 << 22, requires_grad=True)
    total = torch.zeros(1)
    for step in ipygpumem.track(range(6)):
        total = total + (weight * step).exp().mean()
    assert re.search(
        r"MiB per iteration is held by .* local total: its autograd graph", capsys.readouterr().out
    )
