"""The names of ``--keep`` that come back from the child process of an isolated cell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import BinaryIO, NamedTuple

from ipygpumem.extras.isolate.packets import load


def memory_file() -> BinaryIO:
    """Return a file without a name, in memory, which a forked child process can write."""
    return os.fdopen(os.memfd_create("isolate"), "w+b")


class FailedLoad(NamedTuple):
    """A name that could not be loaded."""

    name: str
    error: BaseException


class KeptNames:
    """The kept names: the child process writes their values to ``file``, and the kernel's process
    loads them.
    """

    def __init__(self) -> None:
        self.file = memory_file()
        self.values: dict[str, object] = {}
        """The names that were loaded, with their values."""
        self.waiting: list[str] = []
        """Names to load once the child process has ended, because memory does not suffice while it
        lives; the one that took too much comes last."""
        self.is_loading = False
        """True while values are loaded: a Ctrl-C may end that."""

    def load(self, names: Sequence[str]) -> FailedLoad | None:
        """Load the values of ``names`` from the file, in place of those that were loaded before.

        Return the first name that cannot be loaded, with its error; None if all were loaded. The
        names before it are in ``values``.
        """
        self.values = {}
        try:
            self.is_loading = True
            try:
                load(self.file, self.values, len(names))
            finally:
                self.is_loading = False
        except BaseException as error:  # any of the user's classes may fail
            return FailedLoad(names[len(self.values)], error)
        return None

    def postpone(self, names: Sequence[str], failing: str) -> None:
        """Load ``names`` once the child process has ended, ``failing`` last."""
        self.waiting = [*(name for name in names if name != failing), failing]
