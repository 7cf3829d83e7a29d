"""``%gpumem top`` and ``status`` name the memory of notebooks like those that people write."""

import textwrap
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.units import MIB
from tests.named_notebooks import NOTEBOOKS
from tests.process_memory import linux
from tests.steps import host_table, run_cells

LEAST_NAMED_SHARE = 0.95
"""Smallest share of the growth that reports must name."""
OF_LIBRARIES = {
    "lazy queries of polars": "polars' own allocator keeps freed pages, and cannot be asked",
    "embeddings in arrow": "pages that building the table has left: no allocator reports them",
}
"""Notebooks of whose memory too little is named, with the reason."""
BETWEEN = ("free heap pages", "free blocks of Python", "printed by cells", "libraries and mapped")
"""First words of the parts of status that are in no object."""
IN_OBJECTS = ("Python objects", "arrays: ", "data of ")
_RSS = "__import__('psutil').Process().memory_info().rss"
_NAMES = "(row for row in __import__('ipygpumem').top().names if row.name != 'printed output')"
_TOP = f"sum(row.device_bytes.get('cpu', 0) for row in {_NAMES})"


class Look(NamedTuple):
    """Reports on a process at one moment."""

    rss_bytes: int
    names_bytes: int
    """The sum of ``top`` without printed output, which is a part of ``status``."""
    objects_bytes: int
    """Live objects and their data, in ``status``."""
    between_bytes: int
    """Memory in no object, in ``status``."""

    @classmethod
    def at(cls, kernel: Kernel) -> "Look":
        rss = kernel.value(_RSS)
        _, parts = host_table(kernel)  # at once: a look at the names fills free pages
        names = kernel.value(_TOP)
        return cls(rss, names, _sum_of(parts, IN_OBJECTS), _sum_of(parts, BETWEEN))


def _sum_of(parts: dict[str, int], beginnings: tuple[str, ...]) -> int:
    """Return the bytes of the parts whose names begin so."""
    return sum(size for name, size in parts.items() if name.startswith(beginnings))


def notebook_cases() -> list[Any]:
    """Return all notebooks as parameters; `make test` runs the quick ones."""
    parameters = []
    for name, notebook in NOTEBOOKS.items():
        missing = [package for package in notebook.packages if find_spec(package) is None]
        marks = [pytest.mark.skipif(bool(missing), reason=f"not installed: {missing}")]
        if not notebook.is_quick:
            marks.append(pytest.mark.thorough)
        if name in OF_LIBRARIES:
            marks.append(pytest.mark.xfail(raises=AssertionError, reason=OF_LIBRARIES[name]))
        parameters.append(pytest.param(name, marks=marks))
    return parameters


@linux
@pytest.mark.parametrize("name", notebook_cases())
def test_the_memory_of_a_notebook_is_named(name: str) -> None:
    notebook = NOTEBOOKS[name]
    with Kernel() as kernel:
        run_cells(kernel, "%load_ext ipygpumem", textwrap.dedent(notebook.imports))
        Look.at(kernel)  # the first look imports modules, and leaves free pages
        run_cells(kernel, "%gpumem free")
        before = Look.at(kernel)
        run_cells(kernel, *map(textwrap.dedent, notebook.cells))
        after = Look.at(kernel)
    growth, names, objects, between = (now - then for now, then in zip(after, before, strict=True))
    # Else there is too little to name.
    assert growth > 20 * MIB
    # What names hold is a part of the live objects, as far as both know it.
    assert max(names, objects) + between >= LEAST_NAMED_SHARE * growth, (
        growth,
        names,
        objects,
        between,
    )
