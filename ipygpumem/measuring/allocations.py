"""Records where device memory was allocated: torch's own history with Python stacks, for its memory viewer."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import secrets
from pathlib import Path
from typing import Any

from ipygpumem.errors import FileError, said, short
from ipygpumem.probes.accelerators import loaded_torch

MOST_ENTRIES = 100_000
"""Allocations and frees that are remembered, the last ones; each takes some KB."""

_SUFFIXES = (".pickle", ".pkl")


class AllocationHistory:
    """Records from ``start`` until ``stop``; a recording that somebody else has begun is used and goes on.

    Args:
        path: the file for snapshots; one that is there is replaced if it is a snapshot.

    Raises:
        FileError: no file for a snapshot can be there, or it is another's.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.place = _checked(path)
        self._memory: Any = None
        self._is_ours = False

    def start(self) -> None:
        """Begin to record.

        Raises:
            FileError: torch, a CUDA device or torch's recording is missing.
        """
        if loaded_torch() is None and importlib.util.find_spec("torch") is None:
            raise FileError("--record needs torch, which is not installed")
        torch: Any = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise FileError("--record needs a CUDA device, and torch sees none here: leave it out")
        torch.cuda.init()  # before that there is no allocator that could record
        is_on = getattr(torch._C, "_cuda_isHistoryEnabled", None)  # private, like all of torch's recording
        self._memory, self._is_ours = torch.cuda.memory, not (is_on is not None and is_on())
        if self._is_ours:
            try:
                self._memory._record_memory_history("all", context="all", stacks="python", max_entries=MOST_ENTRIES)
            except (TypeError, AttributeError):
                self._memory = None
                raise FileError("--record needs a newer torch: this one records no Python stacks") from None
            except RuntimeError as error:
                self._memory = None
                raise FileError(f"--record: torch's allocator keeps no history here ({said(error)})") from None

    @property
    def is_shared(self) -> bool:
        """Whether the recording is somebody else's, and may go further back than the start."""
        return not self._is_ours

    def write(self) -> int:
        """Write a snapshot, whole or not at all, and return its size in bytes; what is recorded stays.

        Raises:
            FileError: it cannot be written.
        """
        # In the same folder, or replacing would not be one step.
        temporary = self.place.with_name(f".ipygpumem-{secrets.token_hex(8)}.tmp")
        try:
            self._memory._dump_snapshot(str(temporary))
            size = temporary.stat().st_size
            temporary.replace(self.place)
        except BaseException as error:  # an interrupt, too
            with contextlib.suppress(OSError):
                temporary.unlink()
            if isinstance(error, Exception):
                raise FileError(f"{short(self.place)} cannot be written: {said(error)}") from None
            raise
        return size

    def stop(self) -> None:
        """Stop recording, unless it was somebody else's; may be called again."""
        if self._memory is not None and self._is_ours:
            self._memory._record_memory_history(None)
        self._memory = None


def _checked(path: str | os.PathLike[str]) -> Path:
    try:
        place = Path(os.path.realpath(Path(path).expanduser()))
        if place.suffix.lower() not in _SUFFIXES:
            raise FileError(f"--record {short(path)!r}: name a file that ends in .pickle, for torch's memory viewer")
        if not os.access(place.parent, os.W_OK | os.X_OK):
            raise FileError(f"--record: {short(place.parent)!r} is not a folder, or cannot be written")
        if place.exists() and not _is_snapshot(place):
            raise FileError(f"{short(place)!r} is not a snapshot of allocations, so it is not replaced: name another")
    except (OSError, RuntimeError, ValueError, TypeError) as error:  # no such user, a null byte, no path at all
        raise FileError(f"--record: {short(error)}") from None
    return place


def _is_snapshot(place: Path) -> bool:
    """Whether a file is empty, or a pickle that begins as a snapshot's does."""
    with place.open("rb") as file:
        head = file.read(4096)
    return not head or (head[:1] == b"\x80" and any(key in head for key in (b"segments", b"device_traces")))
