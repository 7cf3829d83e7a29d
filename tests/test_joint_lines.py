"""``%gpumem why`` joins the lines of all holders to one line, which frees the object."""

import re
import textwrap

import pytest

from benchmarks.harness.kernel import Kernel
from tests.kernel_records import READ_WHY, lines_by_holder, why_record
from tests.steps import needs, run_cells, tidied_kernel

shared_kernel, kernel = tidied_kernel("%reset -f", READ_WHY, hides_libraries=True)
"""A kernel without the names of earlier tests, and without sight of what they have imported: with
pandas and torch a look takes a second longer.
"""


def one_line(kernel: Kernel, name: str) -> str:
    """Return the line or the cell of ``%gpumem why`` that has the lines of all holders; empty if
    none is shown.
    """
    (report,) = kernel.run(f"%gpumem why {name}").reports("why")
    _, _, cell = report.partition("  in one cell:\n")
    if cell:
        return textwrap.dedent(cell).strip()
    lines = [line for line in report.splitlines() if "in one line: " in line]
    return lines[0].partition("in one line: ")[2] if lines else ""


@pytest.mark.parametrize(
    ("code", "line"),
    [
        pytest.param('cache = {"first": x}', 'del cache["first"]; del x', id="a dict"),
        pytest.param(
            """
            cache = {"first": x}
            rows = [x]
            """,
            'del cache["first"]; del rows[0]; del x',
            id="a dict and a list",
        ),
        pytest.param("same = x", "del same; del x", id="another name"),
        pytest.param(
            """
            class Model: pass
            m = Model()
            m.data = x
            """,
            "m.data = None; del x",
            id="an attribute",
        ),
        pytest.param("def read(data=x): return data", "del read; del x", id="a default argument"),
        pytest.param(
            """
            class Model: pass
            m = Model()
            Model.data = x
            """,
            "Model.data = None; del x",
            id="an attribute of a class",
        ),
        pytest.param(
            """
            import functools
            @functools.cache
            def load(): return x
            load();
            """,
            "load.cache_clear(); del x",
            id="a cached function",
        ),
    ],
)
def test_one_line_has_the_lines_of_all_holders(kernel: Kernel, code: str, line: str) -> None:
    run_cells(
        kernel,
        """
        import weakref
        class Data(bytearray): pass
        x = Data(8 << 20); ref = weakref.ref(x)
        """,
        code,
    )
    shown = one_line(kernel, "x")
    assert shown == line
    run_cells(kernel, shown)
    assert kernel.value("ref() is None") is True


@pytest.mark.parametrize(
    ("code", "line"),
    [
        pytest.param("x", "%xdel x", id="the object"),
        pytest.param(
            """
            cache = {"first": x}
            x
            """,
            'del cache["first"]\n%xdel x',
            id="the object and a dict",
        ),
        pytest.param("(1, x)", "del x\n%xdel _1", id="a tuple with it"),
    ],
)
def test_one_line_removes_outputs_too(kernel: Kernel, code: str, line: str) -> None:
    run_cells(
        kernel,
        """
        import weakref
        class Data(bytearray):
            def __repr__(self): return "data"
        x = Data(8 << 20); ref = weakref.ref(x)
        """,
        code,
    )
    shown = one_line(kernel, "x")
    assert re.sub(r"_\d+", "_1", shown) == line  # the number of the output's cell
    run_cells(kernel, shown)
    assert kernel.value("ref() is None") is True


def test_the_line_for_an_output_deletes_it_once(kernel: Kernel) -> None:
    run_cells(
        kernel, "import numpy, weakref", "numpy.ones(1 << 20)", "same = _; ref = weakref.ref(_)"
    )
    number = kernel.value("max(Out)")
    shown = one_line(kernel, f"_{number}")
    assert shown == f"del same\n%xdel _{number}"
    run_cells(kernel, shown)
    assert kernel.value("ref() is None") is True


_GROWS = """
import torch, weakref
layers = torch.nn.ModuleList([torch.nn.Linear(512, 512) for _ in range(3)])
optimizer = torch.optim.Adam(layers.parameters())
result = torch.ones(64, 512)
for layer in layers: result = layer(result).relu()
loss = result.sum(); loss.backward(); optimizer.step(); del loss
refs = [weakref.ref(parameter) for parameter in layers.parameters()]
"""


@pytest.mark.parametrize("name", ["layers", "optimizer"])
def test_the_joint_line_omits_objects_freed_by_another_deletion(kernel: Kernel, name: str) -> None:
    needs("torch")
    run_cells(kernel, _GROWS + "del result")
    shown = one_line(kernel, name)
    assert sorted(shown.split("; ")) == ["del layer", "del layers", "del optimizer"]
    run_cells(kernel, shown, "import gc; gc.collect();")
    assert kernel.value("[ref() for ref in refs if ref() is not None] == []") is True


