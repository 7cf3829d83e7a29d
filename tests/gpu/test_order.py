"""The order of an estimate's blocks, against the history of torch's own allocator."""

from collections.abc import Callable

import pytest

from ipygpumem.units import MIB
from tests.gpu.support import SAMPLES, script

OPERATORS = {
    "a convolution": "F.conv2d(T(4, 64, 32, 32), T(64, 64, 3, 3), T(64), padding=1)",
    "a strided convolution": "F.conv2d(T(4, 3, 64, 64), T(64, 3, 7, 7), T(64), 4, 3)",
    "a convolution of single pixels": "F.conv2d(T(4, 256, 32, 32), T(64, 256, 1, 1), T(64))",
    "a convolution of rows": "F.conv2d(T(4, 1024, 64).mT.view(4, 64, 32, 32), T(64, 64, 2, 2), T(64), 2)",  # noqa: E501
    "the bias of a convolution": "F.conv2d(fixed(4, 64, 32, 32), fixed(64, 64, 3, 3), T(64), padding=1)",  # noqa: E501
    "the bias of a convolution of groups": "F.conv2d(fixed(4, 64, 32, 32), fixed(64, 16, 3, 3), T(64), 1, 1, 1, 4)",  # noqa: E501
    "the weight of a convolution of groups": "F.conv2d(fixed(4, 64, 32, 32), T(64, 16, 3, 3), fixed(64), 1, 1, 1, 4)",  # noqa: E501
    "the input of a transposed convolution": "F.conv_transpose2d(T(4, 64, 32, 32), fixed(64, 32, 4, 4), fixed(32), 2, 1)",  # noqa: E501
    "the bias of a transposed convolution": "F.conv_transpose2d(fixed(4, 64, 32, 32), fixed(64, 32, 4, 4), T(32), 2, 1)",  # noqa: E501
    "the weight of a transposed convolution of groups": "F.conv_transpose2d(fixed(4, 64, 32, 32), T(64, 8, 4, 4), "  # noqa: E501
    "fixed(32), 2, 1, groups=4)",
    "a convolution by depth": "F.conv2d(T(4, 64, 32, 32), T(64, 1, 3, 3), T(64), 1, 1, 1, 64)",
    "a convolution of groups": "F.conv2d(T(4, 64, 32, 32), T(64, 16, 3, 3), T(64), 1, 1, 1, 4)",
    "a strided convolution of groups": "F.conv2d(T(2, 64, 32, 32), T(128, 16, 3, 3), T(128), 2, 1, 1, 4)",  # noqa: E501
    "a convolution of volumes": "F.conv3d(T(2, 64, 8, 16, 16), T(64, 64, 1, 1, 1))",
    "a transposed convolution": "F.conv_transpose2d(T(4, 64, 64, 64).mT, T(64, 64, 2, 2))",
    "a norm of a part": "F.layer_norm(T(N, 2 * N)[:, :N], (N,), T(N), T(N))",
    "a norm of groups": "F.group_norm(T(64, 256, 8, 8), 8, T(256), T(256))",
    "log_softmax of a part": "T(8, 65, N)[:, :-1].log_softmax(-1)",
    "softmax of a part": "T(8, 65, N)[:, :-1].softmax(-1)",
    "attention": "F.scaled_dot_product_attention(*[T(4, 128, 8, 64).mT.mT for _ in 'qkv'])",
    "attention of wide heads": "F.scaled_dot_product_attention(*[T(4, 8, N, 320) for _ in 'qkv'])",
    "bags of embeddings": "F.embedding_bag(indices(4096, 20), T(100_000, 64), mode='sum')",
    "bags of few embeddings": "F.embedding_bag(indices(4096, 20), T(1000, 50), mode='mean')",
    "largest values of bags": "F.embedding_bag(indices(4096, 20), T(100_000, 64), mode='max')",
    "embeddings": "F.embedding(indices(4096, 20), T(10_000, 48))",
    "a product of an expanded gradient": "(T(8, 512, 512) @ T(8, 512, 512)).sum(1)",
    "a loss of logits": "F.binary_cross_entropy_with_logits(T(N, N), torch.zeros(N, N, device='cuda'))",  # noqa: E501
    "huber_loss": "F.huber_loss(T(N, N), torch.zeros(N, N, device='cuda'))",
    "soft_margin_loss": "F.soft_margin_loss(T(N, N), torch.ones(N, N, device='cuda'))",
    "a loss of logits with weights of classes": "F.binary_cross_entropy_with_logits(T(N, N), fixed(N, N), pos_weight=fixed(N))",  # noqa: E501
    "losses of logits with both weights": "F.binary_cross_entropy_with_logits(T(N, N), fixed(N, N), fixed(N, N), "  # noqa: E501
    "pos_weight=fixed(N), reduction='none')",
    "a loss of means and variances": "F.gaussian_nll_loss(T(N, N), fixed(N, N), T(N, N) * 1)",
    "CTC loss": "F.ctc_loss(T(512, 64, 128).log_softmax(-1), indices(64, 64), [512] * 64, [64] * 64)",  # noqa: E501
    "CTC loss of few frames": "F.ctc_loss(T(64, 32, 512).log_softmax(-1), indices(32, 20), [64] * 32, [20] * 32)",  # noqa: E501
    "CTC loss without infinite losses": "F.ctc_loss(T(512, 32, 512).log_softmax(-1), indices(32, 20), [512] * 32, "  # noqa: E501
    "[20] * 32, zero_infinity=True)",
    "a convolution of sequences": "F.conv1d(T(8, 80, 3000), T(128, 80, 3), T(128), 2, 1)",
    "a convolution of sequences by rows": "F.conv1d(T(8, 4096, 64).mT, T(64, 64, 3), padding=1)",
    "a dilated convolution": "F.conv2d(T(4, 64, 32, 64)[..., :32], T(64, 64, 3, 3), padding=2, dilation=2)",  # noqa: E501
    "a dilated convolution of sequences": "F.conv1d(T(8, 64, 4096), T(64, 64, 3), T(64), padding=2, dilation=2)",  # noqa: E501
    "a transposed convolution with a bias": "F.conv_transpose2d(T(4, 64, 32, 32), T(64, 32, 4, 4), T(32), 2, 1)",  # noqa: E501
    "a transposed convolution of groups": "F.conv_transpose2d(T(4, 64, 32, 32), T(64, 8, 4, 4), T(32), 2, 1, groups=4)",  # noqa: E501
    "a transposed convolution of volumes": "F.conv_transpose3d(T(2, 32, 8, 16, 32)[..., :16], T(32, 16, 2, 2, 2), "  # noqa: E501
    "T(16), 2)",
    "distances": "torch.cdist(T(4, N, 512), T(4, N, 512))",
    "distances of columns": "torch.cdist(T(64, 512).mT, T(64, 512).mT)",
    "unfolding": "F.unfold(T(16, 16, 32, 64)[..., :32], 3, padding=1)",
    "unfolding with gaps": "F.unfold(T(16, 16, 64, 64), 2, stride=4)",
    "folding": "F.fold(T(16, 144, 2048)[..., :1024], (32, 32), 3, padding=1)",
    "folding with gaps": "F.fold(T(16, 64, 128)[..., :64], (32, 32), 2, stride=4)",
    "windows that overlap": "T(16, 4096).unfold(1, 16, 8)",
    "a product of copied matrices": "torch.einsum('bixy,ioxy->boxy', T(4, 16, 64, 33), T(16, 16, 64, 33))",  # noqa: E501
    "a bilinear map": "F.bilinear(T(512, 64), T(512, 96), T(32, 64, 96), T(32))",
    "a bilinear map of columns": "F.bilinear(T(64, 512).mT, T(512, 96), T(64, 32, 96).transpose(0, 1))",  # noqa: E501
    "inverse matrices": "torch.linalg.inv(T(8, 128, 128))",
    "systems of equations": "torch.linalg.solve(T(8, 128, 128), T(8, 128, 64))",
    "systems of equations with one right side": "torch.linalg.solve(T(8, 128, 128), T(8, 128))",
    "systems of equations with the same factors": "torch.linalg.solve(T(3, 200, 200), T(50, 3, 200, 100))",  # noqa: E501
    "systems of equations for rows": "torch.linalg.solve(T(50, 200, 200), T(50, 100, 200), left=False)",  # noqa: E501
    "triangular factors": "torch.linalg.lu_factor(T(8, 128, 128))[0]",
    "Cholesky factors": "torch.linalg.cholesky(T(8, 128, 128))",
    "a grid": "F.affine_grid(T(4, 2, 3), (4, 64, 64, 64), align_corners=False)",
    "a grid of volumes": "F.affine_grid(T(4, 3, 4), (4, 16, 16, 16, 16), align_corners=False)",
    "limits": "T(N, N).clamp(T(N, N), T(N, N))",
    "limits of columns": "T(N, N).clamp(T(N), T(N))",
    "a limit": "T(N, N).clamp(max=T(N, N))",
    "the largest value": "T(N, N).max()",
    "angles": "torch.atan2(T(N, N), T(N, N))",
    "sums of exponentials": "T(64, N, 4).logsumexp(-1)",
    "sums of exponentials of columns": "T(64 * N, 64).logsumexp(0)",
    "cumulative sums of exponentials": "T(N, N).logcumsumexp(-1)",
    "cumulative products": "T(N, 64).cumprod(-1)",
    "cumulative products of columns": "torch.cumprod(T(N, 64), dim=0)",
    "the largest values": "T(N, N).topk(50).values",
    "the largest values of long rows": "T(64, 100_000).topk(5).values",
    "the largest values of one row": "T(4_000_000).topk(5).values",
    "the largest values of short rows": "T(20_000, 100).topk(5).values",
    "the largest values of columns": "T(64, 9000, 8).topk(5, 1).values",
    "the largest values of rows that are apart": "T(1000, 3000).mT.topk(5).values",
    "many largest values": "T(64, 20_000).topk(5000).values",
    "many largest values of columns": "T(20_000, 8).topk(5000, 0).values",
    "many largest values in any order": "T(64, 20_000).topk(5000, sorted=False).values",
    "rows": "T(N, 1024)[indices(4096)]",
    "few rows": "T(N, 1024)[indices(2000)]",
    "rows of 16 bits": "T(N, 1024).to(torch.bfloat16)[indices(64, 256)]",
    "single values": "T(N, 1024)[indices(65536), indices(65536)]",
    "single values of few": "T(64, 64)[indices(8192), 3]",
    "rows of each sample": "T(8, N, 256)[:, indices(4096)].sum(0)",
    "places of each sample": "T(64, 3, N)[:, indices(4096), indices(4096)]",
    "columns of rows": "T(64, 3, N)[indices(4096), :, indices(4096)]",
    "pairs of indices": "T(64, 3, 100)[indices(4096, 1), indices(4)]",
    "rows that are added": "(T(N, 1024) * 1).index_put((indices(4096),), T(4096, 1024), True)",
    "values of a mask": "T(N, N).masked_scatter(fixed(N, N) > 0, T(N, N))",
    "values of a mask of columns": "T(N, N).mT.masked_scatter((fixed(N, N) > 0).mT, T(N * N))",
    "means of scattered values": "T(N, N).scatter_reduce(0, indices(2 * N, N), T(2 * N, N), 'mean')",  # noqa: E501
    "means of rows": "T(N, N).index_reduce(0, indices(2 * N), T(2 * N, N), 'mean')",
    "a sort of long rows": "T(N * N).sort().values",
    "a sort of several long rows": "T(64, 5000).sort().values",
    "a sort of many long rows": "T(200, 5000).sort().values",
    "a sort of very long rows": "T(2, 10**6).to(torch.bfloat16).sort().values",
    "a sort of long columns": "T(8192, 20).sort(0).values",
    "a stable sort of long columns": "T(8192, 20).sort(stable=True, dim=0).values",
    "a sort of long rows with gaps": "T(2, 12000)[:, ::2].sort().values",
    "a median": "T(N, N).median()",
    "the most frequent values": "T(N, N).mode(0).values",
    "values among a few": "(torch.isin(indices(N, 50), indices(20)), T(N))[1]",
    "values among many": "(torch.isin(indices(N, 50), indices(5000), assume_unique=True), T(N))[1]",
    "the number of values that are not zero": "T(N, N) * fixed(N, N).count_nonzero(0)",
    "repetitions": "torch.repeat_interleave(T(N * N), indices(N * N), output_size=5000)",
    "embeddings of limited norms of a sequence": "F.embedding(indices(8192), fixed(10_000, 48), max_norm=1.0) * T(48)",  # noqa: E501
    "embeddings of limited norms": "F.embedding(indices(4096, 20), fixed(10_000, 48), max_norm=1.0) * T(48)",  # noqa: E501
    "one-hot vectors": "F.one_hot(indices(4096, 16), 100) * T(100)",
    "different values": "(fixed(200_000).unique(), T(N))[1]",
    "different integers": "(indices(2000, 100).mT.unique(), T(N))[1]",
    "positions of different values": "indices(200_000).unique(return_inverse=True, return_counts=True)[1] * T(1)",  # noqa: E501
    "positions of different neighbours": "indices(N, N).mT.unique_consecutive(return_inverse=True)[1] * T(1)",  # noqa: E501
    "a spectrum of columns": "torch.fft.rfft(T(16, 64, 64), dim=1).real",
    "both halves of a spectrum of columns": "torch.fft.fft(T(16, 64, 64), dim=1).real",
    "a spectrum of the first dimensions": "torch.fft.rfft2(T(64, 64, 16), dim=(0, 1)).real",
    "a spectrum of four dimensions": "torch.fft.rfftn(T(8, 16, 16, 16)).real",
    "a spectrum of complex numbers": "torch.fft.fft2(torch.view_as_complex(T(16, 64, 64, 4, 2)), dim=(1, 2)).real",  # noqa: E501
    "a spectrum of columns of complex numbers": "torch.fft.ifft2(torch.view_as_complex(T(16, 64, 64, 2)).mT).real",  # noqa: E501
    "signals from spectra of columns": "torch.fft.irfft(torch.view_as_complex(T(16, 33, 64, 2)), dim=1)",  # noqa: E501
    "a spectrum from its middle": "torch.fft.fftshift(torch.fft.fft2(T(16, 64, 64))).real",
    "a spectrum": "torch.view_as_real(torch.stft(T(8, 16000) * 1, 512, return_complex=True))",
    "an interpolation to the same size": "F.interpolate(T(4, 64, 32, 64)[..., :32], (32, 32), mode='bilinear')",  # noqa: E501
}
COMMON = """
import gc, json
from itertools import groupby
import torch
from torch import nn
from torch.nn import functional as F
from ipygpumem.estimating.running import Estimation
from ipygpumem.estimating.memory.caching_allocator import rounded_to_blocks

N, SMALLEST = 1024, 16 << 10  # kernels also allocate a few KiB that estimates leave out

def T(*shape):
    return torch.zeros(*shape, device="cuda", requires_grad=True)

def fixed(*shape):
    return torch.zeros(*shape, device="cuda")

def indices(*shape):
    return torch.zeros(*shape, dtype=torch.long, device="cuda")

# The first estimate imports torch's compiler, over which each later collection would pass.
Estimation().of_call(torch.ones, (1,), {"device": "cuda"}, ())
gc.collect()
gc.freeze()

def in_order(events):
    # Adjacent frees leave the same free memory in any order.
    groups = groupby(events, key=lambda event: event[0])
    sizes = [(name, [size for _, size in group]) for name, group in groups]
    return [(name, sorted(group) if name == "free" else group) for name, group in sizes]

def estimated(step, assumed=()):
    estimation = Estimation(assumed=assumed)
    estimation.of_call(step, (), {}, (globals(),))
    events = []
    for life in estimation.log.lives:
        is_large = life.device.startswith("cuda") and life.size_bytes >= SMALLEST
        if is_large and not life.existed_before:
            events.append((life.born, "allocate", life.size_bytes))
            if life.died:
                events.append((life.died, "free", life.size_bytes))
    return [event[1:] for event in sorted(events)]

def done(step):
    torch.cuda.memory._record_memory_history(max_entries=10**6)
    step()
    (history,) = torch.cuda.memory._snapshot()["device_traces"]
    torch.cuda.memory._record_memory_history(enabled=None)
    names = {"alloc": "allocate", "free_completed": "free"}
    events = [(names.get(event["action"]), rounded_to_blocks(event["size"])) for event in history]
    return [event for event in events if event[0] and event[1] >= SMALLEST]
"""


