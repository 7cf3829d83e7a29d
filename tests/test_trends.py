"""A cell that grows with every run is told so; nothing else is."""

import re
import subprocess
import sys
import types
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.kernel import Kernel
from ipygpumem.heap.bulk import no_progress
from ipygpumem.inventory.leaks.children import endings, growth_by_ending, with_endings
from ipygpumem.inventory.leaks.trends import Growing, Trends
from ipygpumem.meter.meter import Meter
from ipygpumem.probes.children import Child
from ipygpumem.records import CellRecord, Growth, Usage
from ipygpumem.report.growth_lines import free_heap_line, process_lines, unknown_line
from ipygpumem.shell.searches import growth_search
from ipygpumem.units import MIB
from tests.fakes import FakeProbe
from tests.hiding import show_modules
from tests.steps import run_cells


class Notebook:
    """Cells that run one after the other, on a device whose memory goes on from each
    to the next.
    """

    def __init__(self, start: int = 100) -> None:
        self.looks = 0
        self.trends = Trends()
        self.now = start * MIB

    def run(
        self, name: str | None, grows: int, *, success: bool = True, source: str = ""
    ) -> list[Growth]:
        before, self.now = self.now, self.now + grows * MIB
        usage = Usage("cpu", before, self.now, max(before, self.now), None, "kernel")
        record = CellRecord(None, name, None, 0.0, 1.0, success, None, (usage,), source)
        self.last = self.trends.add(record)
        self.looks += self.last.wants_look
        return self.last.growths


def test_growth_is_reported_from_the_fourth_run_on() -> None:
    notebook = Notebook()
    told = []
    for grows in (900, 300, 300, 300, 310):
        told.append(notebook.run("leak", grows))
        assert not notebook.run("other", 5)
        assert not notebook.run(None, 0, source="same")
    assert told[:3] == [[], [], []]
    assert told[3:] == [
        [Growth("cpu", 3, 300 * MIB, 300 * MIB)],
        [Growth("cpu", 4, 300 * MIB, 310 * MIB)],
    ]


def test_a_cell_is_recognised_by_its_id_or_else_by_its_source() -> None:
    by_source = Notebook()
    by_id = Notebook()
    for number in range(3):
        assert not by_source.run(None, 300, source="x")
        assert not by_id.run("id", 300, source=f"x{number}")
    assert by_source.run("new id", 300, source="x")
    assert by_id.run("id", 300, source="y")
    assert not Notebook().run(None, 300)


@pytest.mark.parametrize(
    ("case", "runs"),
    [
        ("imports and warm-up in the first runs", [900, 200, 0, 0, 0, 0, 0]),
        ("warm-up that fades away", [900, 200, 40, 12, 4, 2, 1, 0]),
        # As seen with torch, pandas and matplotlib in a kernel, in whole MiB.
        ("training", [113, 49, 25, 18, 0, 30, 8, 0, 0, 0, 10, 0]),
        ("loading an array", [32, 0, 0, -32, 32, -32, 32, -32, 32]),
        ("a cache that fills up and is full", [40, 12, 6, 0, 0, 0, 0]),
        ("growth with breaks", [20, 20, 0] * 20),
        ("growth that the next run takes back", [300, -300] * 6),
    ],
)
def test_series_without_growth_raise_no_alarm(case: str, runs: list[int]) -> None:
    notebook = Notebook()
    assert [notebook.run("cell", grows) for grows in runs] == [[]] * len(runs), case


@pytest.mark.parametrize(
    ("in_use", "grows", "told_at"),
    [
        (3072, 28, 5),  # the first run does not count, and three more are less than 2 %, or too few
        (100, 9, 5),
        (20_000, 9, 13),  # 2 % would be 400 MiB: 100 are enough
        (20_000, 30, 5),
    ],
)
def test_small_growth_is_reported_only_after_it_added_up(
    in_use: int, grows: int, told_at: int
) -> None:
    notebook = Notebook(in_use)
    told = [bool(notebook.run("leak", grows)) for _ in range(20)]
    assert told.index(True) + 1 == told_at
    assert all(told[told_at:])


