"""Hides objects of pytest and of all tests from collections and searches in this process, most of
whose time they would take.
"""

import gc
from collections.abc import Callable
from types import ModuleType

import pytest

from ipygpumem.inventory.remaining import baseline
from ipygpumem.shell.searches import baselines, growth_search

SEARCHES = (baseline, baselines, growth_search)
"""The modules that ask for users' modules."""


def show_modules(
    patch: pytest.MonkeyPatch, modules: Callable[[], dict[str, ModuleType]] = dict
) -> None:
    """Let all searches see these modules of the user, or none.

    Those of tests lead to all tests: with them, each start of an experiment takes seconds.
    """
    for search in SEARCHES:
        patch.setattr(search, "users_modules", modules)


def hide_existing_objects() -> None:
    """Hide all objects that are there; ``gc.unfreeze`` shows them again."""
    gc.collect()
    gc.freeze()
