"""Recovery from real allocation failures of torch on the CPU, and autofit with them."""

import re
import textwrap

import pytest

from benchmarks.harness.kernel import Kernel
from tests.steps import dedented, recovery_report, run_cells


def test_torchs_cpu_allocator_refusing_is_an_oom_with_its_size(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        watched.clear()
        def train(size):
            model = nn.Linear(1024, 1024)
            batch = torch.ones(256, 1024)
            loss = model(batch).square().mean()
            watch(model=model, batch=batch, loss=loss, weight=model.weight)
            big = torch.empty(size, dtype=torch.uint8)
            return 'trained'
        """,
    )
    text = recovery_report(notebook, "train(1 << 50)")
    assert "out of memory (RuntimeError)" in text
    assert "asked for 1.00 PiB" in text
    rows = [" ".join(line.split()) for line in text.splitlines() if line.split()[2:3] == ["train"]]
    assert len(rows) == 3
    assert re.fullmatch(r"4 MiB train \d+ model Linear 2 arrays float32 cpu", rows[0])
    assert re.fullmatch(r"1 MiB train \d+ batch Tensor 256 × 1024 float32 cpu", rows[1])
    assert re.fullmatch(r"1 MiB train \d+ autograd graph of loss 1 array float32 cpu", rows[2])
    assert notebook.value("alive()") == []
    assert run_cells(notebook, "train(1 << 20)").result == "'trained'"


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize(
    ("code", "rows"),
    [
        pytest.param(
            """
            loss = net(batch).mean()
            kept = loss.detach()
            del loss, net
            """,
            {"batch": 4},
            id="a loss that is detached",
        ),
        pytest.param(
            "out = net(batch)",
            {"net": 12, "autograd graph of out": 8, "batch": 4, "out": 4},
            id="a result with a graph",
        ),
        pytest.param(
            "net(batch).mean().backward()",
            {"net": 12, "gradients of net": 12, "batch": 4},
            id="gradients",
        ),
        pytest.param(
            """\
net(batch).mean().backward()
out = net(batch)
view = out.view(-1)
out = out.detach()""",
            {"net": 12, "gradients of net": 12, "autograd graph of view": 8, "batch": 4, "out": 4},
            id="gradients and a graph",
        ),
        pytest.param(
            "outs = [[net(batch)] for _ in range(2)]",
            {"net": 12, "autograd graph of outs": 16, "batch": 4, "outs": 8},
            id="graphs in a list",
        ),
        pytest.param(
            """
            net = mine
            mine(batch).mean().backward()
            out = mine(batch)
            """,
            {"autograd graph of out": 8, "batch": 4, "out": 4},
            id="a model of the notebook",
        ),
        pytest.param("out = theirs", {"net": 12, "batch": 4}, id="a result of the notebook"),
        pytest.param(
            "out = theirs.exp()",
            {"net": 12, "batch": 4, "out": 4},
            id="a graph on a result of the notebook",
        ),
    ],
)
def test_memory_kept_by_autograd_has_rows_of_its_own(
    notebook: Kernel, code: str, rows: dict[str, int]
) -> None:
    run_cells(
        notebook,
        """
        def make():
            layers = [[nn.Linear(1024, 1024), nn.Tanh()] for _ in range(3)]
            return nn.Sequential(*sum(layers, []))
        mine = make()
        theirs = mine(torch.ones(1024, 1024))
        """,
    )
    body = f"net, batch = make(), torch.ones(1024, 1024)\n{dedented(code)}raise MemoryError"
    train = f"def train():\n{textwrap.indent(body, '    ')}\ntrain()"
    text = recovery_report(notebook, train)
    size_by_row = {}
    for size, row in re.findall(r"^ +(\S+) MiB +train +\d+ +(\S+(?: \S+)*)", text, re.MULTILINE):
        size_by_row[row] = float(size)
    assert size_by_row == rows


def test_an_optimizer_that_keeps_half_of_its_state_is_reported(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        def step(optimizer, fails):
            zeros = torch.zeros_like
            def fail(*args, **options):
                raise torch.OutOfMemoryError('CUDA out of memory.')
            try:
                torch.zeros_like = fail if fails else zeros
                optimizer.step()
            finally:
                torch.zeros_like = zeros
        def made(kind):
            model = nn.Linear(4, 4)
            model(torch.ones(1, 4)).sum().backward()
            return kind(model.parameters(), lr=0.1)
        kept = made(torch.optim.AdamW)
        """,
    )
    advice = "Make a new optimizer, or call its state.clear()"
    text = recovery_report(notebook, "step(kept, True)")
    assert (
        f"AdamW: optimizer state is incomplete; the next step() would raise KeyError. {advice}."
        in text
    )
    assert notebook.run("kept.step()").error == "KeyError"
    run_cells(notebook, "kept.state.clear(); kept.step()")
    # nobody can use that one again
    assert advice not in recovery_report(notebook, "step(made(torch.optim.AdamW), True)")
    assert advice not in recovery_report(notebook, "step(kept, False); torch.empty(1 << 50)")


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


def test_a_failed_trys_model_and_graph_die_before_the_next_try(notebook: Kernel) -> None:
    reply = run_cells(
        notebook,
        TRAIN,
        """
        %%autofit batch_size=256
        loss = train(batch_size)
        loss >= 0
        """,
    )
    assert reply.result == "True"
    assert notebook.value("batch_size, alive_at_start") == (32, [[], [], [], []])
    (report,) = reply.reports("autofit")
    assert "batch_size=32 fits · 4 tries" in report
    assert report.count("out of memory, asked for 1.00 PiB") == 3
