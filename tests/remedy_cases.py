"""Places in which code leaves data, for tests of the lines that free it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A place in which an experiment leaves ``x``."""

    code: str
    """Code of the experiment, after ``x`` was made."""
    setup: str = ""
    """A cell before the experiment."""
    after: str = ""
    """Code that still works after the place was emptied."""
    kinds: tuple[str, ...] = ("array", "object")
    sees_libraries: bool = False
    """True if objects of libraries that the case imports lead to the place: all are hidden
    otherwise.
    """
    sees_all: bool = False
    """True if any object of a library may lead to it."""
    sentences: tuple[str, ...] = ()
    """The beginnings of the advice if no line can free it."""
    is_out_of_reach: bool = False
    """True if an experiment does not find an object there, because no name leads to it; ``leaks``
    does.
    """


_WIDGETS = "from tests.stand_ins import install; install('ipywidgets'); import ipywidgets"
_FIGURES = f"{_WIDGETS}; install('matplotlib'); import matplotlib.pyplot as plt"
_AXES = (
    "import matplotlib; matplotlib.use('agg'); import matplotlib.pyplot as plt; "
    "fig, ax = plt.subplots()"
)
_WITH_MASK = """
import torch
class Masked(torch.nn.Module):
    def forward(self, x):
        if self.cache is None:
            self.cache = x
        return x * self.mask
model = Masked(); model.cache = None"""
"""A module whose calls fail without a mask, and work without a cache."""
_BOKEH = "from tests.stand_ins import install; install('bokeh'); import bokeh"
_ACCELERATE = "from tests.stand_ins import install; install('accelerate')"
_ZARR = "from tests.stand_ins import install; install('zarr'); import zarr"
_KEEPING = """
import logging
class Keeping(logging.Handler):
    def __init__(self, data=None):
        super().__init__()
        self.data = data
    def emit(self, record): pass
lg = logging.getLogger("mine")
"""
"""A handler of a logger that keeps data."""


def _in_handler(logger: str) -> Case:
    """Return the case of data that a logger's handler has."""
    code = f"""
        class Keeping(logging.Handler):
            def emit(self, record): pass
        handler = Keeping()
        handler.data = x
        {logger}.addHandler(handler)
        """
    works = "logging.getLogger('mine').error('goes on')"
    return Case(code, "import logging", works, sees_libraries=True)


