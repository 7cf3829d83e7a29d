"""``ipygpumem.peak``: follows the memory of a block of code and keeps what it held at its highest
moment.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from ipygpumem.api.inventories import inventory_at, names_at
from ipygpumem.api.shell import current_traces
from ipygpumem.errors import (
    FileError,
    GpuMemError,
    TraceError,
    describe_error,
    ellipsize,
    how_to_install,
    quoted,
)
from ipygpumem.estimating.user_lines import line_text
from ipygpumem.extras.peak import report as _report  # noqa: F401  # registers how records are shown
from ipygpumem.extras.peak.bound import HostSpan, HostUse, bounded
from ipygpumem.extras.peak.records import DevicePeak, PeakRecord
from ipygpumem.failures import GuardedBlock
from ipygpumem.interrupts import is_from_signal
from ipygpumem.inventory.arrays.records import Inventory
from ipygpumem.meter.own_growth import growth_for
from ipygpumem.probes.accelerators import loaded_torch
from ipygpumem.reclaim.failure import classify
from ipygpumem.records import open_plain
from ipygpumem.report.export import place_of, write
from ipygpumem.report.words import listed
from ipygpumem.units import format_bytes

if TYPE_CHECKING:
    from ipygpumem.extras.peak.origins import Origin  # imports torch

_SAMPLED = (
    "the peak of RAM is sampled here, so memory that is reserved and not used cannot be told from "
    "memory in use"
)
InventoryAtEnd = Callable[[bool], Inventory]
"""Returns the tensors of torch at the end; False: only those with names."""
_NOT_COMPARED = (
    "RAM is not compared with the process's own peak, so memory that is not used counts as used"
)


class _Followers(NamedTuple):
    """The two parts that follow memory, each None if it could not start."""

    tensors: Any
    """A ``Follower`` of torch's tensors."""
    host: Any
    """A ``HostTracker`` of the remaining RAM."""


def _new_tensor_follower(names: Callable[[], Any], *, keep_history: bool) -> Any:
    """Return a ``Follower`` of torch's tensors, which may keep the history of CUDA's allocator."""
    from ipygpumem.extras.peak.following import Follower  # imports torch

    return Follower(names, keep_history=keep_history)


def _new_host_tracker(*, has_flame_graph: bool) -> Any:
    """Return a ``HostTracker`` of RAM."""
    from ipygpumem.extras.peak.host import HostTracker  # needs memray

    return HostTracker(has_flame_graph=has_flame_graph)


