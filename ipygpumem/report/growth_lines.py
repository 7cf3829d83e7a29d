"""Writes the lines about code that grows with every run, and about the holders of the new memory.

``this cell has grown RAM by 64 MiB on each of its last 3 runs``, then ``RAM +64 MiB per run is held
by log (list of ndarray)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ipygpumem.inventory.arrays.records import Inventory, TensorRecord
from ipygpumem.inventory.leaks.children import ProcessGrowth
from ipygpumem.inventory.names.growth_holders import (
    LEAST_SHARE,
    ArrayHolder,
    GrowthHolder,
    holders_of_growth,
)
from ipygpumem.inventory.names.top import LargestNames
from ipygpumem.records import Growth
from ipygpumem.report.devices import device_label
from ipygpumem.report.top import kind_of
from ipygpumem.report.words import clean, clean_name, listed
from ipygpumem.units import format_bytes, format_change

_HOLDERS_SHOWN = 3
STATUS_LISTS_PROCESSES = "%gpumem status lists all child processes, with the lines that end them"


def growth_line(growth: Growth) -> str:
    """Return the warning about a cell that grows with every run: ``this cell has grown RAM by 64
    MiB on each of its last 3 runs``.
    """
    device = device_label(growth.device)
    return (
        f"this cell has grown {device} by {growth_size(growth)} on each of its last {growth.runs} "
        f"runs"
    )


def growth_size(growth: Growth) -> str:
    """Return the growth of a device per run: ``64 MiB``, or ``60 to 64 MiB`` if runs differ."""
    least_text = format_bytes(growth.least_bytes)
    most_text = format_bytes(growth.most_bytes)
    if least_text == most_text:
        return most_text
    number, unit = least_text.split()
    if most_text.endswith(f" {unit}"):
        least_text = number
    return f"{least_text} to {most_text}"


def loop_growth_line(growth: Growth) -> str:
    """Return the warning about a loop that grows with every iteration."""
    device = device_label(growth.device)
    return (
        f"{device} has grown by {growth_size(growth)} in each of the last {growth.runs} iterations"
    )


def holder_lines(
    before: tuple[LargestNames, Inventory],
    now: tuple[LargestNames, Inventory],
    growth: Growth,
    run_word: str,
    runs: int,
    array_holders_of: Callable[[Sequence[TensorRecord]], list[ArrayHolder]],
    free_bytes: int,
) -> list[str]:
    """Return lines on the holders of the memory that each of the last runs added, the largest
    first: ``RAM +64 MiB per run is held by log (list of ndarray)``.

    Names are compared, not objects: a name that the code binds again each time holds as much as
    before.

    Args:
        before: the memory of all names, and the arrays without a name, before these runs.
        now: the same after them.
        growth: the growth of one device.
        run_word: the word for a run, such as ``iteration``.
        runs: the number of runs.
        array_holders_of: names the graph, closure or cache that keeps each of some arrays.
        free_bytes: growth of the free pages in malloc's heap, which no name holds.
    """
    holders = holders_of_growth(growth, before, now, runs, array_holders_of)
    lines = list[str]()
    for holder in holders[:_HOLDERS_SHOWN]:
        lines.append(_held_line(growth, holder.bytes_per_run, run_word, _holder_text(holder)))
    if growth.device == "cpu":
        held_bytes = sum(holder.bytes_per_run for holder in holders)
        free_bytes_per_run = min(free_bytes // runs, growth.most_bytes - held_bytes)
        lines += free_heap_line(growth, free_bytes_per_run, run_word)
    return lines or list(now[0].notes)


def _held_line(growth: Growth, size: int, run_word: str, holder: str) -> str:
    """Return the line that a holder has ``size`` bytes of each run's growth."""
    return f"{_growth_per_run(growth, size, run_word)} is held by {holder}"


def _holder_text(holder: GrowthHolder) -> str:
    """Return a holder in words: the path to its arrays if there is one, else its name and
    content.
    """
    if holder.path:
        return clean(holder.path)
    if holder.row is None:
        return "objects without a name"
    return f"{clean_name(holder.row.name)} ({kind_of(holder.row)})"


def _growth_per_run(growth: Growth, size: int, run_word: str) -> str:
    """Return a text such as ``RAM +64 MiB per iteration``."""
    return f"{device_label(growth.device)} {format_change(size)} per {run_word}"


def process_lines(
    grown: Iterable[ProcessGrowth], growth: Growth, run_word: str, runs: int
) -> list[str]:
    """Return lines on the child processes that grew with each of the last runs, with the code that
    ends them.

    Args:
        grown: the growth of groups of processes, each ended by one line.
        growth: the growth of all child processes per run.
        run_word: the word for a run, such as ``iteration``.
        runs: the number of runs.
    """
    least_bytes = growth.least_bytes * LEAST_SHARE
    lines = list[str]()
    for item in grown:
        size = item.grown_bytes // runs
        if size >= least_bytes:
            lines.append(_held_line(growth, size, run_word, _words_on_processes(item)))
    return lines[:_HOLDERS_SHOWN]


def _words_on_processes(item: ProcessGrowth) -> str:
    """Return a group of processes by number and name, and the line that ends them: ``process 4711
    (python); to end it: worker.terminate()``.
    """
    processes = [f"{child.pid} ({clean(child.name)})" for child in item.processes]
    noun = "processes"
    pronoun = "them"
    if len(processes) == 1:
        noun = "process"
        pronoun = "it"
    names = f"{noun} {listed(processes, _HOLDERS_SHOWN)}"
    if item.ends_by:
        return f"{names}; to end {pronoun}: {clean(item.ends_by)}"
    return f"{names}; the line that ends {pronoun} is not known"


def free_heap_line(growth: Growth, size: int, run_word: str) -> list[str]:
    """Return a line, in a list, if free pages of malloc's heap account for at least half of the
    growth of RAM; else nothing.

    Args:
        growth: the growth of RAM per run.
        size: the bytes of these pages per run.
        run_word: the word for a run, such as ``iteration``.
    """
    accounts_for_half = 2 * size >= growth.least_bytes
    if not accounts_for_half:
        return []
    per_run = _growth_per_run(growth, size, run_word)
    return [f"{per_run} is free in malloc's heap, in gaps between objects: %gpumem free"]


def unknown_line(growth: Growth) -> str:
    """Return the line that a device grows, but nothing was found that holds the new memory."""
    return (
        f"no name, tensor or array accounts for the growth of {device_label(growth.device)}: its "
        f"holder is unknown"
    )
