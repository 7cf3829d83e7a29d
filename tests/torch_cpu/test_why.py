"""Objects that only one name keeps alive, and the holders of all others."""

from __future__ import annotations

import functools
import queue
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ipygpumem
from benchmarks.harness.kernel import Kernel
from ipygpumem.heap.sizes.folding import Folder
from ipygpumem.heap.sizes.region import Region
from ipygpumem.units import MIB
from tests import hostile
from tests.steps import experiment, run_cells

GRAPH = """\
x = torch.ones(2**18)
w = torch.ones(2**18, requires_grad=True)
a = (x * w).exp().sum()
"""
TRAINING_STEP = "a = nn.Linear(512, 512)\na(torch.ones(1, 512)).sum().backward()\n"
ERROR = """\
def f():
    big = bytes(MIB)
    raise ValueError
try: f()
except ValueError as e: a = e
"""
FUNCTION = """\
def outer():
    big = bytes(MIB)
    def inner(): return big
    return inner
a = outer()
"""
SUSPENDED = """\
def run():
    big = bytes(MIB)
    yield big
a = run()
next(a)
"""


CASES = [
    ("a = [bytes(MIB) for _ in range(4)]", 4, 4),
    ("b = a = [bytes(MIB) for _ in range(4)]", 0, 4),
    ("a = [bytes(MIB) for _ in range(4)]; b = a[:3]", 1, 4),
    ("a = {'k': [bytes(MIB)]}; a['me'] = a", 1, 1),
    ("a = np.zeros(MIB, 'u1')[1:]", 1, 1),
    ("b = np.zeros(MIB, 'u1'); a = b[1:]", 0, 1),
    ("a = np.array([bytes(MIB), bytes(MIB)], dtype=object); b = a[0]", 1, 2),
    ("a = pandas.DataFrame({'x': np.zeros(2**17), 'y': np.zeros(2**17, int)}); b = a['x']", 1, 2),
    ("a = torch.zeros(2**18)[2:]", 1, 1),
    ("b = torch.zeros(2**18); a = b[2:]", 0, 1),
    ("b = torch.zeros(2**18); a = b.detach()", 0, 1),
    ("b = np.zeros(2**17); a = torch.from_numpy(b)", 0, 1),
    ("a = nn.Linear(512, 512); b = torch.optim.SGD(a.parameters())", 0, 1),
    (TRAINING_STEP, 2, 2),
    (TRAINING_STEP + "b = a; a = torch.optim.Adam(b.parameters()); a.step()", 2, 4),
    (TRAINING_STEP + "a.requires_grad_(False); a = [a.weight, a.bias]", 2, 2),
    (GRAPH, 1, 3),
    (GRAPH + "del x, w", 3, 3),
    (GRAPH + "b = a * 2; del x, w", 0, 3),
    (FUNCTION, 1, 1),
    (FUNCTION + "b = a", 0, 1),
    (SUSPENDED, 1, 1),
    (ERROR, 1, 1),
    (ERROR + "b = a.__traceback__.tb_next.tb_frame", 0, 1),
    ("big = [bytes(MIB)] * 1000; a = big[0]", 0, 1),
    ("b = bytes(256 * MIB); c = bytes(MIB); a = [b, c]", 0, 257),
    ("c = np.zeros(MIB, 'u1').view(np.recarray); a = c[1:]; b = c[2:]; del c", 0, 1),
    (
        "c = memoryview(bytearray(MIB)); a = np.frombuffer(c, 'u1'); b = np.frombuffer(c, 'u1'); "
        "del c",
        0,
        1,
    ),
    ("b = np.array([bytes(MIB), None], dtype=object); a = [b[:1], b[0]]; del b; b = a[1]", 0, 1),
    ("b = io.BytesIO(bytes(MIB)); a = io.BytesIO(b.getvalue())", 0, 1),
    ("b = (ctypes.c_char * MIB * 2)(); a = b[0]", 0, 2),
    ("b = pyarrow.table({'x': np.zeros(2**17)}); a = b.slice(0)", 0, 1),
    ("a = pyarrow.table({'x': np.zeros(2**17)}); b = pyarrow.table({'x': np.zeros(2**17)})", 1, 1),
    ("b = polars.DataFrame({'x': np.zeros(2**17)}); a = b['x'].to_numpy()", 0, 1),
    ("a = torch.zeros(2**18); a.numpy()", 1, 1),
    ("a = np.zeros(2**17); b = polars.DataFrame(a)", 0, 1),
    ("b = np.zeros(2**17); a = polars.DataFrame({'x': b, 'y': range(2**17)})", 1, 2),
    ("b = np.zeros(2**17); a = pyarrow.table({'x': b, 'y': range(2**17)})", 1, 2),
    ("b = np.zeros(2**17); a = pandas.DataFrame({'x': b}, copy=False)", 0, 1),
    ("b = pyarrow.array([1.0] * 2**17); a = polars.from_arrow(b)", 0, 1),
    ("a = pyarrow.array([1.0] * 2**17); b = a.to_numpy()", 0, 1),
    # the columns are referred to once, so they are no nodes of the object's graph
    ("b = pyarrow.array([1.0] * 2**17); a = [pyarrow.chunked_array([b])]", 0, 1),
    ("b = polars.Series([1.0] * 2**17); a = {'x': b.slice(9)}", 0, 1),
    # what is left of it is small, and keeps all of it alive
    ("a = polars.Series([1.0] * 2**17); b = a.slice(9, 9)", 0, 1),
    ("a = polars.DataFrame({'x': [1.0] * 2**17}); b = {'x': a.head(9)}", 0, 1),
    ("a = polars.Series([1.0] * 2**17); b = a.slice(9, 9).to_numpy()", 0, 1),
    ("a = np.zeros(2**17); b = [torch.from_numpy(a[:9])]", 0, 1),
    ("b = np.zeros(2**17); a = [torch.from_numpy(b[:9]), b[3:9]]; del b", 1, 1),
    ("b = np.zeros(2**17); a = [b[3:9], torch.from_numpy(b[:9])]; del b", 1, 1),
    (
        "b = pandas.DataFrame({'x': ['12345678'] * 2**17, 'k': range(2**17)})\n"
        "a = b.merge(b[['k']], on='k'); b = b['x']",
        1,
        3,
    ),
    ("c = polars.Series([1.0] * 2**17); a = c.to_numpy(); b = c.slice(9); del c", 0, 1),
    ("import jax; b = jax.numpy.zeros(2**18) + 1; a = torch.from_dlpack(b)", 0, 1),
    ("import jax; a = torch.from_dlpack(jax.numpy.zeros(2**18) + 1)", 1, 1),
    ("import jax; a = torch.zeros(2**18); a.numpy()", 1, 1),
    (
        "a = polars.DataFrame({'x': np.zeros(2**17)}); b = polars.DataFrame({'x': np.zeros(2**17)})",  # noqa: E501
        1,
        1,
    ),
    ("b = bytearray(MIB); a = torch.frombuffer(b, dtype=torch.uint8)", 0, 1),
    (
        "b = [np.zeros(9 + 2**17)[n:] for n in range(9)]; a = [torch.from_numpy(c)[2:] for c in b]",
        0,
        9,
    ),
    ("a = torch.zeros(2**18); b = a.untyped_storage()", 0, 1),
    ("a = [bytes(MIB)].append", 1, 1),
    ("b = [bytes(MIB)]; a = {'on': b.append}", 0, 1),
    ("import contextvars\nv = contextvars.ContextVar('v'); a = v.set(bytes(MIB))", 0, 0),
    ("class A: pass\na = A(); a.big = bytes(MIB); a.me = a; b = a.big", 0, 1),
]
"""Code, and the MiB that deleting ``a`` frees, of those that it holds."""
DEFINE_OF_CASE = """
import ctypes, io, numpy, pandas, polars, pyarrow, ipygpumem
gc.freeze()  # each of the many looks at the heap would go over all of these
def of_case(code):
    names = {"MIB": 2**20}
    exec("import ctypes, io, numpy as np, pandas, polars, pyarrow, torch, ipygpumem\\nfrom torch import nn", names)
    exec(f"{code}\\nfound = ipygpumem.why(a)", names)
    found = names["found"]
    held = sum(part.size_bytes for part in found.held)
    return [round(size / 2**20) for size in (found.freed_bytes.get("cpu", 0), found.size_bytes, held)]
"""  # noqa: E501

