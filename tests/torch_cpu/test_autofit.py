"""Autofit of training code, with allocations that torch's CPU allocator really refuses."""

from __future__ import annotations

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


def test_the_same_holds_for_names_that_the_cell_binds_itself(notebook: Kernel) -> None:
    works(notebook, "watched.clear(); seen = []")
    works(
        notebook,
        "%%autofit n=64\nseen.append(alive())\nmodel = nn.Linear(512, 512)\nwatch(model=model, weight=model.weight)\n"
        "out = model(torch.ones(n, 512))\nwatch(out=out)\n"
        "scratch = torch.empty(1 << (50 if n > 20 else 10), dtype=torch.uint8)",
    )
    assert notebook.value("n, seen, alive()") == (16, [[], [], []], ["model", "out", "weight"])


def test_a_function_is_fitted_and_its_failed_calls_leave_nothing(notebook: Kernel) -> None:
    works(notebook, TRAIN, "found = ipygpumem.autofit(train, batch_size=256, step='search', headroom=0)")
    assert notebook.value("found.value, found.result >= 0") == (40, True)
    assert notebook.value("any(alive_at_start), alive()") == (False, [])
