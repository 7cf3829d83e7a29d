"""Reads accelerators through torch: CUDA and ROCm, XPU, MPS. torch is found in ``sys.modules``, never imported.

torch's other devices are read in ``pools.py``.
A device counts as used once the user's own code has initialised its backend; until then it is left out, so
that measuring never creates a context (which would cost hundreds of MiB).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ipygpumem.errors import said
from ipygpumem.introspect import is_instance
from ipygpumem.model import Reading
from ipygpumem.probes import Probe
from ipygpumem.probes.counters import SharedPeaks

if TYPE_CHECKING:
    from ipygpumem.probes.nvml import Nvml


@dataclass(frozen=True)
class Backend:
    """Where torch keeps one kind of accelerator with a caching allocator."""

    name: str
    stats: tuple[str, ...]
    reset: tuple[str, ...]


CUDA = Backend(
    "cuda",
    ("_cuda_memoryStats", "_accelerator_getDeviceStats"),
    ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"),
)
XPU = Backend(
    "xpu",
    ("_xpu_memoryStats", "_accelerator_getDeviceStats"),
    ("_xpu_resetPeakMemoryStats", "_accelerator_resetPeakStats"),
)


TORCH_DEVICES = frozenset({CUDA.name, XPU.name, "mps"})
"""Whose memory torch's allocators hold."""


def loaded_torch() -> Any | None:
    """Return the torch module if the user's code has imported it, else None (also for a stand-in)."""
    module = sys.modules.get("torch")
    # Asked at every boundary, several times: the check of subclasses takes longer than the rest.
    return module if type(module) is ModuleType or is_instance(module, ModuleType) else None


def other_accelerator() -> str:
    """Return the name of torch's kind of accelerator if it has no probe here (MTIA, a plug-in's); empty without one."""
    ask = getattr(getattr(loaded_torch(), "_C", None), "_accelerator_getAccelerator", None)  # from torch 2.6 on
    device = None if ask is None else ask()
    name = "" if device is None else str(device.type)
    return "" if name in TORCH_DEVICES else name


def uncounted() -> str:
    """Return why torch counts nothing on CUDA devices; empty if it counts. The name alone decides, as in torch."""
    name = "PYTORCH_NO_CUDA_MEMORY_CACHING"
    return f"{name} is set: torch counts and limits nothing on CUDA devices" if name in os.environ else ""


