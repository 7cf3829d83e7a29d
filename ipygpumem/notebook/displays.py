"""Displays of a running cell that are updated in place and vanish, and whether anybody looks at them."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

_JUPYTER_CLIENT_ID = re.compile(r"[0-9a-f]+-[0-9a-f]+_\d+_\d+")


def is_watched(shell: Any) -> bool:
    """Whether a person may sit before the running cell of a kernel.

    Who cannot be asked anything (``allow_stdin``) is a program: nbconvert, papermill.
    """
    return bool(shell.kernel.get_parent("shell").get("content", {}).get("allow_stdin"))


def shows_updates(shell: Any) -> bool:
    """Whether what replaces a display is seen by who asked for the running cell.

    Consoles built on jupyter_client ignore updates. Their requests have ids of its own form, those of front-ends in
    JavaScript are UUIDs.
    """
    return not _JUPYTER_CLIENT_ID.fullmatch(shell.kernel.get_parent("shell")["header"]["msg_id"])


class Display:
    """One display of the running cell.

    It carries HTML only: front-ends without HTML cannot update a display either, and would keep a stale line. It does
    not go through ``display_pub.publish``, which flushes the user's streams: it may be shown from any thread.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._publisher: Any = None
        self._sent = 0
        """What the kernel's count of messages is for as long as only we send some; 0 before our first."""
        self.id = f"ipygpumem-{os.urandom(16).hex()}"

    @property
    def is_shown(self) -> bool:
        """Whether it was shown at all."""
        return self._sent > 0

    def show(self, html: str, kind: str) -> None:
        """Show ``html``, a report of ``kind``, instead of what was shown before; nothing where output is captured."""
        publisher = self._shell.display_pub
        captured = getattr(publisher, "pub_socket", None) is None or not hasattr(sys.stdout, "pub_thread")
        if captured or publisher is not (self._publisher or publisher):
            return
        self._publisher = publisher
        self._send({"text/html": html}, {"ipygpumem": {"reports": [kind]}})

    def _send(self, data: dict[str, str], metadata: dict[str, Any]) -> None:
        publisher = self._publisher
        message = "update_display_data" if self._sent else "display_data"
        self._sent = (self._sent or publisher.session.message_count) + 1
        content = {"data": data, "metadata": metadata, "transient": {"display_id": self.id}}
        parent, topic = publisher.parent_header, publisher.topic
        publisher.session.send(publisher.pub_socket, message, content, parent=parent, ident=topic)

    def vanish(self) -> None:
        """Show nothing any more: a display without any data takes no room."""
        if self._sent:
            self._send({}, {})

    def is_last(self) -> bool:
        """Whether it is the cell's last output, and will be: nothing has been sent since it came, or waits to be."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return bool(self._sent and self._publisher.session.message_count == self._sent)
