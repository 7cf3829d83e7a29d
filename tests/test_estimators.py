"""Lines for the fits of scikit-learn's estimators that are older than an experiment.

A line that removes one attribute leaves an estimator that can neither predict nor be printed.
"""

from importlib.util import find_spec

import pytest

from benchmarks.harness.kernel import Kernel
from tests.steps import experiment, run_cells, tidied_kernel

pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="scikit-learn is needed")
PREPARE = """
import weakref
import numpy as np
from sklearn.base import BaseEstimator
from sklearn.ensemble import RandomForestRegressor
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
rows, labels = np.random.rand(100_000, 20), np.arange(100_000) % 2
few, few_labels = rows[:10_000], labels[:10_000]
def new():
    return KNeighborsClassifier()
class App:
    pass
class Mine(BaseEstimator):
    def __init__(self, columns):
        self.columns = list(columns)
    def fit(self, rows):
        self.data_ = rows
        return self
"""
shared_kernel, notebook = tidied_kernel("%reset -f", PREPARE, hides_libraries=True)
IMPORT = "import sklearn.base; "
CASES = {
    "a name": ("m = new()", "m.fit(rows + 0, labels)", "m = sklearn.base.clone(m)"),
    "an output, too": (
        "m = new()",
        "copy = rows + 0\nm.fit(copy, labels)",
        "m = sklearn.base.clone(m)",
    ),
    "a pipeline": (
        "m = make_pipeline(StandardScaler(), new())",
        "m.fit(rows, labels)",
        "m = sklearn.base.clone(m)",
    ),
    "a search": (
        "m = GridSearchCV(new(), {'n_neighbors': [1, 2]}, cv=2)",
        "m.fit(few + 0, few_labels)",
        "m = sklearn.base.clone(m)",
    ),
    "a forest": (
        "m = RandomForestRegressor(n_estimators=3)",
        "m.fit(few, few[:, 0])",
        "m = sklearn.base.clone(m)",
    ),
    "an item": (
        "m = {'a': [new()]}",
        "m['a'][0].fit(rows + 0, labels)",
        'm["a"][0] = sklearn.base.clone(m["a"][0])',
    ),
    "two places": (
        "app = App(); app.m = new(); m = [app.m]",
        "app.m.fit(rows + 0, labels)",
        "app.m = m[0] = sklearn.base.clone(app.m)",
    ),
    "two names": (
        "m = other = new()",
        "m.fit(rows + 0, labels)",
        "m = other = sklearn.base.clone(m)",
    ),
    "a name and an item": (
        "other = new(); m = {'a': other}",
        "other.fit(rows + 0, labels)",
        'm["a"] = other = sklearn.base.clone(m["a"])',
    ),
    "two items": (
        "m = 2 * [new()]",
        "m[1].fit(rows + 0, labels)",
        "m[0] = m[1] = sklearn.base.clone(m[0])",
    ),
    "a pipeline of few columns": (
        "m = make_pipeline(StandardScaler(), new())",
        "data = np.random.rand(200_000, 8); m.fit(data, (data[:, 0] > 0.5).astype(int))",
        "m = sklearn.base.clone(m)",
    ),
    "a pipeline in a pipeline": (
        "m = make_pipeline(make_pipeline(StandardScaler()), new())",
        "data = np.random.rand(200_000, 8); m.fit(data, (data[:, 0] > 0.5).astype(int))",
        "m = sklearn.base.clone(m)",
    ),
    # A clone has no attributes but its parameters.
    "an attribute of the user": (
        "m = new(); m.table = np.arange(10)",
        "m.fit(rows + 0, labels)",
        "del m",
    ),
    # The user's own class may copy its parameters.
    "a class of the user": ("m = Mine([1])", "m.fit(rows + 0)", "m.data_ = None"),
    # A clone would copy it.
    "a parameter": (
        "m = new()",
        "m.set_params(metric_params={'w': np.ones(2**20)})",
        'del m.metric_params["w"]',
    ),
    "a new one": ("m = []", "m.append(new().fit(rows + 0, labels))", "del m[0]"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_line_leaves_an_older_estimator_unfitted(notebook: Kernel, case: str) -> None:
    older, fit, line = CASES[case]
    run_cells(
        notebook,
        older,
        f"""
        %%experiment e
        {fit};
        """,
    )
    (leaks,) = run_cells(notebook, "%gpumem leaks").leaks()
    expected = f"{IMPORT}{line}" if "clone" in line else line
    advised = leaks.rpartition("to free it: ")[2]
    assert sorted(advised.split("; ")) == sorted(expected.split("; "))
    run_cells(notebook, advised, "'m' in globals() and repr(m)")
    (leaks,) = run_cells(notebook, "%gpumem leaks").leaks()
    assert leaks.startswith("no leak"), leaks


def test_why_an_older_estimator_holds_its_fit(notebook: Kernel) -> None:
    run_cells(notebook, "m = new()", experiment("m.fit(rows + 0, labels);"))
    (why,) = run_cells(notebook, "%gpumem why m._fit_X").reports("why")
    assert f"{IMPORT}m = sklearn.base.clone(m)" in why


def test_a_line_says_that_it_drops_an_earlier_fit(notebook: Kernel) -> None:
    run_cells(
        notebook,
        "m = make_pipeline(StandardScaler(), new()).fit(rows + 0, labels)",
        experiment("m.steps[0][1].new_ = np.ones(1 << 21)"),
    )
    (leaks,) = run_cells(notebook, "%gpumem leaks").leaks()
    assert f"{IMPORT}m = sklearn.base.clone(m)" in leaks
    assert "# also drops 16 MiB" in leaks
