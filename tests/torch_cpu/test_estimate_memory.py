"""Estimates of the allocator and of memory outside tensors: block sizes, segments, workspaces, the
verdict.
"""

import os
import textwrap
from dataclasses import replace
from itertools import accumulate, takewhile
from random import Random
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import ipygpumem
from ipygpumem.estimating.devices.room import free_bytes, with_room
from ipygpumem.estimating.memory.caching_allocator import (
    NO_LIMIT,
    STEP_BYTES,
    Allocator,
    OutOfRoomError,
    most_split_bytes,
    rounded_to_blocks,
)
from ipygpumem.estimating.memory.replay import Replay
from ipygpumem.estimating.operators.cublas import workspace_sizes
from ipygpumem.estimating.records import DeviceEstimate
from ipygpumem.estimating.running import Estimation
from ipygpumem.probes.accelerators import WholeDevice
from ipygpumem.probes.allocator import Segment, SnapshotBlock
from ipygpumem.probes.nvml import Nvml
from ipygpumem.units import GIB, KIB, MIB

pytestmark = pytest.mark.usefixtures("no_modules_of_users")
CARD = "cuda:0"
HERE = "cpu"
WORKSPACE = 32 * MIB


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimation without what the environment may say of the allocator and of cuBLAS."""
    for name in [*os.environ]:
        if name.startswith(("PYTORCH_", "CUBLAS", "TORCH_CUBLAS")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("asked", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),  # rounded first
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of 1 MiB is not split off
    ],
)
def test_a_block_and_its_segment_are_as_large_as_the_allocators(
    asked: int, block: int, segment: int
) -> None:
    allocator = Allocator()
    assert (allocator.allocate(asked).size, allocator.reserved_bytes) == (block, segment)


def test_the_best_free_block_is_taken_and_neighbours_join() -> None:
    allocator = Allocator()
    first, second, _ = (allocator.allocate(size * MIB) for size in (4, 6, 12))
    assert allocator.reserved_bytes == 20 * MIB + 12 * MIB
    allocator.free(first)
    assert allocator.allocate(3 * MIB).address == first.address
    allocator.free(second)
    assert allocator.allocate(16 * MIB).address == second.address  # with the rest of their segment
    assert allocator.reserved_bytes == 32 * MIB


def test_the_cache_is_emptied_but_for_segments_in_use() -> None:
    allocator = Allocator(limit_bytes=50 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    whole = allocator.allocate(40 * MIB)
    assert (allocator.reserved_bytes, allocator.most_reserved_bytes) == (40 * MIB, 40 * MIB)
    with pytest.raises(OutOfRoomError):
        allocator.allocate(12 * MIB)
    allocator.free(whole)
    allocator.allocate(6 * MIB)  # of the same segment
    with pytest.raises(OutOfRoomError):
        allocator.allocate(36 * MIB)
    assert allocator.allocate(30 * MIB).size == 30 * MIB  # that fits in beside it


def test_the_least_memory_is_between_used_and_reserved_memory() -> None:
    events = [(0, 30 * MIB), (0, 0), (1, 40 * MIB), (1, 0), (2, 50 * MIB)]
    allocator = Allocator()
    for size in (30, 40, 50):
        allocator.free(allocator.allocate(size * MIB))
    assert allocator.most_reserved_bytes == 120 * MIB
    assert 50 * MIB <= Replay(events).least_bytes(50 * MIB, 120 * MIB) <= 52 * MIB


def test_the_least_memory_and_any_larger_size_are_enough() -> None:
    """With 72 to 89 MiB the first segment is given back before a block can pin it, with 90 to 99
    MiB it is not.
    """
    sizes = [(0, 40), (0, 0), (1, 50), (2, 12), (1, 0), (3, 60), (3, 0), (2, 0), (4, 61)]
    replay = Replay([(number, size * MIB) for number, size in sizes])
    runs = [replay.fits(limit * MIB) for limit in (71, 72, 89, 90, 99, 100)]
    assert runs == [False, True, True, False, False, True]
    assert 100 * MIB <= replay.least_bytes(72 * MIB, 212 * MIB) <= 103 * MIB


class CountedReplay(Replay):
    """A replay that counts how often its events are replayed."""

    replays = 0

    def allocator(self, limit_bytes: int = NO_LIMIT, *, downwards: bool = False) -> Allocator:
        CountedReplay.replays += 1
        return super().allocator(limit_bytes, downwards=downwards)


def random_events(random: Random) -> list[tuple[int, int]]:
    """Return the events of some hundred storages of many sizes, most of which are freed."""
    events, alive = [], list[int]()
    for number in range(300):
        events.append((number, random.choice((1, 7, 30, 90)) * random.randint(1, MIB)))
        alive.append(number)
        random.shuffle(alive)
        while alive and random.random() < 0.45:
            events.append((alive.pop(), 0))
    return events


def test_limits_that_change_nothing_are_not_replayed() -> None:
    """Each limit above the memory that a replay has reserved leads to the same replay."""
    tried = CountedReplay.replays = 0
    for seed in range(20):
        replay = CountedReplay(random_events(Random(seed)))
        allocator = Replay(replay.events).allocator(downwards=True)
        used_bytes = max(accumulate(change for _, change in replay.changes(allocator)))
        reserved_bytes = allocator.most_reserved_bytes
        least_bytes = replay.least_bytes(used_bytes, reserved_bytes)
        step = max(STEP_BYTES, int(reserved_bytes * 0.005), (reserved_bytes - used_bytes) // 40)
        limits = range(reserved_bytes - step, used_bytes - 1, -step)
        enough = list(takewhile(Replay(replay.events).fits, limits))
        assert least_bytes == [reserved_bytes, *enough][-1]
        tried += len(enough) + (len(enough) < len(limits))
    assert CountedReplay.replays < tried  # of both directions together


def test_a_replay_starts_with_the_segments_of_the_card() -> None:
    """Storages that are there lie where they do, gaps are used, and blocks of others are not
    counted.
    """

    def block(start: int, size: int, state: str) -> SnapshotBlock:
        return SnapshotBlock(start * MIB, size * MIB, size * MIB, state)

    blocks = (
        block(0, 8, "allocated"),
        block(8, 6, "inactive"),
        block(14, 4, "allocated"),
        block(18, 2, "inactive"),
    )
    segments = (
        Segment(blocks),
        Segment((block(40, 20, "allocated"),)),
        Segment((block(80, 6, "inactive"),), stream=7),
    )
    replay = Replay([(0, 8 * MIB), (1, 6 * MIB), (0, 0), (2, 14 * MIB)], 1 << 62, segments, {0: 0})
    assert (replay.others_bytes, replay.already_held_bytes) == (30 * MIB, 16 * MIB)
    allocator = replay.allocator(16 * MIB)
    changes = replay.changes(allocator)
    assert [next(changes)[1] for _ in range(3)] == [8 * MIB, 6 * MIB, -8 * MIB]
    assert allocator.reserved_bytes == 46 * MIB
    assert not replay.fits(29 * MIB)
    assert replay.fits(30 * MIB)


def test_allocator_settings_that_are_not_followed_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:64")
    x = torch.ones(8)
    (note,) = ipygpumem.estimate(lambda: x + x, device=CARD, device_memory=GIB).notes
    assert note.startswith("expandable_segments:True: not followed")
    assert most_split_bytes() == 64 * MIB
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native,max_split_size_mb:64")
    assert ipygpumem.estimate(lambda: x + x, device=CARD, device_memory=GIB).notes == ()


def test_the_largest_block_to_split_counts() -> None:
    allocator = Allocator(20 * MIB)
    allocator.free(allocator.allocate(40 * MIB))
    assert allocator.allocate(12 * MIB).size == 12 * MIB
    assert allocator.reserved_bytes == 52 * MIB
    assert allocator.allocate(30 * MIB).size == 40 * MIB


@pytest.mark.parametrize(
    ("capability", "environment", "expected"),
    [
        ((9, 0), {}, (32 * MIB, MIB)),
        ((8, 0), {}, (8320 * KIB, MIB)),
        (None, {}, (32 * MIB, MIB)),
        (
            (9, 0),
            {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "2048"},
            (128 * KIB, 128 * KIB),
        ),
        (
            (9, 0),
            {"CUBLASLT_WORKSPACE_SIZE": "40960", "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"},
            (32 * MIB, 40 * MIB),
        ),
        ((9, 0), {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"}, (32 * MIB, 0)),
    ],
)
def test_workspaces_are_as_large_as_torchs(
    capability: Any,
    environment: dict[str, str],
    expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sizes were seen on simulated cards of these capabilities, with torch 2.11."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert workspace_sizes(capability) == expected


def workspaces(code: Any, **options: Any) -> int:
    (device,) = ipygpumem.estimate(code, **{"device": CARD, **options}).devices
    return device.parts["cuBLAS workspaces"]


def test_matrix_products_take_one_workspace_for_each_thread() -> None:
    x, weight, bias = (torch.ones(size, requires_grad=True) for size in ((8, 8), (8, 8), (8,)))
    assert workspaces(lambda: (x @ x, (x @ x).sum().backward())) == 2 * WORKSPACE
    assert workspaces(lambda: nn.functional.linear(x, weight, bias)) == WORKSPACE + MIB
    # cublasLt multiplies neither by a vector, nor with a scaled row
    assert workspaces(lambda: nn.functional.linear(x, weight[:1], bias[:1])) == WORKSPACE
    assert workspaces(lambda: nn.functional.linear(x[:, :1], weight[:, :1], bias)) == WORKSPACE
    assert workspaces(lambda: torch.addmm(bias, x, weight, beta=0.5)) == WORKSPACE
    assert workspaces(lambda: torch.addmm(bias[None], x, weight)) == WORKSPACE + MIB
    assert workspaces(lambda: torch.addmm(weight, x, weight)) == WORKSPACE
    assert workspaces(lambda: x @ x, device=None) == 0
    assert workspaces(lambda: x.to("cuda") @ x.to("cuda"), device=None) == WORKSPACE


def test_host_tensors_on_a_requested_device_are_noted() -> None:
    def step() -> torch.Tensor:
        return torch.ones(1 << 18, device=HERE)

    note = "tensors that the code puts on the CPU are counted on cuda:0, too"
    assert note in ipygpumem.estimate(step, device="cuda:0").notes
    assert ipygpumem.estimate(step, device="cpu").notes == ()
    assert ipygpumem.estimate(step).notes == ()


def test_assumptions_about_an_unknown_device_are_reported() -> None:
    x = torch.ones(8, 8)
    layer = nn.Conv2d(3, 8, 3)
    images = torch.ones(1, 3, 16, 16)
    note, size = ipygpumem.estimate(lambda: x @ x, device=CARD).notes
    assert note.startswith("cuda:0 is assumed to be a Hopper: 32 MiB of cuBLAS workspace")
    assert size == "cuda:0: device memory size unknown, pass --device-memory (device_memory=)"
    assert any("cuDNN" in note for note in ipygpumem.estimate(layer, images, device=CARD).notes)
    assert ipygpumem.estimate(lambda: (layer(images), x @ x), device="cpu").notes == ()


@pytest.mark.parametrize(("cards", "expected"), [([(8, 0)], (8, 0)), ([], (9, 0))])
def test_code_sees_the_capability_assumed_for_workspaces(
    cards: list[tuple[int, int]], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Nvml, "capabilities", lambda self: cards)
    x = torch.ones(8, 8)

    def step() -> None:
        assert torch.cuda.get_device_capability() == expected
        x @ x

    estimate = ipygpumem.estimate(step, device=CARD, device_memory="4GiB")
    assert estimate.devices[0].parts["cuBLAS workspaces"] == workspace_sizes(expected)[0]
    assert any("compute capability 9.0" in note for note in estimate.notes) is not bool(cards)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_recurrent_layer_on_a_card_that_is_not_here_is_noted(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = getattr(nn, kind)(4, 4)
    x = torch.ones(2, 2, 4)

    def estimate(**options: Any) -> tuple[bool, str]:
        estimate = ipygpumem.estimate(layer, x, **options)
        return any(
            "a card's kernels for a recurrent layer" in note for note in estimate.notes
        ), estimate.verdict

    assert estimate(device=CARD, device_memory="4GiB") == (True, "fits perhaps")
    assert estimate(device="cpu", device_memory="1TiB") == (False, "fits")
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    assert estimate(device=CARD, device_memory="4GiB") == (True, "fits perhaps")


def test_inference_mode_counts_memory_of_composite_operators() -> None:
    x = torch.ones(256, 1024)
    labels = torch.zeros(256, dtype=torch.long)

    def peak(mode: Any) -> int:
        def step() -> None:
            with mode():
                nn.functional.cross_entropy(x, labels)

        return ipygpumem.estimate(step).peak_bytes

    assert peak(torch.inference_mode) == peak(torch.no_grad) > 2 * x.nbytes


def test_without_cudnn_a_convolution_takes_columns_of_one_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.ones(4, 8, 64, 64)

    def temporary(layer: nn.Module, x: torch.Tensor) -> int:
        (device,) = ipygpumem.estimate(lambda: layer(x), device=CARD).devices
        return device.parts["temporaries"]

    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    with torch.no_grad():
        assert temporary(nn.Conv2d(8, 8, 3, padding=1), x) == 8 * 9 * 64 * 64 * 4
        columns_bytes = 2 * 16 * 64 * 64 * 4
        assert temporary(nn.ConvTranspose2d(8, 2, 4, 2, bias=False), x) == columns_bytes
        ones_bytes = rounded_to_blocks(130 * 130 * 4)  # for the bias
        assert temporary(nn.ConvTranspose2d(8, 2, 4, 2), x) == columns_bytes + ones_bytes
        assert temporary(nn.Conv2d(8, 8, 1), x) == 0  # a product of matrices as it is
        assert temporary(nn.Conv2d(8, 8, 3, groups=8), x) == 0  # a kernel of its own


def test_the_verdict_sets_a_context_aside_on_a_cuda_device() -> None:
    figures = DeviceEstimate(CARD, 0, GIB, 0, reserved_bytes=2 * GIB, needed_bytes=GIB)
    context = 768 * MIB
    spare = GIB // 50

    def verdict(room_bytes: int, device: str = CARD) -> tuple[int, bool | None, str]:
        estimate = with_room(replace(figures, device=device), 0, room_bytes)
        return estimate.required_bytes - GIB, estimate.fits, estimate.verdict

    required = GIB + context + spare
    assert verdict(required - 1) == (context + spare, False, "does not fit")
    assert (
        verdict(required)
        == verdict(required + GIB // 11)
        == (context + spare, None, "fits perhaps")
    )
    assert verdict(required + GIB // 9) == (context + spare, True, "fits")
    assert verdict(GIB, "cpu")[1] is False


def test_fragmented_memory_does_not_fit() -> None:
    def split() -> list[Any]:
        kept = []
        for _ in range(8):
            first = torch.empty(30 * MIB, dtype=torch.uint8)
            del first
            kept += [torch.empty(size * MIB, dtype=torch.uint8) for size in (12, 19)]
        return kept

    # 768 MiB are CUDA's own: of the rest the peak would fit, but not its segments.
    estimate = ipygpumem.estimate(split, device=CARD, device_memory=768 * MIB + 300 * MIB)
    (card,) = estimate.devices
    assert card.peak_bytes <= 300 * MIB < card.needed_bytes <= card.reserved_bytes
    assert card.verdict == "does not fit"
    assert estimate.verdict == "does not fit"
    assert estimate.fits is False
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in str(estimate)
    assert (
        estimate.to_dict()["verdict"]
        == estimate.to_dict()["devices"][0]["verdict"]
        == "does not fit"
    )


def test_a_verdict_names_operators_of_unknown_own_memory() -> None:
    x = torch.ones(64, 64)
    estimate = ipygpumem.estimate(lambda: torch.linalg.svd(x), device=CARD, device_memory="4GiB")
    assert (estimate.verdict, estimate.fits) == ("fits perhaps", None)
    assert "fits perhaps (_linalg_svd): needs" in str(estimate)
    assert ipygpumem.estimate(lambda: torch.linalg.svd(x), device="cpu").verdict == "fits"


def make_on_cuda() -> object:
    return torch.empty(1 << 20, dtype=torch.uint8, device="cuda")


def test_free_memory_is_read_without_making_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> tuple[int, int]:
        raise AssertionError("this makes a context")

    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    monkeypatch.setattr(
        Nvml, "visible", lambda self: [WholeDevice(total_bytes=10 * MIB, used_bytes=4 * MIB)]
    )
    estimate = ipygpumem.estimate(make_on_cuda)
    assert [(device.device, device.room_bytes) for device in estimate.devices] == [
        ("cuda:0", 6 * MIB)
    ]
    assert (
        estimate.devices[0].context_bytes == 768 * MIB
    )  # that of this process is still to be made


def test_a_driver_that_breaks_off_leaves_the_room_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> tuple[int, int]:
        raise RuntimeError("the driver is gone")

    # A card without figures.
    monkeypatch.setattr(Nvml, "visible", refuse)
    (device,) = ipygpumem.estimate(make_on_cuda).devices
    assert device.device == "cuda:0"
    assert device.peak_bytes == MIB
    assert device.room_bytes is None

    # A card of 9 MiB, 4 of them in use: 3 by torch's allocator, of which 1 is in tensors.
    wide = WholeDevice(total_bytes=9 * MIB, used_bytes=4 * MIB)
    monkeypatch.setattr(Nvml, "device", lambda *_, **__: wide)
    answers: dict[str, Any] = {
        "device_count": 1,
        "memory_reserved": 3 * MIB,
        "memory_allocated": MIB,
    }
    answers |= {"memory_snapshot": [], "get_per_process_memory_fraction": 1}
    answers["get_device_properties"] = SimpleNamespace(total_memory=9 * MIB)
    for name, value in {"is_initialized": True, **answers}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    # What the allocator keeps counts as free.
    assert (free_bytes("cuda:0"), free_bytes("cuda:1")) == (7 * MIB, None)

    # A card that fails later.
    monkeypatch.setattr(Nvml, "device", refuse)
    assert free_bytes("cuda:0") is None


def test_free_host_memory_respects_a_containers_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipygpumem.probes.host.available_bytes", lambda: 5 * MIB)
    (device,) = ipygpumem.estimate(lambda: torch.ones(4)).devices
    assert (device.device, device.room_bytes) == ("cpu", 5 * MIB)


def test_a_size_for_the_host_has_to_hold_the_whole_process() -> None:
    rss = psutil.Process().memory_info().rss
    small, large = (
        ipygpumem.estimate(lambda: torch.ones(9), device_memory=size)
        for size in (rss // 2, rss * 2)
    )
    assert (small.fits, large.fits) == (False, True)
    assert "other memory of this process" in str(large)


FREEING = {
    "optimizer.state.clear()": True,
    "cache.clear()": True,
    "del holder": True,
    "nested['a'] = None; del alias": False,  # the name ``again`` still leads to the list
    "alias.clear(); assert not again": True,
}


@pytest.mark.parametrize("line", FREEING)
def test_code_frees_an_object_unless_another_name_leads_to_it(line: str) -> None:
    """The copies of lists, dicts and other objects die with their last reference, as the originals
    would.
    """
    names: dict[str, Any] = {}
    exec(
        textwrap.dedent(
            """\
            import torch
            net = torch.nn.Linear(512, 512, bias=False)
            optimizer = torch.optim.SGD([net.weight], momentum=1)
            net(torch.ones(1, 512)).sum().backward(); optimizer.step(); optimizer.zero_grad()
            alias = [torch.ones(512, 512)]
            again, nested = alias, {'a': [alias, {}]}
            cache = {1: [torch.ones(512, 512)]}
            class Holder: pass
            holder = Holder()
            holder.held = {'x': [torch.ones(512, 512)]}"""
        ),
        names,
    )
    cell = f"optimizer, alias, cache, holder, nested\n{line}\nx = torch.empty(512, 512)"
    (device,) = Estimation("cuda", GIB).of_code(compile(cell, "<cell>", "exec"), names).devices
    assert device.peak_bytes == device.before_bytes + (0 if FREEING[line] else MIB), line
