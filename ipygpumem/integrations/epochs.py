"""Measures the epochs of a training for callbacks of trainers, and never stops it."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from ipygpumem.api.shell import current_traces
from ipygpumem.errors import MissingLibraryError
from ipygpumem.model import TraceRecord
from ipygpumem.notebook.aside import say_failed
from ipygpumem.units import MIB


class Epochs:
    """The epochs of one training: each is a span."""

    def __init__(self) -> None:
        self.has_failed = False
        self._open: tuple[Any, Any, int, float, float] | None = None
        """The traces, the span and the number of the epoch that is measured, and when it began."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make another one: trainers copy and pickle their callbacks."""
        return Epochs, ()

    def begin(self, number: int) -> None:
        """Begin an epoch, counted from 1; what an error has left open is forgotten: trainers tell callbacks of none."""
        self.close()
        traces, started_at, started = current_traces(), time.time(), time.perf_counter()
        self._open = traces, traces.meter.start(), number, started_at, started

    def end(self) -> dict[str, float]:
        """End the epoch, keep its record, and return its figures by name."""
        if self._open is None:
            return {}
        (traces, span, number, started_at, started), self._open = self._open, None
        usages = traces.meter.stop(span)
        if not usages:  # the extension was unloaded meanwhile
            return {}
        traces.finished.append(TraceRecord("epoch", started_at, time.perf_counter() - started, None, usages, number))
        figures = {}
        for usage in usages:
            if usage.peak_bytes:
                kept, peak = names_of(usage.device)
                figures.update({kept: usage.delta_bytes / MIB, peak: usage.peak_delta_bytes / MIB})
        return figures

    def close(self) -> None:
        """End what is open, without figures."""
        if self._open is not None:
            traces, span, *_ = self._open
            traces.meter.drop(span)
        self._open = None


def names_of(device: str) -> tuple[str, str]:
    """Return how a device's two figures of an epoch are called."""
    start = f"mem/{device.replace(':', '_')}"
    return f"{start}/kept_mib", f"{start}/peak_mib"


def harmless(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a callback's hook that never raises: a failure of ours is reported, and nothing measured any more."""

    @functools.wraps(hook)
    def call(self: Any, *args: Any, **options: Any) -> None:
        epochs: Epochs = self.epochs
        if epochs.has_failed:
            return
        try:
            hook(self, *args, **options)
        except Exception as error:
            epochs.has_failed = True
            say_failed("the memory callback", error, hint="; it measures no more")
            with contextlib.suppress(Exception):  # what has failed may fail again
                epochs.close()

    return call


@harmless
def close(self: Any, *args: Any, **options: Any) -> None:
    """End what is open, as a hook."""
    self.epochs.close()


@contextlib.contextmanager
def needs(library: str, package: str) -> Iterator[None]:
    """Raise MissingLibraryError, which says how to install a library, if the block cannot import it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        raise MissingLibraryError(f"{library} is not installed: pip install '{package}'") from None
