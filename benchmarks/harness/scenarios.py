"""Ways in which notebooks leak: one scenario each, as data that is run in real kernels."""

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """A cell of a scenario, and how it must end."""

    code: str
    raises: str = ""  # the error that it must end with; empty where it must succeed
    answers: tuple[str, ...] = ()  # what is typed where the cell asks for input, as ``%debug`` does


@dataclass(frozen=True)
class Scenario:
    """One way in which a notebook leaks."""

    name: str  # a short, unique title
    pins: str  # what keeps the memory alive, in a sentence for users
    advice: str  # what the end of an experiment does about it, or what the user can do
    cells: tuple[Cell, ...]  # what runs inside the scope
    on_gpu: tuple[Cell, ...] = ()  # what runs instead where the blocks are tensors on a GPU
    before: str = ""  # what runs before the scope begins
    # words that a path to the memory must contain where something outside holds it on purpose
    holder: str = ""
    needs: tuple[str, ...] = ()  # modules without which it cannot run
    alone: bool = False  # whether it changes the process so that no other scenario may follow in it

    @property
    def share(self) -> float:
        """The share of its bytes that an experiment should free."""
        return 0.0 if self.holder else 1.0

    def missing(self) -> str:
        """Return why the scenario cannot run with this interpreter; empty if it can."""
        needs = ("numpy", *self.needs)
        missing = [name for name in needs if importlib.util.find_spec(name) is None]
        if not missing:
            return ""
        return f"{', '.join(missing)} not installed"


