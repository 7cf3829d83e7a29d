"""Builds random training steps as notebook code, and compares their estimates with torch's real
allocator on a card.

A step is a model, a loss, an optimizer and a loop, each drawn from a seed: types of numbers,
checkpoints, frozen parts, several backward passes and growing inputs are drawn, too. Each step is
estimated, then run twice: without a limit, and with the estimate's minimum as the limit.

Run by test_random_steps in a process of its own:

    python -m tests.gpu.random_steps 0 60       # prints a line of JSON for each step that is wrong
    python -m tests.gpu.random_steps 17 --show  # prints the code of one step, and all its figures
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from tests.gpu.step_figures import compared, prepare

HEADER = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

class Residual(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return x + self.layers(x)

class Gated(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))

class Attention(nn.Module):
    def __init__(self, width, heads, groups=None, kind="sdpa", causal=False):
        super().__init__()
        self.heads, self.groups, self.kind, self.causal = heads, groups or heads, kind, causal
        each = width // heads
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.pairs = nn.Linear(width, 2 * each * self.groups, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        each = width // self.heads
        query = self.query(x).view(batch, length, self.heads, each).transpose(1, 2)
        key, value = self.pairs(x).view(batch, length, 2, self.groups, each).permute(2, 0, 3, 1, 4)
        if self.groups != self.heads:
            key = key.repeat_interleave(self.heads // self.groups, 1)
            value = value.repeat_interleave(self.heads // self.groups, 1)
        if self.kind == "sdpa":
            found = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        else:
            scores = query @ key.transpose(-2, -1) * each**-0.5
            if self.causal:
                ahead = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
                scores = scores.masked_fill(ahead, float("-inf"))
            if self.kind == "dropout":
                found = F.dropout(scores.softmax(-1), 0.1) @ value
            else:
                found = scores.float().softmax(-1).to(x.dtype) @ value
        return self.out(found.transpose(1, 2).reshape(batch, length, width))

class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return (x.float() * scale).to(x.dtype) * self.weight

class Tokens(nn.Module):
    def __init__(self, words, width, length, tied):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def embed(self, x):
        return self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))

class Cells(nn.Module):
    def __init__(self, kind, width):
        super().__init__()
        self.cell, self.long = kind(width, width), kind is nn.LSTMCell

    def forward(self, x):
        state = x.new_zeros(x.shape[0], x.shape[2])
        state, outputs = (state, state) if self.long else state, []
        for part in x.unbind(1):
            state = self.cell(part, state)
            outputs.append(state[0] if self.long else state)
        return torch.stack(outputs, 1)

class Blocks(nn.Module):
    def __init__(self, *blocks, checkpointed=None, reentrant=False):
        super().__init__()
        self.blocks, self.checkpointed, self.reentrant = nn.ModuleList(blocks), checkpointed, reentrant

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            if self.checkpointed is not None and number % self.checkpointed == 0 and self.training:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            else:
                x = block(x)
        return x
"""  # noqa: E501


@dataclass
class Shape:
    """Arguments and result of a family of models, as code."""

    model: str
    """Statements that make ``model``."""
    inputs: str
    """Expression of the inputs for ``batch`` rows and a ``size``."""
    sizes: Sequence[int]
    """Possible sizes: lengths of sequences, or sides of images."""
    outputs: str
    """Expression of the outputs for ``x``."""
    classes: int
    """Last dimension of the outputs."""
    rows: Sequence[int]
    """Possible numbers of rows."""
    has_fixed_size: bool = False
    """True if the model's weights depend on the size."""


def chance(random: Random, share: float) -> bool:
    return random.random() < share


def activation(random: Random) -> str:
    """Return the code of an activation."""
    names = "ReLU GELU SiLU Tanh Sigmoid LeakyReLU ELU Mish Hardswish Softplus CELU SELU Softsign"
    name = random.choice([*names.split(), "ReLU", "GELU", "SiLU", "ReLU(inplace=True)", "PReLU"])
    return f"nn.{name}" if name.endswith(")") else f"nn.{name}()"


def norm(random: Random, width: int) -> str:
    """Return the code of a norm over the last dimension."""
    return random.choice([f"nn.LayerNorm({width})", f"nn.RMSNorm({width})", f"Norm({width})"])


