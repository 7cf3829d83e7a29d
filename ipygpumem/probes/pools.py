"""Reads the memory pools of other libraries than torch, which are found in ``sys.modules`` and never imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

from ipygpumem.introspect import is_instance
from ipygpumem.model import Reading
from ipygpumem.probes import Probe
from ipygpumem.probes.accelerators import accelerators, other_accelerator

POOLS = {"jax": "JAX", "cupy": "CuPy", "rmm": "RMM", "tensorflow": "TensorFlow"}
"""Libraries by the module that their users import. A new one is a function here."""


class Pool(NamedTuple):
    """A library's memory on one device; None where the library does not tell."""

    number: int | None
    """The device's number, as the library counts."""
    in_use_bytes: int
    highest_bytes: int | None = None
    """The most that it ever had in use."""
    reserved_bytes: int | None = None
    limit_bytes: int | None = None
    kind: str = ""
    """The device's name, if it is not the library's."""


def _jax(jax: Any) -> Iterator[Pool]:
    """Yield the pool of each device of the backend, if there is one: asking for devices would create it."""
    has_begun = getattr(sys.modules.get("jax._src.xla_bridge"), "backends_are_initialized", None)
    for device in jax.local_devices() if has_begun is not None and has_begun() else ():
        if stats := device.memory_stats():  # none on the CPU
            number = getattr(device, "local_hardware_id", None)
            peak, limit = stats.get("peak_bytes_in_use"), stats.get("bytes_limit")
            number = device.id if number is None else number
            yield Pool(number, stats["bytes_in_use"], peak, stats.get("pool_bytes"), limit)


def _cupy(cupy: Any) -> Iterator[Pool]:
    """Yield the pool of the current device: to ask for another one would create a context there."""
    if cupy.cuda.is_available():
        pool, index = cupy.get_default_memory_pool(), cupy.cuda.runtime.getDevice()
        yield Pool(index, pool.used_bytes(), None, pool.total_bytes(), pool.get_limit() or None)


def _rmm(rmm: Any) -> Iterator[Pool]:
    """Yield the counts of the statistics adaptor, if there is one. RMM does not say which device that is."""
    counts = getattr(rmm.mr.get_current_device_resource(), "allocation_counts", None)
    if counts is not None:
        yield Pool(None, counts.current_bytes, counts.peak_bytes)


def _tensorflow(tensorflow: Any) -> Iterator[Pool]:
    """Yield the pool of each GPU, if TensorFlow has begun: to ask it earlier would reserve whole devices."""
    made = getattr(sys.modules.get("tensorflow.python.eager.context"), "_context", None)
    if getattr(made, "_initialized", False):
        for index in range(len(tensorflow.config.list_logical_devices("GPU"))):
            info = tensorflow.config.experimental.get_memory_info(f"GPU:{index}")
            yield Pool(index, info["current"], info["peak"])


def _torch(torch: Any) -> Iterator[Pool]:
    """Yield the devices without a probe of their own: MTIA, and plug-ins' (PrivateUse1, such as ``torch.npu``)."""
    name = other_accelerator()
    module = getattr(torch, name, None) if name else None
    initialized = getattr(module, "is_initialized", None)
    if module is None or initialized is None or not initialized():
        return
    knows = getattr(torch._C, "_accelerator_isAllocatorInitialized", None)
    try:
        source = torch.accelerator if knows is not None and knows() else module  # torch 2.9
    except RuntimeError:  # the plug-in's allocator is of another kind
        source = module
    what = ("memory_allocated", "max_memory_allocated", "memory_reserved", "get_device_properties")
    functions: list[Any] = [getattr(source, one, getattr(module, one, None)) for one in what]
    allocated, highest, reserved, properties = functions
    for number in range(module.device_count() if allocated is not None else 0):
        most, held = (None if ask is None else int(ask(number)) for ask in (highest, reserved))
        total = None if properties is None else getattr(properties(number), "total_memory", None)
        yield Pool(number, int(allocated(number)), most, held, total, name)


_READERS: dict[str, Callable[[Any], Iterable[Pool]]] = {
    "torch": _torch,
    "jax": _jax,
    "cupy": _cupy,
    "rmm": _rmm,
    "tensorflow": _tensorflow,
}


class PoolProbe:
    """One library's pools. No peak is ever reset: it is the user's.

    A span in which the library has more in use than ever before has an exact peak; others are sampled.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._highest: dict[int | None, int] = {}
        self._marks: dict[int | None, int] = {}
        """The highest of each device when the peak was rearmed."""

    @property
    def sampled(self) -> bool:
        """Whether the library has anything on a device."""
        return bool(self._highest)

    def read(self, *, detail: bool = False, peak: bool = True) -> tuple[Reading, ...]:
        """Return a reading for each pool."""
        return tuple([self._reading(pool) for pool in _READERS[self.name](sys.modules[self.name])])

    def _reading(self, pool: Pool) -> Reading:
        current, highest = pool.in_use_bytes, pool.highest_bytes or 0
        self._highest[pool.number] = highest
        name = pool.kind or self.name
        device = name if pool.number is None else f"{name}:{pool.number}"
        peak = max(current, highest) if highest > self._marks.get(pool.number, 0) else current
        return Reading(device, current, peak, "sampled", pool.limit_bytes, pool.reserved_bytes)

    def glance(self) -> tuple[Reading, ...]:
        """Return the same: the libraries answer from the host's own books."""
        return self.read()

    def rearm(self) -> None:
        """Begin a new peak."""
        self._marks = dict(self._highest)

    def close(self) -> None:
        """Do nothing: nothing is held."""


def finder() -> Callable[[], list[Probe]]:
    """Return a function that returns the probes of the libraries that were loaded since it was last called."""
    waiting = list(_READERS)

    def find() -> list[Probe]:
        found: list[Probe] = []
        for name in [name for name in waiting if name in sys.modules]:
            own = accelerators() if name == "torch" else []
            if own or (name != "torch" and is_loaded(name)):
                waiting.remove(name)
                found += [*own, PoolProbe(name)]
        return found

    return find


def is_loaded(name: str) -> bool:
    """Whether the user's code has imported a library, and not just begun to."""
    module = sys.modules.get(name)
    return is_instance(module, ModuleType) and not getattr(getattr(module, "__spec__", None), "_initializing", False)
