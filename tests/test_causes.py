"""Why memory ran out: the rule that decides, and causes staged on the host with their remedies."""

import random
import shutil
import subprocess
import sys
from dataclasses import replace
from typing import NamedTuple

import pytest

from benchmarks.harness.control_group import limited_group, move
from benchmarks.harness.kernel import Kernel
from ipygpumem.inventory.out_of_memory.causes import Bound, ProcessOrNames, Shortage, cause_of
from ipygpumem.units import GIB, MIB
from tests.alone import ROOT
from tests.steps import run_cells, run_failing, tidied_kernel

CARD = Shortage("cuda:0", 6 * GIB, 24 * GIB, 5 * GIB, setting="A=expandable_segments:True")
HOST = Shortage("cpu", 6 * GIB, 24 * GIB, 5 * GIB, overcommits=True)
GAPS = replace(CARD, gap_bytes=2 * GIB, largest_gap_bytes=GIB, expandable_bytes=2 * GIB)
NAMES = ProcessOrNames("names", "names", 3 * GIB, 8 * GIB, "del them")
PROCESS = ProcessOrNames("process", "process", 4 * GIB, 9 * GIB, "end it")
BOUND = Bound(GIB, "the limit", "lift it")
TIGHT_BOUND = BOUND._replace(left_bytes=MIB)
LIMITED = replace(HOST, bounds=(BOUND,))


