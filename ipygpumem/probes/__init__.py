"""Reads memory: one file per kind. A probe returns numbers and never prints.

The meter reads these probes at the start and the end of each cell:

- ``host.py``: the process's RAM, and its peak;
- ``accelerators.py``: CUDA, ROCm and XPU devices, through torch;
- ``pools.py``: Apple's GPU, pools of other libraries, and probes that the user has registered;
- ``outside.py``: memory beyond the process's own RAM: shared memory segments (``segments.py``) and
  child processes (``children.py``).

These files are asked when a figure is explained, or a limit found:

- ``mappings.py``, ``pages.py``: the process's address space, and which of its pages are in RAM;
- ``malloc.py``: the heaps of glibc's malloc and of Python's allocator;
- ``allocator.py``: torch's caching allocator, block by block;
- ``nvml.py``, ``device_memory.py``: a whole device, with the processes that use it;
- ``cgroup.py``, ``own_limits.py``: limits of the container and of the process;
- ``oom_kills.py``, ``other_kernels.py``: processes that the system has ended; the user's other
  Jupyter kernels.
"""

from __future__ import annotations

from typing import Protocol

from ipygpumem.records import Reading


class Probe(Protocol):
    """One source of memory figures, with a high-water mark that can be reset."""

    @property
    def sampled(self) -> bool:
        """True if peaks are only seen by frequent sampling, without a high-water mark."""

    def read(self, *, detail: bool = False, peak: bool = True) -> tuple[Reading, ...]:
        """Return each device's current memory and its peak since the last ``rearm``.

        Devices that the user's code has not used yet are left out.

        Args:
            detail: add figures that take more than microseconds: totals of every device, other
                processes.
            peak: False if the caller needs no peak, which then may equal the current value.
        """

    def glance(self) -> tuple[Reading, ...]:
        """Return each device's current memory without a peak; safe in any thread, never waits for a
        device.
        """
        return self.read()

    def rearm(self) -> None:
        """Begin a new peak: ``peak_bytes`` starts again from the current value."""
        return

    def close(self) -> None:
        """Release the probe's resources: descriptors and wrapped functions."""
        return
