"""Random cells in a real kernel, held against Python itself: see test_exact_scopes.py."""

import builtins
import random
from typing import Any

import pytest

from tests.kernel import Kernel
from tests.steps import ok
from tests.test_exact_scopes import FORMS, HELPERS, NAMES, Recorder, plain, statement

_FOUND = """{name: value if type(value) in (int, list, str) else type(value).__name__
for name, value in globals().items() if name in ('a', 'b', 'c', 'd')}"""


class Model:
    """The names of a notebook with nested scopes, whose cells Python itself runs."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {"__builtins__": builtins}
        exec(HELPERS + NAMES, self.namespace)
        self.scopes: list[Recorder] = []

    def run(self, source: str) -> None:
        exec(compile(source, "cell", "exec"), self.namespace, *self.scopes[-1:])
        for scope in self.scopes[-1:]:
            scope.forget_deleted()

    def open(self) -> None:
        self.scopes.append(Recorder(self.namespace, self.scopes))

    def close(self) -> None:
        left = self.scopes[-1].left()
        scope = self.scopes.pop()
        if self.scopes:
            self.scopes[-1].imports |= scope.imports.intersection(left) - scope.saved.keys()
        self.namespace.clear()
        self.namespace.update(left)

    def names(self) -> dict[str, Any]:
        return plain({name: self.namespace[name] for name in "abcd" if name in self.namespace})


def cell(source: random.Random, model: Model) -> str:
    """Return a random cell, and do to the model what it will do."""
    kind, depth = source.random(), len(model.scopes)
    if kind < 0.15 and depth < 3:
        model.open()
        return f"%experiment start s{depth}"
    if kind < 0.28 and depth:
        model.close()
        return "%experiment end"
    code = "\n".join(statement(source, source.choice(FORMS)) for _ in range(source.randrange(1, 4)))
    if kind < 0.5:
        model.open()
    model.run(code)
    wrapped = code
    if source.random() < 0.2:
        wrapped = f"%%time\n{code}"
    elif source.random() < 0.2:
        wrapped = f"get_ipython().run_cell({code!r}, store_history=False)"
    if kind < 0.5:
        model.close()
        return f"%%experiment cell\n{wrapped}"
    return wrapped


THOROUGH = [pytest.param(5_000 + seed, marks=pytest.mark.thorough) for seed in range(4)]
"""Numbers of cells, which seed the random ones: 20,000 in all."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cells", [150, *THOROUGH])
def test_random_cells_leave_the_names_that_scopes_should_leave(kernel: Kernel, cells: int) -> None:
    source, model = random.Random(cells), Model()
    ok(kernel, "%config IPyGpuMem.experiment_report = 'none'", "%config IPyGpuMem.report = False", HELPERS + NAMES)
    run = []
    for _ in range(cells):
        run.append(cell(source, model))
        ok(kernel, run[-1])
        assert kernel.value(_FOUND) == model.names(), "\n-----\n".join(run[-5:])
