"""Lines for data in modules and optimizers of torch leave them in a state that works."""

from importlib.util import find_spec

import pytest

from benchmarks.harness.kernel import Kernel
from tests.kernel_records import READ_LEAKS, READ_WHY, leak_rows, survivor_rows
from tests.steps import experiment, kernel_with, needs, run_cells, tidied_kernel

shared_kernel, kernel = tidied_kernel("%reset -f", READ_WHY, hides_libraries=True)
"""A kernel without the names of earlier tests, and without sight of what they have imported: with
pandas and torch a look takes a second longer.
"""

torch_kernel = kernel_with(
    "%load_ext ipygpumem",
    READ_LEAKS,
    """
    import torch
    net = torch.nn.Linear(1, 1)
    torch.optim.Adam(net.parameters()).step()
    """,
)


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize(
    ("optimizer", "is_safe"),
    [
        ("Adam(net.parameters())", True),
        ("SGD(net.parameters(), lr=0.1, momentum=0.9)", True),
        ("RMSprop(net.parameters())", True),
        ("AdamW(net.parameters(), amsgrad=True)", True),
        ("Adagrad(net.parameters())", False),
    ],
)
def test_state_of_an_optimizer_has_a_line(
    torch_kernel: Kernel, optimizer: str, is_safe: bool
) -> None:
    kernel = torch_kernel
    run_cells(kernel, f"net = torch.nn.Linear(700, 700); opt = torch.optim.{optimizer}")
    run_cells(kernel, "def step(): net(torch.ones(1, 700)).sum().backward(); opt.step()")
    run_cells(kernel, experiment("step()"))
    rows = survivor_rows(kernel)
    lines = {row.line for row in rows if ".state" in row.path}
    if not is_safe:
        assert lines <= {""}
        return
    assert lines == {"opt.state.clear()  # all its averages and momentum begin again"}
    run_cells(
        kernel, lines.pop(), "assert not opt.state; step(); opt.state.clear(); net.zero_grad()"
    )


def test_one_line_removes_a_part_that_a_cell_shows(kernel: Kernel) -> None:
    needs("torch")
    run_cells(
        kernel,
        READ_LEAKS,
        "import torch; layers = torch.nn.Sequential(torch.nn.Linear(2, 2))",
        experiment("layers.append(torch.nn.Linear(1024, 1024))"),
    )
    (row,) = survivor_rows(kernel)
    assert row.line == "del layers[1]  # if nothing needs it"
    run_cells(kernel, row.line)
    assert leak_rows(kernel) == []


def test_no_line_removes_an_older_module_with_its_new_parameter(kernel: Kernel) -> None:
    needs("torch")
    run_cells(
        kernel,
        READ_LEAKS,
        "import torch; layers = torch.nn.Sequential(torch.nn.Linear(2, 2))",
        experiment("layers[0].weight = torch.nn.Parameter(torch.ones(1024, 1024))"),
    )
    (row,) = survivor_rows(kernel)
    assert row.line == ""
    run_cells(kernel, "del layers")
    assert leak_rows(kernel) == []


def test_no_line_takes_a_group_s_parameters_from_an_optimizer(kernel: Kernel) -> None:
    needs("torch")
    run_cells(
        kernel,
        READ_LEAKS,
        """
        import torch
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        """,
        """
        %%experiment e
        net = torch.nn.Linear(1024, 1024)
        optimizer.add_param_group({"params": net.parameters()})
        """,
    )
    (row,) = survivor_rows(kernel)
    assert row.path.startswith('notebook variable optimizer.param_groups[1]["params"]')
    assert row.line == "make the optimizer again, without it"
    run_cells(kernel, "net = optimizer.param_groups[1]['params']; net[0].sum().backward()")
    run_cells(
        kernel,
        """
        %%experiment e
        optimizer.step()
        del net
        """,
    )
    lines = [row.line for row in leak_rows(kernel) if "param_groups" in row.path]
    assert set(lines) == {"make the optimizer again, without it"}
