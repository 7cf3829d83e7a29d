"""Training and inference steps of public models, which benchmarks/cuda_figures.py estimates and
runs.

Each entry builds its model with random weights and returns a function that runs two steps, because
an optimizer allocates its state in the first one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.cuda_models import (
    UNet,
    adapted,
    checkpointed,
    discriminator,
    generator,
    gpt2,
    language_model,
    llama,
    small,
)

Step = Callable[[], None]
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
    """Return two training steps.

    Args:
        loss_of: makes the data and returns a loss.
        optimizer: the optimizer of the trained parameters.
        mixed: the data type of autocast; none without it.
        scaler: True if the gradients are scaled, as float16 needs it.
        rounds: number of backward passes in a step.
        clip: the parameters whose gradients are clipped.
    """
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
    """Return two calls in a mode without gradients."""

    def run() -> None:
        for _ in range(2):
            with mode():
                call()

    return run


# -- pictures -----------------------------------------------------------------------------------


def _images(count: int, size: int = 224) -> Any:
    """Return random pictures of ``size`` pixels."""
    return torch.randn(count, 3, size, size, device=_DEVICE)


def _labels(count: int) -> Any:
    """Return class 0 for each picture."""
    return torch.zeros(count, dtype=torch.long, device=_DEVICE)


def _classifier(name: str, batch: int, optimizer: Any, size: int = 224, **options: Any) -> Step:
    """Train a classifier of timm."""
    import timm

    model = timm.create_model(name, num_classes=1000)

    def loss() -> Any:
        return functional.cross_entropy(model(_images(batch, size)), _labels(batch))

    if options.pop("clipped", False):
        options["clip"] = model.parameters()
    return _train(loss, optimizer(model.parameters()), **options)


def _classify(name: str, batch: int, mode: Any) -> Step:
    """Run a classifier of timm without gradients."""
    import timm

    model = timm.create_model(name, num_classes=1000).eval()
    return _infer(lambda: model(_images(batch)), mode)


def _unet() -> Step:
    """Train a U-Net to return its input."""
    model = UNet(64, 128, 256, 512)

    def loss() -> Any:
        x = _images(8, 256)
        return functional.mse_loss(model(x), x)

    return _train(loss, torch.optim.Adam(model.parameters()))


def _diffusion() -> Step:
    """Train the U-Net of diffusers."""
    from diffusers import UNet2DModel

    model = UNet2DModel(sample_size=64, block_out_channels=(128, 256, 256, 512), layers_per_block=2)

    def loss() -> Any:
        x = _images(16, 64)
        return functional.mse_loss(model(x, _labels(16)).sample, x)

    options = {"mixed": torch.bfloat16, "clip": model.parameters()}
    return _train(loss, torch.optim.AdamW(model.parameters()), **options)


def _adversaries() -> Step:
    """Train a generator and a discriminator, each with an optimizer of its own."""
    make = generator()
    judge = discriminator()
    first = torch.optim.Adam(judge.parameters())
    second = torch.optim.Adam(make.parameters())

    def run() -> None:
        for _ in range(2):
            real = _images(512, 32)
            noise = torch.randn(512, 100, 1, 1, device=_DEVICE)
            first.zero_grad()
            fake = make(noise)
            (
                functional.softplus(-judge(real)).mean()
                + functional.softplus(judge(fake.detach())).mean()
            ).backward()
            first.step()
            second.zero_grad()
            functional.softplus(-judge(fake)).mean().backward()
            second.step()

    return run


def _boxes(pictures: int, objects: int, size: int, *, masks: bool) -> list[dict[str, Any]]:
    """Return the targets of a detector: boxes with labels, in each picture."""

    def target() -> dict[str, Any]:
        corners = torch.tensor([[20.0, 20.0, size / 2, size / 2]] * objects, device=_DEVICE)
        labels = torch.ones(objects, dtype=torch.long, device=_DEVICE)
        fields = {"boxes": corners, "labels": labels}
        if masks:
            fields["masks"] = torch.ones(objects, size, size, dtype=torch.uint8, device=_DEVICE)
        return fields

    return [target() for _ in range(pictures)]


def _detector(name: str, batch: int, size: int, *, masks: bool = False) -> Step:
    """Train a detector of torchvision."""
    from torchvision.models import detection

    model = getattr(detection, name)(
        weights=None, weights_backbone=None, min_size=size, max_size=size
    ).train()

    def loss() -> Any:
        return sum(model([*_images(batch, size)], _boxes(batch, 4, size, masks=masks)).values())

    return _train(loss, _momentum(model.parameters()))


def _detect(name: str, batch: int, size: int) -> Step:
    """Run a detector of torchvision without gradients."""
    from torchvision.models import detection

    model = getattr(detection, name)(
        weights=None, weights_backbone=None, min_size=size, max_size=size
    ).eval()
    return _infer(lambda: model([*_images(batch, size)]))


def _detr() -> Step:
    """Train DETR's body with a head."""
    config = {"use_timm_backbone": False, "use_pretrained_backbone": False, "num_queries": 100}
    model = language_model(
        "DetrModel", of="DetrConfig", backbone_config=_resnet(), backbone=None, **config
    )
    head = nn.Linear(256, 92)

    def loss() -> Any:
        hidden = model(pixel_values=_images(4, 800)).last_hidden_state
        return functional.cross_entropy(head(hidden).flatten(0, 1), _labels(400))

    return _train(loss, _AdamW([*model.parameters(), *head.parameters()]), clip=model.parameters())