class CachingAllocatorProbe:
    """Every visible device of one backend, by the counters of torch's caching allocator."""

    sampled = False

    def __init__(self, backend: Backend, nvml: Nvml | None = None) -> None:
        self.name = backend.name
        self._backend = backend
        self._nvml = nvml
        self._library: Any = None
        """torch's compiled part, in which its counters were looked for: what it lacks never comes."""
        self._peaks: SharedPeaks | None = None
        self._totals: dict[int, int] = {}
        self._with_context: set[int] = set()
        """Devices on which this process has allocated: there its context exists, whatever it holds now."""

    def _module(self) -> Any | None:
        """Return ``torch.cuda`` (or its like) once the user's code has initialised it, else None."""
        module = getattr(loaded_torch(), self._backend.name, None)
        initialized = getattr(module, "is_initialized", None)  # absent while torch is being imported
        return module if initialized is not None and initialized() else None

    def read(self, *, detail: bool = False, peak: bool = True) -> tuple[Reading, ...]:
        return self._readings("all" if detail else "used" if peak else "")

    def glance(self) -> tuple[Reading, ...]:
        # The counters are the host's own. torch holds their lock while it gets memory from the device, and never
        # waits for the GIL meanwhile: asking for them waits for no more than the running code waits itself.
        return self._readings("driver")

    def _readings(self, wide: str) -> tuple[Reading, ...]:
        self._share_peaks()
        peaks = self._peaks
        module = self._module() if peaks is not None else None
        if module is None or peaks is None:
            return ()
        return tuple(self._read(module, peaks, index, wide) for index in range(module.device_count()))

    def _share_peaks(self) -> None:
        """Wrap torch's counters as soon as torch is there: the first cell that uses the device may reset them."""
        library = getattr(loaded_torch(), "_C", None)
        if self._peaks is not None or library is self._library:
            return
        self._library = library
        if hasattr(library, self._backend.stats[0]) and hasattr(library, self._backend.reset[0]):
            self._peaks = SharedPeaks(library, self._backend.stats, self._backend.reset)

    def _read(self, module: Any, peaks: SharedPeaks, index: int, wide: str) -> Reading:
        stats, peak = peaks.read(index)
        allocated = stats["allocated_bytes"]["all"]["current"]
        reserved = stats["reserved_bytes"]["all"]["current"]
        if reserved > 0:
            self._with_context.add(index)
        total, used, other, note = self._device_wide(module, index, wide)
        return Reading(
            device=f"{self._backend.name}:{index}",
            current_bytes=allocated,
            peak_bytes=max(peak, allocated),
            method="allocator",
            total_bytes=total,
            reserved_bytes=reserved,
            used_bytes=used,
            other_bytes=other,
            note=note,
        )

    def _device_wide(self, module: Any, index: int, wide: str) -> tuple[int, int | None, int | None, str]:
        """Return total, used and other processes' bytes of one device, and why a figure is missing.

        ``wide`` says what is asked: ``all``, only what is ``used`` on devices that this process uses, the same if the
        ``driver`` tells it without a call to the device, or nothing.
        """
        if index not in self._totals:
            self._totals[index] = module.get_device_properties(index).total_memory
        has_context = index in self._with_context
        note = ""
        if not wide or (wide != "all" and not has_context):
            return self._totals[index], None, None, note
        if self._nvml is not None:
            found = self._nvml.device(module, index, processes=wide == "all", has_context=has_context)
            if found.used_bytes is not None:
                return found.total_bytes or self._totals[index], found.used_bytes, found.other_bytes, found.note
            note = found.note
        if wide != "driver" and has_context and hasattr(module, "mem_get_info"):
            # Only where this process has a context already: the call would create one.
            try:
                free, total = module.mem_get_info(index)
            except RuntimeError as error:  # a broken context answers no question
                return self._totals[index], None, None, f"{self._backend.name}: {said(error)}"
            return total, total - free, None, note
        return self._totals[index], None, None, note

    def rearm(self) -> None:
        module = self._module() if self._peaks is not None else None
        if module is not None and self._peaks is not None:
            for index in range(module.device_count()):
                self._peaks.rearm(index)

    def close(self) -> None:
        if self._peaks is not None:
            self._peaks.close()
            self._peaks = self._library = None
        if self._nvml is not None:
            self._nvml.close()


class MpsProbe:
    """Apple's GPU. torch offers its allocated bytes but no peak, so peaks are sampled."""

    @property
    def sampled(self) -> bool:
        return self._module() is not None

    def _module(self) -> Any | None:
        torch = loaded_torch()
        backends = getattr(torch, "backends", None)
        mps = getattr(backends, "mps", None)
        available = getattr(mps, "is_available", None)
        return torch.mps if torch is not None and available is not None and available() else None

    def read(self, *, detail: bool = False, peak: bool = True) -> tuple[Reading, ...]:
        module = self._module()
        if module is None:
            return ()
        allocated = module.current_allocated_memory()
        return (
            Reading(
                device="mps",
                current_bytes=allocated,
                peak_bytes=allocated,
                method="sampled",
                total_bytes=module.recommended_max_memory() if hasattr(module, "recommended_max_memory") else None,
                reserved_bytes=module.driver_allocated_memory(),
            ),
        )

    def glance(self) -> tuple[Reading, ...]:
        return self.read()

    def rearm(self) -> None:
        """Do nothing: there is no mark to rearm."""

    def close(self) -> None:
        """Do nothing: nothing is held."""


def accelerators() -> list[Probe]:
    """Return a probe for each kind of accelerator once torch is there."""
    torch = loaded_torch()
    if torch is None or getattr(getattr(torch, "__spec__", None), "_initializing", False):  # half imported
        return []
    from ipygpumem.probes.nvml import Nvml  # loading the extension must stay fast

    return [CachingAllocatorProbe(CUDA, Nvml()), CachingAllocatorProbe(XPU), MpsProbe()]
