"""Shows reports in a shell: one display with text and, where a front-end can use it, HTML."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ipygpumem.notebook.aside import say_failed
from ipygpumem.objects.bulk import Progress
from ipygpumem.reports import html, text
from ipygpumem.reports.layout import Report, Scales

if TYPE_CHECKING:
    from ipygpumem.notebook.config import IPyGpuMem

_WORK_SECONDS = 1.0
"""Our own work that takes longer shows a progress bar."""


class Screen:
    """Where the reports of one shell go."""

    def __init__(self, shell: Any, config: IPyGpuMem) -> None:
        self._shell = shell
        self._config = config
        self.scales = Scales()
        self._pid = os.getpid()

    @property
    def has_images(self) -> bool:
        """Whether images can be seen here: not in a terminal."""
        return hasattr(self._shell, "kernel")

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

    @contextmanager
    def working(self, what: str) -> Iterator[Progress]:
        """Show a progress bar once our own work, which is called ``what``, has taken a second."""
        bar: Any = None
        due = perf_counter() + _WORK_SECONDS if self._has_bars() else float("inf")

        def progress(share: float) -> None:
            nonlocal bar, due
            if perf_counter() < due:
                return
            try:
                bar = bar or _new_bar(f"ipygpumem: {what}", share, self._bar_stream)
                bar.update(max(0.0, min(share, 1.0) - bar.n))  # what is done again does not move the bar back
            except Exception as error:  # the work goes on
                due = float("inf")
                say_failed("the progress bar", error)

        try:
            yield progress
        finally:
            if bar is not None:
                with suppress(Exception):  # as above
                    bar.close()

    def _has_bars(self) -> bool:
        """Return True if a person sees the bar: the output is not captured, nor the notebook run by nbconvert."""
        if not self._config.report:
            return False
        if self.has_images:
            if not _is_kernels(self._bar_stream) or os.getpid() != self._pid:
                return False
            return bool(self._shell.kernel.get_parent("shell").get("content", {}).get("allow_stdin"))
        return is_terminal(self._bar_stream)

    @property
    def _bar_stream(self) -> Any:
        """A notebook keeps an empty output where a bar was, and stderr's is a red band."""
        return sys.stdout if self.has_images else sys.stderr

    def _begin_row(self) -> None:
        """Go to the beginning of a row of the terminal that has nothing in it yet."""
        terminals = getattr(sys.modules.get("IPython.terminal.interactiveshell"), "TerminalInteractiveShell", ())
        stream = sys.stdout if sys.stdout is sys.__stdout__ else None  # else another gets the report
        if not (isinstance(self._shell, terminals) and stream is not None and is_terminal(stream)):
            return
        if os.name == "posix" and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", ""):
            # As many blanks as there are columns end in the last column of the cursor's row if they began in its first,
            # and in the next row otherwise; shells do so before their prompt (zsh's PROMPT_SP).
            stream.write(" " * os.get_terminal_size(stream.fileno()).columns + "\r")

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


def _new_bar(what: str, share: float, stream: Any) -> Any:
    """Return a progress bar up to 1 that stands at ``share`` and disappears when it is closed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about ipywidgets, without which the bar is text
        from tqdm.auto import tqdm  # only long work needs it

    class Bar(tqdm):  # type: ignore[misc]  # tqdm is untyped
        monitor_interval = 0  # no thread

    shape = "{desc} {percentage:.0f}% {bar} {elapsed}"
    return Bar(desc=what, initial=share, total=1.0, leave=False, miniters=0, bar_format=shape, file=stream)


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
    forced = os.environ.get("FORCE_COLOR")
    if forced is None:
        wanted = is_terminal(stream) and os.environ.get("TERM") != "dumb"
    else:
        wanted = forced not in ("", "0", "false")
    return wanted and not os.environ.get("NO_COLOR") and str(getattr(shell, "colors", "")).lower() != "nocolor"


def _is_kernels(stream: Any) -> bool:
    """Return True if ``stream`` is the kernel's own, and not a user's stream that passes on to it."""
    return type(stream) is getattr(sys.modules.get("ipykernel.iostream"), "OutStream", None)


def _nothing_to_flush() -> bool:
    """Whether the kernel's publisher may be spared its flush of stdout and stderr, since neither has anything.

    It waits for another thread twice, which is most of what a report costs (1.1 of 1.3 ms were seen on a slow machine).
    """
    streams = sys.stdout, sys.stderr
    if not all(_is_kernels(stream) and getattr(stream, "_flush_pending", True) is False for stream in streams):
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
