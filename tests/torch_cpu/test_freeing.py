"""Freeing by hand: what is released goes, what others hold stays, and what is moved comes back as it was."""

from __future__ import annotations

import abc
import collections
import copy
import enum
import gc
import multiprocessing
import pickle
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import numpy
import pytest
import torch
from torch import nn

import ipygpumem
from ipygpumem.errors import GpuMemError, ReleasedError
from ipygpumem.freeing import moving
from ipygpumem.freeing.purge import Offload, purge
from ipygpumem.freeing.records import PurgeRecord
from ipygpumem.measuring import traces
from ipygpumem.objects.garbage import Garbage
from tests import hostile

T = TypeVar("T")
HERE = ("cpu",)
"""Storages on the host are moved as a device's would be: to other memory of the host, and back."""


class Learner:
    """A trainer with a cycle."""

    def __init__(self) -> None:
        self.model = nn.Linear(256, 256)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.learner = self
        self.step()

    def step(self) -> None:
        self.model(torch.ones(2, 256)).sum().backward()
        self.optimizer.step()


class Finishing:
    """An object that ends what it has begun."""

    def __init__(self, ended: list[str]) -> None:
        self.ended = ended

    def __del__(self) -> None:
        self.ended.append("ended")


class Slotted:
    """An object without a dict."""

    __slots__ = ("part",)


class Abstract(abc.ABC, Generic[T]):
    """An object whose attributes are none that another class may have."""

    def step(self) -> Any:
        return self.part  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> bool:
        raise AssertionError

    __hash__ = None  # type: ignore[assignment]


class Colour(enum.Enum):
    """Objects that are always there."""

    RED = 1


class Registered(abc.ABC):  # noqa: B024  # for its room
    """An object whose class is told of each class that derives from it."""

    def __init_subclass__(cls) -> None:
        raise AssertionError


