"""The options of an experiment, such as ``--keep``, validated before it starts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ipygpumem.errors import ExperimentError, quoted
from ipygpumem.fitting import budgets
from ipygpumem.introspect import is_instance, text_of, type_name
from ipygpumem.scope.seeding import Seeder, is_seed

Parameters = dict[str, int | float | str]

PARAMETER = re.compile(r"[^\W\d][\w.-]{0,79}")
_REPORTS = ("full", "compact", "none")


@dataclass(frozen=True, eq=False, repr=False)
class ExperimentOptions:
    """The options of one experiment; ``ipygpumem.experiment`` documents them."""

    name: str
    keep: list[str] = field(default_factory=list)
    """Names and globs to keep at the end; the user may add more while the experiment is open."""
    drop_imports: bool = False
    seeder: Seeder | None = None
    parameters: Parameters = field(default_factory=dict)
    budget: budgets.Budget | None = None

    @classmethod
    def checked(
        cls,
        name: str,
        keep: str | Iterable[str],
        drop_imports: bool,
        seed: int | None,
        report: str | None,
        note: Mapping[str, int | float | str] | None,
        budget: Mapping[str, int | str] | None,
    ) -> ExperimentOptions:
        """Return the options that a user has passed.

        Raises:
            ExperimentError: an option is invalid.
            BudgetError: the budget names no device or no size.
        """
        is_one_line = isinstance(name, str) and len(name.splitlines()) == 1 and name.strip()
        if not is_one_line:
            raise ExperimentError("an experiment needs a name: one line of text")
        if isinstance(keep, Iterable) and not isinstance(keep, str):
            patterns = checked_patterns(keep)
        else:
            patterns = checked_patterns([keep])
        if seed is not None and not is_seed(seed):
            raise ExperimentError("seed must be a whole number that fits into 64 bits")
        is_style = type(report) is str and report in _REPORTS
        if report is not None and not is_style:
            raise ExperimentError(f"report={quoted(report)}: write 'full', 'compact' or 'none'")
        parameters = checked_parameters(note or {})
        limits = None
        if budget:
            limits = budgets.Budget(budgets.checked_budget(budget), f"experiment {name}")
        seeder = None if seed is None else Seeder(seed)
        return cls(name, patterns, drop_imports, seeder, parameters, limits)


def checked_patterns(patterns: Iterable[object]) -> list[str]:
    """Return names and globs to keep; raise an ExperimentError if one is no text."""
    texts = list[str]()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ExperimentError(
                "keep must be a name, a glob, or a list of them: keep='x' or keep=['x', 'y*']"
            )
        texts.append(pattern)
    return texts


def checked_parameters(given: object) -> Parameters:
    """Return the parameters of ``note=`` as plain values that any file format can store."""
    if not is_instance(given, Mapping) and not is_instance(given, dict):
        raise ExperimentError(
            "note must be a dictionary of parameters: note={'lr': 1e-3, 'bs': 64}"
        )
    parameters: Parameters = {}
    for name, value in given.items():  # type: ignore[attr-defined]  # is_instance says so
        if not PARAMETER.fullmatch(text_of(name)):
            kind = type_name(name)
            raise ExperimentError(
                f"note: a parameter's name must be one word of text, not a {kind}"
            )
        parameters[name] = _plain(name, value)
    return parameters


def _plain(name: str, value: object) -> int | float | str:
    """Return a parameter as plain data; raise an ExperimentError for all but numbers and text."""
    if type(value) is bool:
        return str(value)
    if is_instance(value, int):
        number = int.__int__(value)  # type: ignore[arg-type]  # converts NumPy integers and enums
        if number.bit_length() > 63:
            raise ExperimentError(f"note: {name} is {quoted(number)}; write it as text")
        return number
    if is_instance(value, float):
        return plain_number(float.__float__(value))  # type: ignore[arg-type]
    if is_instance(value, str):
        return str.__str__(value)
    kind = type_name(value)
    raise ExperimentError(
        f"note: {name} is a {kind}; a parameter is a number or text, so write str(...)"
    )


def plain_number(value: float) -> float | str:
    """Return a value that JSON can store: infinity and NaN become text."""
    if math.isfinite(value):
        return value
    return str(value)
