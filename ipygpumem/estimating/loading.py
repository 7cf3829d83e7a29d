"""Imports the module that estimates, and with it torch; a torch that cannot is one line."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

from ipygpumem.errors import DeviceError, EstimateError, describe_error, not_installed
from ipygpumem.meter.own_growth import FOR_FAKES, growth_for


def import_estimator() -> Any:
    """Import and return the module that makes estimates; this imports torch.

    Raises:
        EstimateError: torch is not installed, is too old for fake tensors, or is broken.
    """
    with growth_for(FOR_FAKES), _torch_may_be_broken():
        if importlib.util.find_spec("torch") is None:
            raise not_installed(EstimateError, "an estimate needs", "torch")
        from ipygpumem.estimating import running  # imports torch

        return running


def import_summaries() -> Any:
    """Import and return the module that summarises models; raises as ``import_estimator`` does."""
    import_estimator()
    from ipygpumem.estimating import summaries  # imports torch

    return summaries


def new_estimation(*args: Any) -> Any:
    """Return a new ``Estimation``; raises as ``import_estimator`` does."""
    module = import_estimator()
    with _torch_may_be_broken():
        return module.Estimation(*args)


@contextlib.contextmanager
def _torch_may_be_broken() -> Iterator[None]:
    """Raise an ``EstimateError`` for any error of the block: it uses internal parts of torch."""
    try:
        yield
    except EstimateError:
        raise
    except DeviceError as error:
        raise EstimateError(str(error)) from None
    except Exception as error:
        version = getattr(sys.modules.get("torch"), "__version__", "")
        torch = f"torch {version}".rstrip()
        why = f"it is too old for fake tensors, or broken ({describe_error(error)})"
        raise EstimateError(f"{torch} cannot make estimates: {why}") from None
