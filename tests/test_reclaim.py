"""Giving memory back: the order, what each step gives, and steps that fail."""

import gc
import mmap
import re
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.heap.live.garbage import Garbage
from ipygpumem.meter.meter import Meter
from ipygpumem.probes.host import HostProbe
from ipygpumem.reclaim import emptying, reclaim
from ipygpumem.records import FreeingStep
from ipygpumem.report.freeing import freed_report
from ipygpumem.units import MIB
from tests.alone import alone
from tests.fakes import FakeAllocator, FakeProbe, fake_module, fake_torch
from tests.process_memory import touched
from tests.steps import run_cells


def run(meter: Meter, steps: list[reclaim.Step]) -> list[FreeingStep]:
    done: list[FreeingStep] = []
    reclaim.run_steps(meter, steps, done)
    return done


def test_each_step_gets_credit_for_memory_freed_while_it_ran() -> None:
    probe = FakeProbe()
    probe.set(100)
    steps = run(
        Meter([probe]), [("first", lambda: probe.set(70)), ("second", lambda: probe.set(75))]
    )
    assert [(step.name, step.freed) for step in steps] == [
        ("first", {"cpu": 30}),
        ("second", {"cpu": -5}),
    ]
    children = FakeProbe("children")
    children.set(100)
    (step,) = run(Meter([children]), [("outputs", lambda: children.set(0))])
    assert step.freed == {}  # of a process that a name's deletion has ended
    assert freed_report("freed", [step], {"children": 100 * MIB}).lines == (
        "freed by: processes that ended (100 MiB)",
    )
    freed = [
        FreeingStep(name, {"cpu": size * MIB}, {}, 0.1)
        for name, size in (("names", 900), ("garbage", 7), ("caches", 6))
    ]
    by = freed_report("freed", freed, {"cpu": 916 * MIB}).lines
    assert by == ("freed by: names (RAM 900 MiB), smaller steps (RAM 13 MiB)",)


def test_a_step_gets_no_credit_for_memory_freed_by_other_threads() -> None:
    probe = FakeProbe()
    probe.set(100)

    def fall(to: int, answer: object) -> Callable[[], object]:
        def action() -> object:
            probe.set(to)
            return answer

        return action

    actions: list[reclaim.Step] = [
        ("garbage", fall(90, 0)),
        ("trim", fall(80, False)),
        ("names", fall(60, 3)),
    ]
    steps = run(Meter([probe]), [*actions, ("trim", fall(30, emptying.AtMost(20)))])
    assert [step.freed["cpu"] for step in steps] == [0, 0, 20, 20]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is mapped")
@alone
def test_a_step_is_credited_with_unmapped_memory_a_trim_with_all() -> None:
    """Memory is purged, as by an allocator's thread, while a step runs; then as much is freed."""
    memory = [touched(96 << 20), touched(64 << 20)]
    steps: list[reclaim.Step] = [
        ("garbage", lambda: memory[0].madvise(mmap.MADV_DONTNEED)),
        ("names", lambda: memory.pop().close()),
        ("own work", lambda: memory[0].write(b"x" * (32 << 20))),
        ("trim", lambda: memory[0].madvise(mmap.MADV_DONTNEED) is None),
    ]
    given = [step.freed["cpu"] / (1 << 20) for step in run(Meter([HostProbe()]), steps)]
    assert given == pytest.approx([0, 64, -32, 32], abs=4)


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells RSS without releasing the GIL"
)
@alone
def test_garbage_collection_gets_credit_for_freed_memory() -> None:
    """Another thread frees memory between two of them."""
    of_thread = [touched(64 << 20)]
    garbage = [touched(32 << 20)]

    class Disturbed(Garbage):
        def _collect_young(self) -> int:
            if of_thread:
                of_thread.pop().close()
            return super()._collect_young()

    # Only the step itself may collect it.
    gc.set_threshold(10**9)  # else Python might collect it before we do
    garbage.append(garbage)  # type: ignore[arg-type]  # a cycle
    meter = Meter([HostProbe()])
    steps = reclaim.steps_that_free(Disturbed())[:1]
    del garbage
    (step,) = run(meter, steps)
    # The garbage of 32 MiB, without the thread's 64 MiB.
    assert step.freed["cpu"] / (1 << 20) == pytest.approx(32, abs=4)


def test_a_step_that_fails_is_reported_and_the_next_one_runs() -> None:
    def broken() -> None:
        raise RuntimeError("no driver")

    probe = FakeProbe()
    probe.set(9)
    steps = run(Meter([probe]), [("broken", broken), ("next", lambda: probe.set(1))])
    assert steps[0].error == "RuntimeError: no driver"
    assert steps[1].freed == {"cpu": 8}


def test_an_interrupt_keeps_the_steps_that_were_done() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    done: list[FreeingStep] = []
    steps: list[reclaim.Step] = [("first", lambda: None), ("second", interrupted)]
    with pytest.raises(KeyboardInterrupt):
        reclaim.run_steps(Meter([FakeProbe()]), steps, done)
    assert [step.name for step in done] == ["first"]