DEFINE_FREED_IN_TOP = """
import ctypes, io, numpy as np, pandas, polars, pyarrow, torch, ipygpumem
MIB = 2**20
def freed_in_top(code):
    before = set(globals())
    exec(code, globals())
    sizes = [row.freed_bytes.get("cpu", 0) for row in ipygpumem.top("a").names]
    for name in globals().keys() - before:
        del globals()[name]
    return round(sum(sizes) / MIB)
"""

FRAME = (
    "df = pandas.DataFrame({c: np.random.rand(2**17) for c in 'abc'}); sub = df[['a', 'b']]; one = "
    "df['c']\n"
)
FRAME += "part = df.iloc[:9]; watch(memory=one.to_numpy().base); del df"
SEVERAL = {
    "x": "x = np.ones(2**18); y = x; z = [x]; w = {'k': x, 1: 2}; watch(memory=x)",
    'cache["first"]': "x = np.ones((2, 2**18)); cache = {'first': x[0]}; watch(memory=x)",
    "x[0]": "x = np.ones((2, 2**18)); cache = {'first': x[0]}; watch(memory=x)",
    "part": f"{FRAME}; other = sub; rows = [one, 1]",
    "one": FRAME,
    "v": (
        "a = torch.ones(2**18); v = a[:9]; h = [a.view(4, -1), 1]; k = {1: a}; watch(memory=a); "
        "del a"
    ),
    "t": (
        "t = np.ones(2**18); u = (t, 1); v = u; l = [u, 1]; views = [t[n:] for n in range(9)]; "
        "watch(memory=t)"
    ),
    "layers[0]": (
        "layers = [torch.nn.Linear(512, 512)]; watch(memory=layers[0].weight)\n"
        "model = torch.nn.Sequential(*layers); optimizer = torch.optim.Adam(model.parameters())"
    ),
    "head": textwrap.dedent(
        """\
        head = torch.nn.Linear(512, 512); watch(memory=head.weight)
        class Net(torch.nn.Module): pass
        net = Net(); net.head = head; net.other = torch.nn.Linear(512, 512)"""
    ),
    "body": textwrap.dedent(
        """\
        body = torch.nn.Linear(512, 512); watch(memory=body.weight)
        jobs = {'a': (1, {'opt': torch.optim.Adam(body.parameters())})}
        body(torch.ones(1, 512)).sum().backward(); jobs['a'][1]['opt'].step()
        class Net(torch.nn.Module): pass
        nets = [Net()]; nets[0].part = body"""
    ),
    "o": "o = np.ones(2**18); hold = [[o] for n in range(4)]; w = [o, o]; watch(memory=o)",
}
"""Code that makes several holders, by the expression to ask about."""


