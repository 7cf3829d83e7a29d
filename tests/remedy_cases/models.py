"""Places in torch's modules, optimizers, hooks and graphs."""

from tests.remedy_cases.case import Case

_WITH_MASK = """
import torch
class Masked(torch.nn.Module):
    def forward(self, x):
        if self.cache is None:
            self.cache = x
        return x * self.mask
model = Masked(); model.cache = None"""
"""A module whose calls fail without a mask, and work without a cache."""
_ACCELERATE = "from tests.stand_ins import install; install('accelerate')"

MODELS: dict[str, Case] = {
    "a buffer of an older model in a list": Case(
        'outer[1].register_buffer("data", torch.from_numpy(x))',
        setup="import torch; outer = [torch.nn.Linear(2, 2) for _ in range(3)]",
        after="assert len(outer) == 3; outer[1](torch.ones(2))",
        kinds=("array",),
    ),
    "a private attribute of a library": Case(
        "add_hook_to_module(outer['model'], ModelHook({'weight': x}));",
        setup=f"""
        {_ACCELERATE}
        from accelerate.hooks import ModelHook, add_hook_to_module
        class Model: pass
        outer = {{'model': Model()}}; model = outer['model']
        """,
        after="assert model._hf_hook._weights['weight'] is not None",
        sentences=("let accelerate remove it",),
    ),
    "a private attribute of a library on a library's object": Case(
        "add_hook_to_module(outer, ModelHook(x));",
        setup=f"""
        {_ACCELERATE}
        from accelerate.hooks import ModelHook, add_hook_to_module
        import json; outer = json.JSONEncoder()
        """,
        after="outer._hf_hook",
        sentences=("let accelerate remove it",),
    ),
    "a function of a scheduler of torch": Case(
        "outer['s'].lr_lambdas[0] = lambda epoch, data=x: 1.0",
        setup="""
        import torch
        weight = torch.nn.Parameter(torch.ones(3)); optimizer = torch.optim.SGD([weight])
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
        outer = {'s': scheduler, 'kept': 1}; del scheduler
        """,
        after="assert outer == {'kept': 1}; weight.sum().backward(); optimizer.step()",
        kinds=("tensor",),
    ),
    "a loss next to an older one": Case(
        "outer.append((x * weight).sum())",
        setup="""
        import torch
        weight = torch.nn.Parameter(torch.ones(1)); outer = [(weight * 2).sum()]
        """,
        after="(older,) = outer; older.backward()",
        kinds=("tensor",),
    ),
    "an average that users add to an optimizer's state": Case(
        "optimizer.state[weight]['average'] = x",
        setup="""
        import torch
        weight = torch.nn.Parameter(torch.ones(3)); optimizer = torch.optim.Adam([weight])
        weight.sum().backward(); optimizer.step()
        """,
        after="""
        assert 'exp_avg' in optimizer.state[weight]
        weight.sum().backward()
        optimizer.step()
        """,
        kinds=("tensor",),
    ),
    "a buffer of a model": Case(
        "model.register_buffer('kept', x, persistent=False)",
        setup="import torch; model = torch.nn.Linear(2, 2)",
        after="model(torch.ones(1, 2)); model.state_dict()",
        kinds=("tensor",),
    ),
    "a parameter of two new modules in an older one": Case(
        """
        one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        one.weight = two.weight = torch.nn.Parameter(x)
        model.one, model.two = one, two
        watched.append(weakref.ref(one.weight))
        """,
        setup="import torch; model = torch.nn.Module(); model.body = torch.nn.Linear(2, 2)",
        after="model.body(torch.ones(1, 2)); model.state_dict()",
        kinds=("tensor",),
    ),
    "a new module at the end of an older one": Case(
        """
        model.append(torch.nn.Linear(2, 2))
        model[1].weight = torch.nn.Parameter(x)
        watched.append(weakref.ref(model[1].weight))
        """,
        setup="import torch; model = torch.nn.Sequential(torch.nn.Linear(2, 2))",
        after="model(torch.ones(1, 2))",
        kinds=("tensor",),
    ),
    "a buffer that forward reads": Case(
        "model.mask = x",
        setup=f"{_WITH_MASK}; model.register_buffer('mask', torch.ones(1))",
        kinds=("tensor",),
        sentences=("assign something smaller to model.mask: methods of Masked read it",),
    ),
    "a tensor that forward reads": Case(
        "model.mask = x",
        setup=f"{_WITH_MASK}; model.mask = torch.ones(1)",
        kinds=("tensor",),
        sentences=("assign something smaller to model.mask: methods of Masked read it",),
    ),
    "a cache that forward makes again": Case(
        "model.cache = x",
        setup=f"{_WITH_MASK}; model.mask = 1; del model.cache; "
        "model.register_buffer('cache', None)",
        after="model(torch.ones(1))",
        kinds=("tensor",),
    ),
    "an attribute of a layer": Case(
        "layer.last = x",
        setup="import torch; layer = torch.nn.Linear(2, 2)",
        after="layer(torch.ones(1, 2))",
    ),
    "a buffer of a part called state": Case(
        "model.state.register_buffer('kept', x, persistent=False)",
        setup="""
        import torch
        model = torch.nn.Module()
        model.state = torch.nn.Linear(2, 2)
        """,
        after="model.state(torch.ones(1, 2))",
        kinds=("tensor",),
    ),
    "a list of a model": Case(
        "model.outputs.append(x)",
        setup="import torch; model = torch.nn.Linear(2, 2); model.outputs = [1]",
        after="assert model.outputs == [1]; model(torch.ones(1, 2))",
        kinds=("tensor",),
    ),
    "a hook of a model": Case(
        "model[0].register_forward_hook(lambda model, inputs, output, data=x: None);",
        setup="import torch; model = torch.nn.Sequential(torch.nn.Linear(2, 2))",
        after="model(torch.ones(1, 2))",
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
        setup="import torch; model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())",
        after="model(torch.ones(1, 2))",
        kinds=("tensor",),
    ),
    "what a hook stores": Case(
        "model(x);",
        setup="""
        import torch
        outputs = [1]
        model = torch.nn.Identity()
        model.register_forward_hook(lambda model, inputs, output: outputs.append(output))
        None
        """,
        after="assert outputs == [1]; assert len(model._forward_hooks) == 1",
        kinds=("tensor",),
    ),
    "a hook of a tensor": Case(
        "weight.register_hook(lambda gradient, data=x: None);",
        setup="import torch; weight = torch.ones(3, requires_grad=True)",
        after="weight.sum().backward()",
        kinds=("tensor",),
    ),
    "a hook of all models": Case(
        """
        torch.nn.modules.module.register_module_forward_hook(
            lambda model, inputs, output, data=x: None
        );
        """,
        setup="import torch; model = torch.nn.Linear(2, 2)",
        after="model(torch.ones(1, 2))",
        kinds=("tensor",),
        sees_all=True,
    ),
    "an option of an optimizer": Case(
        "optimizer.param_groups[0]['mine'] = x",
        setup="""
        import torch
        weight = torch.nn.Parameter(torch.ones(3)); optimizer = torch.optim.SGD([weight])
        """,
        after="weight.sum().backward(); optimizer.step()",
        kinds=("tensor",),
    ),
    "a gradient": Case(
        "weight.grad = x",
        setup="import torch; weight = torch.nn.Parameter(torch.ones(10 << 20))",
        after="weight.sum().backward()",
        kinds=("tensor",),
    ),
    "a gradient in a dict": Case(
        "outer['weight'].grad = x",
        setup="import torch; outer = {'weight': torch.nn.Parameter(torch.ones(10 << 20))}",
        after="outer['weight'].sum().backward()",
        kinds=("tensor",),
    ),
    "a gradient of a model in an object": Case(
        "outer.model.weight.grad = x.reshape(outer.model.weight.shape)",
        setup="""
        import torch
        class Outer: pass
        outer = Outer(); outer.model = torch.nn.Linear(1 << 20, 10)
        """,
        after="outer.model.weight.sum().backward()",
        kinds=("tensor",),
    ),
    "a graph in a dict": Case(
        "outer['loss'] = (weight * x).sum()",
        setup="import torch; weight = torch.ones(1, requires_grad=True); outer = {}",
        after="outer['loss'].item()",
        kinds=("tensor",),
    ),
    "a graph in a tuple": Case(
        "outer['loss'] = (weight * x).sum(), 3",
        setup="import torch; weight = torch.ones(1, requires_grad=True); outer = {'kept': 1}",
        after="assert outer['kept'] == 1",
        kinds=("tensor",),
    ),
    "a sum of losses": Case(
        "outer.total = outer.total + (weight * x).sum()",
        setup="""
        import torch
        class Outer: pass
        weight = torch.ones(1, requires_grad=True); outer = Outer(); outer.total = 0
        """,
        after="outer.total.item()",
        kinds=("tensor",),
    ),
    "a loss in several containers": Case(
        """
        loss = (weight * x).sum()
        outer['loss'] = loss; losses.append(loss); run.last = loss
        run.rows.append({'loss': loss, 'step': 1})
        """,
        setup="""
        import torch
        class Run: pass
        weight = torch.ones(1, requires_grad=True); outer = {}; losses = [0.5]; run = Run()
        run.rows = [{'loss': 0.5, 'step': 0}]
        """,
        after="assert losses == [0.5]; run.last + outer['loss'] + run.rows[0]['loss']",
        kinds=("tensor",),
    ),
    "losses of one batch in a dict and a list": Case(
        """
        for step in range(6):
            loss = (weight * x).sum()
            outer[step] = loss; losses.append(loss)
        """,
        setup="""
        import torch
        weight = torch.ones(1, requires_grad=True); outer = {'kept': 1}; losses = [0.5]
        """,
        after="assert losses == [0.5] and outer['kept'] == 1; sum(outer.values())",
        kinds=("tensor",),
    ),
    "losses and their sum": Case(
        """
        parts = [(weight * part).sum() for part in x.clone().chunk(4)]
        del x; x = parts[0]
        losses += parts; outer['total'] = sum(parts)
        """,
        setup="""
        import torch
        weight = torch.ones(1, requires_grad=True); outer = {}; losses = [0.5]
        """,
        after="assert losses == [0.5]; outer['total'] + 1",
        kinds=("tensor",),
    ),
    "a loss as an attribute of a layer": Case(
        "layer.last = (weight * x).sum(); outer.append(layer.last)",
        setup="""
        import torch
        weight = torch.ones(1, requires_grad=True); layer = torch.nn.Linear(1, 1); outer = []
        """,
        after="layer(torch.ones(1, 1)); layer.last + 1",
        kinds=("tensor",),
    ),
    "losses with graphs after older numbers": Case(
        "outer['loss'] += [(weight * x).sum(), (weight * x).mean()]",
        setup="import torch; outer = {'loss': [0.5]}; weight = torch.ones(1, requires_grad=True)",
        after="assert outer['loss'] == [0.5]",
        kinds=("tensor",),
    ),
    "a gradient that an optimizer leads to": Case(
        """
        weight = torch.nn.Parameter(torch.zeros(1).expand(len(x)))
        weight.grad = x
        outer.append(torch.optim.SGD([weight]))
        """,
        setup="import torch; outer = []",
        kinds=("tensor",),
    ),
    "an average without a name": Case(
        "opt.state[weight]['average'] = x.clone()",
        setup="""
        import torch
        weight = torch.nn.Parameter(torch.ones(3)); opt = torch.optim.Adam([weight])
        weight.sum().backward(); opt.step()
        """,
        after="opt.step()",
        kinds=("tensor",),
    ),
    "a parameter in a new group": Case(
        "opt.add_param_group({'params': [torch.nn.Parameter(x)]})",
        setup="""
        import torch
        weight = torch.nn.Parameter(torch.ones(3)); opt = torch.optim.Adam([weight])
        """,
        kinds=("tensor",),
        sentences=("make the optimizer again, without it",),
    ),
    "the context of a function": Case(
        "result.grad_fn.data = x",
        setup="""
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
        after="result.sum().item()",
        kinds=("tensor",),
    ),
    "a data loader's iterator": Case(
        "outer['rows'] = iter(DataLoader(TensorDataset(x)))",
        setup="import torch; from torch.utils.data import DataLoader, TensorDataset; outer = {}",
        kinds=("tensor",),
    ),
    "the cache of a data set": Case(
        "rows.cache[3] = x",
        setup="""
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
        after="assert rows.cache == {1: 2}; list(loader)",
        kinds=("tensor",),
    ),
}
