"""``--record``: torch's own snapshots, opened by torch's own viewer, and what a recording leaves behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.gpu.support import ready, run_ok
from tests.kernel import Kernel

MAKE = "def make(mib):\n    return torch.empty(mib << 20, dtype=torch.uint8, device='cuda')\n"


def snapshot(kernel: Kernel, path: Path, what: str) -> Any:
    """Return an expression over a snapshot, told by the kernel: ``data`` is what the file holds."""
    return kernel.value(f"(lambda data: {what})(__import__('pickle').load(open({str(path)!r}, 'rb')))")


def test_an_experiments_snapshot(kernel: Kernel, tmp_path: Path) -> None:
    """A snapshot names the function that allocated, from the first use of CUDA on, and torch's own viewer makes a page
    of it. A second run replaces it; torch records no more after it, unless the user's own recording goes on."""
    path, page = tmp_path / "a.pickle", tmp_path / "a.html"
    events = "[event for trace in data['device_traces'] for event in trace]"
    run_ok(kernel, f"%%experiment a --record {path}\nimport torch\nbatch = torch.ones(1 << 20, device='cuda')")
    assert snapshot(kernel, path, f"len({events})") > 0
    run_ok(kernel, MAKE)
    run_ok(kernel, f"%%experiment a --record {path}\nbatch = make(64)")
    assert "make" in snapshot(kernel, path, f"{{f['name'] for e in {events} for f in e.get('frames', [])}}")
    assert 64 << 20 in snapshot(kernel, path, f"{{e['size'] for e in {events}}}")
    assert "cannot" not in kernel.value("__import__('ipygpumem').experiments()[-1].notes[0]")
    assert kernel.value("torch._C._cuda_isHistoryEnabled()") is False
    viewer = [sys.executable, "-m", "torch.cuda._memory_viz", "trace_plot", str(path), "-o", str(page)]
    subprocess.run(viewer, check=True, timeout=120)
    assert page.stat().st_size > 0
    run_ok(kernel, "torch.cuda.memory._record_memory_history(max_entries=1000)")
    run_ok(kernel, f"%%experiment a --record {path}\nbatch = torch.ones(8, device='cuda')")
    assert kernel.value("torch._C._cuda_isHistoryEnabled()") is True


def test_out_of_memory_writes_what_held_the_memory(kernel: Kernel, tmp_path: Path) -> None:
    """An out-of-memory error writes a snapshot of what was held then, and the experiment's end leaves it as it is."""
    ready(kernel)
    run_ok(kernel, MAKE)
    path = tmp_path / "a.pickle"
    run_ok(kernel, f"%experiment start a --record {path}")
    reply = kernel.run("def fail():\n    held = make(256)\n    return make(1 << 30)\nfail()")
    assert reply.error == "OutOfMemoryError"
    live = "[block['size'] for segment in data['segments'] for block in segment['blocks'] if block['state'] == "
    assert 256 << 20 in snapshot(kernel, path, live + "'active_allocated']")
    run_ok(kernel, "%experiment end")
    assert 256 << 20 in snapshot(kernel, path, live + "'active_allocated']")