@pytest.mark.parametrize("expression", SEVERAL)
@pytest.mark.usefixtures("small_heap")
def test_following_all_lines_frees_the_memory(notebook: Kernel, expression: str) -> None:
    run_cells(notebook, f"import numpy as np, pandas\n{SEVERAL[expression]}")
    (report,) = run_cells(notebook, f"%gpumem why {expression}").reports("why")
    assert notebook.value("alive()") == ["memory"]
    rows = re.findall(r"(?:iB|shared)   notebook variable (.+?)  +(\S.*)", report)
    lines = [
        f"del {path.partition(',')[0]}" if line.startswith("remove it") else line.strip()
        for path, line in rows
    ]
    run_cells(notebook, "\n".join([*lines, f"globals().pop({expression!r}, None);"]))
    assert notebook.value("alive()") == [], report


@pytest.mark.usefixtures("small_heap")
def test_lines_that_delete_items_work_in_the_order_of_the_rows(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        import torch, weakref, ipygpumem
        weights = torch.ones(2**16, requires_grad=True)
        losses, total = [], 0
        for number in range(8):
            losses.append((weights * (number + 1)).exp().sum())
            total = total + losses[-1]
        references = list(map(weakref.ref, losses))
        lines = [part.holder.advice for part in ipygpumem.why(total).held]
        deletions = [line for line in lines if line.startswith("del losses[")]
        """,
    )
    assert notebook.value("len(deletions)") == 8
    run_cells(notebook, "for line in deletions: exec(line)")
    assert notebook.value("[reference() is None for reference in references]") == [True] * 8


@pytest.mark.usefixtures("small_heap")
def test_no_line_takes_a_part_out_of_a_model_or_optimizer(notebook: Kernel) -> None:
    run_cells(notebook, f"import numpy as np\n{SEVERAL['body']}")
    (report,) = run_cells(notebook, "%gpumem why body").reports("why")
    lines = re.findall(r"del (jobs\S+|nets\S+)", report)
    assert sorted(lines) == ['jobs["a"][1]["opt"]', "nets[0]"]


@pytest.mark.usefixtures("small_heap")
def test_a_view_of_texts_is_a_holder_apart_from_the_whole_frame(notebook: Kernel) -> None:
    allocated = "pyarrow.total_allocated_bytes() >> 20"
    run_cells(notebook, "import pandas, pyarrow")
    before = notebook.value(allocated)
    run_cells(
        notebook,
        "frame = pandas.DataFrame({'x': ['12345678'] * 2**18}); shelf = [frame]",
        "frame.head()",
    )
    assert notebook.value(allocated) >= before + 3
    (report,) = run_cells(notebook, "%gpumem why frame").reports("why")
    _, _, cell = report.partition("in one cell:\n")
    assert "shelf" in cell
    assert "%xdel _" in cell
    run_cells(notebook, cell)
    assert notebook.value(allocated) == before


@pytest.mark.usefixtures("small_heap")
def test_leaks_have_a_line_for_the_gradients_of_an_output(notebook: Kernel) -> None:
    run_cells(
        notebook,
        "net = torch.nn.Linear(512, 1024, bias=False); net",
        "net(torch.ones(1, 512)).sum().backward()",
    )
    number = notebook.value("max(Out)")
    run_cells(notebook, "watch(gradient=net.weight.grad); del net")
    (report,) = run_cells(notebook, "%gpumem leaks --min 1MiB").reports("leaks")
    line = f"Out[{number}].zero_grad()"
    assert re.search(rf"Out\[{number}\]\.weight\.grad +{re.escape(line)}", report), report
    run_cells(notebook, line)
    assert notebook.value("alive()") == []
    run_cells(notebook, f"%xdel _{number}")


def test_a_detached_value_keeps_no_graph(notebook: Kernel) -> None:
    make = """
import torch
weights = torch.ones(1 << 20, requires_grad=True)
losses = [weights.exp().sum()]
history = [losses[0].detach()]
"""
    run_cells(notebook, make)
    (report,) = run_cells(notebook, "%gpumem why losses").reports("why")
    assert "del losses frees 4 MiB" in report
    (top,) = run_cells(notebook, "%gpumem top losses").reports("top")
    assert re.search(r"4 MiB +\d*%? +4 MiB +losses", top), top


def test_a_graph_that_saved_a_detached_tensor_is_a_holder(notebook: Kernel) -> None:
    make = """
import torch
w, v = torch.ones(1 << 20, requires_grad=True), torch.ones(1, requires_grad=True)
y = w.exp()
z = y.detach()
u = (v * z).sum()
"""
    run_cells(notebook, make)
    (report,) = run_cells(notebook, "%gpumem why y").reports("why")
    assert "u shares parts of it" in report


def test_a_series_consists_of_its_values_and_index(notebook: Kernel) -> None:
    index = "pandas.date_range('2026', periods=2**18, freq='s')"
    make = f"prices = pandas.Series(numpy.ones(2**18, 'f4'), {index})"
    run_cells(notebook, "import numpy, pandas", make)
    (report,) = run_cells(notebook, "%gpumem why prices").reports("why")
    assert "consists of .index 2 MiB, .values 1 MiB" in report


def test_a_view_is_no_graph_of_another_tensor(notebook: Kernel) -> None:
    run_cells(notebook, "import torch", "x = torch.ones(1 << 20); rows = x.view(1024, -1)[:10]")
    (report,) = run_cells(notebook, "%gpumem why x").reports("why")
    assert "graph" not in report
    assert re.search(r"4 MiB +notebook variable rows +del rows", report)
    assert re.search(r"in one line: del rows; del x", report)


def test_a_holder_of_a_views_storage_has_one_row(notebook: Kernel) -> None:
    make = "x = torch.ones(1 << 20); data, rows = x.data, x.view(1024, -1)[:10]"
    run_cells(notebook, "import torch", make)
    (report,) = run_cells(notebook, "%gpumem why rows").reports("why")
    assert re.findall(r"notebook variable (\w+) +(.*)", report) == [
        ("x", "del x"),
        ("data", "del data"),
    ]


def test_a_view_with_a_graph_has_one_row(notebook: Kernel) -> None:
    make = "w = torch.ones(1 << 20, requires_grad=True); rows = w.view(1024, -1)[:10]"
    run_cells(notebook, "import torch", make)
    (report,) = run_cells(notebook, "%gpumem why w").reports("why")
    assert re.findall(r"notebook variable (\w+) +(.*)", report) == [("rows", "del rows")]
    assert "graph" not in report


def test_why_says_how_much_is_there_only_for_backward(notebook: Kernel) -> None:
    make = """
rows, model = torch.ones(256, 1024), nn.Linear(1024, 1024)
losses = [model(rows).exp().sum()]
values = [losses[0].detach(), torch.ones(2**18)]
"""
    run_cells(notebook, "import torch; from torch import nn", make)
    kept = "autograd graphs keep {} of it for backward(); detach() leaves them out"
    (report,) = run_cells(notebook, "%gpumem why losses").reports("why")
    assert kept.format("1 MiB") in report  # what exp() returned; names have the rest
    run_cells(notebook, "rows = None; losses[0].backward()")
    for name in ("losses", "model", "values"):
        (report,) = run_cells(notebook, f"%gpumem why {name}").reports("why")
        assert "for backward()" not in report


def test_deleting_a_name_frees_objects_without_another_holder(notebook: Kernel) -> None:
    run_cells(notebook, DEFINE_OF_CASE)
    codes = [code for code, *_ in CASES]
    sizes_by_code = dict(
        zip(codes, notebook.value(f"[of_case(code) for code in {codes}]"), strict=True)
    )
    run_cells(notebook, "gc.unfreeze()")
    assert sizes_by_code == {code: [freed, size, size - freed] for code, freed, size in CASES}


@pytest.mark.usefixtures("small_heap")
def test_a_module_consists_of_its_hooks_and_other_attributes_too(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        from torch import nn
        a = nn.Linear(2, 2)
        a.register_forward_hook(lambda module, inputs, output, big=bytes(4 << 20): None)
        a.log = [bytes(2 << 20)]
        """,
    )
    (report,) = notebook.run("%gpumem why a").reports("why")
    assert "consists of ._forward_hooks 4 MiB, .log 2 MiB" in report


