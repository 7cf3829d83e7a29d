"""A control group with a memory limit for a test, where this machine lets us make one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipygpumem.probes import cgroup


@contextlib.contextmanager
def limited_group(limit_bytes: int) -> Iterator[Path]:
    """Yield the folder of a fresh group inside our own, in which processes get no more than ``limit_bytes``."""
    problems = []
    for version, own in ((cgroup._V1, _own(cgroup._V1)), (cgroup._V2, _own(cgroup._V2))):
        if own is None:
            continue
        folder = own / f"ipygpumem-test-{time.time_ns()}"
        try:
            folder.mkdir()
        except OSError as error:
            problems.append(str(error))
            continue
        try:
            (folder / version.limit).write_text(str(limit_bytes))
        except OSError as error:  # the memory controller is not handed down to it
            problems.append(str(error))
            folder.rmdir()
            continue
        try:
            yield folder
        finally:
            remove(folder)
        return
    pytest.skip(f"no control group with a memory limit can be made here: {problems or 'there are none'}")


def _own(version: cgroup._Version) -> Path | None:
    for found, path in cgroup._memberships(cgroup.ROOT):
        if found is version:
            return next(cgroup._around(cgroup.ROOT, version, path), None)
    return None


def remove(folder: Path) -> None:
    """Remove a group as soon as the kernel has let go of what ran there."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)
    folder.rmdir()
