"""Sets limits on torch's CUDA allocator, and puts back what was there before."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ipygpumem.errors import said
from ipygpumem.probes.accelerators import uncounted
from ipygpumem.units import format_bytes

_ONE_DEVICE = re.compile(r"cuda:\d+")


def is_device(name: str) -> bool:
    """Whether a name is that of one CUDA device, such as ``cuda:1``."""
    return _ONE_DEVICE.fullmatch(name) is not None


class DeviceLimits:
    """Limits on torch's allocator of CUDA devices, and what was there before them."""

    def __init__(self) -> None:
        self.limits: dict[str, int] = {}
        self.notes: list[str] = []
        self._earlier: dict[int, tuple[float, float]] = {}
        """The fraction before, and ours, by device."""

    def set(self, sizes: Mapping[str, int], outer: Mapping[str, int]) -> None:
        """Let each device have no more than ``sizes`` says, nor than it had before.

        Args:
            sizes: bytes by device; ``gpu`` is each that this process uses, and the current one.
            outer: the limits of budgets around this one.
        """
        cuda = _cuda()
        why = "there is no CUDA device here, so its GPU part limits nothing" if cuda is None else uncounted()
        if why:
            self.notes.append(f"budget: {why}")
            return
        with self._noting("no device can be limited"):
            count = cuda.device_count()
            wanted = dict.fromkeys(_in_use(cuda), sizes["gpu"]) if "gpu" in sizes else {}
            wanted.update((int(name[5:]), size) for name, size in sizes.items() if is_device(name))
            for index, size in wanted.items():
                if index < count:
                    self._limit(cuda, index, size, outer.get(f"cuda:{index}"))
                else:
                    self.notes.append(f"budget: there is no cuda:{index} here")
            for name, limit in self.limits.items():
                self._shrink(cuda, name, limit)

    @contextlib.contextmanager
    def _noting(self, text: str) -> Iterator[None]:
        """Note an error instead of raising it: the user's own code will report a broken context itself."""
        try:
            yield
        except Exception as error:
            self.notes.append(f"budget: {text} ({said(error)})")

    def _limit(self, cuda: Any, index: int, size: int, outer: int | None) -> None:
        with self._noting(f"cuda:{index} cannot be limited"):
            total, known = cuda.get_device_properties(index).total_memory, _fraction(cuda, index)
            earlier = (outer or total) / total if known is None else known
            earlier = min(1.0, earlier)  # cudaMallocAsync says more where there is no limit
            fraction = size / total
            if int(fraction * total) < size:  # as torch computes it: one byte less costs a block of 2 MiB
                fraction = math.nextafter(fraction, 1.0)
            fraction = min(fraction, earlier)
            self._earlier[index] = earlier, fraction  # first: an interrupt may come after the change
            _set_fraction(cuda, index, fraction)
            self.limits[f"cuda:{index}"] = min(size, int(earlier * total))
            return
        self._earlier.pop(index, None)

    def _shrink(self, cuda: Any, name: str, limit: int) -> None:
        """Give back what the allocator has cached above ``limit``, and note what stays above it.

        The limit holds for what torch gets from the device. What it has got already it goes on handing out.
        """
        with self._noting(f"the cache of {name} cannot be emptied"):
            if cuda.memory_reserved(name) <= limit:
                return
            cuda.empty_cache()
            live, reserved = cuda.memory_allocated(name), cuda.memory_reserved(name)
            allowed = f"more than the {format_bytes(limit)} allowed"
            if live > limit:
                text = f"live tensors already hold {format_bytes(live)} of {name}, {allowed}: torch gets nothing more "
                self.notes.append(f"budget: {text}from the device until enough of them are freed")
            elif reserved > limit and _counts_reserved(cuda):
                text = f"{format_bytes(reserved)} of {name} stay reserved, {allowed}: {format_bytes(live)} of live "
                text += "tensors, and gaps beside them or pools of CUDA graphs"
                self.notes.append(f"budget: {text}; requests that fit into gaps still succeed")

    def restore(self) -> None:
        """Let each device have what it had before."""
        cuda = _cuda() if self._earlier else None
        while cuda is not None and self._earlier:
            index, (earlier, ours) = next(iter(self._earlier.items()))
            with self._noting(f"cuda:{index} stays limited"):  # so that an experiment comes to its end
                known = _fraction(cuda, index)
                if known is None or abs(known - ours) < 1e-6:  # it is rounded to bytes
                    _set_fraction(cuda, index, earlier)
                else:
                    self.notes.append(f"budget: somebody has set a new limit on cuda:{index} meanwhile; it stays")
            del self._earlier[index]


def _cuda() -> Any:
    """Return ``torch.cuda`` where it has a device. It may load torch: the user has named the device."""
    if importlib.util.find_spec("torch") is None:
        return None
    torch: Any = importlib.import_module("torch")
    return torch.cuda if torch.cuda.is_available() else None


def _fraction(cuda: Any, index: int) -> float | None:
    """Return torch's limit as a share of the device; None before torch 2.8, which does not tell."""
    ask = getattr(cuda, "get_per_process_memory_fraction", None)
    return None if ask is None else float(ask(index))


def torch_allows(cuda: Any, index: int) -> int:
    """Return how many bytes torch's own limit lets it still get from a device."""
    total = cuda.get_device_properties(index).total_memory
    known = _fraction(cuda, index)
    return max(0, int(total if known is None else known * total) - int(cuda.memory_reserved(index)))


def _set_fraction(cuda: Any, index: int, fraction: float) -> None:
    """Set torch's limit, and keep the current device: older versions change it."""
    with cuda.device(index):
        cuda.set_per_process_memory_fraction(fraction, index)


def _counts_reserved(cuda: Any) -> bool:
    """Whether the limit holds for what is reserved; ``cudaMallocAsync`` counts what is in use."""
    backend = getattr(cuda, "get_allocator_backend", None)
    return backend is None or backend() == "native"


def _in_use(cuda: Any) -> list[int]:
    """Return the devices on which this process has memory, and the current one. Limits on others create contexts."""
    current = cuda.current_device()
    return [index for index in range(cuda.device_count()) if index == current or cuda.memory_reserved(index) > 0]