def test_top_says_the_same_of_memory_that_libraries_share(notebook: Kernel) -> None:
    """``top`` compares addresses inside, ``why`` also those outside."""
    libraries = re.compile(r"\b(pyarrow|polars|torch\.from\w+|frombuffer|ctypes|BytesIO)\b")
    run_cells(notebook, DEFINE_FREED_IN_TOP)
    codes = {code: freed for code, freed, _ in CASES if libraries.search(code)}
    said = notebook.value(f"[freed_in_top(code) for code in {list(codes)}]")
    assert dict(zip(codes, said, strict=True)) == codes


def test_the_printed_predictions_of_why_come_true(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        def step(m, o):
            m(torch.ones(8, 1024)).sum().backward(); o.step()
        """,
    )
    run_cells(
        notebook,
        """
        model = nn.Linear(1024, 1024)
        optimizer = torch.optim.Adam(model.parameters())
        step(model, optimizer)
        watch(weight=model.weight, moment=optimizer.state[model.weight]['exp_avg'])
        losses = [model(torch.ones(2, 1024)).sum()]
        """,
    )
    (report,) = run_cells(notebook, "%gpumem why model").reports("why")
    assert "model · Linear · RAM 8 MiB · del model frees" in report
    assert "still held" in report
    assert "del optimizer" in report
    run_cells(notebook, "del model")
    assert "weight" in notebook.value("alive()")
    (report,) = run_cells(notebook, "%gpumem why optimizer").reports("why")
    assert "del optimizer frees 8 MiB" in report
    assert "losses[0]" in report
    run_cells(notebook, "del optimizer, losses")
    assert notebook.value("alive()") == []


def why_report(notebook: Kernel, expression: str) -> str:
    """Return the report of ``%gpumem why``."""
    (report,) = run_cells(notebook, f"%gpumem why {expression}").reports("why")
    return report


@pytest.mark.usefixtures("small_heap")
def test_an_output_is_a_holder_with_its_own_line(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        import pandas
        frame = pandas.DataFrame({'x': range(2**18)})
        frame
        """,
    )
    report = why_report(notebook, "frame")
    assert "Out[" in report or "output _" in report
    assert "%xdel _" in report