# Each has a name with its other fields, a line for what pins the memory, one for the advice, and
# cells. "on gpu" marks those that run instead on a GPU, "raises" an error that a cell must end
# with, "answers" what is typed into it.
_TEXT = r"""
## Names and references

### plain variables
A notebook's variables keep their arrays until the kernel ends.
The end of the experiment deletes the names.
---
a = array()
b = {'batches': [array(), array()]}
---
c = a[:10]
### rebinding a name
A variable from before the scope holds the new array, so deleting new names does not free it.
The end of the experiment restores the variable's old value.
--- before
data = 'old'
---
for data in range(2):
    data = array()
### reference cycles with __del__
Finalizers run first, and objects that only they referenced become garbage afterwards.
The end of the experiment collects garbage until none is left.
---
class Node:
    def __init__(self, inner=None):
        self.me, self.data, self.inner = self, array(), inner
    def __del__(self):
        self.data = self.data[1:]
for _i_ in range(2):
    node = Node(Node())
### outputs
`Out[n]`, `_n`, `_`, `__` and `___` keep the value of a cell's last expression.
The end of the experiment removes the outputs of its cells wherever IPython keeps them.
---
array()
---
array()
---
array()
---
x = array()
x
---
_2 if '_2' in globals() else _
### functools.lru_cache on an outer function [holder load]
The function outlives the scope, and so does its cache.
Held on purpose: call the function's `cache_clear()`.
--- before
import functools
@functools.lru_cache
def load(i):
    return array()
---
data = load(1)
### a module-level cache [holder caching]
A module and its cache live as long as the process.
Held on purpose: empty the cache.
--- before
import sys, types
caching = sys.modules['caching'] = types.ModuleType('caching')
caching.cache = {}
---
caching.cache['x'] = array()
### weakref.finalize on an outer object [holder finalize; alone]
The object outlives the scope, and so do the finalizer's arguments.
Held on purpose: `detach()` the finalizer.
--- before
class Job: pass
job = Job()
---
import weakref
weakref.finalize(job, lambda data: None, array())
### generators and coroutines
A suspended generator or coroutine keeps its frame, and the frame its locals.
The end of the experiment deletes them, which closes them.
---
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
### a thread that outlives the scope [holder thread]
A running thread keeps the locals of its functions.
Held on purpose: let the thread end.
--- before
import threading
stop = threading.Event()
---
def work(data):
    stop.wait()
threading.Thread(target=work, args=(array(),), daemon=True).start()
### context variables [holder Context; alone]
The kernel's context keeps the value that a cell sets, and the context variable itself.
Held on purpose: `variable.reset(token)`.
---
import contextvars
variable = contextvars.ContextVar('variable')
token = variable.set(array())

## Errors

### an error in a function
The traceback keeps the functions' frames, and these their locals. So do chained errors, even with `from None`.
The end of the experiment clears the frames; the traceback can still be shown.
--- raises ValueError
def f():
    x = array()
    raise KeyError
def g():
    y = array()
    try: f()
    except KeyError: raise ValueError from None
g()
### caught errors in an outer list [holder errors]
The list outlives the scope, and its errors keep their frames.
Held on purpose: append `str(error)`, or call `traceback.clear_frames`.
--- before
errors = []
---
def f():
    x = array()
    raise ValueError
try: f()
except ValueError as error: errors.append(error)

## Errors elsewhere

### an error in a thread
`threading.excepthook` gets the thread's error, with all its frames, and shows it.
Nothing keeps the error afterwards, so the end of the experiment frees it.
---
import threading
def f():
    x = array()
    raise ValueError
thread = threading.Thread(target=f); thread.start(); thread.join()
### an error in an asyncio task
A task keeps its error until the error is retrieved.
The end of the experiment deletes the task.
---
import asyncio
async def f(ask):
    x = array()
    await asyncio.sleep(0)
    raise ValueError
asked, forgotten = asyncio.create_task(f(True)), asyncio.create_task(f(False))
await asyncio.wait([asked, forgotten])
asked.exception()
None
### a task that waits for ever [holder task; alone]
The event loop keeps a sleeping task, and the task its frame.
Held on purpose: `cancel()` the task.
---
import asyncio
async def f():
    x = array()
    await asyncio.sleep(3600)
task = asyncio.create_task(f())
await asyncio.sleep(0)
### a handler that keeps its records [holder handler; alone]
A logger's `MemoryHandler` keeps the log records, and these their errors with all frames.
Held on purpose: `flush()` or remove the handler.
--- before
import logging, logging.handlers
handler = logging.handlers.MemoryHandler(100, flushLevel=100)
logging.getLogger('torture').addHandler(handler)
---
def f():
    x = array()
    raise ValueError
try: f()
except ValueError: logging.getLogger("torture").exception("failed")
### unraisable errors
An error in `__del__` cannot be raised, so `sys.unraisablehook` shows it.
The end of the experiment frees it.
---
class Fails:
    def __init__(self): self.data = array()
    def __del__(self):
        x = array()
        raise ValueError
thing = Fails()
del thing
### an error in an event callback
If a callback fails between two cells, IPython shows the error and stores it as the last one.
The end of the experiment clears the frames; the traceback can still be shown.
---
def callback(*args):
    x = array()
    raise ValueError
get_ipython().events.register("post_run_cell", callback)
---
1
---
get_ipython().events.unregister('post_run_cell', callback)

## Magics and warnings

### completion and help
Tab completion and `?` inspect objects and cache the results.
The end of the experiment deletes the names; the caches keep no objects.
---
import warnings
warnings.simplefilter("ignore")
class Model:
    def __init__(self): self.data = array()
model, box = Model(), {"key": array()}
---
get_ipython().complete("model."), get_ipython().complete("box[")
list(get_ipython().Completer.completions("model.data.s", 12))
None
---
model?
---
model.data?
### %run for the second time
IPython keeps the namespace of the last run of each script.
The end of the experiment deletes it.
--- before
import os, tempfile
path = os.path.join(tempfile.mkdtemp(), "script.py")
with open(path, "w") as file:
    file.write("from benchmarks.harness.blocks import array\ndata = array()")
%run $path
del data
---
%run $path
### %store
`%store` writes to a file, but IPython's database also keeps the object in memory.
The end of the experiment removes the object from memory; the file stays.
---
x = array()
%store x
### warning registries
The notebook's `__warningregistry__` keeps the category of a warning until the next cell.
The end of the experiment clears it at once.
---
import warnings
class Careful(UserWarning):
    data = array()
warnings.warn("careful", Careful)
### %debug in a closure
The debugger keeps the frame, the frame its function, and the function its closure.
The end of the experiment removes the debugger's references.
--- raises ValueError
def f():
    x = array()
    def g():
        x.sum()
        raise ValueError
    g()
f()
--- answers x.sum(), up, z = x, !w = x, up, q
%debug
### %pdb
After `%pdb on` every error opens the debugger, which keeps the frames.
The end of the experiment removes the debugger's references.
---
%pdb on
--- raises ValueError; answers x.sum(), up, q
def f():
    x = array()
    raise ValueError
f()
---
%pdb off

## torch

### losses with their graphs in an outer list [needs torch; holder losses]
`losses.append(loss)` keeps every step's whole graph, with its saved activations.
Held on purpose: append `loss.item()` or `loss.detach()`.
--- before
losses = []
---
hidden = tensor(requires_grad=True)
losses.append((hidden * hidden).sum())
### an optimizer's state [needs torch]
The optimizer keeps the parameters, and two more tensors per parameter.
The end of the experiment deletes the optimizer with the model.
---
model = to_gpu(torch.nn.Sequential(torch.nn.Linear(2048, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 2048)))
watch(*model.parameters())

optimizer = torch.optim.Adam(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
model(to_gpu(torch.ones(4, 2048))).sum().backward()
optimizer.step(); scheduler.step()
for parameter in model.parameters():
    watch(parameter.grad, optimizer.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg_sq"])
### an error in backward [needs torch]
The traceback keeps the graph, the hooks and the function that failed.
The end of the experiment clears the frames.
--- raises ValueError
class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x); ctx.more = tensor()
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        scratch = tensor()
        raise ValueError
def train():
    x = tensor(requires_grad=True)
    Fails.apply(x).sum().backward()
train()
### an autograd function's context [needs torch]
`ctx.attribute = output` creates a cycle through the graph that Python's collector cannot always see.
The end of the experiment collects it; save outputs with `save_for_backward` instead.
---
class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        watch(y)
        ctx.save_for_backward(x, y); ctx.more = tensor()
        return y
    @staticmethod
    def backward(ctx, grad):
        return grad
y = Keeps.apply(tensor(requires_grad=True))
loss = y.sum()
### hooks on a model of the scope [needs torch]
A hook that closes over its module creates a cycle.
The end of the experiment deletes the model and collects the cycle.
---
model = to_gpu(torch.nn.Linear(8, 8))
def hook(module, inputs, output, kept=tensor()):
    model.last = output
def backward_hook(module, grads, outputs, kept=tensor()):
    model.grads = grads
handles = [model.register_forward_hook(hook), model.register_full_backward_hook(backward_hook)]
model(to_gpu(torch.ones(1, 8))).sum().backward()
### a forward hook on an outer model [needs torch; holder forward hook on model]
The model outlives the scope, and so do the hook and its closure.
Held on purpose: call `remove()` on the hook's handle.
--- before
model = to_gpu(torch.nn.Linear(8, 8))
---
def hook(module, inputs, output, kept=tensor()): pass
handle = model.register_forward_hook(hook)
### a hook on an outer tensor [needs torch; holder hook on weight]
The tensor outlives the scope, and so do the hook and its closure.
Held on purpose: call `remove()` on the hook's handle.
--- before
weight = to_gpu(torch.ones(8)).requires_grad_()
---
def hook(grad, kept=tensor()): pass
handle = weight.register_hook(hook)
### gradients of an outer model [needs torch; holder model.weight.grad]
`backward()` creates gradients on a model that outlives the scope.
Held on purpose: `model.zero_grad()` or `optimizer.zero_grad()`.
--- before
model = to_gpu(torch.nn.Linear(4096, 4096, bias=False))
---
model(to_gpu(torch.ones(1, 4096))).sum().backward()
watch(model.weight.grad)
### a DataLoader with workers, interrupted [needs torch]
The iterator keeps the workers, their queues and the queued batches.
The frames are cleared as soon as the traceback was shown, and the workers end.
--- raises KeyboardInterrupt
import signal
from torch.utils.data import DataLoader, TensorDataset
images = torch.ones(64, 1 << 18); watch(images)
data = TensorDataset(images)
def train():
    loader = DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)
    for step, (batch,) in enumerate(loader):
        batch = to_gpu(batch)
        watch(batch)
        if step == 2:
            signal.raise_signal(signal.SIGINT)
train()
### backward(create_graph=True) [needs torch; holder a cycle in torch's own C++]
A gradient with a graph and its tensor reference each other: a cycle in C++, about which torch warns.
Only `.grad = None` breaks it, before the tensor is deleted: `%gpumem leaks` says so.
---
import warnings
warnings.simplefilter('ignore')
w = tensor(requires_grad=True)
loss = (w * tensor()).exp().sum()
loss.backward(create_graph=True)
watch(w.grad)
### torch.compile [needs torch; alone]
The compiler keeps guards and compiled code for each model and function.
The end of the experiment deletes the model, and the compiler's data for it is freed with it.
---
model = to_gpu(torch.nn.Linear(4096, 4096, bias=False))
watch(model.weight)
compiled = torch.compile(model, backend="eager")
scale = tensor()
@torch.compile(backend="eager")
def step(x):
    return compiled(x).sum() * scale[0]
step(to_gpu(torch.ones(1, 4096))).backward()
watch(model.weight.grad)

## matplotlib and pandas

### a figure shown in the notebook [needs matplotlib]
Artists keep the arrays that they draw. The inline backend closes a figure at the end of its cell.
The end of the experiment frees it.
---
import matplotlib.pyplot as plt
figure, axes = plt.subplots(figsize=(1, 1))
image = axes.imshow(numpy.ones((4096, 4096), dtype="float32"))
watch(numpy.ma.getdata(image.get_array()))
image.kept = array()
### a figure that pyplot keeps open [needs matplotlib; holder matplotlib figure; alone]
With any backend other than inline, pyplot keeps each figure until it is closed.
Held on purpose: `plt.close()`.
--- before
import matplotlib
matplotlib.use('agg')
import matplotlib.pyplot as plt
---
figure, axes = plt.subplots()
line, = axes.plot([1, 2])
line.kept = array()
### pandas frames and views [needs pandas]
A column or a slice may be a view that keeps the whole frame.
The end of the experiment deletes the names.
---
frame = pandas.DataFrame(array().reshape(-1, 16), copy=False)
watch(frame.to_numpy(copy=False))
column, head = frame[3], frame.iloc[:10]
groups = frame.groupby(0)
frame.head()
--- on gpu
frame = pandas.DataFrame({'epoch': [1], 'batch': [None]})
frame.at[0, 'batch'] = array()
column, head = frame['batch'], frame.iloc[:1]
groups = frame.groupby('epoch')
"""  # noqa: E501