def test_kernel_blocks_have_the_order_of_the_allocators_history() -> None:
    code = f"""
{COMMON}
different = {{}}
for name, code in {OPERATORS!r}.items():
    exec(f"def run(): return {{code}}")
    def step():
        result = run()
        result.backward(torch.empty_like(result))
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    ours, torchs = in_order(estimated(step)), in_order(done(step))
    if ours != torchs:
        different[name] = [ours, torchs]
print(json.dumps(different))
"""
    assert script(code) == {}


SELECTIONS = {
    "positions": ("x.nonzero()", 200_000),
    "positions of columns": ("x.mT.nonzero()", 200_000),
    "positions of a condition": ("torch.where(x > 0)", 200_000),
    "values of a mask": ("T(400, 500).masked_select(mask) * 2", 200_000),
    "values of a mask of rows": ("x.masked_select(mask[:, :1])", 200_000),
    "values of a mask of columns": ("x.mT.masked_select(mask.mT)", 200_000),
    "values at a mask": ("T(400, 500)[mask] * 2", 200_000),
    "values at a mask of columns": ("T(500, 400)[mask.mT] * 2", 200_000),
    "rows at a mask": ("T(400, 5000)[mask[:, 0]] * 2", 400),
    "places at two masks": ("T(4000, 4000)[column, column] * 2", 4000),
    "places at a mask and an index": ("T(4000, 4000)[column, indices(1)] * 2", 4000),
    "columns at a mask": ("T(40, 4000)[:, column] * 2", 4000),
    "columns at a mask and an index": ("T(40, 4000, 40)[:, column, indices(1)] * 2", 4000),
    "places at masks that are apart": ("T(4000, 4, 4000)[column, :, column] * 2", 4000),
    "values that replace those of a mask": (
        "(T(400, 500) * 1).index_put((mask,), x[mask])",
        200_000,
    ),
    "different values": ("x.unique()", 200_000),
    "different integers": ("whole.unique(return_counts=True)", 200_000),
    "numbers of different values": ("x.unique(return_inverse=True, return_counts=True)", 200_000),
    "different neighbours": ("x.unique_consecutive(return_counts=True)", 200_000),
    "different rows": ("rows.unique(dim=0)", 20_000),
    "different columns": ("rows.mT.contiguous().unique(dim=1, return_inverse=True)", 20_000),
    "numbers of different rows": ("rows.unique(dim=0, return_counts=True)", 20_000),
    "numbers of different neighbours": ("rows.mT.unique_consecutive(True, True, dim=1)", 20_000),
    "entries of different indices": (
        "torch.sparse_coo_tensor(indices(1, 20_000), fixed(20_000, 16), (5000, 16)).coalesce()",
        20_000,
    ),
    "entries of different places": (
        "torch.sparse_coo_tensor(indices(2, 20_000), fixed(20_000), (5000, 16)).coalesce()",
        20_000,
    ),
    "numbers of values": ("torch.bincount(whole.flatten())", 200_000),
}
"""Operators that select, and the number of all values, rows or bins from which they select."""


