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

from ipygpumem.failures import failures_told
from ipygpumem.heap.bulk import Progress
from ipygpumem.records import CellRecord, packed
from ipygpumem.report import html, text
from ipygpumem.report.layout import Report
from ipygpumem.report.scales import Scales
from ipygpumem.shell.advised_lines import AdvisedLines

if TYPE_CHECKING:
    from ipygpumem.shell.config import IPyGpuMem

_WORK_SECONDS = 1.0
"""Seconds after which our own work shows a progress bar."""


class Display:
    """Displays the reports of one shell."""

    def __init__(self, shell: Any, config: IPyGpuMem) -> None:
        self._shell = shell
        self._config = config
        self.scales = Scales()
        self.advised = AdvisedLines()
        self._pid = os.getpid()

    @property
    def has_images(self) -> bool:
        """True if the front-end shows images and HTML, as a terminal does not."""
        return hasattr(self._shell, "kernel")

    def show(
        self,
        reports: Sequence[Report],
        cell: CellRecord | None = None,
        *,
        display_id: str | None = None,
        is_new: bool = False,
    ) -> None:
        """Show ``reports`` in one display, if there are any.

        Args:
            reports: the reports, whose records are in the display's metadata.
            cell: a cell's record, which is there too.
            display_id: the id of a display that this one replaces.
            is_new: True if no display has that id yet: this one gets it.
        """
        if not reports:
            return
        self.advised.note(reports)
        if not self.has_images:
            self._begin_row()
            data = {"text/plain": self._for_terminal(reports)}
        elif os.getpid() == self._pid:
            data = html.with_text(reports, bars=self._config.bar)
        else:  # a forked child must not send the kernel's messages
            sys.stdout.write(text.render(reports) + "\n")
            return
        message: dict[str, Any] = {"data": data, "metadata": self._metadata(reports, cell)}
        if display_id is not None:
            message |= {"transient": {"display_id": display_id}, "update": not is_new}
        publisher = self._shell.display_pub
        if type(publisher).__name__ == "ZMQDisplayPublisher" and _nothing_to_flush():
            type(publisher).publish(_WithoutFlush(publisher), **message)
        else:
            publisher.publish(**message)

    def _metadata(self, reports: Sequence[Report], cell: CellRecord | None) -> dict[str, Any]:
        """Return the metadata of a display: the kinds of its reports and, in a notebook, whose file
        has the metadata, the records.
        """
        content: dict[str, Any] = {"reports": [report.kind for report in reports]}
        if self.has_images:
            records: list[Any] = [] if cell is None else [cell]
            for report in reports:
                records += report.records
            content |= packed(records)
        return {"ipygpumem": content}

    @contextmanager
    def working(self, what: str) -> Iterator[Progress]:
        """Show a progress bar labelled ``what`` once our own work has taken a second."""
        bar: Any = None
        due = perf_counter() + _WORK_SECONDS if self._has_bars() else float("inf")

        def progress(share: float) -> None:
            nonlocal bar, due
            if perf_counter() < due:
                return
            with failures_told("the progress bar"):
                bar = bar or _new_bar(f"ipygpumem: {what}", share, self._bar_stream)
                bar.update(max(0.0, min(share, 1.0) - bar.n))  # the bar never moves back
                return
            due = float("inf")  # the work continues without a bar

        try:
            yield progress
        finally:
            if bar is not None:
                with suppress(Exception):  # as above
                    bar.n = bar.total  # else tqdm's widget takes the work for failed, and stays
                    bar.close()

    def _has_bars(self) -> bool:
        """Return True if a user sees the bar: the output is not captured, nor the notebook run by
        nbconvert.
        """
        if not self._config.report:
            return False
        if self.has_images:
            if not _is_kernels(self._bar_stream) or os.getpid() != self._pid:
                return False
            request = self._shell.kernel.get_parent("shell")
            return bool(request.get("content", {}).get("allow_stdin"))
        return is_terminal(self._bar_stream)

    @property
    def _bar_stream(self) -> Any:
        """The stream for the bar: in a notebook stdout, because the bar leaves an empty output, red
        for stderr.
        """
        return sys.stdout if self.has_images else sys.stderr

    def _begin_row(self) -> None:
        """Move a terminal's cursor to the start of an empty row."""
        terminal_module = sys.modules.get("IPython.terminal.interactiveshell")
        terminals = getattr(terminal_module, "TerminalInteractiveShell", ())
        stream = sys.stdout
        if stream is not sys.__stdout__ or stream is None:  # the report goes elsewhere
            return
        if not isinstance(self._shell, terminals) or not is_terminal(stream):
            return
        if os.name == "posix" and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", ""):
            # As many blanks as there are columns end in the last column of the cursor's row if they
            # began in its first, and in the next row otherwise; shells do so before their prompt
            # (zsh's PROMPT_SP).
            stream.write(" " * os.get_terminal_size(stream.fileno()).columns + "\r")

    def _for_terminal(self, reports: Sequence[Report]) -> str:
        """Return the reports as text in the width, colours and encoding of stdout."""
        stream = sys.stdout
        width = terminal_columns()
        has_bars = width is not None and self._config.bar
        style = text.Style(width, wants_colour(stream, self._shell), has_bars)
        encoding = getattr(stream, "encoding", None) or "utf-8"
        return text.encodable(text.render(reports, style), encoding)


