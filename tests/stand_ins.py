"""Stands in for libraries that keep objects: the parts of each that matter, in a few lines.

``install("ipywidgets")`` makes the module and its submodules importable in this process. A class
of such a module counts as a library's: users make no modules with dots in their names by hand.
"""

from __future__ import annotations

import sys
import textwrap
from types import ModuleType

_WIDGETS = """
_instances = {}

class Widget:
    def __init__(self, **traits):
        self.model_id = f"{len(_instances):08x}{id(self):x}"
        self._trait_values = dict(traits, layout=Layout() if type(self) is not Layout else None)
        self._trait_notifiers = {}
        _instances[self.model_id] = self

    @property
    def children(self):
        return self._trait_values["children"]

    def observe(self, function):
        self._trait_notifiers.setdefault("value", []).append(function)

    def close(self):
        _instances.pop(self.model_id, None)

    @classmethod
    def close_all(cls):
        for widget in list(_instances.values()):
            widget.close()

class Layout(Widget):
    pass

class Image(Widget):
    pass

class VBox(Widget):
    pass

class interactive(VBox):
    def __init__(self, function, *children):
        super().__init__(children=children)
        self.f = function
        self.result = function()
        for child in children:
            child.observe(self.update)

    def update(self, change):
        self.result = self.f()
"""
_FIGURES = """
from ipywidgets.widgets.widget import Widget

class Canvas(Widget):
    def __init__(self, figure):
        super().__init__()
        self.figure = figure
        self.manager = None

class Toolbar(Widget):
    def __init__(self, canvas):
        super().__init__()
        self.canvas = canvas

class Figure:
    def __init__(self):
        self.canvas = Canvas(self)

class FigureManager:
    def __init__(self, figure):
        self.canvas = figure.canvas
        self.canvas.manager = self
        self.canvas.toolbar = self.toolbar = Toolbar(self.canvas)

class Gcf:
    figs = {}
"""
_PYPLOT = """
from matplotlib._pylab_helpers import Figure, FigureManager, Gcf

def figure(number=None):
    if number in Gcf.figs:
        return Gcf.figs[number].canvas.figure
    made = Figure()
    Gcf.figs[len(Gcf.figs) + 1] = FigureManager(made)
    return made

def get_fignums():
    return list(Gcf.figs)

def close(which):
    numbers = list(Gcf.figs) if which == "all" else [which]
    for number in numbers:
        Gcf.figs.pop(number).canvas.close()
"""
_SOURCES = """
class ColumnDataSource:
    def __init__(self, data):
        self._property_values = {"data": dict(data)}
"""
_DOCUMENT = """
class Document:
    def __init__(self):
        self._roots = []

    def add_root(self, model):
        self._roots.append(model)

    def clear(self):
        self._roots.clear()

class State:
    def __init__(self):
        self._document = Document()

_STATE = State()
"""
_GROUP = """
class MemoryStore:
    def __init__(self):
        self._store_dict = {}

class AsyncGroup:
    def __init__(self):
        self.store = MemoryStore()

class Group:
    def __init__(self):
        self._async_group = AsyncGroup()

    def __setitem__(self, key, value):
        self._async_group.store._store_dict[key] = value
"""
_ACCELERATE = """
class ModelHook:
    def __init__(self, weights=None):
        self._weights = weights

def add_hook_to_module(module, hook):
    module._hf_hook = hook
    return module
"""
_LIBRARIES = {
    "ipywidgets": {"widgets": "", "widgets.widget": _WIDGETS},
    "matplotlib": {"_pylab_helpers": _FIGURES, "pyplot": _PYPLOT},
    "bokeh": {"models": "", "models.sources": _SOURCES, "io": "", "io.state": _DOCUMENT},
    "accelerate": {"hooks": _ACCELERATE},
    "zarr": {"core": "", "core.group": _GROUP},
}
"""The source of each module of a library, the outer modules first."""
_EXPORTED = {
    "ipywidgets": ("ipywidgets.widgets.widget", ("Widget", "Image", "VBox", "interactive")),
    "bokeh": ("bokeh.models.sources", ("ColumnDataSource",)),
    "zarr": ("zarr.core.group", ("Group",)),
}


def install(library: str) -> None:
    """Put a stand-in in the place of a library."""
    top = _module(library, "")
    for path, source in _LIBRARIES[library].items():
        module = _module(f"{library}.{path}", source)
        outer, _, name = f"{library}.{path}".rpartition(".")
        setattr(sys.modules[outer], name, module)
    place, names = _EXPORTED.get(library, (library, ()))
    for name in names:
        setattr(top, name, getattr(sys.modules[place], name))
    if library == "bokeh":
        state = sys.modules["bokeh.io.state"]._STATE
        sys.modules["bokeh.io"].curdoc = lambda: state._document  # type: ignore[attr-defined]


def _module(name: str, source: str) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)
    module.__path__ = []
    exec(textwrap.dedent(source), vars(module))
    return module
