"""One look over everything that is alive."""

import gc
import multiprocessing
import os
import threading
import weakref
from types import FrameType
from typing import Any

import pytest

import ipygpumem
from ipygpumem.heap.live.heap import Heap, undisturbed
from ipygpumem.probes import own_limits
from tests.alone import alone, printed
from tests.tracing import interrupted_at

numpy = pytest.importorskip("numpy")
pytestmark = pytest.mark.usefixtures("others_out_of_sight")


def holds(heap: Heap, array: object) -> bool:
    return any(item is array for item in heap.ndarrays)


def test_arrays_are_found_in_each_kind_of_container() -> None:
    class Own(numpy.ndarray):  # type: ignore[misc, name-defined]  # numpy may be missing
        pass

    objects = numpy.empty((2, 2), object)
    objects[0, 1] = numpy.ones(3)
    deep = {"a": ({"b": numpy.ones(4)},)}
    own = numpy.ones(5).view(Own)
    box = [objects, own]  # what only a running function's variables hold is out of sight
    gc.collect()  # from now on the collector does not track the dict
    heap = Heap()
    assert holds(heap, box[0])
    assert holds(heap, objects[0, 1])
    assert holds(heap, deep["a"][0]["b"])
    assert holds(heap, own)


def test_arrays_in_structured_arrays_are_found() -> None:
    np = pytest.importorskip("numpy")
    plain = np.zeros(3, [("number", int), ("data", object)])
    nested = np.zeros((2, 2), [("deep", [("data", object)])])
    plain["data"][1] = np.ones(3)
    nested["deep"]["data"][1, 0] = np.ones(3)
    expected = {id(plain["data"][1]), id(nested["deep"]["data"][1, 0])}
    with undisturbed():
        heap = Heap()
        assert expected <= set(map(id, heap.ndarrays))
        heap.drop()


def test_dropping_a_heap_frees_its_memory_without_the_collector() -> None:
    """Later work frees memory while another variable still names the heap."""

    class Maker:
        heap: Heap

    target = [object()]
    gc.disable()
    try:
        heap = Heap()
        maker = Maker()
        references = [weakref.ref(heap), weakref.ref(maker)]
        del heap
        maker.heap = Heap()

        # A search fills its tables; then it is dropped.
        list(maker.heap.referrers({id(target[0]): target[0]}))
        maker.heap.drop()
        assert not any(vars(maker.heap).values())
        del maker
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


def test_reading_the_heap_frees_no_object_kept_by_asyncio() -> None:
    """On Python 3.12 the next collection would never end."""
    code = """
import asyncio, gc
from ipygpumem.heap.live.heap import Heap
async def wait():
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    loop.call_soon(future.set_result, 1)
    await future
asyncio.run(wait())
target = [[]]
heap = Heap()
assert any(item is target for item, _ in heap.referrers({id(target[0]): target[0]}))
many = {id(item): item for item in [[] for _ in range(100)]}
list(heap.referrers(many))
heap.drop()
gc.collect()
"""
    printed("-c", code)


@pytest.mark.skipif(own_limits.resource is None, reason="no limits here")
@alone
def test_threads_take_turns_to_read_the_heap() -> None:
    """Three at once, with 1 GiB to be had."""
    failures: list[str] = []

    def look() -> None:
        try:
            for _ in range(5):
                ipygpumem.tensors()
        except MemoryError:
            failures.append("looked at the lists of the others")

    # A heap of this process takes far less than 1 GiB, three at once might not.
    resource: Any = own_limits.resource
    resource.setrlimit(
        resource.RLIMIT_AS, (own_limits.used_bytes("RLIMIT_AS") + (1 << 30), resource.RLIM_INFINITY)
    )
    threads = [threading.Thread(target=look, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    assert gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_forked_during_a_look_can_read_its_own_heap() -> None:
    looking = threading.Event()
    enough = threading.Event()

    def look() -> None:
        with undisturbed():
            looking.set()
            enough.wait(60)

    # The child is forked while another thread reads the heap.
    thread = threading.Thread(target=look)
    thread.start()
    looking.wait(60)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_look_in_child)
    child.start()
    child.join(60)
    ended = child.exitcode
    child.kill()
    enough.set()
    thread.join()
    assert ended == 0


def _look_in_child() -> None:
    assert gc.isenabled()
    with undisturbed():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_collector_that_another_thread_enables_stays_on() -> None:
    """The user's code has disabled it for a while: ``gc.disable(); work(); gc.enable()``."""
    gc.disable()
    try:
        with undisturbed():
            thread = threading.Thread(target=gc.enable)
            thread.start()
            thread.join()
        assert gc.isenabled()
    finally:
        gc.enable()


def test_a_ctrl_c_does_not_leave_the_collector_off() -> None:
    def examine() -> None:
        with undisturbed():
            assert not gc.isenabled()

    def is_of_the_block(frame: FrameType) -> bool:
        return frame.f_code is undisturbed.__wrapped__.__code__

    line = 1
    while interrupted_at(line, examine, is_of_the_block):
        assert gc.isenabled(), f"off after line {line}"
        line += 1
    assert line > 8, "no line was interrupted"
