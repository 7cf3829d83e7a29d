"""``%%peak`` on the CPU: what lived at the highest moment, by name, origin and purpose; code runs
as without it.
"""

import contextlib
import gc
import importlib.util
import json
import re
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _python_dispatch as dispatch
from torch.utils.checkpoint import checkpoint

import ipygpumem
from benchmarks.harness.kernel import Kernel
from ipygpumem.extras.peak import following, graph, origins
from ipygpumem.extras.peak.origins import CallingCode
from ipygpumem.extras.peak.records import DevicePeak, PeakRecord, PeakRow
from ipygpumem.extras.peak.report import layers, peak_report
from ipygpumem.introspect import is_ours
from ipygpumem.probes.malloc import trim_heap
from ipygpumem.units import KIB, MIB, format_bytes
from tests.alone import printed
from tests.steps import dedented, run_cells, run_quietly

pytestmark = pytest.mark.usefixtures("others_out_of_sight")


class Square(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone() ** 2


def train(model: nn.Module, data: torch.Tensor, steps: int = 2) -> torch.optim.Adam:
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(data).sum().backward()
        optimizer.step()
    return optimizer


def ram(peak: Any) -> DevicePeak:
    (device,) = [device for device in peak.record.devices if device.source == "storages"]
    assert device.device == "cpu"
    assert sum(row.size_bytes for row in device.rows) == device.size_bytes
    return device


def two_layers() -> tuple[nn.Module, torch.Tensor]:
    """Return a model with two weights of 1 MiB, and half a MiB of data."""
    model = nn.Sequential(nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False))
    return model, torch.ones(512, 256)


def test_a_training_steps_peak_is_split_by_role() -> None:
    model, data = two_layers()
    with ipygpumem.peak() as peak:
        optimizer = train(model, data)
    device = ram(peak)
    assert device.parts["parameters"] == 2 * MIB
    assert device.parts["optimizer state"] == 4 * MIB + 2 * 512  # and the steps of two weights
    # the first layer's result, the loss, its gradient
    assert device.parts["activations"] == 2 * MIB + 2 * 512
    sizes = {(row.role, row.module or row.name): row.size_bytes for row in device.rows}
    assert sizes["parameters", "model.1"] == sizes["gradients", "model.1"] == MIB
    assert sizes["optimizer state", "model.1"] == 2 * MIB + 512
    assert sizes["data", "data"] == MIB // 2
    assert optimizer.state


def test_the_curve_of_a_training_step_reaches_the_peak() -> None:
    model, data = two_layers()
    with ipygpumem.peak() as peak:
        train(model, data)
    device = ram(peak)
    assert device.curve[-1].seconds <= peak.record.duration_seconds
    assert max(sum(point.parts.values()) for point in device.curve) == device.size_bytes


def test_a_measured_training_step_leaves_no_mode_and_no_hook() -> None:
    model, data = two_layers()
    with ipygpumem.peak():
        train(model, data)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not following.register_optimizer_step_pre_hook.__globals__["_global_optimizer_pre_hooks"]


def test_each_block_of_a_transformer_has_a_row() -> None:
    block = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    model = nn.TransformerEncoder(block, 12, enable_nested_tensor=False)
    data = torch.ones(8, 32, 64)
    with ipygpumem.peak() as peak:
        train(model, data)
    groups = layers(ram(peak).rows, 20)
    sizes = {
        ".".join(key): sum(row.size_bytes for row in rows)
        for key, rows in groups.items()
        if type(key[-1]) is str
    }
    assert {f"model.layers.{number}" for number in range(12)} <= sizes.keys()
    shown = sorted((sum(row.size_bytes for row in rows) for rows in groups.values()), reverse=True)[
        :20
    ]
    assert sum(shown) >= 0.9 * ram(peak).size_bytes


