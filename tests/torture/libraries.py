"""Scenarios: torch, matplotlib and pandas."""

from __future__ import annotations

from tests.torture.scenario import Scenario, cells, fails

_COMES_BACK = "The end of the experiment gives it back."
_TORCH = ("torch",)
_MODEL = """
model = to_gpu(torch.nn.Sequential(torch.nn.Linear(2048, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 2048)))
watch(*model.parameters())
"""
_FRAME = "frame = pandas.DataFrame({'epoch': [1], 'batch': [None]})\nframe.at[0, 'batch'] = array()\n"
_SMALL = "model = to_gpu(torch.nn.Linear(8, 8))"

TORCH = (
    Scenario(
        "a list of losses with their graphs",
        "`losses.append(loss)` keeps the whole graph of every step, with the activations it saved.",
        "The end of the experiment deletes the list; `loss.item()` would not keep the graph at all.",
        cells(
            "w = tensor(requires_grad=True)\nlosses = []\nfor _ in range(2):\n    hidden = w * tensor()\n"
            "    losses.append(hidden.exp().sum())"
        ),
        needs=_TORCH,
    ),
    Scenario(
        "losses with their graphs in an outer list",
        "`losses.append(loss)` keeps the whole graph of every step, with the activations it saved.",
        "Held on purpose: append `loss.item()` or `loss.detach()`.",
        cells("hidden = tensor(requires_grad=True)\nlosses.append((hidden * hidden).sum())"),
        before="losses = []",
        share=0.0,
        holder="losses",
        needs=_TORCH,
    ),
    Scenario(
        "retain_graph",
        "`backward(retain_graph=True)` keeps what the graph has saved.",
        "The end of the experiment deletes the loss, and so the graph.",
        cells(
            "w = tensor(requires_grad=True)\nloss = (w * tensor()).exp().sum()\n"
            "loss.backward(retain_graph=True)\nwatch(w.grad)"
        ),
        needs=_TORCH,
    ),
    Scenario(
        "backward(create_graph=True)",
        "A gradient with a graph refers to its tensor, and the tensor to it: a cycle in C++, of which torch warns.",
        "Nothing but `.grad = None` ends it, before the tensor is deleted: `%gpumem leaks` says so.",
        cells(
            "import warnings\nwarnings.simplefilter('ignore')\nw = tensor(requires_grad=True)\n"
            "loss = (w * tensor()).exp().sum()\nloss.backward(create_graph=True)\nwatch(w.grad)"
        ),
        share=0.0,
        holder="a cycle in torch's own C++ code",
        needs=_TORCH,
    ),
    Scenario(
        "a loss after backward(create_graph=True) in an outer list",
        "A gradient with a graph refers to its tensor, and the loss to both.",
        "Held on purpose: append `loss.item()` or `loss.detach()`.",
        cells(
            "import warnings\nwarnings.simplefilter('ignore')\nw = tensor(requires_grad=True)\n"
            "loss = (w * tensor()).exp().sum()\nloss.backward(create_graph=True)\nwatch(w.grad)\nlosses.append(loss)"
        ),
        before="losses = []",
        share=0.0,
        holder="losses",
        needs=_TORCH,
    ),
    Scenario(
        "an optimizer's state",
        "The optimizer keeps the parameters, and two more tensors for each.",
        "The end of the experiment deletes the optimizer with the model.",
        cells(
            _MODEL
            + """
optimizer = torch.optim.Adam(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
model(to_gpu(torch.ones(4, 2048))).sum().backward()
optimizer.step(); scheduler.step()
for parameter in model.parameters():
    watch(parameter.grad, optimizer.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg_sq"])
"""
        ),
        needs=_TORCH,
        timeout=300,
    ),
    Scenario(
        "an interrupt in a training loop",
        "Ctrl-C leaves a traceback that keeps the model, the batch and the graph.",
        "The frames are released as soon as the traceback was shown.",
        (
            fails(
                """
import signal
def train():
    w = tensor(requires_grad=True)
    for step in range(10):
        loss = (w * tensor()).exp().sum()
        loss.backward()
        if step == 1:
            signal.raise_signal(signal.SIGINT)
train()
""",
                "KeyboardInterrupt",
            ),
        ),
        needs=_TORCH,
    ),
    Scenario(
        "an error in backward",
        "The graph, the hooks and the function that failed are all in the traceback.",
        "The end of the experiment releases the frames.",
        (
            fails(
                """
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
"""
            ),
        ),
        needs=_TORCH,
    ),
    Scenario(
        "an autograd function's context",
        "`ctx.attribute = output` is a cycle through the graph that Python's collector can not always see.",
        "The end of the experiment collects; save outputs with `save_for_backward`.",
        cells(
            """
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
"""
        ),
        needs=_TORCH,
    ),
    Scenario(
        "hooks on a model of the scope",
        "A hook that closes over its module is a cycle.",
        "The end of the experiment deletes the model and collects.",
        cells(
            """
model = to_gpu(torch.nn.Linear(8, 8))
def hook(module, inputs, output, kept=tensor()):
    model.last = output
def backward_hook(module, grads, outputs, kept=tensor()):
    model.grads = grads
handles = [model.register_forward_hook(hook), model.register_full_backward_hook(backward_hook)]
model(to_gpu(torch.ones(1, 8))).sum().backward()
"""
        ),
        needs=_TORCH,
    ),
    Scenario(
        "a forward hook on an outer model",
        "The model outlives the scope, and with it the hook and what it closes over.",
        "Held on purpose: call `remove()` of the hook's handle.",
        cells("def hook(module, inputs, output, kept=tensor()): pass\nhandle = model.register_forward_hook(hook)"),
        before=_SMALL,
        share=0.0,
        holder="forward hook on model",
        needs=_TORCH,
    ),
    Scenario(
        "a backward hook on an outer model",
        "The model outlives the scope, and with it the hook and what it closes over.",
        "Held on purpose: call `remove()` of the hook's handle.",
        cells(
            "def hook(module, grads, outputs, kept=tensor()): pass\nhandle = model.register_full_backward_hook(hook)"
        ),
        before=_SMALL,
        share=0.0,
        holder="backward hook on model",
        needs=_TORCH,
    ),
    Scenario(
        "a hook on an outer tensor",
        "The tensor outlives the scope, and with it the hook and what it closes over.",
        "Held on purpose: call `remove()` of the hook's handle.",
        cells("def hook(grad, kept=tensor()): pass\nhandle = weight.register_hook(hook)"),
        before="weight = to_gpu(torch.ones(8)).requires_grad_()",
        share=0.0,
        holder="hook on weight",
        needs=_TORCH,
    ),
    Scenario(
        "gradients of an outer model",
        "`backward()` fills the gradients of a model that outlives the scope.",
        "Held on purpose: `model.zero_grad()` or `optimizer.zero_grad()`.",
        cells("model(to_gpu(torch.ones(1, 4096))).sum().backward()\nwatch(model.weight.grad)"),
        before="model = to_gpu(torch.nn.Linear(4096, 4096, bias=False))",
        share=0.0,
        holder="model.weight.grad",
        needs=_TORCH,
    ),
    Scenario(
        "a DataLoader with workers, interrupted",
        "The iterator keeps the workers, their queues and the batches that wait there.",
        "The frames are released as soon as the traceback was shown, and the workers end.",
        (
            fails(
                """
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
""",
                "KeyboardInterrupt",
            ),
        ),
        needs=_TORCH,
    ),
    Scenario(
        "torch.compile",
        "The compiler keeps guards and compiled code for each model and function.",
        "The end of the experiment deletes the model; what the compiler keeps of it dies with it.",
        cells(
            """
model = to_gpu(torch.nn.Linear(4096, 4096, bias=False))
watch(model.weight)
compiled = torch.compile(model, backend="eager")
scale = tensor()
@torch.compile(backend="eager")
def step(x):
    return compiled(x).sum() * scale[0]
step(to_gpu(torch.ones(1, 4096))).backward()
watch(model.weight.grad)
"""
        ),
        needs=_TORCH,
        timeout=300,
        alone=True,
    ),
    Scenario(
        "torch.compile with generated C++",
        "Compiled kernels are loaded as libraries, and the compiler keeps the graphs that it has seen.",
        "The end of the experiment deletes model and tensors; the kernels stay, which hold none.",
        cells(
            """
model = to_gpu(torch.nn.Linear(4096, 4096, bias=False))
watch(model.weight)
scale = tensor()
@torch.compile
def step(x):
    return (model(x).relu() * scale[:4096]).sum()
for _ in range(2):
    step(to_gpu(torch.ones(4, 4096))).backward()
watch(model.weight.grad)
assert torch._inductor.metrics.generated_kernel_count > 0
"""
        ),
        needs=_TORCH,
        tools=("g++",),
        timeout=600,
        alone=True,
    ),
    Scenario(
        "a view of a tensor",
        "A view of ten numbers keeps the whole storage.",
        "The end of the experiment deletes the view.",
        cells("small = tensor()[:10]\nchunks = tensor().chunk(64)[:1]\nturned = tensor().view(4096, -1).T[0]"),
        needs=_TORCH,
    ),
    Scenario(
        "modules and TorchScript",
        "A traced module keeps its weights and the constants that it has seen.",
        _COMES_BACK,
        cells(
            "import warnings\nwarnings.simplefilter('ignore')\n"
            + _MODEL
            + "traced = torch.jit.trace(model, to_gpu(torch.ones(1, 2048)))"
        ),
        needs=_TORCH,
        alone=True,
    ),
)

