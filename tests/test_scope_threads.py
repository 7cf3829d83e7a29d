"""Names that threads of an experiment's code use while it ends."""

from __future__ import annotations

import pytest

from benchmarks.harness.kernel import Kernel
from tests.steps import kernel_with, run_cells

kernel = kernel_with("%load_ext ipygpumem\nimport threading", "%config IPyGpuMem.quiet = True")

_START = """
%%experiment e
has_begun, may_end = threading.Event(), threading.Event()
def work(may_end=may_end, has_begun=has_begun):
    {work}
thread = threading.Thread(target=work)
thread.start()
keep.extend([thread, may_end])
has_begun.wait(20){more};
"""
_END = "keep[1].set(); keep[0].join()"


@pytest.mark.parametrize(
    ("work", "more", "is_left"),
    [
        ("global result; result = [1]; has_begun.set(); may_end.wait(20); result.append(2)", "", 1),
        ("global result; result = [1]; has_begun.set()", "; thread.join()", 0),
        ("has_begun.set(); may_end.wait(20)", "; exec('result = [1]')", 0),
        ("global result; has_begun.set(); may_end.wait(20); result = [1, 2]", "; result = [1]", 0),
    ],
    ids=["used by the thread", "of a thread that has ended", "not of the thread", "of the cell"],
)
def test_a_name_of_a_running_thread_stays(
    kernel: Kernel, work: str, more: str, is_left: int
) -> None:
    run_cells(kernel, "keep = []", _START.format(work=work, more=more))
    assert kernel.value("'result' in globals()") == bool(is_left)
    run_cells(kernel, _END)
    if is_left:
        assert kernel.value("result") == [1, 2]
    run_cells(kernel, "%reset_selective -f ^result$")
