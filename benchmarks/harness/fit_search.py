"""The search of ``%%estimate --fit`` for a cell, without a notebook."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

from ipygpumem.extras.fit.fit_command import Search

FILE = "<ipython-input-1-0>"
"""The name of a cell's code."""


def search(cell: str, fit: str, *, run: bool = True, **options: Any) -> Search:
    """Return the search for a cell, after it has run or after its first estimate."""
    given = {
        "device": "cuda",
        "device_memory": None,
        "timeout": 3600,  # a search must not end earlier on a busy machine
        "batch": None,
        "assume": [],
        "fit": fit,
        **options,
    }
    app: Any = SimpleNamespace(context=SimpleNamespace(namespace=given.pop("names", {})))
    found = Search(app, Namespace(**given), compile(cell, FILE, "exec"))
    base = found.trial_with(found.unchanged)
    if run:
        found.run(base, lambda _: None)
    return found
