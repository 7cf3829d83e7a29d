"""What estimates know of the allocator and of memory beside tensors: block sizes, segments, workspaces, the verdict."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ipygpumem
from ipygpumem.estimating.reading import Allocator, OutOfRoomError, Rules, least_bytes, users_rules
from ipygpumem.probes.workspaces import sizes
from ipygpumem.units import GIB, KIB, MIB

CARD = "cuda:0"
WORKSPACE = 32 * MIB


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimation without what the environment may say of the allocator and of cuBLAS."""
    for name in [*os.environ]:
        if name.startswith(("PYTORCH_", "CUBLAS", "TORCH_CUBLAS")):
            monkeypatch.delenv(name)


# -- the allocator -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),  # rounded first
        (9 * MIB, 9 * MIB, 20 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of 1 MiB is not split off
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
    ],
)
def test_a_block_and_its_segment_are_as_large_as_the_allocators(asked: int, block: int, segment: int) -> None:
    allocator = Allocator(Rules())
    assert (allocator.take(asked).size, allocator.reserved_bytes) == (block, segment)


def test_the_best_free_block_is_taken_and_neighbours_join() -> None:
    allocator = Allocator(Rules())
    first, second, _ = (allocator.take(size * MIB) for size in (4, 6, 12))
    assert allocator.reserved_bytes == 20 * MIB + 12 * MIB
    allocator.give(first)
    assert allocator.take(3 * MIB).address == first.address
    allocator.give(second)
    assert allocator.take(16 * MIB).address == second.address  # with the rest of their segment
    assert allocator.reserved_bytes == 32 * MIB


def test_the_cache_is_emptied_but_for_segments_in_use() -> None:
    allocator = Allocator(Rules(), limit_bytes=50 * MIB)
    allocator.give(allocator.take(30 * MIB))
    whole = allocator.take(40 * MIB)
    assert (allocator.reserved_bytes, allocator.most_reserved_bytes) == (40 * MIB, 40 * MIB)
    with pytest.raises(OutOfRoomError):
        allocator.take(12 * MIB)
    allocator.give(whole)
    allocator.take(6 * MIB)  # of the same segment
    with pytest.raises(OutOfRoomError):
        allocator.take(36 * MIB)
    assert allocator.take(30 * MIB).size == 30 * MIB  # that fits in beside it


def test_the_least_memory_is_between_what_is_in_use_and_what_is_kept() -> None:
    events = [(0, 30 * MIB), (0, 0), (1, 40 * MIB), (1, 0), (2, 50 * MIB)]
    allocator = Allocator(Rules())
    for size in (30, 40, 50):
        allocator.give(allocator.take(size * MIB))
    assert allocator.most_reserved_bytes == 120 * MIB
    assert 50 * MIB <= least_bytes(events, Rules(), 50 * MIB, 120 * MIB) <= 52 * MIB


@pytest.mark.parametrize(
    ("name", "text", "rules"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128", Rules(most_split_bytes=128 * MIB)),
        ("PYTORCH_ALLOC_CONF", "roundup_power2_divisions:4,max_split_size_mb:64", Rules(64 * MIB, 4)),
        ("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8", Rules()),
    ],
)
def test_what_the_environment_says_of_the_allocator_counts(
    name: str, text: str, rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "", raising=False)
    monkeypatch.setenv(name, text)
    assert users_rules() == rules


def test_what_is_set_of_the_allocator_and_not_followed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:64")
    x = torch.ones(8)
    (note,) = ipygpumem.estimate(lambda: x + x, device=CARD).notes
    assert note.startswith("expandable_segments:True: not followed")
    assert ipygpumem.estimate(lambda: x + x, device="cpu").notes == ()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native,max_split_size_mb:64")
    assert ipygpumem.estimate(lambda: x + x, device=CARD).notes == ()


def test_divisions_and_the_largest_block_to_split_count() -> None:
    """torch's own example: 1200 between 1024 and 2048 in 4 steps is 1280, here in KiB."""
    divided = Rules(divisions=4)
    sizes = (1200 * KIB, 1024 * KIB, 600)  # less than that many blocks are rounded to blocks
    assert [divided.rounded(size) for size in sizes] == [1280 * KIB, 1024 * KIB, 1024]
    allocator = Allocator(Rules(most_split_bytes=20 * MIB))
    allocator.give(allocator.take(40 * MIB))
    assert allocator.take(12 * MIB).size == 12 * MIB
    assert allocator.reserved_bytes == 52 * MIB
    assert allocator.take(30 * MIB).size == 40 * MIB