def test_a_long_list_of_layers_is_summed_by_its_parts() -> None:
    parts = [
        (role, f"net.blocks.{n}.{part}")
        for n in range(40)
        for part in ("a", "b")
        for role in ("x", "y")
    ]
    rows = [PeakRow(MIB, role, module=module) for role, module in parts]
    rows.append(PeakRow(3 * MIB, "data", operation="ones", line="line 1: f()"))
    device = DevicePeak("cpu", "storages", 163 * MIB, rows=tuple(rows))
    text = str(PeakRecord((device,), 1.0))
    assert "80 MiB          net.blocks.*.a (40 layers)" in text
    assert "3 MiB   data   ones, line 1: f()" in text
    assert set(layers(rows, 100)) >= {("net", "blocks", "7", "a"), ("net", "blocks", "39", "b")}
    # and the smaller ones
    assert len(peak_report(PeakRecord((device,), 1.0), top=1).tables[-1].rows) == 2


def test_a_value_that_the_code_replaces_has_its_name() -> None:
    value = torch.ones(MIB)
    with ipygpumem.peak() as peak:
        value = value.repeat(2)
    assert {row.name: row.size_bytes for row in ram(peak).rows} == {
        "value": 8 * MIB,
        "value (earlier value)": 4 * MIB,
    }
    assert value.numel() == 2 * MIB
    model = nn.Linear(1024, 1024)
    model(torch.ones(1024)).sum().backward()
    with ipygpumem.peak() as peak:
        model = nn.Sequential(nn.Linear(1024, 1024))
    rows = {
        (row.role, row.name or row.module): row.size_bytes
        for row in ram(peak).rows
        if row.size_bytes > MIB
    }
    earlier = "model (earlier value)"
    assert rows.keys() >= {
        ("parameters", earlier),
        ("gradients", earlier),
        ("parameters", "model.0"),
    }
    assert model[0].in_features == 1024


class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.exp())
        return x + 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0]


def test_tensors_saved_by_a_custom_function_are_activations() -> None:
    x = torch.ones(MIB, requires_grad=True)
    with ipygpumem.peak() as peak:
        Keeping.apply(x).sum().backward()
    assert ("activations", "exp") in {(row.role, row.operation) for row in ram(peak).rows}
    with ipygpumem.peak() as peak:
        result = Keeping.apply(x.detach())
    assert "activations" not in ram(peak).parts
    assert result.numel() == MIB


class Unhashable(nn.Linear):
    def __eq__(self, other: object) -> bool:
        raise LookupError("users")

    __hash__ = None  # type: ignore[assignment]


def test_modules_are_never_hashed_or_compared() -> None:
    layer = Unhashable(256, 256)
    with ipygpumem.peak() as peak:
        layer(torch.ones(256, 256))
    assert {row.module for row in ram(peak).rows} >= {"layer"}
    assert [note for note in peak.record.notes if "stopped" in note] == []


