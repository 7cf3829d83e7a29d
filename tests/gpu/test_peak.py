"""``%%peak``: sums equal the allocator's peak to the byte, at the failure too; the user's recording
goes on.
"""

import json
import os
from pathlib import Path

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.units import MIB
from tests.alone import ROOT, printed
from tests.gpu.support import ready, script
from tests.steps import run_failing, run_quietly

_STEPS = """
import json, random, torch, ipygpumem
from torch import nn
from ipygpumem.extras.peak import following
torch.backends.cudnn.enabled = False
following._MOST_LIVES = {most}

def train():
    model = nn.Sequential(nn.Linear(512, 2000), nn.ReLU(), nn.Linear(2000, 2000), nn.ReLU(), nn.Linear(2000, 10)).cuda()
    optimizer, data = torch.optim.Adam(model.parameters()), torch.randn(999, 512, device="cuda")
    for _ in range(3):
        optimizer.zero_grad()
        model(data).logsumexp(1).mean().backward()
        optimizer.step()

def allocate():
    random.seed(0)
    held, sizes = [], [10, 1000, 300_000, 1_200_000, 5_000_000, 11 << 20]
    for _ in range(1500):
        held.append(torch.empty(random.choice(sizes), device="cuda", dtype=torch.uint8))
        if random.random() < 0.52:
            held.pop(random.randrange(len(held)))

found = []
for work in (train, allocate, train):
    torch.cuda.reset_peak_memory_stats()
    with ipygpumem.peak() as peak:
        work()
    device = next(device for device in peak.record.devices if device.device == "cuda:0")
    highest = max(sum(point.parts.values()) for point in device.curve)
    found.append([device.size_bytes, sum(row.size_bytes for row in device.rows), highest])
    found[-1] += [torch.cuda.max_memory_allocated(), peak.record.notes, device.parts]
print(json.dumps(found))
"""  # noqa: E501


@pytest.mark.parametrize(
    ("most", "settings"),
    [(50_000, ""), (100, ""), (50_000, "expandable_segments:True"), (99, "max_split_size_mb:20")],
)
def test_sums_equal_the_allocators_peak(most: int, settings: str) -> None:
    """Sums of rows and the highest point of the curve equal max_memory_allocated to the byte, also
    where the history is read in parts, and with settings that change how blocks are split.
    """
    figures = script(_STEPS.replace("{most}", str(most)), env={"PYTORCH_CUDA_ALLOC_CONF": settings})
    for size, rows, highest, allocated, notes, _ in figures:
        assert size == rows == highest == allocated
        assert [note for note in notes if "memray" not in note] == []
    parts = figures[2][-1]
    weights = 4 * (512 * 2000 + 2000 * 2000 + 2000 * 10)
    assert weights <= parts["parameters"] <= weights * 1.2
    assert 2 * weights <= parts["optimizer state"] <= 2 * weights * 1.2
    assert {"gradients", "cuBLAS workspaces"} <= parts.keys()


def test_after_an_out_of_memory_error_the_failure_is_shown(kernel: Kernel) -> None:
    """After an out-of-memory error the rows are the blocks at the failure; tensors that were freed
    before are not.
    """
    ready(kernel)
    cell = "%%peak\nfreed = torch.empty(99 << 20, dtype=torch.uint8, device='cuda')\ndel freed\n"
    cell += (
        "left = torch.empty(33 << 20, dtype=torch.uint8, device='cuda')\ntorch.empty(1 << 50, "
        "device='cuda')"
    )
    (report,) = run_failing(kernel, cell).reports("peak")
    assert "cuda:0 out of memory with" in report
    (row,) = [line for line in report.splitlines() if line.split()[-1:] == ["left"]]
    assert row.split()[:2] == ["34", "MiB"] or row.split()[:2] == ["33", "MiB"]
    assert "99 MiB" not in report


_RECORDING = """
def state():
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    return torch._C._cuda_isHistoryEnabled(), sum(event["action"] == "alloc" for event in events)
"""