@pytest.mark.usefixtures("small_heap")
def test_the_last_object_of_a_deleted_name_is_named(notebook: Kernel) -> None:
    """An experiment has left an older one."""
    run_cells(
        notebook,
        "import numpy as np; lefts, kept = [], []",
        experiment("block = np.ones(2**19); lefts.append(block)"),
        "block = np.ones(2**18); kept.append([block])",
        "del block",
    )
    report = why_report(notebook, "block")
    assert "del kept[0][0]" in report
    assert "lefts" not in report
    run_cells(notebook, "kept.clear()")
    assert "lefts" in why_report(notebook, "block")


@pytest.mark.usefixtures("small_heap")
def test_a_name_deleted_by_an_experiment_has_its_cell_and_holder(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        cache = []
        def keep(x):
            cache.append(x)
            return lambda: x
        """,
    )
    run_cells(
        notebook,
        """
        %%experiment gone
        block = torch.ones(2**20)
        hook = keep(block)
        """,
    )
    report = why_report(notebook, "block")
    assert "block is not defined; cell" in report
    assert "cache[0]" in report
    assert "no such name" not in report
    assert why_report(notebook, "missing").startswith("missing is not defined")


@pytest.mark.usefixtures("small_heap")
def test_no_line_deletes_a_container_with_other_objects(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        first = second = [0] * 2**20
        third = first
        """,
    )
    assert "del second, third" in why_report(notebook, "first")
    run_cells(notebook, "shelf = {'a': third, 'b': torch.ones(3)}")
    for name in ("first", 'shelf["a"]'):
        assert not re.search(r"del shelf\b(?!\[)", why_report(notebook, name))  # it holds more


