"""Shows reports in a shell: one display with text and, where a front-end can use it, HTML."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ipygpumem.notebook.ipython.displays import is_kernels
from ipygpumem.notebook.ipython.terminal import terminal_of, to_empty_row
from ipygpumem.reports import html, text
from ipygpumem.reports.layout import Report

if TYPE_CHECKING:
    from ipygpumem.notebook.config import IPyGpuMem
    from ipygpumem.notebook.ipython.wire import Wire
    from ipygpumem.reports.figures import Picture


class Screen:
    """Where the reports of one shell go."""

    def __init__(self, shell: Any, config: IPyGpuMem, wire: Wire | None = None) -> None:
        self._shell = shell
        self._config = config
        self._wire = wire
        self._pid = os.getpid()

    @property
    def has_images(self) -> bool:
        """Whether images can be seen here: not in a terminal."""
        return hasattr(self._shell, "kernel")

    def show_image(self, picture: Picture) -> None:
        """Show ``picture``, with its summary for those who see no images."""
        data, metadata = picture.bundle()
        self._shell.display_pub.publish(data=data, metadata={**metadata, "ipygpumem": {"reports": ["plot"]}})

    def show(self, reports: Sequence[Report], *, place: str | None = None, is_new: bool = False) -> None:
        """Show ``reports`` in one display, in place of that with the id ``place``; nothing if there are none.

        If it ``is_new``, the display gets that id.
        """
        if not reports:
            return
        data = {"text/plain": text.render(reports)}
        if os.getpid() != self._pid and self.has_images:  # a forked child: the kernel's messages are not its to send
            sys.stdout.write(data["text/plain"] + "\n")
            return
        if self.has_images:  # a terminal shows the text only
            data["text/html"] = html.render(reports, bars=self._config.bar)
            if self._wire is not None and self._wire.ends_within_a_row():
                data["text/plain"] = "\n" + data["text/plain"]
        else:
            self._begin_row()
            data["text/plain"] = self._for_terminal(reports, data["text/plain"])
        metadata = {"ipygpumem": {"reports": [report.kind for report in reports]}}
        where = {} if place is None else {"transient": {"display_id": place}, "update": not is_new}
        publisher = self._shell.display_pub
        if type(publisher).__name__ == "ZMQDisplayPublisher" and _nothing_to_flush():
            type(publisher).publish(_WithoutFlush(publisher), data=data, metadata=metadata, **where)
        else:
            publisher.publish(data=data, metadata=metadata, **where)

    def _begin_row(self) -> None:
        """Go to the beginning of a row of the terminal that has nothing in it yet."""
        terminal, stream = terminal_of(self._shell), sys.__stdout__
        if terminal is not None and stream is not None and sys.stdout is stream:  # else another gets the report
            stream.write(to_empty_row(terminal))

    def _for_terminal(self, reports: Sequence[Report], plain: str) -> str:
        """Return the text as the stream that it will be printed to can show it."""
        stream = sys.stdout
        shown = plain
        if is_terminal(stream):
            style = text.Style(
                width=shutil.get_terminal_size().columns,
                colour=wants_colour(stream, self._shell),
                bars=self._config.bar,
            )
            shown = text.render(reports, style)
        elif wants_colour(stream, self._shell):
            shown = text.render(reports, text.Style(colour=True))
        shown = text.carried(shown, getattr(stream, "encoding", None) or "utf-8")
        return plain if shown == plain else _Styled(plain, shown)


class _Styled(str):
    """Plain text that prints in colour: IPython keeps a terminal's outputs, too, for ``%notebook`` to write them."""

    _shown: str

    def __new__(cls, plain: str, shown: str) -> _Styled:
        made = super().__new__(cls, plain)
        made._shown = shown
        return made

    def __str__(self) -> str:
        return self._shown


def is_terminal(stream: Any) -> bool:
    """Whether ``stream`` is a terminal that a person looks at."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError, OSError):  # a stand-in, or closed
        return False


def wants_colour(stream: Any, shell: Any) -> bool:
    """Whether text for ``stream`` may be coloured: by ``NO_COLOR``, ``FORCE_COLOR``, ``TERM`` and IPython's colours."""
    if os.environ.get("NO_COLOR") or str(getattr(shell, "colors", "")).lower() == "nocolor":
        return False
    forced = os.environ.get("FORCE_COLOR")
    if forced is not None:
        return forced not in ("", "0", "false")
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def _nothing_to_flush() -> bool:
    """Whether the kernel's publisher may be spared its flush of stdout and stderr, since neither has anything.

    It waits for another thread twice, which is most of what a report costs (1.1 of 1.3 ms were seen on a slow machine).
    """
    streams = sys.stdout, sys.stderr
    if not all(is_kernels(stream) and getattr(stream, "_flush_pending", True) is False for stream in streams):
        return False
    thread = getattr(getattr(sys.stdout, "pub_thread", None), "thread", None)
    frame = None if thread is None else sys._current_frames().get(thread.ident)
    while frame is not None and frame.f_code.co_name != "_flush":  # in there nothing is pending, but not yet sent
        frame = frame.f_back
    return frame is None


class _WithoutFlush:
    """Stands for ``publisher`` in one call that need not flush; others publish meanwhile, in threads of their own."""

    def __init__(self, publisher: Any) -> None:
        self._publisher = publisher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._publisher, name)

    def _flush_streams(self) -> None:
        """Stand in for the publisher's."""