class Peak:
    """Follows the memory of code between ``start`` and ``stop``.

    A part that fails becomes a note of the record: the user's code runs all the same.

    Args:
        names: returns the names that the code sees, each with its value.
        save: a file for torch's snapshot; None if none is wanted.
        flame: a file for memray's flame graph; None if none is wanted.

    Raises:
        FileError: one of these files cannot be written.
    """

    def __init__(
        self,
        names: Callable[[], Iterable[tuple[str, object]]],
        save: str | os.PathLike[str] | None = None,
        flame: str | os.PathLike[str] | None = None,
    ) -> None:
        self._names = names
        self._snapshot_file = None if save is None else _snapshot_path(save)
        self._flame_graph_file = None if flame is None else _flame_graph_path(flame)
        self._tensor_follower: Any = None
        """A ``Follower`` while torch's tensors are followed."""
        self._host: Any = None
        """A ``HostTracker`` while the remaining RAM is followed."""
        self._span: HostSpan | None = None
        """The measurement of the process's own peak."""
        self._notes: list[str] = []
        """Notes for the record, such as parts that failed."""
        self._lacks_memray = False
        """True if memray is not installed, so that RAM outside torch has no rows."""
        self._after_import: AfterImport | None = None
        """Waits for the code to import torch, if it was not loaded at the start."""
        self.record: PeakRecord | None = None
        """The record, once the code has ended."""

    def start(self) -> None:
        """Follow the memory from now on."""
        with growth_for("%%peak"):
            self._began = time.perf_counter()
            if loaded_torch() is None:
                self._after_import = AfterImport("torch", self._follow)
            else:
                self._follow()
            # the last one: it would see our own imports
            has_graph = self._flame_graph_file is not None
            self._host = self._start_follower(
                lambda: _new_host_tracker(has_flame_graph=has_graph), "allocations in RAM"
            )
        self._start_span()

    def _follow(self) -> None:
        """Follow torch's tensors from now on, unless that fails."""
        keep_history = self._snapshot_file is not None
        follower = self._start_follower(
            lambda: _new_tensor_follower(self._names, keep_history=keep_history), "torch's tensors"
        )
        if follower is not None and self._after_import is not None:
            # The code has imported torch: times count from the start of the code.
            follower.began = self._began
        elif follower is not None:
            # The start of the follower, which examines all tensors, is not a part of the code.
            self._began = follower.began
        self._tensor_follower = follower

    def _start_follower(self, make: Callable[[], Any], subject: str) -> Any:
        """Return a follower after its start; None, with a note, if it cannot start.

        Args:
            make: returns a new follower of tensors or of the host.
            subject: what it follows, in words, for the note.
        """
        try:
            follower = make()
            follower.start()
        except ModuleNotFoundError as error:
            if error.name == "memray":
                self._lacks_memray = True
            else:
                self._notes.append(f"tensors: {describe_error(error)}")
        except TraceError as error:
            self._notes.append(f"not followed: {subject}, because {error}")
        except Exception as error:  # an old torch, another tracker of memray
            if is_from_signal(error):
                raise
            self._notes.append(f"not followed: {subject} ({describe_error(error)})")
        else:
            return follower
        return None

    def stop(self, inventory: InventoryAtEnd, error: BaseException | None = None) -> PeakRecord:
        """Stop, and make the record.

        Args:
            inventory: lists the tensors with their names.
            error: the error that has ended the code; None if it ended without one.
        """
        seconds = time.perf_counter() - self._began
        use = self._stop_span()
        followers = self._stop_followers()
        devices = list[DevicePeak]()
        with growth_for("%%peak"):
            try:
                if followers.tensors is not None:
                    for device in self._read_tensors(followers.tensors, inventory, error):
                        devices.append(self._bounded_by_process(device, use))
                if followers.host is not None:
                    self._write_flame_graph(followers.host, devices)
                    devices.append(followers.host.read(self._exact_use(use)))
                    if followers.host.note:
                        self._notes.append(followers.host.note)
            except Exception as problem:  # must not hide the code's own error
                if is_from_signal(problem):
                    raise
                self._notes.append(f"the record is not complete: {describe_error(problem)}")
        if self._lacks_memray:
            self._notes.append(self._without_memray(has_tensors=bool(devices)))
        usage = None if use is None else use.usage
        self.record = PeakRecord(tuple(devices), seconds, tuple(self._notes), usage)
        return self.record

    def _without_memray(self, *, has_tensors: bool) -> str:
        """Return a note on the rows that the report lacks, with the line that installs memray."""
        line = f"{how_to_install('memray')} (Linux and macOS)"
        if self._flame_graph_file is not None:
            return f"no flame graph was written, and memory outside torch is not shown: {line}"
        if has_tensors:
            return f"memory outside torch is not shown: {line}"
        return f"the lines that allocated RAM are not known: {line}"

    def _write_flame_graph(self, host: Any, devices: Iterable[DevicePeak]) -> None:
        """Write memray's flame graph, if the user wants it; a failure becomes a note.

        Args:
            host: the tracker of RAM.
            devices: the records of tensors, which the flame graph lacks.
        """
        if self._flame_graph_file is None:
            return
        try:
            size = write(
                self._flame_graph_file, host.flame_graph(), is_ours=_is_flame_graph, force=False
            )
        except TypeError:  # it has no option ``no_web``
            self._notes.append("no flame graph was written: this version of memray is too old")
            return
        except Exception as error:
            if is_from_signal(error):
                raise
            self._notes.append(f"no flame graph was written: {describe_error(error)}")
            return
        note = f"saved: {self._flame_graph_file} ({format_bytes(size)}); a browser shows it"
        cards = [device.device for device in devices if device.device != "cpu"]
        if cards:
            verb = "has a table" if len(cards) == 1 else "have tables"
            note += f". It has RAM only; {listed(cards, 4)} {verb} here"
        self._notes.append(note)

    def _start_span(self) -> None:
        """Measure the process's own peak from now on; the user's code runs all the same if that
        fails.
        """
        try:
            span = HostSpan(current_traces().meter)
            span.start()
        except Exception as error:
            if is_from_signal(error):
                raise
            self._notes.append(f"{_NOT_COMPARED} ({describe_error(error)})")
        else:
            self._span = span

    def _stop_span(self) -> HostUse | None:
        """Return the RAM of the process while the code ran; None if it was not measured."""
        if self._span is None:
            return None
        try:
            return self._span.stop()
        except Exception as error:
            if is_from_signal(error):
                raise
            self._notes.append(f"{_NOT_COMPARED} ({describe_error(error)})")
            return None

    def _bounded_by_process(self, device: DevicePeak, use: HostUse | None) -> DevicePeak:
        """Return the record of a device's tensors, which in RAM have at most the bytes of the
        process's own peak.
        """
        if device.device != "cpu":
            return device
        use = self._exact_use(use)
        if use is None:
            return device
        return bounded(device, use.usage.peak_bytes)

    def _exact_use(self, use: HostUse | None) -> HostUse | None:
        """Return the RAM of the process if it is exact; None, with a note, if its
        peak was sampled.
        """
        if use is None or use.usage.method != "sampled":
            return use
        if _SAMPLED not in self._notes:
            self._notes.append(_SAMPLED)
        return None

    def _read_tensors(
        self, follower: Any, inventory: InventoryAtEnd, error: BaseException | None
    ) -> list[DevicePeak]:
        """Return the peaks of tensors, add notes, and save torch's snapshot."""
        tensors = None
        if follower.has_storages:
            try:
                # Tensors without a name have had their roles since the start.
                tensors = inventory(follower.has_new_storages)
            except GpuMemError as problem:
                self._notes.append(f"no names: {problem}")
        ran_out = error is not None and classify(error).kind == "oom"
        devices: list[DevicePeak] = follower.read(tensors, ran_out=ran_out)
        self._notes += follower.notes
        if ran_out and follower.failed_operation is not None:
            operation = _words_on_origin(follower.failed_operation.origin)
            self._notes.append(f"memory ran out in {operation}")
        if follower.error:
            self._notes.append(f"following torch's storages stopped early: {follower.error}")
        self._save_snapshot(follower.snapshot)
        return devices

    def _save_snapshot(self, snapshot: Any) -> None:
        """Save torch's snapshot, if the user has named a file for it."""
        if self._snapshot_file is None:
            return
        if snapshot is None:
            self._notes.append("nothing was saved: no memory of a CUDA device was allocated")
            return
        content = pickle.dumps(snapshot)
        size = write(self._snapshot_file, content, is_ours=lambda _: True, force=True)
        self._notes.append(
            f"saved: {self._snapshot_file} ({format_bytes(size)}); pytorch.org/memory_viz shows it"
        )

    def drop(self) -> None:
        """Stop without a record; can be called again, and after ``stop``."""
        self._stop_followers()

    def _stop_followers(self) -> _Followers:
        """Stop, and return the followers that ran."""
        if self._span is not None:
            self._span.drop()
        if self._after_import is not None:
            self._after_import.stop()
        followers = _Followers(self._tensor_follower, self._host)
        self._tensor_follower = self._host = None
        self._names = tuple  # returns no names: the function in its place refers to the frame
        for follower in followers:
            if follower is not None:
                follower.stop()
        return followers


