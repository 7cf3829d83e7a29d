"""Which modules of the user the searches of this process see.

The modules of tests are users' modules, and lead to all tests: with them, each start of an
experiment takes seconds in a process that has collected the whole suite.
"""

from collections.abc import Callable
from types import ModuleType

import pytest

from ipygpumem.inventory import baseline
from ipygpumem.shell import baselines, growth_search

SEARCHES = (baseline, baselines, growth_search)
"""The modules that ask for users' modules."""


def show_modules(
    patch: pytest.MonkeyPatch, modules: Callable[[], dict[str, ModuleType]] = dict
) -> None:
    """Let all searches see these modules of the user, or none."""
    for search in SEARCHES:
        patch.setattr(search, "users_modules", modules)
