"""Reads the registries in which Python and libraries keep the user's objects, each with its remedy.

An object in a registry stays alive without a name: after ``plt.plot(x)``, pyplot keeps the figure
until ``plt.close(1)``. Loggers, signal handlers, timers and widgets are kept in the same way.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ipygpumem.heap.holders import widgets
from ipygpumem.heap.kinds.arrays import is_of_library, library_type
from ipygpumem.heap.knowledge.tasks import scheduled_on, timers_of, waiting_thread_timers
from ipygpumem.heap.paths.attributes_to_remove import is_users_callable
from ipygpumem.heap.paths.cuts import Cut, Kind, split
from ipygpumem.heap.paths.loggers import handlers_and_filters, loggers
from ipygpumem.heap.paths.patches import started_patches
from ipygpumem.heap.paths.roots import Rank, Root, RootOf
from ipygpumem.heap.paths.task_endings import event_loops, line_that_cancels_timer
from ipygpumem.interrupts import original_handler
from ipygpumem.introspect import (
    attribute_of,
    instance_dict,
    is_instance,
    loaded_object,
)


class Registered(NamedTuple):
    """Objects that a registry keeps alive until a call removes them, all at once: a figure, or the
    widgets of a box.
    """

    root: Root
    """Their root, with the call that removes them."""
    objects: list[object]
    also_in_use: tuple[int, ...] = ()
    """Identities of further objects by which the user refers to them, such as the figure of a
    manager.
    """


def kept_by_registries(names: Mapping[str, object]) -> list[list[Registered]]:
    """Return the objects that registries keep alive without a name, in groups for one row of a
    report: one group for all figures, one for all widgets, and one for each handler and filter of a
    logger.

    Args:
        names: the user's names, to write code.
    """
    registry = widgets.WidgetRegistry.of_process(names)
    figures = _PyplotFigures.of_process(names, registry)
    by_registry = list[list[Registered]]()
    for item, root in handlers_and_filters(names):
        by_registry.append([Registered(root, [item])])
    if figures is not None and figures.managers:
        by_registry.append(figures.registered())
    if registry is not None and registry.by_model:
        by_registry.append([Registered(*family) for family in registry.families_with_roots()])
    return by_registry


def figures_and_widgets(names: Mapping[str, object]) -> list[object]:
    """Return the open figures and widgets, which need no name; ``names`` are the user's."""
    registry = widgets.WidgetRegistry.of_process(names)
    figures = _PyplotFigures.of_process(names, registry)
    objects = list[object]()
    if figures is not None:
        objects += figures.managers.values()
    if registry is not None:
        objects += registry.by_model.values()
    return objects


