"""Estimates what code would take on a device: runs it on fake tensors, and logs their storages."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from ipygpumem.errors import EstimateError


def loaded(name: str) -> Any:
    """Load a module of this package that imports torch: ``running`` for estimates, ``modules`` for summaries.

    Raises:
        EstimateError: torch is not installed, or lacks what fake tensors need.
    """
    if importlib.util.find_spec("torch") is None:
        raise EstimateError("an estimate needs torch, which is not installed")
    try:
        return importlib.import_module(f"ipygpumem.estimating.{name}")
    except (ImportError, AttributeError) as error:
        version = importlib.import_module("torch").__version__
        raise EstimateError(f"torch {version} is too old for estimates: it lacks fake tensors ({error})") from error