def test_no_pass_over_the_heap_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took 0.3 s at the start of each block with torch loaded, and once more at its end."""
    visited = list[object]()

    def note(*objects: object) -> list[object]:
        visited.extend(map(type, objects))
        return get_referents(*objects)

    get_referents = gc.get_referents
    monkeypatch.setattr(gc, "get_referents", note)
    model = nn.Linear(256, 256)
    data = torch.ones(64, 256)
    train(model, data)
    with ipygpumem.peak() as peak:
        optimizer = train(model, data)
    monkeypatch.undo()

    # Only the user's names are visited.
    assert len(visited) < 2000  # the user's names; a pass visits every object
    parts = ram(peak).parts
    assert parts["parameters"] == parts["gradients"]
    assert parts["optimizer state"] > parts["parameters"]
    del optimizer


@pytest.mark.parametrize(("code", "passes"), [("x = 1", 1), ("more = torch.ones(9)", 2)])
def test_a_block_without_new_tensors_lists_the_heap_once(
    monkeypatch: pytest.MonkeyPatch, code: str, passes: int
) -> None:
    """The tensors at its end are those of its start."""
    lists = [0]

    def note(*args: object) -> list[object]:
        lists[0] += 1
        return get_objects(*args)  # type: ignore[arg-type]

    model, _ = two_layers()
    held = {"a part": [torch.ones(MIB)]}
    with ipygpumem.peak():  # imports what it needs
        pass
    get_objects = gc.get_objects
    monkeypatch.setattr(gc, "get_objects", note)
    with ipygpumem.peak() as peak:
        exec(code, {"torch": torch})

    # One list of the heap, and the names of what was there before.
    assert lists == [passes]
    owners = {(row.role, row.name or row.module): row.size_bytes for row in ram(peak).rows}
    assert owners["data", 'held["a part"][0]'] == 4 * MIB
    assert owners["parameters", "model.0"] == owners["parameters", "model.1"] == MIB
    del model, held


def test_an_operation_is_followed_with_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of Python functions, whose frames memray follows, too."""
    monkeypatch.setitem(sys.modules, "memray", None)  # it has a profile function of its own
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and is_ours(frame.f_code.co_filename):
            calls[frame.f_code.co_name] += 1

    model, data = two_layers()
    with ipygpumem.peak():
        optimizer = train(model, data)
        sys.setprofile(note)
        try:
            train(model, data)
        finally:
            sys.setprofile(None)
    operations = calls["__torch_dispatch__"]
    # Else the counts below say little.
    assert operations > 50
    # Our own calls, on average for each operation.
    assert calls.total() < 10.5 * operations
    del optimizer


def test_memory_without_a_name_has_its_module_operation_and_line() -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(Square()))
    with torch.no_grad(), ipygpumem.peak() as peak:
        model(torch.ones(MIB))
    rows = [(row.size_bytes, row.name, row.module, row.operation) for row in ram(peak).rows]
    expected = [
        (4 * MIB, "", "", "ones"),
        (4 * MIB, "", "model.1.0", "clone"),
        (4 * MIB, "", "model.1.0", "pow"),
    ]
    assert sorted(rows)[-3:] == sorted(expected)
    lines = {row.operation: row.line for row in ram(peak).rows}
    assert lines["pow"].endswith("return x.clone() ** 2")
    assert "model(torch.ones(MIB))" in lines["ones"]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return x.sigmoid() * 2


def in_backward(peak: Any, least: int = MIB) -> dict[str, str]:
    """Return the lines by the operations of the backward pass that allocated large memory."""
    rows = [row for row in ram(peak).rows if row.size_bytes >= least and not row.module]
    return {row.operation: row.line for row in rows if "backward" in row.operation}


def test_memory_of_backward_has_the_line_of_the_forward_pass() -> None:
    model, data = Layers(), torch.ones(2**14, 64)
    with ipygpumem.peak() as peak:
        model(data).sum().backward()
    lines = in_backward(peak)
    assert lines["mul in backward of model"].endswith("return x.sigmoid() * 2")
    assert lines["sigmoid_backward of model"].endswith("return x.sigmoid() * 2")


def test_an_earlier_cells_graph_has_the_line_that_runs_backward() -> None:
    loss = Layers()(torch.ones(2**14, 64)).sum()
    with ipygpumem.peak() as peak:
        loss.backward()
    rows = {row.operation: row.line for row in ram(peak).rows}
    assert rows["sigmoid_backward"].endswith("loss.backward()")


class OfLibrary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1) + 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        tripled = gradient * 3
        return tripled + 1


def test_a_custom_function_has_the_line_of_its_own_backward_pass() -> None:
    x = torch.ones(MIB, requires_grad=True)
    with ipygpumem.peak() as peak:
        OfLibrary.apply(x).sum().backward()
    rows = {row.operation: row.line for row in ram(peak).rows}
    assert rows["mul"].endswith("tripled = gradient * 3")