@dataclass
class Registries:
    """The objects in registries, for ``Roots``: a search for holders ends at them.

    Attributes:
        registered: their roots, by the identity of each object.
        namespaces: functions that return the root of a key, by the identity of a registry.
        hidden: identities of registries to skip, because ``registered`` has all of their objects.
    """

    registered: dict[int, Root] = field(default_factory=dict)
    namespaces: dict[int, RootOf] = field(default_factory=dict)
    hidden: set[int] = field(default_factory=set)

    @classmethod
    def read(cls, names: Mapping[str, object]) -> Registries:
        """Read the registries of loaded libraries; ``names`` are the user's, to write code."""
        registries = cls()
        registries._add_loggers(names)
        registries._add_signal_handlers()
        registries._add_tracers()
        registries._add_widgets_and_figures(names)
        registries._add_document()
        registries._add_patches()
        registries._add_thread_timers()
        for loop, code in event_loops(names):
            registries._add_timers(loop, code)
        return registries

    def _add_loggers(self, names: Mapping[str, object]) -> None:
        """Add the loggers: the logging module keeps each one, with its handlers and filters."""
        for logger, root in loggers(names):
            self.registered[id(logger)] = root

    def _add_signal_handlers(self) -> None:
        """Add the user's functions that handle signals: only the interpreter refers to them."""
        for number in signal.Signals:
            handler = original_handler(signal.getsignal(number))
            if not is_users_callable(handler):
                continue  # the library that has set it still needs it
            call = f"import signal; signal.signal(signal.{number.name}, signal.SIG_DFL);"
            cut = Cut.of_root(Kind.CALL, call)
            root = Root(
                f"handler of {number.name}", Rank.PLACE, advice=call, cut=cut, is_only_place=True
            )
            self.registered[id(handler)] = root

    def _add_tracers(self) -> None:
        """Add the user's functions that trace or profile the code: only the interpreter refers to
        them.

        The functions of debuggers and of coverage are left out, because these tools would stop
        working unnoticed.
        """
        for name in ("trace", "profile"):
            function = getattr(sys, f"get{name}")()
            if not is_users_callable(function):
                continue
            cut = Cut.of_root(Kind.CALL, f"import sys; sys.set{name}(None)")
            text = f"the function of sys.set{name}"
            self.registered[id(function)] = Root(text, Rank.PLACE, cut=cut, is_only_place=True)

    def _add_widgets_and_figures(self, names: Mapping[str, object]) -> None:
        """Add the widgets of ipywidgets and the figures of pyplot, which may be widgets."""
        registry = widgets.WidgetRegistry.of_process(names)
        figures = _PyplotFigures.of_process(names, registry)
        if figures is not None:
            self.namespaces[id(figures.managers)] = figures.root
        if registry is None:
            return
        self.hidden.update((id(registry.by_model), id(widgets.connections())))
        self.registered.update(registry.roots())
        if figures is not None:
            self.registered.update(figures.roots_of_widgets())

    def _add_timers(self, loop: object, code: str) -> None:
        """Add the timers that ``call_later`` and ``call_at`` have scheduled; a cancelled timer
        drops its callback.

        Args:
            loop: the event loop.
            code: the user's expression for it.
        """
        imports, loop_code = split(code)
        timers = timers_of(loop)
        if timers:
            self.hidden.add(id(scheduled_on(loop)))
        times = [timer.when() for timer in timers]
        for timer in timers:
            # The line finds the timer again by its time, unless several timers have the same one.
            condition = f"if timer.when() == {timer.when()!r}"
            if times.count(timer.when()) > 1 or not math.isfinite(timer.when()):
                condition = f"if id(timer) == {id(timer)}"
            call = f"{imports}[timer.cancel() for timer in {loop_code}._scheduled {condition}];"
            self._add_timer(timer, "a timer of the event loop", call)

    def _add_thread_timers(self) -> None:
        """Add the timers of ``threading`` that wait, and hide the lists of threads: each thread has
        a root of its own.
        """
        self.hidden.add(id(attribute_of(threading, "_active")))
        queues = loaded_object("concurrent.futures.thread", "_threads_queues")
        self.hidden.add(id(attribute_of(queues, "data")))
        for timer in waiting_thread_timers():
            self._add_timer(timer, f'the timer "{timer.name}"', line_that_cancels_timer(timer))

    def _add_timer(self, timer: object, text: str, call: str) -> None:
        """Add a timer.

        Args:
            timer: the timer.
            text: its name in a report.
            call: the statement that cancels it.
        """
        cut = Cut.of_root(Kind.CALL, call)
        self.registered[id(timer)] = Root(
            text, Rank.PLACE, is_removed_as_whole=True, cut=cut, is_only_place=True
        )

    def _add_patches(self) -> None:
        """Add the patches of ``unittest.mock`` that were started: a class of the library refers to
        them.
        """
        kind = library_type("unittest.mock", "_patch")
        self.hidden.add(id(attribute_of(kind, "_active_patches")))
        for patch in started_patches():
            self.registered[id(patch)] = Root.of_patch(patch)

    def _add_document(self) -> None:
        """Add bokeh's current document, which keeps the plots that were added to it."""
        state = loaded_object("bokeh.io.state", "_STATE")
        document = attribute_of(state, "_document")
        if document is not None:
            cut = Cut.of_root(Kind.CALL, "import bokeh.io; bokeh.io.curdoc().clear()")
            root = Root("bokeh's current document", Rank.PLACE, is_removed_as_whole=True, cut=cut)
            self.registered[id(document)] = root


_FIGURES = "matplotlib figures"
"""The noun for several figures."""


class FiguresToClose(NamedTuple):
    """The figures that pyplot keeps open."""

    managers: dict[object, object]
    """Their managers by number."""
    closing: str
    """Statement that closes all of them."""


def open_figures(names: Mapping[str, object]) -> FiguresToClose | None:
    """Return the open figures; None without any. ``names`` are the user's, to write code."""
    figures = _PyplotFigures.of_process(names, widgets.WidgetRegistry.of_process(names))
    if figures is None or not figures.managers:
        return None
    return FiguresToClose(figures.managers, figures.closing_all())


class RootsOfFigure(NamedTuple):
    """The two roots of a figure that pyplot keeps open: a line either closes it, or only takes an
    artist out of it.
    """

    closing: Root
    """Its line closes the figure."""
    inside: Root
    """Its paths lead through the figure, which stays open."""


def roots_of_figures(names: Mapping[str, object]) -> dict[int, RootsOfFigure]:
    """Return the roots of each figure that pyplot keeps open, by its identity. ``names`` are the
    user's, to write code.
    """
    figures = _PyplotFigures.of_process(names, widgets.WidgetRegistry.of_process(names))
    roots = dict[int, RootsOfFigure]()
    if figures is not None:
        for number, manager in list(figures.managers.items()):
            figure = figure_of_manager(manager)
            roots[id(figure)] = RootsOfFigure(figures.root(number), figures.root_inside(number))
    return roots


