"""What code would take on a device, found without running it there: fake tensors, and a log of their storages."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from ipygpumem.errors import EstimateError


def estimator() -> Any:
    """Return the module that makes estimates; it imports torch.

    Raises:
        EstimateError: torch is not installed, or lacks what fake tensors need.
    """
    return _loaded("running")


def summarizer() -> Any:
    """Return the module that summarizes models; it imports torch.

    Raises:
        EstimateError: torch is not installed, or lacks what fake tensors need.
    """
    return _loaded("modules")


def _loaded(name: str) -> Any:
    if importlib.util.find_spec("torch") is None:
        raise EstimateError("an estimate needs torch, which is not installed")
    try:
        return importlib.import_module(f"ipygpumem.estimating.{name}")
    except (ImportError, AttributeError) as error:
        version = importlib.import_module("torch").__version__
        raise EstimateError(f"torch {version} is too old for estimates: it lacks fake tensors ({error})") from error
