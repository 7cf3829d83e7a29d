"""Random cells in a real kernel, held against a plain model of what scopes do to names."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from tests.kernel import Kernel
from tests.steps import ok

FUNCTIONS = """
import contextlib
def bump(name):
    if name in globals():
        globals()[name] += 1000
def drop(name):
    globals().pop(name, None)
"""


@dataclass
class ModelScope:
    outer: set[str]
    saved: dict[str, int] = field(default_factory=dict)


class Model:
    """Names and nested scopes: what is bound is saved then, and what is deleted is gone then."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.scopes: list[ModelScope] = []

    def bind(self, name: str, value: int) -> None:
        if self.scopes and name in self.scopes[-1].outer and name in self.names:
            self.scopes[-1].saved.setdefault(name, self.names[name])
        self.names[name] = value

    def delete(self, name: str) -> None:
        if self.names.pop(name, None) is None:
            return
        for scope in reversed(self.scopes):
            if name in scope.saved or name not in scope.outer:
                return
            scope.outer.discard(name)

    def bump(self, name: str) -> None:
        if name in self.names:
            self.names[name] += 1000

    def open(self) -> None:
        self.scopes.append(ModelScope(set(self.names)))

    def close(self) -> None:
        scope = self.scopes.pop()
        self.names = {name: value for name, value in self.names.items() if name in scope.outer} | scope.saved


class Programs:
    """Writes random code, and does to the model what it will do."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.model = Model()
        self.value = 100_000

    def cell(self) -> str:
        kind = self.random.random()
        depth = len(self.model.scopes)
        if kind < 0.15 and depth < 3:
            self.model.open()
            return f"%experiment start s{depth}"
        if kind < 0.28 and depth:
            self.model.close()
            return "%experiment end"
        if kind < 0.5:
            self.model.open()
            body = self.block(0)
            self.model.close()
            return f"%%experiment cell\n{body}"
        return self.block(0)

    def block(self, depth: int) -> str:
        return "\n".join(self.statement(depth) for _ in range(self.random.randrange(1, 4)))

    def statement(self, depth: int) -> str:
        self.value += 7
        name, value = self.random.choice("abc"), self.value
        binding = {
            "assign": f"{name} = {value}",
            "call": f"{name} = int({value})",
            "with": f"with contextlib.nullcontext({value}) as {name}: pass",
            "for": f"for {name} in [{value}]: pass",
            "walrus": f"if ({name} := {value}) < 0: pass",
            "magic": f"%time {name} = {value}",
        }
        deleting = {
            "condition": f"if {name!r} in globals(): del {name}",
            "try": f"try:\n    del {name}\nexcept NameError:\n    pass",
            "function": f"drop({name!r})",
        }
        kinds = [*binding, *deleting, "bump", *(["if", "try finally", "nested"] if depth < 2 else [])]
        kind = self.random.choice(kinds)
        if kind in binding:
            self.model.bind(name, value)
            return binding["assign"] if kind == "magic" and depth else binding[kind]
        if kind in deleting:
            self.model.delete(name)
            return deleting[kind]
        if kind == "bump":
            self.model.bump(name)
            return f"bump({name!r})"
        block = self.block(depth + 1)
        if kind == "nested":
            return f"get_ipython().run_cell({block!r}, store_history=False)"
        inside = "\n".join(f"    {line}" for line in block.splitlines())
        return f"if True:\n{inside}" if kind == "if" else f"try:\n{inside}\nfinally:\n    pass"


@pytest.mark.parametrize("seed", [3, pytest.param(2, marks=pytest.mark.thorough)])
def test_random_cells_leave_the_names_that_scopes_should_leave(kernel: Kernel, seed: int) -> None:
    programs = Programs(seed)
    ok(kernel, "%config IPyGpuMem.experiment_report = 'none'", "%config IPyGpuMem.report = False", FUNCTIONS)
    cells = []
    for _ in range(200):
        cells.append(programs.cell())
        ok(kernel, cells[-1])
        found = kernel.value("{name: globals()[name] for name in 'abc' if name in globals()}")
        assert found == programs.model.names, "\n-----\n".join(cells[-5:])
