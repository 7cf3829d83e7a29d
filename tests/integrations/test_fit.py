"""%%estimate --fit with transformers' models: their own checkpoints, inside a wrapper too, and
adapters of peft.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import transformers

from benchmarks.harness.fit_search import search
from tests.alone import estimates_of_code_alone
from tests.fit_cells import estimated

WRAPPED_MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class Wrapped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_hidden_layers": 2}
        self.inner = LlamaForCausalLM(LlamaConfig(vocab_size=100, use_cache=False, **sizes))

    def forward(self, words):
        return self.inner(words, labels=words).loss

wrapped = Wrapped()
LINE_OF_A_CHANGE
optimizer = torch.optim.AdamW(wrapped.parameters())
for _ in range(2):
    wrapped(torch.zeros(8, 512, dtype=torch.long)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""  # noqa: E501
"""A training of two steps with a model of transformers inside a module of the user's."""


def training(line: str = "") -> str:
    """Return the cell, with the line of a change after the model."""
    return WRAPPED_MODEL.replace("LINE_OF_A_CHANGE", line)


@pytest.fixture(autouse=True)
def small_rollback() -> Iterator[None]:
    with estimates_of_code_alone():
        yield


@pytest.fixture(scope="module")
def whole_search() -> Any:
    """The search for changes with which the training needs 1300 MiB."""
    with estimates_of_code_alone():
        return search(training(), "1300MiB")


def test_a_model_in_a_wrapper_is_checkpointed_by_its_own_method(whole_search: Any) -> None:
    (trial,) = (trial for trial in whole_search.trials if "checkpointing_enable" in trial.title)
    (change,) = trial.changes
    assert change.line.startswith("wrapped.inner.")
    assert hasattr(transformers.PreTrainedModel, change.title.removesuffix("()"))
    (device,) = estimated(training(change.line)).devices
    assert trial.device.peak_bytes == pytest.approx(device.peak_bytes, rel=0.01)
    assert whole_search.failed == []
    assert whole_search.findings.blocks == {}


def test_checkpointing_already_in_use_is_not_suggested() -> None:
    way = "wrapped.inner.gradient_checkpointing_enable()"
    assert search(training(way), "1GiB", run=False).findings.model.is_checkpointed


@pytest.mark.skipif(not find_spec("peft"), reason="peft is not installed")
def test_adapters_are_estimated_like_the_suggested_line(whole_search: Any) -> None:
    (trial,) = (trial for trial in whole_search.trials if "LoRA" in trial.title)
    line = f"from peft import LoraConfig, get_peft_model\n{trial.changes[0].line}"
    (device,) = estimated(training(line)).devices
    assert trial.device.peak_bytes == pytest.approx(device.peak_bytes, rel=0.02)
    assert torch.is_grad_enabled()