def test_the_order_is_garbage_then_caches_then_the_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_module())
    monkeypatch.delitem(sys.modules, "pyarrow", raising=False)  # other tests may have imported it

    def names(*, devices: bool = True) -> list[str]:
        return [name for name, _ in reclaim.steps_that_free(Garbage(), devices=devices)]

    assert names() == ["garbage", "device caches", "free heap pages"]
    assert names(devices=False) == ["garbage", "free heap pages"]
    monkeypatch.setitem(sys.modules, "pyarrow", fake_module())
    assert names() == ["garbage", "pyarrow's pool", "device caches", "free heap pages"]
    monkeypatch.delitem(sys.modules, "pyarrow")
    monkeypatch.delitem(sys.modules, "torch")
    assert names() == ["garbage", "free heap pages"]


@pytest.mark.skipif(sys.platform != "linux", reason="RSS falls at once on Linux")
def test_text_columns_of_pandas_come_back(kernel: Kernel) -> None:
    run_cells(kernel, "import pandas, pyarrow; pandas.options.future.infer_string = True")
    made = (
        'frame = pandas.DataFrame({"text": [f"text number {n} of many" for n in range(2_000_000)]})'
    )
    (text,) = run_cells(
        kernel, f"%%experiment text\n{made}\nassert frame.text.dtype == 'str'"
    ).reports("experiment")
    consumed, freed = re.search(r"RAM +\+([\d.]+) MiB +(\S+) MiB", text).groups()  # type: ignore[union-attr]
    # the rest is pandas' first use of itself
    assert float(freed) > 0.7 * float(consumed) > 45, text
    assert "pyarrow's pool (RAM " in text


def test_memory_that_polars_returns_late_is_credited_to_no_step(kernel: Kernel) -> None:
    run_cells(kernel, "import polars")
    made = 'frame = polars.DataFrame({"a": polars.Series(range(4_000_000)).cast(polars.String)})'
    kept = "kept.append(b'1' * (32 << 20))"  # polars may have returned its own pages by then
    run_cells(kernel, "kept = []")
    (text,) = run_cells(kernel, f"%%experiment frames\n{made}\n{kept}").reports("experiment")
    assert "polars' allocator returns the pages of deleted frames within seconds" in text
    assert not re.search(r"garbage \(RAM|free heap pages \(RAM \d\d[\d.]* MiB", text), text


def test_device_caches_workspaces_and_pinned_memory_are_emptied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    torch = fake_torch(FakeAllocator())
    torch.cuda.empty_cache = lambda: called.append("cache")
    torch._C._cuda_clearCublasWorkspaces = lambda: called.append("workspaces")
    torch._C._host_emptyCache = lambda: called.append("pinned")
    monkeypatch.setitem(sys.modules, "torch", torch)
    torch.cuda.memory_snapshot = lambda: [segment(0)]
    emptying.empty_device_caches()
    assert called == ["workspaces", "cache", "pinned"]
    called.clear()
    torch.cuda.memory_snapshot = lambda: [segment(0), segment(1)]
    emptying.empty_device_caches()
    assert called == ["cache", "pinned"], (
        "a captured graph may have the workspaces' addresses built in"
    )


def test_nothing_is_emptied_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    torch = fake_torch(FakeAllocator())
    torch.cuda.is_current_stream_capturing = lambda: not called
    torch.cuda.empty_cache = lambda: called.append("cache")
    torch._C._host_emptyCache = lambda: called.append("pinned")
    monkeypatch.setitem(sys.modules, "torch", torch)
    (step,) = run(Meter([FakeProbe()]), [("device caches", emptying.empty_device_caches)])
    assert step.error == "skipped while a CUDA graph is captured: freeing would spoil it"
    assert called == []
    called.append("captured")
    torch.cuda.memory_snapshot = list
    emptying.empty_device_caches()
    assert called == ["captured", "cache", "pinned"]


def segment(pool: int) -> dict[str, Any]:
    """Return an empty segment as torch describes it; a pool of its own has another
    number than 0.
    """
    return {"device": 0, "address": 0, "blocks": [], "segment_pool_id": (0, pool)}


def test_caches_are_emptied_where_the_allocator_has_no_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with cudaMallocAsync, which refuses one. Whether a graph has been captured is not known
    then.
    """

    def refuse(**options: Any) -> list[Any]:
        raise RuntimeError("Calling snapshot with backend:cudaMallocAsync is not meaningful.")

    called: list[str] = []
    torch = fake_torch(FakeAllocator())
    torch.cuda.empty_cache = lambda: called.append("cache")
    torch._C._cuda_clearCublasWorkspaces = lambda: called.append("workspaces")
    torch.cuda.memory_snapshot = refuse
    monkeypatch.setitem(sys.modules, "torch", torch)
    emptying.empty_device_caches()
    assert called == ["cache"]


def test_a_backend_that_is_not_initialised_is_not_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = fake_torch(FakeAllocator(), initialized=False)
    torch.cuda.empty_cache = lambda: pytest.fail("created a context")
    monkeypatch.setitem(sys.modules, "torch", torch)
    emptying.empty_device_caches()


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has such a call")
@alone
def test_trimming_the_heap_gives_free_pages_below_used_ones_back() -> None:
    blocks = [b"x" * 100_000 for _ in range(2000)]  # too small for mappings of their own
    del blocks[:-1]
    before = psutil.Process().memory_info().rss
    emptying.trim_host_heap()
    # Most of 2,000 texts of 100 kB.
    assert before - psutil.Process().memory_info().rss > 100 << 20
