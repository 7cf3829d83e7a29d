"""Finds the names that hold the memory that each run of some code adds: ``history``, if each run
appends a tensor to it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from ipygpumem.inventory.arrays.records import Inventory, TensorRecord
from ipygpumem.inventory.names.top import LargestNames, NamedSize
from ipygpumem.records import Growth

LEAST_SHARE = 0.1
"""Minimum share of the growth for a holder to be reported."""


class ArrayHolder(NamedTuple):
    """The holder of an array to which no name refers directly."""

    name: str
    """The name that leads to it; empty if none does."""
    path: str
    """The references that lead to it."""


@dataclass(frozen=True)
class GrowthHolder:
    """A name, or arrays without a name, that hold a part of what each run adds."""

    bytes_per_run: int
    row: NamedSize | None
    """The name at the last look; None for arrays without a name."""
    path: str = ""
    """The references that lead to the new arrays, if they are known."""


def holders_of_growth(
    growth: Growth,
    before: tuple[LargestNames, Inventory],
    now: tuple[LargestNames, Inventory],
    runs: int,
    array_holders_of: Callable[[Sequence[TensorRecord]], list[ArrayHolder]],
) -> list[GrowthHolder]:
    """Return the holders of the memory that each of the last runs has added to a device: first the
    names that have grown, the largest first, then the arrays without a name. Holders of a small
    share are left out.

    Args:
        growth: the growth of the device.
        before: the names, and the arrays without a name, before these runs.
        now: the same after them.
        runs: the number of runs.
        array_holders_of: names the graph, closure or cache that keeps each of some arrays.
    """
    names_before, unnamed_before = before
    names_now, unnamed_now = now
    least_bytes_per_run = growth.least_bytes * LEAST_SHARE
    sizes_and_names = _grown_names(
        names_before, names_now, growth.device, least_bytes_per_run, runs
    )
    added_bytes, new_arrays = _grown_unnamed(unnamed_before, unnamed_now, growth.device)
    array_holders = list[ArrayHolder]()
    if added_bytes >= least_bytes_per_run * runs:
        array_holders = array_holders_of(new_arrays)
    grown_names = {row.name for _, row in sizes_and_names}
    paths = _paths_to_arrays(new_arrays, array_holders, grown_names)
    holders = [
        GrowthHolder(size, row, paths.of_names.get(row.name, "")) for size, row in sizes_and_names
    ]
    named_bytes = sum(holder.bytes_per_run for holder in holders)
    # Names may hold some of these arrays, too.
    most_unnamed_bytes = growth.most_bytes - named_bytes
    unnamed_bytes = min((added_bytes - paths.counted_bytes) // runs, most_unnamed_bytes)
    if unnamed_bytes >= least_bytes_per_run:
        holders.append(GrowthHolder(unnamed_bytes, row=None, path=paths.of_unnamed))
    return holders


class _PathsToArrays(NamedTuple):
    """The references that lead to new arrays without a name of their own."""

    of_names: dict[str, str]
    """The references from each name that has grown."""
    counted_bytes: int
    """The bytes of the arrays behind these names, whose own bytes count them: a name's bytes have
    those of the graphs behind it.
    """
    of_unnamed: str
    """The references to the first other array; empty if they are unknown."""


def _paths_to_arrays(
    arrays: Sequence[TensorRecord],
    array_holders: Sequence[ArrayHolder],
    grown_names: Container[str],
) -> _PathsToArrays:
    """Return the references that lead to new arrays: from names that have grown, or from anything
    else.

    Args:
        arrays: the arrays, the largest first.
        array_holders: the holder of each array; none if they were not searched.
        grown_names: the names that have grown.
    """
    of_names = dict[str, str]()
    counted_bytes = 0
    of_unnamed = ""
    for array, array_holder in zip(arrays, array_holders, strict=False):
        if array_holder.name in grown_names:
            counted_bytes += array.size_bytes
            of_names[array_holder.name] = array_holder.path
        elif not of_unnamed:
            of_unnamed = array_holder.path
    return _PathsToArrays(of_names, counted_bytes, of_unnamed)


def _grown_names(
    before: LargestNames, now: LargestNames, device: str, least: float, runs: int
) -> list[tuple[int, NamedSize]]:
    """Return the names that grew by at least ``least`` bytes in each run, the largest first. Each
    comes with its bytes for one run.
    """
    bytes_before = {row.name: row.device_bytes.get(device, 0) for row in before.names}
    sizes_and_names = []
    for row in now.names:
        growth = row.device_bytes.get(device, 0) - bytes_before.get(row.name, 0)
        if growth >= least * runs:
            sizes_and_names.append((growth // runs, row))
    return sorted(sizes_and_names, key=itemgetter(0), reverse=True)


def _grown_unnamed(
    before: Inventory, now: Inventory, device: str
) -> tuple[int, list[TensorRecord]]:
    """Return the bytes that arrays without a name have grown by on a device, and the new ones among
    them, the largest first.
    """
    bytes_before = before.device_bytes.get(device, 0)
    growth = now.device_bytes.get(device, 0) - bytes_before
    old_storages = {row.storage for row in before.tensors}
    new_arrays = [
        row for row in now.tensors if row.device == device and row.storage not in old_storages
    ]
    return growth, new_arrays
