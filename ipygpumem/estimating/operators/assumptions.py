"""The shares of values that the user assumes lines to select, where sizes depend on values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ipygpumem.errors import EstimateError, quoted

_ASSUMPTION = re.compile(r"(?:(?P<file>[^=]+):)?(?P<line>[1-9]\d{0,8})=(?P<share>.+)")


class Assumptions:
    """The share of all values that lines select, such as ``x[x > 0]``.

    Args:
        shares: the shares by the label of a line, such as ``line 5``, ``cell 3, line 5`` or
            ``model.py, line 5``.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._shares = shares
        self.used: dict[str, float] = {}
        """The lines that got a share, with their code, in order."""

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Assumptions:
        """Return the assumptions of ``5=0.25``, ``3:5=0.25`` for a line of cell 3, or
        ``model.py:5=25%``.

        Raises:
            EstimateError: a text is not of this form.
        """
        shares: dict[str, float] = {}
        for text in texts:
            match = _ASSUMPTION.fullmatch(text)
            share = None if match is None else _parsed_share(match["share"])
            if match is None or share is None:
                raise EstimateError(
                    f"the assumption {quoted(text)} is not LINE=FRACTION, such as 5=0.25"
                )
            label = f"line {match['line']}"
            file = match["file"]
            if file:
                label = f"cell {file}, {label}" if file.isdecimal() else f"{file}, {label}"
            shares[label] = share
        return cls(shares)

    def share_of(self, line: str) -> float | None:
        """Return the share that a line selects, or None; ``line`` is its label with its code."""
        return self._shares.get(_label_of(line))

    def notes(self, upper_bounds: Iterable[str]) -> list[str]:
        """Return a note on each line that got its share, and on each share that was not used.

        ``upper_bounds``: the lines whose results are as large as possible.
        """
        notes = list[str]()
        for line, share in self.used.items():
            notes.append(f"assumed to select {share:.3g} of all that it can: {line}")
        used_labels = set(map(_label_of, self.used))
        upper_bound_labels = set(map(_label_of, upper_bounds))
        for label in self._shares:
            if label in used_labels:
                continue
            why = "it selects nothing by values, or did not run"
            if label in upper_bound_labels:
                why = "values decide its size, but no share of them is selected"
            notes.append(f"the share of {label} is not used: {why}")
        return notes


def _label_of(line: str) -> str:
    """Return the label of a line with its code: ``line 5`` of ``line 5: y = x[x > 0]``."""
    return line.partition(": ")[0]


def _parsed_share(text: str) -> float | None:
    """Return the number from 0 to 1 in ``0.25`` or ``25%``; None for other texts."""
    number = text.removesuffix("%")
    if not re.fullmatch(r"\d*\.?\d+|\d+\.", number):
        return None
    share = float(number)
    if number != text:
        share /= 100
    return share if share <= 1 else None