@pytest.mark.simulated
@pytest.mark.parametrize("share", [0.1] if SAMPLES else [0.01, 0.1, 0.5, 1])
def test_assumed_shares_have_the_order_of_the_allocators_history(share: float) -> None:
    """Each kernel gets so many values from the simulated card as the share says."""
    code = f"""
{COMMON}
import ctypes, math
card = ctypes.CDLL("libcudart.so.13")
x, mask, whole, rows = fixed(400, 500), fixed(400, 500) > 0, indices(400, 500), fixed(20_000, 50)
column = fixed(4000) > 0
different = {{}}
for name, (code, most) in {SELECTIONS!r}.items():
    exec(compile(f"def run(): return {{code}}", "a cell", "exec"))
    def step():
        result = run()
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.backward(torch.empty_like(result))
    gc.collect()
    ours = in_order(estimated(step, ["1={share}"]))
    card.simulate_count(math.ceil({share} * most) - ("bincount" in code))
    torchs = in_order(done(step))
    card.simulate_count(0)
    if ours != torchs:
        different[name] = [ours, torchs]
print(json.dumps(different))
"""
    assert script(code) == {}


PREFERENCES = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8000, 256)
        self.layers = nn.ModuleList([
            nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        ])
        self.head = nn.Linear(256, 8000, bias=False)
    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

