"""%%estimate --fit against torch's allocator: the cell written by hand runs on the smallest card on
which it fits.
"""

from collections.abc import Callable

import pytest

from tests.gpu.support import script

SEARCH = """
import json
from bisect import bisect_left
from dataclasses import replace
from benchmarks.harness.fit_search import search
from ipygpumem.units import MIB
from tests.fit_cells import PLAIN

def smallest(device):
    sizes = range(512, 4096)
    return sizes[bisect_left(sizes, True, key=lambda size: replace(device, room_bytes=size * MIB).verdict == "fits")]

found = search(PLAIN, "950MiB")
print(json.dumps({trial.title: [trial.changes[0].line, smallest(trial.device)] for trial in found.trials}))
"""  # noqa: E501
RUN_TRAINING = """
import json
from tests.fit_cells import BY_HAND
cell = BY_HAND[TITLE].replace("LINE", LINE).replace("= Net()", "= Net().cuda()")
for data in ("torch.randn(8, 512, 256", "torch.zeros(4096"):
    assert data in cell
    cell = cell.replace(data, f"{data}, device='cuda'")
exec(cell, names := {})
print(json.dumps([names["torch"].cuda.is_available(), names["torch"].cuda.max_memory_allocated() > 0]))
"""  # noqa: E501


@pytest.mark.simulated
def test_each_change_fits_on_a_card_of_the_size_that_is_said(
    machine: Callable[..., None], figure: Callable[[str], None]
) -> None:
    lines_and_sizes = script(SEARCH, env={"CUDA_VISIBLE_DEVICES": ""})
    # Else hardly a change was tried.
    assert len(lines_and_sizes) >= 4
    for title, (line, mib) in lines_and_sizes.items():
        machine(gib=mib / 1024)
        assert script(f"TITLE, LINE = {title!r}, {line!r}\n{RUN_TRAINING}") == [True, True], title
    figure(f"with {', '.join(lines_and_sizes)}, a step ran on the smallest card on which it fits")


LINES_OF_MODELS = """
import json, torch
from dataclasses import replace
from tests.fit_models import MODELS, changes, pasted
from tests.gpu.step_figures import clean

total_bytes = torch.cuda.get_device_properties(0).total_memory

def runs(code, limit_bytes):
    code = code.replace("optimizer = torch", "model.cuda()\\noptimizer = torch", 1)
    code = code.replace("whole = x, y", "x, y = x.cuda(), y.cuda()\\nwhole = x, y")
    clean()
    torch.cuda.set_per_process_memory_fraction((limit_bytes + 1) / total_bytes)
    try:
        exec(code, {})
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return torch.cuda.max_memory_allocated() > 0

rows = []
for name in MODELS:
    clean()  # an estimate counts what other code has left on the card
    found, offered = changes(name)
    devices = [found.trial_with(change).device for change in offered]
    for change, device in zip(offered, devices, strict=True):
        least_bytes = device.needed_bytes + device.spare_bytes
        said = replace(device, context_bytes=0, room_bytes=least_bytes).verdict
        rows.append([f"{name}, {change.title}", said, runs(pasted(name, change), least_bytes)])
enough, too_little = runs(pasted(name, change), least_bytes), runs(pasted(name, change), 1 << 20)
print(json.dumps([rows, len(MODELS), enough, too_little]))
"""


@pytest.mark.simulated
def test_lines_for_ten_models_run_in_the_memory_that_is_said(
    machine: Callable[..., None], figure: Callable[[str], None]
) -> None:
    """Small workspaces, so that the models take most of the memory."""
    machine()
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    rows, models, enough, too_little = script(LINES_OF_MODELS, env=environment)
    wrong = [title for title, said, ran in rows if said != "fits" or not ran]
    assert wrong == []
    assert models == 10
    assert enough is True
    assert too_little is False
    figure(f"{len(rows)} lines for {models} models")


AFTER_STEPS = """
import json
import torch
from ipygpumem.extras.fit.changes import candidates
from benchmarks.harness.fit_search import search
begin = "import torch\\nfrom torch.nn import Linear, Sequential\\n"
begin += "net = Sequential(*(Linear(2048, 2048) for _ in range(4))).cuda()\\n"
begin += "optimizer = torch.optim.AdamW(net.parameters())\\n"
step = "net(torch.randn(8, 2048, device='cuda')).mean().backward(); optimizer.step(); optimizer.zero_grad()"
rows = []
for before in ("", step):
    names = {}
    exec(begin + before, names)
    found = search(f"import torch\\n{step}\\n{step}", "cuda:0", run=False, names=names, device=None)
    (change,) = (one for one in candidates(found.findings) if one.title == "torch.optim.SGD")
    device = found.trial_with(change).device
    rows.append([device.peak_bytes, device.required_bytes, device.room_bytes])
    del names, found
    torch.cuda.empty_cache()
print(json.dumps(rows))
"""  # noqa: E501


@pytest.mark.simulated
def test_the_old_optimizers_state_is_free_for_another(machine: Callable[..., None]) -> None:
    machine()
    before, after = script(AFTER_STEPS)
    assert before == after
