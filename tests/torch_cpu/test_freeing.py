"""Freeing by hand: what is released goes, what others hold stays, what is moved comes back; nothing
in traced code.
"""

import contextlib
import enum
import gc
import re
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ipygpumem
from ipygpumem.errors import GpuMemError, ReleasedError
from ipygpumem.extras.moving import moving
from ipygpumem.extras.moving.moving import Offload, PurgeRecord
from ipygpumem.heap.live.garbage import Garbage
from tests import hostile


class Learner:
    def __init__(self) -> None:
        self.model = nn.Linear(256, 256)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.learner = self
        self.step()

    def step(self) -> None:
        self.model(torch.ones(2, 256)).sum().backward()
        self.optimizer.step()


class Slotted:
    """Has no dict of attributes."""

    __slots__ = ("part",)


class Finishing:
    """Has a finaliser, which must run at its end."""

    def __del__(self) -> None:
        pass


class Colour(enum.Enum):
    """Objects that are always there."""

    RED = 1


def test_release_frees_a_trainer_with_cycles_and_lists_its_parts() -> None:
    learner = Learner()
    watched = [
        weakref.ref(learner.model),
        weakref.ref(learner.model.weight),
        weakref.ref(learner.optimizer),
    ]
    gc.disable()
    try:
        record = ipygpumem.release(learner)
        assert [item() for item in watched] == [None] * 3
    finally:
        gc.enable()
    parameters = 256 * 256 * 4 + 256 * 4
    sizes = {held.name: held.size_bytes for held in record.freed_parts}
    assert sizes == {"learner.model": 2 * parameters, "learner.optimizer": 2 * parameters + 2 * 4}
    assert record.freed_bytes == sum(sizes.values())
    assert record.left == ()


def test_release_leaves_parts_with_other_holders_and_names_them() -> None:
    learner = Learner()
    other = nn.Linear(256, 256)
    other.weight = learner.model.weight  # tied
    values = other.weight.detach().clone()
    record = ipygpumem.release(learner)
    assert torch.equal(other.weight, values)
    (held,) = record.left
    assert (held.name, held.size_bytes) == ("learner.model", 2 * 256 * 256 * 4)  # and its gradient
    assert held.holder is not None
    assert "local other" in held.holder.path


def test_a_released_object_says_where_it_was_released() -> None:
    learner = Learner()
    record = ipygpumem.release(learner)
    assert record.where.startswith("test_freeing.py line ")

    # Each use of it says so.
    uses = {lambda: learner.model: ReleasedError, lambda: learner(): ReleasedError}
    uses[lambda: ipygpumem.release(learner)] = GpuMemError
    for use, kind in uses.items():
        with pytest.raises(kind) as raised:
            use()
        assert str(raised.value) == f"`learner` was released by ipygpumem at {record.where}"
        assert repr(learner) == f"<{raised.value}>"
    other = Learner()  # with one that is still to be released, it is skipped
    record = ipygpumem.release(learner, other)
    assert record.names == ("other",)
    assert "learner was released before" in str(record)
    assert not hasattr(learner, "model")  # tools that look at all objects
    assert dir(learner) == []
    assert learner in [learner]
    assert not isinstance(learner, nn.Module)


def test_a_data_loader_can_be_released() -> None:
    """It is of a generic class, which has another room for attributes than a plain one: it keeps
    its class.
    """
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 3)))
    list(loader)
    assert ipygpumem.release(loader).freed_bytes == 8 * 3 * 4
    with pytest.raises(AttributeError):
        iter(loader)
    with pytest.raises(GpuMemError, match="`loader` was released by ipygpumem at "):
        ipygpumem.release(loader)


@pytest.mark.parametrize(
    ("item", "why"),
    [
        (3, "cannot be emptied"),
        (Slotted(), "cannot be emptied"),
        (Finishing(), "cannot be emptied"),
        (torch, "cannot be emptied"),
        (Colour.RED, "cannot be emptied"),
        (threading.Event(), "cannot be emptied"),
        (torch.ones(3), "has nothing to empty"),
        (numpy.ones(3), "has nothing to empty"),
        (Garbage(), "it is a part of ipygpumem"),
        ([torch.ones(3)], "cannot be emptied"),
    ],
)
def test_objects_that_cannot_be_released_are_refused_in_one_line(item: Any, why: str) -> None:
    learner = Learner()
    with pytest.raises(GpuMemError, match=why) as raised:
        ipygpumem.release(learner, item)
    assert "\n" not in str(raised.value)
    assert learner.learner is learner
    learner.step()


