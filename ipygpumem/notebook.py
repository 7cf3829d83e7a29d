"""IPython's shell of this process, the numbers of its cells, and the code of their outputs."""

from __future__ import annotations

import linecache
import re
import sys
from typing import Any

_NUMBERED = re.compile(r"<ipython-input-(\d+)-")
OUTPUT_PREFIX = "Out["
"""The first characters of an output's code, and of all paths that begin at an output."""
OUTPUT = re.compile(r"Out\[(?P<number>\d+)\]")
"""Matches the code of an output."""


def current_shell() -> Any:
    """Return IPython's shell; None in a script."""
    module = sys.modules.get("IPython.core.getipython")
    return None if module is None else module.get_ipython()


def cell_of_file(shell: Any, filename: str) -> int | None:
    """Return the number of the cell whose code has the file name ``filename``, as in its frames;
    None for the file of a module.
    """
    numbers_by_file = getattr(shell.compile, "_filename_map", None)  # private; from IPython 8 on
    if type(numbers_by_file) is dict and filename in numbers_by_file:
        return int(numbers_by_file[filename])
    numbered = _NUMBERED.match(filename)
    if numbered:
        return int(numbered[1])
    if "ipykernel_" not in filename:
        return None
    # IPython 7 in a kernel: the file is named by a hash, and its text is the cell's.
    text = "".join(linecache.getlines(filename)).strip()
    if text:
        for number, source in sources_of_cells(shell):
            if source.strip() == text:
                return number
    return None


def running_cell(shell: Any) -> int:
    """Return the number of the running cell. IPython's ``execution_count`` may be that of the next
    one already, but the list of inputs ends with the running cell's.
    """
    return len(shell.history_manager.input_hist_parsed) - 1


def sources_of_cells(shell: Any) -> list[tuple[int, str]]:
    """Return the numbers and Python sources of the cells run so far, last one first."""
    sources = shell.history_manager.input_hist_parsed
    return [(number, sources[number]) for number in range(len(sources) - 1, 0, -1)]


# -- outputs --------------------------------------------------------------------------------------


def code_of_output(number: int) -> str:
    """Return the code of a cell's output.

    >>> code_of_output(5)
    'Out[5]'
    """
    return f"{OUTPUT_PREFIX}{number}]"


def cell_of_output(code: str) -> int | None:
    """Return the number of the cell whose output has this code; None for any other code.

    >>> cell_of_output("Out[5]"), cell_of_output("outer")
    (5, None)
    """
    match = OUTPUT.fullmatch(code)
    if match is None:
        return None
    return int(match["number"])


def deletion_of_output(number: object) -> str:
    """Return the line that deletes a cell's output; ``del`` would leave IPython's copies of it.

    >>> deletion_of_output(5)
    '%xdel _5'
    """
    return f"%xdel _{number}"
