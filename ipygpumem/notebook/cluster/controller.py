"""Notices that a cluster's controller has stopped: its hub answers at once, however busy the engines are."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

_EVERY_SECONDS = 5.0
PATIENCE_SECONDS = 30.0
"""Far longer than a hub takes: who is declared dead must not be alive."""


class Controller:
    """What a client knows of its cluster's controller.

    Args:
        client: ipyparallel's.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._asked_at = time.monotonic()
        self._answered = threading.Event()
        self._answered.set()

    @property
    def is_silent(self) -> bool:
        """Whether it has not answered for long. It is asked now and then; this never waits."""
        since = time.monotonic() - self._asked_at
        if not self._answered.is_set():
            return since > PATIENCE_SECONDS
        if since > _EVERY_SECONDS:
            self._asked_at, self._answered = time.monotonic(), threading.Event()
            threading.Thread(target=self._ask, args=(self._answered,), daemon=True).start()
        return False

    def _ask(self, answered: threading.Event) -> None:
        with contextlib.suppress(Exception):  # an error is an answer, too
            self._client.queue_status([])
        answered.set()