FRAGMENTATION = f"restart the kernel and run first: %env {CARD.setting}"
SHORTAGES: list[tuple[Shortage, str | None, str]] = [
    (CARD, "too much", ""),
    (replace(CARD, requested_bytes=25 * GIB), "too large", ""),
    (replace(CARD, requested_bytes=25 * GIB, bounds=(BOUND,)), "too large", ""),
    (replace(CARD, requested_bytes=None), None, ""),
    (replace(CARD, free_bytes=None), None, ""),
    (replace(CARD, free_bytes=7 * GIB), None, ""),
    (replace(CARD, free_bytes=6 * GIB - MIB), None, ""),  # the message has rounded
    (GAPS, "fragmentation", FRAGMENTATION),
    (replace(GAPS, holders=(NAMES,)), "fragmentation", FRAGMENTATION),
    (replace(GAPS, setting=""), "fragmentation", ""),
    (replace(GAPS, expandable_bytes=GIB // 2), "fragmentation", ""),
    (replace(GAPS, gap_bytes=GIB), None, ""),
    (replace(GAPS, gap_bytes=GIB // 2), "too much", ""),
    (replace(GAPS, gap_bytes=GIB // 2, idle_bytes=GIB), None, ""),
    (replace(CARD, holders=(NAMES, PROCESS)), "process", "end it"),
    (replace(CARD, holders=(NAMES, PROCESS._replace(size_bytes=GIB))), "names", "del them"),
    (replace(CARD, holders=(NAMES._replace(room_bytes=6 * GIB),)), "too much", ""),
    (HOST, None, ""),
    (replace(HOST, overcommits=False), "too much", ""),
    (LIMITED, "limit", "lift it"),
    (replace(LIMITED, holders=(NAMES,)), "limit", "del them"),
    (replace(LIMITED, requested_bytes=GIB), None, ""),
    (replace(LIMITED, requested_bytes=None), None, ""),
    (replace(LIMITED, bounds=(TIGHT_BOUND,), requested_bytes=None), "limit", "lift it"),
]
"""Shortages, each with the kind of its cause and the remedy."""


@pytest.mark.parametrize(("shortage", "kind", "remedy"), SHORTAGES)
def test_the_figures_decide(shortage: Shortage, kind: str | None, remedy: str) -> None:
    cause = cause_of(shortage)
    if kind is None:
        assert cause is None
    else:
        assert cause is not None
        assert (cause.kind, cause.remedy) == (kind, remedy)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 100))]
)
def test_the_cause_is_the_figure_that_decides(seed: int) -> None:
    """In random states, the request would fit without the cause, and does not fit with it."""
    choose = random.Random(seed)
    for _ in range(100):
        shortage = random_shortage(choose)
        cause = cause_of(shortage)
        assert cause is None or is_true(cause.kind, shortage), (shortage, cause)


def random_shortage(choose: random.Random) -> Shortage:
    """Return a request and a device with random figures."""
    requested, free, gaps = (choose.randrange(1, 30) * GIB // 2 for _ in range(3))
    holders = []
    for holder in (NAMES, PROCESS):
        size = choose.randrange(1, 20) * GIB
        holders.append(holder._replace(size_bytes=size, room_bytes=free + size))
    bound = Bound(choose.randrange(0, 20) * GIB, "the limit", "")
    on_host = choose.random() < 0.3
    shortage = Shortage(
        "cpu" if on_host else "cuda:0",
        requested,
        choose.randrange(10, 40) * GIB,
        free,
        overcommits=on_host,
        largest_gap_bytes=gaps // 2,
        holders=tuple(choose.sample(holders, choose.randint(0, 2))),
    )
    if on_host:
        return replace(shortage, bounds=(bound,))
    return replace(shortage, gap_bytes=gaps)


def is_true(kind: str, shortage: Shortage) -> bool:
    """Return True if the figures of a shortage make this kind of cause possible."""
    requested, total, free = shortage.requested_bytes, shortage.total_bytes, shortage.free_bytes
    assert requested is not None
    assert total is not None
    assert free is not None
    if kind == "too large":
        return requested > total
    if kind == "limit":
        return any(bound.left_bytes < requested <= total for bound in shortage.bounds)
    if kind == "fragmentation":
        return max(free, shortage.largest_gap_bytes) < requested < free + shortage.gap_bytes
    if kind == "too much":
        return free + shortage.gap_bytes < requested
    for holder in shortage.holders:
        if holder.kind == kind:
            return free < requested < holder.room_bytes
    return False


LIMIT = """
import os, sys, resource, numpy as np, psutil, ipygpumem
def limit(name, mib):
    used = {"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData"}[name]
    with open("/proc/self/status") as file:
        kib = next(int(line.split()[1]) for line in file if line.startswith(used))
    resource.setrlimit(getattr(resource, name), ((kib << 10) + (mib << 20), -1))
def array(mib): return np.ones(mib << 17)
def rows():
    rows = []
    while True: rows.append(bytes(10000))
def cause():
    found = ipygpumem.last().recovery.cause
    return found and (found.kind, found.text, found.remedy)
"""
UNLIMIT = (
    "for name in ('RLIMIT_AS', 'RLIMIT_DATA'): resource.setrlimit(getattr(resource, name), (-1, "
    "-1))"
)
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the host's causes are known on Linux only"
)
shared_kernel, notebook = tidied_kernel(
    LIMIT, UNLIMIT, "history = other = None", hides_libraries=True
)


class RecordedCause(NamedTuple):
    """The cause that a record of a recovery names."""

    kind: str
    text: str
    remedy: str


def cause_if_named(kernel: Kernel, cell: str) -> RecordedCause | None:
    """Run a cell that runs out of memory; return its cause, which the report shows."""
    reports = run_failing(kernel, cell).reports("recovery")
    recorded = kernel.value("cause()")
    if recorded is None:
        return None
    cause = RecordedCause(*recorded)
    if cause.kind != "guard":
        assert ": ".join(filter(None, (cause.text, cause.remedy))) in reports[0]
    return cause


def cause_in(kernel: Kernel, cell: str) -> RecordedCause:
    """Run a cell that runs out of memory; return its cause, which must be known."""
    cause = cause_if_named(kernel, cell)
    assert cause is not None
    return cause


def test_more_than_the_machine_has(notebook: Kernel) -> None:
    cause = cause_in(notebook, "array(1 << 30)")
    assert cause.kind == "too large"
    assert cause.text.startswith("asked for 1.00 PiB, but the machine has ")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("RLIMIT_AS", "address space"),
        pytest.param("RLIMIT_DATA", "data", marks=pytest.mark.thorough),
    ],
)
def test_a_limit_of_the_process(name: str, what: str, notebook: Kernel) -> None:
    run_cells(notebook, "%gpumem free", f"limit('{name}', 150)")
    for cell, begins in (
        ("array(600)", "asked for 600 MiB, but only "),
        ("rows()", "almost nothing was left of the "),
    ):
        kind, text, remedy = cause_in(notebook, cell)
        assert kind == "limit"
        assert text.startswith(begins)
        assert f" of {what} that this process may use ({name})" in text
        assert remedy == f"import resource; resource.setrlimit(resource.{name}, (-1, -1))"
    run_cells(notebook, remedy, "array(600)[0]")


def test_names_of_earlier_cells_hold_memory_below_a_limit(notebook: Kernel) -> None:
    run_cells(
        notebook,
        "%gpumem free",
        "limit('RLIMIT_AS', 800)",
        "history = {'losses': [array(300), array(300)]}",
    )
    run_cells(notebook, "other = array(100)", "def uses(): return array(400) + len(other)")
    cause = cause_in(notebook, "array(400)[0]")
    assert (cause.kind, cause.remedy) == ("limit", "del history")
    assert ". 600 MiB are still held by history from cell " in cause.text
    run_cells(
        notebook, cause.remedy, "array(400)[0]", "history = other = None", "other = array(600)"
    )
    assert cause_in(notebook, "uses()").remedy.startswith("import resource")


def test_a_name_of_one_array_is_blamed(notebook: Kernel) -> None:
    run_cells(notebook, "%gpumem free", "limit('RLIMIT_AS', 800)", "history = array(600)")
    cause = cause_in(notebook, "array(400)[0]")
    assert cause.remedy == "del history"
    run_cells(notebook, cause.remedy, "array(400)[0]")


