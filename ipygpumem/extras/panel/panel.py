"""``ipygpumem.panel``: its thread sends figures while cells run; between cells it frees when asked
to.
"""

from __future__ import annotations

import importlib.util
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextvars import Context, copy_context
from time import perf_counter, thread_time
from typing import Any

from ipygpumem.errors import GpuMemError, describe_error, how_to_install
from ipygpumem.extras.panel import snapshot
from ipygpumem.magics.gpumem import free
from ipygpumem.meter.own_growth import growth_for
from ipygpumem.notebook import running_cell
from ipygpumem.probes.accelerators import initialized_backend
from ipygpumem.probes.nvml import Nvml
from ipygpumem.report.layout import Report, note
from ipygpumem.shell.app import App, current_app
from ipygpumem.shell.cell import Cell
from ipygpumem.shell.commands.declarations import Options
from ipygpumem.shell.notebook_inventory import largest_names

_PAUSE_SECONDS = 0.5
"""Time between two messages to the views."""
_KEPT_ROWS = 241
"""Rows for the two minutes that a view draws."""
_SEARCH_SHARE = 0.05
_SEARCH_SECONDS = 0.1
"""Maximum CPU time to find the largest names after a cell: a share of the cell's time, or these
seconds if they are more.
"""


def panel() -> Panel:
    """Return a live panel: memory of the host and of each GPU, the running cell, and the largest
    names.

    Use it during long cells: ``%gpumem panel`` shows it too, and so does a cell that ends with this
    call. Dock the output next to the notebook (in JupyterLab: right-click, Create New View for Cell
    Output). It moves while cells run, at most twice a second, and adds nothing to their outputs.
    There is one panel, which may be shown several times.

    Where there can be none, because this is a terminal or anywidget is not installed, one line says
    so instead.

    Raises:
        NotLoadedError: the extension is not loaded in this IPython, or there is no IPython.

    >>> shown = ipygpumem.panel()
    >>> shown.close()
    """
    app = current_app()
    reason = why_no_panel(app)
    if reason:
        return Panel(feed=None, reason=reason)
    for observer in app.session.observers:
        if type(observer) is Feed:
            if observer.widget.comm is not None:
                return Panel(observer)
            observer.close()  # the widget was closed by other code, such as Widget.close_all()
    return Panel(Feed(app))


def why_no_panel(app: App) -> str:
    """Return why there can be no panel here; empty if there can be one."""
    if not app.context.display.has_images:
        return "the panel needs a notebook: in a terminal, %gpumem status shows its figures"
    if importlib.util.find_spec("anywidget") is None:
        line = how_to_install("anywidget")
        return f"the panel needs anywidget: run {line}, reload the page, then run this cell again"
    return ""


class Panel:
    """Handle of the live panel: display it to show the panel, and ``close`` it.

    Args:
        feed: sends the figures; None if there can be no panel.
        reason: the text to show if there is none.
    """

    def __init__(self, feed: Feed | None, reason: str = "the panel is closed") -> None:
        # A weak reference. A strong one would lead from Out to the whole extension, and our reports
        # would count that.
        self._feed = (lambda: None) if feed is None else weakref.ref(feed)
        self._reason = reason

    def _open_feed(self) -> Feed | None:
        """Return the feed of the panel, unless it was closed."""
        feed = self._feed()
        if feed is None or feed.is_closed:
            return None
        return feed

    def close(self) -> None:
        """Close the panel and all its views; afterwards it costs nothing."""
        feed = self._open_feed()
        if feed is not None:
            feed.close()

    def __repr__(self) -> str:
        reason = self._reason
        if self._open_feed() is not None:
            reason = "the panel: this front-end shows no widgets"
        return f"<{reason}>"

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """Return the widget's view, and the text for a front-end without widgets."""
        feed = self._open_feed()
        if feed is None:
            return {"text/plain": self._reason}
        bundle = feed.widget._repr_mimebundle_(**options)
        data, metadata = bundle if type(bundle) is tuple else (bundle, {})
        return data | {"text/plain": repr(self)}, metadata


