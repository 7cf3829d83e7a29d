"""What most tests do with a kernel."""

from __future__ import annotations

import inspect
import re
from typing import Any

from tests.kernel import Kernel, Reply
from tests.waiting import announce

ANNOUNCE = "import time\n" + inspect.getsource(announce)
"""A cell that defines it: kernels of other versions do not see this folder."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def run(kernel: Kernel, cell: str, **options: Any) -> Reply:
    """Run a cell; after an error, wait until the kernel takes cells again.

    ipykernel refuses what reaches it right after an error, as if it had been queued before: that is how an error
    stops "Run all", and a test is quick enough to meet it.
    """
    reply = kernel.run(cell, **options)
    while reply.status == "error" and kernel.run("", silent=True).status == "aborted":
        pass
    return reply


def ok(kernel: Kernel, *cells: str) -> Reply:
    """Run cells that must succeed without a warning of the extension; return what the last one gave."""
    for cell in cells:
        reply = run(kernel, cell)
        assert reply.status == "ok", f"{cell}\n{plain(reply.traceback) or reply.stderr}"
        assert "ipygpumem:" not in reply.stderr, f"{cell}\n{reply.stderr}"
    return reply


def fails(kernel: Kernel, cell: str, error: str | None) -> Reply:
    """Run a cell that must end with ``error`` (None: IPython's one-line UsageError); return what it gave."""
    reply = run(kernel, cell)
    assert reply.status == "error", cell
    assert reply.error == error, f"{cell}\n{plain(reply.traceback) or reply.stderr}"
    assert "ipygpumem:" not in reply.stderr, reply.stderr
    return reply


def exist(kernel: Kernel, *names: str) -> list[str]:
    """Return those of ``names`` that the notebook has."""
    found = kernel.value(f"[name for name in {list(names)} if name in globals()]")
    assert isinstance(found, list)
    return found


def open_experiments(kernel: Kernel) -> list[str]:
    """Return the names of the experiments that ``%experiment status`` shows."""
    (text,) = ok(kernel, "%experiment status").reports("note")
    return re.findall(r"^experiment (.*?) ·", text, re.MULTILINE)


def plain(text: str) -> str:
    """Return ``text`` without the colours of a terminal."""
    return _COLOURS.sub("", text)


def sizes(line: str, label: str) -> float:
    """Return the MiB that a report gives after ``label``."""
    match = re.search(rf"{re.escape(label)} ([+-]?[\d.]+)(?: (B|KiB|MiB|GiB))?", line.replace("\N{MINUS SIGN}", "-"))
    assert match, (label, line)
    return float(match[1]) * {None: 2**-20, "B": 2**-20, "KiB": 2**-10, "MiB": 1, "GiB": 2**10}[match[2]]
