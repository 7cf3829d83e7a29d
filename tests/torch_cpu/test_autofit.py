"""Autofit of training code, with allocations that torch's CPU allocator really refuses."""

import pytest

from tests.kernel import Kernel
from tests.steps import works

pytest.importorskip("torch", reason="these tests need torch, which comes with the extra 'torch'")

TRAIN = """
watched.clear()
alive_at_start = []
def train(batch_size, limit=40):
    alive_at_start.append(alive())
    model = nn.Linear(256, 256)
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.ones(batch_size, 256)
    watch(model=model, weight=model.weight, batch=batch)
    loss = model(batch).square().mean()
    watch(loss=loss)
    loss.backward()
    optimizer.step()
    watch(state=optimizer.state[model.weight]['exp_avg'])
    try:
        scratch = torch.empty(1 << (50 if batch_size > limit else 10), dtype=torch.uint8)
    except RuntimeError as error:
        raise ValueError('the step failed') from error
    return float(loss)
"""


def test_model_optimizer_and_graph_of_a_failed_try_are_gone_when_the_next_begins(notebook: Kernel) -> None:
    reply = works(notebook, TRAIN, "%%autofit batch_size=256\nloss = train(batch_size)\nloss >= 0")
    assert reply.result == "True"
    assert notebook.value("batch_size, alive_at_start") == (32, [[], [], [], []])
    (report,) = reply.reports("autofit")
    assert "batch_size=32 fits · 4 tries" in report
    assert report.count("out of memory, asked for 1.00 PiB") == 3


def test_estimates_alone_find_the_largest_batch_for_a_card_that_is_not_here(notebook: Kernel) -> None:
    cell = "%%autofit n=64\n%%estimate --device cuda --device-memory {}\n"
    code = "model = nn.Linear(8192, 8192)\nwith torch.no_grad():\n    y = model(torch.zeros(n << 10, 8192))"
    reply = works(notebook, cell.format("1600MiB") + code)
    assert notebook.value("n, 'model' in globals()") == (8, False)
    shown, fitted = reply.reports("estimate") + reply.reports("autofit")
    assert "fits: needs" in shown
    assert "n=8 fits" in fitted
    works(notebook, f"def step(n):\n    {code.replace(chr(10), chr(10) + '    ')}")
    call = "ipygpumem.autofit(lambda n: ipygpumem.estimate(step, n, {}), n=64).value"
    assert notebook.value(call.format("device='cuda', device_memory='1600MiB'")) == 8
    assert works(notebook, "%%autofit n=8\nipygpumem.estimate(step, n, device_memory='1TiB')").result is not None
    reply = notebook.run(cell.format("400MiB") + code)
    needs = reply.reports("estimate")[0].partition(" needs ")[2].partition(" \u00b7 ")[0]
    size, _, room = needs.partition(" of ")
    text = f"UsageError: %%autofit: even n=1 does not fit: it needs {size} of cuda:0, which has {room}"
    assert (reply.status, text in reply.stderr) == ("error", True)
    assert "pass --device-memory" in notebook.run(cell.replace("--device-memory {}", "") + code).stderr
