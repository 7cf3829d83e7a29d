"""Training and inference steps of real models, run on a card or estimated: ``python -m benchmarks.cuda_steps``.

Each makes its model with random weights and returns what to run: two steps, since an optimizer makes its state in its
first. It runs in the environment of the simulated card, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional

from benchmarks.cuda_models import (
    LowRank,
    UNet,
    adapted,
    checkpointed,
    discriminator,
    generator,
    gpt2,
    language_model,
    seven,
    small,
)

Step = Callable[[], None]
STEPS: dict[str, Callable[[], Step]] = {}
"""What makes a model and returns the step, by what the table calls it."""
_DEVICE = "cuda"


def _train(
    loss_of: Callable[..., Any],
    optimizer: Any,
    *,
    mixed: Any = None,
    scaler: bool = False,
    rounds: int = 1,
    clip: Iterable[Any] | None = None,
) -> Step:
    """Return two steps; ``loss_of`` makes the data and returns a loss."""
    scale = torch.amp.GradScaler("cuda", enabled=scaler)
    clipped = list(clip or ())

    def run() -> None:
        for _ in range(2):
            for _ in range(rounds):
                with torch.autocast("cuda", dtype=mixed) if mixed else nullcontext():
                    loss = loss_of()
                scale.scale(loss / rounds).backward()
            if clipped:
                scale.unscale_(optimizer)
                nn.utils.clip_grad_norm_(clipped, 1.0)
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()

    return run


def _infer(call: Callable[[], Any], mode: Any = torch.no_grad) -> Step:
    def run() -> None:
        for _ in range(2):
            with mode():
                call()

    return run


# -- pictures ----------------------------------------------------------------------------------------------------------


def _images(count: int, size: int = 224) -> Any:
    return torch.randn(count, 3, size, size, device=_DEVICE)


def _labels(count: int) -> Any:
    return torch.zeros(count, dtype=torch.long, device=_DEVICE)


def _classifier(name: str, batch: int, optimizer: Any, size: int = 224, **options: Any) -> Step:
    import timm

    model = timm.create_model(name, num_classes=1000)

    def loss() -> Any:
        return functional.cross_entropy(model(_images(batch, size)), _labels(batch))

    clip = model.parameters() if options.pop("clipped", False) else None
    return _train(loss, optimizer(model.parameters()), clip=clip, **options)


def _classify(name: str, batch: int, mode: Any) -> Step:
    import timm

    model = timm.create_model(name, num_classes=1000).eval()
    return _infer(lambda: model(_images(batch)), mode)


def _unet() -> Step:
    model = UNet(64, 128, 256, 512)

    def loss() -> Any:
        x = _images(8, 256)
        return functional.mse_loss(model(x), x)

    return _train(loss, torch.optim.Adam(model.parameters()))


def _diffusion() -> Step:
    from diffusers import UNet2DModel

    model = UNet2DModel(sample_size=64, block_out_channels=(128, 256, 256, 512), layers_per_block=2)

    def loss() -> Any:
        x = _images(16, 64)
        return functional.mse_loss(model(x, _labels(16)).sample, x)

    options = {"mixed": torch.bfloat16, "clip": model.parameters()}
    return _train(loss, torch.optim.AdamW(model.parameters()), **options)


def _adversaries() -> Step:
    make, judge = generator(), discriminator()
    first, second = torch.optim.Adam(judge.parameters()), torch.optim.Adam(make.parameters())

    def run() -> None:
        for _ in range(2):
            real, noise = _images(512, 32), torch.randn(512, 100, 1, 1, device=_DEVICE)
            first.zero_grad()
            fake = make(noise)
            (functional.softplus(-judge(real)).mean() + functional.softplus(judge(fake.detach())).mean()).backward()
            first.step()
            second.zero_grad()
            functional.softplus(-judge(fake)).mean().backward()
            second.step()

    return run


# -- texts -------------------------------------------------------------------------------------------------------------


def _tokens(count: int, length: int) -> Any:
    return torch.zeros(count, length, dtype=torch.long, device=_DEVICE)


def _teach(model: Any, optimizer: Any, batch: int, length: int, **options: Any) -> Step:
    def loss() -> Any:
        tokens = _tokens(batch, length)
        return model(input_ids=tokens, labels=tokens).loss

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    clip = trained if options.pop("clipped", False) else None
    return _train(loss, optimizer(trained), clip=clip, **options)


def _encoder_decoder(name: str, of: str, optimizer: Any, batch: int, lengths: tuple[int, int], **options: Any) -> Step:
    model = language_model(name, of=of, **options.pop("config"))

    def loss() -> Any:
        return model(input_ids=_tokens(batch, lengths[0]), labels=_tokens(batch, lengths[1])).loss

    return _train(loss, optimizer(model.parameters()), **options)


def _speech(optimizer: Any, batch: int, change: Callable[[Any], Any] = lambda model: model, **config: Any) -> Step:
    model = change(language_model("WhisperForConditionalGeneration", of="WhisperConfig", **config))

    def loss() -> Any:
        sound = torch.randn(batch, config["num_mel_bins"], 3000, device=_DEVICE)
        return model(input_features=sound, labels=_tokens(batch, 128)).loss

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return _train(loss, optimizer(trained), mixed=torch.bfloat16)


def _wave() -> Step:
    model = language_model("Wav2Vec2ForCTC", of="Wav2Vec2Config", mask_time_prob=0.0, layerdrop=0.0)

    def loss() -> Any:
        return model(torch.randn(8, 160_000, device=_DEVICE)).logits.float().pow(2).mean()

    return _train(loss, torch.optim.AdamW(model.parameters()), mixed=torch.float16, scaler=True)


def _experts(how: str) -> Step:
    config = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "num_attention_heads": 16}
    more = {"num_key_value_heads": 8, "num_local_experts": 8, "use_cache": False, "experts_implementation": how}
    model = language_model("MixtralForCausalLM", of="MixtralConfig", **config, **more).to(torch.bfloat16)
    return _teach(model, torch.optim.AdamW, 1, 256)


def _low_rank_by_hand() -> Step:
    model = small(torch.float32).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LowRank(layer.self_attn.v_proj)
    return _teach(model, torch.optim.AdamW, 2, 1024, mixed=torch.bfloat16)


def _recurrent(kind: Any, optimizer: Any) -> Step:
    embedding, layer, head = nn.Embedding(20_000, 1024), kind(1024, 1024, 2, batch_first=True), nn.Linear(1024, 20_000)
    model = nn.ModuleList([embedding, layer, head])

    def loss() -> Any:
        hidden, _ = layer(embedding(_tokens(32, 128)))
        return functional.cross_entropy(head(hidden).flatten(0, 1), _labels(32 * 128))

    return _train(loss, optimizer(model.parameters()))


def _encoder() -> Step:
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
    model = nn.TransformerEncoder(layer, 12)

    def loss() -> Any:
        return model(torch.randn(16, 512, 1024, device=_DEVICE)).mean()

    return _train(loss, torch.optim.AdamW(model.parameters()))


def _recommender() -> Step:
    tables = nn.ModuleList(nn.EmbeddingBag(2_000_000, 64, mode="sum") for _ in range(6))
    top = nn.Sequential(nn.Linear(64 * 6, 512), nn.ReLU(), nn.Linear(512, 1))
    model = nn.ModuleList([tables, top])

    def loss() -> Any:
        found = [table(_tokens(8192, 20)) for table in tables]
        return functional.binary_cross_entropy_with_logits(
            top(torch.cat(found, 1)), torch.zeros(8192, 1, device=_DEVICE)
        )

    return _train(loss, torch.optim.Adagrad(model.parameters()))


def _prefill() -> Step:
    model = small().eval()

    def run() -> None:
        with torch.inference_mode():
            found = model(input_ids=_tokens(8, 2048), use_cache=True, logits_to_keep=1)
            for _ in range(8):
                found = model(input_ids=_tokens(8, 1), past_key_values=found.past_key_values, use_cache=True)

    return run


_bf16, _fp16 = torch.bfloat16, torch.float16
_AdamW, _SGD, _Adafactor = torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor
_loop, _fused = partial(_AdamW, foreach=False), partial(_AdamW, fused=True)
_momentum = partial(_SGD, lr=0.1, momentum=0.9)
_BERT = {"of": "BertConfig", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
_WHISPER = {"num_mel_bins": 80, "d_model": 768, "encoder_layers": 12, "decoder_layers": 12}
_WHISPER |= {"encoder_attention_heads": 12, "decoder_attention_heads": 12}
_WHISPER |= {"encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "use_cache": False}
_LARGE = {**_WHISPER, "num_mel_bins": 128, "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32}
_LARGE |= {"encoder_attention_heads": 20, "decoder_attention_heads": 20, "encoder_ffn_dim": 5120}
_LARGE |= {"decoder_ffn_dim": 5120}
_T5 = {
    "decoder_start_token_id": 0,
    "d_model": 1024,
    "d_ff": 4096,
    "num_layers": 24,
    "num_heads": 16,
    "use_cache": False,
}

STEPS |= {
    "ResNet-50, batch 64, SGD": lambda: _classifier("resnet50", 64, _momentum),
    "ResNet-50, batch 128, AMP float16, SGD": lambda: _classifier("resnet50", 128, _momentum, mixed=_fp16, scaler=True),
    "ResNet-152, batch 128, no_grad": lambda: _classify("resnet152", 128, torch.no_grad),
    "EfficientNet-B3, batch 64, RMSprop": lambda: _classifier("efficientnet_b3", 64, torch.optim.RMSprop, 300),
    "ConvNeXt-B, batch 32, bf16, AdamW": lambda: _classifier("convnext_base", 32, _AdamW, mixed=_bf16),
    "ViT-B/16, batch 64, AdamW": lambda: _classifier("vit_base_patch16_224", 64, _AdamW),
    "ViT-L/16, batch 32, bf16, fused AdamW, clip": lambda: _classifier(
        "vit_large_patch16_224", 32, _fused, mixed=_bf16, clipped=True
    ),
    "ViT-L/16, batch 128, inference_mode": lambda: _classify("vit_large_patch16_224", 128, torch.inference_mode),
    "Swin-B, batch 32, AdamW": lambda: _classifier("swin_base_patch4_window7_224", 32, _AdamW),
    "UNet, batch 8 of 256 px, Adam": _unet,
    "diffusion UNet, bf16, AdamW, clip": _diffusion,
    "DCGAN, two optimizers": _adversaries,
    "GPT-2, batch 8, AdamW for-loop": lambda: _teach(gpt2(768, 12, 12), _loop, 8, 1024),
    "GPT-2 medium, 4 accumulated, clip": lambda: _teach(
        gpt2(1024, 24, 16), _AdamW, 2, 1024, rounds=4, clipped=True, mixed=_bf16
    ),
    "GPT-2 XL, bf16, checkpointing": lambda: _teach(checkpointed(gpt2(1600, 48, 25)), _AdamW, 4, 1024, mixed=_bf16),
    "GPT-2 XL, AMP float16, clip": lambda: _teach(
        gpt2(1600, 48, 25), _AdamW, 2, 1024, mixed=_fp16, scaler=True, clipped=True
    ),
    "LLaMA 1B, bf16, AdamW": lambda: _teach(small(), _AdamW, 2, 2048),
    "LLaMA 1B, float32, Adafactor": lambda: _teach(small(torch.float32), _Adafactor, 1, 1024),
    "LLaMA 1B, generation with a cache": _prefill,
    "LLaMA 7B, bf16, checkpointing, SGD": lambda: _teach(checkpointed(seven()), _SGD, 1, 2048),
    "LLaMA 7B, bf16, checkpointing, fused AdamW": lambda: _teach(checkpointed(seven()), _fused, 2, 2048),
    "LLaMA 7B, bf16, LoRA (peft), checkpointing": lambda: _teach(
        checkpointed(adapted(seven(), "q_proj", "v_proj")), _AdamW, 4, 2048
    ),
    "LLaMA 1B, LoRA by hand, bf16": _low_rank_by_hand,
    "T5 large, Adafactor": lambda: _encoder_decoder(
        "T5ForConditionalGeneration", "T5Config", _Adafactor, 8, (512, 128), config=_T5
    ),
    "T5 large, bf16, AdamW": lambda: _encoder_decoder(
        "T5ForConditionalGeneration", "T5Config", _AdamW, 8, (512, 128), config=_T5, mixed=_bf16
    ),
    "Whisper small, bf16, AdamW": lambda: _speech(_AdamW, 8, **_WHISPER),
    "Whisper large, bf16, LoRA (peft)": lambda: _speech(
        _AdamW, 4, lambda model: adapted(model, "q_proj", "v_proj"), **_LARGE
    ),
    "wav2vec 2.0, AMP float16, AdamW": _wave,
    "Mixtral of 8 × 1024, experts batched, bf16": lambda: _experts("batched_mm"),
    "Mixtral of 8 × 1024, experts grouped, bf16": lambda: _experts("grouped_mm"),
    "BERT large, AMP float16, AdamW": lambda: _teach(
        language_model("BertForMaskedLM", **_BERT), _AdamW, 16, 512, mixed=_fp16, scaler=True
    ),
    "BERT large, no_grad": lambda: _infer(
        partial(language_model("BertForMaskedLM", **_BERT).eval(), input_ids=_tokens(64, 512))
    ),
    "Transformer encoder, AdamW": _encoder,
    "LSTM, 2 × 1024, Adam": lambda: _recurrent(nn.LSTM, torch.optim.Adam),
    "GRU, 2 × 1024, SGD": lambda: _recurrent(nn.GRU, _momentum),
    "recommender, 6 tables, Adagrad": _recommender,
}


def _run(step: Step) -> dict[str, Any]:
    """Return the counters of the card's allocator after the step."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        step()
    except torch.OutOfMemoryError:
        return {"ran": False}
    return {
        "ran": True,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def _estimate(step: Step, device: str | None) -> dict[str, Any]:
    import ipygpumem

    try:
        found = ipygpumem.estimate(step, device=device)
    except ipygpumem.errors.EstimateError as error:
        return {"refused": str(error)}
    card = next(figures for figures in found.devices if figures.device.startswith("cuda"))
    return {**card.to_dict(), "seconds": found.duration_seconds}


def main() -> None:
    """Estimate or run one step, or both in this order, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=STEPS)
    parser.add_argument("--estimate", action="store_true")
    parser.add_argument("--run", action="store_true")
    options = parser.parse_args()
    here = torch.cuda.is_available()  # else the model has no memory at all
    # Weights have no values on the simulated card, and this would need a compiler there.
    with patch.object(torch.Tensor, "erfinv_", lambda tensor: tensor), torch.device("cuda" if here else "meta"):
        step = STEPS[options.name]()
    found = _estimate(step, None if here else "cuda:0") if options.estimate else {}
    print(json.dumps({**found, **(_run(step) if options.run else {})}))


if __name__ == "__main__":
    main()
