"""Lists the arrays of JAX, one record for each buffer."""

from __future__ import annotations

import contextlib
import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from ipygpumem.heap.bulk import by_identity
from ipygpumem.heap.kinds.arrays import is_array, library_type, memory_of, span_of
from ipygpumem.heap.walks.walk import ARRAY_TYPES
from ipygpumem.introspect import is_instance, loaded, type_name
from ipygpumem.inventory.arrays.labels import Labels
from ipygpumem.inventory.arrays.records import TensorRecord
from ipygpumem.probes.pools import name_of_jax_device


def jax_records(named: Iterable[object], labels: Labels) -> dict[int, TensorRecord]:
    """Return one record for each buffer of JAX's arrays, by the buffer's address. An array on
    several devices has several buffers: its record is by the array's identity.

    Args:
        named: objects to which names lead.
        labels: the names of arrays.
    """
    records: dict[int, TensorRecord] = {}
    for array in _arrays(named):
        record = None
        # It may be deleted at any time, or its computation may have failed.
        with contextlib.suppress(Exception):
            if not array.is_deleted():
                record = _record(array, labels)
        if record is None:
            continue
        before = records.get(record.storage)
        if before is None:
            records[record.storage] = record
        else:
            records[record.storage] = before._replace(aliases=before.aliases + 1)
    return records


def _arrays(named: Iterable[object]) -> list[Any]:
    """Return the arrays of JAX among named objects, then all other live ones, each once."""
    kind = library_type(*ARRAY_TYPES["jax"])
    if kind is None:
        return []
    of_names = [array for array in named if is_instance(array, kind)]
    return list(by_identity([*of_names, *_live_arrays_of_jax()]).values())


def _live_arrays_of_jax() -> list[Any]:
    """Return all live arrays of JAX. If JAX has no backend yet, there are none, and asking JAX
    would create the backend.
    """
    jax = loaded("jax")
    bridge = sys.modules.get("jax._src.xla_bridge")
    has_begun = getattr(bridge, "backends_are_initialized", None)
    if jax is None or has_begun is None or not has_begun():
        return []
    return list(jax.live_arrays())


def _record(array: Any, labels: Labels) -> TensorRecord:
    """Return the record of one of JAX's arrays."""
    devices = sorted(array.devices(), key=lambda device: int(device.id))
    note = ""
    storage = id(array)
    if len(devices) > 1:
        note = f"on {len(devices)} devices: the bytes of all"
    elif array.is_ready():
        storage = int(array.unsafe_buffer_pointer())
    return TensorRecord(
        name=labels.paths.get(id(array)),
        type_name=type_name(array),
        shape=tuple(map(int, array.shape)),
        dtype=str(array.dtype),
        device=name_of_jax_device(devices[0]),
        size_bytes=int(array.on_device_size_in_bytes()),
        cell=labels.cell(array),
        library="jax",
        storage=storage,
        note=note,
    )


def shown_by_jax(arrays: Sequence[object], records: dict[int, TensorRecord]) -> set[int]:
    """Find the NumPy arrays that show a host buffer of JAX, such as ``numpy.asarray(array)``, and
    count them as aliases in the buffer's record.

    Args:
        arrays: NumPy arrays.
        records: the records of JAX's buffers, by address; get the numbers of aliases.

    Returns:
        The identities of the arrays' owners, which need no record of their own.
    """
    starts = sorted(key for key, record in records.items() if record.device == "cpu")
    shown: set[int] = set()
    if not starts:
        return shown
    for owner in map(memory_of, arrays):
        if not is_array(owner):
            continue
        _, address, _ = span_of(owner)
        place = bisect_right(starts, address) - 1
        start = starts[max(0, place)]
        record = records[start]
        if start <= address < start + record.size_bytes:
            shown.add(id(owner))
            records[start] = record._replace(aliases=record.aliases + 1)
    return shown
