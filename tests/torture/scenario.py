"""What a scenario is: data only."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """One cell of a scope.

    Args:
        code: what runs.
        raises: the error that it must end with; empty where it must succeed.
        answers: what is typed where the cell asks for input, as ``%debug`` does.
    """

    code: str
    raises: str = ""
    answers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scenario:
    """One way in which a notebook leaks.

    Args:
        name: a short, unique title.
        pins: what keeps the memory alive, in a sentence for users.
        advice: what the end of an experiment does about it, or what the user can do.
        cells: what runs inside the scope.
        on_gpu: what runs instead where the blocks are tensors on a GPU and ``cells`` need an array.
        before: what runs before the scope begins; empty for nothing.
        share: how much of the bytes must come back: 1.0, or less where something outside holds it on purpose.
        holder: words that a path from a root to the memory must contain where it is held on purpose.
        needs: modules without which the scenario cannot run.
        tools: programs without which it cannot run.
        python: the oldest Python that has what it is about.
        options: arguments of the kernel.
        timeout: seconds that one cell may take.
        alone: whether it changes the process so that no other scenario may follow in it.
    """

    name: str
    pins: str
    advice: str
    cells: tuple[Cell, ...]
    on_gpu: tuple[Cell, ...] = ()
    before: str = ""
    share: float = 1.0
    holder: str = ""
    needs: tuple[str, ...] = ("numpy",)
    tools: tuple[str, ...] = ()
    python: tuple[int, int] = (3, 10)
    options: tuple[str, ...] = ()
    timeout: float = 120
    alone: bool = False

    def missing(self) -> str:
        """Return why the scenario cannot run with this interpreter; empty if it can."""
        if sys.version_info[:2] < self.python:
            return "needs Python {}.{}".format(*self.python)
        gone = [name for name in self.needs if importlib.util.find_spec(name) is None]
        gone += [name for name in self.tools if shutil.which(name) is None]
        return f"{', '.join(gone)} not installed" if gone else ""


def cells(*codes: str) -> tuple[Cell, ...]:
    """Return cells that must succeed."""
    return tuple(Cell(code.strip("\n")) for code in codes)


def fails(code: str, error: str = "ValueError") -> Cell:
    """Return a cell that must end with ``error``."""
    return Cell(code.strip("\n"), raises=error)