def _resnet() -> Any:
    from transformers import ResNetConfig

    return ResNetConfig(out_features=["stage4"])


def _segment(batch: int, size: int, optimizer: Any, **options: Any) -> Step:
    """Train a segmentation of torchvision."""
    from torchvision.models import segmentation

    model = segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=21)

    def loss() -> Any:
        labels = torch.zeros(batch, size, size, dtype=torch.long, device=_DEVICE)
        return functional.cross_entropy(model(_images(batch, size))["out"], labels)

    return _train(loss, optimizer(model.parameters()), **options)


def _segformer() -> Step:
    """Train a segmentation of transformers."""
    config = {
        "depths": [3, 4, 6, 3],
        "hidden_sizes": [64, 128, 320, 512],
        "decoder_hidden_size": 768,
    }
    model = language_model(
        "SegformerForSemanticSegmentation", of="SegformerConfig", num_labels=19, **config
    )

    def loss() -> Any:
        labels = torch.zeros(4, 512, 512, dtype=torch.long, device=_DEVICE)
        return model(pixel_values=_images(4, 512), labels=labels).loss

    return _train(loss, _AdamW(model.parameters()), mixed=_bf16)


def _video() -> Step:
    """Train a classifier of videos."""
    from torchvision.models.video import r2plus1d_18

    model = r2plus1d_18(weights=None)

    def loss() -> Any:
        return functional.cross_entropy(
            model(torch.randn(8, 3, 16, 112, 112, device=_DEVICE)), _labels(8)
        )

    return _train(loss, _momentum(model.parameters()), mixed=_fp16, scaler=True)


def _latent_diffusion() -> Step:
    """Train Stable Diffusion's U-Net, and average its weights."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(cross_attention_dim=768)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn()
    )
    optimizer = _fused(model.parameters())

    def run() -> None:
        for _ in range(2):
            x = torch.randn(4, 4, 64, 64, device=_DEVICE)
            text = torch.randn(4, 77, 768, device=_DEVICE)
            with torch.autocast("cuda", dtype=_bf16):
                loss = functional.mse_loss(model(x, _labels(4), text).sample.float(), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)

    return run


def _transformer_diffusion() -> Step:
    """Train a diffusion transformer."""
    from diffusers import DiTTransformer2DModel

    sizes = {
        "num_attention_heads": 16,
        "attention_head_dim": 72,
        "num_layers": 28,
        "sample_size": 32,
    }
    model = DiTTransformer2DModel(in_channels=4, out_channels=8, patch_size=2, **sizes)

    def loss() -> Any:
        x = torch.randn(16, 4, 32, 32, device=_DEVICE)
        return model(x, timestep=_labels(16), class_labels=_labels(16)).sample.float().pow(2).mean()

    return _train(loss, _AdamW(model.parameters()), mixed=_bf16)


def _decode() -> Step:
    """Decode pictures with Stable Diffusion's autoencoder, without gradients."""
    from diffusers import AutoencoderKL

    blocks = {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
    }
    model = (
        AutoencoderKL(block_out_channels=(128, 256, 512, 512), layers_per_block=2, **blocks)
        .half()
        .eval()
    )
    return _infer(
        lambda: model.decode(torch.randn(4, 4, 64, 64, device=_DEVICE, dtype=_fp16)).sample
    )