def _context_of_request(kernel: Any) -> Context:
    """Return a context in which another thread can send messages as part of the running request.

    ipykernel 7.0 finds the request in a context variable only. Other variables may have values of
    user code, which must not stay alive.
    """
    request: object = kernel.get_parent() if hasattr(kernel, "get_parent") else {}
    context = Context()
    for variable, value in copy_context().items():
        if value is request:
            context.run(variable.set, value)
    return context


def _new_widget(feed_reference: weakref.ref[Feed]) -> Any:
    """Return the widget of a feed, which must not keep the feed alive: ipywidgets keeps widgets."""
    from ipygpumem.extras.panel.widget import PanelWidget  # loads ipywidgets

    def state() -> dict[str, Any]:
        """Return the feed's whole state; nothing if the feed is gone."""
        feed = feed_reference()
        if feed is None:
            return {}
        return feed.whole_state

    def receive(content: Any) -> None:
        """Pass a view's message on to the feed."""
        feed = feed_reference()
        if feed is not None:
            feed.receive(content)

    return PanelWidget(state, receive)


class Feed:
    """Feeds all views of one shell's panel; observes cells only to find the largest names after
    them.
    """

    observed_for = "the panel"

    def __init__(self, app: App) -> None:
        self._app = app
        self._nvml = Nvml()
        self._rows: deque[dict[str, Any]] = deque(maxlen=_KEPT_ROWS)
        """The figures of the devices over time."""
        self._state: dict[str, Any] = {}
        """The state that the views show now: the cell, the largest names and a message."""
        self._last_sent: object = None
        """The figures last sent, without times; None to send in any case."""
        self._largest_names: dict[str, Any] = {}
        """The rows of the largest names, as the views get them."""
        self._seconds_of_last_search = 0.0
        """Time that the last search for them took; a slow one is repeated less often."""
        self._message = ""
        """The answer to a click, until the next cell has ended."""
        self._failure = ""
        """Why the thread's job has stopped, for the next cell's report; empty if it has not."""
        self.is_closed = False
        self._request = _context_of_request(app.context.shell.kernel)
        with growth_for("the panel's widgets"):
            self.widget = _new_widget(weakref.ref(self))
        app.session.observers = (*app.session.observers, self)
        app.context.meter.worker.add(self._tick)

    @property
    def whole_state(self) -> dict[str, Any]:
        """All that a view needs when it opens."""
        return {"rows": list(self._rows), "state": self._state}

    # -- the figures, in the meter's thread ------------------------------------------------------

    def _tick(self) -> float:
        """Send the figures, and return the seconds until the next time; a job of the worker."""
        try:
            self._request.run(self._send)
        except MemoryError:  # the cell is about to use all of it: the next one may succeed
            pass
        except Exception as error:
            if not self.is_closed:  # else closed in this moment
                stopped = f"the panel stopped ({describe_error(error)})"
                self._failure = f"{stopped}; ipygpumem.panel() opens a new one"
                self._app.context.meter.worker.remove(self._tick)
        return _PAUSE_SECONDS

    def _send(self) -> None:
        """Send the figures to all views if they changed."""
        context = self._app.context
        readings = context.meter.glance().values()
        figures = snapshot.devices(readings, self._nvml.loads(initialized_backend("cuda")))
        running = context.cells.outermost()
        cell, seconds = self._last_cell()
        if running is not None:
            cell = running_cell(context.shell)
            seconds = perf_counter() - running.measurement.started
        state = {
            "is_running": running is not None,
            "cell": cell,
            "message": self._message,
            "largest": self._largest_names,
        }
        if (figures, state) == self._last_sent:
            return
        now = time.time()
        row = {"time": now, "cell": None, "devices": figures}
        if running is not None:
            row["cell"] = cell
        self._rows.append(row)
        self._state = {**state, "time": now, "seconds": seconds}
        self.widget.send({"rows": [row], "state": self._state})
        self._last_sent = (figures, state)

    def _last_cell(self) -> tuple[int | None, float]:
        """Return the number of the last finished cell and the seconds it took."""
        cells = self._app.session.history
        if not cells:
            return None, 0.0
        return cells[-1].execution_count, cells[-1].duration_seconds

    # -- messages from the views, in the main thread or in a subshell's --------------------------

    def receive(self, content: Any) -> None:
        """Follow a message of a view.

        ``{"kind": "views", "count": 2}`` says how many views a page shows; ``close`` and ``free``
        are clicks.
        """
        kind = content.get("kind")
        worker = self._app.context.meter.worker
        if kind == "close":
            self.close()
        elif kind == "free":
            self._free_memory(content.get("cell"))
        elif kind == "views" and content.get("count"):
            self._last_sent = None
            worker.add(self._tick)
            worker.wake(self._tick)
        elif kind == "views":
            # This page shows none any longer. Other pages answer, with their count, if they do.
            worker.remove(self._tick)
            self.widget.send({"ask": True})

    def _free_memory(self, cell: int | None) -> None:
        """Free as ``%gpumem free`` does, which deletes no name; not while a cell runs, whose frames
        may be needed.

        In a subshell a click arrives while a cell runs, too, and freeing is passed on to the main
        thread, where cells run.

        Args:
            cell: the last cell when the user clicked. If it is another one now, the click is late.
        """
        loop = getattr(self._app.context.shell.kernel, "io_loop", None)
        if self._app.context.cells.outermost() is not None:
            self._message = "not freed: a cell is running"
        elif cell != self._last_cell()[0]:
            self._message = "not freed: a cell ran after the click"
        elif loop is not None and threading.current_thread() is not threading.main_thread():
            loop.add_callback(self._free_memory, cell)
            return
        else:
            try:
                self._message = free(self._app, Options())[0].headline
            except (Exception, KeyboardInterrupt) as error:
                self._message = f"not freed: {describe_error(error)}"
        self._app.context.meter.worker.wake(self._tick)

    # -- the hooks of a cell observer ------------------------------------------------------------

    def cell_begins(self, cell: Cell) -> None:
        """Do nothing: the thread sees the cell."""

    def cell_ended(self, cell: Cell) -> Sequence[Report]:
        """Find the largest names, unless that takes too long for this cell; return the report of a
        failure of the thread.
        """
        if not cell.is_nested:
            self._message = ""
            self._find_largest_names(cell)
        failure = self._failure
        self._failure = ""
        return [note(failure)] if failure else []

    def _find_largest_names(self, cell: Cell) -> None:
        """Find the largest names, unless that takes a larger share of the cell's time than
        allowed.
        """
        cell_seconds = perf_counter() - cell.measurement.started
        allowed_seconds = max(_SEARCH_SECONDS, _SEARCH_SHARE * cell_seconds)
        if self._seconds_of_last_search > allowed_seconds:
            self._seconds_of_last_search *= 0.9  # the heap may be smaller by now
            return
        started = thread_time()

        def check(share: float) -> None:
            """End the search once it has taken too long; it reports its progress here."""
            if thread_time() - started > allowed_seconds:
                raise TimeoutError

        try:
            rows = largest_names(self._app.context.shell, progress=check).names
        except TimeoutError:
            self._seconds_of_last_search = 2 * allowed_seconds  # it would have taken longer
        except GpuMemError:  # torch traces the code
            pass
        else:
            self._seconds_of_last_search = thread_time() - started
            self._largest_names = {"cell": cell.measurement.number, "names": snapshot.names(rows)}

    def cell_shown(self) -> None:
        """Do nothing: the largest names were found before the report."""

    def close(self) -> None:
        """Stop the thread's job and close all views."""
        if self.is_closed:
            return
        self.is_closed = True
        self._app.context.meter.worker.remove(self._tick)
        session = self._app.session
        session.observers = tuple(item for item in session.observers if item is not self)
        self.widget.close()
        self._nvml.close()