SHARED_CONTAINERS = {
    "items of a dict": (
        """
        table = {i: np.ones(1 << 18) for i in range(4)}
        app.table = table
        x = [table[1]]
        ref = weakref.ref(x[0])
        """,
        "del table[1]; del x",
    ),
    "two items of a list": (
        """
        rows = [np.ones(1 << 18) for _ in range(6)]
        app.rows = rows
        x = [rows[0], rows[4]]
        ref = weakref.ref(x[1])
        """,
        "del rows[4]; del rows[0]; del x",
    ),
    "a list of one array alone": (
        """
        rows = [np.ones(1 << 18)] * 2
        app.rows = rows
        x = [rows[0]]
        ref = weakref.ref(x[0])
        """,
        "rows.clear(); del x",
    ),
    "a data frame": (
        """
        frame = pd.DataFrame(np.ones((1 << 16, 4)))
        app.frame = frame
        x = frame[3]
        ref = weakref.ref(frame)
        """,
        "app.frame = None; del frame; del x",
    ),
    "a tuple": (
        """
        pair = (np.ones(1 << 18), 1)
        app.pairs = [pair]
        x = pair[0]
        ref = weakref.ref(x)
        """,
        "del pair; del app.pairs[0]; del x",
    ),
    "a tuple that a shared dict has twice": (
        """
        pair = (np.ones(1 << 18), 1)
        pairs = {'a': pair, 'b': pair}
        app.pairs = pairs
        x = pair[0]
        ref = weakref.ref(x)
        del pair
        """,
        "pairs.clear(); del x",
    ),
    "an array and its view in a shared dict": (
        """
        x = [np.ones(1 << 18)]
        table = {'a': x[0], 'b': x[0][:9]}
        app.table = table
        ref = weakref.ref(x[0])
        """,
        "table.clear(); del x",
    ),
    "a shared object in a list": (
        """
        x = [np.ones(1 << 18)]
        part = App()
        part.all = part.rows = x
        whole = [part, x[0]]
        app.call = functools.partial(print, part)
        ref = weakref.ref(x[0])
        del part
        """,
        "whole[0].all = None; whole[0].rows = None; del whole[1]; del x",
    ),
    "keywords of a shared partial": (
        """
        x = [np.ones(1 << 18)]
        call = functools.partial(print, key=x)
        calls = [call]
        app.call = call
        ref = weakref.ref(x[0])
        del call
        """,
        "del calls[0]; app.call = None; del x",
    ),
}
"""Code with an object in a container that an attribute has, too, and the line that frees it."""


@pytest.mark.parametrize("case", SHARED_CONTAINERS)
def test_a_line_frees_an_object_in_a_shared_container(kernel: Kernel, case: str) -> None:
    code, line = SHARED_CONTAINERS[case]
    run_cells(kernel, "import functools, weakref, numpy as np, pandas as pd")
    run_cells(
        kernel,
        """
        class App: pass
        app = App()
        """,
        code,
    )
    assert one_line(kernel, "x") == line
    run_cells(kernel, line)
    assert kernel.value("ref() is None") is True


def test_the_line_for_all_holders_names_their_common_data(kernel: Kernel) -> None:
    """Each holder alone drops nothing else: the other one has it, too."""
    run_cells(
        kernel,
        """
        import numpy as np
        rows = [{"data": np.ones(2**18)} for _ in range(6)]
        table = {number: row for number, row in enumerate(rows)}
        top = rows[:2]
        """,
    )
    assert lines_by_holder(why_record(kernel, "top")).popitem()[1] == "del rows"
    line = one_line(kernel, "top")
    assert line == "del rows; del table; del top  # also drops 8 MiB of other data"


def test_a_line_tells_of_no_data_that_unused_lines_drop(kernel: Kernel) -> None:
    run_cells(
        kernel,
        """
        import numpy as np
        small = [str(number) for number in range(1000, 2000)]  # less than a hundredth
        x = [np.ones(1 << 20), small]
        whole = [x[0]]
        older = (small, np.ones(1 << 20))
        del small
        """,
    )
    assert one_line(kernel, "x") == "del whole[0]; del x"


def test_a_graph_that_holds_parameters_has_a_row(kernel: Kernel) -> None:
    needs("torch")
    run_cells(kernel, _GROWS)
    (report,) = kernel.run("%gpumem why layers").reports("why")
    assert "notebook variable result: its autograd graph" in " ".join(report.split())
    assert one_line(kernel, "layers") == ""
    run_cells(kernel, "del optimizer; del layer; del layers")
    assert kernel.value("refs[0]() is None") is False  # by the graph
    run_cells(kernel, "result = result.detach()")
    assert kernel.value("refs[0]() is None") is True


def test_a_tensor_with_a_graph_has_no_line_for_all(kernel: Kernel) -> None:
    needs("torch")
    run_cells(kernel, _GROWS + "total = result.sum()")
    assert one_line(kernel, "result") == ""  # the nodes of its graph are those of the total, too


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("pass", id="no other holder"),
        pytest.param(
            """
            rows = [x, 1]
            other = [rows]
            rows.append([x])
            """,
            id="positions of one list",
        ),
    ],
)
def test_no_line_is_shown_that_is_unsafe_to_paste(kernel: Kernel, code: str) -> None:
    run_cells(kernel, "x = bytearray(8 << 20)", code)
    assert one_line(kernel, "x") == ""
