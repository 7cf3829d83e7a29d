"""Objects of Cython refer to memoryviews by slices, of which the collector does not know."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.heap.knowledge.slices import Slices, is_view, may_have_slices
from ipygpumem.heap.sizes.region import Region
from tests.steps import needs, run_cells

TREE = """
%load_ext ipygpumem
import numpy as np
from sklearn.neighbors import KDTree
points = np.random.default_rng(0).normal(size=(80_000, 5))
trees = {"small": KDTree(points[:10]), "large": KDTree(points.copy())}
del points
"""


def tree_of(number: int) -> Any:
    numpy = pytest.importorskip("numpy")
    neighbors = pytest.importorskip("sklearn.neighbors")
    return neighbors.KDTree(numpy.random.default_rng(0).normal(size=(number, 5)))


def test_a_tree_refers_to_one_view_for_each_array() -> None:
    tree = tree_of(1_000)
    arrays = tree.get_arrays()
    views = Slices().of([tree])
    assert all(map(is_view, views))
    bases = [gc.get_referents(view)[0] for view in views]
    assert sorted(map(id, bases)) == sorted(map(id, arrays))


def test_the_arrays_of_a_tree_die_with_it() -> None:
    tree = tree_of(80_000)
    size = sum(array.nbytes for array in tree.get_arrays())
    trees = [tree]
    del tree
    region = Region([trees])
    (freed,) = region.freed_by([id(trees)], {id(trees): 1})
    assert size <= freed["cpu"] < size + 10_000


def test_a_view_in_a_variable_keeps_its_array() -> None:
    tree = tree_of(80_000)
    data = tree.data
    size = data.nbytes
    trees = [tree]
    del tree
    region = Region([trees])
    (freed,) = region.freed_by([id(trees)], {id(trees): 1})
    assert freed["cpu"] < sum(array.nbytes for array in trees[0].get_arrays()) - size + 10_000


def test_few_objects_are_searched_for_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = pytest.importorskip("numpy")
    pandas = pytest.importorskip("pandas")
    plain = [numpy.ones(3), pandas.DataFrame({"a": [1]}), {"a": [1]}, memoryview(b"text")]
    assert not any(may_have_slices(type(item)) for item in plain)
    passes = list[int]()
    monkeypatch.setattr(gc, "get_objects", lambda: passes.append(1))
    assert Slices().of(plain) == []
    assert not passes


@pytest.fixture(scope="module")
def kernel_with_trees() -> Iterator[Kernel]:
    needs("sklearn")
    with Kernel() as kernel:
        run_cells(kernel, TREE)
        yield kernel


def test_why_names_the_tree_around_an_array(kernel_with_trees: Kernel) -> None:
    (report,) = run_cells(kernel_with_trees, "%gpumem why trees['large'].data.base").reports()
    assert 'notebook variable trees["large"]' in report
    assert 'del trees["large"]' in report


def test_leaks_lists_no_tree_of_a_name(kernel_with_trees: Kernel) -> None:
    (report,) = run_cells(kernel_with_trees, "%gpumem leaks").reports()
    assert "no leak" in report
