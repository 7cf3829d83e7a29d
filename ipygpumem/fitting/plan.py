"""Chooses an autofit's next values from the results of earlier tries, without running them."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from ipygpumem.errors import AutofitError, UnitError, quoted
from ipygpumem.units import checked_integer

Number = int | float
Values = dict[str, Number]

_LARGEST_NUMBER = 2**63
_PRECISION_OF_FLOATS = 1.01
"""Ratio of the smallest failing float to the largest fitting one at which a search ends."""

_BATCH_STEP = 8
"""A batch is a multiple of this: products of matrices on a card are slower for other sizes."""
_STEPS_IN_BATCH = 64
"""A search for a batch ends once it is known to this fraction of it: 1024 to 16 rows."""
_NAMES_OF_BATCHES = re.compile(r"(?i)batch|(^|_)bs$")

_DEFAULT_TRIES = 10
_TRIES_OF_ESTIMATES = 100
"""Default number of tries if each is an estimate."""
_HEADROOM_OF_SEARCH = 0.05
"""Default share of the memory that must stay free, since a search ends close to the limit."""


@dataclass(frozen=True)
class _Variable:
    """A number to reduce, from ``start`` down to ``smallest``.

    Raises:
        AutofitError: it is not positive, or its minimum is negative or above it.
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
        if isinstance(self.start, int):
            return True
        return self.start > 1 and self.start.is_integer() and self.smallest >= 1

    @property
    def is_batch(self) -> bool:
        """True if its name says that it is the number of rows in a batch, such as ``train_bs``."""
        return self.is_whole and _NAMES_OF_BATCHES.search(self.name) is not None

    def value_below(self, value: Number, factor: float) -> Number | None:
        """Return ``value`` times ``factor``, at least the minimum; None if it is the minimum
        already.

        A whole number becomes smaller by at least 1, and a batch a multiple of 8 if it is larger.
        """
        if value <= self.smallest:
            return None
        if not self.is_whole:
            return max(self.smallest, value * factor)
        reduced = min(math.floor(value * factor), int(value) - 1)
        if self.is_batch and reduced > _BATCH_STEP:
            reduced -= reduced % _BATCH_STEP
        return type(self.start)(max(math.ceil(self.smallest), reduced))

    def value_between(self, low: Number, high: Number) -> Number | None:
        """Return the value in the middle of a fitting and a failing one, or None if these are so
        close that it is not worth trying.
        """
        if not self.is_whole:
            if high > low * _PRECISION_OF_FLOATS:
                return (low + high) / 2
            return None
        if self.is_batch and low >= _BATCH_STEP:
            return self._batch_between(int(low), int(high))
        middle = (int(low) + int(high)) // 2
        if self.is_batch and middle > _BATCH_STEP:
            middle -= middle % _BATCH_STEP
        if middle > low:
            return type(self.start)(middle)
        return None

    def _batch_between(self, low: int, high: int) -> Number | None:
        """Return a multiple of 8 in the middle of two batches, or None if none is worth trying."""
        precision = max(_BATCH_STEP, low // _STEPS_IN_BATCH // _BATCH_STEP * _BATCH_STEP)
        smallest = (low // _BATCH_STEP + 1) * _BATCH_STEP
        if smallest >= high or high - low <= precision:
            return None
        middle = (low + high) // 2 // _BATCH_STEP * _BATCH_STEP
        return type(self.start)(max(smallest, middle))


def check_number(what: str, value: object) -> None:
    """Raise ``AutofitError`` unless ``value`` is a finite number below 2**63.

    ``what`` is the beginning of its message, such as the name of the variable.
    """
    is_number = type(value) in (int, float)
    if not is_number or not abs(value) < _LARGEST_NUMBER:  # type: ignore[arg-type]  # NaN is not less
        raise AutofitError(f"{what} is {quoted(value)}: autofit reduces finite numbers below 2**63")


def _variables(start: Mapping[str, Any], smallest: Any) -> list[_Variable]:
    """Return the variables of an autofit.

    Args:
        start: their first values by name.
        smallest: the minimum of all of them, or a mapping of minima by name; None: 1 for whole
            numbers, and 0 for shares.
    """
    if not start:
        raise AutofitError("autofit needs a variable to reduce, such as batch_size=1024")
    minima = dict.fromkeys(start, smallest)
    if isinstance(smallest, Mapping):
        minima = dict(smallest)
    for name, minimum in minima.items():
        if name not in start:
            raise AutofitError(
                f"the minimum of {name}: there is no variable of that name to reduce"
            )
        if minimum is not None:
            check_number(f"the minimum of {name}", minimum)
    variables = list[_Variable]()
    for name, value in start.items():
        check_number(name, value)
        minimum = minima.get(name)
        if minimum is None:
            minimum = _default_minimum(value)
        variables.append(_Variable(name, value, minimum))
    return variables


def _default_minimum(start: Number) -> Number:
    """Return 1 for a whole number such as 64 or 1e3, and 0 for a share such as 0.5."""
    if type(start) is int or (start > 1 and start == int(start)):
        return 1
    return 0.0


def _reduction_factor(step: object) -> float:
    """Return the factor by which a step reduces a value.

    ``step`` is ``halve``, ``search`` (which starts by halving) or a factor such as ``0.9``.
    """
    if step is None or (type(step) is str and step in ("halve", "search")):
        return 0.5
    factor = 0.0
    if type(step) is str or isinstance(step, Real):
        with contextlib.suppress(ValueError):
            factor = float(step)
    if not 0 < factor < 1:
        raise AutofitError(
            f"step is {quoted(step)}: write halve, search, or a factor below 1 such as 0.9"
        )
    return factor


_INVALID_SHARE = 1.0
"""No share that must stay free: nothing could be used."""


def _parsed_share(headroom: object) -> float:
    """Return the share that ``5%``, ``0.05`` or a number stands for."""
    text = headroom[:40] if type(headroom) is str else quoted(headroom)
    share = _INVALID_SHARE
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%?)\s*", text)
    if isinstance(headroom, Real) and not isinstance(headroom, bool):
        share = float(headroom)
    elif match is not None:
        share = float(match[1])
        if match[2]:
            share /= 100
    if not 0 <= share < 1:
        raise AutofitError(
            f"headroom={text!r}: write a share of the device's memory, such as 5% or 0.05"
        )
    return share


def _number_of_tries(max_tries: object) -> int:
    """Return the maximum number of tries after the first: the user's, or else the default. With
    0, no other value is tried.
    """
    if max_tries is None:
        return _DEFAULT_TRIES
    try:
        return checked_integer(max_tries, minimum=0)
    except UnitError as error:
        raise AutofitError(f"max_tries (--max-tries): {error}") from None


@dataclass(frozen=True)
class _GivenOptions:
    """Says which options the user has given: the defaults for estimates do not replace these."""

    step: bool
    headroom: bool
    max_tries: bool


class Plan:
    """Chooses the values to try: run ``values``, call ``record_outcome``, repeat until it
    returns False.

    Several variables are reduced in turn, and a search then increases one after the other, between
    the largest fitting and the smallest failing value. It ends with a final run of the values
    found, unless they were tried last. The options have the meaning that they have in ``autofit``.

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
        self._reduction_factor = _reduction_factor(step)
        self._searches = type(step) is str and step == "search"
        self._tries_left = _number_of_tries(max_tries)
        self.headroom = _HEADROOM_OF_SEARCH if self._searches else 0.0
        """Share of each device's memory that must stay free at the peak."""
        if headroom is not None:
            self.headroom = _parsed_share(headroom)
        self._given_options = _GivenOptions(
            step=step is not None,
            headroom=headroom is not None,
            max_tries=max_tries is not None,
        )
        self._turns = 0
        """How often a variable had its turn to be reduced."""
        self._failures: list[Values] = []
        """The values that did not fit."""
        self.best: Values | None = None
        """The largest values found to fit so far."""
        self.exhausted = False
        """True if it ended because all tries were used."""
        self.is_final_run = False
        """True if ``values`` have fitted before, and are to be run once more at the end."""
        self.values: Values = dict(start)
        """The values to try next."""

    def expect_estimates(self) -> None:
        """Default to a complete search without headroom, since each try is an estimate.

        Options that the user has given stay.
        """
        if not self._given_options.step:
            self._searches = True
        if not self._given_options.headroom:
            self.headroom = 0.0
        if not self._given_options.max_tries:
            self._tries_left = _TRIES_OF_ESTIMATES

    @property
    def smallest_failing(self) -> Number | None:
        """The smallest value that did not fit; None if all fit, or with several variables."""
        if len(self._variables) != 1:
            return None
        (variable,) = self._variables
        return min((values[variable.name] for values in self._failures), default=None)

    def record_outcome(self, *, fits: bool) -> bool:
        """Record the outcome of ``values`` and choose the next ones; return True if
        there are any.
        """
        self._note_outcome(fits=fits)
        following = self._choose_next(fits=fits)
        if following is not None and self._tries_left <= 0:
            self.exhausted = True
            following = None
        self._tries_left -= 1
        self.is_final_run = False
        if following is None and self.best is not None and self.best != self.values:
            # The notebook should end in the state after a run with the best values.
            self.is_final_run = True
            following = dict(self.best)
            self._searches = False
        if following is None:
            return False
        self.values = following
        return True

    def _note_outcome(self, *, fits: bool) -> None:
        """Add ``values`` to the failures, or note them as the best."""
        if fits:
            self.best = dict(self.values)
            return
        self._failures.append(dict(self.values))
        if self.best == self.values:
            self.best = None  # they fitted earlier, but do not fit in the final run

    def _choose_next(self, *, fits: bool) -> Values | None:
        """Return the values to try next if tries are left; None if the search is over.

        ``fits``: the last values fitted.
        """
        if fits and not self._searches:
            return None
        if self.best is None:
            return self._take_turn_to_reduce()
        return self._larger_values()

    def _take_turn_to_reduce(self) -> Values | None:
        """Return the values with the next variable reduced; None if all are at their minimum. The
        variable after it has the next turn.
        """
        for _ in self._variables:
            variable = self._variables[self._turns % len(self._variables)]
            self._turns += 1
            value = variable.value_below(self.values[variable.name], self._reduction_factor)
            if value is not None:
                return {**self.values, variable.name: value}
        return None

    def _larger_values(self) -> Values | None:
        """Return the best values with one variable increased, or None if none is worth trying."""
        if self.best is None or not self._failures:
            return None
        for variable in self._variables:
            failing = self._smallest_failing(variable, self.best)
            value = variable.value_between(self.best[variable.name], failing)
            if value is not None:
                return {**self.best, variable.name: value}
        return None

    def _smallest_failing(self, variable: _Variable, fitting: Values) -> Number:
        """Return the smallest value of a variable that is known to fail next to fitting values.

        A failed try with larger values of the other variables does not count: these may be why it
        failed. If no try counts, that is a value just above the start.
        """
        above_start = variable.start + 1 if variable.is_whole else variable.start
        other_names = [other.name for other in self._variables if other is not variable]
        failing = list[Number]()
        for values in self._failures:
            if all(values[name] <= fitting[name] for name in other_names):
                failing.append(values[variable.name])
        return min(failing, default=above_start)
