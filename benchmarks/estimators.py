"""Compares estimates of a training step's peak by several tools, on five models in one run.

Each tool gets the same step, in a process of its own: two steps with Adam in float32, whose true
peak is that of torch's allocator on a simulated card. Run it with the simulated card's Python, and
the tools in a folder of their own (in one environment, deepspeed would replace torch):

    build/simgpu/python -m pip install --target TOOLS torchinfo accelerate vram-check deepspeed
    PYTHONPATH=TOOLS build/simgpu/python -m benchmarks.estimators

It prints a line of JSON for each model, with each tool's peak and CPU time, or its error, and
writes ``docs/measured/estimators.md``. With the name of a file of such lines it only writes.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from benchmarks import environment
from benchmarks.report import table

_HOME = Path(__file__).parent.parent
_SECONDS = 1800
"""Time that a tool gets for a model: without a card, the run itself takes minutes."""


# -- models ----------------------------------------------------------------------------------------


class Language(nn.Module):
    """A causal transformer of ``deep`` blocks, with its head."""

    def __init__(self, words: int, wide: int, deep: int, heads: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, wide)
        block = nn.TransformerEncoderLayer(
            wide, heads, 4 * wide, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(block, deep, enable_nested_tensor=False)
        self.head = nn.Linear(wide, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        return self.head(self.body(self.words(tokens), mask, is_causal=True))


class Recurrent(nn.Module):
    """Cells of an LSTM, run step by step."""

    def __init__(self, wide: int, classes: int) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(wide, wide), nn.Linear(wide, classes)

    def forward(self, steps: torch.Tensor) -> torch.Tensor:
        hidden = cell = steps.new_zeros(len(steps), self.cell.hidden_size)
        for number in range(steps.shape[1]):
            hidden, cell = self.cell(steps[:, number], (hidden, cell))
        return self.head(hidden)


def _perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)
    )


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 64), (64, 128), (128, 256)):
        layers += [
            nn.Conv2d(before, after, 3, padding=1),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1000))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True)
    layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return nn.Sequential(layers, nn.Linear(512, 1000))


class Model(NamedTuple):
    """A model to train, and its input."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Shape of the input."""
    words: int = 0
    """Number of different words, if the input consists of tokens."""


MODELS = {
    "perceptron, batch 4,096": Model(_perceptron, (4096, 1024)),
    "convolutions, batch 32 of 128 px": Model(_convolutions, (32, 3, 128, 128)),
    "encoder, batch 16 of 256": Model(_encoder, (16, 256, 512)),
    "language model, batch 8 of 512": Model(
        partial(Language, 32000, 512, 8, 8), (8, 512), words=32000
    ),
    "LSTM cells, batch 64 of 100 steps": Model(partial(Recurrent, 1024, 100), (64, 100, 1024)),
}


class Step:
    """Two training steps of a model."""

    def __init__(self, name: str, device: str) -> None:
        self.name = name
        model = MODELS[name]
        torch.manual_seed(0)
        self.model = model.make().to(device)
        self.shape = model.shape
        if model.words:
            self.input = torch.randint(model.words, self.shape, device=device)
        else:
            self.input = torch.randn(self.shape, device=device)
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def train(self) -> None:
        for _ in range(2):
            self.optimizer.zero_grad()
            self.model(self.input).float().logsumexp(-1).mean().backward()
            self.optimizer.step()


# -- tools -----------------------------------------------------------------------------------------


def _true(step: Step) -> int:
    """Run the step on the card; return the peak of torch's allocator in bytes."""
    step.train()
    return torch.cuda.max_memory_allocated()


def _ours(step: Step) -> int:
    import ipygpumem

    return int(ipygpumem.estimate(step.train).peak_bytes)


def _ours_without_card(step: Step) -> int:
    import ipygpumem

    return int(ipygpumem.estimate(step.train, device="cuda:0").peak_bytes)


