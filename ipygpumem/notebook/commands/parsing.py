"""Lines of magics: their words and options, with errors of one line."""

from __future__ import annotations

import argparse
import shlex
from typing import NoReturn

from IPython.core.error import UsageError

from ipygpumem.errors import UnitError
from ipygpumem.reports.content import clean
from ipygpumem.units import parse_bytes


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are IPython's: one line."""

    def error(self, message: str) -> NoReturn:
        """Raise IPython's error instead of leaving the process."""
        raise UsageError(clean(f"{self.prog}: {message}"))


def size(text: str) -> int:
    """Return the bytes of an option such as ``64MiB``."""
    try:
        return parse_bytes(text)
    except UnitError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def split(prog: str, line: str) -> list[str]:
    """Return the words of a magic's line, quotes taken off."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{prog}: {error}") from None