@pytest.mark.usefixtures("small_heap")
def test_a_part_of_a_variable_has_the_line_that_deletes_the_part(notebook: Kernel) -> None:
    run_cells(
        notebook, "pair = {'a': torch.ones(2**19), 'b': 1}; row = [*pair.values()]; del pair['a']"
    )
    run_cells(
        notebook, "import numpy, pandas; frame = pandas.DataFrame({'x': numpy.ones(2**17), 'y': 1})"
    )
    for expression, advice in (("row[0]", "del row[0]"), ("frame['x']", 'del frame["x"]')):
        report = why_report(notebook, expression)
        assert f"notebook variable {expression.partition('[')[0]}" in report
        assert advice in report
        assert "del " not in report.replace(advice, "")


@pytest.mark.usefixtures("small_heap")
def test_objects_of_python_and_ipython_have_no_line(notebook: Kernel) -> None:
    run_cells(
        notebook, "import numpy, pandas; frame = pandas.DataFrame({'x': numpy.ones(2**17), 'y': 1})"
    )
    run_cells(notebook, "few = pandas.Series(['a', numpy.nan] * 10, dtype=object)")
    assert "del frame" not in why_report(notebook, "few")  # the whole process shares this number
    assert "del _ih" not in why_report(notebook, "In")
    assert "is not defined" not in why_report(notebook, "print")