def _new_bar(what: str, share: float, stream: Any) -> Any:
    """Return a progress bar from 0 to 1, now at ``share``, that disappears when closed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about ipywidgets, without which the bar is text
        from tqdm.auto import tqdm  # only long work needs it

    class ProgressBar(tqdm):  # type: ignore[misc]  # tqdm is untyped
        monitor_interval = 0  # no thread

    shape = "{desc} {percentage:.0f}% {bar} {elapsed}"
    return ProgressBar(
        desc=what, initial=share, total=1.0, leave=False, miniters=0, bar_format=shape, file=stream
    )


def is_terminal(stream: Any) -> bool:
    """Return True if ``stream`` is a terminal."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError, OSError):  # a replacement, or closed
        return False


def terminal_columns() -> int | None:
    """Return the width of the terminal that stdout is; None if it is something else."""
    if not is_terminal(sys.stdout):
        return None
    return shutil.get_terminal_size().columns


def wants_colour(stream: Any, shell: Any) -> bool:
    """Return True if ``NO_COLOR``, ``FORCE_COLOR``, ``TERM`` and IPython's colours allow colour on
    ``stream``.
    """
    if os.environ.get("NO_COLOR"):
        return False
    colours = str(getattr(shell, "colors", ""))
    if colours.lower() == "nocolor":
        return False
    forced = os.environ.get("FORCE_COLOR")
    if forced is not None:
        return forced not in ("", "0", "false")
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def _is_kernels(stream: Any) -> bool:
    """Return True if ``stream`` is the kernel's own, not a user's stream that forwards to it."""
    return type(stream) is getattr(sys.modules.get("ipykernel.iostream"), "OutStream", None)


def _nothing_to_flush() -> bool:
    """Return True if the kernel's stdout and stderr are empty, so that the publisher need not flush
    them.

    The flush waits for another thread twice, which is most of a report's cost (1.1 of 1.3 ms on a
    slow machine).
    """
    for stream in (sys.stdout, sys.stderr):
        if not _is_kernels(stream) or getattr(stream, "_flush_pending", True) is not False:
            return False
    thread = getattr(getattr(sys.stdout, "pub_thread", None), "thread", None)
    frame = None if thread is None else sys._current_frames().get(thread.ident)
    while frame is not None and frame.f_code.co_name != "_flush":  # inside it, output may be unsent
        frame = frame.f_back
    return frame is None


class _WithoutFlush:
    """Proxy of ``publisher`` that skips the flush in one call; other threads keep using the
    publisher itself.
    """

    def __init__(self, publisher: Any) -> None:
        self._publisher = publisher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._publisher, name)

    def _flush_streams(self) -> None:
        """Skip the publisher's flush."""
