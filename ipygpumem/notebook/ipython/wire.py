"""What the kernel sends to its front-ends, seen on its way out: has the running cell shown anything yet?

Where the front-end is a console, a page of text without end: is the row unfinished in which a report would begin?

Nothing of the user's is wrapped, and no print pays for it. Whatever a cell shows leaves the kernel as a message, also
what threads, C code and forked children write, and one thread of the kernel's sends them all. All that changes here
changes in that thread, so that nothing can come between a look and what follows from it.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from ipygpumem.notebook.aside import say_failed
from ipygpumem.notebook.ipython.displays import is_kernels, is_watched, shows_updates

_DELIMITER = b"<IDS|MSG>"
_OUTPUTS = {"stream", "display_data", "execute_result", "error"}
_MOVES_OUTPUTS = {"clear_output", "comm_open", "comm_msg", "comm_close"}
"""What may clear a cell's outputs, or lead them elsewhere, as into a widget."""
_MOST_REQUESTS = 16
_PATIENCE_SECONDS = 2.0


class Wire:
    """The messages of one kernel's shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._pid = os.getpid()
        self._thread: Any = getattr(getattr(shell.kernel, "iopub_socket", None), "io_thread", None)
        self._send: Callable[..., Any] | None = getattr(self._thread, "_really_send", None)
        self._silent: dict[str, Place | None] = {}
        """The running requests that have shown nothing yet, and the place of ours that each has instead."""
        self._unfinished: dict[str, bool] = {}
        """The running requests of consoles, and whether the text that each has shown last ends within a row."""
        self._has_failed = False
        self._ask = getattr(shell.kernel, "_input_request", None)
        if self._thread is not None and self._send is not None:
            self._thread._really_send = self._pass
        if self._ask is not None:
            shell.kernel._input_request = self._asks

    def close(self) -> None:
        """See nothing any more."""
        self._forget()
        for owner, name, ours in (
            (self._thread, "_really_send", self._pass),
            (self._shell.kernel, "_input_request", self._asks),
        ):
            if owner is not None and vars(owner).get(name) == ours:  # else somebody has wrapped ours: it passes all on
                delattr(owner, name)

    @property
    def display_pub(self) -> Any:
        """What the shell shows displays with now."""
        return self._shell.display_pub

    def cell_begins(self) -> None:
        """Look out for the outputs of the cell that begins in this thread, if somebody sees them."""
        request = self._parent().get("msg_id")
        if self._send is None or self._has_failed or not request or not is_watched(self._shell):
            return
        if len(self._silent) + len(self._unfinished) >= _MOST_REQUESTS:  # of cells that never got an end
            self._forget()
        if shows_updates(self._shell):
            self._silent[request] = None
        else:
            self._unfinished[request] = False

    def cell_ends(self) -> None:
        """Look out for it no longer."""
        request = self._parent().get("msg_id", "")
        self._silent.pop(request, None)
        self._unfinished.pop(request, None)

    def _forget(self) -> None:
        self._silent.clear()
        self._unfinished.clear()

    def ends_within_a_row(self) -> bool:
        """Whether a console shows the running cell's output, and that does not end with a row."""
        request = self._parent().get("msg_id", "")
        done = threading.Event()
        if request in self._unfinished and self.call(done.set):
            done.wait(_PATIENCE_SECONDS)
        return self._unfinished.get(request, False)

    def place(self, *, is_last: bool = False) -> Place | None:
        """Return a place in the outputs of the cell in whose context this is asked.

        None if it has shown something, if its output is captured, or if this kernel's messages cannot be seen.

        Args:
            is_last: the cell's code is over, and what follows will take the place: it may come after other outputs.
        """
        parent = self._parent()
        if self._send is None or self._has_failed or not parent.get("msg_id"):
            return None
        may_follow = is_last and is_watched(self._shell) and shows_updates(self._shell)
        return Place(self, parent, is_last=may_follow) if may_follow or parent["msg_id"] in self._silent else None

    def _parent(self) -> dict[str, Any]:
        found: dict[str, Any] = getattr(self._shell.display_pub, "parent_header", {})  # none where it is captured
        return found

    def _pass(self, message: Any, *words: Any, **options: Any) -> Any:
        """Send a message, as the kernel does."""
        assert self._send is not None
        if (self._silent or self._unfinished) and os.getpid() == self._pid:
            try:
                self._look(message)
            except Exception as error:  # the message must go out all the same
                self._fail(error)
        return self._send(message, *words, **options)

    def _look(self, message: Any) -> None:
        header, parent, _, content = message[message.index(_DELIMITER) + 2 :][:4]
        unpack = self._shell.kernel.session.unpack
        kind = unpack(header)["msg_type"]
        if kind not in _OUTPUTS and kind not in _MOVES_OUTPUTS:
            return
        request = unpack(parent).get("msg_id")
        self._give_way(request, wait=kind in _OUTPUTS)
        if request in self._unfinished and kind in _OUTPUTS:
            shown = unpack(content)
            if kind == "stream":
                self._unfinished[request] = not shown["text"].endswith("\n")
            elif "text/plain" in shown.get("data", ()):
                self._unfinished[request] = False

    def _asks(self, *words: Any, **options: Any) -> Any:
        """Ask the user for input, as the kernel does: the question and the answer are among the outputs, too."""
        request = self._parent().get("msg_id")
        if request in self._silent:
            self.call(functools.partial(self._give_way, request, wait=True, asks=True))
        assert self._ask is not None
        return self._ask(*words, **options)

    def _give_way(self, request: str | None, *, wait: bool, asks: bool = False) -> None:
        place = self._silent.pop(request, None) if request else None
        if place is not None:
            place.give_way(wait=wait, asks=asks)

    # -- for places -------------------------------------------------------------------------------------------

    def call(self, function: Callable[[], None]) -> bool:
        """Call ``function`` soon, in the thread that sends, after all that the user's code has written by now.

        Returns:
            Whether it will be called: a forked child sends nothing of ours.
        """

        def after_the_users() -> None:
            for stream in (sys.stdout, sys.stderr):
                if is_kernels(stream) and getattr(stream, "pub_thread", None) is self._thread:
                    stream.flush()  # in this thread it does not wait, and its message waits to be sent
            self._thread.schedule(functools.partial(self._guarded, function))

        if os.getpid() != self._pid:
            return False
        self._thread.schedule(functools.partial(self._guarded, after_the_users))
        return True

    def _guarded(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:  # the kernel's thread must live
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._forget()
        if not self._has_failed:
            self._has_failed = True
            say_failed("the live line", error)

    def take(self, request: str, place: Place) -> bool:
        """Give ``place`` a cell's outputs, if there are none."""
        is_free = request in self._silent
        if is_free:
            self._silent[request] = place
        return is_free

    def is_alone(self, request: str, place: Place) -> bool:
        """Whether nothing else is among a cell's outputs."""
        return self._silent.get(request) is place

    def send(self, kind: str, content: dict[str, Any], parent: dict[str, Any]) -> None:
        """Send a message of ours, now."""
        topic = getattr(self._shell.display_pub, "topic", b"display_data")
        self._shell.kernel.session.send(self, kind, content, parent=parent, ident=topic)

    def send_multipart(self, message: Any, *words: Any, **options: Any) -> Any:
        """Send a message without a look at it: to the kernel's session this is a socket."""
        assert self._send is not None
        return self._send(message, *words, **options)


class Place:
    """One display as the only output of a running cell; it is gone before anything else comes, and leaves nothing.

    It carries HTML only: front-ends without HTML cannot update a display either, and would keep a stale line. It may
    be drawn from any thread.
    """

    def __init__(self, wire: Wire, parent: dict[str, Any], *, is_last: bool) -> None:
        self._wire = wire
        self._is_last = is_last
        self._parent = parent
        self._request = str(parent["msg_id"])
        self._is_drawn = False
        """Somebody has asked for it to be shown."""
        self._is_shown = False
        self._is_gone = False
        self._is_left = False
        """It is there still for a report to replace it."""
        self.id = f"ipygpumem-{os.urandom(16).hex()}"

    def draw(self, html: str, kind: str) -> None:
        """Show ``html``, a report of ``kind``, instead of what was shown before; nothing where output is captured."""
        if hasattr(sys.stdout, "pub_thread") and hasattr(self._wire.display_pub, "parent_header"):
            self._is_drawn = self._wire.call(functools.partial(self._draw, html, kind))

    def _draw(self, html: str, kind: str) -> None:
        if self._is_gone or not (self._is_shown or self._wire.take(self._request, self) or self._is_last):
            return
        message = "update_display_data" if self._is_shown else "display_data"
        self._is_shown = True
        self._wire.send(message, self._content({"text/html": html}, {"ipygpumem": {"reports": [kind]}}), self._parent)

    def _content(self, data: dict[str, str], metadata: dict[str, Any]) -> dict[str, Any]:
        return {"data": data, "metadata": metadata, "transient": {"display_id": self.id}}

    def give_way(self, *, wait: bool, asks: bool = False) -> None:
        """Be gone.

        Args:
            wait: be so at the moment at which the next output comes, so that nothing jumps.
            asks: a question comes, by another way than outputs do. It may be there first, and a front-end would clear
                it with the outputs: until the answer comes, only take no room.
        """
        if self._is_shown and not self._is_gone:
            if asks:
                self._empty()
            self._wire.send("clear_output", {"wait": wait}, self._parent)
        self._is_gone = True

    def _empty(self) -> None:
        """Show nothing any more: a display without any data takes no room."""
        self._wire.send("update_display_data", self._content({}, {}), self._parent)

    def close(self, *, replace: bool) -> str | None:
        """Be drawn no more; return the display's id if it is there still, to be replaced, or be gone.

        It may be called again, after an interrupt.
        """
        done = threading.Event()

        def close() -> None:
            try:
                is_alone = self._wire.is_alone(self._request, self)
                is_there = self._is_shown and (self._is_left or not self._is_gone)
                self._is_left = is_there and replace and (is_alone or self._is_last)
                if is_there and not self._is_left:
                    self._is_gone = False
                    self.give_way(wait=False) if is_alone else self._empty()
                self._is_gone = True
            finally:
                done.set()

        if self._is_drawn and self._wire.call(close) and not done.wait(_PATIENCE_SECONDS):
            replace = False  # by then the report has a display of its own
        return self.id if self._is_left else None
