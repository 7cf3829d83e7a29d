"""What the user wants of an experiment, checked before it starts: later would be too late."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass

from ipygpumem.errors import ExperimentError, quoted
from ipygpumem.fitting import budgets
from ipygpumem.introspect import type_name
from ipygpumem.notebook.experiments.parameters import checked_parameters
from ipygpumem.scopes.seeding import is_seed


@dataclass(eq=False)
class ExperimentOptions:
    """The arguments of ``ipygpumem.experiment``, which has their meaning.

    Raises:
        ExperimentError: one of them cannot be.
        BudgetError: ``budget`` names no device or no size.
    """

    name: str
    keep: InitVar[str | Iterable[str]] = ()
    drop_imports: bool = False
    seed: int | None = None
    report: str | None = None
    note: InitVar[Mapping[str, int | float | str] | None] = None
    budget: InitVar[Mapping[str, int | str] | None] = None
    record: str | os.PathLike[str] | None = None

    def __post_init__(
        self,
        keep: str | Iterable[str],
        note: Mapping[str, int | float | str] | None,
        budget: Mapping[str, int | str] | None,
    ) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or len(self.name.splitlines()) > 1:
            raise ExperimentError("an experiment needs a name: one line of text")
        self.patterns: list[str] = []
        """What to keep; more may come while it is open."""
        self.keep_more([keep] if isinstance(keep, str) else keep)
        if self.seed is not None and not is_seed(self.seed):
            raise ExperimentError("seed must be a whole number that fits into 64 bits")
        is_text = type(self.report) is str
        if self.report is not None and not (is_text and self.report in ("full", "compact", "none")):
            given = quoted(self.report) if is_text else type_name(self.report)
            raise ExperimentError(f"report={given}: write 'full', 'compact' or 'none'")
        self.sizes = budgets.checked(budget) if budget else None
        self.parameters = checked_parameters(note or {})

    def keep_more(self, patterns: Iterable[str]) -> None:
        """Keep these names or globs too."""
        patterns = list(patterns)
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise ExperimentError("keep must be a name, a glob, or a list of them: keep='x' or keep=['x', 'y*']")
        self.patterns += patterns
