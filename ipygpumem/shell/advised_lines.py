"""Recognises cells that contain a line which a report has advised, such as ``del model``.

Such a line keeps its promise only after a collection if its objects refer to each other, as a
tree's nodes, a class and its methods, or a figure and its axes do. Python's collector may run hours
later, and a cell whose user was told what it frees is worth the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ipygpumem.report.layout import Report

_MOST_STATEMENTS = 500
_LONGEST_CELL = 20_000
"""Characters; longer cells are generated code, into which no line was pasted."""
_OUR_COMMAND = "%gpumem"
"""Begins commands that collect by themselves."""


class AdvisedLines:
    """The statements in the lines that the last reports have advised.

    Attributes:
        texts: the statements, the latest last; a dict that is used as an ordered set.
    """

    def __init__(self) -> None:
        self.texts: dict[str, None] = {}

    def note(self, reports: Iterable[Report]) -> None:
        """Remember the lines of reports that are shown."""
        for report in reports:
            for line in report.advised_lines:
                for statement in _statements(line):
                    self.texts.pop(statement, None)  # so that it becomes the last one
                    self.texts[statement] = None
        while len(self.texts) > _MOST_STATEMENTS:
            del self.texts[next(iter(self.texts))]

    def are_in(self, source: str) -> bool:
        """Return True if a cell has at least one of the statements on a line of its own."""
        if not self.texts or len(source) > _LONGEST_CELL:
            return False
        for line in source.splitlines():
            for statement in _statements(line):
                if statement in self.texts:
                    return True
        return False


def _statements(line: str) -> Iterator[str]:
    """Yield the statements of a line without its comment.

    A text with ``;`` or ``#`` is cut, too, in the report's line as in the cell's.
    """
    for part in line.partition(" #")[0].split(";"):
        statement = part.strip()
        if statement and not statement.startswith(("#", _OUR_COMMAND)):
            yield statement
