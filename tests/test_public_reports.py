"""Answers that authors of public reports needed: one short session each, in a real kernel.

As in polars#23128: tests/smoke/test_any_memory.py. The Linux kernel shows what RAM consists of.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.harness.kernel import Kernel
from tests import hostile
from tests.steps import host_table, mib_after, needs, run_cells, run_quietly, tidied_kernel

MIB = 1 << 20
shared_kernel, notebook = tidied_kernel(
    "get_ipython().reset()", "%reload_ext ipygpumem", hides_libraries=True
)
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux shows what RAM consists of")


def report(notebook: Kernel, line: str) -> str:
    if line == "%gpumem leaks":
        return "\n".join(run_quietly(notebook, line).leaks())
    kind = line.split()[1].replace("free", "note")
    return "\n".join(run_quietly(notebook, line).reports(kind))


def test_frames_that_were_only_looked_at_are_named_and_freed(
    notebook: Kernel, tmp_path: Path
) -> None:
    """polars#9225: "it actually keeps the objects around in ipython" each time a file is read and
    shown.
    """
    needs("polars")
    file = str(tmp_path / "my.parquet")
    run_cells(
        notebook,
        f"import polars; polars.DataFrame({{'t': [f'{{i:0200d}}' for i in "
        f"range(20_000)]}}).write_parquet({file!r})",
        *[f"polars.read_parquet({file!r})"] * 2,
    )
    lines = re.findall(
        r" (4\.\d) MiB .* held by (Out\[\d+\]) · to free it: (.*)",
        report(notebook, "%gpumem leaks"),
    )
    assert len({name for _, name, _ in lines}) == 2
    run_cells(notebook, *[remedy for _, _, remedy in lines])
    assert report(notebook, "%gpumem leaks").startswith("no leak")


def test_a_deleted_frame_is_found_in_the_output_that_showed_it(notebook: Kernel) -> None:
    """pandas#9716: frames were merged, shown and deleted, and ``gc.collect()`` gave most of the
    memory not back.
    """
    needs("pandas")
    query = (
        "pandas.DataFrame({'id': range(30_000), 'text': [f'{i:0100d}' for i in range(30_000)]}, "
        "dtype=object)"
    )
    run_cells(notebook, f"import gc, pandas; df_1 = {query}; df_2 = {query}")
    run_cells(
        notebook,
        """
        merged = pandas.merge(df_1, df_2, on='id', how='left')
        merged
        """,
    )
    why = report(notebook, "%gpumem why merged")
    assert re.search(
        r"^merged · DataFrame · RAM 1[12](\.\d)? MiB · del merged frees \d+ B$", why, re.MULTILINE
    ), why
    run_cells(notebook, "del df_1, df_2, merged; gc.collect();")
    leaks = report(notebook, "%gpumem leaks")
    ((size, remedy),) = re.findall(r" (1[12](?:\.\d)?) MiB .*Out\[\d+\].* to free it: (.*)", leaks)
    assert f" {size} MiB " in report(notebook, "%gpumem top")
    run_cells(notebook, remedy)
    assert report(notebook, "%gpumem leaks").startswith("no leak")


@linux
def test_memory_that_stays_after_pickling_is_malloc_s(notebook: Kernel) -> None:
    """pandas#43156: frames went through pickle and were deleted, and RSS stayed high."""
    needs("pandas")
    run_cells(
        notebook,
        "import numpy, pandas, pickle; frame = pandas.DataFrame(numpy.random.random((2000, 500)))",
    )
    run_cells(
        notebook,
        """
        frame['part'] = (frame[0] * 1000).astype(int)
        _, groups = zip(*frame.groupby('part')); del frame
        groups = [pickle.loads(one) for one in [pickle.dumps(group) for group in groups]]
        del groups
        """,
    )
    # What the deleted groups have left in the heap.
    assert host_table(notebook)[1]["free heap pages"] > 8 * MIB
    assert mib_after(report(notebook, "%gpumem free"), "free heap pages (RAM") > 8
    assert report(notebook, "%gpumem leaks").startswith("no leak")


