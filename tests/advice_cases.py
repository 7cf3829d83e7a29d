"""Cases of each kind of advice: code that makes it due, and code that looks like it and must be left in peace."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """One case. ``D`` in the code stands for the device."""

    finds: str
    """The function of ``advisor.KINDS`` that finds it."""
    setup: str
    code: str
    """The line that is advised."""
    where: str = "torch"
    """What it needs: ``torch`` (any device), ``host`` (NumPy or pandas), ``output`` (IPython), ``cache``, ``gaps`` (a
    device), ``workers`` (child processes)."""
    then: str = ""
    """What shows the saving after the line, if it comes with the next forward pass."""


_NET = "net = nn.Sequential(nn.Linear(512, 512), nn.Sigmoid(), nn.Linear(512, 512), nn.Sigmoid()).to(D)\n"
_DATA = "x = torch.rand(4096, 512, device=D)\n"
_SCATTERED = (
    "net, gone = nn.ModuleList(), []\n"
    "for step in range(12):\n"
    "    net.append(nn.Linear(512, 1024).to(D))\n"
    "    gone += [torch.empty(5 << 19, dtype=torch.uint8, device=D) for part in range(7)]\n"
    "gone.clear()\n"
)
"""Each segment has a piece of a model, with garbage between."""
_GPT = """
class Block(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(256) for step in range(2))
        self.mix, self.out, self.drop = nn.Linear(256, 768), nn.Linear(256, 256), nn.Dropout(drop)
        self.mlp = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    def forward(self, x):
        q, k, v = self.mix(self.norms[0](x)).chunk(3, -1)
        x = x + self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v))
        return x + self.drop(self.mlp(self.norms[1](x)))
class GPT(nn.Module):
    def __init__(self, drop=0.0, between=nn.Identity(), kind=Block):
        super().__init__()
        self.embed, self.head, self.between = nn.Embedding(100, 256), nn.Linear(256, 100), between
        self.blocks = nn.ModuleList(kind(drop) for step in range(4))
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = self.between(block(x))
        return self.head(x)
def step(): return net(x).mean()
x = torch.randint(100, (8, 64), device=D)
from torch.utils.checkpoint import checkpoint
checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False)  # it loads much of torch
del checkpoint
"""
_CHECKPOINTED = (
    'from functools import partial; from torch.utils.checkpoint import checkpoint; [setattr(block, "forward", '
    "partial(checkpoint, block.forward, use_reentrant=False)) for block in {}[:-1]];"
)
_LAYER = "nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True"
_AGAIN = "del loss; loss = step()"
_CONV = """
class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for step in range(4))
        self.norm, self.act = nn.BatchNorm2d(8), ACT
    def forward(self, x):
        for conv in self.convs:
            x = self.act(self.norm(conv(x)))
        return x.mean()
