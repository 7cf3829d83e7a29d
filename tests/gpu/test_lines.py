"""``%gpumemit`` and ``%%memlines`` on a device: the allocator's counters are exact."""

from __future__ import annotations

import re

import pytest

from ipygpumem.units import MIB, parse_bytes
from tests.gpu.support import ready, run_ok
from tests.kernel import Kernel

SIZE, UNSPLIT = 10**8 * 4 / MIB, 382
"""MiB of the tensor, and of the block that the allocator may leave whole for it."""

SETUP = """
import torch.nn.functional as F
x = torch.randn(10000, 10000, device="cuda")
def step(x):
    first = x * 2
    second = first.relu()
    del first
    return second.sum()
"""


@pytest.fixture
def with_block(kernel: Kernel) -> Kernel:
    """A kernel with a tensor of 381.5 MiB and a function that makes two like it."""
    ready(kernel)
    run_ok(kernel, SETUP)
    return kernel


def changes(line: str) -> list[float]:
    """Return the last two changes of a report's line, what was kept and the peak, in MiB."""
    found = re.findall(r"([+-])([\d.]+(?: (?:[KMG]i)?B)?)", line)
    return [float(f"{sign}{parse_bytes(size) / MIB}") for sign, size in found[-2:]]


def rows(kernel: Kernel, cell: str, kind: str) -> list[str]:
    """Return the lines of a report that tell of the device."""
    (report,) = run_ok(kernel, cell).reports(kind)
    return list(report.splitlines())


def test_a_statement_out_of_place_costs_its_result_and_in_place_nothing(with_block: Kernel) -> None:
    """%%gpumemit: F.relu(x) costs the 381.5 MiB of its result, and F.relu_(x) nothing."""
    found = rows(with_block, "%%gpumemit -r 3\nF.relu(x)\nF.relu_(x)", "gpumemit")
    copy, in_place = [changes(line) for line in found if line.split()[:1] == ["cuda:0"]]
    assert copy[0] == 0
    assert SIZE - 0.1 <= copy[1] <= UNSPLIT
    assert in_place == [0, 0]


def test_lines_have_exact_figures(with_block: Kernel) -> None:
    """%%memlines: each line of a function has what it kept and its peak, to the allocator's rounding."""
    found = rows(with_block, "%%memlines -f step\nout = step(x)", "memlines")

    def figures(source: str) -> list[float]:
        return changes(next(line for line in found if line.endswith(source)).removesuffix(source))

    for source in ("first = x * 2", "second = first.relu()"):
        assert all(SIZE - 0.1 <= size <= UNSPLIT for size in figures(source))
    assert -UNSPLIT <= figures("del first")[0] <= -SIZE + 0.1
    assert 2 * SIZE - 0.1 <= figures("out = step(x)")[1] <= 2 * UNSPLIT


def test_the_users_own_peak_is_whole_over_the_lines(with_block: Kernel) -> None:
    """The user's max_memory_allocated is the whole peak, though every line was measured by itself."""
    run_ok(with_block, "torch.cuda.reset_peak_memory_stats(); before = torch.cuda.memory_allocated()")
    run_ok(with_block, "%%memlines -f step\nout = step(x)")
    assert with_block.value("torch.cuda.max_memory_allocated() - before") >= 2 * 4 * 10**8