def test_a_librarys_custom_function_has_the_line_that_called_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(origins, "is_users", lambda file: file == "users.py")
    run = compile("y = OfLibrary.apply(x)\ny.sum().backward()", "users.py", "exec")
    x = torch.ones(MIB, requires_grad=True)
    with ipygpumem.peak() as peak:
        exec(run, {"OfLibrary": OfLibrary, "x": x})  # code of a file of its own
    (line,) = [row.line for row in ram(peak).rows if row.operation == "mul in backward"]
    assert line.startswith("line 1")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_memory_has_the_line_of_the_original_code(reentrant: bool) -> None:
    model = Layers()
    x = torch.ones(2**14, 64, requires_grad=True)
    with ipygpumem.peak() as peak:
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    lines = in_backward(peak)
    assert lines["mul in backward of model"].endswith("return x.sigmoid() * 2")


def test_a_second_derivative_has_the_line_of_the_forward_pass() -> None:
    x = torch.ones(MIB, requires_grad=True)
    with ipygpumem.peak() as peak:
        y = x.sigmoid().sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        slope.sum().backward()
    lines = in_backward(peak)
    assert {line.endswith("y = x.sigmoid().sum()") for line in lines.values()} == {True}


def test_nodes_of_equal_numbers_of_two_threads_are_told_apart() -> None:
    """Each thread counts its nodes from 0 on; autograd has a thread for each card."""
    nodes, calling_code = graph.FollowedGraph(), CallingCode(line=("own.py", 1))
    nodes.record_node(7, "mul", calling_code)
    with ThreadPoolExecutor(1) as pool:
        number = pool.submit(torch._C._autograd._get_sequence_nr).result()
        thread = pool.submit(threading.get_ident).result()
        nodes._nodes[thread, 7] = graph.Node("mul", "", ("other.py", 1), is_by_engine=False)
        nodes._next_number_of[thread] = number

        def line_of(name: str, *, is_in_engine: bool) -> Any:
            running = SimpleNamespace(name=lambda: name, _sequence_nr=lambda: 7)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(graph, "_torchs_running_node", lambda: running)
                call = CallingCode(engine=sys._getframe() if is_in_engine else None)
                return nodes.origin("mul", call).line

        in_other = pool.submit(line_of, "MulBackward0", is_in_engine=True).result()
        assert in_other == ("other.py", 1)
        assert pool.submit(line_of, "MulBackward0", is_in_engine=False).result() == ("own.py", 1)
        # no addition has made a node of this number: the line that waits for the backward pass
        assert pool.submit(line_of, "AddBackward0", is_in_engine=False).result() != ("own.py", 1)


def test_old_nodes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "_MOST_NODES", 10)
    x = torch.ones(MIB, requires_grad=True)
    with ipygpumem.peak() as peak:
        y = x
        for _ in range(40):
            y = y * 2
        late = y.sigmoid()
        late.sum().backward()
    lines = in_backward(peak)
    assert lines["sigmoid_backward"].endswith("late = y.sigmoid()")


def test_loaded_and_listed_numbers_are_followed(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2 * MIB)}, tmp_path / "state.pt")
    with ipygpumem.peak() as peak:
        loaded = torch.load(tmp_path / "state.pt")
        listed = torch.tensor([1.0] * 2000)
    sizes = {row.name: row.size_bytes for row in ram(peak).rows}
    assert (sizes['loaded["weight"]'], sizes["listed"]) == (8 * MIB, 8192)
    assert len(loaded) == listed.dim()