WRONG_LINES = ("%gpumem why", "%gpumem why 1 +", "%gpumem why class", "%gpumem why cache['it'")


@pytest.mark.usefixtures("small_heap")
def test_wrong_lines_of_why_show_no_traceback(notebook: Kernel) -> None:
    for line in WRONG_LINES:
        reply = notebook.run(line)
        assert "%gpumem why" in reply.stderr + reply.stdout
        assert "Traceback" not in reply.stderr


@pytest.mark.usefixtures("small_heap")
def test_a_deleted_name_reports_the_holders_of_its_object(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        import numpy, weakref
        class Net: pass
        net = Net(); net.big = bytearray(2**20); models = {'n': net}
        """,
        "block = torch.ones(2**20); kept = [block]; array = numpy.ones(2**18); part = array[1:]",
        "gone = Net(); gone.me = gone",
        "rows = [torch.ones(2**19)]; row = rows[0]",
        "small = numpy.ones(9); small.resize(3); del block, array, gone, rows",
        "%reset_selective -f ^net$",
    )

    # Names that `del`, or %reset_selective, has deleted, while something else holds the object.
    for name, size, holder in (
        ("block", "4 MiB", "kept[0]"),
        ("array", "2 MiB", "part"),
        ("rows", "2 MiB", "row"),
        ("net", "1 MiB", 'models["n"]'),
    ):
        (report,) = run_cells(notebook, f"%gpumem why {name}").survivors()
        assert re.search(rf"{size} .* held by notebook variable {re.escape(holder)}", report), (
            report
        )
        assert f"{name} is not defined; cell " in report
    assert (
        "none of its memory is known to be alive"
        in run_cells(notebook, "%gpumem why gone").reports("why")[0]
    )

    # Names that were bound to other objects since.
    run_cells(
        notebook,
        "row = 1; del row",
        """
        def delete():
            global part
            del part
        """,
        "part = [1]",
        "delete()",
    )
    for name in ("row", "part"):  # other objects than those that an earlier cell might have deleted
        assert (
            "none of its memory is known to be alive"
            in run_cells(notebook, f"%gpumem why {name}").reports("why")[0]
        )

    # Objects that are gone by now.
    run_cells(notebook, "del kept, models; small.resize(2)")
    for name in ("block", "net"):
        assert (
            "none of its memory is known to be alive"
            in run_cells(notebook, f"%gpumem why {name}").reports("why")[0]
        )


def test_no_code_of_an_object_runs() -> None:
    item = hostile.made(hostile.Hostile, bytes(MIB))
    with hostile.untouched():
        ownership = ipygpumem.why(item)
    assert round(ownership.freed_bytes["cpu"] / MIB) == 1


def test_objects_with_one_holder_cost_next_to_nothing() -> None:
    class Row:
        pass

    rows = [Row() for _ in range(1000)]
    for row in rows:
        row.cells = [object()]  # type: ignore[attr-defined]
    region = Region([[rows, rows[0]]], keeps_folded=True)
    # Of a thousand rows, each with a list, nearly all are folded into `rows`.
    assert len(region.objects) < 100 < 1900 < len(region.folded)
    del region, row
    ownership = ipygpumem.why(rows)
    assert ownership.complete
    assert ownership.freed_bytes["cpu"] > 0.9 * ownership.size_bytes


@pytest.mark.usefixtures("small_heap")
def test_a_script_that_has_run_holds_its_names_too(notebook: Kernel, tmp_path: Path) -> None:
    script = tmp_path / "made.py"
    script.write_text("rows = [bytearray(2**20) for _ in range(8)]\n")
    run_cells(notebook, f"%run {script}")
    (report,) = run_cells(notebook, "%gpumem why rows").reports("why")
    assert "module of %run made.py, global rows" in report
    (report,) = run_cells(notebook, "%gpumem top rows").reports("top")
    assert re.search(r"del rows;\s+get_ipython\(\)\._main_mod_cache", report), report
    run_cells(notebook, "del rows")
    (report,) = run_cells(notebook, "%gpumem leaks").leaks()
    (leak,) = [line for line in report.splitlines() if "made.py" in line]
    run_cells(notebook, leak.rpartition("to free it: ")[2])
    (report,) = run_cells(notebook, "%gpumem leaks").leaks()
    assert "made.py" not in report


def test_an_object_has_no_holder_for_memory_shared_by_its_type() -> None:
    class Outer:
        small = 1

        class Inner:
            big = bytearray(MIB)

    @functools.lru_cache
    def cached(size: int) -> bytes:
        return bytes(size)

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: Any) -> Any:  # type: ignore[override]
            ctx.doubled = given * 2
            return given**2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
            return grad

    waiting: queue.Queue[Any] = queue.Queue()
    waiting.put(bytearray(MIB))
    cached(MIB)
    squared = Square.apply(torch.ones(2**18, requires_grad=True))

    # None of what classes, caches and queues have in common is a holder.
    for ownership in (
        ipygpumem.why(waiting),
        ipygpumem.why(cached),
        ipygpumem.why(Outer),
        ipygpumem.why(squared),
    ):
        assert [part.holder.path for part in ownership.held] == [], ownership.name
        assert ownership.freed_bytes["cpu"] >= MIB, ownership.name


@pytest.mark.usefixtures("small_heap")
def test_a_holder_that_is_too_far_away_is_not_called_invisible(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        big = bytearray(2**20); chain = (big,)
        for _ in range(1000): chain = [chain]
        """,
    )
    (report,) = run_cells(notebook, "%gpumem why big").reports("why")
    assert "something that the search did not reach within its limits" in report
    run_cells(
        notebook,
        """
        while type(chain) is list: chain = chain[0]
        del chain, big
        """,
    )