def test_one_smaller_run_retracts_no_reported_growth() -> None:
    # as seen of losses that keep 4 MiB each: the system hands out more at once
    notebook = Notebook(300)
    told = [bool(notebook.run("losses", grows)) for grows in (0, 8, 8, 8, 8, 8, 4, 8, 4, 12, 4)]
    assert told == [False] * 4 + [True] * 7


def test_no_alarm_for_memory_freed_between_runs_or_failed_runs() -> None:
    freed = Notebook()
    failing = Notebook()
    for _ in range(8):
        assert not freed.run("load", 300)
        freed.now -= 290 * MIB
        assert not failing.run("cell", 300, success=False)


@pytest.mark.parametrize(
    ("runs", "looks"),
    [
        ([900, *[9, 9, 0] * 9], 0),  # too little to be worth it
        ([900, *[20, 0, 300, -300] * 9], 0),
        ([900, 20, 20, 0], 1),  # before the run that will be reported
        ([900, 20, 20, 20], 2),
        ([20, 20, 0] * 20, 6),  # no cell is looked at for ever
    ],
)
def test_names_are_measured_only_if_growth_is_near_or_reported(runs: list[int], looks: int) -> None:
    notebook = Notebook()
    for grows in runs:
        notebook.run("cell", grows)
    assert notebook.looks == looks


def test_the_history_of_growth_is_kept_for_few_cells() -> None:
    notebook = Notebook()
    cells = []
    for name in map(str, range(10)):
        for grows in (900, 20, 20):
            notebook.run(name, grows)
        notebook.last.first_look = cast(Any, "a look at all names")
        cells.append(notebook.last)
    assert [growing.first_look is None for growing in cells] == [True] * 2 + [False] * 8


@pytest.fixture(autouse=True)
def _no_modules_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    show_modules(monkeypatch)


class Device:
    """A device on which the same code runs; each run that wants a look at all names has one."""

    def __init__(self, name: str = "cpu") -> None:
        self.growing, self.probe, self.now = Growing(), FakeProbe(name), 1000 * MIB
        self.meter = Meter([self.probe])
        self.name = name
        self.looks = 0

    def run(self, grows: int = 20) -> list[Growth]:
        before, self.now = self.now, self.now + grows * MIB
        self.growing.add([Usage(self.name, before, self.now, self.now, None, "allocator")])
        growths = list(self.growing.growths)
        if self.growing.wants_look:
            self.looks += 1
            self.probe.set(self.now)
            growth_search.look_for_growth(self.growing, dict, "run", dict, no_progress, self.meter)
        return growths

    def free(self, mib: int) -> None:
        self.now -= mib * MIB


