"""Makes records of JAX's arrays. Their figures are JAX's own; no computation is waited for, and no backend is made."""

from __future__ import annotations

import contextlib
import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from ipygpumem.introspect import is_instance, type_name
from ipygpumem.objects.arrays import library_type, memory_of
from ipygpumem.objects.inventory.listing import Labels
from ipygpumem.objects.inventory.records import TensorRecord

MODULE, TYPE = "jax._src.array", "ArrayImpl"
"""The class of arrays that have memory; ``jax.Array`` is also that of tracers, which have none."""


def records_of(named: Iterable[object], labels: Labels) -> dict[int, TensorRecord]:
    """Return one record for each buffer, by its address; by the array's identity if it is on several devices."""
    kind = library_type(MODULE, TYPE)
    own = [] if kind is None else [array for array in named if is_instance(array, kind)]
    records: dict[int, TensorRecord] = {}
    for array in {id(array): array for array in [*own, *_live()]}.values():
        found = None
        with contextlib.suppress(Exception):  # deleted meanwhile, or its computation has failed
            found = None if array.is_deleted() else _record(array, labels)
        if found is not None and found.storage in records:
            before = records[found.storage]
            records[found.storage] = before._replace(aliases=before.aliases + 1)
        elif found is not None:
            records[found.storage] = found
    return records


def _live() -> list[Any]:
    """Return all arrays of JAX's backend, if there is one: asking JAX would make it."""
    jax: Any = sys.modules.get("jax")
    has_begun = getattr(sys.modules.get("jax._src.xla_bridge"), "backends_are_initialized", None)
    return list(jax.live_arrays()) if jax is not None and has_begun is not None and has_begun() else []


def _record(array: Any, labels: Labels) -> TensorRecord:
    devices = sorted(array.devices(), key=lambda device: int(device.id))
    first, is_spread = devices[0], len(devices) > 1
    number = getattr(first, "local_hardware_id", None)
    return TensorRecord(
        name=labels.paths.get(id(array)),
        type_name=type_name(array),
        shape=tuple(map(int, array.shape)),
        dtype=str(array.dtype),
        device="cpu" if first.platform == "cpu" else f"jax:{first.id if number is None else number}",
        size_bytes=int(array.on_device_size_in_bytes()),
        cell=labels.cells.get(id(array)),
        library="jax",
        storage=id(array) if is_spread or not array.is_ready() else int(array.unsafe_buffer_pointer()),
        note=f"on {len(devices)} devices: the bytes of all" if is_spread else "",
    )


def shown_by(array_type: Any, arrays: Sequence[object], records: dict[int, TensorRecord]) -> set[int]:
    """Count the NumPy arrays that show a buffer of JAX on the host; return the identities of what owns them."""
    starts = sorted(key for key, record in records.items() if record.device == "cpu")
    shown: set[int] = set()
    for owner in (memory_of(array_type, item) for item in arrays) if starts else ():
        if is_instance(owner, array_type):
            interface: Any = array_type.__dict__["__array_interface__"].__get__(owner)
            address = interface["data"][0]
            start = starts[max(0, bisect_right(starts, address) - 1)]
            if start <= address < start + records[start].size_bytes:
                shown.add(id(owner))
                records[start] = records[start]._replace(aliases=records[start].aliases + 1)
    return shown