class Ones(torch.utils.data.Dataset[torch.Tensor]):
    """A few rows."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(3)


# -- release ----------------------------------------------------------------------------------------------------------


def test_release_frees_a_trainer_with_cycles_and_says_which_parts_went() -> None:
    learner = Learner()
    watched = [weakref.ref(learner.model), weakref.ref(learner.model.weight), weakref.ref(learner.optimizer)]
    gc.disable()
    try:
        record = ipygpumem.release(learner)
        assert [item() for item in watched] == [None] * 3
    finally:
        gc.enable()
    parameters = 256 * 256 * 4 + 256 * 4
    sizes = {held.name: held.size_bytes for held in record.freed}
    assert sizes == {"learner.model": 2 * parameters, "learner.optimizer": 2 * parameters + 2 * 4}
    assert record.freed_bytes == sum(sizes.values())
    assert record.left == ()


def test_what_something_else_holds_stays_as_it_is_and_is_listed_with_its_holder() -> None:
    learner, other = Learner(), nn.Linear(256, 256)
    other.weight = learner.model.weight  # tied
    values = other.weight.detach().clone()
    record = ipygpumem.release(learner)
    assert torch.equal(other.weight, values)
    (held,) = record.left
    assert (held.name, held.size_bytes) == ("learner.model", 2 * 256 * 256 * 4)  # and its gradient
    assert held.holder is not None
    assert "local other" in held.holder.path


USES: list[Any] = [
    lambda item: item(),
    lambda item: item.model,
    lambda item: setattr(item, "model", 1),
    lambda item: delattr(item, "model"),
    len,
    iter,
    next,
    bool,
    lambda item: item[0],
    lambda item: 1 in item,
    lambda item: item.__enter__(),
    copy.copy,
    copy.deepcopy,
    pickle.dumps,
]


def test_whatever_is_done_with_a_released_object_says_where_it_was_released() -> None:
    learner = Learner()
    record = ipygpumem.release(learner)
    said = f"`learner` was released by ipygpumem at {record.where}; "
    assert record.where.startswith("test_freeing.py line ")
    for use in USES:
        with pytest.raises(ReleasedError) as raised:
            use(learner)
        assert str(raised.value).startswith(said)
        assert repr(learner) == str(learner) == f"<{raised.value}>"


def test_a_released_object_does_not_break_tools_that_look_at_all_objects() -> None:
    learner = Learner()
    ipygpumem.release(learner)
    assert not hasattr(learner, "model")
    assert dir(learner) == []
    assert learner in [learner]
    assert not isinstance(learner, nn.Module)
    assert hash(learner) is not None


def test_a_model_and_its_optimizer_go_together() -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    weight = weakref.ref(model.weight)
    assert [held.name for held in ipygpumem.release(model).left] == ["model.weight", "model.bias"]
    assert weight() is not None  # the optimizer's
    with pytest.raises(GpuMemError, match=r"local schedule\.optimizer would find `optimizer` empty"):
        ipygpumem.release(optimizer)
    assert weight() is not None
    ipygpumem.release(optimizer, schedule)
    assert weight() is None
    with pytest.raises(ReleasedError, match="`schedule` was released"):
        schedule.step()


def test_a_data_loaders_workers_end_with_it() -> None:
    loader = torch.utils.data.DataLoader(Ones(), num_workers=2, persistent_workers=True)
    assert len(list(loader)) == 8
    assert len(multiprocessing.active_children()) == 2
    threads = threading.active_count()
    assert ipygpumem.release(loader).workers == 2
    assert multiprocessing.active_children() == []
    assert threading.active_count() <= threads


@pytest.mark.parametrize("kind", [Slotted, Abstract])
def test_objects_with_slots_and_of_abstract_classes_become_shells_too(kind: Any) -> None:
    item = kind()
    item.part = torch.ones(64)
    assert ipygpumem.release(item).freed_bytes == 64 * 4
    with pytest.raises(ReleasedError, match="`item` was released"):
        item.part  # noqa: B018
    with pytest.raises(ReleasedError):
        item.step()
    assert item == item
    assert "`item` was released" in f"{item}"


def test_objects_that_share_their_attributes_lose_none() -> None:
    state: dict[str, Any] = {}

    class Shared:
        def __init__(self) -> None:
            self.__dict__ = state

    one, other = Shared(), Shared()
    one.weight = torch.ones(8)
    ipygpumem.release(one)
    assert other.weight.sum() == 8
    with pytest.raises(ReleasedError):
        one.weight  # noqa: B018


def test_an_objects_own_finaliser_runs_once_as_at_its_end() -> None:
    ended: list[str] = []
    item = Finishing(ended)
    ipygpumem.release(item)
    assert ended == ["ended"]
    del item
    gc.collect()
    assert ended == ["ended"]


@pytest.mark.parametrize(
    ("made_of", "place"),
    [
        (nn.Sequential, "user.0"),
        (lambda item: [item], "user[0]"),
        (lambda item: item, "user"),
        (lambda item: item.forward, "user: bound method forward"),
        (lambda item: torch.compile(item, backend="eager"), "user._orig_mod"),
        (lambda item: lambda: item, "user: closure of function <lambda>"),
    ],
)
def test_an_object_that_something_else_needs_is_refused_and_nothing_goes(made_of: Any, place: str) -> None:
    item = nn.Linear(4, 4)
    user = made_of(item)
    with pytest.raises(
        GpuMemError, match=rf", local {re.escape(place)}.* would find `item` empty: release both, or"
    ) as raised:
        ipygpumem.release(item)
    assert "\n" not in str(raised.value)
    item(torch.ones(1, 4))
    del user, raised
    assert ipygpumem.release(item).names == ("item",)


def test_what_only_passes_an_object_on_or_goes_too_does_not_count() -> None:
    def passed_on(*items: Any) -> Any:
        return ipygpumem.release(*items)

    part = nn.Linear(4, 4)
    whole = nn.Sequential(part)
    assert passed_on(part, whole).freed_bytes == (4 * 4 + 4) * 4


def test_a_script_calls_its_own_names_main() -> None:
    code = """
import multiprocessing, ipygpumem
class Item: pass
item = same = Item()
try:
    ipygpumem.release(item)
except ipygpumem.errors.GpuMemError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("module __main__, global same would find `item` empty")


