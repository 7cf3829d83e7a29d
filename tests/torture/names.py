"""Scenarios: names, references and IPython's outputs, with NumPy arrays."""

from __future__ import annotations

from tests.torture.scenario import Scenario, cells

_COMES_BACK = "The end of the experiment gives it back."
NAMES = (
    Scenario(
        "plain variables",
        "Names of the notebook keep their arrays for as long as the kernel runs.",
        "The end of the experiment deletes the names.",
        cells("a = array()\nb = {'batches': [array(), array()]}", "c = a[:10]"),
    ),
    Scenario(
        "rebinding a name",
        "A name that existed before holds the new array, and nobody dares to delete it.",
        "The end of the experiment puts the object back that the name had before.",
        cells("for data in range(2):\n    data = array()"),
        before="data = 'old'",
    ),
    Scenario(
        "reference cycles",
        "Objects that refer to each other wait for the garbage collector, which does not see how large they are.",
        "The end of the experiment collects until nothing more dies.",
        cells(
            """
class Node:
    def __init__(self):
        self.me, self.data = self, array()
a, b = Node(), Node()
a.other, b.other = b, a
"""
        ),
    ),
    Scenario(
        "reference cycles with __del__",
        "Finalisers run first, and what they were the last to hold is garbage only afterwards.",
        "The end of the experiment collects until nothing more dies.",
        cells(
            """
class Node:
    def __init__(self, inner=None):
        self.me, self.data, self.inner = self, array(), inner
    def __del__(self):
        self.data = self.data[1:]
for _i_ in range(2):
    node = Node(Node())
"""
        ),
    ),
    Scenario(
        "outputs",
        "`Out[n]`, `_n`, `_`, `__` and `___` keep what a cell's last line showed.",
        "The end of the experiment removes the outputs of its cells wherever IPython keeps them.",
        cells("array()", "array()", "array()", "x = array()\nx", "_2 if '_2' in globals() else _"),
    ),
    Scenario(
        "hidden copies of outputs",
        "`%reset -f out` empties `Out`, and a hidden copy of `_` stays.",
        "The end of the experiment clears the hidden copies too.",
        cells("array()", "array()", "%reset -f out"),
    ),
    Scenario(
        "an output of one cell",
        "A single expression stays reachable as `_` and `Out[n]`.",
        "The end of the experiment removes the outputs of its cells wherever IPython keeps them.",
        cells("array()"),
    ),
    Scenario(
        "output cache of size 0",
        "With `InteractiveShell.cache_size = 0` there is no `Out`, and IPython still keeps the last result.",
        "The end of the experiment drops it.",
        cells("array()", "array()"),
        options=("--InteractiveShell.cache_size=0",),
    ),
    Scenario(
        "output cache of size 0, one cell",
        "The same with the scope in one cell.",
        "The end of the experiment drops it.",
        cells("array()"),
        options=("--InteractiveShell.cache_size=0",),
    ),
    Scenario(
        "small output cache",
        "When a small cache is full IPython drops old outputs, but not each name for them.",
        "The end of the experiment removes what is left.",
        cells(*["array(16)"] * 7),
        options=("--InteractiveShell.cache_size=3",),
    ),
    Scenario(
        "closures and default arguments",
        "A function keeps what it closes over and its defaults.",
        "The end of the experiment deletes the function with its name.",
        cells(
            """
def make():
    data = array()
    def step(more=array()):
        return data, more
    return step
step = make()
fast = lambda x=array(): x
"""
        ),
    ),
    Scenario(
        "a closure in an outer list",
        "A function that was put into a list outside keeps what it closes over.",
        "Held on purpose: remove it from the list.",
        cells("def make():\n    data = array()\n    return lambda: data\nsteps.append(make())"),
        before="steps = []",
        share=0.0,
        holder="steps",
    ),
    Scenario(
        "bound methods in callbacks",
        "A bound method keeps its object, and so does the list of callbacks that it is in.",
        _COMES_BACK,
        cells(
            """
class Logger:
    def __init__(self, callbacks):
        self.data = array()
        callbacks.append(self.step)
    def step(self): pass
callbacks = []
logger = Logger(callbacks)
"""
        ),
    ),
    Scenario(
        "a bound method in an outer list of callbacks",
        "The list outlives the scope, the list keeps the method, the method its object.",
        "Held on purpose: remove the callback.",
        cells(
            """
class Logger:
    def __init__(self):
        self.data = array()
        callbacks.append(self.step)
    def step(self): pass
logger = Logger()
"""
        ),
        before="callbacks = []",
        share=0.0,
        holder="callbacks",
    ),
    Scenario(
        "functools.lru_cache",
        "The cache keeps arguments and results of each call.",
        "The end of the experiment deletes the function, and with it its cache.",
        cells("import functools\n@functools.lru_cache\ndef load(i):\n    return array()\nload(1), load(2)\nNone"),
    ),
    Scenario(
        "functools.lru_cache on an outer function",
        "The function outlives the scope, and so does its cache.",
        "Held on purpose: call the function's `cache_clear()`.",
        cells("data = load(1)"),
        before="import functools\n@functools.lru_cache\ndef load(i):\n    return array()",
        share=0.0,
        holder="load",
    ),
    Scenario(
        "class attributes",
        "A class keeps its attributes, and a class is in a cycle with itself.",
        "The end of the experiment deletes the class and collects.",
        cells("class Config:\n    data = array()\nclass More(Config):\n    more = array()\nmade = More()"),
    ),
    Scenario(
        "an attribute of an outer class",
        "The class outlives the scope.",
        "Held on purpose: delete the attribute.",
        cells("Config.data = array()"),
        before="class Config: pass",
        share=0.0,
        holder="Config",
    ),
    Scenario(
        "a module-level cache",
        "A module is there for the whole process, and so is what it keeps.",
        "Held on purpose: empty the cache.",
        cells("caching.cache['x'] = array()"),
        before="import sys, types\ncaching = sys.modules['caching'] = types.ModuleType('caching')\ncaching.cache = {}",
        share=0.0,
        holder="caching",
    ),
    Scenario(
        "a module imported in the scope",
        "A module that the scope imports stays imported, with what its functions have cached.",
        "Held on purpose: empty the module's cache.",
        cells("import string\nstring.our_cache = array()"),
        share=0.0,
        holder="string",
        alone=True,
    ),
    Scenario(
        "weakref.finalize",
        "A finaliser keeps its arguments until its object dies.",
        "The end of the experiment lets the object die, which runs the finaliser.",
        cells(
            """
import weakref
class Job: pass
job = Job()
job.me = job
weakref.finalize(job, lambda data: None, array())
"""
        ),
    ),
    Scenario(
        "weakref.finalize on an outer object",
        "The object outlives the scope, and the finaliser's arguments with it.",
        "Held on purpose: `detach()` the finaliser.",
        cells("import weakref\nweakref.finalize(job, lambda data: None, array())"),
        before="class Job: pass\njob = Job()",
        share=0.0,
        holder="finalize",
        alone=True,
    ),
    Scenario(
        "generators and coroutines",
        "A generator or coroutine that waits keeps its frame, and the frame its locals.",
        "The end of the experiment deletes them, which closes them.",
        cells(
            """
import warnings
warnings.simplefilter("ignore", RuntimeWarning)
def numbers():
    data = array()
    yield 1
    yield data
async def wait(data):
    return data
async def ask():
    data = array()
    yield 1
generator = numbers(); next(generator)
coroutine = wait(array())
agen = ask(); await agen.__anext__()
"""
        ),
    ),
    Scenario(
        "a view of an array",
        "A view of ten numbers keeps the whole array.",
        "The end of the experiment deletes the view.",
        cells("small = array()[:10]\nrow = array().reshape(1024, -1)[3]"),
    ),
    Scenario(
        "a view in an outer list",
        "A view of ten numbers keeps the whole array.",
        "Held on purpose: append a `copy()`.",
        cells("kept.append(array()[:10])"),
        before="kept = []",
        share=0.0,
        holder="kept",
    ),
    Scenario(
        "memory maps",
        "A map and each view of it keep the file mapped.",
        "The end of the experiment deletes the names, which unmaps the file.",
        cells(
            """
import tempfile
file = tempfile.TemporaryFile()
mapped = numpy.memmap(file, dtype="float32", shape=(16 << 20,))
mapped[:] = 1
watch(mapped)
view = mapped[10:20]
"""
        ),
        on_gpu=cells(
            """
import tempfile, torch
file = tempfile.TemporaryFile()
mapped = torch.from_numpy(numpy.memmap(file, dtype="float32", shape=(16 << 20,)))
loaded = to_gpu(mapped)
watch(loaded)
view = loaded[10:20]
"""
        ),
    ),
    Scenario(
        "a thread that outlives the scope",
        "A thread that still runs keeps the locals of its functions.",
        "Held on purpose: let the thread end.",
        cells("def work(data):\n    stop.wait()\nthreading.Thread(target=work, args=(array(),), daemon=True).start()"),
        before="import threading\nstop = threading.Event()",
        share=0.0,
        holder="thread",
    ),
    Scenario(
        "a thread that ends in the scope",
        "A thread keeps its arguments until it has ended, and its object what it stored.",
        _COMES_BACK,
        cells(
            """
import threading
class Worker(threading.Thread):
    def run(self):
        self.result = array()
worker = Worker(); worker.start(); worker.join()
local = threading.local(); local.data = array()
"""
        ),
    ),
    Scenario(
        "context variables",
        "The kernel's context keeps the value that a cell has set, and the variable with it.",
        "Held on purpose: `variable.reset(token)`.",
        cells("import contextvars\nvariable = contextvars.ContextVar('variable')\ntoken = variable.set(array())"),
        share=0.0,
        holder="Context",
        alone=True,
    ),
)