class Net(nn.Module):
    """Tied weights, an RNN's flat ones, buffers of which one is a view, and a tensor that is a
    plain attribute.
    """

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

    def all(self) -> list[Any]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        grads = [item.grad for item in self.model.parameters() if item.grad is not None]
        plain = [self.model.waves, *self.model.masks, self.view]
        return [*self.model.parameters(), *self.model.buffers(), *grads, *states, *plain]

    def looks(self) -> list[Any]:
        return [
            (id(x), x._version, x.requires_grad, x.is_leaf, x.stride(), x.storage_offset(), x.dtype)
            for x in self.all()
        ]

    def values(self) -> list[bytes]:
        return [
            x.detach().clone().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            for x in self.all()
        ]

    def shared(self) -> list[list[int]]:
        keys = [item.untyped_storage()._cdata for item in self.all()]
        return [[place for place, other in enumerate(keys) if other == key] for key in keys]

    def offload(self) -> Offload:
        return Offload([self.model, self.optimizer])

    def purge(self) -> PurgeRecord:
        return ipygpumem.purge(self.model, self.optimizer)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Storages on the host are moved as a device's would be: to other memory of the
    host, and back.
    """
    monkeypatch.setattr(moving, "DEVICES", ("cpu",))
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
def test_an_offload_runs_no_code_of_other_objects_in_a_module(trained: Trained) -> None:
    vars(trained.model)["thing"] = hostile.made(hostile.Hostile)
    with hostile.untouched():
        assert trained.purge().moved_bytes > 0
        with Offload([trained.model]):
            pass


@pytest.mark.usefixtures("was")
def test_an_offload_moves_every_storage_and_restores_it(trained: Trained) -> None:
    trained.model.first.weight.register_hook(lambda gradient: gradient)
    homes = [item.untyped_storage() for item in trained.all()]
    sizes = {storage._cdata: storage.nbytes() for storage in homes}
    values = trained.values()
    shared = trained.shared()

    # Inside the block the storages are empty; after it, with or without an error, all is back.
    for error in (None, ValueError, KeyboardInterrupt):
        with contextlib.suppress(ValueError, KeyboardInterrupt), trained.offload():
            assert {storage.nbytes() for storage in homes} == {0}
            assert (trained.values(), trained.shared()) == (values, shared)
            if error is not None:
                raise error
        assert {item.untyped_storage()._cdata for item in trained.all()} == sizes.keys()

    # A purge does the same at once.
    record = trained.purge()
    assert record.moved_bytes == sum(sizes.values())
    assert not record.is_on_host
    assert record.notes == ()


def test_a_model_that_does_not_fit_back_works_on_the_host(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = trained.values()
    shared = trained.shared()
    fill = moving._MovedPiece.fill
    tries = list[int]()

    def fails(self: Any) -> None:
        fill(self)
        tries.append(1)
        if len(tries) % 3 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB.\nMore.")

    # A card on which the third piece of each try does not fit.
    monkeypatch.setattr(moving._MovedPiece, "fill", fails)
    with pytest.warns(RuntimeWarning, match="stay on the host"):
        record = trained.purge()
    assert record.is_on_host
    (note,) = record.notes
    why = (
        "stay on the host: they did not fit back (CUDA out of memory). To move them, call "
        "model.to(device)"
    )
    assert note.endswith(why)

    # The same as a context, in which the values stay the same.
    with pytest.warns(RuntimeWarning, match=re.escape(why)), trained.offload():
        pass
    assert (trained.values(), trained.shared()) == (values, shared)

    # It trains on the host.
    trained.model(torch.ones(4, 16)).sum().backward()
    trained.optimizer.step()


@pytest.mark.usefixtures("was")
def test_memory_that_other_code_shows_is_not_emptied(trained: Trained) -> None:
    capsule = torch.utils.dlpack.to_dlpack(trained.model.first.weight.detach())
    record = trained.purge()
    assert record.notes == (
        "1 KiB stay on the device as well: a graph or another library uses that memory",
    )
    other = torch.utils.dlpack.from_dlpack(capsule)
    assert torch.equal(other, trained.model.first.weight)
    assert other.data_ptr() == trained.model.first.weight.data_ptr()


@pytest.mark.usefixtures("was")
def test_nothing_is_moved_if_the_host_has_no_room(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "available_bytes", lambda: 1000)
    with pytest.raises(
        GpuMemError, match=r"would be moved to the host, which has 1000 B free: nothing was moved$"
    ):
        trained.purge()
    with pytest.raises(GpuMemError, match="nothing was moved"), Offload([trained.model]):
        raise AssertionError


@pytest.mark.usefixtures("was")
@pytest.mark.parametrize("step", ["copy_out", "empty", "fill"])
def test_a_ctrl_c_during_an_offload_comes_after_it(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    homes = [item.untyped_storage()._cdata for item in trained.all()]
    done = getattr(moving._MovedPiece, step)
    entered: list[int] = []

    def strikes(self: Any) -> None:
        done(self)
        monkeypatch.setattr(moving._MovedPiece, step, done)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(moving._MovedPiece, step, strikes)
    with pytest.raises(KeyboardInterrupt), trained.offload():
        entered.append(1)
    assert len(entered) == (step == "fill")
    assert [item.untyped_storage()._cdata for item in trained.all()] == homes


def test_purge_and_offload_keep_inference_tensors(trained: Trained) -> None:
    with torch.inference_mode():
        trained.model.register_buffer("frozen", torch.ones(4))
        trained.purge()
        with trained.offload():
            pass
    assert trained.model.frozen.is_inference()
    with trained.offload():
        pass
    assert trained.model.frozen.is_inference()
    assert not any(item.is_inference() for item in trained.model.parameters())


def test_an_offload_that_has_ended_keeps_no_model_alive() -> None:
    model = nn.Linear(2, 2)
    alive = weakref.ref(model)
    away = ipygpumem.offload(model)
    for _ in range(2):
        with pytest.raises(ValueError, match="x"), away:
            raise ValueError("x")
    del model
    gc.collect()
    assert alive() is None
    with pytest.raises(GpuMemError, match="was deleted: call ipygpumem"):
        away.__enter__()


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (
            lambda: ipygpumem.purge(Learner()),
            "purge takes a torch module and its optimizer, and not Learner",
        ),
        (lambda: ipygpumem.offload(), "offload takes a torch module"),
        (
            lambda: ipygpumem.offload(nn.ReLU(), 3),
            "offload takes a torch module and its optimizer, and not int",
        ),
    ],
)
def test_objects_that_cannot_be_moved_are_refused_in_one_line(call: Any, why: str) -> None:
    with pytest.raises(GpuMemError, match=why) as raised:
        call()
    assert "\n" not in str(raised.value)


Code = Callable[[], object]


@pytest.fixture(autouse=True)
def _memory_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "DEVICES", ("cpu",))  # within the host, as a device's would be


def compiled(code: Code) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        code()
        return x * 2

    torch.compile(function, backend="eager")(torch.ones(2))


def inside_fake(code: Code) -> None:
    with FakeTensorMode():
        code()


def inside_backward(code: Code) -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def hook(gradient: torch.Tensor) -> None:
        code()

    y.register_hook(hook)
    y.sum().backward()


def traced(code: Code) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        code()
        return x * 2

    torch.jit.trace(function, torch.ones(2), check_trace=False)


TRACED: dict[str, Callable[[Code], object]] = {"jit": traced, "compile": compiled}


class Box:
    def __init__(self, model: object) -> None:
        self.model = model


def release(model: Any, optimizer: Any) -> None:
    box = Box(model)
    ipygpumem.release(box)


def offload(model: Any, optimizer: Any) -> None:
    with ipygpumem.offload(model, optimizer):
        pass


MOVES: dict[str, Callable[[Any, Any], object]] = {
    "purge": ipygpumem.purge,
    "offload": offload,
    "estimate": lambda model, optimizer: ipygpumem.estimate(lambda: model(torch.ones(1, 4))),
    "summary": lambda model, optimizer: ipygpumem.summary(model, torch.ones(1, 4)),
}
LOOKS: dict[str, Callable[[Any, Any], object]] = {
    "release": release,
    "tensors": lambda model, optimizer: ipygpumem.tensors(),
    "diff": lambda model, optimizer: ipygpumem.diff(ipygpumem.tensors(), ipygpumem.tensors()),
    "tracker": lambda model, optimizer: ipygpumem.tracker(silent=True).track(),
}


def result_or_refusal(inside: Callable[[Code], object], call: Callable[[Any, Any], object]) -> str:
    """Ask for something there, and return what it said; the model is what it was, and torch is out
    of it again.
    """
    model = torch.nn.Linear(4, 4)
    optimizer: Any = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    before = [
        item.clone() for item in (*model.parameters(), optimizer.state[model.weight]["exp_avg"])
    ]
    said = list[str]()

    def code() -> None:
        try:
            call(model, optimizer)
            said.append("")
        except GpuMemError as error:
            said.append(str(error))

    inside(code)
    after = (*model.parameters(), optimizer.state[model.weight]["exp_avg"])
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    return said[0]


@pytest.mark.usefixtures("others_out_of_sight")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inside", TRACED)
@pytest.mark.parametrize("name", [*MOVES, *LOOKS])
def test_freeing_is_refused_while_torch_traces_code(inside: str, name: str) -> None:
    """A release ended the process inside of ``torch.jit.trace``."""
    message = result_or_refusal(TRACED[inside], {**MOVES, **LOOKS}[name])
    assert message.startswith("torch is tracing this code")
    assert message.endswith("outside of it")


@pytest.mark.usefixtures("others_out_of_sight")
@pytest.mark.parametrize(
    ("inside", "names"), [(inside_fake, [*MOVES, "tensors"]), (inside_backward, [*MOVES, *LOOKS])]
)
def test_all_works_among_fake_tensors_and_in_backward(
    inside: Callable[[Code], object], names: list[str]
) -> None:
    assert {
        name: result_or_refusal(inside, {**MOVES, **LOOKS}[name]) for name in names
    } == dict.fromkeys(names, "")