def figure_of_manager(manager: object) -> object:
    """Return the figure of one of pyplot's managers."""
    return attribute_of(attribute_of(manager, "canvas"), "figure")


def figure_of(item: object) -> object:
    """Return the figure in which an artist of matplotlib is; None for another object."""
    if not is_of_library(item, "matplotlib.artist", "Artist"):
        return None
    attributes = instance_dict(item) or {}
    for name in ("_parent_figure", "_root_figure", "figure"):  # the last one before 3.10
        figure = attributes.get(name)
        if figure is not None and figure is not item:
            return figure_of(figure)
    return item


class _PyplotFigures:
    """The figures that pyplot keeps open.

    Args:
        managers: their managers by number.
        plt: the user's expression for pyplot, after an import if the user has no name for it.
        registry: the widgets, some of which may belong to figures (``%matplotlib widget``); None
            without ipywidgets.
    """

    def __init__(
        self,
        managers: dict[object, object],
        plt: str,
        registry: widgets.WidgetRegistry | None,
    ) -> None:
        self.managers = managers
        self._plt = plt
        self._registry = registry
        self._all_widgets: set[int] = set()
        """Identities of the widgets of all figures."""
        if registry is not None:
            for manager in managers.values():
                self._all_widgets.update(map(id, self._widgets_of(manager)))

    @classmethod
    def of_process(
        cls, names: Mapping[str, object], registry: widgets.WidgetRegistry | None
    ) -> _PyplotFigures | None:
        """Return the open figures; None if pyplot is not loaded."""
        figures: Any = getattr(loaded_object("matplotlib._pylab_helpers", "Gcf"), "figs", None)
        if not is_instance(figures, dict):
            return None
        plt = "plt"
        if names.get("plt", 0) is not sys.modules.get("matplotlib.pyplot"):
            plt = "import matplotlib.pyplot as plt; plt"
        return cls(figures, plt, registry)

    def root(self, number: object) -> Root:
        """Return the root of a figure, with the line that closes the figure."""
        position = list(self.managers).index(number)
        call = f"{self._plt}.close({number})"
        if self._widgets_of(self.managers[number]):
            # ipympl closes the canvas; its toolbar, another widget, refers to the canvas.
            call = f"{self._plt}.figure({number}).canvas.toolbar.close(); {call}"
        cut = Cut(
            Kind.CALL,
            id(self.managers),
            self._plt,
            call,
            position,
            len(self.managers),
            removal_of_all=self.closing_all(),
        )
        return Root(
            f"matplotlib figure {number}",
            Rank.MODULE,
            is_removed_as_whole=True,
            cut=cut,
            plural=_FIGURES,
        )

    def root_inside(self, number: object) -> Root:
        """Return the root of a figure that stays open, for paths to objects in it such as
        ``plt.figure(1).axes[0]``.
        """
        code = f"{self._plt}.figure({number})"
        return Root(f"matplotlib figure {number}", Rank.MODULE, code=code, plural=_FIGURES)

    def registered(self) -> list[Registered]:
        """Return the figures, as the objects of this registry."""
        figures = list[Registered]()
        for number, manager in list(self.managers.items()):
            figure = figure_of_manager(manager)
            figures.append(Registered(self.root(number), [manager], (id(figure),)))
        return figures

    def closing_all(self) -> str:
        """Return the statement that closes all figures."""
        closing = f'{self._plt}.close("all")'
        if not self._all_widgets or self._registry is None:
            return closing
        if self._registry.has_only(self._all_widgets):
            return f"{self._registry.closing_all}; {closing}"
        return (
            f"[{self._plt}.figure(number).canvas.toolbar.close() "
            f"for number in {self._plt}.get_fignums()]; {closing}"
        )

    def roots_of_widgets(self) -> dict[int, Root]:
        """Return the root of each widget that belongs to a figure, by the widget's identity: that
        of the figure, because closing the figure closes its widgets.
        """
        roots = dict[int, Root]()
        for number, manager in self.managers.items():
            root = self.root(number)
            for widget in self._widgets_of(manager):
                roots[id(widget)] = root
        return roots

    def _widgets_of(self, manager: object) -> list[object]:
        """Return the canvas and the toolbar of a figure if these are registered widgets."""
        if self._registry is None:
            return []
        parts = [attribute_of(manager, "canvas"), attribute_of(manager, "toolbar")]
        return [part for part in parts if self._registry.has(part)]
