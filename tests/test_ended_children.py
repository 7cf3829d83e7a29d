"""A child process that ended in a cell leaves its peak on the cell's line."""

import re
import sys

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.probes.children import EndedChildren
from ipygpumem.units import MIB
from tests.steps import run_quietly

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="by Linux's figures")

CHILD = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "x = bytearray(SIZE << 20)"])
"""


def line(kernel: Kernel, cell: str) -> str:
    (text,) = run_quietly(kernel, cell).reports("cell")
    return text


def test_a_child_that_ended_leaves_its_peak_on_the_line(kernel: Kernel) -> None:
    peak = re.search(
        r"child process peak \+(\d+)(\.\d)? MiB", line(kernel, CHILD.replace("SIZE", "300"))
    )
    assert peak is not None
    # The block of 300 MiB, and the interpreter.
    assert 300 <= int(peak[1]) <= 340
    # The kernel keeps one largest peak for all children, so that an equal one is not known.
    again = line(kernel, CHILD.replace("SIZE", "290"))
    assert "child process peak" not in again
    touched = re.search(
        r"child processes that ended in it touched (\d+)(\.\d)? MiB; their peak is not known", again
    )
    assert touched is not None
    assert "child process peak" not in line(kernel, "1")
    assert kernel.value("__import__('ipygpumem').history()[0].child_peak_bytes >> 20") >= 300


@pytest.mark.parametrize(
    "cell",
    [
        '!{sys.executable} -c "x = bytearray(300 << 20)"',
        """
import multiprocessing
process = multiprocessing.get_context("fork").Process(target=eval, args=("len(bytearray(300 << 20))",))
process.start()
process.join()
""",  # noqa: E501
        """
from concurrent.futures import ProcessPoolExecutor
with ProcessPoolExecutor(1) as pool:
    pool.submit(eval, "len(bytearray(300 << 20))").result()
""",
    ],
)
def test_other_ways_to_start_a_child_have_a_peak_too(kernel: Kernel, cell: str) -> None:
    run_quietly(kernel, "import sys")
    assert "child process peak +3" in line(kernel, cell)


def test_this_processs_own_pages_are_no_peak_of_a_child(kernel: Kernel) -> None:
    # A child has the pages of this process until it executes its program.
    text = line(kernel, 'x = b"x" * (300 << 20)\nimport subprocess\nsubprocess.run(["true"])')
    assert "child process" not in text


@pytest.mark.parametrize(
    ("before", "now", "own", "peak"),
    [
        (0, 300, 60, 300),
        (300, 300, 60, None),
        (0, 62, 60, None),
        (0, 300, 400, None),
        (200, 500, 60, 500),
    ],
)
def test_a_childs_peak_is_known_only_if_it_is_the_largest(
    before: int, now: int, own: int, peak: int | None
) -> None:
    peak_bytes = EndedChildren(now * MIB, 0).peak_since(EndedChildren(before * MIB, 0), own * MIB)
    assert peak_bytes == (None if peak is None else peak * MIB)
