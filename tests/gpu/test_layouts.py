"""Strides of results in estimates, against those of torch's kernels on a card."""

import json

import pytest

from tests.gpu.support import script

COMPARE_LAYOUTS = """
import json
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from ipygpumem.estimating.running import Estimation
from ipygpumem.estimating.memory.storages import tensors_in

def transposed(dtype=torch.float32):
    return torch.zeros(8, 16, 48, device="cuda", dtype=dtype).transpose(1, 2)

def halves():
    return transposed(torch.bfloat16)

def permuted():
    return torch.zeros(4, 8, 6, 6, device="cuda").permute(0, 2, 3, 1)

def channels_last():
    return torch.zeros(4, 8, 6, 6, device="cuda").to(memory_format=torch.channels_last)

def usual():
    return torch.zeros(8, 48, 32, device="cuda")

def column(x):
    return torch.ones(x.shape[1], device="cuda", dtype=x.dtype)

zeros = torch.zeros_like
FUNCTIONS = {
    "mse_loss": lambda x: F.mse_loss(x, zeros(x)),
    "l1_loss": lambda x: F.l1_loss(x, zeros(x)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, zeros(x)),
    "huber_loss": lambda x: F.huber_loss(x, zeros(x)),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, zeros(x)),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, torch.ones_like(x)),
    "cross_entropy": lambda x: F.cross_entropy(x, zeros(x)),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, column(x), column(x), training=True),
    "glu": lambda x: F.glu(x),
    "prelu": lambda x: F.prelu(x, column(x)),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "xlogy": lambda x: torch.xlogy(x, torch.ones_like(x)),
    "similarity": lambda x: F.cosine_similarity(x, torch.ones_like(x)),
    **{
        name: getattr(F, name)
        for name in ("elu", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish",
                     "relu", "silu", "softplus", "tanh")
    },
}

def step(function, make, is_reversed):
    x = make().requires_grad_()
    y = function(x)
    gradient = torch.ones_like(y)
    if is_reversed:
        gradient = torch.ones(y.shape[::-1], device="cuda", dtype=y.dtype).permute(tuple(range(y.dim()))[::-1])
    y.backward(gradient)

def layout(func, result):
    found = []
    for tensor in tensors_in(result):
        # The stride of a dimension of one element, or of none, means nothing.
        sizes = zip(tensor.shape, tensor.stride())
        found.append([list(pair) for pair in sizes if pair[0] > 1])
    return [str(func), found]

class Real(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.results = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.results.append(layout(func, result))
        return result

def estimated(run):
    results = []
    estimation = Estimation()
    estimation._tracker.observe = lambda func, args, kwargs, result: results.append(layout(func, result))
    estimation.of_call(run, (), {}, ())
    return results

MARK = 977
steps = []
for make in (transposed, halves, permuted, channels_last, usual):
    for name, function in FUNCTIONS.items():
        for is_reversed in (False, True):
            try:
                step(function, make, is_reversed)
            except (RuntimeError, ValueError, NotImplementedError):
                continue  # not a function of such an input
            steps.append((name, function, make, is_reversed))

def run():
    for number, (_, function, make, is_reversed) in enumerate(steps):
        torch.empty(number + 2, MARK, device="cuda")
        step(function, make, is_reversed)

def by_step(results):
    # The layouts of each step's results, by operator.
    found = []
    for func, layouts in results:
        if layouts and layouts[0] and layouts[0][-1] == [MARK, 1]:
            found.append({})
        else:
            found[-1].setdefault(func, []).append(layouts)
    return found

mode = Real()
with mode:
    run()
different = []
for (name, _, make, is_reversed), real, fake in zip(steps, by_step(mode.results), by_step(estimated(run)), strict=True):
    for func, layouts in real.items():
        # Estimates do not see operators that autograd calls in place.
        if len(fake.get(func, ())) != len(layouts):
            continue
        # Some kernels compute gradients that are not asked for, after the one that is.
        for on_card, in_estimate in zip(layouts, fake[func]):
            if on_card[: len(in_estimate)] != in_estimate:
                different.append([name, make.__name__, is_reversed, func, on_card, in_estimate])
print(json.dumps([len(steps), different]))
"""  # noqa: E501
LEAST_COMPARED = 200
"""Steps that must run on the card."""


@pytest.mark.simulated
def test_results_have_the_strides_that_they_have_on_a_card() -> None:
    """Forward and backward of functions, with inputs and gradients of several layouts."""
    compared, different = script(COMPARE_LAYOUTS)
    assert compared >= LEAST_COMPARED
    assert different == [], json.dumps(different[:5])