def _with_average(name: str, batch: int) -> Step:
    """Train a classifier of timm, and average its weights."""
    import timm

    model = timm.create_model(name, num_classes=1000)
    average = deepcopy(model).requires_grad_(False)
    optimizer = _momentum(model.parameters(), nesterov=True)

    def run() -> None:
        for _ in range(2):
            functional.cross_entropy(
                model(_images(batch)), _labels(batch), label_smoothing=0.1
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                pairs = zip(average.parameters(), model.parameters(), strict=True)
                for averaged, weight in pairs:
                    averaged.lerp_(weight, 0.001)

    return run


def _lightning(precision: str) -> Step:
    """Train a classifier with Lightning's trainer."""
    import lightning
    import timm

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = timm.create_model("vit_small_patch16_224", num_classes=100)

        def training_step(self, batch: Any, _: int) -> Any:
            pictures, labels = batch
            return functional.cross_entropy(self.model(pictures), labels)

        def configure_optimizers(self) -> Any:
            return _AdamW(self.parameters())

    model = Classifier()

    def run() -> None:
        batches: Any = [
            (torch.randn(128, 3, 224, 224), torch.zeros(128, dtype=torch.long)) for _ in range(2)
        ]
        data = torch.utils.data.DataLoader(batches, batch_size=None)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        options = {
            "max_epochs": 1,
            "devices": 1,
            "enable_model_summary": False,
            "gradient_clip_val": 1.0,
        }
        lightning.Trainer(accelerator="gpu", precision=precision, **quiet, **options).fit(
            model, data
        )

    return run


# -- graphs -------------------------------------------------------------------------------------


def _graph(kind: str, wide: int, deep: int, nodes: int, edges: int, **options: Any) -> Step:
    """Train a network of PyTorch Geometric on a random graph."""
    from torch_geometric import nn as layers

    model = getattr(layers, kind)(128, wide, deep, 40, **options)

    def loss() -> Any:
        x = torch.randn(nodes, 128, device=_DEVICE)
        edge = torch.zeros(2, edges, dtype=torch.long, device=_DEVICE)
        return functional.cross_entropy(model(x, edge), _labels(nodes))

    return _train(loss, torch.optim.Adam(model.parameters()))


# -- texts --------------------------------------------------------------------------------------


def _tokens(count: int, length: int) -> Any:
    """Return texts that consist of token 0."""
    return torch.zeros(count, length, dtype=torch.long, device=_DEVICE)


def _teach(model: Any, optimizer: Any, batch: int, length: int, **options: Any) -> Step:
    """Train a language model on texts of ``length`` tokens."""

    def loss() -> Any:
        tokens = _tokens(batch, length)
        return model(input_ids=tokens, labels=tokens).loss

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if options.pop("clipped", False):
        options["clip"] = trained
    return _train(loss, optimizer(trained), **options)


def _read(model: Any, batch: int, length: int) -> Step:
    """Run a language model without gradients."""
    model = model.eval()
    return _infer(lambda: model(input_ids=_tokens(batch, length)))


def _encoder_decoder(
    name: str, of: str, optimizer: Any, batch: int, lengths: tuple[int, int], **options: Any
) -> Step:
    """Train a model of transformers that has an encoder and a decoder."""
    model = language_model(name, of=of, **options.pop("config"))

    def loss() -> Any:
        return model(input_ids=_tokens(batch, lengths[0]), labels=_tokens(batch, lengths[1])).loss

    return _train(loss, optimizer(model.parameters()), **options)


def _speech(optimizer: Any, batch: int, **config: Any) -> Step:
    """Train Whisper."""
    model = language_model("WhisperForConditionalGeneration", of="WhisperConfig", **config)

    def loss() -> Any:
        sound = torch.randn(batch, config["num_mel_bins"], 3000, device=_DEVICE)
        return model(input_features=sound, labels=_tokens(batch, 128)).loss

    return _train(loss, optimizer(model.parameters()), mixed=torch.bfloat16)


def _wave() -> Step:
    """Train wav2vec on sound."""
    model = language_model("Wav2Vec2ForCTC", of="Wav2Vec2Config", mask_time_prob=0.0, layerdrop=0.0)

    def loss() -> Any:
        return model(torch.randn(8, 160_000, device=_DEVICE)).logits.float().pow(2).mean()

    return _train(loss, torch.optim.AdamW(model.parameters()), mixed=torch.float16, scaler=True)


def _experts(how: str) -> Step:
    """Train a mixture of experts, which are implemented as ``how`` says."""
    config = {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
    }
    more = {
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "use_cache": False,
        "experts_implementation": how,
    }
    model = language_model("MixtralForCausalLM", of="MixtralConfig", **config, **more).to(
        torch.bfloat16
    )
    return _teach(model, torch.optim.AdamW, 1, 256)


def _recurrent(kind: Any, optimizer: Any) -> Step:
    """Train a recurrent network of torch."""
    embedding = nn.Embedding(20_000, 1024)
    layer = kind(1024, 1024, 2, batch_first=True)
    head = nn.Linear(1024, 20_000)
    model = nn.ModuleList([embedding, layer, head])

    def loss() -> Any:
        hidden, _ = layer(embedding(_tokens(32, 128)))
        return functional.cross_entropy(head(hidden).flatten(0, 1), _labels(32 * 128))

    return _train(loss, optimizer(model.parameters()))


def _encoder() -> Step:
    """Train torch's transformer encoder."""
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
    model = nn.TransformerEncoder(layer, 12)

    def loss() -> Any:
        return model(torch.randn(16, 512, 1024, device=_DEVICE)).mean()

    return _train(loss, torch.optim.AdamW(model.parameters()))


def _recommender() -> Step:
    """Train embedding bags with a head."""
    tables = nn.ModuleList(nn.EmbeddingBag(2_000_000, 64, mode="sum") for _ in range(6))
    top = nn.Sequential(nn.Linear(64 * 6, 512), nn.ReLU(), nn.Linear(512, 1))
    model = nn.ModuleList([tables, top])

    def loss() -> Any:
        vectors = [table(_tokens(8192, 20)) for table in tables]
        return functional.binary_cross_entropy_with_logits(
            top(torch.cat(vectors, 1)), torch.zeros(8192, 1, device=_DEVICE)
        )

    return _train(loss, torch.optim.Adagrad(model.parameters()))


def _prefill() -> Step:
    """Read a text, then generate eight tokens with a cache."""
    model = small().eval()

    def run() -> None:
        with torch.inference_mode():
            output = model(input_ids=_tokens(8, 2048), use_cache=True, logits_to_keep=1)
            for _ in range(8):
                output = model(
                    input_ids=_tokens(8, 1), past_key_values=output.past_key_values, use_cache=True
                )

    return run


def _low_rank_8b() -> Step:
    """Train LoRA adapters of a LLaMA with 8 billion parameters."""
    config = {"num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 8192}
    model = checkpointed(
        adapted(llama(4096, 14336, 32, 32, **config), "q_proj", "k_proj", "v_proj", "o_proj")
    )
    return _teach(model, _AdamW, 1, 4096)


def _mistral() -> Step:
    """Train a small Mistral, whose attention has no fused kernel."""
    config = {
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
    }
    more = {"num_key_value_heads": 4, "use_cache": False, "attn_implementation": "eager"}
    model = language_model("MistralForCausalLM", of="MistralConfig", **config, **more).to(
        torch.bfloat16
    )
    return _teach(model, _AdamW, 2, 1024)


def _x_transformer() -> Step:
    """Train a decoder of x-transformers."""
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=1024, depth=12, heads=16, attn_flash=True, rotary_pos_emb=True)
    model = AutoregressiveWrapper(
        TransformerWrapper(num_tokens=20_000, max_seq_len=1024, attn_layers=layers)
    )
    return _train(lambda: model(_tokens(8, 1025)), _AdamW(model.parameters()), mixed=_bf16)


def _x_encoder() -> Step:
    """Train a classifier of x-transformers."""
    from x_transformers import Encoder, ViTransformerWrapper

    layers = Encoder(dim=768, depth=12, heads=12, attn_flash=False)
    model = ViTransformerWrapper(
        image_size=384, patch_size=16, num_classes=1000, attn_layers=layers
    )
    return _train(
        lambda: functional.cross_entropy(model(_images(16, 384)), _labels(16)),
        _AdamW(model.parameters()),
    )


def _contrast() -> Step:
    """Train CLIP on pairs of texts and pictures."""
    model = language_model("CLIPModel", of="CLIPConfig")

    def loss() -> Any:
        return model(input_ids=_tokens(128, 77), pixel_values=_images(128), return_loss=True).loss

    return _train(loss, _AdamW(model.parameters()), mixed=_fp16, scaler=True)


def _score() -> Step:
    """Return the losses of texts, without gradients."""
    config = {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "ffn_dim": 8192,
        "num_attention_heads": 32,
    }
    model = (
        language_model("OPTForCausalLM", of="OPTConfig", use_cache=False, **config).half().eval()
    )
    return _infer(
        lambda: model(input_ids=_tokens(8, 1024), labels=_tokens(8, 1024)).loss,
        torch.inference_mode,
    )


def _trainer() -> Step:
    """Train a classifier of texts with transformers' trainer."""
    import transformers

    class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 64

        def __getitem__(self, _: int) -> Any:
            return {"input_ids": torch.ones(256, dtype=torch.long), "labels": torch.tensor(0)}

    model = language_model(
        "RobertaForSequenceClassification", of="RobertaConfig", max_position_embeddings=514
    )
    folder = tempfile.mkdtemp()

    def run() -> None:
        options = {
            "max_steps": 2,
            "per_device_train_batch_size": 32,
            "report_to": [],
            "save_strategy": "no",
        }
        arguments = transformers.TrainingArguments(folder, bf16=True, disable_tqdm=True, **options)
        transformers.Trainer(model, arguments, train_dataset=Texts()).train()

    return run


_bf16 = torch.bfloat16
_fp16 = torch.float16
_AdamW = torch.optim.AdamW
_SGD = torch.optim.SGD
_Adafactor = torch.optim.Adafactor
_loop = partial(_AdamW, foreach=False)
_fused = partial(_AdamW, fused=True)
_momentum = partial(_SGD, lr=0.1, momentum=0.9)
_BERT = {
    "of": "BertConfig",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
_WHISPER = {"num_mel_bins": 80, "d_model": 768, "encoder_layers": 12, "decoder_layers": 12}
_WHISPER |= {"encoder_attention_heads": 12, "decoder_attention_heads": 12}
_WHISPER |= {"encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "use_cache": False}
_T5 = {
    "decoder_start_token_id": 0,
    "d_model": 1024,
    "d_ff": 4096,
    "num_layers": 24,
    "num_heads": 16,
    "use_cache": False,
}

_PICTURES: dict[str, Callable[[], Step]] = {
    "ResNet-50, batch 128, AMP float16, SGD": partial(
        _classifier, "resnet50", 128, _momentum, mixed=_fp16, scaler=True
    ),
    "ResNet-152, batch 128, no_grad": partial(_classify, "resnet152", 128, torch.no_grad),
    "EfficientNet-B3, batch 64, RMSprop": partial(
        _classifier, "efficientnet_b3", 64, torch.optim.RMSprop, 300
    ),
    "ConvNeXt-B, batch 32, bf16, AdamW": partial(
        _classifier, "convnext_base", 32, _AdamW, mixed=_bf16
    ),
    "ViT-B/16, batch 64, AdamW": partial(_classifier, "vit_base_patch16_224", 64, _AdamW),
    "ViT-L/16, batch 32, bf16, fused AdamW, clip": partial(
        _classifier, "vit_large_patch16_224", 32, _fused, mixed=_bf16, clipped=True
    ),
    "ViT-L/16, batch 128, inference_mode": partial(
        _classify, "vit_large_patch16_224", 128, torch.inference_mode
    ),
    "Swin-B, batch 32, bf16, AdamW": partial(
        _classifier, "swin_base_patch4_window7_224", 32, _AdamW, mixed=_bf16
    ),
    "UNet, batch 8 of 256 px, Adam": _unet,
    "diffusion UNet, bf16, AdamW, clip": _diffusion,
    "DCGAN, two optimizers": _adversaries,
}
_SEQUENCES: dict[str, Callable[[], Step]] = {
    "GPT-2, batch 8, AdamW for-loop": lambda: _teach(gpt2(768, 12, 12), _loop, 8, 1024),
    "GPT-2 medium, 4 accumulated, clip": lambda: _teach(
        gpt2(1024, 24, 16), _AdamW, 2, 1024, rounds=4, clipped=True, mixed=_bf16
    ),
    "GPT-2 XL, bf16, checkpointing": lambda: _teach(
        checkpointed(gpt2(1600, 48, 25)), _AdamW, 4, 1024, mixed=_bf16
    ),
    "LLaMA 1B, bf16, AdamW": lambda: _teach(small(), _AdamW, 2, 2048),
    "LLaMA 1B, float32, Adafactor": lambda: _teach(small(torch.float32), _Adafactor, 1, 1024),
    "LLaMA 1B, generation with a cache": _prefill,
    "T5 large, Adafactor": partial(
        _encoder_decoder,
        "T5ForConditionalGeneration",
        "T5Config",
        _Adafactor,
        8,
        (512, 128),
        config=_T5,
    ),
    "Whisper small, bf16, AdamW": partial(_speech, _AdamW, 8, **_WHISPER),
    "wav2vec 2.0, AMP float16, AdamW": _wave,
    "Mixtral of 8 × 1024, experts batched, bf16": partial(_experts, "batched_mm"),
    "Mixtral of 8 × 1024, experts grouped, bf16": partial(_experts, "grouped_mm"),
    "BERT large, AMP float16, AdamW": lambda: _teach(
        language_model("BertForMaskedLM", **_BERT), _AdamW, 16, 512, mixed=_fp16, scaler=True
    ),
    "BERT large, no_grad": lambda: _read(language_model("BertForMaskedLM", **_BERT), 64, 512),
    "Transformer encoder, AdamW": _encoder,
    "LSTM, 2 × 1024, Adam": partial(_recurrent, nn.LSTM, torch.optim.Adam),
    "GRU, 2 × 1024, SGD": partial(_recurrent, nn.GRU, _momentum),
    "recommender, 6 tables, Adagrad": _recommender,
}
_DETECTION_AND_DIFFUSION: dict[str, Callable[[], Step]] = {
    "Faster R-CNN, no_grad": partial(_detect, "fasterrcnn_resnet50_fpn", 8, 640),
    "DETR, batch 4 of 800 px, AdamW, clip": _detr,
    "DeepLabV3, batch 8 of 512 px, SGD": partial(_segment, 8, 512, _momentum),
    "SegFormer-B2, batch 4 of 512 px, bf16": _segformer,
    "R(2+1)D-18 on video, AMP float16, SGD": _video,
    "ResNeXt-50, batch 32, EMA, label smoothing": partial(_with_average, "resnext50_32x4d", 32),
    "Stable Diffusion UNet, bf16, fused AdamW, EMA": _latent_diffusion,
    "DiT-XL/2, batch 16, bf16, AdamW": _transformer_diffusion,
    "Stable Diffusion VAE, decoding, float16": _decode,
    "ViT-S, Lightning, bf16-mixed, clip": partial(_lightning, "bf16-mixed"),
    "ViT-S, Lightning, 16-mixed, clip": partial(_lightning, "16-mixed"),
}
_GRAPHS: dict[str, Callable[[], Step]] = {
    "GCN, 100,000 nodes, Adam": partial(
        _graph, "GCN", 256, 3, 100_000, 1_000_000, add_self_loops=False
    ),
    "GIN, 100,000 nodes, Adam": partial(
        _graph, "GIN", 256, 4, 100_000, 1_000_000, norm="batch_norm"
    ),
    "GAT, 50,000 nodes, Adam": partial(
        _graph, "GAT", 128, 3, 50_000, 500_000, heads=4, add_self_loops=False
    ),
    "GraphSAGE, 200,000 nodes, Adam": partial(_graph, "GraphSAGE", 256, 3, 200_000, 2_000_000),
}
_LIBRARIES: dict[str, Callable[[], Step]] = {
    "LLaMA 8B, LoRA (peft), checkpointing, 1 × 4096": _low_rank_8b,
    "Mistral of 12 layers, eager attention, bf16": _mistral,
    "x-transformers decoder, flash attention, bf16": _x_transformer,
    "x-transformers ViT, attention by hand, AdamW": _x_encoder,
    "CLIP, batch 128, AMP float16, AdamW": _contrast,
    "OPT 1.3B, float16, inference_mode": _score,
    "RoBERTa, transformers' Trainer, bf16": _trainer,
}

STEPS = {**_PICTURES, **_SEQUENCES, **_DETECTION_AND_DIFFUSION, **_GRAPHS, **_LIBRARIES}
"""Functions that build a model and return its step, by the step's name in the table."""
