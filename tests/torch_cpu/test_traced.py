"""What is asked for inside of code that torch traces or compiles is refused in one line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ipygpumem
from ipygpumem.errors import GpuMemError
from ipygpumem.extras.moving import moving

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
    y.register_hook(lambda gradient: (code(), None)[1])
    y.sum().backward()


TRACED: dict[str, Callable[[Code], object]] = {
    "jit": lambda code: torch.jit.trace(lambda x: (code(), x * 2)[1], torch.ones(2), check_trace=False),
    "compile": compiled,
}


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


def asked(inside: Callable[[Code], object], call: Callable[[Any, Any], object]) -> str:
    """Ask for something there, and return what it said; the model is what it was, and torch is out of it again."""
    model = torch.nn.Linear(4, 4)
    optimizer: Any = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    before = [item.clone() for item in (*model.parameters(), optimizer.state[model.weight]["exp_avg"])]
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inside", TRACED)
@pytest.mark.parametrize("name", [*MOVES, *LOOKS])
def test_what_torch_would_take_for_the_users_code_is_refused_in_one_line(inside: str, name: str) -> None:
    """A release ended the process inside of ``torch.jit.trace``."""
    message = asked(TRACED[inside], {**MOVES, **LOOKS}[name])
    assert message.startswith("torch is tracing this code")
    assert message.endswith("outside of it")


@pytest.mark.parametrize(("inside", "names"), [(inside_fake, [*MOVES, "tensors"]), (inside_backward, [*MOVES, *LOOKS])])
def test_all_of_it_works_among_fake_tensors_and_in_a_backward_pass(
    inside: Callable[[Code], object], names: list[str]
) -> None:
    assert {name: asked(inside, {**MOVES, **LOOKS}[name]) for name in names} == dict.fromkeys(names, "")
