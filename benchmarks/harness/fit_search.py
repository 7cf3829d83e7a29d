"""The search of ``%%estimate --fit`` for a cell, without a notebook."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

from ipygpumem.extras.fit.fit_command import ChangeSearch

FILE = "<ipython-input-1-0>"
"""The name of a cell's code."""


def search(cell: str, fit: str, *, run: bool = True, **options: Any) -> ChangeSearch:
    """Return the search for a cell: after it has run, or before that.

    Args:
        cell: the code.
        fit: the memory that the cell should fit in, such as ``8GiB``.
        run: False to leave the search for the caller to run.
        options: further options of ``%%estimate``, and the notebook's ``names``.
    """
    option_values = {
        "device": "cuda",
        "device_memory": None,
        "timeout": 3600,  # a search must not end earlier on a busy machine
        "batch": None,
        "assume": [],
        "fit": fit,
        **options,
    }
    app: Any = SimpleNamespace(context=SimpleNamespace(namespace=option_values.pop("names", {})))
    fit_search = ChangeSearch(app, Namespace(**option_values), compile(cell, FILE, "exec"))
    base = fit_search.trial_with(fit_search.unchanged)
    if run:
        fit_search.run(base, lambda _: None)
    return fit_search
