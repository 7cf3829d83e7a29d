"""The memory of everything together: all objects, what lies behind them, and what an experiment
leaves unnamed.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
import sys
import threading
from collections import Counter

import numpy
import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.heap.bulk import Batch
from ipygpumem.heap.knowledge.own_bytes import OwnBytes
from ipygpumem.heap.live.total import total
from ipygpumem.probes.malloc import free_blocks_bytes
from ipygpumem.probes.mappings import own_pages
from ipygpumem.reclaim.emptying import trim_host_heap
from ipygpumem.units import MIB
from tests.alone import alone
from tests.hostile import body, untouched
from tests.steps import experiment, run_cells


@alone
def test_each_object_counts_once_tracked_or_not() -> None:
    words = [str(number) * 9 for number in range(100_000)]
    before = total().objects_bytes
    more = [str(number) * 9 for number in range(100_000)]
    both = {
        "words": words,
        "pairs": tuple(((word, 1.5 * place), word) for place, word in enumerate(words)),
    }
    for _ in range(3):
        gc.collect()  # untracks the inner tuples, then the outer ones
    assert not gc.is_tracked(both["pairs"])
    pairs = (
        sys.getsizeof(both["pairs"])
        + len(words) * 2 * object.__sizeof__((1, 2))
        + len(words) * sys.getsizeof(1.5)
    )
    # the collector's headers
    pairs += len(words) * 2 * (sys.getsizeof((1, 2)) - object.__sizeof__((1, 2)))
    expected = sum(map(sys.getsizeof, more)) + sys.getsizeof(more) + pairs
    assert total().objects_bytes - before == pytest.approx(expected, rel=0.01)


def test_objects_request_the_bytes_that_python_reports() -> None:
    class Own:
        __slots__ = ("first", "second")

    class Numbers(tuple[int, ...]):
        __slots__ = ()

    items = [
        *("", "ab", "é", "\N{SNOWMAN}" * 9),
        *(0, 1 << 200, 1.5, 2j, None, True, b"ab", ...),
        *([], [1, 2], {}, {1: 2}, set[int](), {1}, (), (1, 2), Numbers([1, 2, 3])),
        *(print, test_text_keys_count_that_the_collector_leaves_out, Own, Own(), range(9), sys),
    ]
    own_bytes = OwnBytes()
    own_bytes.learn(items)
    assert own_bytes.requested(Batch(items)) == sum(map(sys.getsizeof, items))
    assert own_bytes.requested(Batch(items * 100)) == sum(map(sys.getsizeof, items * 100))


@alone
def test_text_keys_count_that_the_collector_leaves_out() -> None:
    before = total().objects_bytes
    kept = [{"x" * MIB: None}, {"y" * MIB: None, 1: 2}, Counter(["z" * MIB])]
    assert total().objects_bytes - before == pytest.approx(3 * MIB, rel=0.1)
    del kept


@alone
def test_text_in_arrays_of_objects_counts_once() -> None:
    numpy = pytest.importorskip("numpy")
    before = total().objects_bytes
    texts = numpy.array([f"{number:0100d}" for number in range(20_000)], dtype=object)
    views = [texts[:10_000], texts[5_000:], texts.reshape(100, 200)]
    records = numpy.zeros(2, dtype=[("number", int), ("text", object)])
    records["text"] = ["x" * MIB, "y" * MIB]
    expected = sum(map(sys.getsizeof, texts)) + 2 * MIB
    assert total().objects_bytes - before == pytest.approx(expected, rel=0.02)
    del views


@pytest.mark.skipif(sys.platform != "linux", reason="written by glibc's streams in memory")
@alone
def test_free_blocks_between_objects_are_counted() -> None:
    before = free_blocks_bytes()
    texts = [str(number) * 9 for number in range(200_000)]
    kept = texts[::40]
    del texts
    assert free_blocks_bytes() - before > 15 * MIB
    kept += [str(number) * 9 for number in range(200_000)]  # new objects fill them
    assert free_blocks_bytes() - before < 8 * MIB


@alone
def test_locals_of_running_threads_count() -> None:
    ready = threading.Event()
    go_on = threading.Event()

    def work() -> None:
        text = "x" * MIB
        ready.set()
        go_on.wait()
        del text

    before = total().objects_bytes
    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    assert total().objects_bytes - before == pytest.approx(MIB, rel=0.1)
    go_on.set()
    thread.join()


@alone
def test_no_code_of_an_object_runs() -> None:
    objects = [type("Odd", (base,), body)() for base in (object, list, dict)]
    with untouched():
        assert total().objects_bytes > 0
    del objects


def test_buffers_of_libraries_count_once() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    before = {piece.key for _, piece in total().pieces}  # of other tests in this process
    table = pyarrow.table({"a": pyarrow.array(range(1 << 20))})
    column = table["a"]
    part = table.slice(5)
    large = [
        (library, piece.size_bytes)
        for library, piece in total().pieces
        if piece.size_bytes >= 8 * MIB and piece.key not in before
    ]
    assert large == [("pyarrow", 8 * MIB)]
    del column, part


def map_as_another_allocator(size: int) -> None:
    """Fill private pages that begin where one of malloc's arenas could."""
    libc = ctypes.CDLL(None)
    arena = 64 * MIB
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    start = (
        -(-libc.mmap(None, 4 * arena, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0) // arena)
        * arena
    )
    assert libc.mprotect(start, size, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    assert libc.mprotect(start + size, 2 * arena, mmap.PROT_READ) == 0
    ctypes.memset(start, 1, size)


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
@alone
def test_free_pages_of_the_heap_are_told_from_used_ones() -> None:
    # One text in a hundred stays, so most pages are free.
    blocks = [bytes(3000) for _ in range(40_000)]
    before = own_pages()
    kept = blocks[::100]
    del blocks
    pages = own_pages()
    assert pages.free_heap_bytes - before.free_heap_bytes == pytest.approx(40_000 * 3000, rel=0.1)
    trim_host_heap()
    # Of 114 MiB, hardly a page is free after the heap was trimmed.
    assert own_pages().free_heap_bytes < 8 * MIB

    # Memory of another allocator is no free page.
    map_as_another_allocator(32 * MIB)
    assert own_pages().free_heap_bytes < 8 * MIB
    assert pages.data_bytes > 0

    # Threads have stacks.
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(20)]
    for thread in threads:
        thread.start()
    # At least a page for each thread.
    assert own_pages().stack_bytes >= pages.stack_bytes + 20 * 4096
    done.set()
    del kept


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
@alone
def test_free_pages_in_the_arena_of_a_thread_are_known() -> None:
    # From now on malloc makes no mapping of its own for an array of 8 MiB.
    array = numpy.ones(2**22 - 2**10)
    del array
    sizes = list[int]()

    def work() -> None:
        # NumPy asks for huge pages in each of them, so that the arena has several mappings.
        arrays = [numpy.ones(2**20) for _ in range(6)]
        sizes.append(own_pages().free_heap_bytes)
        del arrays
        sizes.append(own_pages().free_heap_bytes)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    while_alive, once_dead = sizes
    assert while_alive < 8 * MIB
    assert 40 * MIB < once_dead < 56 * MIB


HIDDEN = """%%experiment hidden
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
ctypes.memset(libc.malloc(128 << 20), 1, 128 << 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_an_experiment_says_how_much_unnamed_memory_it_leaves(kernel: Kernel) -> None:
    run_cells(kernel, "import gc; gc.collect();")  # so that none follows in the experiment
    (text,) = run_cells(kernel, HIDDEN).reports("experiment")
    assert re.search(
        r"12\d(\.\d)? MiB of RAM are still in use: .*\b12\d(\.\d)? MiB not named: no known object ",
        text,
    )
    (text,) = run_cells(kernel, "%gpumem status").reports("status")
    assert re.search(r"1\d\d(\.\d)? MiB   not named +no object ", text), text
    assert "data of ipygpumem" not in text  # its spare address space takes no RAM
    run_cells(kernel, "import numpy")
    (text,) = run_cells(
        kernel, experiment("block = numpy.ones(1 << 24)", name="kept", options="--keep block")
    ).reports("experiment")
    assert "not named" not in text


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
@pytest.mark.skipif(not (3, 10) <= sys.version_info < (3, 14), reason="of their collector")
def test_unsearched_memory_is_not_said_to_be_in_no_object(kernel: Kernel) -> None:
    unseen = f"{HIDDEN}import gc\ngc.callbacks.clear()\ngc.collect()"
    (text,) = run_cells(kernel, unseen).reports("experiment")
    assert "no object" not in text
    assert "new objects cannot be told from old ones; %gpumem leaks searches all of them" in text