@linux
def test_memory_after_a_parallel_job_is_split_from_its_workers(notebook: Kernel) -> None:
    """joblib#1577: the result was deleted, and 3.3 of 3.9 GiB stayed; its workers
    are alive, too.
    """
    needs("joblib")
    run_cells(notebook, "import numpy; from joblib import Parallel, delayed")
    run_cells(
        notebook,
        "found = Parallel(n_jobs=2)(delayed(numpy.ones)(50_000) for _ in range(100))",
        "del found",
    )
    # How much of the 38 MiB glibc has returned by itself depends on the order in which the results
    # came.
    assert report(notebook, "%gpumem free").startswith("freed: RAM ")
    status = report(notebook, "%gpumem status")
    run_cells(
        notebook,
        " ".join(
            re.findall(r"from joblib\S* import \w+;|get_reusable\S+\(\)$", status, re.MULTILINE)[:2]
        ),
    )
    assert "shutdown()" not in report(notebook, "%gpumem status")


@linux
def test_shared_memory_is_shown_next_to_its_limit(notebook: Kernel) -> None:
    """pytorch#5040: a data loader's worker died of a bus error, because batches had filled
    /dev/shm.
    """
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    run_cells(notebook, "import torch")
    (line,) = run_cells(
        notebook, "batches = [torch.ones(1 << 20).share_memory_() for _ in range(6)]"
    ).reports("cell")
    assert re.search(r"shared memory \+24 MiB, 24 MiB of [\d.]+ [MG]iB", line), line
    text = report(notebook, "%gpumem top")
    assert re.search(r"^ +24 MiB .* batches +list +6 Tensor .*del batches$", text, re.MULTILINE), (
        text
    )
    assert "shared memory" not in text
    assert "shared memory -24 MiB" in run_cells(notebook, "del batches").reports("cell")[0]


def test_the_size_of_each_variable_is_one_line_away(notebook: Kernel) -> None:
    """vscode-jupyter#17189: frames, arrays and models of any size look alike in the list of
    variables.
    """
    needs("pandas")
    run_cells(
        notebook,
        """
        import numpy, pandas; frame = pandas.DataFrame(numpy.ones((100_000, 10)))
        array, texts = numpy.ones(1 << 19), [f'{n:0100d}' for n in range(10_000)]
        """,
    )
    sizes = notebook.value(
        "[(row.name, row.type_name, row.size_bytes) for row in __import__('ipygpumem').top().names]"
    )
    expected = [
        ("frame", "DataFrame", 8e6),
        ("array", "ndarray", 8 << 19),
        ("texts", "list", 10_000 * (160 + 8)),
    ]
    assert [row[:2] for row in sizes] == [row[:2] for row in expected]
    assert [row[2] for row in sizes] == pytest.approx([row[2] for row in expected], rel=0.05)


def test_large_variables_cost_a_cell_nothing(notebook: Kernel) -> None:
    """notebook#3303: a list of variables with sizes measured and printed each one
    after every cell.
    """
    run_cells(
        notebook,
        hostile.SOURCE,
        """
        thing, many = made(Hostile), [str(n) for n in range(10**6)]
        from ipygpumem.heap.sizes.sizes import Sizes
        measured, real = [], Sizes.measure
        Sizes.measure = lambda self, *them: (measured.append(1), real(self, *them))[1]
        touched.clear()
        """,
    )
    run_cells(notebook, *["1 + 1"] * 3)
    assert notebook.value("measured, touched") == ([], [])
    assert " many " in report(notebook, "%gpumem top")
    assert notebook.value("len(measured) > 0, touched") == (True, [])
    run_cells(notebook, "Sizes.measure = real")


def test_the_vocabulary_that_grows_with_each_document_is_named(notebook: Kernel) -> None:
    """spaCy#3618: ``nlp.pipe`` grew the process for hours, with no document kept."""
    if find_spec("spacy") is None:
        pytest.skip("spaCy is not installed")
    run_cells(
        notebook,
        """
        import ipygpumem, spacy
        nlp = spacy.blank('en'); list(nlp.pipe(['a text']));
        """,
    )
    part = (
        "{p.name: p.size_bytes for row in ipygpumem.top('nlp').names for p in row.parts}['.vocab']"
    )
    before = notebook.value(part)
    run_cells(
        notebook,
        """
        for document in nlp.pipe(f'test document {n}' for n in range(20_000)): pass
        del document
        """,
    )
    assert notebook.value(part) > before + 4 * MIB
