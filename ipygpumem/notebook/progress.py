"""How far our own long work is: a bar of tqdm's, from one second on, that is gone when the work ends."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

from ipygpumem.notebook.displays import Display, is_watched

if TYPE_CHECKING:
    from ipygpumem.notebook.session import Session

_DELAY_SECONDS = 1.0


class Progress:
    """The bar of one piece of work. The work calls it with how much is done, and of how much.

    Args:
        what: what is done, for the user.
        file: where tqdm writes.
    """

    def __init__(self, what: str, file: Any) -> None:
        self._what = what
        self._file = file
        self._began = time.time()
        self._done, self._total = 0, 1
        self._bar: Any = None
        self._closed = False
        self._lock = threading.Lock()

    def __call__(self, done: int, total: int) -> None:
        """Note how many of how many steps are done."""
        self._done, self._total = done, total
        self.refresh()

    def refresh(self, *_: object) -> None:
        """Draw the bar, if the work has lasted for long enough; from any thread."""
        with self._lock:
            if self._closed or time.time() - self._began < _DELAY_SECONDS:
                return
            if self._bar is None:
                self._bar = _make_bar(desc=f"ipygpumem: {self._what}", file=self._file, leave=False, disable=None)
                self._bar.start_t = self._began
            self._bar.total, self._bar.n = self._total, self._done
            self._bar.refresh()

    def close(self) -> None:
        """Take the bar away."""
        with self._lock:
            self._closed = True
            if self._bar is not None:
                self._bar.close()


def _make_bar(**options: Any) -> Any:
    # Imported here: most work is done before a bar would be shown.
    from tqdm.std import tqdm

    class Bar(tqdm):  # type: ignore[misc]  # tqdm is untyped
        """A bar that neither starts tqdm's own thread nor moves the user's bars."""

        monitor_interval = 0
        _instances: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    Bar.set_lock(threading.RLock())
    return Bar(**options)


class _Page:
    """What tqdm writes to in a notebook: its last line is a display."""

    encoding = "utf-8"

    def __init__(self, display: Display) -> None:
        self._display = display

    def write(self, text: str) -> None:
        if line := text.strip():
            self._display.show(f"<pre>{escape(line)}</pre>", "progress")

    def flush(self) -> None:
        """Do nothing: nothing waits."""

    def isatty(self) -> bool:
        """Let tqdm write: a person looks."""
        return True


@contextlib.contextmanager
def progress(session: Session, what: str) -> Iterator[Callable[[int, int], None]]:
    """Give work a ``Progress`` to call; without effect where nobody looks at what runs, and with ``live`` off."""
    shell = session.shell
    in_notebook = hasattr(shell, "kernel")
    if not session.config.live or (in_notebook and not is_watched(shell)):
        yield lambda done, total: None
        return
    display = Display(shell) if in_notebook else None
    bar = Progress(what, sys.stderr if display is None else _Page(display))
    stop = session.ticker.listen(bar.refresh)  # the work itself may say nothing for seconds
    try:
        yield bar
    finally:
        stop()
        bar.close()
        if display is not None:
            display.vanish()
