"""Judges what ended a kernel, as far as the evidence goes: a grade, one sentence, and what speaks for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ipygpumem.flight_recorder.entries import Header, Sample
from ipygpumem.flight_recorder.files import state
from ipygpumem.flight_recorder.machine import Machine, State, process_started, this_machine
from ipygpumem.flight_recorder.reader import Recording
from ipygpumem.probes import kernel_log, own_limits, pressure
from ipygpumem.probes.kernel_log import Death
from ipygpumem.units import format_bytes

Grade = Literal["certain", "likely", "unknown"]
Cause = Literal["ended", "alive", "unrecorded", "unreadable", "memory", "fault", "other"]
NO_DEATHS: tuple[Cause, ...] = ("ended", "alive", "unrecorded", "unreadable")
"""Of what else ended, or of what nobody can read."""
_RECORDINGS_ENDS = ("recording ", "the extension was unloaded")
"""How the reasons begin that ended a recording and not its kernel."""

_NEARLY_ALL = 0.95
_CLOCK_SECONDS = 2.0
"""How far the kernel's log and the recording may differ in time."""


@dataclass(frozen=True)
class Verdict:
    """Why a kernel is gone."""

    grade: Grade
    cause: Cause
    text: str
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scene:
    """What can be seen of a kernel's end from another process, later."""

    state: State
    same_boot: bool
    oom_kills: int | None
    """What the counter says now from which the kernel's own ``oom_kills`` came; None where it is gone."""
    deaths: tuple[Death, ...] = ()
    """Those in the kernel's log that have the kernel's process id and come after its last entry."""
    parent_gone: bool = False
    """Whether the process that had started the kernel is gone as well."""


def scene(recording: Recording, here: Machine | None = None) -> Scene:
    """Return what can be seen now of the end of a recording's kernel."""
    header, here = recording.header, here or this_machine()
    if header is None:
        return Scene("unknown", same_boot=False, oom_kills=None)
    same_boot = header.boot == here.boot
    neighbour = same_boot and header.namespace == here.namespace
    deaths: Iterable[Death] = kernel_log.deaths() if neighbour and here.sees_all_processes else ()
    earliest = recording.last_time - _CLOCK_SECONDS
    return Scene(
        state=state(header, recording.segments.current, here),
        same_boot=same_boot,
        oom_kills=pressure.kills_counted(header.counter) if same_boot and header.counter else None,
        deaths=tuple(death for death in deaths if death.pid == header.pid and death.time >= earliest),
        parent_gone=neighbour
        and header.parent_pid is not None
        and process_started(header.parent_pid) != header.parent_started,
    )


def judge(recording: Recording, seen: Scene) -> Verdict:
    """Return what ended the kernel of a recording; never more than what was recorded and seen can bear."""
    if recording.header is None:
        damaged = "its beginning is damaged: it cannot be found out whose kernel it was and how it ended"
        return Verdict("unknown", "unreadable", damaged if recording.entries else "no recording, or it cannot be read")
    if recording.end is not None:
        reason = recording.end.reason
        return Verdict("certain", "unrecorded" if reason.startswith(_RECORDINGS_ENDS) else "ended", reason)
    if seen.state == "alive":
        return Verdict("certain", "alive", "the kernel still runs")
    if seen.deaths:
        last = seen.deaths[-1]
        evidence = (f"the system's log: {last.text}",)
        if not last.oom:
            return Verdict("certain", "fault", "it crashed: a fault in native code", evidence)
        why = "its control group's limit was reached" if "cgroup" in last.text else "the machine's memory was used up"
        return Verdict("certain", "memory", f"the OOM killer ended it: {why}", evidence)
    before, scarcity = _kills_before(recording), _scarcity(recording)
    if seen.oom_kills is not None and before is not None:
        if seen.oom_kills > before:
            return _killed(recording.header, seen.oom_kills - before, scarcity)
        return _not_killed(recording, seen, scarcity)
    missing = "OOM kills cannot be counted from here"
    if not seen.same_boot:
        missing = "this is another machine, or it has been restarted since"
    if scarcity:
        return Verdict("likely", "memory", "memory had nearly run out", (*scarcity, missing))
    unknown = "it may still run: it is on another machine or in another container"
    was_seen = isinstance(recording.running, Sample)
    text = "memory was not short when it was last seen" if was_seen else "its memory was not seen before the end"
    return Verdict("unknown", "other", unknown if seen.state == "unknown" else text, (missing, *_bounds(recording)))


