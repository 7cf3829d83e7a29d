"""A tracker says which of torch's tensors came and went between two calls."""

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ipygpumem
from benchmarks.harness.kernel import Kernel
from ipygpumem.extras.tracker.tracker import TrackerRecord
from ipygpumem.units import MIB
from tests.fakes import FakeProbe
from tests.tracing import interrupted_at

pytestmark = pytest.mark.usefixtures("others_out_of_sight")


def tracker() -> Callable[[], TrackerRecord]:
    track: Callable[[], TrackerRecord] = ipygpumem.tracker(silent=True).track
    track()
    return track


def rows(
    record: TrackerRecord,
) -> tuple[list[tuple[str | None, int]], list[tuple[str | None, int]]]:
    """Tensors made and freed, by the last part of their names, with their bytes."""

    def named(tensors: Any) -> list[tuple[str | None, int]]:
        return sorted((row.name and row.name.rpartition(".")[2], row.size_bytes) for row in tensors)

    return named(record.added), named(record.removed)


def test_a_replaced_tensor_is_listed_as_freed_and_as_new() -> None:
    track = tracker()
    x = torch.zeros(MIB)
    track()
    y = x
    x = torch.ones(MIB)
    del y
    record = track()
    assert rows(record) == ([("x", 4 * MIB)], [("x", 4 * MIB)])
    assert record.changed_bytes == {"cpu": 0}


def test_a_new_storage_at_a_dead_ones_address_is_new() -> None:
    track = tracker()
    places = set()
    for number in range(20):
        x = torch.zeros(1000)
        places.add(x.untyped_storage()._cdata)
        assert rows(track()) == ([("x", 4000)], [("x", 4000)] if number else [])
        del x
    # Nobody but the tracker keeps the places of dead storages from being used again.
    again = set()
    for _ in range(20):
        x = torch.zeros(1000)
        again.add(x.untyped_storage()._cdata)
        del x
    assert len(again) < 20


def test_the_tracker_keeps_no_tensor_alive() -> None:
    track = tracker()
    x = torch.zeros(1000)
    sparse = torch.eye(10).to_sparse()
    wrapped = nn.Parameter(torch.ones(2))
    track()
    references = [weakref.ref(item) for item in (x, sparse, wrapped)]
    del x, sparse, wrapped
    assert [reference() for reference in references] == [None] * 3
    assert len(track().removed) == 3


def test_our_weak_references_allow_tensors_to_be_swapped() -> None:
    track = tracker()
    x = torch.zeros(3)
    y = torch.ones(3)
    track()
    torch.utils.swap_tensors(x, y)
    assert rows(track()) == ([], [])
    assert x.tolist() == [1, 1, 1]


def test_a_ctrl_c_inside_the_tracker_loses_no_call() -> None:
    track = tracker()
    x = torch.zeros(1000)
    line = 1
    count = 0

    def ours(frame: Any) -> bool:
        return "/ipygpumem/" in frame.f_code.co_filename

    while line < 3000 and interrupted_at(line, track, ours):
        line, count = line + 1 + line // 4, count + 1
    assert count > 10, "no line was interrupted"
    assert gc.isenabled()
    assert rows(track()) in (([("x", 4000)], []), ([], [])), (
        "said once, by this call or one that came through"
    )
    y = x.clone()
    assert rows(track()) == ([("y", 4000)], [])
    assert y.shape == (1000,)


def test_a_tracker_works_before_loading_and_after_unloading(bare_kernel: Kernel) -> None:
    reply = bare_kernel.run("""
        import ipygpumem
        t = ipygpumem.tracker()
        r = t.track()
        """)
    assert "tracker 1 · cell 1, line 3 · " in reply.stdout
    bare_kernel.run("%load_ext ipygpumem")
    (shown,) = bare_kernel.run("""
    import torch; x = torch.ones(2**18)
    r = t.track()
    """).reports("tracker")
    assert "RAM +1 MiB" in shown
    assert "peaks count from this call only" in shown
    bare_kernel.run("%unload_ext ipygpumem")
    reply = bare_kernel.run("""
    del x
    r = t.track()
    """)
    assert "RAM -1 MiB" in reply.stdout, reply


class _Keeping(torch.autograd.Function):
    """Keeps a tensor, to which no name leads, in a graph of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.sigmoid(x))
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _held(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the holders of a loop's growth."""
    return re.findall(r"(\+\S+ MiB) per iteration is held by (.*)", capsys.readouterr().out)


@pytest.mark.parametrize("grown", [8, 20])
def test_a_loop_names_a_list_and_the_graphs_in_it_once(
    script_memory: FakeProbe, capsys: pytest.CaptureFixture[str], grown: int
) -> None:
    net = nn.Sequential(nn.Linear(256, 2048), nn.Sigmoid())
    losses = list[Any]()
    for number in ipygpumem.track(range(6)):
        losses.append(net(torch.zeros(1024, 256)).mean())
        script_memory.set((number + 1) * grown * MIB)
    ((size, holder),) = _held(capsys)
    assert size == "+9 MiB"  # with the batch, which the graph keeps for the weight's gradient
    assert re.search(r"local losses\[\d+\]: its autograd graph", holder)


def test_a_loop_names_arrays_and_the_graphs_of_a_list(
    script_memory: FakeProbe, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = torch.ones(1 << 20, requires_grad=True)
    losses = list[Any]()
    kept = list[Any]()
    for number in ipygpumem.track(range(6)):
        losses.append(_Keeping.apply(weight))
        kept.append(torch.zeros(1 << 21))
        script_memory.set((number + 1) * 20 * MIB)
    (of_list, of_graphs) = _held(capsys)
    assert of_list == ("+8 MiB", "kept (list of Tensor)")
    assert of_graphs[0] == "+4 MiB"
    assert re.search(r"local losses\[\d+\]: its autograd graph", of_graphs[1])