LIBRARIES = (
    Scenario(
        "a figure shown in the notebook",
        "Artists keep the arrays that they draw; the inline backend closes a figure at the end of its cell.",
        _COMES_BACK,
        cells(
            """
import matplotlib.pyplot as plt
figure, axes = plt.subplots(figsize=(1, 1))
image = axes.imshow(numpy.ones((4096, 4096), dtype="float32"))
watch(numpy.ma.getdata(image.get_array()))
image.kept = array()
"""
        ),
        needs=("numpy", "matplotlib"),
        timeout=300,
    ),
    Scenario(
        "a figure without pyplot",
        "Artists, axes and figure refer to each other in cycles.",
        "The end of the experiment deletes the figure and collects.",
        cells(
            """
from matplotlib.figure import Figure
figure = Figure(figsize=(1, 1))
line, = figure.subplots().plot(numpy.ones(1 << 21))
watch(line.get_ydata(orig=True))
line.kept = array()
"""
        ),
        needs=("numpy", "matplotlib"),
    ),
    Scenario(
        "a figure that pyplot keeps open",
        "With another backend than the inline one pyplot keeps each figure until it is closed.",
        "Held on purpose: `plt.close()`.",
        cells("figure, axes = plt.subplots()\nline, = axes.plot([1, 2])\nline.kept = array()"),
        before="import matplotlib\nmatplotlib.use('agg')\nimport matplotlib.pyplot as plt",
        share=0.0,
        holder="matplotlib figure",
        needs=("numpy", "matplotlib"),
        alone=True,
    ),
    Scenario(
        "pandas frames and views",
        "A column or a slice may be a view that keeps the whole frame.",
        "The end of the experiment deletes the names.",
        cells(
            """
frame = pandas.DataFrame(array().reshape(-1, 16), copy=False)
watch(frame.to_numpy(copy=False))
column, head = frame[3], frame.iloc[:10]
groups = frame.groupby(0)
frame.head()
"""
        ),
        on_gpu=cells(_FRAME + "column, head = frame['batch'], frame.iloc[:1]\ngroups = frame.groupby('epoch')"),
        needs=("numpy", "pandas"),
    ),
    Scenario(
        "a pandas column in an outer list",
        "A column may be a view that keeps the whole frame.",
        "Held on purpose: append a `copy()`.",
        cells("frame = pandas.DataFrame(array().reshape(-1, 16), copy=False)\ncolumns.append(frame[3])"),
        on_gpu=cells(_FRAME + "columns.append(frame['batch'])"),
        before="columns = []",
        share=0.0,
        holder="columns",
        needs=("numpy", "pandas"),
    ),
)