policy, reference = Model().cuda(), Model().cuda().requires_grad_(False).eval()
optimizer = torch.optim.RMSprop(policy.parameters())
chosen, rejected = (torch.zeros(4, 256, dtype=torch.long, device="cuda") for _ in range(2))

def scores(model, tokens):
    logarithms = model(tokens)[:, :-1].log_softmax(-1)
    return logarithms.gather(2, tokens[:, 1:, None])[..., 0].sum(1)

def train():
    for _ in range(2):
        better, worse = scores(policy, chosen), scores(policy, rejected)
        with torch.no_grad():
            margin = scores(reference, chosen) - scores(reference, rejected)
        (-F.logsigmoid(0.1 * (better - worse - margin)).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
SEGMENTS = """
class Block(nn.Module):
    def __init__(self, width, ratio):
        super().__init__()
        self.reduce, self.norm = nn.Conv2d(width, width, ratio, ratio), nn.LayerNorm(width)
        self.query, self.pair = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.depth = nn.Conv2d(4 * width, 4 * width, 3, 1, 1, groups=4 * width)
    def forward(self, x, size):
        batch, length, width = x.shape
        image = x.permute(0, 2, 1).reshape(batch, width, size, size)
        fewer = self.norm(self.reduce(image).reshape(batch, width, -1).permute(0, 2, 1))
        keys, values = self.pair(fewer).reshape(batch, -1, 2, width).permute(2, 0, 1, 3)
        x = x + (self.query(x) @ keys.mT).softmax(-1) @ values
        y = self.grow(x)
        y = self.depth(y.mT.view(batch, 4 * width, size, size)).flatten(2).mT
        return x + self.shrink(F.gelu(y))

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.ModuleList([nn.Conv2d(3, 32, 7, 4, 3), nn.Conv2d(32, 64, 3, 2, 1)])
        self.blocks = nn.ModuleList([Block(32, 8), Block(64, 4)])
        self.heads = nn.ModuleList([nn.Linear(32, 64), nn.Linear(64, 64)])
        self.classes = nn.Conv2d(128, 19, 1)
    def forward(self, x):
        maps, results = zip(self.patches, self.blocks, self.heads), []
        for patch, block, head in maps:
            x = patch(x)
            batch, width, size, _ = x.shape
            x = block(x.flatten(2).mT, size)
            y = head(x).mT.reshape(batch, 64, size, size)
            x = x.mT.reshape(batch, width, size, size)
            results.append(F.interpolate(y, (64, 64), mode="bilinear"))
        return self.classes(torch.cat(results[::-1], 1))

model = Encoder().cuda()
optimizer = torch.optim.AdamW(model.parameters())
images = torch.zeros(8, 3, 256, 256, device="cuda")
labels = torch.zeros(8, 256, 256, dtype=torch.long, device="cuda")

def train():
    for _ in range(2):
        scores = F.interpolate(model(images), (256, 256), mode="bilinear")
        F.cross_entropy(scores, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.simulated
@pytest.mark.parametrize("model", [PREFERENCES, SEGMENTS], ids=["preferences", "segments"])
def test_the_reserved_memory_of_a_step_is_the_allocators(
    model: str, figure: Callable[[str], None]
) -> None:
    code = f"""
{COMMON}
import ipygpumem
{model}
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
(card,) = (one for one in ipygpumem.estimate(train).devices if one.device != "cpu")
train()
peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
print(json.dumps([card.peak_bytes, card.reserved_bytes, *peaks]))
"""
    peak, reserved, allocated, really_reserved = script(code)
    figure(f"reserved: estimated {reserved / MIB:g} MiB, {really_reserved / MIB:g} MiB")
    assert peak == pytest.approx(allocated, rel=0.002)
    assert reserved == pytest.approx(really_reserved, rel=0.005)