@pytest.mark.parametrize(
    "broken",
    [
        "Follower.start",
        "Follower.read",
        "Follower._note_origin",
        "Follower._mark_tensors_of_module",
    ],
)
def test_a_failure_of_ours_becomes_a_note(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise LookupError("ours")

    owner, name = broken.split(".")
    layer = nn.Linear(8, 8)
    monkeypatch.setattr(getattr(following, owner), name, fail)
    with ipygpumem.peak() as peak:
        result = torch.ones(MIB).sum()
        with pytest.raises(RuntimeError, match="size"):
            torch.ones(3) @ torch.ones(4)
    assert result == MIB
    assert layer.in_features == 8
    assert any("LookupError: ours" in note for note in peak.record.notes)


def test_many_freed_storages_are_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_MOST_LIVES", 50)
    lasting = torch.ones(MIB)
    with ipygpumem.peak() as peak:
        high = torch.ones(2 * MIB)
        del high
        for _ in range(500):
            torch.ones(KIB)
    device = ram(peak)
    assert device.size_bytes >= 12 * MIB
    assert [row.size_bytes for row in device.rows[:2]] == [8 * MIB, 4 * MIB]
    assert max(sum(point.parts.values()) for point in device.curve) == device.size_bytes
    assert lasting.numel() == MIB


def test_memory_that_never_had_a_name_is_no_earlier_value() -> None:
    tensors = {"weight": nn.Parameter(torch.ones(MIB)), "data": torch.ones(MIB)}
    with ipygpumem.peak() as peak:
        high = torch.ones(MIB)
        tensors.clear()
    rows = [row for row in ram(peak).rows if row.operation == "existed before"]
    assert sum(row.size_bytes for row in rows) >= 8 * MIB
    assert {row.name for row in rows} == {""}
    assert high.numel() == MIB


def test_an_error_keeps_its_type_and_shows_no_frame_of_ours() -> None:
    with pytest.raises(RuntimeError, match="size") as caught, ipygpumem.peak() as peak:
        torch.ones(3) @ torch.ones(4)
    assert [entry.path for entry in caught.traceback if "ipygpumem/extras" in str(entry.path)] == []
    assert not ram(peak).ran_out


def test_after_an_oom_the_peak_is_the_moment_of_the_failure() -> None:
    with contextlib.suppress(RuntimeError), ipygpumem.peak() as peak:
        high = torch.ones(4 * MIB)
        del high
        left = torch.ones(MIB)
        torch.empty(1 << 60)
    device = ram(peak)
    assert device.ran_out
    assert (device.rows[0].size_bytes, device.rows[0].name) == (4 * MIB, "left")
    assert any(note.startswith("memory ran out in empty in") for note in peak.record.notes)
    assert left.numel() == MIB


def test_code_is_compiled_as_without_it() -> None:
    # after what earlier tests have compiled, it compiles the same code in another way
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend=backend)
    def step() -> None:
        optimizer.step()

    compiled(torch.ones(2, 8)).sum().backward()
    with ipygpumem.peak() as peak:
        compiled(torch.ones(2, 8)).sum().backward()
        assert len(graphs) == 1
        step()
    assert ram(peak).size_bytes > 0
    assert len(graphs) >= 2


def test_operators_that_take_functions_run() -> None:
    with ipygpumem.peak() as peak:
        result = torch.cond(torch.tensor(True), torch.sin, torch.cos, (torch.ones(4),))
    assert result.shape == (4,)
    assert ram(peak).size_bytes > 0


def test_storages_that_an_operation_grows_are_followed() -> None:
    with ipygpumem.peak() as peak:
        resized = torch.empty(0)
        out = torch.empty(0)
        resized.resize_(1 << 20)
        torch.cat([torch.ones(1 << 20)] * 2, out=out)
    assert ram(peak).size_bytes >= 16 << 20
    assert {row.name: row.size_bytes >> 20 for row in ram(peak).rows if row.size_bytes > MIB} == {
        "resized": 4,
        "out": 8,
        "": 4,
    }


@pytest.mark.parametrize(
    "code",
    [
        "held = torch.empty(1 << 26)",
        "held = torch.empty(1 << 26); del held",
        "held = [torch.empty(1 << 24) for _ in range(4)]",
        "held = torch.empty(1 << 26)[1:]",
    ],
)
def test_tensors_that_are_not_used_take_no_ram(code: str) -> None:
    trim_heap()  # malloc reuses free pages of earlier tests, which are in RAM
    with ipygpumem.peak() as peak:
        exec(code)
    device = ram(peak)
    assert device.size_bytes < MIB
    assert device.size_bytes + device.reserved_bytes >= 256 * MIB or "del" in code
    assert max(sum(point.parts.values()) for point in device.curve) == device.size_bytes


