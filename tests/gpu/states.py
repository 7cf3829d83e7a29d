"""Runs inside a kernel: brings a device's memory into one random state after the other, and looks
at each.

What is looked at is what ``%gpumem status`` shows; it is compared with NVML, torch's counters and
the tensors made.
"""

import gc
import os
import random
from collections.abc import Callable, Iterable
from typing import Any

import pynvml
import torch

from ipygpumem.inventory.arrays.survey import roles_of_objects
from ipygpumem.inventory.devices.breakdown import Reconciliation, Storage
from ipygpumem.inventory.devices.findings import Findings, reconcile, storages_of
from ipygpumem.shell.app import current_app
from ipygpumem.units import KIB, MIB

_SIZES = (1, 500, 64 * KIB, 900 * KIB, 3 * MIB, 15 * MIB, 70 * MIB, 400 * MIB)
_RESERVED = (
    "tensors:",
    "live tensors",
    "autograd or C++",
    "rounding",
    "waiting",
    "allocator cache",
    "fragmentation",
    "cache of private",
)
"""First words of the parts that together are torch's reserved memory."""


class States:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._native = torch.cuda.get_allocator_backend() == "native"
        self._tensors: list[Any] = []
        self._pinned: list[Any] = []
        self._graphs: list[Any] = []
        self._losses: list[Any] = []
        self._stream = torch.cuda.Stream()
        self.seen: set[str] = set()
        """Which parts were not empty, in any state."""
        # torch's modules hold no tensor on a device: a look takes a tenth of the time without them
        gc.freeze()
        pynvml.nvmlInit()
        self._card = pynvml.nvmlDeviceGetHandleByUUID(
            f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        )

    def run(self, count: int) -> list[str]:
        """Visit ``count`` states; return what was wrong in each that was."""
        wrong = []
        for number in range(count):
            names = [self._change() for _ in range(self._random.randint(1, 5))]
            wrong += [
                f"state {number}, after {names}: {fault}"
                for fault in self._faults(as_status=number % 10 == 0)
            ]
        return wrong

    def _change(self) -> str:
        changes: list[Callable[[], None]] = [
            self._make,
            self._make,
            self._make,
            self._free,
            self._free,
            self._pin,
        ]
        changes += [self._use_elsewhere, self._train, self._empty_cache]
        if self._native:
            changes += [self._capture, self._forget_graph]
        change = self._random.choice(changes)
        try:
            change()
        except torch.cuda.OutOfMemoryError:  # the card is full: that is a state, too
            del self._tensors[::2]
            return f"{change.__name__} (out of memory)"
        return change.__name__

    def _size(self) -> int:
        return self._random.choice(_SIZES) + self._random.randrange(4096)

    def _make(self) -> None:
        for _ in range(self._random.randint(1, 6)):
            self._tensors.append(torch.empty(self._size(), dtype=torch.uint8, device="cuda"))

    def _free(self) -> None:
        # From the middle: gaps stay.
        for _ in range(min(len(self._tensors), self._random.randint(1, 8))):
            self._tensors.pop(self._random.randrange(len(self._tensors)))

    def _pin(self) -> None:
        self._pinned = [
            torch.empty(self._size(), dtype=torch.uint8, pin_memory=True) for _ in range(2)
        ]

    def _use_elsewhere(self) -> None:
        """Free a tensor that another stream may still use: its block waits."""
        used = torch.empty(self._size(), dtype=torch.uint8, device="cuda")
        used.record_stream(self._stream)

    def _train(self) -> None:
        weight = torch.ones(self._random.choice((100, 1 << 20)), device="cuda", requires_grad=True)
        self._losses = [weight.exp().sum()]  # its graph keeps what no Python object refers to

    def _empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def _capture(self) -> None:
        static = torch.ones(self._size(), device="cuda", dtype=torch.uint8)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = static + 1
        self._graphs.append((graph, static, result))

    def _forget_graph(self) -> None:
        del self._graphs[:1]

    def _faults(self, *, as_status: bool) -> list[str]:
        """Return contradictions between the parts; searched as ``as_status`` does it, or in less
        time.
        """
        tensors = [item for item in gc.get_objects() if type(item) is torch.Tensor and item.is_cuda]
        findings = self._look(tensors, as_status=as_status)
        card = next(item for item in findings.reconciliations if item.device == "cuda:0")
        self.seen |= {part.name.split(" ")[0] for part in card.parts if part.size_bytes}
        figures = self._figures_of_driver(card)
        if self._native:
            figures |= _figures_of_allocator(card, tensors)
        faults = [f"{name}: {a:,} told, {b:,} true" for name, (a, b) in figures.items() if a != b]
        negative = [part for part in card.parts if (part.size_bytes or 0) < 0]
        faults += [f"{part.name}: {part.size_bytes}" for part in negative]
        if self._native:  # cudaMallocAsync has no blocks to show, and the failure says so
            faults += [f"{name}: {error}" for name, error in findings.failures.items()]
        return faults

    def _look(self, tensors: list[Any], *, as_status: bool) -> Findings:
        """Look at the memory as ``%gpumem status`` does, or for these tensors alone."""
        app = current_app()
        assert app is not None

        def storages() -> Iterable[Storage]:
            if as_status:
                return storages_of(roles_of_objects())
            return storages_of([(tensor, "other") for tensor in tensors])

        return reconcile(lambda: app.context.meter.now(detail=True), storages)

    def _figures_of_driver(self, card: Reconciliation) -> dict[str, tuple[int, int]]:
        """Return sums of parts, each with the figure of the driver or of torch that it equals."""
        memory = pynvml.nvmlDeviceGetMemoryInfo(self._card)
        reserved = torch.cuda.memory_reserved()
        figures = {
            "all parts": (_sum(card), memory.total),
            "what is in use": (_sum(card) - _sum(card, "free"), memory.used),
            "what is reserved": (_sum(card, *_RESERVED), reserved),
        }
        processes = {
            item.pid: item.usedGpuMemory
            for item in pynvml.nvmlDeviceGetComputeRunningProcesses(self._card)
        }
        own_bytes = processes.pop(os.getpid(), None)
        if own_bytes is not None:  # else the driver hides processes here
            figures["the context"] = (_sum(card, "context"), own_bytes - reserved)
            figures["other processes"] = (_sum(card, "process "), sum(processes.values()))
        return figures


def _figures_of_allocator(card: Reconciliation, tensors: list[Any]) -> dict[str, tuple[int, int]]:
    """Return sums of parts, each with the figure of torch's own allocator that it equals."""
    stats = torch.cuda.memory_stats()
    pending = stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"]
    return {
        "tensors": (_sum(card, "tensors:"), _live_bytes(tensors)),
        "what waits": (_sum(card, "waiting"), pending),
    }


def _sum(card: Reconciliation, *names: str) -> int:
    """Return the bytes of the parts whose name begins with one of ``names``, or of all."""
    return sum(
        part.size_bytes or 0 for part in card.parts if not names or part.name.startswith(names)
    )


def _live_bytes(tensors: list[Any]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
