"""Estimates of the memory that kernels allocate inside, against torch's real allocator, operator by
operator.
"""

import json
from collections.abc import Callable

import pytest

from tests.gpu.support import SAMPLES, script

OPERATORS = {
    "softmax": "T(N, N).softmax(-1)",
    "logsumexp": "T(N, N).logsumexp(-1)",
    "bce_with_logits": "F.binary_cross_entropy_with_logits(T(N, N), fixed(N, N))",
    "mse_loss": "F.mse_loss(T(N, N), fixed(N, N))",
    "smooth_l1_loss": "F.smooth_l1_loss(T(N, N), fixed(N, N))",
    "huber_loss": "F.huber_loss(T(N, N), fixed(N, N))",
    "cross_entropy": "F.cross_entropy(T(N, N), zeros(N))",
    "attention": "F.scaled_dot_product_attention(T(4, 8, N, 64), T(4, 8, N, 64), T(4, 8, N, 64))",
    "attention, grouped": "F.scaled_dot_product_attention(T(4, 8, N, 64), T(4, 2, N, 64), T(4, 2, N, 64), "  # noqa: E501
    "enable_gqa=True)",
    "attention with a mask": "F.scaled_dot_product_attention(T(4, 8, N, 72), T(4, 8, N, 72), T(4, 8, N, 72), "  # noqa: E501
    "fixed(1, 1, N, N))",
    "attention of wide heads": "F.scaled_dot_product_attention(*[T(4, 8, N, 320) for _ in 'qkv'])",
    "attention of heads that are padded": "F.scaled_dot_product_attention(*[T(4, 8, N, 36) for _ in 'qkv'])",  # noqa: E501
    "attention of odd heads": "F.scaled_dot_product_attention(*[T(4, 8, 512, 30) for _ in 'qkv'], fixed(512, 512))",  # noqa: E501
    "layer_norm of a transposed input": "F.layer_norm(T(N, N).t(), (N,), T(N), T(N))",
    "rms_norm": "F.rms_norm(T(N, N), (N,), T(N)).sum()",
    "soft_margin_loss": "F.soft_margin_loss(T(N, N), fixed(N, N))",
    "max_pool2d": "F.max_pool2d(T(16, 64, 64, 64), 3, 2).sum()",
    "convolution of channels last": "F.conv2d(T(4, 64, 64, 128).permute(0, 3, 1, 2), T(32, 128, 3, 3))",  # noqa: E501
    "convolution of single pixels": "F.conv2d(T(4, 512, 64, 64), T(8, 512, 1, 1))",
    "convolution of expanded gradients": "F.conv2d(T(4, 64, 64, 64), T(64, 64, 3, 3), padding=1).sum()",  # noqa: E501
    "convolution of groups": "F.conv2d(T(4, 256, 64, 64), T(256, 32, 3, 3), padding=1, groups=8)",
    "convolution of two groups": "F.conv2d(T(4, 64, 64, 64).permute(0, 3, 1, 2), T(8, 32, 3, 3), groups=2)",  # noqa: E501
    "convolution by depth": "F.conv2d(T(4, 64, 64, 256).permute(0, 3, 1, 2), T(256, 1, 3, 3), padding=1, groups=256)",  # noqa: E501
    "convolution in three dimensions": "F.conv3d(T(2, 256, 8, 32, 32), T(16, 256, 1, 1, 1))",
    "transposed convolution": "F.conv_transpose2d(T(4, 64, 64, 64).permute(0, 3, 1, 2), T(64, 64, 2, 2))",  # noqa: E501
    **{
        f"{mode} interpolation of part of an input": f"F.interpolate(T(4, 64, 64, 128)[..., :64].permute(0, 3, 1, 2), "  # noqa: E501
        f"scale_factor=2, mode='{mode}').sum()"
        for mode in ("nearest", "bilinear")
    },
    "linear of one output": "F.linear(T(64, N), T(1, N), T(1)).sum()",
    "addmm of a scaled row": "torch.addmm(T(64), T(64, 64), T(64, 64), beta=0.5).sum()",
    "addmm of one row": "torch.addmm(T(1, 64), T(64, 64), T(64, 64)).sum()",
    "linear of four dimensions": "F.linear(T(8, 16, 64, N), T(N, N), T(N))",
    "GRU's cell": "torch.nn.GRUCell(N, N, device=home, dtype=dtype)(fixed(N, N), fixed(N, N)).sum()",  # noqa: E501
    "LSTM's cell": (
        "torch.nn.LSTMCell(N, N, device=home, dtype=dtype)(fixed(N, N), (fixed(N, N),) * "
        "2)[0].sum()"
    ),
    "a linear layer of columns, twice under autocast": (
        "torch.autocast('cuda', torch.bfloat16)(lambda layer, x: layer(layer(x.mT).mT))("
        "torch.nn.Linear(N, N, device=home), T(4, N, N).float())"
    ),
    "cells of an LSTM under autocast": (
        "torch.autocast('cuda', torch.bfloat16)(lambda cell, x: cell(x, cell(x, cell(x)))[0])("
        "torch.nn.LSTMCell(N, N, device=home), T(64, N).float()).sum()"
    ),
    "cells of a GRU under autocast": (
        "torch.autocast('cuda', torch.bfloat16)(lambda cell, x: cell(x, cell(x, cell(x))))("
        "torch.nn.GRUCell(N, N, device=home), T(64, N).float()).sum()"
    ),
    "embedding of an expanded gradient": "F.embedding(zeros(8, 256), T(4096, 512)).sum()",
    "embedding by frequency": "F.embedding(zeros(64, 1024), T(4096, 512), scale_grad_by_freq=True)",
    "embedding": "F.embedding(zeros(64, 1024), T(4096, 512))",
    "embedding_bag": "F.embedding_bag(zeros(4096, 20), T(100_000, 64), mode='sum')",
    "index with repeated indices": "T(4096, 512)[zeros(10**6), zeros(10**6)]",
    "index_select": "T(4096, 512).index_select(0, zeros(65536))",
    "gather": "T(N, N).gather(1, zeros(N, N))",
    "max": "T(N, N).max(-1).values",
    "topk": "T(N, N).topk(50, -1).values",
    "sort": "T(N, N).sort(-1).values",
    "sort of one long row": "T(N * N).sort().values",
    "sort of long rows": "T(32, 65536).sort(-1).values",
    "median": "T(N, N).median()",
    "product with an expanded gradient": "(T(8, 512, 512) @ T(8, 512, 512)).sum(1)",
    "linear": "F.linear(T(N, N), T(N, N), T(N))",
    "sum of bool": "(fixed(N, N) > 0).sum(-1)",
    "cumsum of bool": "(fixed(N, N) > 0).cumsum(-1)",
    "count_nonzero": "torch.count_nonzero(fixed(N, N))",
    "randperm": "torch.randperm(4 * 2**20, device='cuda')",
    "multinomial": "torch.multinomial(fixed(N, N).abs(), 1)",
    "attention of wider values": "F.scaled_dot_product_attention(T(4, 8, N, 64), T(4, 8, N, 64), T(4, 8, N, 128))",  # noqa: E501
    "attention of narrower values": "F.scaled_dot_product_attention(T(4, 8, N, 192), T(4, 8, N, 192), T(4, 8, N, 96), "  # noqa: E501
    "dropout_p=0.1)",
    "attention, grouped, of odd values": "F.scaled_dot_product_attention(T(4, 8, 512, 64), T(4, 2, 512, 64), "  # noqa: E501
    "T(4, 2, 512, 30), enable_gqa=True)",
    "encoder's fused kernel": "encoded(8, 256, 512)",
    "encoder's fused kernel with padding": "encoded(8, 256, 512, src_key_padding_mask=fixed(8, 256) > 1)",  # noqa: E501
    "bce_with_logits with weights of classes": "F.binary_cross_entropy_with_logits(T(N, N), fixed(N, N), "  # noqa: E501
    "pos_weight=fixed(N))",
    "bce_with_logits with both weights": "F.binary_cross_entropy_with_logits(T(N, N), fixed(N, N), fixed(N, N), "  # noqa: E501
    "pos_weight=fixed(N), reduction='none')",
    "softmax into float32": "T(N, N).softmax(-1, dtype=torch.float32)",
    "log_softmax of an expanded gradient": "T(N, N).log_softmax(-1).sum()",
    "logsigmoid": "F.logsigmoid(T(N, N))",
    "ctc_loss": "F.ctc_loss(T(512, 64, 128).log_softmax(-1), zeros(64, 64), [512] * 64, [64] * 64)",
    "dropout by its other name": "torch.dropout(T(N, N), 0.1, True)",
    "masked scores": "(T(N, N) * 1).masked_fill(fixed(N, N) > 0, 0.0) * 1",
    "scatter of an own gradient": "(T(N, N) * 1).scatter(0, zeros(N, N), 1.0) * 1",
    "kl_div of its own target": "F.kl_div(T(N, N).log_softmax(-1), T(N, N).softmax(-1), reduction='sum')",  # noqa: E501
    "scatter_reduce": "T(N, N).scatter_reduce(0, zeros(N, N), T(N, N), 'amax')",
    "index of an expanded gradient": "T(N, N)[zeros(4096)].sum()",
    "max of columns": "T(N, N).max(0).values",
    "std of columns": "T(N, N).std(0)",
    "avg_pool2d": "F.avg_pool2d(T(16, 64, 32, 32), 3, 1, 1).sum()",
    "max_pool2d, channels last": "F.max_pool2d(T(16, 64, 32, 32).to(memory_format=torch.channels_last), 2)",  # noqa: E501
    "interpolate": "F.interpolate(T(16, 16, 32, 32), scale_factor=2, mode='bicubic').sum()",
    "pad by reflection": "F.pad(T(16, 16, 64, 64), (1, 1, 1, 1), mode='reflect').sum()",
    "unfold": "F.unfold(T(16, 16, 32, 32), 3, padding=1).sum()",
    "fold": "F.fold(T(16, 144, 1024), (32, 32), 3, padding=1)",
    "transposed convolution of each channel": "F.conv_transpose2d(T(16, 64, 32, 32), T(64, 1, 4, 4), T(64), 2, 1, "  # noqa: E501
    "groups=64)",
    "pdist": "F.pdist(T(512, 64))",
    "cdist without products": "torch.cdist(T(256, 64), T(256, 64), p=1.0)",
    "sort of long columns": "T(8192, 64).sort(0).values",
    "roll": "T(8, 256, 64, 16).roll((3, 3), (1, 2))",
    "cdist": "torch.cdist(fixed(N, N), fixed(N, N))",
    "normal of means": "torch.normal(fixed(N, N), 1.0)",
    "normal in place": "fixed(N, N).normal_(0.0, 2.0)",
    "trace": "T(N, N).trace()",
    "irfft": "torch.fft.irfft(torch.fft.rfft(fixed(N, N).float()))",
}
COMPARE_OPERATORS = """
import gc, json, sys
import torch, ipygpumem
from torch.nn import functional as F

N, here, found = 1024, torch.cuda.is_available(), {}
home = torch.device("cuda" if here else "cpu")

def fixed(*shape):
    return torch.zeros(*shape, device="cuda", dtype=dtype)

def T(*shape):
    return fixed(*shape).requires_grad_()

def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.long, device="cuda")

def encoded(*shape, **more):
    with torch.no_grad():
        layer = torch.nn.TransformerEncoderLayer(shape[-1], 8, batch_first=True, device=home, dtype=dtype)
        return layer.eval()(fixed(*shape), **more)

def clean():
    gc.collect()
    if here:
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

# The first estimate imports torch's compiler, whose objects each later collection would pass over.
ipygpumem.estimate(lambda: torch.ones(1, device=home), device=None if here else "cuda:0")
gc.collect()
gc.freeze()
for place, (name, code) in enumerate(OPERATORS.items()):
    dtypes = [torch.float32]
    if not name.startswith(("cdist", "median", "multinomial", "pdist", "ctc")):
        dtypes.append(torch.float16 if name == "softmax into float32" else torch.bfloat16)
    if SAMPLES:
        dtypes = [dtypes[place % len(dtypes)]]
    for dtype in dtypes:
        exec(f"def run(): return {code}")

        def step():
            result = run()
            if result.requires_grad:
                result.backward(torch.ones_like(result))

        clean()
        devices = ipygpumem.estimate(step, device=None if here else "cuda:0").devices
        estimated = next(device.peak_bytes for device in devices if device.device == "cuda:0")
        clean()
        if here:
            step()
        found[f"{name}, {dtype}"] = estimated, torch.cuda.max_memory_allocated() if here else None
print(json.dumps(found))
"""  # noqa: E501


@pytest.mark.simulated
def test_operators_own_memory_is_counted_with_and_without_a_card(
    figure: Callable[[str], None],
) -> None:
    """The estimated peak of each operator, forward and backward, is the allocator's, also where no
    card is visible.
    """
    code = f"OPERATORS = {json.dumps(OPERATORS)}\nSAMPLES = {SAMPLES}\n{COMPARE_OPERATORS}"
    here = script(code)
    hidden = script(code, env={"CUDA_VISIBLE_DEVICES": ""})
    errors = {
        name: (estimated / real - 1, hidden[name][0] / real - 1)
        for name, (estimated, real) in here.items()
    }
    figure(
        f"{len(errors)} operators, largest:  "
        f"{max(abs(error) for pair in errors.values() for error in pair):.2%}"
    )
    assert {
        name: pair for name, pair in errors.items() if not -0.01 <= min(pair) <= max(pair) <= 0.03
    } == {}