UNSEEN = {
    "def text(): return f.query('a == @history[0]')\nimport pandas; f = pandas.DataFrame({'a': "
    "[1.0]})": "text()",
    "class Of(dict): pass\ndef own(self): return len(history)\nOf.own = own; del own; of = Of()": "of.own()",  # noqa: E501
    "def direct(): return sys.modules['__main__'].__dict__[''.join(['his', 'tory'])]": "direct()",
}


@pytest.mark.parametrize("before", UNSEEN, ids=["text", "method", "module"])
def test_a_name_that_the_cell_may_use_is_not_blamed(before: str, notebook: Kernel) -> None:
    run_cells(notebook, before, "%gpumem free", "limit('RLIMIT_AS', 800)", "history = array(600)")
    cause = cause_if_named(notebook, f"{UNSEEN[before]}; array(400)[0]")
    assert cause is None or "history" not in cause.text + cause.remedy


def test_shared_mappings_and_earlier_errors_are_not_blamed(notebook: Kernel) -> None:
    run_cells(
        notebook,
        "import mmap",
        "limit('RLIMIT_DATA', 350)",
        "history = np.frombuffer(mmap.mmap(-1, 600 << 20), 'u1')",
    )
    run_cells(
        notebook,
        "path = os.path.join(os.environ['IPYTHONDIR'], 'a.npy'); np.save(path, np.ones(200 << 17))",
    )
    run_cells(
        notebook,
        "history = np.load(path, mmap_mode='r')",
        "%gpumem free",
        "limit('RLIMIT_DATA', 350)",
    )
    cause = cause_if_named(notebook, "array(500)[0]")
    assert cause is None or "history" not in cause.text + cause.remedy
    run_cells(
        notebook,
        """
        try: array(1 << 30)
        except MemoryError as error: kept = error
        """,
    )
    assert cause_if_named(notebook, "raise kept") is None


@pytest.mark.parametrize(
    "cell",
    ["raise MemoryError", "raise MemoryError('Unable to allocate 64.0 TiB')", "[0] * (1 << 60)"],
)
def test_errors_without_a_cause(cell: str, notebook: Kernel) -> None:
    run_cells(notebook, "limit('RLIMIT_AS', 400)")
    assert cause_if_named(notebook, cell) is None


def test_the_guard_names_its_limit_or_the_control_group(notebook: Kernel) -> None:
    run_cells(notebook, "%gpumem guard on --limit 300MiB")
    cause = cause_in(notebook, "array(600)")
    run_cells(notebook, "%gpumem guard off")
    assert cause.kind == "guard"
    assert "the memory guard refused 600 MiB: " in cause.text
    assert cause.text.endswith("of the limit of 300 MiB were left for this cell")
    with limited_group(300 * MIB) as group, Kernel() as kernel:
        move(int(kernel.value("__import__('os').getpid()")), group)
        run_cells(kernel, "%load_ext ipygpumem", LIMIT, "%gpumem guard on")
        cause = cause_in(kernel, "array(600)")
        assert "of the control group's 300 MiB were left" in cause.text


SHARED = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "ipygpumem")
import ipygpumem
def cause(cell):
    assert not shell.run_cell(cell).success
    found = ipygpumem.last().recovery
    return found and found.cause and found.cause.kind, found and found.cause and found.cause.text
fill = "with open('/dev/shm/x', 'wb', buffering=0) as file:\\n    while True: file.write(bytes(1 << 20))"
loader = '''import torch
class Images(torch.utils.data.Dataset):
    def __len__(self): return 20
    def __getitem__(self, index): return torch.ones(5 << 20)
kept = [batch for batch in torch.utils.data.DataLoader(Images(), batch_size=1, num_workers=2)]'''
full = "shm", "0 B of the 64 MiB of shared memory (/dev/shm) were left: too little"
assert cause(fill) == full, cause(fill)
other = cause("raise OSError(28, 'No space left on device')"), cause("open('/proc/self/none')")
assert other == ((None, None), (None, None)), other
shell.run_cell("import os; os.remove('/dev/shm/x')")
kind, text = cause(loader)
assert (kind, text.partition(" of the ")[2].partition(" of ")[0]) == ("shm", "64 MiB"), text
assert cause("torch.ones(32 << 20).share_memory_()")[0] == "shm"
"""  # noqa: E501


@pytest.mark.thorough
def test_shared_memory_is_full() -> None:
    """A file, a DataLoader's batch and a tensor that do not fit into /dev/shm; other errors are not
    its fault.
    """
    unshare = shutil.which("unshare")
    prepare = 'mount -t tmpfs -o size=64m tmpfs /dev/shm || exit 99\nexec "$@"'
    command = [str(unshare), "-m", "sh", "-c", prepare, "sh", sys.executable, "-c", SHARED]
    done = (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if unshare
        else None
    )
    if done is None or done.returncode == 99 or "unshare failed" in done.stderr:
        pytest.skip("no file system can be mounted here")
    assert done.returncode == 0, done.stderr[-2000:]
