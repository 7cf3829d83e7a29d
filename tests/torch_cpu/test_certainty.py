"""Torch's objects keep no memory that nothing counts."""

import torch

from ipygpumem.heap.knowledge.own_bytes import OwnBytes


def test_usual_objects_of_torch_are_counted() -> None:
    layer = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(layer.parameters())
    loss = layer(torch.ones(2, 3)).sum()
    objects = [
        layer,
        optimizer,
        loss,
        loss.grad_fn,
        layer.weight,
        layer.weight.untyped_storage(),
        loss.shape,
    ]
    objects += [
        torch.device("cpu"),
        torch.float32,
        torch.strided,
        torch.Generator(),
        torch.finfo(torch.float32),
    ]
    objects += [
        torch.utils.data.DataLoader([1]),
        torch.nn.LSTM(2, 2),
        torch.Size([1]),
        loss.register_hook(print),
    ]
    objects += [
        torch.ones(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(3)], layout=torch.jagged),
    ]
    assert OwnBytes().uncounted(objects) == set()


def test_scripted_functions_keep_memory() -> None:
    assert OwnBytes().uncounted([torch.jit.trace(torch.sin, torch.ones(1))]) == {"torch"}
