"""What is advised about models of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from ipygpumem.advising import advisor
from ipygpumem.advising.places import Scope
from tests import allocated as measuring
from tests.allocated import allocated

SIZES = {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 200}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": (
        "GPT2LMHeadModel",
        {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 200, "bos_token_id": 0, "eos_token_id": 0},
    ),
    "Llama": ("LlamaForCausalLM", {**SIZES, "intermediate_size": 512}),
    "BERT": ("BertForMaskedLM", {**SIZES, "intermediate_size": 512}),
}


def advised(net: Any, loss: Any) -> list[Any]:
    found = advisor.advise(Scope({"net": net, "loss": loss}, {}), 1 << 16).advice
    return [one for one in found if one.kind == "checkpointing"]


@pytest.mark.usefixtures("others_out_of_sight")
@pytest.mark.skipif(not measuring.is_known(), reason="this C library does not say what is allocated")
@pytest.mark.parametrize(("kind", "sizes"), MODELS.values(), ids=list(MODELS))
def test_a_model_of_transformers_is_checkpointed_by_its_own_method(kind: str, sizes: dict[str, Any]) -> None:
    """What its graphs keep less after the next forward pass is within 5 % of the promise."""
    model_type: Any = getattr(transformers, kind)
    net = model_type(model_type.config_class(**sizes)).train()
    x = torch.randint(200, (8, 64))
    torch.utils.checkpoint.checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False)  # loads more
    loss = net(input_ids=x, labels=x).loss
    (found,) = advised(net, loss)
    assert found.code == "net.gradient_checkpointing_enable()"
    before = allocated()
    net.gradient_checkpointing_enable()
    del loss
    loss = net(input_ids=x, labels=x).loss
    assert before - allocated() == pytest.approx(found.saves_bytes, rel=0.05)
    assert found.saves_bytes > 16 << 20
    assert advised(net, loss) == []


def test_a_model_whose_blocks_all_use_what_the_first_has_made_is_left_in_peace() -> None:
    sizes = {"num_layers": 3, "d_model": 64, "d_ff": 256, "num_heads": 4, "d_kv": 16, "vocab_size": 200}
    net = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).train()
    x = torch.randint(200, (8, 64))
    assert advised(net, net(input_ids=x, labels=x).loss) == []