CASES: dict[str, Case] = {
    "a list": Case(
        "outer.append(x)", "outer = [1, 2]", after="assert [n + 1 for n in outer] == [2, 3]"
    ),
    "a tuple in a dict": Case('outer["t"] = (1, x)', "outer = {}"),
    "a tuple in a list": Case(
        "outer.append((1, x))", "outer = []", after="for first, second in outer: second + 1"
    ),
    "a dict": Case('outer["a"] = x', "outer = {}"),
    "a dict of numbers": Case("outer[3] = x", "outer = {}"),
    "a dict as a key": Case("outer[x] = 1", "outer = {}", kinds=("object",)),
    "a defaultdict": Case(
        'outer["a"].append(x)',
        "import collections; outer = collections.defaultdict(list)",
        "outer['a'].append(1)",
    ),
    "an OrderedDict": Case(
        'outer["a"] = x', "import collections; outer = collections.OrderedDict()"
    ),
    "a Counter": Case('outer["a"] = x', "import collections; outer = collections.Counter()"),
    "a ChainMap": Case('outer["a"] = x', "import collections; outer = collections.ChainMap()"),
    "a UserDict": Case('outer["a"] = x', "import collections; outer = collections.UserDict()"),
    "a UserList": Case("outer.append(x)", "import collections; outer = collections.UserList()"),
    "a set": Case("outer.add(x)", "outer = {1, 2}", kinds=("object",)),
    "a set in a dict": Case('outer["s"].add(x)', 'outer = {"s": set()}', kinds=("object",)),
    "a frozenset": Case("outer.append(frozenset([x, 3]))", "outer = []", kinds=("object",)),
    "a deque": Case("outer.append(x)", "import collections; outer = collections.deque([1, 2])"),
    "a deque alone": Case("outer.append(x)", "import collections; outer = collections.deque()"),
    "an attribute": Case(
        "outer.data = x",
        """
        class Outer: pass
        outer = Outer()
        """,
    ),
    "a nested attribute": Case(
        "outer.inner.data = x",
        """
        class Outer: pass
        outer = Outer(); outer.inner = Outer()
        """,
    ),
    "a slot": Case(
        "outer.data = x",
        """
        class Outer:
            __slots__ = ('data',)
        outer = Outer()
        """,
    ),
    "a class": Case("Outer.data = x", "class Outer: pass"),
    "a list of a class": Case(
        "Outer.data.append(x)",
        """
        class Outer:
            data = []
        """,
    ),
    "a default argument": Case(
        """
        def outer(data=x):
            return 1
        registry["f"] = outer
        """,
        "registry = {}",
    ),
    "a keyword default": Case(
        """
        def outer(*, data=x):
            return 1
        registry["f"] = outer
        """,
        "registry = {}",
    ),
    "a mutable default": Case(
        "outer(x)",
        """
        def outer(item, seen=[]):
            seen.append(item)
        """,
        "outer(1)",
    ),
    "a closure": Case(
        "outer(x)",
        """
        def make():
            data = []
            return data.append
        outer = make()
        """,
    ),
    "a closure in a list": Case(
        """
        def make(data):
            return lambda: data
        outer.append(make(x))
        """,
        "outer = []",
        "for f in outer: f()",
    ),
    "a closure's list": Case(
        "outer(x)",
        """
        def make():
            data = []
            def add(item):
                data.append(item)
            return add
        outer = make()
        """,
        "outer(1)",
    ),
    "a function's attribute": Case("outer.data = x", "def outer(): pass"),
    "a cached function": Case(
        "outer.data = x; load(1); del outer.data",
        """
        import functools
        class Outer: pass
        outer = Outer()
        @functools.lru_cache(maxsize=None)
        def load(number):
            return outer.data
        """,
    ),
    "a cached function's argument": Case(
        "load(x)",
        """
        import functools
        @functools.lru_cache
        def load(item):
            return 1
        """,
        kinds=("object",),
    ),
    "a cached method": Case(
        "model.data = x; model.load(1); del model.data",
        """
        import functools
        class Model:
            @functools.lru_cache(maxsize=None)
            def load(self, number):
                return self.data
        model = Model()
        """,
    ),
    "a cached method of a dropped object": Case(
        "model = Model(); model.data = x; model.load(1); del model",
        """
        import functools
        class Model:
            @functools.cache
            def load(self, number):
                return 1
        """,
    ),
    "a cached property": Case(
        "model.x = x; model.data; del model.x",
        """
        import functools
        class Model:
            @functools.cached_property
            def data(self):
                return self.x
        model = Model()
        """,
    ),
    "a cached static method": Case(
        "Model.load(lambda: x)",
        """
        import functools
        class Model:
            @staticmethod
            @functools.cache
            def load(make):
                return make()
        """,
    ),
    "a partial": Case("outer.append(functools.partial(print, x))", "import functools; outer = []"),
    "a partial in a dict": Case(
        'outer["f"] = functools.partial(print, data=x)', "import functools; outer = {}"
    ),
    "a finalizer": Case(
        "weakref.finalize(owner, print, x).atexit = False",
        """
        class Owner: pass
        owner = Owner()
        """,
        sees_libraries=True,
    ),
    "a context variable": Case(
        "var.set(x);", "import contextvars; var = contextvars.ContextVar('var')"
    ),
    "a context variable's dict": Case(
        'var.get()["a"] = x',
        "import contextvars; var = contextvars.ContextVar('var'); var.set({});",
    ),
    "a bound method": Case("outer.append(x.ravel)", "outer = []", kinds=("array",)),
    "a bound method of an object": Case(
        """
        class Worker:
            def work(self): pass
        worker = Worker()
        worker.data = x
        outer.append(worker.work)
        """,
        "outer = []",
        "for f in outer: f()",
    ),
    "a generator": Case(
        """
        def numbers(data):
            yield 1
            yield len(data)
        outer.append(numbers(x))
        next(outer[0])
        """,
        "outer = []",
    ),
    "a logging handler": _in_handler("logging.getLogger('mine')"),
    "a root handler": _in_handler("logging.getLogger()"),
    "a handler's buffer": Case(
        """
        record = logging.makeLogRecord({"args": (x,)})
        logging.getLogger("mine").handlers[0].buffer.append(record)
        """,
        """
        import logging, logging.handlers
        logging.getLogger("mine").addHandler(logging.handlers.MemoryHandler(100))
        """,
        "logging.getLogger('mine').error('goes on')",
        sees_libraries=True,
    ),
    "a handler next to a small one": Case(
        "lg.addHandler(Keeping(x))",
        f"{_KEEPING}lg.addHandler(Keeping())",
        "assert len(lg.handlers) == 1; lg.error('goes on')",
        kinds=("object",),
        sees_libraries=True,
    ),
    "two handlers with data": Case(
        "lg.addHandler(Keeping(x)); lg.addHandler(Keeping(np.ones(1 << 18)))",
        _KEEPING,
        "lg.error('goes on')",
        sees_libraries=True,
    ),
    "a logging filter": Case(
        """
        def only(record, data=x):
            return True
        lg.addFilter(only)
        """,
        "import logging; lg = logging.getLogger('mine')",
        "lg.error('goes on')",
        sees_libraries=True,
    ),
    "an atexit callback": Case(
        "atexit.register(keep, x)",
        """
        import atexit
        def keep(data): pass
        """,
        sentences=("end ",),
        is_out_of_reach=True,
    ),
    "a callback of IPython": Case(
        """
        def f(info, data=x): pass
        get_ipython().events.register("pre_run_cell", f)
        """,
        after="1 + 1",
        is_out_of_reach=True,
    ),
    "a bound callback of IPython": Case(
        """
        class Watcher:
            def look(self, result): pass
        watcher = Watcher()
        watcher.data = x
        get_ipython().events.register("post_run_cell", watcher.look)
        """,
        after="1 + 1",
        is_out_of_reach=True,
    ),
    "an input transformer of IPython": Case(
        """
        def same(lines, data=x):
            return lines
        get_ipython().input_transformers_post.append(same)
        """,
        after="1 + 1",
        is_out_of_reach=True,
    ),
    "a module's attribute": Case(
        "settings.data = x", "import types; settings = types.ModuleType('settings')"
    ),
    "a hidden module": Case(
        'sys.modules["hidden_mine"].data = x',
        "import sys, types; sys.modules['hidden_mine'] = types.ModuleType('hidden_mine')",
    ),
    "a hidden module's dict": Case(
        'sys.modules["hidden_mine"].CACHE["rows"] = x',
        """
        import sys, types
        sys.modules["hidden_mine"] = types.ModuleType("hidden_mine")
        sys.modules["hidden_mine"].CACHE = {}
        """,
    ),
    "a library's module": Case("json.mine = x", "import json", sees_libraries=True),
    "a builtin": Case("builtins.mine = x", "import builtins", sees_libraries=True),
    "a builtin without a name": Case("import builtins; builtins.mine = [x]", sees_libraries=True),
    "an object array": Case("outer[1] = x", "outer = np.empty(3, object)", kinds=("array",)),
    "an object array of an object": Case(
        "outer[1] = x", "outer = np.empty(3, object)", kinds=("object",)
    ),
    "a column of a data frame": Case(
        "outer['x'] = x",
        "import pandas as pd; outer = pd.DataFrame({'a': np.ones(5 << 20)})",
        "assert list(outer) == ['a'] and outer['a'].sum() == 5 << 20",
        kinds=("array",),
    ),
    "columns of a data frame": Case(
        "outer['x; y'] = x[::2]; outer[3] = x[::2]",
        "import pandas as pd; outer = pd.DataFrame({'a': np.ones(5 << 19)})",
        "assert list(outer) == ['a']",
        kinds=("array",),
    ),
    "a column of a data frame in a dict": Case(
        "outer['frame']['x'] = x",
        "import pandas as pd; outer = {'frame': pd.DataFrame({'a': np.ones(5 << 20)})}",
        "assert list(outer['frame']) == ['a']",
        kinds=("array",),
    ),
    "a column of a data frame with two names": Case(
        "outer['x'] = x",
        """
        import pandas as pd
        outer = pd.DataFrame({'a': np.ones(5 << 20)}); other = [outer]
        """,
        "assert list(outer) == ['a']",
        kinds=("array",),
    ),
    "a column of objects": Case(
        "outer['x'] = [x] + 9 * [None]",
        "import pandas as pd; outer = pd.DataFrame({'a': range(10)})",
        "assert list(outer) == ['a']",
    ),
    "a cell of a data frame": Case(
        "outer.iat[3, 1] = x",
        "import pandas as pd; outer = pd.DataFrame({'a': range(10), 'o': 10 * [None]})",
        "assert list(outer) == ['a', 'o']",
        kinds=("object",),
    ),
    "a cell of a series": Case(
        "outer.iat[3] = x",
        "import pandas as pd; outer = pd.Series(10 * [None], dtype=object)",
        kinds=("object",),
    ),
    "a variable of a data set": Case(
        "outer['a'] = ('x', x)",
        "import xarray; outer = xarray.Dataset({'o': ('p', np.ones(5 << 20))})",
        after="assert len(repr(outer)) and outer['o'].sum() > 0",
        kinds=("array",),
    ),
    "a coordinate with an index": Case(
        "outer.coords['x'] = x",
        "import xarray; outer = xarray.Dataset({'o': ('p', np.ones(5 << 20))})",
        after="assert len(repr(outer)) and 'x' not in outer.coords",
        kinds=("array",),
    ),
    "a coordinate of a labelled array": Case(
        "outer.coords['c'] = ('p', x[:2])",
        "import xarray; outer = xarray.DataArray(np.arange(2), dims='p')",
        after="assert len(repr(outer)) and outer.sum() == 1",
        kinds=("array",),
    ),
    "a note of a data set": Case(
        "outer.attrs['note'] = x",
        "import xarray; outer = xarray.Dataset({'o': ('p', np.ones(5 << 20))})",
        after="assert len(repr(outer)) and outer['o'].sum() > 0",
    ),
    "a series in a dict": Case(
        "outer['s'] = pd.Series(x)", "import pandas as pd; outer = {}", kinds=("array",)
    ),
    "the index of a data frame": Case(
        "outer.index = x.cumsum()",
        "import pandas as pd; outer = pd.DataFrame({'a': np.ones(5 << 20)})",
        "assert list(outer) == ['a'] and len(outer) == 5 << 20",
        kinds=("array",),
    ),
    "a key with a semicolon": Case("outer['a; b'] = x", "outer = {}"),
    "a timer of an event loop": Case(
        "loop.call_later(600, print, x);",
        "import asyncio; loop = asyncio.new_event_loop()",
        "assert all(timer.cancelled() for timer in loop._scheduled)",
    ),
    "a timer in a list": Case(
        "outer.append(loop.call_at(10**9, print, x))",
        "import asyncio; loop = asyncio.new_event_loop(); outer = []",
    ),
    "a timer's closure": Case(
        """
        def later(data):
            return lambda: data
        loop.call_later(600, later(x));
        """,
        "import asyncio; loop = asyncio.new_event_loop(); kept = loop.call_later(600, print)",
        "assert not kept.cancelled()",
        kinds=("array",),
    ),
    "a weak dict's value": Case(
        "key = Key(); keys.append(key); outer[key] = x",
        """
        import weakref
        outer = weakref.WeakKeyDictionary()
        keys = []
        class Key: pass
        """,
    ),
    "a named tuple": Case(
        "outer.append(Point(x, 1))",
        "import collections; Point = collections.namedtuple('Point', 'a b'); outer = []",
    ),
    "a data class": Case(
        "outer.append(Row(x))",
        """
        import dataclasses
        @dataclasses.dataclass
        class Row:
            data: object
        outer = []
        """,
    ),
    "a namespace": Case("outer.data = x", "import types; outer = types.SimpleNamespace()"),
    "a queue": Case("outer.put(x)", "import queue; outer = queue.Queue()"),
    "a local of a thread": Case("outer.data = x", "import threading; outer = threading.local()"),
    "an error": Case(
        """
        def fail(data):
            raise ValueError
        try:
            fail(x)
        except ValueError as error:
            outer.append(error)
        """,
        "outer = []",
    ),
    "a trace of sys": Case("sys.mine = x", "import sys", sees_libraries=True),
    "an excepthook": Case(
        """
        def hook(kind, error, trace, data=x): pass
        threading.excepthook = hook
        """,
        "import threading",
        is_out_of_reach=True,
        sees_libraries=True,
    ),
    "a future": Case(
        "outer.set_result(x)", "import concurrent.futures; outer = concurrent.futures.Future()"
    ),
    "an exit stack": Case(
        "outer.callback(print, x)", "import contextlib; outer = contextlib.ExitStack()"
    ),
    "a singledispatch registry": Case(
        "show.register(str, lambda item, data=x: 1)",
        """
        import functools
        @functools.singledispatch
        def show(item): return 0
        """,
        is_out_of_reach=True,
    ),
    "a map": Case("outer.append(map(len, [x]))", "outer = []"),
    "a list iterator": Case("outer.append(iter([x]))", "outer = []"),
    "a mapping proxy": Case(
        "outer['p'] = types.MappingProxyType({'a': x})", "import types; outer = {}"
    ),
    "an enum": Case(
        "Kind.A.data = x",
        """
        import enum
        class Kind(enum.Enum):
            A = 1
        """,
    ),
    "a property": Case(
        """
        def get(self, data=x):
            return 1
        Outer.value = property(get)
        """,
        "class Outer: pass",
    ),
    "a signal handler": Case(
        """
        def handler(number, frame, data=x): pass
        signal.signal(signal.SIGUSR1, handler);
        """,
        "import signal",
        sees_libraries=True,
        is_out_of_reach=True,
    ),
    "a timer": Case(
        """
        timer = threading.Timer(600, print, [x])
        timer.daemon = True
        timer.start()
        """,
        "import threading",
        "assert not any(type(thread) is threading.Timer for thread in threading.enumerate())",
    ),
    "a timer of threading in a list": Case(
        """
        timers.append(threading.Timer(600, print, [x]))
        timers[1].daemon = True
        timers[1].start()
        """,
        """
        import threading
        timers = [threading.Timer(600, print)]
        timers[0].daemon = True
        timers[0].start()
        """,
        "assert len(timers) == 1 and timers[0].is_alive(); timers[0].cancel()",
    ),
    "a timer's keyword argument": Case(
        """
        outer["t"] = threading.Timer(600, print, kwargs={"data": x})
        outer["t"].daemon = True
        outer["t"].start()
        """,
        "import threading; outer = {}",
        "assert not outer",
    ),
    "a thread pool's future": Case(
        "outer.append(pool.submit(lambda data: data, x)); outer[0].result();",
        "import concurrent.futures; pool = concurrent.futures.ThreadPoolExecutor(1); outer = []",
    ),
    "a widget": Case(
        'outer["w"] = ipywidgets.Image(value=x)', f"{_WIDGETS}; outer = {{}}", "assert not outer"
    ),
    "a widget without a name": Case("ipywidgets.Image(value=x);", _WIDGETS),
    "a widget next to another": Case(
        "ipywidgets.Image(value=x);",
        f"{_WIDGETS}; other = ipywidgets.Image()",
        "assert ipywidgets.widgets.widget._instances[other.model_id] is other",
    ),
    "a widget in a list": Case(
        "outer.append(ipywidgets.Image(value=x))",
        f"{_WIDGETS}; outer = [ipywidgets.Image()]",
        "assert len(outer) == 1",
    ),
    "a widget in an attribute": Case(
        "outer.w = ipywidgets.Image(value=x)", f"{_WIDGETS}\nclass Outer: pass\nouter = Outer()"
    ),
    "a box of widgets": Case(
        "ipywidgets.VBox(children=(ipywidgets.Image(value=x), ipywidgets.Image()));",
        f"{_WIDGETS}; other = ipywidgets.Image()",
        "assert ipywidgets.widgets.widget._instances[other.model_id] is other",
    ),
    "an inner widget's observer": Case(
        """
        slider = ipywidgets.Image()
        box = ipywidgets.VBox(children=(slider,))
        slider.observe(lambda change, data=x: None)
        del box, slider
        """,
        _WIDGETS,
    ),
    "an interactive widget": Case(
        "ipywidgets.interactive(lambda: x, ipywidgets.Image(), ipywidgets.Image());", _WIDGETS
    ),
    "a figure of widgets": Case(
        "plt.figure().data = x", _FIGURES, "assert plt.get_fignums() == []"
    ),
    "two figures of widgets": Case(
        "plt.figure().data = x; plt.figure().data = x", _FIGURES, kinds=("array",)
    ),
    "two figures next to a widget": Case(
        "plt.figure().data = x; plt.figure().data = x",
        f"{_FIGURES}; other = ipywidgets.Image()",
        "assert ipywidgets.widgets.widget._instances[other.model_id] is other",
        kinds=("array",),
    ),
    "a closed figure's toolbar": Case("plt.figure().data = x; plt.close(1)", _FIGURES),
    "a source of bokeh": Case(
        'outer["s"] = bokeh.ColumnDataSource({"a": x})', f"{_BOKEH}; outer = {{}}"
    ),
    "a source of bokeh in a list": Case(
        'outer.append(bokeh.ColumnDataSource({"a": x}))',
        f"{_BOKEH}; outer = []",
        "assert not outer",
    ),
    "bokeh's document": Case("bokeh.io.curdoc().add_root(x)", _BOKEH),
    "a group of zarr": Case(
        'outer["g"] = zarr.Group(); outer["g"]["a"] = x', f"{_ZARR}; outer = {{}}"
    ),
    "a group of zarr in a list": Case(
        'outer.append(zarr.Group()); outer[0]["a"] = x', f"{_ZARR}; outer = []"
    ),
    "an older object of a library in a list": Case(
        "outer[1].rate = x",
        "import argparse; outer = [argparse.Namespace(rate=each) for each in range(3)]",
        "assert [each.rate for each in outer[::2]] == [0, 2]; assert len(outer) == 3",
    ),
    "older objects of libraries in a dict": Case(
        'outer["args"].data = x; outer["parser"].data = x',
        """
        import argparse
        outer = {"args": argparse.Namespace(rate=1), "parser": argparse.ArgumentParser()}
        """,
        "assert outer['args'].rate == 1; outer['parser'].format_usage()",
    ),
    "a private attribute of an older object of a library": Case(
        "outer[0]._data = x",
        "import argparse; outer = [argparse.Namespace(rate=1)]",
        "assert outer[0].rate == 1",
    ),
    "a buffer of an older model in a list": Case(
        'outer[1].register_buffer("data", torch.from_numpy(x))',
        "import torch; outer = [torch.nn.Linear(2, 2) for _ in range(3)]",
        "assert len(outer) == 3; outer[1](torch.ones(2))",
        kinds=("array",),
    ),
    "the attributes of an older frame in a list": Case(
        'outer[1].attrs["data"] = x',
        "import pandas; outer = [pandas.DataFrame({'a': [1]}) for _ in range(3)]",
        "assert [len(each) for each in outer] == [1, 1, 1]",
    ),
    "a list in a cell of an older frame": Case(
        'outer.at[1, "a"].append(x)',
        "import pandas; outer = pandas.DataFrame({'a': [[1], [2]], 'b': [[3], [4]]})",
        "assert outer.to_dict('list') == {'a': [[1], [2]], 'b': [[3], [4]]}",
    ),
    "a list in a cell of an older frame in a list": Case(
        'outer[0].at[1, "a"].append(x)',
        "import pandas; outer = [pandas.DataFrame({'a': [[1], [2]]})]",
        "assert outer[0].to_dict('list') == {'a': [[1], [2]]}",
    ),
    "a list in an older series": Case(
        "outer[1].append(x)",
        "import pandas; outer = pandas.Series([[1], [2]])",
        "assert outer.tolist() == [[1], [2]]",
        kinds=("array",),
    ),
    "a dict in an older series": Case(
        'outer[1]["data"] = x',
        "import pandas; outer = pandas.Series([{}, {}])",
        "assert outer.tolist() == [{}, {}]",
        kinds=("array",),
    ),
    "an element of an older series": Case(
        "outer.iat[1] = x",
        "import pandas; outer = pandas.Series([[1], None])",
        "assert outer.tolist() == [[1], None]",
    ),
    "dicts in a hidden module's list": Case(
        'sys.modules["hidden_mine"].RUNS += [{"data": x}, {"data": x}, {"data": x}]',
        """
        import sys, types
        sys.modules["hidden_mine"] = types.ModuleType("hidden_mine")
        sys.modules["hidden_mine"].RUNS = []
        """,
    ),
    "neighbours in a hidden module's dict": Case(
        "sys.modules['hidden_mine'].ROWS.update(dict.fromkeys(range(8), x))",
        """
        import sys, types
        sys.modules["hidden_mine"] = types.ModuleType("hidden_mine")
        sys.modules["hidden_mine"].ROWS = {"kept": 1}
        """,
        "assert sys.modules['hidden_mine'].ROWS['kept'] == 1",
    ),
    "many times a list": Case("outer.extend([x, 1, x, 2, x])", "outer = [0]", "assert 1 in outer"),
    "twice a dict": Case("outer.update(a=x, b=x)", "outer = {'c': 1}", "assert 'c' in outer"),
    "twice a list in a dict": Case("outer['a'] += [x, x]", "outer = {'a': []}"),
    "neighbours of two dicts": Case(
        "outer.update(dict.fromkeys('abcdef', x)); other.update(dict.fromkeys('abcdef', x))",
        "outer = {'kept': 1}; other = {'kept': 1}",
        "assert list(outer) == list(other) == ['kept']",
    ),
    "places of two lists": Case(
        "outer.extend([x, 1] * 6); other.extend([x, 1] * 6)",
        "outer = []; other = []",
        "assert outer == other == [1] * 6",
    ),
    "many times a list next to others": Case("outer.extend([x, 1] * 60)", "outer = [0]"),
    "many times a dict next to others": Case(
        "outer.update({number: x if number % 2 else 1 for number in range(100)})", "outer = {}"
    ),
    "two attributes": Case(
        "outer.a = x; outer.b = x",
        """
        class Outer: pass
        outer = Outer(); outer.c = 1
        """,
    ),
    "two attributes with one list": Case(
        "outer.a = outer.b = [x]",
        """
        class Outer: pass
        outer = Outer()
        """,
    ),
    "two slots": Case(
        "outer.a = x; outer.b = x",
        """
        class Outer:
            __slots__ = ('a', 'b')
        outer = Outer()
        """,
    ),
    "two attributes of a class": Case("Outer.a = x; Outer.b = x", "class Outer: pass"),
    "two attributes of a function": Case("outer.a = x; outer.b = x", "def outer(): pass"),
    "two attributes of a thread's local": Case(
        "outer.a = x; outer.b = x", "import threading; outer = threading.local()"
    ),
    "two fields of a frozen data class": Case(
        "object.__setattr__(outer, 'data', x); object.__setattr__(outer, 'more', x)",
        """
        import dataclasses
        @dataclasses.dataclass(frozen=True)
        class Outer:
            data: object = None
            more: object = None
        outer = Outer()
        """,
    ),
    "two variables of a closure": Case(
        "put(x)",
        """
        def make():
            data = other = None
            def put(value):
                nonlocal data, other
                data = other = value
            return put
        put = make()
        """,
        "put(1)",
    ),
    "two elements of an object array": Case(
        "outer[1, 0] = outer[0, 1] = x", "outer = np.empty((2, 2), object)", kinds=("object",)
    ),
    "many elements of an object array": Case(
        "outer[1:5, :3] = x",
        "outer = np.empty((10, 10), object); outer[0, 0] = 1",
        "assert outer[0, 0] == 1",
        kinds=("object",),
    ),
    "two fields of a structured array": Case(
        "outer['f'][0] = x; outer['g'][1] = x",
        "outer = np.empty(100, dtype=[('g', object), ('f', object)])",
        kinds=("object",),
    ),
    "all of two fields of a structured array": Case(
        "outer['f'] = x; outer['g'] = x",
        "outer = np.empty(100, dtype=[('g', object), ('f', object)])",
        kinds=("object",),
    ),
    "two cells of a data frame": Case(
        "outer.iat[3, 1] = x; outer.iat[4, 1] = x",
        "import pandas as pd; outer = pd.DataFrame({'a': range(10), 'o': 10 * [None]})",
        "assert list(outer) == ['a', 'o']",
        kinds=("object",),
    ),
    "pairs with one object": Case(
        "for number in range(3): outer.append((number, x))", "outer = [0]", "assert outer == [0]"
    ),
    "dicts with one object": Case(
        "outer.append({'a': x}); outer.append(3); outer.append({'b': x})", "outer = []"
    ),
    "instances with one object": Case(
        "outer[1] = Result(x); outer[2] = Result(x)",
        """
        class Result:
            def __init__(self, data):
                self.data = data
        outer = {0: 0}
        """,
        "assert outer[0] == 0",
        kinds=("object",),
    ),
    "a part of an object that another line removes": Case(
        """
        y = np.ones(2**18); outer["parts"].append(Frozen(x, [y])); outer["other"] = Frozen(y, 1)
        """,
        """
        class Frozen:
            def __init__(self, data, more):
                vars(self).update(data=data, more=more)
            def __setattr__(self, name, value):
                raise TypeError
        outer = {"parts": [Frozen(1, 2)]}
        """,
        "assert len(outer['parts']) == 1",
        kinds=("array",),
    ),
    "an object and a pair with it": Case("outer.append(x); outer.append((1, x))", "outer = []"),
    "pairs in two containers": Case(
        "outer.append((1, x)); other['a'] = (2, x)", "outer = []; other = {}"
    ),
    "a value and a key": Case("outer[x] = x", "outer = {}", kinds=("object",)),
    "a context variable and a dict": Case(
        "outer['x'] = x; var.set(x);",
        "import contextvars; outer = {}; var = contextvars.ContextVar('var')",
    ),
    "an OrderedDict with odd keys": Case(
        "outer[Key()] = x; outer.move_to_end(1)",
        """
        import collections
        class Key: pass
        outer = collections.OrderedDict({1: 2})
        """,
        "assert list(outer) == [1]",
    ),
    "several odd keys of an OrderedDict": Case(
        "outer.update({Key(): x for _ in range(8)}); outer.move_to_end(1)",
        """
        import collections
        class Key: pass
        class Outer(collections.OrderedDict): pass
        outer = Outer({1: 2})
        """,
        "assert list(outer) == [1]",
    ),
    "a dict that lists its keys backwards": Case(
        "outer[Key()] = x",
        """
        class Key: pass
        class Outer(dict):
            def __iter__(self):
                return iter(list(self.keys())[::-1])
        outer = Outer({1: 2})
        """,
        "assert list(outer) == [1]",
    ),
    "a table of objects": Case(
        "outer[1, 0] = x", "outer = np.empty((2, 2), object)", kinds=("object",)
    ),
    "tuples in a list": Case(
        "outer += [(1, x), 7, (2, x), 8, (3, x)]",
        "outer = [0]",
        "assert outer == [0, 7, 8]",
        kinds=("array",),
    ),
    "many tuples in a dict": Case(
        "outer.update({number: (number, x) for number in range(30)})",
        "outer = {'kept': 0}",
        "assert outer == {'kept': 0}",
        kinds=("array",),
    ),
    "partials of two dicts": Case(
        "outer['a'] = functools.partial(print, x); other['b'] = functools.partial(len, x)",
        "import functools; outer, other = {'kept': 1}, {}",
        "assert outer == {'kept': 1} and not other",
        kinds=("array",),
    ),
    "records of a handler": Case(
        "for number in range(5): lg.warning('got %s', (x, number))",
        """
        import logging, logging.handlers
        lg = logging.getLogger("mine")
        lg.propagate = False
        lg.addHandler(logging.handlers.MemoryHandler(1000))
        lg.warning("kept")
        """,
        "assert lg.handlers[0].buffer[0].msg == 'kept'; lg.warning('goes on')",
        kinds=("array",),
        sees_libraries=True,
    ),
    "a logger's attribute": Case(
        "lg.data = x", "import logging; lg = logging.getLogger('mine')", "lg.error('goes on')"
    ),
    "a library's object with many paths": Case(
        "outer.my_data = x",
        "import configparser; outer = configparser.ConfigParser()",
        "outer.read_string('[a]\\nb = 1'); assert outer.getint('a', 'b') == 1",
    ),
    "a library's class": Case(
        "json.JSONEncoder.my_data = x", "import json", "json.dumps({})", sees_libraries=True
    ),
    "a dict of a library's class": Case(
        "json.JSONEncoder.my_data['a'] = x",
        "import json; json.JSONEncoder.my_data = {}",
        "assert json.JSONEncoder.my_data == {}",
        sees_libraries=True,
    ),
    "a library's function": Case("json.dumps.my_data = x", "import json", sees_libraries=True),
    "a hidden attribute of a library's object": Case(
        "outer._my_data = x",
        "import json; outer = json.JSONEncoder()",
        "assert outer.encode({}) == '{}'",
    ),
    "IPython's shell": Case("get_ipython().my_data = x", after="1 + 1"),
    "IPython's hidden names": Case("get_ipython().user_ns_hidden['my_data'] = x"),
    "a formatter of IPython": Case(
        """
        printers = get_ipython().display_formatter.formatters["text/plain"]
        printers.for_type(Outer, lambda item, printer, cycle, data=x: printer.text("an outer"))
        del printers
        """,
        "class Outer: pass",
        """
        formatters = get_ipython().display_formatter.formatters
        assert formatters["text/plain"](1) == "1"
        """,
        is_out_of_reach=True,
    ),
    "a completer of IPython": Case(
        """
        def complete(shell, event, data=x):
            return []
        get_ipython().set_hook("complete_command", complete, str_key="zz")
        get_ipython().Completer.use_jedi = False  # takes a second
        """,
        after="get_ipython().complete('pri')",
        is_out_of_reach=True,
    ),
    "an error handler of IPython": Case(
        """
        def handle(shell, kind, error, trace, tb_offset=None, data=x):
            return []
        get_ipython().set_custom_exc((ZeroDivisionError,), handle)
        """,
        is_out_of_reach=True,
    ),
    "a closure that assigns": Case(
        "put(x)",
        """
        def make():
            data = None
            def put(value):
                nonlocal data
                data = value
            return put
        put = make()
        """,
        "put(1)",
    ),
    "a frozen data class": Case(
        "object.__setattr__(outer, 'data', x)",
        """
        import dataclasses
        @dataclasses.dataclass(frozen=True)
        class Outer:
            data: object = None
        outer = Outer()
        """,
        "assert outer.data is None",
    ),
    "a partial method": Case(
        "Outer.show = functools.partialmethod(print, x)",
        """
        import functools
        class Outer: pass
        """,
    ),
    "a descriptor": Case(
        "outer.data = x",
        """
        import weakref
        class Stored:
            def __init__(self):
                self.values = weakref.WeakKeyDictionary()
            def __get__(self, owner, kind):
                return self.values[owner]
            def __set__(self, owner, value):
                self.values[owner] = value
        class Outer:
            data = Stored()
        outer = Outer()
        """,
        "outer.data = 1; assert outer.data == 1",
    ),
    "calls of a mock": Case(
        "outer(x);",
        "import unittest.mock; outer = unittest.mock.Mock(return_value=3); outer.limit = 4",
        "assert outer() == 3 and outer.limit == 4",
    ),
    "calls of a mock's method": Case(
        "outer.fit(x); outer.fit(data=x);",
        "import unittest.mock; outer = unittest.mock.MagicMock(return_value=3)",
        "assert outer() == 3; outer.fit(1)",
    ),
    "calls of a result of a mock": Case(
        "outer.load().fit(x);",
        "import unittest.mock; outer = unittest.mock.Mock(); outer.load().fit(1); outer.limit = 4",
        "assert outer.limit == 4",
    ),
    "calls of a mock in a dict": Case(
        "outer['m'](x);",
        "import unittest.mock; outer = {'m': unittest.mock.Mock(return_value=4)}",
        "assert outer['m']() == 4",
    ),
    "a mock's result": Case(
        "outer.return_value = x",
        "import unittest.mock; outer = unittest.mock.Mock(); outer.limit = 4",
        "assert outer.limit == 4; outer().anything",
    ),
    "a mock's side effect": Case(
        "outer.side_effect = [x]",
        "import unittest.mock; outer = unittest.mock.Mock(return_value=3)",
        "assert outer() == 3",
    ),
    "a started patch": Case(
        "patch = mock.patch('json.dumps', x); patch.start(); patches.append(patch)",
        "import json, unittest.mock as mock; patches = []; original = json.dumps",
        "assert json.dumps is original",
    ),
    "a started patch without a name": Case(
        "mock.patch('json.dumps', x).start();",
        "import json, unittest.mock as mock; original = json.dumps",
        "assert json.dumps is original",
        sees_libraries=True,
    ),
    "a cache of re": Case(
        "re._cache[str, 'key', 0] = x", "import re", "re.compile('a')", sees_libraries=True
    ),
    "a cache of linecache": Case(
        "linecache.cache['mine'] = (1, None, [x], 'mine')", "import linecache", sees_libraries=True
    ),
    "a filter of warnings": Case(
        "warnings.filters.append(('ignore', None, Warning, None, x))",
        "import warnings",
        sees_libraries=True,
    ),
    "a reducer of copyreg": Case(
        """
        def reduce(item, data=x): pass
        copyreg.pickle(Outer, reduce)
        """,
        """
        import copyreg
        class Outer: pass
        """,
        is_out_of_reach=True,
        sees_libraries=True,
    ),
    "a callback of the collector": Case(
        """
        def callback(phase, info, data=x): pass
        gc.callbacks.append(callback)
        """,
        "import gc",
        is_out_of_reach=True,
        sees_libraries=True,
    ),
    "a profile function": Case(
        """
        def profile(frame, event, argument, data=x): pass
        sys.setprofile(profile)
        """,
        "import sys",
        is_out_of_reach=True,
    ),
    "a profile function of threads": Case(
        """
        def profile(frame, event, argument, data=x): pass
        threading.setprofile(profile)
        """,
        "import threading",
        is_out_of_reach=True,
        sees_libraries=True,
    ),
    "a factory of log records": Case(
        """
        def make(*arguments, data=x, **options):
            return logging.LogRecord(*arguments, **options)
        logging.setLogRecordFactory(make)
        """,
        "import logging",
        "logging.getLogger('mine').error('goes on')",
        is_out_of_reach=True,
        sees_libraries=True,
    ),
    "a kept finalizer": Case(
        "outer.append(weakref.finalize(owner, print, x)); outer[0].atexit = False",
        """
        import weakref
        class Owner: pass
        owner = Owner(); outer = []
        """,
        sees_libraries=True,
    ),
    "a list of a thread's local": Case(
        "outer.items.append(x)",
        "import threading; outer = threading.local(); outer.items = [1]",
        "assert outer.items == [1]",
    ),
    "a context variable without a name": Case(
        "contextvars.ContextVar('my_variable').set(x);", "import contextvars"
    ),
    "a row factory": Case(
        """
        def row(cursor, values, data=x):
            return values
        outer.row_factory = row
        """,
        "import sqlite3; outer = sqlite3.connect(':memory:')",
        "assert outer.execute('select 1').fetchall() == [(1,)]",
    ),
    "an adapter of sqlite": Case(
        """
        def adapt(value, data=x):
            return ""
        sqlite3.register_adapter(complex, adapt)
        """,
        "import sqlite3",
        is_out_of_reach=True,
        sees_libraries=True,
    ),
    "the attrs of a data frame": Case(
        "outer.attrs['a'] = x",
        "import pandas as pd; outer = pd.DataFrame({'a': [1]})",
        "assert list(outer) == ['a']",
    ),
    "an attribute of a data frame": Case(
        "object.__setattr__(outer, 'my_data', x)",
        "import pandas as pd; outer = pd.DataFrame({'a': [1]})",
        "assert list(outer) == ['a']",
    ),
    "a private attribute": Case(
        "outer._data = x",
        """
        class Outer: pass
        outer = Outer()
        """,
    ),
    "a private attribute of a library": Case(
        "add_hook_to_module(outer['model'], ModelHook({'weight': x}));",
        f"""
        {_ACCELERATE}
        from accelerate.hooks import ModelHook, add_hook_to_module
        class Model: pass
        outer = {{'model': Model()}}; model = outer['model']
        """,
        "assert model._hf_hook._weights['weight'] is not None",
        sentences=("let accelerate remove it",),
    ),
    "a private attribute of a library on a library's object": Case(
        "add_hook_to_module(outer, ModelHook(x));",
        f"""
        {_ACCELERATE}
        from accelerate.hooks import ModelHook, add_hook_to_module
        import json; outer = json.JSONEncoder()
        """,
        "outer._hf_hook",
        sentences=("let accelerate remove it",),
    ),
    "a private attribute with a container": Case(
        "outer._cache = {'a': x}",
        """
        class Outer: pass
        outer = Outer()
        """,
    ),
    "a registry of a class": Case(
        "Outer(x)",
        """
        class Outer:
            made = []
            def __init__(self, data):
                self.data = data
                Outer.made.append(self)
        """,
        "for outer in Outer.made: outer.data",
    ),
    "a memo of a decorator": Case(
        "load(1, x)",
        """
        import functools
        def remember(function):
            known = {}
            @functools.wraps(function)
            def wrapper(key, value):
                if key not in known:
                    known[key] = function(value)
                return known[key]
            return wrapper
        @remember
        def load(value):
            return value
        """,
        "assert load(1, 5) == 5",
    ),
    "a hidden module's cache": Case(
        "sys.modules['hidden_mine'].CACHE['rows'] = x",
        """
        import sys, types
        hidden = types.ModuleType("hidden_mine")
        exec("CACHE = {}\\ndef load(key):\\n    return CACHE.setdefault(key, 1)", vars(hidden))
        sys.modules["hidden_mine"] = hidden
        del hidden
        """,
        "assert sys.modules['hidden_mine'].load('rows') == 1",
    ),
    "a priority queue": Case(
        "outer.put((1, x))",
        "import queue; outer = queue.PriorityQueue()",
        "outer.put((2, 3)); assert outer.get() == (2, 3)",
    ),
    "a scheduler": Case(
        "outer.enter(600, 1, print, (x,));",
        "import sched; outer = sched.scheduler()",
        "assert outer.empty()",
    ),
    "a queue next to others": Case(
        "outer.put(x); outer.put(2); outer.put(x);",
        "import queue; outer = queue.Queue(); outer.put(1)",
        """
        assert outer.unfinished_tasks == 2
        assert [outer.get(), outer.get()] == [1, 2]
        outer.task_done(); outer.task_done(); outer.join()
        """,
    ),
    "a full queue with a waiting thread": Case(
        "outer.put(x); producer.start();",
        """
        import queue, threading
        outer = queue.Queue(2); outer.put(1)
        producer = threading.Thread(target=outer.put, args=[2], daemon=True)
        """,
        "producer.join(60); assert not producer.is_alive(); assert list(outer.queue) == [1, 2]",
    ),
    "a stack of threads": Case(
        "outer.put(x)",
        "import queue; outer = queue.LifoQueue(); outer.put(1)",
        "assert outer.get() == 1; outer.task_done(); outer.join()",
    ),
    "a queue with tasks": Case(
        "outer.put(x)",
        "import queue; outer = queue.Queue()",
        "assert outer.empty(); outer.join()",
    ),
    "a priority queue next to others": Case(
        "outer.put((1, x)); [outer.put((n, 0)) for n in (9, 2, 10, 11, 3)];",
        "import queue; outer = queue.PriorityQueue()",
        "assert [outer.get()[0] for _ in range(5)] == [2, 3, 9, 10, 11]",
    ),
    "a simple queue": Case(
        "outer.put(x); outer.put(2)",
        "import queue; outer = queue.SimpleQueue(); outer.put(1)",
        "assert [outer.get(), outer.get()] == [1, 2]",
    ),
    "a simple queue alone": Case(
        "outer.put(x)", "import queue; outer = queue.SimpleQueue()", "assert outer.empty()"
    ),
    "a queue of asyncio": Case(
        "outer.put_nowait(x); outer.put_nowait(2)",
        "import asyncio; outer = asyncio.Queue(); outer.put_nowait(1)",
        """
        assert [outer.get_nowait(), outer.get_nowait()] == [1, 2]
        outer.task_done(); outer.task_done()
        assert outer._finished.is_set()
        """,
    ),
    "a queue of asyncio alone": Case(
        "outer.put_nowait(x)",
        "import asyncio; outer = asyncio.Queue()",
        "assert outer.empty() and outer._finished.is_set()",
    ),
    "a priority queue of asyncio": Case(
        "outer.put_nowait((1, x)); [outer.put_nowait((n, 0)) for n in (9, 2, 10, 11, 3)];",
        "import asyncio; outer = asyncio.PriorityQueue()",
        "assert [outer.get_nowait()[0] for _ in range(5)] == [2, 3, 9, 10, 11]",
    ),
    "a heap": Case(
        "heapq.heappush(outer, (1, x)); heapq.heappush(outer, (3.5, x))",
        """
        import heapq
        outer = [(0, 0)]
        for number in (3, 7, 8, 4):
            heapq.heappush(outer, (number, number))
        """,
        "assert [heapq.heappop(outer)[0] for _ in range(5)] == [0, 3, 4, 7, 8]",
    ),
    "a sorted list": Case(
        "bisect.insort(outer, (1, x), key=lambda pair: pair[0])",
        "import bisect; outer = [(0, 0), (2, 2), (3, 3)]",
        "assert outer == [(0, 0), (2, 2), (3, 3)]",
    ),
    "a scheduler next to others": Case(
        "outer.enter(600, 1, print, (x,)); outer.enter(900, 1, print, (1,));",
        "import sched; outer = sched.scheduler(); outer.enter(100, 1, print, (1,));",
        "assert [event.argument for event in outer.queue] == [(1,), (1,)]",
    ),
    "a pool's waiting call": Case(
        "pool.submit(len, [x]);",
        """
        import concurrent.futures, threading
        gate = threading.Event()
        pool = concurrent.futures.ThreadPoolExecutor(1); pool.submit(gate.wait);
        """,
        "gate.set(); assert pool.submit(len, [1]).result(60) == 1",
    ),
    "a buffer with a condition": Case(
        "outer.items.append(x); outer.items.append(2)",
        """
        import collections, threading
        class Buffer:
            def __init__(self):
                self.items = collections.deque([1])
                self.changed = threading.Condition()
        outer = Buffer()
        """,
        "assert list(outer.items) == [1, 2]",
    ),
    "a buffer with a semaphore": Case(
        "outer.items.append(x); outer.count.release()",
        """
        import collections, threading
        class Buffer:
            def __init__(self):
                self.items = collections.deque()
                self.count = threading.Semaphore(0)
        outer = Buffer()
        """,
        sentences=("let your code take it",),
    ),
    "an exit stack next to others": Case(
        "outer.callback(print, x)",
        "import contextlib; outer = contextlib.ExitStack(); outer.callback(print, 1)",
        sentences=("close() it when",),
    ),
    "two finalizers": Case(
        """
        data = [np.ones(1 << 18)]; watched.append(weakref.ref(data[0]))
        weakref.finalize(owner, print, x).atexit = False
        weakref.finalize(owner, len, data).atexit = False
        """,
        """
        import weakref
        class Owner: pass
        owner = Owner(); other = weakref.finalize(owner, print, 1); other.atexit = False
        """,
        "assert other.alive",
        sees_libraries=True,
    ),
    "two callbacks of IPython": Case(
        """
        def first(info, data=x): pass
        def second(info, data=np.ones(1 << 18)): pass
        watched.append(weakref.ref(second.__defaults__[0]))
        for function in (first, second):
            get_ipython().events.register("pre_run_cell", function)
        """,
        after="1 + 1",
        is_out_of_reach=True,
    ),
    "two images in axes": Case(
        """
        ax.imshow(x.reshape(1024, -1));
        ax.imshow(np.ones((512, 512))); watched.append(weakref.ref(ax.images[1]))
        """,
        f"{_AXES}; line, = ax.plot([1, 2])",
        "assert list(ax.lines) == [line] and not len(ax.images); fig.canvas.draw()",
        kinds=("array",),
    ),
    "several odd keys": Case(
        """
        outer[Key()] = x
        outer[Key()] = Big(1 << 21)
        watched.append(weakref.ref(list(outer.values())[2]))
        outer[Key()] = 5
        """,
        """
        class Key: pass
        outer = {Key(): 1}
        """,
        "assert list(outer.values()) == [1, 5]",
    ),
    "a named value next to other values": Case(
        """
        outer["a"] = x
        for key in "bc":
            outer[key] = np.ones(1 << 17)
            watched.append(weakref.ref(outer[key]))
        outer["d"] = 5
        """,
        "outer = {'z': 1}",
        "assert outer == {'z': 1, 'd': 5}",
    ),
    "three attributes, one of them a list": Case(
        "outer.empty = [x]; outer.items.append(x); outer.data = (x,)",
        """
        class Outer:
            def __init__(self):
                self.empty = self.data = None
                self.items = [1]
        outer = Outer(); assert vars(outer)
        """,
        "assert outer.items == [1]",
    ),
    "an argument of a partial": Case(
        "outer['f'].keywords['data'] = x",
        "import functools; outer = {'f': functools.partial(print, data=1), 'kept': 1}",
        "assert outer == {'kept': 1}",
    ),
    "a list in a partial": Case(
        "outer.keywords['data'].append(x)",
        "import functools; outer = functools.partial(len, data=[1])",
        "assert outer.keywords == {'data': [1]}",
    ),
    "a dict that refuses del": Case(
        "outer['f'] = Frozen(a=x)",
        """
        class Frozen(dict):
            def __delitem__(self, key):
                raise TypeError("frozen")
            clear = pop = popitem = __delitem__
        outer = {1: 1}
        """,
        "assert outer == {1: 1}",
    ),
    "a list that refuses del": Case(
        "list.append(outer, x)",
        """
        class Frozen(list):
            def __delitem__(self, position):
                raise TypeError("frozen")
        outer = Frozen([1])
        """,
        "assert 'outer' not in globals()",
    ),
    "a dict that deletes by its base": Case(
        "outer['a'] = x",
        """
        class Noted(dict):
            def __delitem__(self, key):
                deleted.append(key)
                super().__delitem__(key)
        outer, deleted = Noted(b=1), []
        """,
        "assert outer == {'b': 1} and deleted == ['a']",
    ),
    "a read-only array of objects": Case(
        "outer[1] = x; outer.flags.writeable = False",
        "outer = np.empty(3, object)",
        "assert 'outer' not in globals()",
    ),
    "a dict behind a mapping proxy": Case(
        "put('a', x);",
        """
        import types
        hidden = {1: 1}
        proxy = types.MappingProxyType(hidden); put = hidden.setdefault
        del hidden
        """,
        "assert dict(proxy) == {1: 1}; put(2, 2); assert proxy[2] == 2",
    ),
    "a mapping proxy in two places": Case(
        "outer['p'] = outer['q'] = types.MappingProxyType({'a': x})",
        "import types; outer = {}",
        "assert not outer",
    ),
    "a list behind its method": Case(
        "put(x)",
        """
        def make():
            return [1].append
        put = make()
        """,
        "assert put.__self__ == [1]; put(2)",
    ),
    "a function of a scheduler of torch": Case(
        "outer['s'].lr_lambdas[0] = lambda epoch, data=x: 1.0",
        """
        import torch
        weight = torch.nn.Parameter(torch.ones(3)); optimizer = torch.optim.SGD([weight])
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
        outer = {'s': scheduler, 'kept': 1}; del scheduler
        """,
        "assert outer == {'kept': 1}; weight.sum().backward(); optimizer.step()",
        kinds=("tensor",),
    ),
    "a loss next to an older one": Case(
        "outer.append((x * weight).sum())",
        """
        import torch
        weight = torch.nn.Parameter(torch.ones(1)); outer = [(weight * 2).sum()]
        """,
        "(older,) = outer; older.backward()",
        kinds=("tensor",),
    ),
    "entries of a dict next to a variable called key": Case(
        "outer['b'] = x; outer['c'] = x[:]",
        "outer = {'a': 1}; key = _key = position = item = 'mine'",
        "assert (outer, key, position, item) == ({'a': 1}, 'mine', 'mine', 'mine')",
        kinds=("array",),
    ),
    "an average that users add to an optimizer's state": Case(
        "optimizer.state[weight]['average'] = x",
        """
        import torch
        weight = torch.nn.Parameter(torch.ones(3)); optimizer = torch.optim.Adam([weight])
        weight.sum().backward(); optimizer.step()
        """,
        "assert 'exp_avg' in optimizer.state[weight]; weight.sum().backward(); optimizer.step()",
        kinds=("tensor",),
    ),
    "a generator that has begun": Case(
        "outer['g'] = numbers(x); next(outer['g']);",
        """
        def numbers(data):
            yield 1
            yield data
        outer = {}
        """,
    ),
    "a context manager": Case(
        "manager = opened(x); manager.__enter__(); outer.append(manager)",
        """
        import contextlib
        @contextlib.contextmanager
        def opened(data):
            yield data
        outer = []
        """,
    ),
    "a buffer of a model": Case(
        "model.register_buffer('kept', x, persistent=False)",
        "import torch; model = torch.nn.Linear(2, 2)",
        "model(torch.ones(1, 2)); model.state_dict()",
        kinds=("tensor",),
    ),
    "an object that its session has by key and in a list": Case(
        """
        made = Mapped(session, 2)
        made.data = x
        watched.append(weakref.ref(made))
        """,
        """
        class Session:
            def __init__(self):
                self.identity = {}
                self.new = []
        class Mapped:
            def __init__(self, session, key):
                session.identity["Mapped", key] = self
                session.new.append(self)
                self.session = session
        session = Session()
        older = Mapped(session, 1)
        """,
        after="assert session.new == list(session.identity.values()) == [older]",
        kinds=("object",),  # the line of the array leaves the object around it
    ),
    "a parameter of two new modules in an older one": Case(
        """
        one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        one.weight = two.weight = torch.nn.Parameter(x)
        model.one, model.two = one, two
        watched.append(weakref.ref(one.weight))
        """,
        "import torch; model = torch.nn.Module(); model.body = torch.nn.Linear(2, 2)",
        "model.body(torch.ones(1, 2)); model.state_dict()",
        kinds=("tensor",),
    ),
    "a new module at the end of an older one": Case(
        """
        model.append(torch.nn.Linear(2, 2))
        model[1].weight = torch.nn.Parameter(x)
        watched.append(weakref.ref(model[1].weight))
        """,
        "import torch; model = torch.nn.Sequential(torch.nn.Linear(2, 2))",
        "model(torch.ones(1, 2))",
        kinds=("tensor",),
    ),
    "a buffer that forward reads": Case(
        "model.mask = x",
        f"{_WITH_MASK}; model.register_buffer('mask', torch.ones(1))",
        kinds=("tensor",),
        sentences=("assign something smaller to model.mask: methods of Masked read it",),
    ),
    "a tensor that forward reads": Case(
        "model.mask = x",
        f"{_WITH_MASK}; model.mask = torch.ones(1)",
        kinds=("tensor",),
        sentences=("assign something smaller to model.mask: methods of Masked read it",),
    ),
    "a cache that forward makes again": Case(
        "model.cache = x",
        f"{_WITH_MASK}; model.mask = 1; del model.cache; model.register_buffer('cache', None)",
        "model(torch.ones(1))",
        kinds=("tensor",),
    ),
    "an attribute of a layer": Case(
        "layer.last = x",
        "import torch; layer = torch.nn.Linear(2, 2)",
        "layer(torch.ones(1, 2))",
    ),
    "a buffer of a part called state": Case(
        "model.state.register_buffer('kept', x, persistent=False)",
        """
        import torch
        model = torch.nn.Module()
        model.state = torch.nn.Linear(2, 2)
        """,
        "model.state(torch.ones(1, 2))",
        kinds=("tensor",),
    ),
    "a list of a model": Case(
        "model.outputs.append(x)",
        "import torch; model = torch.nn.Linear(2, 2); model.outputs = [1]",
        "assert model.outputs == [1]; model(torch.ones(1, 2))",
        kinds=("tensor",),
    ),
    "a hook of a model": Case(
        "model[0].register_forward_hook(lambda model, inputs, output, data=x: None);",
        "import torch; model = torch.nn.Sequential(torch.nn.Linear(2, 2))",
        "model(torch.ones(1, 2))",
        kinds=("tensor",),
    ),
    "a recorder of several modules' hooks": Case(
        """
        class Recorder:
            def hook(self, model, inputs, output):
                pass
        recorder = Recorder()
        recorder.data = x
        for layer in model.modules():
            layer.register_forward_hook(recorder.hook);
        """,
        "import torch; model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())",
        "model(torch.ones(1, 2))",
        kinds=("tensor",),
    ),
    "what a hook stores": Case(
        "model(x);",
        """
        import torch
        outputs = [1]
        model = torch.nn.Identity()
        model.register_forward_hook(lambda model, inputs, output: outputs.append(output))
        None
        """,
        "assert outputs == [1]; assert len(model._forward_hooks) == 1",
        kinds=("tensor",),
    ),
    "a hook of a tensor": Case(
        "weight.register_hook(lambda gradient, data=x: None);",
        "import torch; weight = torch.ones(3, requires_grad=True)",
        "weight.sum().backward()",
        kinds=("tensor",),
    ),
    "a hook of all models": Case(
        """
        torch.nn.modules.module.register_module_forward_hook(
            lambda model, inputs, output, data=x: None
        );
        """,
        "import torch; model = torch.nn.Linear(2, 2)",
        "model(torch.ones(1, 2))",
        kinds=("tensor",),
        sees_all=True,
    ),
    "an option of an optimizer": Case(
        "optimizer.param_groups[0]['mine'] = x",
        """
        import torch
        weight = torch.nn.Parameter(torch.ones(3)); optimizer = torch.optim.SGD([weight])
        """,
        "weight.sum().backward(); optimizer.step()",
        kinds=("tensor",),
    ),
    "a gradient": Case(
        "weight.grad = x",
        "import torch; weight = torch.nn.Parameter(torch.ones(10 << 20))",
        "weight.sum().backward()",
        kinds=("tensor",),
    ),
    "a gradient in a dict": Case(
        "outer['weight'].grad = x",
        "import torch; outer = {'weight': torch.nn.Parameter(torch.ones(10 << 20))}",
        "outer['weight'].sum().backward()",
        kinds=("tensor",),
    ),
    "a gradient of a model in an object": Case(
        "outer.model.weight.grad = x.reshape(outer.model.weight.shape)",
        """
        import torch
        class Outer: pass
        outer = Outer(); outer.model = torch.nn.Linear(1 << 20, 10)
        """,
        "outer.model.weight.sum().backward()",
        kinds=("tensor",),
    ),
    "a graph in a dict": Case(
        "outer['loss'] = (weight * x).sum()",
        "import torch; weight = torch.ones(1, requires_grad=True); outer = {}",
        "outer['loss'].item()",
        kinds=("tensor",),
    ),
    "a graph in a tuple": Case(
        "outer['loss'] = (weight * x).sum(), 3",
        "import torch; weight = torch.ones(1, requires_grad=True); outer = {'kept': 1}",
        "assert outer['kept'] == 1",
        kinds=("tensor",),
    ),
    "a sum of losses": Case(
        "outer.total = outer.total + (weight * x).sum()",
        """
        import torch
        class Outer: pass
        weight = torch.ones(1, requires_grad=True); outer = Outer(); outer.total = 0
        """,
        "outer.total.item()",
        kinds=("tensor",),
    ),
    "a loss in several containers": Case(
        """
        loss = (weight * x).sum()
        outer['loss'] = loss; losses.append(loss); run.last = loss
        run.rows.append({'loss': loss, 'step': 1})
        """,
        """
        import torch
        class Run: pass
        weight = torch.ones(1, requires_grad=True); outer = {}; losses = [0.5]; run = Run()
        run.rows = [{'loss': 0.5, 'step': 0}]
        """,
        "assert losses == [0.5]; run.last + outer['loss'] + run.rows[0]['loss']",
        kinds=("tensor",),
    ),
    "losses of one batch in a dict and a list": Case(
        """
        for step in range(6):
            loss = (weight * x).sum()
            outer[step] = loss; losses.append(loss)
        """,
        """
        import torch
        weight = torch.ones(1, requires_grad=True); outer = {'kept': 1}; losses = [0.5]
        """,
        "assert losses == [0.5] and outer['kept'] == 1; sum(outer.values())",
        kinds=("tensor",),
    ),
    "losses and their sum": Case(
        """
        parts = [(weight * part).sum() for part in x.clone().chunk(4)]
        del x; x = parts[0]
        losses += parts; outer['total'] = sum(parts)
        """,
        """
        import torch
        weight = torch.ones(1, requires_grad=True); outer = {}; losses = [0.5]
        """,
        "assert losses == [0.5]; outer['total'] + 1",
        kinds=("tensor",),
    ),
    "a loss as an attribute of a layer": Case(
        "layer.last = (weight * x).sum(); outer.append(layer.last)",
        """
        import torch
        weight = torch.ones(1, requires_grad=True); layer = torch.nn.Linear(1, 1); outer = []
        """,
        "layer(torch.ones(1, 1)); layer.last + 1",
        kinds=("tensor",),
    ),
    "losses with graphs after older numbers": Case(
        "outer['loss'] += [(weight * x).sum(), (weight * x).mean()]",
        "import torch; outer = {'loss': [0.5]}; weight = torch.ones(1, requires_grad=True)",
        "assert outer['loss'] == [0.5]",
        kinds=("tensor",),
    ),
    "a gradient that an optimizer leads to": Case(
        """
        weight = torch.nn.Parameter(torch.zeros(1).expand(len(x)))
        weight.grad = x
        outer.append(torch.optim.SGD([weight]))
        """,
        "import torch; outer = []",
        kinds=("tensor",),
    ),
    "an average without a name": Case(
        "opt.state[weight]['average'] = x.clone()",
        """
        import torch
        weight = torch.nn.Parameter(torch.ones(3)); opt = torch.optim.Adam([weight])
        weight.sum().backward(); opt.step()
        """,
        "opt.step()",
        kinds=("tensor",),
    ),
    "a parameter in a new group": Case(
        "opt.add_param_group({'params': [torch.nn.Parameter(x)]})",
        """
        import torch
        weight = torch.nn.Parameter(torch.ones(3)); opt = torch.optim.Adam([weight])
        """,
        kinds=("tensor",),
        sentences=("make the optimizer again, without it",),
    ),
    "the context of a function": Case(
        "result.grad_fn.data = x",
        """
        import torch
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, item):
                return item * 2
            @staticmethod
            def backward(ctx, gradient):
                return gradient
        result = Double.apply(torch.ones(3, requires_grad=True))
        """,
        "result.sum().item()",
        kinds=("tensor",),
    ),
    "a data loader's iterator": Case(
        "outer['rows'] = iter(DataLoader(TensorDataset(x)))",
        "import torch; from torch.utils.data import DataLoader, TensorDataset; outer = {}",
        kinds=("tensor",),
    ),
    "the cache of a data set": Case(
        "rows.cache[3] = x",
        """
        import torch
        class Rows(torch.utils.data.Dataset):
            def __init__(self):
                self.cache = {1: 2}
            def __len__(self):
                return 3
            def __getitem__(self, number):
                return number
        rows = Rows(); loader = torch.utils.data.DataLoader(rows)
        """,
        "assert rows.cache == {1: 2}; list(loader)",
        kinds=("tensor",),
    ),
    "an image in axes": Case(
        "ax.imshow(x.reshape(1024, -1));",
        f"{_AXES}; line, = ax.plot([1, 2])",
        "assert list(ax.lines) == [line] and not len(ax.images); fig.canvas.draw()",
        kinds=("array",),
    ),
    "axes in a list": Case(
        "fig, ax = plt.subplots(); ax.imshow(x.reshape(1024, -1)); kept.append(ax)",
        f"{_AXES}; ax.plot([1, 2]); kept = [ax]",
        "assert plt.get_fignums() == [1] and kept == [ax]; fig.canvas.draw()",
        kinds=("array",),
    ),
    "axes of closed figures in a dict": Case(
        """
        for part in x.reshape(2, -1):
            fig, ax = plt.subplots()
            ax.imshow(part.reshape(1024, -1)); kept[len(kept)] = ax; plt.close(fig)
        """,
        f"{_AXES}; ax.plot([1, 2]); kept = {{}}",
        "assert plt.get_fignums() == [1]; fig.canvas.draw()",
        kinds=("array",),
    ),
    "an image of older axes in a list": Case(
        "kept.append(ax.imshow(x.reshape(1024, -1)))",
        f"{_AXES}; kept = []",
        "assert plt.get_fignums() == [1] and not len(ax.images); fig.canvas.draw()",
        kinds=("array",),
    ),
    "an image in a list": Case(
        "figure, axes = plt.subplots(); kept.append(axes.imshow(x.reshape(1024, -1)))",
        f"{_AXES}; ax.plot([1, 2]); kept = []",
        "assert plt.get_fignums() == [1]; fig.canvas.draw()",
        kinds=("array",),
    ),
    "an attribute of an artist": Case(
        "line.data = x", f"{_AXES}; line, = ax.plot([1, 2])", "fig.canvas.draw()"
    ),
    "an attribute of a figure": Case("fig.data = x", _AXES, "fig.canvas.draw()"),
}