def _killed(header: Header, kills: int, scarcity: tuple[str, ...]) -> Verdict:
    machine_wide = (header.counter or "").startswith("/proc/")
    place = "on this machine" if machine_wide else "in its control group"
    number = "one process" if kills == 1 else f"{kills} processes"
    counted = f"the OOM killer has ended {number} {place} since the kernel's last entry"
    if machine_wide and not scarcity:
        return Verdict("unknown", "memory", "perhaps the OOM killer", (counted,))
    text = "the OOM killer ended it"
    if header.group_limit_bytes is not None:
        text += f"; its control group may use {format_bytes(header.group_limit_bytes)}"
    return Verdict("likely", "memory", text, (counted, *scarcity))


def _not_killed(recording: Recording, seen: Scene, scarcity: tuple[str, ...]) -> Verdict:
    none = "the OOM killer has ended nothing here since the kernel's last entry"
    if scarcity:
        text = (
            "memory had nearly run out: perhaps an allocation failed, or a service killed it (systemd-oomd, earlyoom)"
        )
        return Verdict("likely", "memory", text, (*scarcity, none))
    parent = ("the process that had started the kernel is gone as well",) * seen.parent_gone
    text = "not the OOM killer: it was killed, or it crashed"
    return Verdict("unknown", "other", text, (none, *parent, *_bounds(recording)))


def _bounds(recording: Recording) -> tuple[str, ...]:
    """Return the limits that the process had by itself, and what they can do unseen, in words."""
    samples = (entry for entry in reversed(recording.entries) if isinstance(entry, Sample))
    return tuple(
        f"{name} allowed it {format_bytes(limit)} of {own_limits.WHAT[name]}: a single request beyond that ends native "
        "code (std::bad_alloc), and no sample sees it"
        for name, _, limit in _own_limits(recording.header, next(samples, None))
    )


def _own_limits(header: Header | None, last: Sample | None) -> list[tuple[str, int | None, int]]:
    """Return the process's own limits that are known: name, use in the last sample, size."""
    begun = (header and header.limits) or {}
    found = []
    for name, field in ("RLIMIT_AS", "address_space"), ("RLIMIT_DATA", "data"):
        used, limit = (getattr(last, f"{field}{end}", None) for end in ("_bytes", "_limit_bytes"))
        if limit := limit or begun.get(name):
            found.append((name, used, limit))
    return found


def _kills_before(recording: Recording) -> int | None:
    """Return the last count of OOM kills that the kernel itself saw."""
    counts = [getattr(entry, "oom_kills", None) for entry in (recording.header, *recording.entries)]
    return next((count for count in reversed(counts) if count is not None), None)


def _scarcity(recording: Recording) -> tuple[str, ...]:
    """Return what was nearly used up when the kernel was last seen in a cell, in words."""
    header, last = recording.header, recording.running
    if header is None or not isinstance(last, Sample):
        return ()
    found = []
    ram, available = header.ram_bytes, last.available_bytes
    if ram and available is not None and available < (1 - _NEARLY_ALL) * ram:
        found.append(f"the machine had {format_bytes(available)} left of {format_bytes(ram)}")
    limit = last.group_limit_bytes
    if limit and last.group_available_bytes is not None and last.group_available_bytes < (1 - _NEARLY_ALL) * limit:
        used = format_bytes(limit - last.group_available_bytes)
        found.append(f"its control group used {used} of {format_bytes(limit)}")
    for name, used_bytes, bound in _own_limits(header, last):
        if used_bytes is not None and used_bytes > _NEARLY_ALL * bound:
            what = own_limits.WHAT[name]
            found.append(f"its {what} took {format_bytes(used_bytes)}, of {format_bytes(bound)} allowed ({name})")
    return tuple(found)
