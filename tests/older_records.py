"""A cell that makes older records, and the rows of the last experiment."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.harness.kernel import Kernel
from tests.steps import run_cells

OLDER_RECORDS = """
import numpy as np
def rows():
    from ipygpumem.shell.app import app_of
    survivors = app_of(get_ipython()).experiments.finished[-1].survivors
    return [(row.objects, row.holder.path, row.holder.advice) for row in survivors]
class Document:
    pass
class Slotted:
    __slots__ = ("number", "words")
def dicts(number):
    return [{"number": each, "text": f"text {each}"} for each in range(number)]
def instances(kind, number):
    made = [kind() for _ in range(number)]
    for position, each in enumerate(made):
        each.number = position
    return made
def texts(number):
    return f"{number} " * 1000
def words(number):
    return [str(each) for each in range(1000, 1000 + number)]
def stays(record):
    return record["text"] if type(record) is dict else record.number
def has_new(record):
    if type(record) is dict:
        return not record.keys() <= {"number", "text", "tags"}
    return getattr(record, "words", None) is not None
"""
"""Makes older records."""


class RecordRow(NamedTuple):
    """A row of an experiment's report."""

    objects: int
    """Number of new objects."""
    path: str
    """The holder, as the report writes it."""
    line: str
    """The line that frees the row; words if none can."""


def record_rows(kernel: Kernel) -> list[RecordRow]:
    """Return the rows of the last experiment, after OLDER_RECORDS has run."""
    return [RecordRow(*fields) for fields in kernel.value("rows()")]


def assert_no_leaks(kernel: Kernel) -> None:
    """Assert that ``%gpumem leaks`` finds no leak."""
    (leaks,) = run_cells(kernel, "%gpumem leaks").leaks()
    assert leaks.startswith("no leak"), leaks
