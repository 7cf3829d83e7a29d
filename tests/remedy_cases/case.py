"""A place in which code leaves data, for tests of the lines that free it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A place in which an experiment leaves ``x``."""

    code: str
    """Code of the experiment, after ``x`` was made."""
    setup: str = ""
    """A cell before the experiment."""
    after: str = ""
    """Code that still works after the place was emptied."""
    kinds: tuple[str, ...] = ("array", "object")
    sees_libraries: bool = False
    """True if objects of libraries that the case imports lead to the place: all are hidden
    otherwise.
    """
    sees_all: bool = False
    """True if any object of a library may lead to it."""
    sentences: tuple[str, ...] = ()
    """The beginnings of the advice if no line can free it."""
    is_out_of_reach: bool = False
    """True if an experiment does not find an object there, because no name leads to it; ``leaks``
    does.
    """