net, x = Conv().to(D), torch.rand(16, 8, 64, 64, device=D)
def step(): return net(x)
loss = step()
"""
_LINEAR = """
net = nn.Sequential(*(layer for step in range(COUNT) for layer in (nn.Linear(512, 512), ACT))).to(D)
net, x = net.append(nn.Linear(512, 512).to(D)), torch.rand(2048, 512, device=D)
def step(): return net(x).mean()
loss = step()
"""
"""Models whose activation, and number of layers, is put in."""


def _linear(act: str, count: int = 2) -> str:
    return _LINEAR.replace("ACT", act).replace("COUNT", str(count))


_TRAINED = (
    f"{_NET}{_DATA}adam = torch.optim.Adam(net.parameters())\n"
    "net = net.append(nn.Linear(512, 4096).to(D)); adam.add_param_group({'params': list(net[4].parameters())})\n"
    "net(x).sum().backward(); adam.step()\n"
)

CASES = {
    "losses in a list": Case(
        "stored",
        f"{_NET}losses = []\nfor step in range(3):\n    losses.append(net(torch.rand(4096, 512, device=D)).mean())",
        "losses[:] = [item.detach() for item in losses]",
    ),
    "losses in a list, the last under a name, too": Case(
        "stored",
        f"{_NET}losses = []\nfor step in range(4):\n    loss = net(torch.rand(4096, 512, device=D)).mean()\n"
        "    losses.append(loss)",
        "losses[:] = [item.detach() for item in losses]",
    ),
    "results in a dict": Case(
        "stored",
        f"{_NET}{_DATA}found = {{'mean': net(x).mean(), \"it's\": net(x).sum()}}",
        "found.update({key: item.detach() for key, item in found.items()})",
    ),
    "a result in an attribute": Case(
        "stored",
        f"{_NET}{_DATA}class Run: pass\nrun = Run()\nrun.loss = net(x).mean()",
        "run.loss = run.loss.detach()",
    ),
    "one result among other things": Case(
        "stored",
        f"{_NET}{_DATA}row = [1, 'a', net(x).mean()]",
        "row[2] = row[2].detach()",
    ),
    "an evaluation with a graph": Case(
        "evaluated", f"{_NET}{_DATA}net.eval()\nout = net(x)[:10].clone()", "out = out.detach()"
    ),
    "gradients of an optimizer": Case("gradients", _TRAINED, "adam.zero_grad(set_to_none=True)"),
    "gradients of a model": Case("gradients", _TRAINED + "del adam", "net.zero_grad(set_to_none=True)"),
    "the averages of Adam": Case("states", _TRAINED, "adam.state.clear()"),
    "the momentum of SGD": Case(
        "states",
        f"{_NET}{_DATA}sgd = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)\nnet(x).sum().backward(); sgd.step()",
        "sgd.state.clear()",
    ),
    "the history of LBFGS": Case(
        "states",
        f"{_NET}lbfgs, x = torch.optim.LBFGS(net.parameters(), max_iter=4), torch.rand(64, 512)\n"
        "def closure():\n    lbfgs.zero_grad(); found = net(x).pow(2).mean(); found.backward(); return found\n"
        "lbfgs.step(closure)",
        "lbfgs.state.clear()",
        "host",
    ),
    "weights of float32 at rest": Case(
        "halved", "net = nn.Linear(2048, 2048).to(D).eval().requires_grad_(False)", "net.bfloat16()"
    ),
    "weights of float64 at rest": Case(
        "halved", "models = {'a': nn.LSTM(512, 512).double().to(D).eval()}", "models['a'].float()"
    ),
    "a head with a copy of the embedding": Case(
        "untied",
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embed, self.head = nn.Embedding(4096, 512), nn.Linear(512, 4096, bias=False)\n"
        "        self.head.weight = nn.Parameter(self.embed.weight.detach().clone())\n"
        "net = Net().to(D)",
        "net.head.weight = net.embed.weight",
    ),
    "a small view": Case("views", "row = torch.rand(4096, 1024, device=D)[0]", "row = row.clone()"),
    "small views in a list": Case(
        "views",
        "firsts = [torch.rand(1024, 1024, device=D)[0] for step in range(4)]",
        "firsts[:] = [item.clone() for item in firsts]",
    ),
    "a small view in an attribute": Case(
        "views",
        "class Run: pass\nrun = Run()\nrun.best = torch.rand(4096, 1024, device=D)[:16]",
        "run.best = run.best.clone()",
    ),
    "a small view of an array": Case("views", "row = np.random.rand(1024, 1024)[0]", "row = row.copy()", "host"),
    "equal tensors": Case("duplicates", "a = torch.rand(2048, 1024, device=D)\nbest = a.clone()", "best = a"),
    "equal arrays": Case("duplicates", "a = np.random.rand(1 << 20)\nkept = {1: a.copy()}", "kept[1] = a", "host"),
    "a tensor of float64": Case(
        "doubles", "x = torch.rand(1024, 1024, dtype=torch.float64, device=D)", "x = x.float()"
    ),
    "small numbers in int64": Case(
        "arrays", "labels = np.arange(1 << 20) % 1000", 'labels = labels.astype("int16")', "host"
    ),
    "a float32 in float64": Case(
        "arrays",
        "x = np.random.rand(1024, 1024).astype('float32').astype('float64', order='F')",
        'x = x.astype("float32")',
        "host",
    ),
    "columns of numbers": Case(
        "frames",
        "n = np.arange(1 << 20)\nframe = pd.DataFrame({'a': n % 100, 'b': n * 0.5, 'c': np.random.rand(n.size)})\n"
        "del n",
        "frame = frame.astype({'a': 'int8', 'b': 'float32'}).copy()",
        "host",
    ),
    "a column of few texts": Case(
        "frames",
        "frame = pd.DataFrame({'city': pd.Series(['city %d' % (i % 7) * 100 for i in range(20000)], dtype=object)})",
        "frame = frame.astype({'city': 'category'}).copy()",
        "host",
    ),
    "a DataFrame with columns of pandas' own dtypes, too": Case(
        "frames",
        "n = np.arange(1 << 20)\ntwo = ['x', 'y'] * (n.size // 2)\n"
        "frame = pd.DataFrame({'a': n % 100, 'city': pd.array(two), 'kind': pd.Categorical(two)})\n"
        "frame['day'] = pd.Timestamp('2026-01-01', tz='UTC')\n"
        "frame['maybe'] = pd.array(n, dtype='Int64')\ndel n",
        "frame = frame.astype({'a': 'int8'}).copy()",
        "host",
    ),
    "persistent workers": Case(
        "workers",
        "class Big:\n    def __len__(self): return 8\n    def __getitem__(self, i):\n"
        "        self.kept = bytearray(8 << 20)\n        return i\n"
        "from torch.utils.data import DataLoader\nloader = DataLoader(Big(), num_workers=2, persistent_workers=True)\n"
        "numbers = list(loader)",
        "loader._iterator = None",
        "workers",
    ),
    "a tensor in Out": Case("outputs", "torch.rand(1024, 1024, device=D)", "%xdel _1", "output"),
    "a list in Out": Case("outputs", "[1, {'a': torch.rand(1024, 1024, device=D)}]", "%xdel _1", "output"),
    "a tensor with a graph in Out": Case("outputs", f"{_NET}{_DATA}net(x).mean()", "%xdel _1", "output"),
    "blocks of the user's": Case(
        "checkpointing",
        f"{_GPT}net = GPT().to(D)\nloss = step()",
        _CHECKPOINTED.format("net.blocks"),
        then=_AGAIN,
    ),
    "blocks with dropout, in an attribute": Case(
        "checkpointing",
        f"{_GPT}class Run: pass\nrun = Run()\nrun.net = GPT(0.1).to(D)\n"
        "def step(): return run.net(x).mean()\nloss = step()",
        _CHECKPOINTED.format("run.net.blocks"),
        then=_AGAIN,
    ),
    "blocks side by side": Case(
        "checkpointing",
        f"{_GPT}net = GPT().to(D)\nx = torch.rand(8, 64, 256, device=D)\n"
        "def step(): return sum(block(x).mean() for block in net.blocks)\nloss = step()",
        _CHECKPOINTED.format("net.blocks"),
        then=_AGAIN,
    ),
    "blocks in a Sequential, of data that is gone": Case(
        "checkpointing",
        f"{_GPT}net = nn.Sequential(*(Block() for step in range(4))).to(D)\n"
        "def step(): return net(torch.rand(8, 64, 256, device=D)).mean()\nloss = step()",
        _CHECKPOINTED.format("net"),
        then=_AGAIN,
    ),
    "blocks of which only the biases train": Case(
        "checkpointing",
        f"{_GPT}net = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))\n"
        "    for step in range(4))).to(D)\n"
        "for part in net.modules():\n    if type(part) is nn.Linear: part.weight.requires_grad_(False)\n"
        "x = torch.rand(512, 256, device=D)\nloss = step()",
        _CHECKPOINTED.format("net"),
        then=_AGAIN,
    ),
    "torch's encoder": Case(
        "checkpointing",
        f"{_GPT}net = nn.TransformerEncoder({_LAYER}), 4).to(D)\nx = torch.rand(8, 64, 256, device=D)\nloss = step()",
        _CHECKPOINTED.format("net.layers"),
        then=_AGAIN,
    ),
    "torch's encoder, with norms first": Case(
        "checkpointing",
        f"{_GPT}net = nn.TransformerEncoder({_LAYER}, norm_first=True), 4, enable_nested_tensor=False).to(D)\n"
        "x = torch.rand(8, 64, 256, device=D)\nloss = step()",
        _CHECKPOINTED.format("net.layers"),
        then=_AGAIN,
    ),
    "a model in pieces": Case("gaps", _SCATTERED, "ipygpumem.purge(net)", "gaps"),
    "a model and its optimizer's state in pieces": Case(
        "gaps",
        f"{_SCATTERED}adam = torch.optim.Adam(net.parameters())\n"
        "for weight in net.parameters():\n"
        "    gone.append(torch.empty(7 << 20, dtype=torch.uint8, device=D)); weight.grad = torch.zeros_like(weight)\n"
        "adam.step(); gone.clear(); adam.zero_grad()",
        "ipygpumem.purge(net, adam)",
        "gaps",
    ),
    "a model in pieces, beside others' tensors": Case(
        "gaps",
        f"{_SCATTERED}kept = [torch.empty(n << 18, dtype=torch.uint8, device=D) for n in range(1, 20)]\n"
        "kept = kept[::2]; other = nn.Linear(1024, 1024).to(D); other(torch.rand(4, 1024, device=D)).sum().backward()",
        "ipygpumem.purge(net)",
        "gaps",
    ),
    "free segments": Case(
        "caches", "x = torch.empty(64 << 20, dtype=torch.uint8, device=D)\ndel x", "torch.cuda.empty_cache()", "cache"
    ),
    "LeakyReLU behind layers": Case(
        "in_place", _linear("nn.LeakyReLU()"), "for part in (net[1], net[3]): part.inplace = True", then=_AGAIN
    ),
    "ELU behind layers": Case(
        "in_place", _linear("nn.ELU()"), "for part in (net[1], net[3]): part.inplace = True", then=_AGAIN
    ),
    "SELU behind one layer": Case("in_place", _linear("nn.SELU()", 1), "net[1].inplace = True", then=_AGAIN),
    "CELU behind layers": Case(
        "in_place", _linear("nn.CELU()"), "for part in (net[1], net[3]): part.inplace = True", then=_AGAIN
    ),
    "RReLU behind layers": Case(
        "in_place", _linear("nn.RReLU()"), "for part in (net[1], net[3]): part.inplace = True", then=_AGAIN
    ),
    "many LeakyReLU": Case(
        "in_place",
        _linear("nn.LeakyReLU()", 6),
        "for part in [part for part in net.modules() if type(part) is type(net[1])]: part.inplace = True",
        then=_AGAIN,
    ),
    "one ELU that is called for each layer, behind a BatchNorm": Case(
        "in_place", _CONV.replace("ACT", "nn.ELU()"), "net.act.inplace = True", then=_AGAIN
    ),
}

NEAR_MISSES = {
    "losses without graphs": f"{_NET}losses = [net(torch.rand(4096, 512, device=D)).detach().mean() for i in 'abc']",
    "losses after backward": f"{_NET}{_DATA}net[0].weight.requires_grad_(False)\nlosses = [net(x).mean()]\n"
    "losses[0].backward()\nnet.zero_grad()",
    "a loss before backward": f"{_NET}{_DATA}loss = net(x).mean()",
    "a result that is in one list three times": f"{_NET}{_DATA}losses = [net(x).mean()] * 3",
    "a graph that two names hold": f"{_NET}{_DATA}losses = [net(x).mean()]\nloss = losses[0]",
    "an evaluation under inference_mode": f"{_NET}{_DATA}net.eval().bfloat16()\n"
    "with torch.inference_mode(): out = net(x.bfloat16())[:10].clone()",
    "gradients while a backward is to come": f"{_NET}{_DATA}net(x).sum().backward()\nloss = net(x).sum()",
    "gradients that a name holds": "w = torch.rand(1024, 1024, device=D, requires_grad=True)\n"
    "sgd = torch.optim.SGD([w], 0.1)\nw.sum().backward()\ng = w.grad",
    "SGD without momentum": f"{_NET}{_DATA}sgd = torch.optim.SGD(net.parameters(), 0.1)\n"
    "net(x).sum().backward(); sgd.step(); sgd.zero_grad()",
    "weights in training": "net = nn.Linear(2048, 2048).to(D)",
    "weights that a state_dict shares": "net = nn.Linear(2048, 2048).to(D).eval()\nsaved = net.state_dict()",
    "weights that an optimizer has": "net = nn.Linear(2048, 2048).to(D).eval()\n"
    "sgd = torch.optim.SGD(net.parameters(), 0.1)",
    "weights that a model in training shares": "layer = nn.Linear(2048, 2048).to(D)\n"
    "net, other = nn.Sequential(layer).eval(), nn.Sequential(layer, nn.Linear(2048, 2, device=D))\ndel layer",
    "states that a state_dict shares": f"{_NET}{_DATA}sgd = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)\n"
    "net(x).sum().backward(); sgd.step(); sgd.zero_grad()\nsaved = sgd.state_dict()",
    "weights of bfloat16": "net = nn.Linear(2048, 2048).to(D).bfloat16().eval()",
    "tied weights": "net = nn.Sequential(nn.Embedding(4096, 512), nn.Linear(512, 4096, bias=False)).to(D)\n"
    "net[1].weight = net[0].weight",
    "weights that differ in one element": "net = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for i in 'ab').to(D)\n"
    "with torch.no_grad(): net[1].weight.copy_(net[0].weight)[5, 5] += 1",
    "equal weights that only keys of text lead to": "net = nn.ModuleDict(\n"
    "    {step: nn.Linear(1024, 1024, bias=False, device=D) for step in '01'})\n"
    "net['1'].weight = nn.Parameter(net['0'].weight.detach().clone())",
    "a view whose base has a name": "base = torch.rand(4096, 1024, device=D)\nrow = base[0]",
    "a view that is most of its base": "rows = torch.rand(4096, 1024, device=D)[:3000]",
    "a view under two names": "row = torch.rand(4096, 1024, device=D)[0]\nsame = row",
    "a view in a tuple": "row = (torch.rand(4096, 1024, device=D)[0],)",
    "tensors that share their storage": "a = torch.rand(2048, 1024, device=D)\nb = a.view(-1)",
    "buffers full of zeros": "a = torch.zeros(2048, 1024, device=D)\nb = torch.zeros(2048, 1024, device=D)",
    "tensors that differ in one element": "a = torch.rand(2048, 1024, device=D)\nb = a.clone()\nb[2000, 7] += 1",
    "indices of int64": "index = torch.arange(1 << 20, device=D)",
    "numbers that need int64": "a = np.arange(1 << 20) << 40",
    "numbers that need float64": "a = np.random.rand(1 << 20)",
    "an array that a tensor shows": "a = np.arange(1 << 20)\nt = torch.from_numpy(a)",
    "an array with a view": "a = np.arange(1 << 20)\nhead = a[:1 << 19]",
    "an array in a closure, too": "a = np.arange(1 << 20)\nf = (lambda a: lambda: a)(a)",
    "a property": "class Run:\n    x = property(lambda self: self.__dict__['x'])\nrun = Run()\n"
    "vars(run)['x'] = torch.rand(4096, 1024, device=D)[0]",
    "a class with its own __getattribute__": "class Run:\n    def __getattribute__(self, name):\n"
    "        return object.__getattribute__(self, name)\nrun = Run()\nrun.x = torch.rand(4096, 1024, device=D)[0]",
    "a key that only the user's code could show": "class Key: pass\n"
    "found = {Key(): torch.rand(4096, 1024, device=D)[0]}",
    "a DataFrame of which a column of pandas' own dtype is in use": (
        "frame = pd.DataFrame({'a': np.arange(1 << 20), 'b': pd.array(range(1 << 20), dtype='Int64')})\n"
        "b = frame['b'].array"
    ),
    "a DataFrame of which a column of pandas' own dtype is in use as a Series": (
        "frame = pd.DataFrame({'a': np.arange(1 << 20), 'b': pd.array(range(1 << 20), dtype='Int64')})\nb = frame['b']"
    ),
    "a DataFrame of which a Series is in use": "frame = pd.DataFrame({'a': np.arange(1 << 20)})\na = frame['a']",
    "a DataFrame under two names": "frame = pd.DataFrame({'a': np.arange(1 << 20)})\nsame = frame",
    "an activation whose input is taken twice": _linear("nn.LeakyReLU()", 1).replace(
        "loss = step()", "y = [net[0](x)]\nloss = net[2](net[1](y[0]) + y.pop() * 2).mean()"
    ),
    "an activation behind one that needs its own result": _linear("nn.LeakyReLU()", 1).replace(
        "loss = step()", "loss = net[2](net[1](net[0](x).sigmoid())).mean()"
    ),
    "an activation whose input has a name": _linear("nn.LeakyReLU()", 1).replace(
        "loss = step()", "y = net[0](x)\nloss = net[2](net[1](y)).mean()"
    ),
    "an activation of a view": _linear("nn.ELU()").replace("(2048, 512,", "(16, 128, 512,"),
    "an activation of a leaf": _linear("nn.ELU()", 1).replace(
        "loss = step()", "x.requires_grad_()\nloss = net[2](net[1](x)).mean()"
    ),
    "an activation of data that only its graph keeps": _linear("nn.ELU()", 1).replace(
        "loss = step()", "loss = net[2](net[1](torch.rand(2048, 512, device=D, requires_grad=True))).mean()"
    ),
    "an activation whose result nobody keeps": _linear("nn.LeakyReLU()", 1).replace(
        "loss = step()", "loss = net[1](net[0](x)).mean()"
    ),
    "an activation that is a function": _CONV.replace("ACT", "nn.Identity()").replace(
        "self.act(self.norm(conv(x)))", "nn.functional.elu(self.act(self.norm(conv(x))))"
    ),
    "an activation that is a function, too": _CONV.replace("ACT", "nn.ELU()").replace(
        "self.act(self.norm(conv(x)))", "self.act(self.norm(nn.functional.selu(conv(x))))"
    ),
    "an activation in a derived class": "class Own(nn.LeakyReLU): pass\n" + _linear("Own()"),
    "activations in place": _linear("nn.LeakyReLU(inplace=True)"),
    "activations that torch copies the input of": _linear("nn.Hardtanh()"),
    "a ReLU, which keeps its result alone": _linear("nn.ReLU()"),
    "a negative slope": _linear("nn.LeakyReLU(-0.1)"),
    "an activation of what an activation made": _linear("nn.ELU()").replace(
        "loss = step()", "for at in (2, 5): net.insert(at, nn.ELU())\nloss = step()"
    ),
    "an activation of what one of another class made": _linear("nn.ELU()", 1).replace(
        "loss = step()", "net.insert(2, nn.LeakyReLU())\nnet[1].inplace = True\nloss = step()"
    ),
    "an activation before backward, when it is over": _linear("nn.ELU()") + "loss.backward(); net.zero_grad()",
    "an activation with a hook in the model": _linear("nn.ELU()").replace(
        "loss = step()", "net[0].register_forward_hook(lambda *given: None)\nloss = step()"
    ),
    "an activation whose saved input is packed": _linear("nn.ELU()").replace(
        "loss = step()",
        "with torch.autograd.graph.saved_tensors_hooks(lambda x: (x.clone(),), lambda x: x[0]): loss = step()",
    ),
    "activations of two models in one graph": _linear("nn.ELU()").replace(
        "loss = step()", "other = nn.Sequential(nn.Linear(512, 512), nn.ELU()).to(D)\nloss = net(other(x)).mean()"
    ),
    "an activation that a second model has, too, which needs its own result": _linear("nn.ELU()").replace(
        "loss = step()", "other = nn.Sequential(nn.Linear(512, 512), nn.Sigmoid(), net[1]).to(D)\nloss = step()"
    ),
    "an activation that a function calls by a name of its own": _linear("nn.ELU()").replace(
        "loss = step()", "act = net[1]\nloss = step()"
    ),
    "an activation behind a weight that a second model has, too": _linear("nn.ELU()", 1).replace(
        "loss = step()", "other = nn.Sequential(net[0], nn.ELU()).to(D)\nloss = net(x).mean() + other(x).mean()"
    ),
    "an activation in half precision that computes from its result": _linear("nn.ELU()").replace(
        "loss = step()", "with torch.autocast(torch.device(D).type, torch.bfloat16): loss = step()"
    ),
    "an activation that a compiler knows": _linear("nn.ELU()").replace(
        "loss = step()", "net = torch.compile(net, backend='eager')\nloss = step()"
    ),
    "an activation in DataParallel": _linear("nn.ELU()").replace(
        "loss = step()", "net = nn.DataParallel(net)\nloss = step()"
    ),
    "an activation of what a Function in Python made": _linear("nn.ELU()", 1).replace(
        "loss = step()",
        "class Twice(torch.autograd.Function):\n"
        "    forward = staticmethod(lambda ctx, x: x * 2)\n"
        "    backward = staticmethod(lambda ctx, grad: grad * 2)\n"
        "loss = net[2](net[1](Twice.apply(net[0](x)))).mean()",
    ),
    "blocks that keep no more than their inputs": f"{_GPT}net = nn.Sequential(*(\n"
    "    nn.Sequential(nn.Linear(512, 512), nn.Sigmoid()) for step in range(4))).to(D)\n"
    "x = torch.rand(2048, 512, device=D)\nloss = step()",
    "blocks in eval mode in part": f"{_GPT}net = GPT().to(D)\nnet.blocks[1].drop.eval()\nloss = step()",
    "blocks with a hook": f"{_GPT}net = GPT().to(D)\n"
    "net.blocks[0].mlp.register_forward_hook(lambda *given: None)\nloss = step()",
    "blocks in two passes of one graph": f"{_GPT}net = GPT().to(D)\nloss = (net(x) + net(x)).mean()",
    "blocks that skip one": f"{_GPT}net = GPT().to(D)\nx = torch.rand(8, 64, 256, device=D)\n"
    "a, b, c, d = net.blocks\ny = [a(x)]\ny.append(b(y[0]))\nloss = d(c(y[1]) + y[0]).mean(); del y",
    "blocks with more between them than in them": f"{_GPT}class Thin(nn.Module):\n"
    "    def __init__(self, drop):\n        super().__init__()\n"
    "        self.inner, self.norm = nn.Linear(256, 256), nn.LayerNorm(256)\n"
    "    def forward(self, x): return self.inner(self.norm(x))\n"
    "net = GPT(between=nn.Sequential(nn.GELU(), nn.SiLU(), nn.GELU(), nn.SiLU()), kind=Thin).to(D)\nloss = step()",
    "blocks that share a weight": f"{_GPT}net = GPT().to(D)\n"
    "net.blocks[2].out.weight = net.blocks[1].out.weight\nloss = step()",
    "blocks with BatchNorm": f"{_GPT}net = nn.Sequential(*(nn.Sequential(\n"
    "    nn.Linear(512, 512), nn.BatchNorm1d(512), nn.GELU(), nn.Linear(512, 512)) for step in range(4))).to(D)\n"
    "x = torch.rand(2048, 512, device=D)\nloss = step()",
    "blocks that count how often they ran": f"{_GPT}from torch.nn.utils.parametrizations import spectral_norm\n"
    "net = nn.Sequential(*(nn.Sequential(\n"
    "    spectral_norm(nn.Linear(512, 512)), nn.GELU(), nn.Linear(512, 512)) for step in range(4))).to(D)\n"
    "x = torch.rand(2048, 512, device=D)\nloss = step()",
    "blocks of one container of different classes": f"{_GPT}net = nn.Sequential(\n"
    "    Block(), nn.Sequential(Block()), Block()).to(D)\nx = torch.rand(8, 64, 256, device=D)\nloss = step()",
    "blocks whose forward() was replaced": f"{_GPT}net = GPT().to(D)\n"
    "for block in net.blocks: block.forward = block.forward\nloss = step()",
    "blocks after backward": f"{_GPT}net = GPT().to(D)\nloss = step()\nloss.backward(); net.zero_grad()",
    "blocks that a compiler knows": f"{_GPT}net = GPT().to(D)\n"
    "net = torch.compile(net, backend='eager')\nloss = step()",
    "blocks in DataParallel": f"{_GPT}net = nn.DataParallel(GPT().to(D))\nloss = step()",
    "blocks whose saved tensors are packed": f"{_GPT}net = GPT().to(D)\n"
    "with torch.autograd.graph.saved_tensors_hooks(lambda x: (x.clone(),), lambda x: x[0]): loss = step()",
}
"""Code after which there is nothing to advise."""
