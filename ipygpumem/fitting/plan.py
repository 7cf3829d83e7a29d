"""Chooses an autofit's next values from the results of earlier tries, without running them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ipygpumem.errors import AutofitError, UnitError, quoted
from ipygpumem.units import whole

Number = int | float
Values = dict[str, Number]

_LARGEST = 2**63
_FINE = 1.01
"""Ratio of the smallest failing float to the largest fitting one at which a search ends."""

_MOST_ESTIMATES = 100


@dataclass(frozen=True)
class _Variable:
    """A number to reduce (``AutofitError`` if it is not positive, or its minimum is negative or
    above it).
    """

    name: str
    start: Number
    smallest: Number

    def __post_init__(self) -> None:
        if self.start <= 0:
            raise AutofitError(
                f"{self.name}={self.start} cannot be reduced: start from a positive number"
            )
        if not 0 <= self.smallest <= self.start:
            where = "below 0" if self.smallest < 0 else f"above its start {self.start}"
            raise AutofitError(
                f"the minimum of {self.name} is {self.smallest}, {where}: give another min"
            )

    @property
    def is_whole(self) -> bool:
        """True if it stays whole: ints, and floats such as 1e3, but not 1.0, which is probably a
        share.
        """
        return isinstance(self.start, int) or (
            self.start > 1 and self.start.is_integer() and self.smallest >= 1
        )

    def below(self, value: Number, factor: float) -> Number | None:
        """Return ``value`` times ``factor``, at least the minimum; None if it is the minimum
        already.
        """
        if value <= self.smallest:
            return None
        if self.is_whole:
            return type(self.start)(
                max(math.ceil(self.smallest), min(math.floor(value * factor), int(value) - 1))
            )
        return max(self.smallest, value * factor)

    def between(self, low: Number, high: Number) -> Number | None:
        """Return the value in the middle, or None if it is not worth trying."""
        if self.is_whole:
            middle = (int(low) + int(high)) // 2
            return type(self.start)(middle) if middle > low else None
        return (low + high) / 2 if high > low * _FINE else None


def check_number(what: str, value: object) -> None:
    """Raise ``AutofitError`` unless ``value`` is a finite number below 2**63."""
    if not (type(value) in (int, float) and abs(value) < _LARGEST):  # type: ignore[arg-type]  # NaN is not less
        raise AutofitError(f"{what} is {quoted(value)}: autofit reduces finite numbers below 2**63")


def _variables(start: Mapping[str, Any], smallest: Any) -> list[_Variable]:
    """Return the variables starting at ``start`` with their minima, by default 1, or 0 for
    fractions.
    """
    if not start:
        raise AutofitError("autofit needs a variable to reduce, such as batch_size=1024")
    minima = dict(smallest) if isinstance(smallest, Mapping) else dict.fromkeys(start, smallest)
    for name, least in minima.items():
        if name not in start:
            raise AutofitError(
                f"the minimum of {name}: there is no variable of that name to reduce"
            )
        if least is not None:
            check_number(f"the minimum of {name}", least)
    made = []
    for name, value in start.items():
        check_number(name, value)
        least = minima.get(name)
        if least is None:
            least = 1 if type(value) is int or (value > 1 and value == int(value)) else 0.0
        made.append(_Variable(name, value, least))
    return made


def _factor(step: object) -> float:
    """Return the factor for ``halve``, ``search`` (which starts by halving) or a text such as
    ``0.9``.
    """
    if step is None or (type(step) is str and step in ("halve", "search")):
        return 0.5
    try:
        factor = float(step) if type(step) in (str, float) else 0.0  # type: ignore[arg-type]  # one of the two
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1:
        raise AutofitError(
            f"step is {quoted(step)}: write halve, search, or a factor below 1 such as 0.9"
        )
    return factor


def _share(headroom: object) -> float:
    """Parse a share such as ``5%`` or ``0.05``."""
    text = headroom[:40] if type(headroom) is str else quoted(headroom)
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%?)\s*", text)
    share = float(match[1]) / (100 if match[2] else 1) if match else 1.0
    if share >= 1:
        raise AutofitError(
            f"headroom={text!r}: write a share of the device's memory, such as 5% or 0.05"
        )
    return share


class Plan:
    """Chooses the values to try: run ``values``, call ``note`` with the outcome, repeat until it
    returns False.

    Several variables are reduced in turn, and a search then increases one after the other. It ends
    with a final run of the values found, unless they were tried last. The options have the meaning
    that they have in ``autofit``.

    Raises:
        AutofitError: an option is invalid.
    """

    def __init__(
        self,
        start: Mapping[str, Any],
        *,
        smallest: Any = None,
        step: Any = None,
        headroom: Any = None,
        max_tries: Any = None,
    ) -> None:
        self._variables = _variables(start, smallest)
        self._factor = _factor(step)
        self._searches = type(step) is str and step == "search"
        try:
            self._left = 10 if max_tries is None else whole(max_tries, least=0)
        except UnitError as error:
            raise AutofitError(f"max_tries (--max-tries): {error}") from None
        self.headroom = (0.05 if self._searches else 0.0) if headroom is None else _share(headroom)
        """Share of each device's memory that must stay free at the peak."""
        self._defaults = step is None, headroom is None, max_tries is None
        self._turn = 0
        self._failures: list[Values] = []
        self.best: Values | None = None
        """The largest values found to fit so far."""
        self.exhausted = False
        """True if it ended because all tries were used."""
        self.repeats = False
        """True if ``values`` are the final run of the values found."""
        self.values: Values = dict(start)

    def expect_estimates(self) -> None:
        """Default to a complete search without headroom, since estimates are cheap."""
        no_step, no_headroom, no_limit = self._defaults
        self._searches |= no_step
        self.headroom *= not no_headroom
        self._left = _MOST_ESTIMATES if no_limit else self._left

    @property
    def failed(self) -> Number | None:
        """The smallest value that did not fit; None if all fit, or with several variables."""
        of = self._variables
        return (
            min((values[of[0].name] for values in self._failures), default=None)
            if len(of) == 1
            else None
        )

    def note(self, *, fits: bool) -> bool:
        """Record the outcome of ``values`` and choose the next ones; return True if
        there are any.
        """
        if fits:
            self.best = dict(self.values)
            following = self._above() if self._searches else None
        else:
            self._failures.append(dict(self.values))
            if self.best == self.values:
                self.best = None  # it fitted earlier, but no longer does
            following = self._below() if self.best is None else self._above()
        if following is not None and self._left <= 0:
            self.exhausted = True
            following = None
        self._left -= 1
        self.repeats = following is None and self.best is not None and self.best != self.values
        if self.repeats and self.best is not None:
            following = dict(self.best)  # leave the notebook in the state after a run with them
            self._searches = False
        self.values = following or self.values
        return following is not None

    def _below(self) -> Values | None:
        """Return the values with the next reducible variable reduced, or None."""
        for _ in self._variables:
            variable = self._variables[self._turn % len(self._variables)]
            self._turn += 1
            value = variable.below(self.values[variable.name], self._factor)
            if value is not None:
                return {**self.values, variable.name: value}
        return None

    def _above(self) -> Values | None:
        """Return the best values with the first variable that can grow increased, or None."""
        if self.best is None or not self._failures:
            return None
        for variable in self._variables:
            value = variable.between(self.best[variable.name], self._ceiling(variable, self.best))
            if value is not None:
                return {**self.best, variable.name: value}
        return None

    def _ceiling(self, variable: _Variable, fits: Values) -> Number:
        """Return the smallest failed value among tries whose other variables were at most ``fits``,
        or the start.
        """
        names = [other.name for other in self._variables if other is not variable]
        failed = [
            values for values in self._failures if all(values[name] <= fits[name] for name in names)
        ]
        beyond = variable.start + 1 if variable.is_whole else variable.start
        return min((values[variable.name] for values in failed), default=beyond)