def _words_on_origin(origin: Origin) -> str:
    """Return an operation, its module and its line in words: ``mm of model.0 in line 3: y = x``."""
    words = list[str]()
    if origin.operation:
        words.append(origin.operation)
    if origin.module:
        words.append(f"of {origin.module}")
    if origin.line:
        words.append(f"in {line_text(*origin.line)}")
    return " ".join(words)


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once this thread has imported a module.

    Python asks it for the module first, because it is the first finder of ``sys.meta_path``.

    Args:
        name: the module's name.
        call_after: the function.
    """

    def __init__(self, name: str, call_after: Callable[[], None]) -> None:
        self._name = name
        self._call_after = call_after
        self._thread = threading.get_ident()
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Remove the finder."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, *_: object) -> Any:
        """Return the module's spec, whose loader calls the function; None for other modules."""
        if name != self._name or threading.get_ident() != self._thread:
            return None
        self.stop()  # before the search for the spec, which asks all finders
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader, load = spec.loader, spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                """Load the module as the class's method does, then call the function."""
                del loader.exec_module  # the class's method is visible again
                load(module)
                self._call_after()

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _snapshot_path(save: str | os.PathLike[str]) -> Path:
    """Return the path of a file for torch's snapshot; an existing file must be one."""
    return _writable_path(
        save,
        (".pickle", ".pkl"),
        wanted="name a file that ends in .pickle, for torch's memory viewer",
        is_ours=_is_snapshot,
        kind="a snapshot of allocations",
    )


