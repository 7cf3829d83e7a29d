"""Cells that make objects on which commands have disagreed, and places in which an experiment
leaves an object.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A cell that binds ``x`` to a large object."""

    code: str
    library: str = ""
    setup: str = ""
    """Cell that runs before; its names are no part of the object."""


@dataclass(frozen=True)
class Place:
    """A place outside an experiment in which its cell leaves an object ``x``."""

    setup: str
    """Cell before the experiment."""
    code: str
    """Rest of the experiment's cell: it stores ``x``."""
    expression: str
    """Expression of the object, for ``%gpumem why``."""
    library: str = ""
    sees_libraries: bool = False
    """True if objects of libraries lead to the place."""


SCRIPT = """
DATA = b"x" * (12 << 20)
def load(): return DATA
def predict(): return len(load())
class Model:
    def predict(self): return len(load())
"""
FILE_WITH_DATA = f"""
    import pathlib, tempfile
    path = str(pathlib.Path(tempfile.mkdtemp(), "other_script.py"))
    _ = pathlib.Path(path).write_text({SCRIPT!r})
"""

CASES: dict[str, Case] = {
    # -- memory behind C objects of the standard library
    "a compressor": Case(
        """
        import lzma
        x = lzma.LZMACompressor(preset=3)
        _ = x.compress(b"x" * 100_000)
        """
    ),
    "a tree of XML": Case(
        """
        import xml.etree.ElementTree as ElementTree
        x = ElementTree.Element("root")
        for number in range(60_000):
            ElementTree.SubElement(x, "item", {"number": str(number)}).text = str(number)
        del number
        """
    ),
    "parsed JSON": Case(
        """
        import json
        x = json.loads(json.dumps([["v%d" % number, "w%d" % number] for number in range(60_000)]))
        """
    ),
    "a tee": Case(
        """
        import itertools
        x = itertools.tee(float(number) for number in range(300_000))
        for _ in x[0]:
            pass
        """
    ),
    # -- more objects than are examined
    "many lists": Case("""x = [["v%d" % number, "w%d" % number] for number in range(900_000)]"""),
    # -- users' classes
    "a class with arrays": Case(
        """
        class x:
            data = [np.ones(750_000), np.ones(750_000)]
        """,
        "numpy",
        "import numpy as np",
    ),
    "a class with text": Case(
        """
        class x:
            data = [f"{number:050d}" for number in range(120_000)]
        """
    ),
    "a property that closes over data": Case(
        """
        def make():
            data = b"x" * (12 << 20)
            class Lazy:
                @property
                def data(self):
                    return data
            return Lazy()
        x = make()
        del make
        """
    ),
    "a cached property that closes over data": Case(
        """
        import functools
        def make():
            data = b"x" * (12 << 20)
            class Lazy:
                @functools.cached_property
                def data(self):
                    return data
            return Lazy()
        x = make()
        del make
        """
    ),
    "a static method that closes over data": Case(
        """
        def make():
            data = b"x" * (12 << 20)
            class Lazy:
                @staticmethod
                def get():
                    return data
            return Lazy()
        x = make()
        del make
        """
    ),
    "an attribute of a metaclass": Case(
        """
        def make():
            class Meta(type):
                data = b"x" * (12 << 20)
            class Made(metaclass=Meta):
                pass
            return Made()
        x = make()
        del make
        """
    ),
    "a method's default argument": Case(
        """
        class Reader:
            def read(self, data=b"x" * (12 << 20)):
                return data
        x = Reader()
        del Reader
        """
    ),
    "a bound method": Case(
        """
        class Reader:
            def __init__(self):
                self.data = b"x" * (12 << 20)
            def read(self):
                return self.data
        x = Reader().read
        del Reader
        """
    ),
    "a trainer": Case(
        """
        class Connector:
            def __init__(self, trainer):
                self.trainer = trainer
        class Trainer:
            def __init__(self):
                self.connector = Connector(self)
                self.results = [np.ones(1_500_000)]
        x = Trainer()
        """,
        "numpy",
        "import numpy as np",
    ),
    "a partial": Case(
        """
        import functools
        x = functools.partial(len, b"x" * (12 << 20))
        """
    ),
    "a cached function": Case(
        """
        import functools
        @functools.lru_cache
        def x(number):
            return bytes(number << 20)
        _ = len(x(12))
        """
    ),
    "a weak dictionary": Case(
        """
        import weakref
        x = weakref.WeakKeyDictionary({items[0]: b"x" * (12 << 20)})
        """,
        setup="""
        class Item:
            pass
        items = [Item()]
        """,
    ),
    "a mapping proxy": Case(
        """
        import types
        x = types.MappingProxyType({"data": b"x" * (12 << 20)})
        """
    ),
    "a chain map": Case(
        """
        import collections
        x = collections.ChainMap({"data": b"x" * (12 << 20)})
        """
    ),
    "an iterator": Case("""x = iter([b"x" * (12 << 20)])"""),
    "a coroutine's generator": Case(
        """
        def numbers():
            data = b"x" * (12 << 20)
            yield len(data)
            yield len(data)
        x = numbers()
        _ = next(x)
        del numbers
        """
    ),
    "an error with its traceback": Case(
        """
        def fail():
            data = b"x" * (12 << 20)
            raise ValueError(len(data))
        try:
            fail()
        except ValueError as error:
            x = error
        del fail
        """
    ),
    "frames": Case(
        """
        import sys
        def frame():
            data = b"x" * (3 << 20)
            return sys._getframe()
        x = [frame() for _ in range(4)]
        del frame
        """
    ),
    "a traceback": Case(
        """
        def fail():
            data = b"x" * (12 << 20)
            raise ValueError(len(data))
        try:
            fail()
        except ValueError as error:
            x = error.__traceback__
        del fail
        """
    ),
    "a suspended coroutine": Case(
        """
        import asyncio
        async def wait():
            data = b"x" * (12 << 20)
            await asyncio.sleep(0)
            return len(data)
        x = wait()
        _ = x.send(None)
        del wait
        """
    ),
    "a list of the stack": Case(
        """
        import inspect
        def stack():
            data = b"x" * (12 << 20)
            return inspect.stack()
        x = stack()
        del stack
        """
    ),
    "a context": Case(
        """
        import contextvars
        variable = contextvars.ContextVar("variable")
        x = contextvars.Context()
        def fill():
            variable.set(b"x" * (12 << 20))
        x.run(fill)
        del fill
        """
    ),
    "a thread's local": Case(
        """
        import threading
        x = threading.local()
        x.data = b"x" * (12 << 20)
        """
    ),
    "a queue": Case(
        """
        import queue
        x = queue.Queue()
        x.put(b"x" * (12 << 20))
        """
    ),
    "a C queue": Case(
        """
        import queue
        x = queue.SimpleQueue()
        x.put(b"x" * (12 << 20))
        """
    ),
    "an executor's future": Case(
        """
        import concurrent.futures
        x = concurrent.futures.Future()
        x.set_result(b"x" * (12 << 20))
        """
    ),
    "a namespace": Case(
        """
        import types
        x = types.SimpleNamespace(data=b"x" * (12 << 20))
        """
    ),
    "a data class": Case(
        """
        import dataclasses
        @dataclasses.dataclass(slots=True)
        class Sample:
            data: bytes
        x = Sample(b"x" * (12 << 20))
        """
    ),
    "an enumeration": Case(
        """
        import enum
        class x(enum.Enum):
            DATA = b"x" * (12 << 20)
        """
    ),
    # -- other modules' globals
    "a function of runpy": Case(
        """import runpy; x = runpy.run_path(path)["predict"]""", setup=FILE_WITH_DATA
    ),
    "a class of runpy": Case(
        """import runpy; x = runpy.run_path(path)["Model"]""", setup=FILE_WITH_DATA
    ),
    "an object of runpy": Case(
        """import runpy; x = runpy.run_path(path)["Model"]()""", setup=FILE_WITH_DATA
    ),
    "a method of runpy": Case(
        """import runpy; x = runpy.run_path(path)["Model"]().predict""", setup=FILE_WITH_DATA
    ),
    "a module of importlib": Case(
        """
        spec = importlib.util.spec_from_file_location("other_script", path)
        x = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(x)
        del spec
        """,
        setup=f"import importlib.util\n{textwrap.dedent(FILE_WITH_DATA)}",
    ),
    "a function of exec": Case(
        """
        def make():
            space = {}
            exec(open(path).read(), space)
            return space["predict"]
        x = make()
        del make
        """,
        setup=FILE_WITH_DATA,
    ),
    "a module made by hand": Case(
        """
        import types
        x = types.ModuleType("settings_of_mine")
        x.data = b"x" * (12 << 20)
        """
    ),
    "a closure over an array.array": Case(
        """
        import array
        def make():
            data = array.array("d", [1.0]) * 1_500_000
            return lambda: data
        x = make()
        del make
        """
    ),
    # -- displays
    "HTML": Case("""from IPython.display import HTML; x = HTML("x" * (12 << 20))"""),
    "an image of IPython": Case(
        """from IPython.display import Image; x = Image(data=b"\\x89PNG" + b"x" * (12 << 20), format="png")"""  # noqa: E501
    ),
    "displays of text": Case(
        """
        from IPython.display import JSON, Markdown
        x = [Markdown("x" * (6 << 20)), JSON(["x" * (6 << 20)])]
        """
    ),
    # -- numpy
    "texts of StringDType": Case(
        """x = np.array([f"{n:040d}" for n in range(200_000)], dtype=np.dtypes.StringDType())""",
        "numpy",
        "import numpy as np",
    ),
    "an object in a cycle through an array": Case(
        """
        class Big:
            def __init__(self):
                self.data = b"x" * (12 << 20)
        x = Big()
        x.array = np.empty(1, object)
        x.array[0] = x
        """,
        "numpy",
        "import numpy as np",
    ),
    "a structured array of objects": Case(
        """
        class Big:
            def __init__(self):
                self.data = b"x" * (12 << 20)
        x = np.array([(Big(),)], dtype=[("field", object)])
        """,
        "numpy",
        "import numpy as np",
    ),
    "a structured array of arrays": Case(
        """x = np.array([(np.ones(1_500_000),), (None,)], dtype=[("field", object)])""",
        "numpy",
        "import numpy as np",
    ),
    "a view of few rows": Case(
        """
        big = np.ones((1_500, 1_000))
        x = big[:10]
        del big
        """,
        "numpy",
        "import numpy as np",
    ),
    "a masked array": Case(
        """x = np.ma.masked_less(np.ones(1_400_000), 0)""", "numpy", "import numpy as np"
    ),
    "a mapped file of numpy": Case(
        """
        import tempfile
        x = np.memmap(tempfile.NamedTemporaryFile(), "f8", "w+", shape=(1_500_000,))
        x[:] = 1
        """,
        "numpy",
        "import numpy as np",
    ),
    # -- pandas, pyarrow, polars
    "a groupby": Case(
        """x = pd.DataFrame({"a": np.arange(750_000) % 9, "b": 1.5}).groupby("a")""",
        "pandas",
        "import numpy as np, pandas as pd",
    ),
    "a frame of arrays": Case(
        """x = pd.DataFrame({"a": [np.ones(1000) for _ in range(1500)]})""",
        "pandas",
        "import numpy as np, pandas as pd",
    ),
    "a frame that refers to itself": Case(
        """
        class Owner:
            def __init__(self, frame):
                self.frame, self.data = frame, b"x" * (12 << 20)
        x = pd.DataFrame({"a": [None]}, dtype=object)
        x.iloc[0, 0] = Owner(x)
        """,
        "pandas",
        "import pandas as pd",
    ),
    "a mapped file of pyarrow": Case(
        """
        x = pa.ipc.open_file(pa.memory_map(path)).read_all()
        _ = sum(chunk.to_numpy().sum() for chunk in x["a"].chunks)  # reads all pages
        """,
        "pyarrow",
        """
        import pathlib, tempfile
        import numpy as np, pyarrow as pa
        path = str(pathlib.Path(tempfile.mkdtemp(), "table.arrow"))
        table = pa.table({"a": np.ones(1_500_000)})
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        del table, sink, writer
        """,
    ),
    "a lazy frame": Case(
        """x = pl.LazyFrame({"a": np.ones(1_500_000)})""",
        "polars",
        "import numpy as np, polars as pl",
    ),
    "a lazy frame of a query": Case(
        """x = pl.DataFrame({"a": np.ones(1_500_000)}).lazy().filter(pl.col("a") > 0)""",
        "polars",
        "import numpy as np, polars as pl",
    ),
    # -- torch
    "losses": Case(
        """
        x = [model(data).sum() for _ in range(3)]
        """,
        "torch",
        """
        import torch
        model = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.Tanh())
        data = torch.ones(1000, 1000)
        """,
    ),
    "a sum of losses": Case(
        """
        x = 0
        for _ in range(3):
            x = x + model(data).sum()
        """,
        "torch",
        """
        import torch
        model = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.Tanh())
        data = torch.ones(1000, 1000)
        """,
    ),
    "one loss": Case(
        """x = model(data).sum()""",
        "torch",
        """
        import torch
        model = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.Tanh())
        data = torch.ones(3000, 1000)
        """,
    ),
    "a jagged tensor": Case(
        """x = torch.nested.nested_tensor([torch.ones(1000, 1500)] * 2, layout=torch.jagged)""",
        "torch",
        "import torch",
    ),
    "a sum of jagged tensors": Case(
        """x = torch.nested.nested_tensor([torch.ones(1000, 1500)] * 2, layout=torch.jagged) + 1""",
        "torch",
        "import torch",
    ),
    "a jagged tensor of values and offsets": Case(
        """x = torch.nested.nested_tensor_from_jagged(torch.ones(2000, 1500), torch.tensor([0, 500, 2000]))""",  # noqa: E501
        "torch",
        "import torch",
    ),
    "a small view of a tensor": Case(
        """
        big = torch.ones(3000, 1000)
        x = big[:10]
        del big
        """,
        "torch",
        "import torch",
    ),
    "a model with gradients": Case(
        """
        x = torch.nn.Linear(1000, 1500)
        x(torch.ones(8, 1000)).sum().backward()
        """,
        "torch",
        "import torch",
    ),
    "a tensor with a hook": Case(
        """
        x = torch.ones(3, requires_grad=True)
        x.register_hook(lambda gradient, data=b"x" * (12 << 20): None)
        None
        """,
        "torch",
        "import torch",
    ),
    "encodings of tokenizers": Case(
        """x = tokenizer.encode_batch(["word " * 2000] * 40)""",
        "tokenizers",
        """
        import tokenizers
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"word": 0, "[UNK]": 1}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        """,  # noqa: E501
    ),
    "a compiled query of scikit-learn": Case(
        """
        x = sklearn.neighbors.NearestNeighbors().fit(np.random.default_rng(0).normal(size=(120_000, 5)))
        """,  # noqa: E501
        "sklearn",
        "import numpy as np, sklearn.neighbors",
    ),
}
"""Objects with a name, most of them from public reports."""