def test_tensors_that_are_used_in_part_are_split() -> None:
    with ipygpumem.peak() as peak:
        partly = torch.empty(1 << 26)
        partly[: 1 << 22] = 1
        wholly = torch.ones(1 << 22)
        freed = torch.ones(1 << 24)
        del freed
    device = ram(peak)
    sizes = {row.name or row.operation: row.size_bytes // MIB for row in device.rows}
    assert sizes == {"partly": 16, "wholly": 16, "ones": 64}
    assert {
        row.name: row.reserved_bytes // MIB for row in device.rows if row.reserved_bytes >= MIB
    } == {"partly": 239}
    assert partly.numel() > wholly.numel()


def test_tensors_of_earlier_cells_that_are_not_used_take_no_ram(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # also where storages are summed up in between
    monkeypatch.setattr(following, "_MOST_LIVES", 50)
    reserved = torch.empty(1 << 26)
    with ipygpumem.peak() as peak:
        small_tensors = [torch.ones(KIB) for _ in range(200)]
        reserved[: 1 << 22] = 1
    device = ram(peak)
    small_bytes = sum(item.nbytes for item in small_tensors)
    assert small_bytes < device.size_bytes < small_bytes + 20 * MIB
    assert max(sum(point.parts.values()) for point in device.curve) == device.size_bytes


def test_tensors_of_a_mapped_file_count_as_far_as_they_are_read(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(1 << 24)}, tmp_path / "state.pt")
    with ipygpumem.peak() as peak:
        state = torch.load(tmp_path / "state.pt", mmap=True)
    assert ram(peak).size_bytes < 2 * MIB
    assert state["weight"][0] == 1


def test_the_codes_own_fake_tensors_are_unchanged() -> None:
    with ipygpumem.peak() as peak:
        with FakeTensorMode():
            fake = torch.ones(1000, 1000) + 1
        summary = ipygpumem.summary(nn.Linear(4, 4), torch.ones(2, 4))
    assert fake.shape == (1000, 1000)
    assert summary is not None
    assert ram(peak).size_bytes < MIB


def test_inference_and_subclasses_are_followed() -> None:
    layer = nn.Linear(256, 256, bias=False)
    with torch.inference_mode(), ipygpumem.peak() as peak:
        result = layer(torch.ones(4, 256))
    assert result.is_inference()
    assert {row.name or row.module for row in ram(peak).rows} >= {"result", "layer"}
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(5)], layout=torch.jagged)
    with ipygpumem.peak() as peak:
        doubled = nested * 2
    names = {row.name for device in peak.record.devices for row in device.rows}
    assert any(name.startswith("doubled") for name in names), names
    assert doubled.is_nested


_OUTSIDE = """
import json, numpy, torch, ipygpumem
with ipygpumem.peak() as found:
    kept = numpy.ones(1 << 19)
    high = numpy.ones(1 << 20)
    del high
    followed = torch.ones(1 << 20)
print(json.dumps([[device.source, device.size_bytes] for device in found.record.devices] + list(found.record.notes)))
"""  # noqa: E501


_IMPORTS = """
import json, sys, ipygpumem
with ipygpumem.peak() as found:
    import torch
    followed = torch.ones(1 << 20)
(device,) = [device for device in found.record.devices if device.source == "storages"]
assert device.at_seconds > 0
assert "exec_module" not in vars(torch.__loader__)
with ipygpumem.peak():
    pass
print(json.dumps([[row.name, row.size_bytes] for row in device.rows] + [type(one).__name__ for one in sys.meta_path]))
"""  # noqa: E501


def test_torch_imported_in_the_code_itself_is_followed() -> None:
    row, *finders = json.loads(printed("-c", _IMPORTS).splitlines()[-1])
    assert row == ["followed", 4 * MIB]
    assert "AfterImport" not in finders


