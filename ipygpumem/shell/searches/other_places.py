"""Lists the places that keep objects although they are no variables of the notebook: context
variables, functions of other threads, open figures, printed output and the last error.

``%gpumem top`` has a row for each of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ipygpumem.heap.holders.registries import open_figures
from ipygpumem.heap.knowledge.frames import background_frames, peek
from ipygpumem.heap.paths.task_endings import context_values
from ipygpumem.shell.ipython.printed import REMEDY, Printed


class OtherPlace(NamedTuple):
    """A place that keeps an object and is no variable of the notebook."""

    text: str
    """Code that returns the object, or words such as "open figures"."""
    item: object
    remedy: str
    """Line or advice that frees the object."""
    type_name: str = ""
    """Words instead of the object's type; empty if its type says what it is."""


def places(shell: Any, names: Mapping[str, object]) -> Iterator[OtherPlace]:
    """Yield the places that keep objects.

    Args:
        shell: IPython's shell.
        names: the notebook's names, with which the code of a place is written.
    """
    yield from _context_variables(names)
    yield from _locals_of_other_threads()
    figures = open_figures(names)
    if figures is not None:
        yield OtherPlace("open figures", figures.managers, figures.closing, "pyplot")
    printed = Printed(shell).texts()
    if printed:
        yield OtherPlace("printed output", printed, REMEDY, "kept by IPython")
    error = getattr(sys, "last_value", None)
    if error is not None:
        yield OtherPlace("last error", error, REMEDY)


def _context_variables(names: Mapping[str, object]) -> Iterator[OtherPlace]:
    """Yield the context variables for which there is code."""
    for variable in context_values(names):
        if variable.code:
            yield OtherPlace(variable.text, variable.value, variable.advice)


def _locals_of_other_threads() -> Iterator[OtherPlace]:
    """Yield the local names of functions that run in other threads."""
    for frame, thread in background_frames():
        for name, value in peek(frame).items():
            text = f'local {name} of {frame.f_code.co_name}() in thread "{thread}"'
            yield OtherPlace(text, value, "let the function return")