def _groups() -> Iterator[tuple[str, tuple[Scenario, ...]]]:
    """Yield the title and the scenarios of each group in the text."""
    for group in re.split(r"^## ", _TEXT, flags=re.MULTILINE)[1:]:
        title, *texts = re.split(r"^### ", group, flags=re.MULTILINE)
        yield title.strip(), tuple(map(_parsed, texts))


def _parsed(text: str) -> Scenario:
    """Return the scenario of a text such as ``name [needs torch]``, two lines, and its cells."""
    head, *blocks = re.split(r"^---", text.strip(), flags=re.MULTILINE)
    title, pins, advice = head.strip().split("\n")
    name, _, field_text = title.partition(" [")
    fields = _marks(field_text.rstrip("]"))
    before = ""
    cells = []
    on_gpu = []
    for block in blocks:
        line, _, code = block.partition("\n")
        marks = _marks(line.strip())
        answers = [answer for answer in marks.get("answers", "").split(", ") if answer]
        cell = Cell(code.strip(), marks.get("raises", ""), tuple(answers))
        if "before" in marks:
            before = cell.code
        elif "on" in marks:
            on_gpu.append(cell)
        else:
            cells.append(cell)
    return Scenario(
        name,
        pins,
        advice,
        tuple(cells),
        tuple(on_gpu),
        before,
        holder=fields.get("holder", ""),
        needs=tuple(fields.get("needs", "").split()),
        alone="alone" in fields,
    )


def _marks(text: str) -> dict[str, str]:
    """Return the words after each mark: ``raises ValueError; alone`` has ``raises`` with
    ``ValueError``, and ``alone`` with nothing.
    """
    marks = {}
    for mark in text.split("; "):
        name, _, words = mark.partition(" ")
        marks[name] = words
    return marks


GROUPS = dict(_groups())
SCENARIOS = tuple(scenario for group in GROUPS.values() for scenario in group)