def blocks(random: Random, members: Sequence[str]) -> str:
    """Return the code of blocks, some of them with checkpoints."""
    options = ""
    if chance(random, 0.3):
        options = f", checkpointed={random.choice([1, 1, 2, 3])}"
        if chance(random, 0.3):
            options += ", reentrant=True"
    return f"Blocks({', '.join(members)}{options})"


def dense(random: Random) -> Shape:
    """Return a model of linear layers."""
    width = random.choice([64, 96, 100, 256, 257, 512, 768, 1000, 1536, 2048])
    classes = random.choice([1, 2, 10, 100, 1000])

    def block() -> str:
        inner = random.choice([width, 2 * width, 4 * width, width // 2])
        layers = [f"nn.Linear({width}, {inner}{random.choice(['', '', ', bias=False'])})"]
        layers.append(activation(random))
        if chance(random, 0.4):
            layers.append(f"nn.Dropout({random.choice([0.0, 0.1, 0.5])})")
        layers.append(f"nn.Linear({inner}, {width})")
        norms = [norm(random, width), f"nn.BatchNorm1d({width})", activation(random)]
        if chance(random, 0.6):
            layers.insert(random.choice([0, len(layers)]), random.choice(norms))
        if "inplace" in layers[0]:
            layers[0] = "nn.ReLU()"
        return f"{random.choice(['Residual', 'nn.Sequential'])}({', '.join(layers)})"

    body = blocks(random, [block() for _ in range(random.randint(1, 6))])
    head = f"nn.Linear({width}, {classes})"
    return Shape(
        f"model = nn.Sequential(nn.Linear(size, {width}), {body}, {head})",
        "torch.randn(batch, size, device='cuda', dtype=dtype)",
        [32, 100, 784, 1024, 3000],
        "model(x)",
        classes,
        [8, 64, 100, 512, 1000, 4096, 16384],
        has_fixed_size=True,
    )


def convolution(random: Random, width: int, wide: int) -> list[str]:
    """Return the code of a convolution, its norm and its activation."""
    kernel = random.choice([1, 3, 3, 5])
    groups = random.choice([1, 1, 1, 4, width])
    options = f"padding={kernel // 2}, groups={groups}"
    options += random.choice(["", "", ", bias=False"])
    layers = [f"nn.Conv2d({width}, {wide}, {kernel}, {options})"]
    batch_norm = f"nn.BatchNorm2d({wide})"
    norms = [batch_norm, batch_norm, f"nn.GroupNorm(4, {wide})", f"nn.InstanceNorm2d({wide})"]
    if chance(random, 0.8):
        layers.append(random.choice(norms))
    layers.append(activation(random))
    if chance(random, 0.3):
        layers.append("nn.Dropout2d(0.1)")
    return layers


def change_of_size(random: Random, width: int) -> str:
    """Return the code of a layer that makes images smaller or larger, or of none."""
    larger = [
        f"nn.ConvTranspose2d({width}, {width}, 2, 2)",
        "nn.Upsample(scale_factor=2)",
        "nn.Upsample(scale_factor=2, mode='bilinear')",
    ]
    strided = f"nn.Conv2d({width}, {width}, 3, stride=2, padding=1)"
    smaller = ["nn.MaxPool2d(2)", "nn.AvgPool2d(2)", strided]
    return random.choice(["", "", "", *smaller, random.choice(larger)])


def images(random: Random) -> Shape:
    """Return a model of convolutions."""
    width = random.choice([16, 24, 32, 48, 64])
    classes = random.choice([2, 10, 100])
    layers = [f"nn.Conv2d(3, {width}, {random.choice([3, 5, 7])}, padding='same')"]
    for _ in range(random.randint(1, 4)):
        wide = random.choice([width, width, 2 * width])
        part = convolution(random, width, wide)
        if wide == width and chance(random, 0.5):
            part = [f"Residual({', '.join(part)})"]
        layers += part
        width = wide
        layers += filter(None, [change_of_size(random, width)])
    half = len(layers) // 2
    if "inplace" in layers[half]:  # it would change the input of a checkpoint
        layers[half] = "nn.ReLU()"
    halves = [f"nn.Sequential({', '.join(part)})" for part in (layers[:half], layers[half:])]
    body = blocks(random, halves)
    head = f"nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear({width}, {classes})"
    outputs = "model(x)"
    if chance(random, 0.25):  # an output for each pixel
        head = f"nn.Conv2d({width}, {classes}, 1)"
        outputs = f"model(x).permute(0, 2, 3, 1).reshape(batch, -1, {classes})"
    memory = ".to(memory_format=torch.channels_last)" if chance(random, 0.2) else ""
    return Shape(
        f"model = nn.Sequential({body}, {head})",
        f"torch.randn(batch, 3, size, size, device='cuda', dtype=dtype){memory}",
        [32, 48, 64, 96],
        outputs,
        classes,
        [4, 8, 16, 33, 64],
    )


def transformer_block(random: Random, width: int, heads: int, *, causal: bool) -> str:
    """Return the code of a block of attention and two linear layers."""
    inner = width * random.choice([1, 2, 4])
    if chance(random, 0.2):
        options = f"dropout={random.choice([0.0, 0.1])}, batch_first=True"
        options += f", norm_first={chance(random, 0.5)}"
        options += f", activation={random.choice(['relu', 'gelu'])!r}"
        return f"nn.TransformerEncoderLayer({width}, {heads}, {inner}, {options})"
    layers = [f"nn.Linear({width}, {inner})", activation(random), f"nn.Linear({inner}, {width})"]
    if chance(random, 0.3):
        layers.append("nn.Dropout(0.1)")
    forward = random.choice([f"Gated({width}, {inner})", ", ".join(layers)])
    groups = random.choice([heads, heads, 1, heads // 2])
    kind = random.choice(["sdpa", "sdpa", "sdpa", "plain", "dropout"])
    attention = f"Attention({width}, {heads}, {groups}, {kind!r}, {causal})"
    first = norm(random, width)
    second = norm(random, width)
    return f"nn.Sequential(Residual({first}, {attention}), Residual({second}, {forward}))"


def tokens(random: Random) -> Shape:
    """Return a transformer, or a network of recurrent cells, over tokens."""
    heads = random.choice([2, 4, 8])
    width = heads * random.choice([16, 32, 64, 80, 128])
    words = random.choice([100, 1000, 5003, 32000])
    causal = chance(random, 0.6)
    members: list[str] = []
    for _ in range(random.randint(1, 4)):
        if chance(random, 0.1):
            cell = random.choice(["nn.LSTMCell", "nn.GRUCell", "nn.RNNCell"])
            members.append(f"Residual(Cells({cell}, {width}))")
        else:
            members.append(transformer_block(random, width, heads, causal=causal))
    model = [
        f"model = Tokens({words}, {width}, 512, {chance(random, 0.4)})",
        f"model.body = {blocks(random, members)}",
        f"model.norm = {norm(random, width)}",
    ]
    return Shape(
        "\n".join(model),
        f"torch.randint({words}, (batch, size), device='cuda')",
        [16, 31, 64, 128, 200, 256],
        "model.head(model.norm(model.body(model.embed(x))))",
        words,
        [1, 2, 4, 8, 16],
    )


def bags(random: Random) -> Shape:
    """Return a recommender: bags of embeddings, and products of pairs."""
    rows = random.choice([1000, 20000, 200000])
    width = random.choice([16, 32, 64, 100])
    classes = random.choice([1, 5])
    mode = random.choice(["sum", "mean", "max"])
    layers = f"nn.Linear({width}, 256), {activation(random)}, nn.Linear(256, {classes})"
    return Shape(
        f"model = nn.Sequential(nn.EmbeddingBag({rows}, {width}, mode={mode!r}), {layers})",
        f"torch.randint({rows}, (batch, size), device='cuda')",
        [4, 20, 50],
        "model(x)",
        classes,
        [64, 1024, 5000],
    )


FAMILIES: Sequence[Callable[[Random], Shape]] = (dense, images, tokens, tokens, bags)


def loss(random: Random, classes: int) -> str:
    """Return the code of a loss of ``out``, which has ``classes`` values in its last dimension."""
    numbers = [
        "F.mse_loss(out, torch.zeros_like(out))",
        "F.l1_loss(out, torch.zeros_like(out))",
        "F.smooth_l1_loss(out, torch.zeros_like(out))",
        "F.huber_loss(out, torch.zeros_like(out))",
        "F.binary_cross_entropy_with_logits(out, torch.zeros_like(out))",
        "(out - 1).pow(2).mean()",
        "out.float().logsumexp(-1).mean()",
        "out.abs().sum() / len(out)",
        "F.soft_margin_loss(out, torch.ones_like(out))",
    ]
    labels = "torch.zeros(out.shape[:-1], dtype=torch.long, device='cuda').flatten()"
    flat = "out.flatten(0, -2)"
    targets = [
        f"F.cross_entropy({flat}, {labels})",
        f"F.cross_entropy({flat}, {labels}, label_smoothing=0.1)",
        f"F.cross_entropy({flat}.float(), {labels}, reduction='sum')",
        f"F.nll_loss({flat}.log_softmax(-1), {labels})",
        "F.kl_div(out.log_softmax(-1), out.detach().softmax(-1), reduction='batchmean')",
        "-out.log_softmax(-1)[..., 0].mean()",
        f"-{flat}.log_softmax(-1).gather(1, {labels}[:, None]).mean()",
        f"(F.cross_entropy({flat}, {labels}, reduction='none') * 0.5).mean()",
    ]
    return random.choice(numbers if classes == 1 else [*targets, *targets, *numbers])


def optimizer(random: Random) -> str:
    """Return the code of an optimizer of ``parameters``."""
    kinds = {
        "SGD": ["", "momentum=0.9", "momentum=0.9, nesterov=True", "weight_decay=0.1"],
        "Adam": ["", "amsgrad=True", "weight_decay=0.1", "fused=True"],
        "AdamW": ["", "", "fused=True"],
        "RMSprop": ["", "momentum=0.9", "centered=True"],
        "Adagrad": [""],
        "Adadelta": [""],
        "Adamax": [""],
        "NAdam": [""],
        "RAdam": [""],
        "ASGD": [""],
        "Rprop": [""],
        "Adafactor": [""],
    }
    kind = random.choice(["Adam", "AdamW", "AdamW", "SGD", "SGD", *kinds])
    options = random.choice(kinds[kind])
    if "fused" not in options and kind != "Adafactor" and chance(random, 0.2):
        options = ", ".join(filter(None, [options, "foreach=False"]))
    return f"torch.optim.{kind}(parameters, lr=0.01{options and ', '}{options})"


def frozen(random: Random) -> str:
    """Return statements that freeze a part of the model, or none."""
    if not chance(random, 0.25):
        return ""
    return random.choice(
        [
            "for parameter in list(model.parameters())[:2]:\n    parameter.requires_grad_(False)",
            "for parameter in list(model.parameters())[2:-2]:\n    parameter.requires_grad_(False)",
            "for parameter in list(model.parameters())[:-2]:\n    parameter.requires_grad_(False)",
            "for parameter in list(model.parameters())[::2]:\n    parameter.requires_grad_(False)",
        ]
    )


def indented(text: str, levels: int = 1) -> str:
    return "\n".join("    " * levels + line for line in text.split("\n"))


def forward(random: Random, shape: Shape, casts: str) -> str:
    """Return statements that compute ``loss`` for ``x``."""
    code = f"out = {shape.outputs}\nloss = {loss(random, shape.classes)}"
    extra = random.random()
    if extra < 0.1:
        code += "\nloss = loss + 0.1 * sum(p.pow(2).sum() for p in model.parameters())"
    elif extra < 0.2:
        teacher = f"with torch.no_grad():\n    teacher = {shape.outputs}"
        code = f"{teacher}\n{code}\nloss = loss + F.mse_loss(out, teacher)"
    if casts:
        return f"with torch.autocast('cuda', dtype=torch.{casts}):\n{indented(code)}"
    return code


def gradients(random: Random, shape: Shape, casts: str) -> str:
    """Return statements that add up the gradients of one step, from one or several batches."""
    backward = "scaler.scale(loss).backward()" if casts == "float16" else "loss.backward()"
    if chance(random, 0.12):
        first = backward.replace("backward()", "backward(retain_graph=True)")
        backward = f"{first}\n{backward}"
    lines = [f"x = {shape.inputs}", forward(random, shape, casts), backward]
    if chance(random, 0.5):
        lines.append("losses.append(loss.detach())")
    if chance(random, 0.2):
        lines.append("del out, loss")
    code = "\n".join(lines)
    passes = random.choice([1, 1, 1, 2, 3])
    return code if passes == 1 else f"for _ in range({passes}):\n{indented(code)}"


def evaluation(random: Random, shape: Shape) -> str:
    """Return statements that run the model without gradients."""
    context = random.choice(["no_grad", "inference_mode"])
    code = indented(f"x = {shape.inputs}\nout = {shape.outputs}")
    return f"model.eval()\nwith torch.{context}():\n{code}\nmodel.train()"


AVERAGE = """
with torch.no_grad():
    for p, q in zip(averages, model.parameters()):
        p.lerp_(q.detach(), 0.1)
""".strip()


def step(random: Random, shape: Shape, casts: str) -> str:
    """Return the statements of one step."""
    update = "optimizer.step()"
    clips = [
        "nn.utils.clip_grad_norm_(parameters, 1.0)",
        "nn.utils.clip_grad_value_(parameters, 1.0)",
    ]
    clip = random.choice(["", "", *clips])
    if casts == "float16":
        update = "scaler.step(optimizer)\nscaler.update()"
        clip = clip and f"scaler.unscale_(optimizer)\n{clip}"
    zero = random.choice(["optimizer.zero_grad()"] * 3 + ["optimizer.zero_grad(set_to_none=False)"])
    parts = [gradients(random, shape, casts), clip, update]
    parts.insert(random.choice([0, len(parts)]), zero)
    if chance(random, 0.15):
        parts.append(evaluation(random, shape))
    if chance(random, 0.1):
        parts.append(AVERAGE)
    return "\n".join(filter(None, parts))


def sizes_of(random: Random, shape: Shape) -> list[int]:
    """Return the sizes of the inputs, step by step: some grow or change."""
    sizes = [random.choice(shape.sizes)]
    if chance(random, 0.3) and not shape.has_fixed_size:
        sizes = sorted(random.sample(list(shape.sizes), min(3, len(shape.sizes))))
        if chance(random, 0.3):
            random.shuffle(sizes)
    return sizes * random.choice([1, 2, 2, 3])


def program(seed: int) -> str:
    """Return the code of a step as notebook code: ``train`` is what is estimated."""
    random = Random(seed)
    shape = random.choice(FAMILIES)(random)
    casts = random.choice(["", "", "", "bfloat16", "bfloat16", "float16"])
    dtype = "float32" if casts or chance(random, 0.8) else "bfloat16"
    if dtype == "bfloat16":  # for which torch has no such kernel
        shape.model = shape.model.replace("mode='max'", "mode='mean'")
    sizes = sizes_of(random, shape)
    code = step(random, shape, casts)
    lines = [
        HEADER,
        f"size, batch, dtype = {sizes[0]}, {random.choice(shape.rows)}, torch.{dtype}",
        shape.model,
        "model = model.cuda().to(dtype)",
        frozen(random),
        "parameters = [p for p in model.parameters() if p.requires_grad]",
        f"optimizer = {optimizer(random)}",
        "scaler = torch.amp.GradScaler('cuda')",
        "averages = [p.detach().clone() for p in model.parameters()]" if AVERAGE in code else "",
        "losses = []",
        "def train():",
        f"    for size in {sizes}:",
        indented(code, 2),
    ]
    return "\n".join(filter(None, lines))


def main() -> None:
    """Compare the steps of a range of seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("stop", type=int, nargs="?")
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    prepare()
    seeds = range(options.first, options.stop or options.first + 1)
    for seed in seeds:
        figures = compared(f"step {seed}", program(seed))
        code = program(seed).removeprefix(HEADER)
        if options.show:
            print(code, figures, sep="\n")
        elif figures.mistakes:
            print(json.dumps([figures.title, code]), flush=True)
    print(f"{len(seeds)} steps")


if __name__ == "__main__":
    main()
