"""Knows the code whose lines are followed: a cell, and functions with all that is defined inside them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from ipygpumem.profiling.account import LineCost


@dataclass(frozen=True)
class CodeBlock:
    """Lines of source that are shown together."""

    title: str
    first_line: int
    source: tuple[str, ...]


@dataclass(frozen=True)
class LinesRecord:
    """What the lines of some code cost."""

    blocks: tuple[CodeBlock, ...]
    costs: Mapping[tuple[int, int], LineCost]
    """By the number of the block and the line."""
    seconds: float
    own_seconds: float
    """Time of that which went into measuring."""
    notes: tuple[str, ...] = ()
    untrimmed: int = 0
    """How often free heap pages were not given back before a look."""


@dataclass
class Blocks:
    """Which code belongs to which block; the first one is the cell's, known by the file that it was compiled under."""

    cell_file: str
    blocks: list[CodeBlock]
    _known: dict[int, int] = field(default_factory=dict)
    codes: list[CodeType] = field(default_factory=list)
    """The code of the functions; kept, so that no other can come to have its identity."""

    def add(self, title: str, code: CodeType) -> None:
        """Follow ``code`` and all that is defined inside it, unless it is followed already."""
        if id(code) in self._known:
            return
        for inner in _with_inner(code):
            self._known[id(inner)] = len(self.blocks)
            self.codes.append(inner)
        try:
            lines, first = inspect.getsourcelines(code)
        except (OSError, TypeError):  # made by exec, or its file is gone
            lines, first = [], code.co_firstlineno
        self.blocks.append(CodeBlock(title, first, tuple(line.rstrip() for line in lines)))

    def of(self, code: CodeType) -> int | None:
        """Return the number of the block of some code, or None."""
        number = self._known.get(id(code))
        return 0 if number is None and code.co_filename == self.cell_file else number


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from _with_inner(constant)


def code_of(value: Any) -> CodeType | None:
    """Return the code of a function or method, behind what wraps it; None for what is none written in Python."""
    seen: set[int] = set()
    while id(value) not in seen:
        seen.add(id(value))
        code = getattr(value, "__code__", None)
        inner = getattr(value, "__wrapped__", None) or getattr(value, "__func__", None)
        if inner is None and isinstance(value, property):
            inner = value.fget
        if inner is None and isinstance(value, functools.partial | functools.partialmethod):
            inner = value.func
        if inner is None:
            return code if type(code) is CodeType else None
        value = inner
    return None