# -- cuBLAS ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "environment", "expected"),
    [
        ((9, 0), {}, (32 * MIB, MIB)),
        ((8, 0), {}, (8320 * KIB, MIB)),
        ((12, 0), {}, (8320 * KIB, MIB)),
        (None, {}, (32 * MIB, MIB)),
        ((9, 0), {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, (32 * MIB, MIB)),
        ((9, 0), {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "2048"}, (128 * KIB, 128 * KIB)),
        ((9, 0), {"CUBLASLT_WORKSPACE_SIZE": "40960"}, (32 * MIB, 32 * MIB)),
        ((9, 0), {"CUBLASLT_WORKSPACE_SIZE": "40960", "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}, (32 * MIB, 40 * MIB)),
        ((9, 0), {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"}, (32 * MIB, 0)),
    ],
)
def test_workspaces_are_as_large_as_torchs(
    capability: Any, environment: dict[str, str], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes were seen on simulated cards of these capabilities, with torch 2.11."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert sizes(capability) == expected


def workspaces(code: Any, **options: Any) -> int:
    (device,) = ipygpumem.estimate(code, **{"device": CARD, **options}).devices
    return device.parts["cuBLAS workspaces"]


def test_a_product_of_matrices_takes_a_workspace_once_for_each_thread_and_one_for_biases() -> None:
    x, weight, bias = (torch.ones(size, requires_grad=True) for size in ((8, 8), (8, 8), (8,)))
    assert workspaces(lambda: x + x) == 0
    assert workspaces(lambda: (x @ x, x @ x)) == WORKSPACE
    assert workspaces(lambda: (x @ x).sum().backward()) == 2 * WORKSPACE
    assert workspaces(lambda: nn.functional.linear(x, weight, bias)) == WORKSPACE + MIB
    assert workspaces(lambda: x @ x, device="cpu") == workspaces(lambda: x @ x, device=None) == 0
    assert workspaces(lambda: x.to("cuda") @ x.to("cuda"), device=None) == WORKSPACE


def test_a_device_that_nobody_knows_is_taken_to_need_the_most_and_the_report_says_so() -> None:
    x = torch.ones(8, 8)
    (note,) = ipygpumem.estimate(lambda: x @ x, device="cuda:0").notes
    assert note.startswith("cuda:0 is taken to be a Hopper: torch takes 32 MiB for cuBLAS there")
    assert ipygpumem.estimate(lambda: x + x, device="cuda:0").notes == ()


def test_what_cudnn_takes_for_convolutions_is_reported_as_not_counted() -> None:
    layer, x = nn.Conv2d(3, 8, 3), torch.ones(1, 3, 16, 16)
    assert any("cuDNN" in note for note in ipygpumem.estimate(layer, x, device="cuda:0").notes)
    assert ipygpumem.estimate(layer, x, device="cpu").notes == ()


def test_without_cudnn_a_convolution_takes_columns_of_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, 8, 64, 64)

    def temporary(layer: nn.Module, x: torch.Tensor) -> int:
        (device,) = ipygpumem.estimate(lambda: layer(x), device=CARD).devices
        return device.parts["temporaries"]

    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    with torch.no_grad():
        assert temporary(nn.Conv2d(8, 8, 3, padding=1), x) == 8 * 9 * 64 * 64 * 4
        assert temporary(nn.ConvTranspose2d(8, 2, 4, 2), x) == 2 * 16 * 64 * 64 * 4
        assert temporary(nn.Conv2d(8, 8, 1), x) == 0  # a product of matrices as it is
        assert temporary(nn.Conv2d(8, 8, 3, groups=8), x) == 0  # a kernel of its own


# -- gradients and optimizers ------------------------------------------------------------------------------------------


def residual(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = y.exp()
    return y + z, z


@pytest.mark.parametrize(
    ("branch", "peak"),
    # x, y, both branches' values, what is given to backward, and the gradients of both branches: those that meet are
    # added up in place. Where a branch's gradient is the one given to backward, the sum is a tensor of its own.
    [(lambda y: (y * 2.0 + y * 3.0,), 6), (residual, 7)],
    ids=["two branches", "a residual"],
)
def test_gradients_are_added_up_as_autograd_does(
    branch: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], peak: int
) -> None:
    x = torch.ones(MIB // 4, requires_grad=True)

    def step() -> None:
        y = x * 1.0
        results = branch(y)
        results[0].backward(torch.ones_like(x))

    assert ipygpumem.estimate(step, device="cpu").peak_bytes // MIB == peak


def test_an_optimizer_that_never_takes_foreach_by_itself_is_not_made_to() -> None:
    if not hasattr(torch.optim, "Adafactor"):
        pytest.skip("this torch has no Adafactor")
    layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))

    def peak(**options: Any) -> int:
        optimizer = torch.optim.Adafactor(layers.parameters(), **options)

        def train() -> None:
            layers(torch.ones(1, 512)).sum().backward()
            optimizer.step()

        return ipygpumem.estimate(train, device=CARD).peak_bytes

    assert peak() == peak(foreach=False) < peak(foreach=True)


# -- a device that is not here -----------------------------------------------------------------------------------------


def kept(code: Any, device: str) -> int:
    """Return what code keeps beside 1 MiB of result."""
    return ipygpumem.estimate(code, device=device).devices[0].kept_bytes - MIB


def test_dropout_keeps_a_byte_for_each_number_on_a_card_that_is_not_here() -> None:
    x = torch.ones(MIB // 4, requires_grad=True)
    assert kept(lambda: nn.functional.dropout(x, 0.5), CARD) == MIB // 4
    assert kept(lambda: nn.Dropout(0.5)(x), CARD) == MIB // 4
    assert kept(lambda: nn.functional.dropout(x, 0.5), "cpu") == MIB
    assert kept(lambda: nn.Dropout(0.5).eval()(x), CARD) == -MIB  # it gives x itself


def test_attention_with_dropout_keeps_no_matrix_of_weights_on_a_card_that_is_not_here() -> None:
    heads = torch.ones(1, 4, 1024, 64, requires_grad=True)

    def attend() -> Any:
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1, is_causal=True)

    assert kept(attend, CARD) <= 64 * KIB < 4 * 1024 * 1024 * 4 < kept(attend, "cpu")


# -- the verdict -------------------------------------------------------------------------------------------------------


def test_the_verdict_sets_a_context_aside_on_a_cuda_device() -> None:
    def make(device: str, memory: int) -> Any:
        found = ipygpumem.estimate(lambda: torch.empty(GIB, dtype=torch.uint8), device=device, device_memory=memory)
        return found.devices[0]

    card = make(CARD, GIB + 512 * MIB)
    assert (card.needed_bytes, card.context_bytes, card.fits, card.tight) == (GIB, 768 * MIB, False, False)
    assert card.spare_bytes == GIB // 50
    assert make(CARD, GIB + GIB // 50 + 768 * MIB).fits is True
    assert make(CARD, GIB + 768 * MIB).fits is False
    host = make("cpu", GIB)
    assert (host.context_bytes, host.fits) == (0, True)


def test_what_fits_only_with_an_emptied_cache_is_tight() -> None:
    def grow() -> None:
        for size in (300, 400, 500):
            torch.empty(size * MIB, dtype=torch.uint8)

    (card,) = ipygpumem.estimate(grow, device=CARD, device_memory=768 * MIB + 600 * MIB).devices
    assert (card.peak_bytes, card.reserved_bytes) == (500 * MIB, 1200 * MIB)
    assert (card.fits, card.tight) == (True, True)
    assert ipygpumem.estimate(grow, device=CARD, device_memory="2GiB").devices[0].tight is False


def test_fragmented_memory_does_not_fit() -> None:
    def split() -> list[Any]:
        kept = []
        for _ in range(8):
            first = torch.empty(30 * MIB, dtype=torch.uint8)
            del first
            kept += [torch.empty(size * MIB, dtype=torch.uint8) for size in (12, 19)]
        return kept

    (card,) = ipygpumem.estimate(split, device=CARD, device_memory=768 * MIB + 300 * MIB).devices
    assert card.peak_bytes <= 300 * MIB < card.needed_bytes
    assert card.fits is False
