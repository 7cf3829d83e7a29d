"""Writes a recording: each entry is one ``write`` to a file opened for appending, so a killed process loses none.

Nothing is forced to the disk: what was written outlives the process, and not a loss of power.
"""

from __future__ import annotations

import os
import threading

from ipygpumem.flight_recorder import files
from ipygpumem.flight_recorder.entries import CellEnd, CellStart, Entry, Header, encode

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL

_SPARE_BYTES = 8192


class Writer:
    """The open recording of this process; safe to use from several threads.

    Args:
        segments: where it goes.
        header: its first entry, repeated at the head of each segment.
        max_bytes: the most that both segments may take together.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, segments: files.Segments, header: Header, max_bytes: int) -> None:
        self.segments = segments
        self._pid = os.getpid()
        self._segment_bytes = max_bytes // 2
        self._lock = threading.Lock()
        self._number = 1
        self._head = [encode(header, 0)]
        """What each segment begins with: the header, and the start of the cell that runs."""
        self._descriptor = -1
        self._closed = False
        self._open()

    def _open(self) -> None:
        self._descriptor = os.open(self.segments.current, _FLAGS, 0o600)
        files.lock(self._descriptor)
        self._size = 0
        try:
            for line in self._head:
                self._append(line)
        except OSError:
            self._close()
            raise

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def write(self, entry: Entry) -> None:
        """Append ``entry`` (``OSError``); a process that was forked from this one appends nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            if self._descriptor < 0:  # an interrupt came in the middle of a rotation
                self._open()
            line = encode(entry, self._number)
            self._number += 1
            if self._size + len(line) > self._segment_bytes:
                self._rotate()
            self._append(line)
            if isinstance(entry, (CellStart, CellEnd)):
                self._head[1:] = [line] if isinstance(entry, CellStart) else []

    def _append(self, line: bytes) -> None:
        if os.write(self._descriptor, line) != len(line):
            raise OSError(28, "No space left on device")
        self._size += len(line)

    def _rotate(self) -> None:
        self._close()
        self.segments.current.replace(self.segments.older)
        self._open()

    def give_up(self, last: Entry) -> None:
        """Close the file with ``last`` in it, at the cost of what came just before; where even that fails, delete it.

        On a full disk there may be room for nothing else. Without it a later look would say that the kernel died here.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            try:
                if self._descriptor < 0:  # the new half could not be begun
                    self._open()
                os.ftruncate(self._descriptor, max(len(self._head[0]), self._size - _SPARE_BYTES))
                self._append(b"\n" + encode(last, self._number))
            except OSError:
                self.segments.delete()
            finally:
                self._closed = True
                self._close()

    def close(self, last: Entry) -> None:
        """Append ``last`` and close the file; if that fails the file stays open for ``give_up`` (``OSError``)."""
        self.write(last)
        with self._lock:
            self._closed = True
            self._close()