@pytest.mark.parametrize(
    ("item", "why"),
    [
        (None, "cannot be emptied"),
        (3, "cannot be emptied"),
        ("text", "cannot be emptied"),
        (torch, "cannot be emptied"),
        (Learner, "cannot be emptied"),
        (len, "cannot be emptied"),
        (Learner.step, "cannot be emptied"),
        (torch.Size([1]), "cannot be emptied"),
        (Registered(), "cannot be emptied"),
        (Colour.RED, "cannot be emptied"),
        (threading.Event(), "cannot be emptied"),
        ((number for number in range(3)), "cannot be emptied"),
        (torch.ones(3), "has nothing to empty"),
        (numpy.ones(3), "has nothing to empty"),
        (Garbage(), "it is a part of ipygpumem"),
        ([torch.ones(3)], "cannot be emptied"),
        (collections.OrderedDict(first=torch.ones(3)), "cannot be emptied"),
    ],
)
def test_what_cannot_be_released_is_refused_in_one_line_and_nothing_goes(item: Any, why: str) -> None:
    learner = Learner()
    with pytest.raises(GpuMemError, match=why) as raised:
        ipygpumem.release(learner, item)
    assert "\n" not in str(raised.value)
    assert learner.learner is learner
    learner.step()


def test_a_released_object_cannot_be_released_again() -> None:
    learner = Learner()
    ipygpumem.release(learner)
    with pytest.raises(GpuMemError, match="`learner` was released"):
        ipygpumem.release(learner)
    with pytest.raises(GpuMemError, match="release takes the objects"):
        ipygpumem.release()


# -- moving -----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Tied weights, an RNN's flat ones, buffers of which one is a view, and a tensor that is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.rnn = nn.LSTM(8, 8, 2)
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("every_other", torch.arange(20.0)[1::2])
        self.low = nn.Parameter(torch.randn(4).to(torch.bfloat16), requires_grad=False)
        self.waves = torch.randn(3, dtype=torch.complex64)
        self.masks = [torch.arange(5) > 2]

    def forward(self, rows: Any) -> Any:
        return self.norm(self.second(self.first(rows).sigmoid()))


