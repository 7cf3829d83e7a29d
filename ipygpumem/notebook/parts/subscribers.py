"""The callables that want every record when it is finished, such as a logger of TensorBoard's."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

from ipygpumem.freeing.tracebacks import classify
from ipygpumem.introspect import type_name
from ipygpumem.model import CellRecord, ExperimentRecord
from ipygpumem.notebook.cell import Cell, Part
from ipygpumem.reports.layout import Report, clean

Subscriber = Callable[[CellRecord | ExperimentRecord], object]

_KEPT_AS = "_ipygpumem_subscribers"


class Subscribers(Part):
    """The subscribers of one shell, and the records that wait for them until the reports are shown.

    They are kept in the shell, so that a subscription lasts through ``%reload_ext`` until it is undone.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._waiting: deque[CellRecord | ExperimentRecord] = deque()
        self._called: list[tuple[Subscriber]] = []
        """Those that have not returned yet."""

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Let ``subscriber`` have every record from now on, and return the undo."""
        entry = (subscriber,)  # the same callable may subscribe twice; ours to compare, unlike the user's object
        vars(self._shell).setdefault(_KEPT_AS, []).append(entry)
        return lambda: self._drop(entry)

    def add(self, record: CellRecord | ExperimentRecord) -> None:
        """Keep a finished record until the reports are shown."""
        if _KEPT_AS in vars(self._shell):
            self._waiting.append(record)

    def cell_ended(self, cell: Cell, record: CellRecord | None) -> Sequence[Report]:
        """Keep the record of a cell."""
        if record is not None:
            self.add(record)
        return ()

    def shown(self) -> None:
        """Give the waiting records to the subscribers; one that fails is named once and dropped.

        A subscriber that runs cells does not get their records: it would run the next one, until Python's stack ends.
        """
        while self._waiting:
            record = self._waiting.popleft()
            for entry in list(vars(self._shell).get(_KEPT_AS, ())):
                if any(entry is called for called in self._called):
                    continue
                self._called.append(entry)
                try:
                    entry[0](record)
                except KeyboardInterrupt:
                    print(f"ipygpumem: {_name(entry[0])} was interrupted; it stays subscribed", file=sys.stderr)
                except BaseException as error:  # even SystemExit: a logger must not end the session
                    self._drop(entry)
                    why = f"{type_name(error)}: {clean(classify(error).message)}"
                    print(f"ipygpumem: {_name(entry[0])} failed and gets no more records ({why})", file=sys.stderr)
                finally:
                    self._called.pop()

    def _drop(self, entry: tuple[Subscriber]) -> None:
        entries = [other for other in vars(self._shell).get(_KEPT_AS, ()) if other is not entry]
        if entries:
            vars(self._shell)[_KEPT_AS] = entries
        else:
            vars(self._shell).pop(_KEPT_AS, None)


def _name(subscriber: object) -> str:
    """Return what the user would call a callable, without asking it."""
    function = subscriber.__func__ if type(subscriber) is MethodType else subscriber
    return f"subscriber {clean(function.__qualname__ if type(function) is FunctionType else type_name(function))}"