def test_memory_outside_torch_is_memrays_and_tensors_count_once() -> None:
    torchs, outside = json.loads(printed("-c", _OUTSIDE).splitlines()[-1])
    assert torchs == ["storages", 4 * MIB]
    if importlib.util.find_spec("memray") is None:
        assert "pip install memray" in outside
    else:
        assert outside[0] == "memray"
        # It is cut to the growth of RSS, of which the kernel counts up to 256 KiB in each thread
        # late.
        assert 11.5 * MIB <= outside[1] < 13 * MIB


def test_the_picture_has_the_roles_and_marks_the_peak() -> None:
    layer = nn.Linear(256, 1024, bias=False)
    with ipygpumem.peak() as peak:
        layer(torch.ones(256, 256)).sum().backward()
    (panel,) = peak.record.picture().axes
    assert set(panel.get_legend_handles_labels()[1]) >= ram(peak).parts.keys()
    assert [text.get_text() for text in panel.texts] == [
        f"peak {format_bytes(ram(peak).size_bytes)}"
    ]
    with pytest.raises(ipygpumem.errors.PlotError, match="nothing to draw"):
        PeakRecord((), 1.0).picture()


def test_the_record_is_there_when_the_block_has_ended() -> None:
    with (
        ipygpumem.peak() as peak,
        pytest.raises(ipygpumem.errors.TraceError, match="has not ended"),
    ):
        _ = peak.record
    assert PeakRecord.from_dict(peak.record.to_dict()) == peak.record


class Passing(dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


def test_blocks_end_in_any_order_and_keep_other_torch_modes() -> None:
    def job() -> Iterator[Any]:
        layer = nn.Linear(1, 1)
        layers_of_jobs.append(weakref.ref(layer))
        with ipygpumem.peak() as peak:
            yield peak
        yield peak

    layers_of_jobs = list[Any]()
    theirs = Passing()

    # Three blocks are open, and a mode of the user's above them.
    jobs = [job() for _ in range(3)]
    blocks = [next(job) for job in jobs]
    theirs.__enter__()
    for at in (1, 0, 2):
        next(jobs[at])
        torch.ones(MIB)
        jobs[at].close()
        stack = dispatch._get_current_dispatch_mode_stack()
        assert stack[-1] is theirs
    assert stack == [theirs]

    # All modes have gone.
    theirs.__exit__(None, None, None)
    assert not dispatch.is_in_torch_dispatch_mode()
    assert [ram(block).size_bytes // (4 * MIB) for block in blocks] == [1, 0, 1]
    assert not any("early" in note for block in blocks for note in block.record.notes)
    gc.collect()
    assert [layer() for layer in layers_of_jobs] == [None] * 3


def test_a_block_that_ends_in_another_thread_says_so() -> None:
    with ThreadPoolExecutor(1) as thread:
        layer = nn.Linear(1, 1)
        layer_if_alive = weakref.ref(layer)
        block = ipygpumem.peak()
        thread.submit(lambda _: block.__enter__(), layer).result()
        block.__exit__(None, None, None)
        thread.submit(torch.ones, 1).result()
        assert any("another thread" in note for note in block.record.notes)
        del layer
        gc.collect()
        assert layer_if_alive() is None
        thread.submit(
            lambda: dispatch._get_current_dispatch_mode().__exit__(None, None, None)
        ).result()
    assert not dispatch.is_in_torch_dispatch_mode()


def test_a_finished_block_keeps_none_of_the_codes_values() -> None:
    def run() -> tuple[Any, Any]:
        layer = nn.Linear(1, 1)
        with ipygpumem.peak() as peak:
            torch.ones(1)
        return peak, weakref.ref(layer)

    peak, layer_if_alive = run()
    gc.collect()
    assert layer_if_alive() is None
    assert ram(peak).rows


@pytest.mark.parametrize(
    "magics", ["%%peak\n", "%%experiment one\n%%peak --top 1\n", "%%time\n%%peak\n"]
)
def test_a_cell_with_peak_shows_a_report(notebook: Kernel, magics: str) -> None:
    run_cells(notebook, "held = torch.ones(1 << 20)")
    code = dedented("""
        more = torch.ones(1 << 21)
        del more
        """)
    (report,) = run_quietly(notebook, magics + code).reports("peak")
    assert report.startswith("peak · RAM of tensors highest with 12")
    assert report.partition("\n")[0].endswith(", faster without %%peak")
    assert "held" in report or "--top 1" in magics
    assert "del more" not in report


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("%%peak --tops\n1", "did you mean --top"),
        ("%peak", "first line"),
        ("%%peak --save x.txt\n1", "ends in .pickle"),
        ("%%peak --save other.pkl\n1", "is not a snapshot"),
        ("%%peak --save no/where.pkl\n1", "is not a folder"),
    ],
)
def test_a_mistake_in_the_line_of_peak_is_explained(
    notebook: Kernel, cell: str, words: str
) -> None:
    run_quietly(notebook, "with open('other.pkl', 'w') as file: file.write('text')")
    assert words in notebook.run(cell).stderr
    run_quietly(notebook, "import os; os.remove('other.pkl')")