class Trained:
    """A network in the middle of a training, and views of what it has."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.randn(4, 16)).square().sum().backward()
        self.optimizer.step()
        self.view = self.model.first.weight.detach()[3:5].t()
        self.garbage = Garbage()

    def tensors(self) -> list[Any]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        grads = [item.grad for item in self.model.parameters() if item.grad is not None]
        plain = [self.model.waves, *self.model.masks, self.view]
        return [*self.model.parameters(), *self.model.buffers(), *grads, *states, *plain]

    def looks(self) -> list[Any]:
        """What must not change."""
        return [
            (
                id(item),
                item._version,
                item.requires_grad,
                item.is_leaf,
                item.stride(),
                item.storage_offset(),
                item.dtype,
            )
            for item in self.tensors()
        ]

    def values(self) -> list[bytes]:
        return [
            item.detach().clone().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for item in self.tensors()
        ]

    def shared(self) -> list[list[int]]:
        """Which tensors share a storage."""
        keys = [item.untyped_storage()._cdata for item in self.tensors()]
        return [[place for place, other in enumerate(keys) if other == key] for key in keys]

    def purge(self, **options: Any) -> PurgeRecord:
        return purge(self.model, self.optimizer, traces.of_script().meter, self.garbage, devices=HERE, **options)


@pytest.fixture
def trained() -> Trained:
    return Trained()


@pytest.fixture
def was(trained: Trained) -> Iterator[None]:
    """Hold all that a training has against what it was before the test."""
    before = trained.looks(), trained.shared(), trained.values()
    yield
    assert trained.looks() == before[0]
    assert trained.shared() == before[1]
    assert trained.values() == before[2]


@pytest.mark.usefixtures("was")
def test_what_is_no_tensor_of_a_module_is_not_asked_anything(trained: Trained) -> None:
    vars(trained.model)["thing"] = hostile.made(hostile.Hostile)
    with hostile.untouched():
        assert trained.purge().moved_bytes > 0
        with Offload([trained.model], trained.garbage, HERE):
            pass


@pytest.mark.usefixtures("was")
def test_a_purge_moves_every_storage_and_brings_it_back_as_it_was(trained: Trained) -> None:
    emptied: list[int] = []
    trained.model.first.weight.register_hook(lambda gradient: gradient)
    resized = moving.Moving.empty

    def noting(self: moving.Moving) -> None:
        resized(self)
        emptied.extend(item.untyped_storage().nbytes() for item in trained.tensors())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moving.Moving, "empty", noting)
        record = trained.purge()
    assert set(emptied) == {0}  # it was away
    storages = {item.untyped_storage()._cdata: item.untyped_storage().nbytes() for item in trained.tensors()}
    assert record.moved_bytes == sum(storages.values())
    assert not record.is_on_host
    assert record.notes == ()


def test_a_training_goes_on_after_a_purge_as_without_one() -> None:
    results = []
    for purged in (False, True):
        trained = Trained()
        loss = trained.model(torch.ones(4, 16)).square().sum()  # a graph that is alive meanwhile
        if purged:
            trained.purge()
            with Offload([trained.model, trained.optimizer], trained.garbage, HERE):
                pass
        loss.backward()
        trained.optimizer.step()
        results.append(trained.values())
    assert results[0] == results[1]


def test_a_purge_may_drop_the_optimizers_state(trained: Trained) -> None:
    weights = trained.model.first.weight.detach().clone()
    trained.purge(keep_optimizer=False)
    assert len(trained.optimizer.state) == 0
    assert torch.equal(trained.model.first.weight, weights)
    trained.optimizer.step()


def test_what_does_not_fit_back_stays_on_the_host_whole_and_usable(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, shared = trained.values(), trained.shared()
    fill, tries = moving._Piece.fill, list[int]()

    def fails(self: Any) -> None:
        fill(self)
        tries.append(1)
        if len(tries) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB.\nMore.")

    monkeypatch.setattr(moving._Piece, "fill", fails)
    record = trained.purge()
    assert record.is_on_host
    assert record.notes == ("it did not fit back, and stays on the host: CUDA out of memory",)
    assert (trained.values(), trained.shared()) == (values, shared)
    trained.model(torch.ones(4, 16)).sum().backward()
    trained.optimizer.step()


@pytest.mark.usefixtures("was")
@pytest.mark.parametrize("step", ["copy_out", "empty", "fill"])
def test_a_ctrl_c_during_a_purge_comes_when_all_is_back(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    done = getattr(moving._Piece, step)
    struck: list[int] = []

    def strikes(self: Any) -> None:
        done(self)
        if not struck:
            struck.append(1)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(moving._Piece, step, strikes)
    with pytest.raises(KeyboardInterrupt):
        trained.purge()
    assert struck


@pytest.mark.usefixtures("was")
def test_memory_that_other_code_shows_is_not_emptied(trained: Trained) -> None:
    capsule = torch.utils.dlpack.to_dlpack(trained.model.first.weight.detach())
    record = trained.purge()
    assert record.notes == ("1 KiB stay where they are: a graph or another library uses that memory too",)
    other = torch.utils.dlpack.from_dlpack(capsule)
    assert torch.equal(other, trained.model.first.weight)
    assert other.data_ptr() == trained.model.first.weight.data_ptr()


@pytest.mark.usefixtures("was")
def test_nothing_is_moved_if_the_host_has_no_room(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "available_bytes", lambda: 1000)
    with pytest.raises(GpuMemError, match=r"would go to the host, which has 1000 B free: nothing was moved$"):
        trained.purge(keep_optimizer=False)
    with pytest.raises(GpuMemError, match="nothing was moved"), Offload([trained.model], trained.garbage, HERE):
        raise AssertionError


@pytest.mark.usefixtures("was")
def test_inside_offload_tensors_are_elsewhere_and_behind_it_they_are_back(trained: Trained) -> None:
    homes = [item.untyped_storage() for item in trained.tensors()]
    values, shared = trained.values(), trained.shared()
    with Offload([trained.model, trained.optimizer], trained.garbage, HERE):
        assert {storage.nbytes() for storage in homes} == {0}
        assert (trained.values(), trained.shared()) == (values, shared)
    assert [item.untyped_storage()._cdata for item in trained.tensors()] == [item._cdata for item in homes]


@pytest.mark.usefixtures("was")
def test_a_model_comes_back_after_an_error_and_a_ctrl_c_inside_offload(trained: Trained) -> None:
    home = trained.model.low.untyped_storage()
    for error in (ValueError, KeyboardInterrupt):
        away = []
        with pytest.raises(error), Offload([trained.model], trained.garbage, HERE):  # noqa: PT012  # it is inside
            away.append(home.nbytes())
            raise error
        assert (away, home.nbytes()) == ([0], 8)


@pytest.mark.usefixtures("was")
@pytest.mark.parametrize("step", ["copy_out", "empty", "fill"])
def test_a_ctrl_c_while_offload_moves_comes_when_all_is_at_home(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    homes = [item.untyped_storage()._cdata for item in trained.tensors()]
    done = getattr(moving._Piece, step)
    entered: list[int] = []

    def strikes(self: Any) -> None:
        done(self)
        monkeypatch.setattr(moving._Piece, step, done)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(moving._Piece, step, strikes)
    with pytest.raises(KeyboardInterrupt), Offload([trained.model, trained.optimizer], trained.garbage, HERE):
        entered.append(1)
    assert len(entered) == (step == "fill")
    assert [item.untyped_storage()._cdata for item in trained.tensors()] == homes


@pytest.mark.usefixtures("was")
def test_offload_brings_everything_home_if_a_tensor_cannot_be_pointed_elsewhere(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    point, places = moving._point, list[Any]()

    def fails(tensor: Any, storage: Any) -> None:
        places.append(storage)
        if len(places) == 3:
            raise RuntimeError("no such tensor")
        point(tensor, storage)

    monkeypatch.setattr(moving, "_point", fails)
    with pytest.raises(RuntimeError, match="no such tensor"):
        Offload([trained.model, trained.optimizer], trained.garbage, HERE).__enter__()
    homes = {item.untyped_storage()._cdata for item in trained.tensors()}
    assert homes.isdisjoint(storage._cdata for storage in places[:3])


def test_inference_mode_makes_no_other_tensors_of_those_that_are_moved(trained: Trained) -> None:
    with torch.inference_mode():
        trained.model.register_buffer("frozen", torch.ones(4))
        trained.purge()
        with Offload([trained.model, trained.optimizer], trained.garbage, HERE):
            pass
    assert trained.model.frozen.is_inference()
    with Offload([trained.model, trained.optimizer], trained.garbage, HERE):
        pass
    assert trained.model.frozen.is_inference()
    assert not any(item.is_inference() for item in trained.model.parameters())


def test_what_is_done_inside_offload_is_kept(trained: Trained) -> None:
    with Offload([trained.model, trained.optimizer], trained.garbage, HERE):
        trained.optimizer.step()
        expected = trained.values()
        with torch.no_grad():
            shown = trained.model.every_other.numpy()  # a NumPy array shows the host's memory
        first = shown.copy()
    assert trained.values() == expected
    gc.collect()
    assert (shown == first).all()


def test_what_does_not_fit_behind_offload_stays_on_the_host_and_a_warning_says_so(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = trained.values()
    offloaded = Offload([trained.model, trained.optimizer], trained.garbage, HERE)
    offloaded.__enter__()

    def fails(self: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB.")

    monkeypatch.setattr(moving._Piece, "fill", fails)
    with pytest.warns(RuntimeWarning, match=r"stay on the host: they did not fit back \(CUDA out of memory\)"):
        offloaded.__exit__(None, None, None)
    assert trained.values() == values
    trained.optimizer.step()


def test_sparse_quantized_and_meta_tensors_stay_where_they_are(trained: Trained) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("sparse", torch.eye(4).to_sparse())
    model.register_buffer("quantized", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8))
    model.register_buffer("nowhere", torch.ones(4, device="meta"))
    record = purge(model, None, traces.of_script().meter, trained.garbage, devices=HERE)
    assert record.moved_bytes == 4 * 4 * 4 + 4 * 4
    assert torch.equal(model.sparse.to_dense(), torch.eye(4))
    assert record.notes == ()


def test_a_model_on_the_host_has_nothing_to_move() -> None:
    model = nn.Linear(4, 4)
    record = ipygpumem.purge(model)
    assert (record.moved_bytes, record.notes) == (0, ("no parameter, buffer or gradient of it is on a device",))
    with ipygpumem.offload(model):
        assert model.weight.device.type == "cpu"


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: ipygpumem.purge(3), "purge takes a torch module here, and not int"),
        (lambda: ipygpumem.purge(Learner()), "purge takes a torch module here, and not Learner"),
        (lambda: ipygpumem.purge(nn.ReLU(), 3), "purge takes an optimizer of torch's here, and not int"),
        (lambda: ipygpumem.purge(nn.ReLU(), keep_optimizer=False), "no optimizer whose state"),
        (lambda: ipygpumem.offload(), "offload takes a torch module"),
        (lambda: ipygpumem.offload(3), "offload takes a torch module here, and not int"),
        (lambda: ipygpumem.offload(nn.ReLU(), 3), "offload takes an optimizer"),
    ],
)
def test_what_cannot_be_moved_is_refused_in_one_line(call: Any, why: str) -> None:
    with pytest.raises(GpuMemError, match=why) as raised:
        call()
    assert "\n" not in str(raised.value)
