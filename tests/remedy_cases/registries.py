"""Places in registries of modules, of IPython, and of Python itself."""

from tests.remedy_cases.case import Case

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
    still_works = "logging.getLogger('mine').error('goes on')"
    return Case(code, setup="import logging", after=still_works, sees_libraries=True)


REGISTRIES: dict[str, Case] = {
    "a finalizer": Case(
        "weakref.finalize(owner, print, x).atexit = False",
        setup="""
        class Owner: pass
        owner = Owner()
        """,
        sees_libraries=True,
    ),
    "a logging handler": _in_handler("logging.getLogger('mine')"),
    "a root handler": _in_handler("logging.getLogger()"),
    "a handler's buffer": Case(
        """
        record = logging.makeLogRecord({"args": (x,)})
        logging.getLogger("mine").handlers[0].buffer.append(record)
        """,
        setup="""
        import logging, logging.handlers
        logging.getLogger("mine").addHandler(logging.handlers.MemoryHandler(100))
        """,
        after="logging.getLogger('mine').error('goes on')",
        sees_libraries=True,
    ),
    "a handler next to a small one": Case(
        "lg.addHandler(Keeping(x))",
        setup=f"{_KEEPING}lg.addHandler(Keeping())",
        after="assert len(lg.handlers) == 1; lg.error('goes on')",
        kinds=("object",),
        sees_libraries=True,
    ),
    "two handlers with data": Case(
        "lg.addHandler(Keeping(x)); lg.addHandler(Keeping(np.ones(1 << 18)))",
        setup=_KEEPING,
        after="lg.error('goes on')",
        sees_libraries=True,
    ),
    "a logging filter": Case(
        """
        def only(record, data=x):
            return True
        lg.addFilter(only)
        """,
        setup="import logging; lg = logging.getLogger('mine')",
        after="lg.error('goes on')",
        sees_libraries=True,
    ),
    "an atexit callback": Case(
        "atexit.register(keep, x)",
        setup="""
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
        "settings.data = x", setup="import types; settings = types.ModuleType('settings')"
    ),
    "a hidden module": Case(
        'sys.modules["hidden_mine"].data = x',
        setup="import sys, types; sys.modules['hidden_mine'] = types.ModuleType('hidden_mine')",
    ),
    "a hidden module's dict": Case(
        'sys.modules["hidden_mine"].CACHE["rows"] = x',
        setup="""
        import sys, types
        sys.modules["hidden_mine"] = types.ModuleType("hidden_mine")
        sys.modules["hidden_mine"].CACHE = {}
        """,
    ),
    "a library's module": Case("json.mine = x", setup="import json", sees_libraries=True),
    "a builtin": Case("builtins.mine = x", setup="import builtins", sees_libraries=True),
    "a builtin without a name": Case("import builtins; builtins.mine = [x]", sees_libraries=True),
    "a trace of sys": Case("sys.mine = x", setup="import sys", sees_libraries=True),
    "an excepthook": Case(
        """
        def hook(kind, error, trace, data=x): pass
        threading.excepthook = hook
        """,
        setup="import threading",
        is_out_of_reach=True,
        sees_libraries=True,
    ),
    "a signal handler": Case(
        """
        def handler(number, frame, data=x): pass
        signal.signal(signal.SIGUSR1, handler);
        """,
        setup="import signal",
        sees_libraries=True,
        is_out_of_reach=True,
    ),
    "dicts in a hidden module's list": Case(
        'sys.modules["hidden_mine"].RUNS += [{"data": x}, {"data": x}, {"data": x}]',
        setup="""
        import sys, types
        sys.modules["hidden_mine"] = types.ModuleType("hidden_mine")
        sys.modules["hidden_mine"].RUNS = []
        """,
    ),
    "neighbours in a hidden module's dict": Case(
        "sys.modules['hidden_mine'].ROWS.update(dict.fromkeys(range(8), x))",
        setup="""
        import sys, types
        sys.modules["hidden_mine"] = types.ModuleType("hidden_mine")
        sys.modules["hidden_mine"].ROWS = {"kept": 1}
        """,
        after="assert sys.modules['hidden_mine'].ROWS['kept'] == 1",
    ),
    "records of a handler": Case(
        "for number in range(5): lg.warning('got %s', (x, number))",
        setup="""
        import logging, logging.handlers
        lg = logging.getLogger("mine")
        lg.propagate = False
        lg.addHandler(logging.handlers.MemoryHandler(1000))
        lg.warning("kept")
        """,
        after="assert lg.handlers[0].buffer[0].msg == 'kept'; lg.warning('goes on')",
        kinds=("array",),
        sees_libraries=True,
    ),
    "a logger's attribute": Case(
        "lg.data = x",
        setup="import logging; lg = logging.getLogger('mine')",
        after="lg.error('goes on')",
    ),
    "a library's class": Case(
        "json.JSONEncoder.my_data = x",
        setup="import json",
        after="json.dumps({})",
        sees_libraries=True,
    ),
    "a dict of a library's class": Case(
        "json.JSONEncoder.my_data['a'] = x",
        setup="import json; json.JSONEncoder.my_data = {}",
        after="assert json.JSONEncoder.my_data == {}",
        sees_libraries=True,
    ),
    "a library's function": Case(
        "json.dumps.my_data = x", setup="import json", sees_libraries=True
    ),
    "a hidden attribute of a library's object": Case(
        "outer._my_data = x",
        setup="import json; outer = json.JSONEncoder()",
        after="assert outer.encode({}) == '{}'",
    ),
    "IPython's shell": Case("get_ipython().my_data = x", after="1 + 1"),
    "IPython's hidden names": Case("get_ipython().user_ns_hidden['my_data'] = x"),
    "a formatter of IPython": Case(
        """
        printers = get_ipython().display_formatter.formatters["text/plain"]
        printers.for_type(Outer, lambda item, printer, cycle, data=x: printer.text("an outer"))
        del printers
        """,
        setup="class Outer: pass",
        after="""
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
    "calls of a mock": Case(
        "outer(x);",
        setup="import unittest.mock; outer = unittest.mock.Mock(return_value=3); outer.limit = 4",
        after="assert outer() == 3 and outer.limit == 4",
    ),
    "calls of a mock's method": Case(
        "outer.fit(x); outer.fit(data=x);",
        setup="import unittest.mock; outer = unittest.mock.MagicMock(return_value=3)",
        after="assert outer() == 3; outer.fit(1)",
    ),
    "calls of a result of a mock": Case(
        "outer.load().fit(x);",
        setup="""
        import unittest.mock
        outer = unittest.mock.Mock()
        outer.load().fit(1)
        outer.limit = 4
        """,
        after="assert outer.limit == 4",
    ),
    "calls of a mock in a dict": Case(
        "outer['m'](x);",
        setup="import unittest.mock; outer = {'m': unittest.mock.Mock(return_value=4)}",
        after="assert outer['m']() == 4",
    ),
    "a mock's result": Case(
        "outer.return_value = x",
        setup="import unittest.mock; outer = unittest.mock.Mock(); outer.limit = 4",
        after="assert outer.limit == 4; outer().anything",
    ),
    "a mock's side effect": Case(
        "outer.side_effect = [x]",
        setup="import unittest.mock; outer = unittest.mock.Mock(return_value=3)",
        after="assert outer() == 3",
    ),
    "a started patch": Case(
        "patch = mock.patch('json.dumps', x); patch.start(); patches.append(patch)",
        setup="import json, unittest.mock as mock; patches = []; original = json.dumps",
        after="assert json.dumps is original",
    ),
    "a started patch without a name": Case(
        "mock.patch('json.dumps', x).start();",
        setup="import json, unittest.mock as mock; original = json.dumps",
        after="assert json.dumps is original",
        sees_libraries=True,
    ),
    "a cache of re": Case(
        "re._cache[str, 'key', 0] = x",
        setup="import re",
        after="re.compile('a')",
        sees_libraries=True,
    ),
    "a cache of linecache": Case(
        "linecache.cache['mine'] = (1, None, [x], 'mine')",
        setup="import linecache",
        sees_libraries=True,
    ),
    "a filter of warnings": Case(
        "warnings.filters.append(('ignore', None, Warning, None, x))",
        setup="import warnings",
        sees_libraries=True,
    ),
    "a reducer of copyreg": Case(
        """
        def reduce(item, data=x): pass
        copyreg.pickle(Outer, reduce)
        """,
        setup="""
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
        setup="import gc",
        is_out_of_reach=True,
        sees_libraries=True,
    ),
    "a profile function": Case(
        """
        def profile(frame, event, argument, data=x): pass
        sys.setprofile(profile)
        """,
        setup="import sys",
        is_out_of_reach=True,
    ),
    "a profile function of threads": Case(
        """
        def profile(frame, event, argument, data=x): pass
        threading.setprofile(profile)
        """,
        setup="import threading",
        is_out_of_reach=True,
        sees_libraries=True,
    ),
    "a factory of log records": Case(
        """
        def make(*arguments, data=x, **options):
            return logging.LogRecord(*arguments, **options)
        logging.setLogRecordFactory(make)
        """,
        setup="import logging",
        after="logging.getLogger('mine').error('goes on')",
        is_out_of_reach=True,
        sees_libraries=True,
    ),
    "a kept finalizer": Case(
        "outer.append(weakref.finalize(owner, print, x)); outer[0].atexit = False",
        setup="""
        import weakref
        class Owner: pass
        owner = Owner(); outer = []
        """,
        sees_libraries=True,
    ),
    "a row factory": Case(
        """
        def row(cursor, values, data=x):
            return values
        outer.row_factory = row
        """,
        setup="import sqlite3; outer = sqlite3.connect(':memory:')",
        after="assert outer.execute('select 1').fetchall() == [(1,)]",
    ),
    "an adapter of sqlite": Case(
        """
        def adapt(value, data=x):
            return ""
        sqlite3.register_adapter(complex, adapt)
        """,
        setup="import sqlite3",
        is_out_of_reach=True,
        sees_libraries=True,
    ),
    "a hidden module's cache": Case(
        "sys.modules['hidden_mine'].CACHE['rows'] = x",
        setup="""
        import sys, types
        hidden = types.ModuleType("hidden_mine")
        exec("CACHE = {}\\ndef load(key):\\n    return CACHE.setdefault(key, 1)", vars(hidden))
        sys.modules["hidden_mine"] = hidden
        del hidden
        """,
        after="assert sys.modules['hidden_mine'].load('rows') == 1",
    ),
    "two finalizers": Case(
        """
        data = [np.ones(1 << 18)]; watched.append(weakref.ref(data[0]))
        weakref.finalize(owner, print, x).atexit = False
        weakref.finalize(owner, len, data).atexit = False
        """,
        setup="""
        import weakref
        class Owner: pass
        owner = Owner(); other = weakref.finalize(owner, print, 1); other.atexit = False
        """,
        after="assert other.alive",
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
}