def test_rows_in_two_lists_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[number + 10**6] for number in range(5000)]
    again = list(rows)
    folded: list[int] = []
    fold = Folder.fold

    def counted(self: Folder, key: int, items: Sequence[Any]) -> None:
        folded.append(key)
        fold(self, key, items)

    monkeypatch.setattr(Folder, "fold", counted)
    ownership = ipygpumem.why(rows)
    # Not one for each of the 5,000 rows.
    assert len(folded) < 100
    assert "local again" in ownership.held[0].holder.path
    alone = ipygpumem.why([[number + 10**7] for number in range(5000)])
    assert alone.size_bytes == pytest.approx(ownership.size_bytes, rel=0.01)
    del again


@pytest.mark.usefixtures("small_heap")
def test_text_in_another_frames_array_is_held_by_that_frame(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        texts = [f"text {number}" * 2000 for number in range(200)]
        whole = pandas.DataFrame({"text": pandas.Series(texts, dtype=object)})
        part = whole[whole.index % 2 == 0]
        del texts
        """,
    )
    (report,) = run_cells(notebook, "%gpumem why part").reports("why")
    assert re.search(
        r"notebook variable whole \(in a column\), and \d+ more objects +del whole",
        report,
    )
    run_cells(notebook, "del whole, part")


def test_a_container_too_long_to_search_holds_all_its_objects() -> None:
    numbers = [float(number) for number in range(10_000)]
    boxes = [[float(number)] for number in range(5000)]
    both = numbers + [box[0] for box in boxes]
    ownership = ipygpumem.why(both)
    held = {part.holder.path: part.objects for part in ownership.held}
    # Nearly all of the list's 10,000.
    assert max(held.values()) > 9_900
    assert not any("cannot be seen" in path for path in held)


def test_a_view_of_an_array_of_texts_frees_its_texts() -> None:
    texts = np.array(
        [str(number) * 10 for number in range(100_000)], dtype=np.dtypes.StringDType()
    )[5:10]
    ownership = ipygpumem.why(texts)
    assert ownership.held == ()
    assert ownership.freed_bytes["cpu"] > MIB