def test_a_cell_without_allocations_saves_nothing(notebook: Kernel) -> None:
    (report,) = run_quietly(notebook, "%%peak --save other.pkl\n1").reports("peak")
    assert "nothing was saved" in report


def test_a_cell_has_a_picture_if_its_tensors_change(notebook: Kernel) -> None:
    run_quietly(notebook, "held = torch.ones(1 << 20)")
    pictures = []
    for code in ("x = 1", "held.add_(1)", "more = torch.ones(1 << 20)"):
        reply = run_quietly(notebook, f"%%peak\n{code}")
        pictures.append(sum("image/png" in display["data"] for display in reply.displays))
    assert pictures == [0, 0, 1]


def test_a_displayed_part_keeps_the_name_of_its_variable(notebook: Kernel) -> None:
    run_quietly(
        notebook, "layers = torch.nn.ModuleList([torch.nn.Linear(512, 512) for _ in range(2)])"
    )
    run_quietly(notebook, "layers[0]", "layers", "torch.ones(1 << 18)")
    run_quietly(
        notebook,
        """
        block = torch.nn.Linear(512, 512)
        block
        """,
    )
    code = "more = torch.ones(1 << 10)"
    (of_cell,) = run_quietly(notebook, f"%%peak\n{code}").reports("peak")
    run_quietly(notebook, f"import ipygpumem\nwith ipygpumem.peak() as found:\n    {code}")
    of_block = run_quietly(notebook, "print(found)").stdout
    for report in (of_cell, of_block):
        assert "layers.0" in report
        assert "layers.1" in report
        assert "block" in report
        assert re.findall(r"\b_\d*\b", report) == []
        assert report.count("Out[") == 1  # of the tensor that has no variable


def test_memory_outside_torch_leaves_room_for_tensors() -> None:
    """The process's RAM includes the tensors: what memray counts beyond it is reserved, not theirs
    a second time.
    """
    pytest.importorskip("memray")
    code = """
import numpy as np, torch, ipygpumem
warm = np.ones(1), torch.ones(1)
with ipygpumem.peak() as found:
    tensor = torch.ones(2**24)
    array = np.ones(2**23)
    reserved = np.zeros(2**27)
with ipygpumem.peak() as unused:
    nothing = torch.empty(2**26)
    other = np.ones(2**23)
for record in (found.record, unused.record):
    (device,) = [one for one in record.devices if one.source == "memray"]
    print(device.size_bytes >> 20, device.reserved_bytes >> 20, device.is_bound)
"""
    first, second = printed("-c", code).splitlines()
    assert first in ("64 1024 True", "64 1023 True", "65 1023 True")
    # pages that the first block has left may be used again
    assert second in ("64 0 False", "63 0 True")