def _flame_graph_path(flame: str | os.PathLike[str]) -> Path:
    """Return the path of a file for memray's flame graph; an existing file must be one."""
    return _writable_path(
        flame,
        (".html", ".htm"),
        wanted="name a file that ends in .html, for memray's flame graph",
        is_ours=lambda head: _is_flame_graph(head.decode("utf-8", "replace")),
        kind="a flame graph",
    )


def _writable_path(
    given: str | os.PathLike[str],
    suffixes: tuple[str, ...],
    *,
    wanted: str,
    is_ours: Callable[[bytes], bool],
    kind: str,
) -> Path:
    """Return the path of a file that can be written; ``FileError`` says why it cannot.

    Args:
        given: the path that the user has written.
        suffixes: the endings that it may have.
        wanted: what to write instead of another ending.
        is_ours: returns True for the beginning of a file that may be replaced.
        kind: the kind of these files, in words.
    """
    path = place_of(given)
    name = quoted(os.fsdecode(given))
    if path.suffix.lower() not in suffixes:
        raise FileError(f"{name}: {wanted}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise FileError(f"{ellipsize(path.parent)!r} is not a folder, or cannot be written")
    if path.exists():
        head = _beginning_of_file(path, name)
        if head and not is_ours(head):
            raise FileError(f"{name} is not {kind}, so it is not replaced: name another")
    return path


def _is_snapshot(beginning: bytes) -> bool:
    """Return True for the beginning of a pickled snapshot of torch."""
    has_its_keys = b"segments" in beginning or b"device_traces" in beginning
    return beginning[:1] == b"\x80" and has_its_keys


def _is_flame_graph(beginning: str) -> bool:
    """Return True for the beginning of a page that memray has made."""
    return "memray" in beginning


def _beginning_of_file(path: Path, name: str) -> bytes:
    """Return the beginning of a file that exists."""
    try:
        with open_plain(path) as file:
            return file.read(4096)  # enough to recognise its format
    except OSError as error:
        raise FileError(f"{name}: {ellipsize(error.strerror or error)}") from None


class PeakBlock(GuardedBlock):
    """A block of code whose memory is followed; ``record`` has the result once it has ended."""

    _block_name = "peak"
    _lost_at_start = _lost_at_end = "the memory of this block was not followed"

    def __init__(
        self, save: str | os.PathLike[str] | None, flame: str | os.PathLike[str] | None
    ) -> None:
        self._snapshot_file = save
        self._flame_graph_file = flame
        self._peak: Peak | None = None

    @property
    def record(self) -> PeakRecord:
        """The memory of each device at its highest moment.

        Raises:
            TraceError: the block has not ended yet.
        """
        if self._peak is None or self._peak.record is None:
            raise TraceError("the block has not ended: read its record below it")
        return self._peak.record

    def _record_to_show(self) -> PeakRecord | None:
        """Return the record, once the block has ended."""
        return None if self._peak is None else self._peak.record

    def _open_block(self) -> PeakBlock:
        """Start following the memory."""
        frame = _users_frame()
        self._peak = Peak(
            lambda: names_at(frame).items(), self._snapshot_file, self._flame_graph_file
        )
        try:
            self._peak.start()
        except BaseException:  # an interrupt, too
            self._peak.drop()
            raise
        return self

    def _close_block(self, error: BaseException | None) -> None:
        """Stop, and make the record."""
        frame = _users_frame()
        if self._peak is not None:
            self._peak.stop(
                lambda has_unnamed: inventory_at(frame, has_arrays=False, has_unnamed=has_unnamed),
                error,
            )

    def _after_failed_end(self) -> None:
        """Stop following after a failed end."""
        if self._peak is not None:
            self._peak.drop()


def _users_frame() -> FrameType:
    """Return the frame of the code with the block, which calls ``GuardedBlock``'s methods."""
    return sys._getframe(3)


def peak(
    *,
    save: str | os.PathLike[str] | None = None,
    flame: str | os.PathLike[str] | None = None,
) -> PeakBlock:
    """Return a ``with`` block that follows the memory of its code; ``record`` then shows its
    highest moment.

    Use it to find out what a peak consists of. It works in scripts as well; ``%%peak`` does the
    same for a cell.

    Args:
        save: a .pickle file for torch's history of the CUDA devices, which pytorch.org/memory_viz
            shows.
        flame: an .html file for memray's flame graph of RAM, which needs memray.

    Raises:
        FileError: when the block begins: ``save`` or ``flame`` cannot be written, or is another
            file.

    >>> with ipygpumem.peak() as found:
    ...     total = sum(range(1000))
    >>> found.record.duration_seconds > 0
    True
    """
    return PeakBlock(save, flame)