@pytest.mark.usefixtures("others_out_of_sight")
@pytest.mark.parametrize("name", ["cpu", "cuda:0", "children", "shm"])
@pytest.mark.parametrize("broken", ["", "_with_outputs_as_one", "children_now"])
def test_memory_freed_after_a_search_ends_the_series(
    name: str, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken:
        monkeypatch.setattr(growth_search, broken, None)  # the look fails
    device = Device(name)
    told = [device.run() for _ in range(3)]
    assert device.looks == 1
    device.free(60)
    told += [device.run() for _ in range(2)]
    assert told == [[]] * 5
    told += [device.run()]
    assert told[-1] == [Growth(name, 3, 20 * MIB, 20 * MIB)]
    device.free(120)  # after the second look
    assert device.run() == []
    device.meter.close()


@pytest.mark.usefixtures("others_out_of_sight")
@pytest.mark.parametrize("broken", ["own_pages", "trim_host_heap", "children_now", "with_endings"])
def test_a_failed_search_for_holders_is_noted_with_the_growth(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth_search, broken, None)
    device = Device("children")
    for _ in range(5):
        device.run()
        growth_search.find_grown_processes(device.growing, dict, "run")
    assert device.growing.growths
    assert "TypeError" in " ".join([*device.growing.holder_lines, *device.growing.process_lines])
    device.meter.close()


@pytest.mark.usefixtures("others_out_of_sight")
def test_memory_that_our_own_search_frees_ends_no_series() -> None:
    device = Device()
    for _ in range(3):
        device.run()
    device.now = 900 * MIB  # trimmed by the look, before it measures
    device.probe.set(device.now)
    device.growing.note_memory(device.meter.now())
    assert device.run() == [Growth("cpu", 3, 20 * MIB, 20 * MIB)]
    device.meter.close()


def test_freed_memory_is_known_through_all_searches() -> None:
    notebook = Notebook()
    for _ in range(12):
        for _ in range(2):
            assert not notebook.run("cell", 20)
            reading = SimpleNamespace(current_bytes=notebook.now)
            notebook.last.note_memory(cast(Any, {"cpu": reading}))
        notebook.now -= 40 * MIB
    assert notebook.looks == 6


@settings(deadline=None)  # a machine may be busy
@given(runs=st.lists(st.integers(-500, 500), max_size=30))
def test_all_reported_growth_is_real(runs: list[int]) -> None:
    notebook = Notebook(start=100_000)
    for number, grows in enumerate(runs, 1):
        for growth in notebook.run("cell", grows):
            last = runs[number - growth.runs : number]
            assert len(last) == growth.runs < number
            assert (min(last) * MIB, max(last) * MIB) == (growth.least_bytes, growth.most_bytes)
            assert min(last) >= 1
            assert sum(last) >= 30


def test_only_a_cell_that_leaks_is_reported_without_asking(kernel: Kernel) -> None:
    def reports(code: str, times: int) -> list[str]:
        return ["\n".join(kernel.run(code).reports("cell")) for _ in range(times)]

    kernel.run("kept, last = {}, None")
    leaking = reports("last = 'x' * 2**24; kept[len(kept)] = last, 'y' * 2**24", 6)
    assert ["has grown" in text for text in leaking] == [False, False, False, True, True, True]
    grown = (
        r"this cell has grown RAM by 32(\.\d)? (MiB|to 32(\.\d)? MiB) on each of its last 5 runs"
    )
    assert re.search(grown, leaking[-1]), leaking[-1]
    for text in leaking[3:]:
        assert text.endswith("RAM +32 MiB per run is held by kept (dict of tuple)")
    assert reports("iter([bytearray(2**25)])", 4)[-1].endswith(
        "is held by Out (list of list_iterator)"
    )
    assert all(len(text.splitlines()) == 1 for text in reports("scratch = bytearray(2**25)", 5))
    kernel.run("import json; json.kept = {}")
    in_library = reports("json.kept[len(json.kept)] = {'text': ['x' * 2**25]}; scratch = 0", 4)
    assert in_library[-1].endswith("RAM +32 MiB per run is held by module json, global kept (str)")


def test_the_first_look_at_a_growing_cell_is_no_leak(kernel: Kernel) -> None:
    run_cells(kernel, "texts = []")
    for _ in range(3):
        run_cells(kernel, "texts += [f'{number:1500}' for number in range(10_000)]")
    (leaks,) = run_cells(kernel, "%gpumem leaks").leaks()
    assert leaks.startswith("no leak of at least 1 MiB was found"), leaks


def test_cells_that_allocate_and_free_in_turn_are_no_growth(kernel: Kernel) -> None:
    run_cells(kernel, "import numpy as np; kept = []")
    allocates = "kept.append(np.ones(2**22))"
    told = ["\n".join(kernel.run(allocates).reports("cell")) for _ in range(3)]
    for _ in range(3):
        run_cells(kernel, "kept.clear()")
        told += ["\n".join(kernel.run(allocates).reports("cell")) for _ in range(2)]
    assert [text for text in told if "has grown" in text] == []


def test_a_loop_whose_memory_is_freed_between_items_is_no_growth(kernel: Kernel) -> None:
    code = """
import numpy as np
kept = []
def items():
    for number in range(9):
        if number in (3, 5, 7):
            kept.clear()
        yield number
loop = ipygpumem.track(items())
for _ in loop:
    kept.append(np.ones(2**22))
"""
    run_cells(kernel, "import ipygpumem")
    reply = run_cells(kernel, code)
    assert "has grown" not in "\n".join(reply.reports())
    run_cells(kernel, code.replace("(3, 5, 7)", "()"))


_CHILD = (
    "import sys, time; held = bytes(30 << 20).replace(bytes(1), b'x'); print(flush=True); "
    "time.sleep(600)"
)
"""A process that has 30 MiB once it has printed a line."""
_STARTS = f"""
process = subprocess.Popen([sys.executable, "-c", {_CHILD!r}], stdout=subprocess.PIPE)
process.stdout.readline()
"""


def process_lines_in(text: str) -> list[tuple[int, str]]:
    """Return the numbers of the processes in a report on growth, with the lines that end them."""
    matches = re.findall(r"is held by process (\d+) \(\S+\); to end it: (.+)", text)
    return [(int(number), line) for number, line in matches]


@pytest.mark.parametrize(
    "keeps", ["", "started.append(process)", "started.append(process); del process"]
)
def test_a_cell_that_starts_a_process_each_time_names_it(kernel: Kernel, keeps: str) -> None:
    run_cells(kernel, "import os, subprocess, sys; started = []")
    texts = ["\n".join(kernel.run(_STARTS + keeps).reports("cell")) for _ in range(5)]
    assert ["child processes by" in text for text in texts] == [False] * 3 + [True] * 2
    for text in texts:
        assert "gaps between objects" not in text
    ((number, line),) = process_lines_in(texts[-1])
    run_cells(kernel, f"os.kill({number}, 0)", line)  # it runs until the line ends it
    assert kernel.value(f"os.waitid(os.P_PID, {number}, os.WEXITED).si_status") == 15
    kernel.run("import psutil; [child.kill() for child in psutil.Process().children()]")


def test_a_pools_worker_that_grows_is_named_with_the_pool(kernel: Kernel) -> None:
    code = """
import multiprocessing
held = []
def work(number):
    held.append(bytes(20 << 20).replace(bytes(1), b"x"))
pool = multiprocessing.get_context("fork").Pool(1)
"""
    run_cells(kernel, code)
    texts = ["\n".join(kernel.run("pool.map(work, [0])").reports("cell")) for _ in range(7)]
    assert re.search(r"child processes \+2\d(\.\d)? MiB per run is held by process", texts[-1]), (
        texts[-1]
    )
    ((number, line),) = process_lines_in(texts[-1])
    assert line == "pool.terminate()"
    assert "gaps between objects" not in texts[-1]
    (text,) = run_cells(kernel, line).reports("cell")
    freed = re.search(r"child processes -(\d+)\.?\d* MiB, 0 B now", text)
    assert freed is not None, text
    assert int(freed[1]) >= 7 * 20 * 0.9, text  # and the memory that a fork has of its own
    assert kernel.value("pool._state") == "TERMINATE"
    assert number > 0


def test_a_loop_that_starts_processes_names_them(kernel: Kernel) -> None:
    code = f"""
import ipygpumem, subprocess, sys
started = []
for number in ipygpumem.track(range(6)):
{"".join(f"    {line}" for line in _STARTS.strip().splitlines(keepends=True))}
    started.append(process)
"""
    reply = run_cells(kernel, code)
    text = "\n".join(reply.reports("track"))
    assert "per iteration is held by process" in text
    assert "to end it: process.terminate()" in text
    run_cells(kernel, "[process.kill() for process in started]")


def test_processes_that_the_same_line_ends_are_one_row() -> None:
    pools = [
        child(1, 50, "pool.terminate()"),
        child(2, 30, "pool.terminate()"),
        child(3, 90),
        child(4, 7),
    ]
    rows = growth_by_ending({1: 10 * MIB, 4: 8 * MIB}, pools)
    assert [(row.grown_bytes // MIB, [item.pid for item in row.processes]) for row in rows] == [
        (90, [3]),
        (70, [1, 2]),
    ]
    lines = process_lines(rows, Growth("children", 3, 40 * MIB, 80 * MIB), "run", 2)
    assert lines == [
        "child processes +45 MiB per run is held by process 3 (python); the line that ends it is "
        "not known",
        "child processes +35 MiB per run is held by processes 1 (python), 2 (python); to end them: "
        "pool.terminate()",
    ]


def child(pid: int, mib: int, ends_by: str = "") -> Child:
    return Child(pid, "python", 0.0, mib * MIB, True, ends_by=ends_by)


def test_a_named_process_has_a_shorter_line_than_one_in_a_list() -> None:
    started = [object.__new__(subprocess.Popen) for _ in range(3)]
    for pid, process in enumerate(started, 1):
        process.pid = pid
        process.returncode = 0
    names: dict[str, Any] = {
        "processes": [None, started[0]],
        "by": {"a b": started[1], 7: started[2]},
    }
    children = [child(pid, 1) for pid in (1, 2, 3)]
    lines = [item.ends_by for item in with_endings(children, names)]
    assert lines == ["processes[1].terminate()", 'by["a b"].terminate()', "by[7].terminate()"]
    assert with_endings(children, {**names, "last": started[0]})[0].ends_by == "last.terminate()"


def test_lines_for_data_loaders_can_run_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    # The classes by which loaders are known.
    loader = type("DataLoader", (), {})
    iterator = type("_MultiProcessingDataLoaderIter", (), {})
    module = types.ModuleType("torch.utils.data.dataloader")
    vars(module).update(DataLoader=loader, _MultiProcessingDataLoaderIter=iterator)
    monkeypatch.setitem(sys.modules, module.__name__, module)

    # Eight loaders in containers of each kind, each with one child process.
    loaders = []
    for pid in range(1, 9):
        loaders.append(loader())
        loaders[-1]._iterator = SimpleNamespace(_workers=[SimpleNamespace(_popen=pid)])
    first, second, third, fourth, fifth, sixth, seventh, eighth = loaders
    names = {
        "rows": [first, second],
        "pair": (third,),
        "third": third,
        "by": {7: fourth, 8: fifth},
        "nested": {"train": [sixth], "test": [(seventh, seventh)], "all": ({"last": eighth}, 1)},
    }
    children = with_endings([child(pid, 1) for pid in range(1, 9)], names)

    # A line for each, which can be run after the ones above it.
    assert endings(children) == [
        "rows[0] = None",
        "rows[1] = None",
        "del pair, third",
        "del by[7]",
        "del by[8]",
        'nested["train"][0] = None',
        'nested["test"][0] = None',
        'del nested["all"][0]["last"]',
    ]

    # All lines together free the seven that are watched.
    last = loaders.pop()
    del first, second, third, fourth, fifth, sixth, seventh, eighth, last
    references = [weakref.ref(item) for item in loaders]
    loaders.clear()
    exec("; ".join(endings(children)), names)
    assert [reference() for reference in references] == [None] * 7


def test_fragmentation_is_named_only_if_free_pages_grew() -> None:
    growth = Growth("cpu", 3, 20 * MIB, 20 * MIB)
    assert free_heap_line(growth, 15 * MIB, "run") == [
        "RAM +15 MiB per run is free in malloc's heap, in gaps between objects: %gpumem free"
    ]
    assert free_heap_line(growth, MIB // 2, "run") == []
    assert (
        unknown_line(growth)
        == "no name, tensor or array accounts for the growth of RAM: its holder is unknown"
    )


def test_memory_of_a_c_library_has_an_unknown_holder(kernel: Kernel) -> None:
    run_cells(
        kernel, "import ctypes; libc = ctypes.CDLL(None); libc.malloc.restype = ctypes.c_void_p"
    )
    code = "_ = ctypes.memset(libc.malloc(2**25), 1, 2**25)"
    text = ["\n".join(kernel.run(code).reports("cell")) for _ in range(5)][-1]
    assert text.endswith(
        "no name, tensor or array accounts for the growth of RAM: its holder is unknown"
    ), text
