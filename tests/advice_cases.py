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
    """What it needs: ``torch`` (any device), ``host`` (NumPy or pandas), ``output`` (IPython), ``cache`` and ``gaps`` (a device),
    ``workers`` (child processes)."""
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
_AGAIN = "del loss; loss = step()"
_CONV = f"""
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
_LINEAR = f"""
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
    "weights of bfloat16": "net = nn.Linear(2048, 2048).to(D).bfloat16().eval()",
    "tied weights": "net = nn.Sequential(nn.Embedding(4096, 512), nn.Linear(512, 4096, bias=False)).to(D)\n"
    "net[1].weight = net[0].weight",
    "weights that differ in one element": "net = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for i in 'ab').to(D)\n"
    "with torch.no_grad(): net[1].weight.copy_(net[0].weight)[5, 5] += 1",
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
}
"""Code after which there is nothing to advise."""