def test_the_users_recording_goes_on(kernel: Kernel) -> None:
    """A recording that the user has switched on goes on afterwards with its history; otherwise
    there is none.
    """
    ready(kernel)
    run_quietly(kernel, _RECORDING, "%%peak\nx = torch.ones(9, device='cuda')")
    assert kernel.value("state()") == (False, 0)
    run_quietly(
        kernel, "torch.cuda.memory._record_memory_history(); x = torch.ones(9, device='cuda')"
    )
    (report,) = run_quietly(kernel, "%%peak\ny = torch.ones(3 << 20, device='cuda')").reports(
        "peak"
    )
    assert any(line.split()[-1:] == ["y"] for line in report.splitlines())
    assert kernel.value("state()") == (True, 2)
    run_quietly(kernel, "torch.cuda.memory._record_memory_history(None)")


def test_a_recording_that_ends_in_the_block_is_told(kernel: Kernel) -> None:
    """Blocks share torch's recording: when the first one ends it, the other says that later memory
    is missing.
    """
    ready(kernel)
    run_quietly(kernel, "import ipygpumem; first, second = ipygpumem.peak(), ipygpumem.peak()")
    run_quietly(kernel, "x = torch.ones(9, device='cuda'); first.__enter__(); second.__enter__()")
    run_quietly(kernel, "first.__exit__(None, None, None); x = torch.ones(9, device='cuda')")
    run_quietly(kernel, "second.__exit__(None, None, None)")
    said = (
        "['recording of CUDA memory ended early' in str(block.record) for block in (first, second)]"
    )
    assert kernel.value(said) == [False, True]


def test_the_history_is_saved_for_torchs_viewer(kernel: Kernel) -> None:
    """--save writes torch's snapshot with its history, and replaces an earlier one."""
    ready(kernel)
    for _ in range(2):
        (report,) = run_quietly(
            kernel, "%%peak --save steps.pickle\nz = torch.ones(9, device='cuda')"
        ).reports("peak")
        assert "steps.pickle" in report
    run_quietly(
        kernel,
        "import pickle, os\nwith open('steps.pickle', 'rb') as file: snapshot = pickle.load(file)",
    )
    run_quietly(kernel, "os.remove('steps.pickle')")
    assert "alloc" in kernel.value("[event['action'] for event in snapshot['device_traces'][0]]")


_BACKWARD = """
import json, torch, ipygpumem
from torch import nn
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(256, 1024)
    def forward(self, x):
        x = self.inner(x)
        return x.relu().sigmoid()

model = Net().cuda()
data = torch.randn(4096, 256, device="cuda")
found = []
for run in (lambda x: model(x), lambda x: checkpoint(model, x, use_reentrant=True)):
    x = data.clone().requires_grad_()
    with ipygpumem.peak() as peak:
        for _ in range(2):
            result = run(x)
            loss = nn.functional.cross_entropy(result, torch.zeros(4096, 1024, device="cuda"))
            loss.backward()
    device = next(device for device in peak.record.devices if device.device == "cuda:0")
    found.append([(row.size_bytes, row.operation, row.line) for row in device.rows if not row.name])
print(json.dumps(found))
"""


def test_memory_of_backward_has_the_line_of_the_forward_pass(tmp_path: Path) -> None:
    """autograd's thread of a card runs no line of the user's code. The rows have the line whose
    node runs, and memory inside an operation has it, too.
    """
    file = tmp_path / "step.py"
    file.write_text(_BACKWARD)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    plain, checkpointed = json.loads(printed(file, env=environment).splitlines()[-1])
    for rows in (plain, checkpointed):
        without_line = [
            operation for size, operation, line in rows if size >= MIB and operation and not line
        ]
        assert set(without_line) <= {"existed before", "autograd or C++ code"}
        lines = {operation: line for _, operation, line in rows if "backward" in operation}
        assert lines
        own_lines = [line for operation, line in lines.items() if "of model" in operation]
        assert own_lines
        assert all("x.relu().sigmoid()" in line or "inner(x)" in line for line in own_lines)