PLACES: dict[str, Place] = {
    "an item of a list": Place("outer = []", "outer.append(x)", "outer[0]"),
    "an item of a list in a dict": Place(
        'outer = {"runs": []}', 'outer["runs"].append(x)', 'outer["runs"][0]'
    ),
    "an item of a dict in a list in a dict": Place(
        'outer = {"runs": []}', 'outer["runs"].append({"data": x})', 'outer["runs"][0]["data"]'
    ),
    "a deque": Place(
        "import collections; outer = collections.deque()", "outer.append(x)", "outer[0]"
    ),
    "a set": Place(
        "outer = set()", "outer.add(iter((x,)))", "next(iter(outer)).__reduce__()[1][0][0]"
    ),
    "an attribute": Place(
        """
        class Outer: pass
        outer = Outer()
        """,
        "outer.data = x",
        "outer.data",
    ),
    "an attribute of a class": Place("class Outer: pass", "Outer.data = x", "Outer.data"),
    "a slot": Place(
        """
        class Outer:
            __slots__ = ("data",)
        outer = Outer()
        """,
        "outer.data = x",
        "outer.data",
    ),
    "a default argument": Place(
        "def outer(data=()): pass", "outer.__defaults__ = (x,)", "outer.__defaults__[0]"
    ),
    "a closure": Place(
        """
        def make():
            data = None
            def put(value):
                nonlocal data
                data = value
            return put
        outer = make()
        """,
        "outer(x)",
        "outer.__closure__[0].cell_contents",
    ),
    "a function's attribute": Place("def outer(): pass", "outer.data = x", "outer.data"),
    "a cache of functools": Place(
        """
        import functools
        class Source: pass
        source = Source()
        @functools.lru_cache
        def outer(number):
            return source.data
        """,
        "source.data = x; _ = len(outer(1)); del source.data",
        "outer(1)",
    ),
    "a context variable": Place(
        "import contextvars; outer = contextvars.ContextVar('outer')",
        "_ = outer.set(x)",
        "outer.get()",
    ),
    "a suspended generator": Place(
        """
        import gc
        def numbers():
            data = yield
            yield len(data)
        outer = numbers()
        next(outer)
        """,
        "_ = outer.send(x)",
        # Reading f_locals would leave a copy in the frame.
        "max((*gc.get_referents(outer), *gc.get_referents(outer.gi_frame)), "
        "key=__import__('sys').getsizeof)",
    ),
    "a builtin": Place(
        "import builtins", "builtins.outer_data = x", "outer_data", sees_libraries=True
    ),
    "a module": Place(
        "import logging", "logging.outer_data = x", "logging.outer_data", sees_libraries=True
    ),
    "a handler of logging": Place(
        """
        import logging, logging.handlers
        handler = logging.handlers.MemoryHandler(10_000_000)
        logging.getLogger("mine").addHandler(handler)
        del handler
        """,
        'logging.getLogger("mine").handlers[0].buffer.append(x)',
        'logging.getLogger("mine").handlers[0].buffer[0]',
        sees_libraries=True,
    ),
    "an error": Place(
        "outer = []",
        """
        def fail(data):
            raise ValueError
        try:
            fail(x)
        except ValueError as error:
            outer.append(error)
        """,
        "outer[0].__traceback__.tb_next.tb_frame.f_locals['data']",
    ),
    "a partial": Place(
        "import functools; outer = []",
        "outer.append(functools.partial(len, x))",
        "outer[0].args[0]",
    ),
    "a view": Place("outer = []", "outer.append(x[10:20])", "outer[0]", "numpy"),
    "a thread's local": Place(
        "import threading; outer = threading.local()", "outer.data = x", "outer.data"
    ),
    "a queue": Place("import queue; outer = queue.Queue()", "outer.put(x)", "outer.queue[0]"),
    "an object array": Place(
        "import numpy as np; outer = np.empty(3, object)", "outer[1] = x", "outer[1]", "numpy"
    ),
    "a structured array": Place(
        'import numpy as np; outer = np.zeros(3, [("data", object)])',
        "outer[1] = (x,)",
        'outer[1]["data"]',
        "numpy",
    ),
    "a cell of a frame": Place(
        "import pandas as pd; outer = pd.DataFrame({'a': [None, None]}, dtype=object)",
        "outer.iat[1, 0] = x",
        "outer.iat[1, 0]",
        "pandas",
    ),
    "two places": Place("first, second = {}, {}", 'first["x"] = x; second["x"] = x', 'first["x"]'),
}
"""Places, each of which is tried with an array of ``PLACED``."""