def _mem_tracker(step: Step) -> int:
    """Return the peak that torch's tracker adds up while it follows the run on the card."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(step.model, step.optimizer, step.input)

    def forget(module: nn.Module, _: Any) -> None:
        # It follows one call of a model, unless it forgets that.
        if not tracker._mod_tracker.is_bw and tracker._mod_tracker.parents == {"Global"}:
            tracker.memory_tracking.pop(module, None)

    with register_module_forward_pre_hook(forget), tracker:
        step.train()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cuda:0")]["Total"])


def _accelerate(step: Step) -> int:
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    total_bytes, _ = calculate_maximum_sizes(step.model)
    return int(max(estimate_training_usage(total_bytes, "float32").values()))


def _deepspeed(step: Step) -> int:
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    count = sum(parameter.numel() for parameter in step.model.parameters())
    _, card_bytes = estimate_zero2_model_states_mem_needs(
        count, num_gpus_per_node=1, num_nodes=1, cpu_offload=False, additional_buffer_factor=1.0
    )
    return int(card_bytes)


def _torchinfo(step: Step) -> int:
    import torchinfo

    summary = torchinfo.summary(step.model, input_data=step.input, verbose=0, mode="train")
    return int(summary.total_input + summary.total_output_bytes + summary.total_param_bytes)


def _vram_check(step: Step) -> int:
    from vram_check import analyze

    is_of_sequences = len(step.shape) == 3 or not step.input.is_floating_point()
    batch = step.shape[0]
    length = step.shape[1] if is_of_sequences else 1
    analysis = analyze(step.model, batch, "fp32", "adam", training=True, seq_len=length)
    return int(analysis["estimate"].total_bytes)


class Tool(NamedTuple):
    """A way of getting the peak of a step."""

    peak_bytes: Callable[[Step], int]
    device: str
    """The device on which it gets the step."""


TOOLS = {
    "the run": Tool(_true, "cuda"),
    "ipygpumem, with a card": Tool(_ours, "cuda"),
    "ipygpumem, CUDA hidden": Tool(_ours_without_card, "cpu"),
    "MemTracker": Tool(_mem_tracker, "cuda"),
    "accelerate": Tool(_accelerate, "cpu"),
    "DeepSpeed": Tool(_deepspeed, "cpu"),
    "torchinfo": Tool(_torchinfo, "cpu"),
    "vram-check": Tool(_vram_check, "cpu"),
}


# -- processes -------------------------------------------------------------------------------------


def measure(model: str, tool: str) -> dict[str, Any]:
    """Return a tool's peak for a model in bytes, and the CPU seconds that it took."""
    step = Step(model, TOOLS[tool].device)
    gc.collect()
    began = time.process_time()
    peak_bytes = TOOLS[tool].peak_bytes(step)
    return {"peak": peak_bytes, "seconds": time.process_time() - began}


def measured(model: str, tool: str) -> dict[str, Any]:
    """Return the figures of ``measure`` from a process of its own, or its error."""
    command = [sys.executable, "-m", "benchmarks.estimators", model, tool]
    environ = dict(os.environ)
    if TOOLS[tool].device == "cpu" and tool.startswith("ipygpumem"):
        environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        done = subprocess.run(
            command, cwd=_HOME, env=environ, capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {_SECONDS} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        errors = done.stderr.splitlines() or ["no output"]
        return {"error": errors[-1]}
    return json.loads(lines[-1])


# -- the page --------------------------------------------------------------------------------------

_PAGE = _HOME / "docs" / "measured" / "estimators.md"
_HEAD = """\
# Estimates of several tools

Written by `python -m benchmarks.estimators`, whose head says what to install first.

{where}

Two steps of each model with Adam in float32 on the [simulated card](../../tests/simulated_gpu/README.md), where torch's
allocator is the real one and kernels compute nothing. Each cell: the error of the tool's peak against that of the
allocator, and the CPU time that the tool took, with its imports and without making the model. Fifty larger steps are in
[estimates.md](estimates.md).

accelerate and DeepSpeed know only the parameters and what Adam keeps, not the activations; torchinfo has no optimizer;
MemTracker needs the card and runs the step on it; vram-check takes twice the parameters for the activations of each
sample.

"""  # noqa: E501
_MIB = 2**20
_SMALL = 0.001
"""Errors below it are shown with more digits."""


def page(figures_by_model: dict[str, dict[str, Any]]) -> str:
    """Return the page of all models; each has its figures by tool."""
    tools = [tool for tool in TOOLS if tool != "the run"]
    lines = []
    remarks = []
    for model, figures in figures_by_model.items():
        true_bytes = figures["the run"]["peak"]
        cells = [_cell(figures[tool], true_bytes) for tool in tools]
        lines.append((model, f"{true_bytes / _MIB:,.1f} MiB", *cells))
        failed = [tool for tool in tools if "error" in figures[tool]]
        remarks += [f"- {tool}, {model}: `{figures[tool]['error']}`" for tool in failed]
    parts = [
        _HEAD.format(where=environment.describe_as_list())
        + table(("model", "true peak", *tools), lines)
    ]
    if remarks:
        parts += ["", *remarks]
    return "\n".join(parts) + "\n"


def _cell(figure: dict[str, Any], true_bytes: int) -> str:
    """Return a tool's error and CPU time."""
    if "error" in figure:
        return "fails"
    error = figure["peak"] / true_bytes - 1
    digits = 4 if abs(error) < _SMALL else 1
    return f"{error:+,.{digits}%}, {figure['seconds']:.1f} s"


def main() -> None:
    """Measure all tools with all models, or write the page of figures that were measured."""
    if len(sys.argv) > 2:
        print(json.dumps(measure(*sys.argv[1:])))
        return
    if len(sys.argv) > 1:
        lines = Path(sys.argv[1]).read_text("utf-8").splitlines()
        _PAGE.write_text(page(dict(map(json.loads, lines))), "utf-8")
        return
    figures_by_model = {}
    for model in MODELS:
        figures = {tool: measured(model, tool) for tool in TOOLS}
        print(json.dumps([model, figures]), flush=True)
        figures_by_model[model] = figures
    _PAGE.write_text(page(figures_by_model), "utf-8")


if __name__ == "__main__":
    main()
