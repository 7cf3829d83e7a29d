"""Makes models with random weights for cuda_steps.py: of transformers, and some of our own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Double(nn.Sequential):
    """Two convolutions, the first of which changes the number of channels."""

    def __init__(self, given: int, wide: int) -> None:
        super().__init__(
            nn.Conv2d(given, wide, 3, padding=1),
            nn.GroupNorm(8, wide),
            nn.SiLU(),
            nn.Conv2d(wide, wide, 3, padding=1),
            nn.GroupNorm(8, wide),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """A U-Net from pictures to pictures, with ``widths`` channels from the top to the bottom."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        given = [3, *widths[:-1]]
        self.down = nn.ModuleList(map(Double, given, widths))
        pairs = list(zip(widths[1:], widths, strict=False))[::-1]
        self.widen = nn.ModuleList(nn.ConvTranspose2d(low, high, 2, 2) for low, high in pairs)
        self.up = nn.ModuleList(Double(2 * high, high) for _, high in pairs)
        self.head = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: Any) -> Any:
        skipped = []
        for number, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2) if number else x)
            skipped.append(x)
        skipped.pop()
        for widen, block in zip(self.widen, self.up, strict=True):
            x = block(torch.cat([widen(x), skipped.pop()], dim=1))
        return self.head(x)


def generator() -> nn.Module:
    """Return a generator of pictures of 32 pixels from 100 numbers."""
    return nn.Sequential(
        nn.ConvTranspose2d(100, 512, 4),
        nn.BatchNorm2d(512),
        nn.ReLU(True),
        nn.ConvTranspose2d(512, 256, 4, 2, 1),
        nn.BatchNorm2d(256),
        nn.ReLU(True),
        nn.ConvTranspose2d(256, 128, 4, 2, 1),
        nn.BatchNorm2d(128),
        nn.ReLU(True),
        nn.ConvTranspose2d(128, 3, 4, 2, 1),
        nn.Tanh(),
    )


def discriminator() -> nn.Module:
    """Return a discriminator of these pictures."""
    return nn.Sequential(
        nn.Conv2d(3, 128, 4, 2, 1),
        nn.LeakyReLU(0.2, True),
        nn.Conv2d(128, 256, 4, 2, 1),
        nn.BatchNorm2d(256),
        nn.LeakyReLU(0.2, True),
        nn.Conv2d(256, 512, 4, 2, 1),
        nn.BatchNorm2d(512),
        nn.LeakyReLU(0.2, True),
        nn.Conv2d(512, 1, 4),
    )


def language_model(name: str, *, of: str, **config: Any) -> Any:
    """Return a model of transformers; ``of`` is the name of its configuration's class."""
    import transformers

    model_type = getattr(transformers, name)
    configuration_type = getattr(transformers, of)
    return model_type(configuration_type(**config))


def gpt2(wide: int, deep: int, heads: int) -> Any:
    return language_model(
        "GPT2LMHeadModel", of="GPT2Config", n_embd=wide, n_layer=deep, n_head=heads, use_cache=False
    )


def llama(
    wide: int, inner: int, deep: int, heads: int, dtype: Any = torch.bfloat16, **more: Any
) -> Any:
    """Return a LLaMA with ``deep`` layers; ``more`` are further fields of its configuration."""
    config = {
        "hidden_size": wide,
        "intermediate_size": inner,
        "num_hidden_layers": deep,
        "num_attention_heads": heads,
    }
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = language_model(
            "LlamaForCausalLM", of="LlamaConfig", use_cache=False, **config, **more
        )
    finally:
        torch.set_default_dtype(before)
    return model


small = partial(llama, 2048, 5632, 22, 32, num_key_value_heads=4)


def checkpointed(model: Any) -> Any:
    """Return a model that computes its activations again in the backward pass."""
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return model.train()


def adapted(model: Any, *names: str) -> Any:
    """Return a model of which only LoRA adapters of the layers ``names`` are trained."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=16, target_modules=list(names)))
