"""Passes every finished record to subscribers, such as a TensorBoard logger."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from ipygpumem.introspect import type_name
from ipygpumem.reclaim.failure import classify
from ipygpumem.records import CellRecord, ExperimentRecord
from ipygpumem.report.words import clean

Subscriber = Callable[[CellRecord | ExperimentRecord], object]

_KEPT_AS = "_ipygpumem_subscribers"
"""Attribute of IPython's shell that has the subscribers."""


class Subscribers:
    """The subscribers of one shell, and the records queued for them until the reports are shown.

    They are stored in the shell, so that a subscription survives ``%reload_ext``.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._queue: deque[CellRecord | ExperimentRecord] = deque()
        self._running: list[tuple[Subscriber]] = []
        """Subscribers being called right now."""

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call ``subscriber`` with every record from now on, and return the undo."""
        entry = (subscriber,)  # compared instead of the user's object; it may subscribe twice
        vars(self._shell).setdefault(_KEPT_AS, []).append(entry)
        return lambda: self._drop(entry)

    def add(self, record: CellRecord | ExperimentRecord) -> None:
        """Queue a finished record until the reports are shown."""
        if _KEPT_AS in vars(self._shell):
            self._queue.append(record)

    def deliver(self) -> None:
        """Pass the queued records to the subscribers; one that fails is reported and removed.

        A subscriber that runs cells does not get their records, because it would call itself
        without end.
        """
        while self._queue:
            record = self._queue.popleft()
            for entry in list(vars(self._shell).get(_KEPT_AS, ())):
                if any(entry is called for called in self._running):
                    continue
                self._running.append(entry)
                try:
                    entry[0](record)
                except KeyboardInterrupt:
                    name = _name_of_subscriber(entry[0])
                    print(
                        f"ipygpumem: {name} was interrupted; it stays subscribed",
                        file=sys.stderr,
                    )
                except BaseException as error:  # even SystemExit: a logger must not end the session
                    self._drop(entry)
                    why = f"{type_name(error)}: {clean(classify(error).message)}"
                    name = _name_of_subscriber(entry[0])
                    print(
                        f"ipygpumem: {name} failed and gets no further records ({why})",
                        file=sys.stderr,
                    )
                finally:
                    self._running.pop()

    def _drop(self, entry: tuple[Subscriber]) -> None:
        """Remove a subscription, if it is there."""
        entries = [other for other in vars(self._shell).get(_KEPT_AS, ()) if other is not entry]
        if entries:
            vars(self._shell)[_KEPT_AS] = entries
        else:
            vars(self._shell).pop(_KEPT_AS, None)


def _name_of_subscriber(subscriber: object) -> str:
    """Return a callable's name without running the user's code."""
    function = subscriber.__func__ if type(subscriber) is MethodType else subscriber
    name = function.__qualname__ if type(function) is FunctionType else type_name(function)
    return f"subscriber {clean(name)}"
