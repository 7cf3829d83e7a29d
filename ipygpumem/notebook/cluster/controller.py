"""Notices that a cluster's controller has stopped: ZeroMQ greets whoever connects, however busy hub and engines are."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

_EVERY_SECONDS = 5.0
_GREETING_SECONDS = 2.0
_PATIENCE_LOOKS = 12
"""So often in a row nothing at all is heard, as of a network that is down, before it counts as silent: a minute."""
_OLD_SECONDS = 60.0
_SOCKETS = ("_query_socket", "_mux_socket")
"""The client's own, to the hub and to the scheduler that brings cells to engines; they know where a tunnel begins."""

SILENT = "nor has the controller: it has stopped, or cannot be reached; start the cluster again, and connect"


def is_closed(client: Any) -> bool:
    """Whether nothing can be asked through it any more."""
    return getattr(client, "_closed", False) is True


class Controller:
    """What a client knows of its cluster's controller.

    Args:
        client: ipyparallel's.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._looked_at = time.monotonic()
        self._unheard = 0
        own = [getattr(client, name, None) for name in _SOCKETS]
        self._places = [at.LAST_ENDPOINT.decode().rstrip("\0") for at in own if at is not None and not at.closed]

    @property
    def is_silent(self) -> bool:
        """Whether it has stopped, or nothing was heard of it for long. Now and then it looks; this never waits."""
        if is_closed(self._client):  # as by a hub that somebody shut down
            return True
        since = time.monotonic() - self._looked_at
        if since > _EVERY_SECONDS:
            self._unheard = 0 if since > _OLD_SECONDS else self._unheard
            self._looked_at = time.monotonic()
            threading.Thread(target=self._look, daemon=True).start()
        return self._unheard >= _PATIENCE_LOOKS

    def _look(self) -> None:
        found = [greets(place) for place in self._places]
        self._unheard = _PATIENCE_LOOKS if False in found else self._unheard + 1 if None in found else 0


def greets(place: str) -> bool | None:
    """Return whether a ZeroMQ socket listens at ``tcp://host:port``; None where nothing is heard."""
    scheme, _, where = place.partition("://")
    if scheme != "tcp":
        return True  # nothing is known of it
    host, _, port = where.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _GREETING_SECONDS) as there:
            return bool(there.recv(1))  # a tunnel whose other end is gone closes at once
    except ConnectionError:
        return False
    except OSError:
        return None
