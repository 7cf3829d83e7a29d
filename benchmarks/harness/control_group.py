"""Control groups with a memory limit, where this machine lets us make them."""

import contextlib
import time
import unittest
from collections.abc import Iterator
from pathlib import Path

from ipygpumem.probes import cgroup


@contextlib.contextmanager
def limited_group(limit_bytes: int) -> Iterator[Path]:
    """Yield the folder of a fresh group inside our own, in which processes get no more than
    ``limit_bytes``.

    Raises:
        unittest.SkipTest: no such group can be made here. pytest skips a test that raises it.
    """
    problems = []
    for version in (cgroup.V1, cgroup.V2):
        our_group = _group_of_this_process(version)
        if our_group is None:
            continue
        folder = our_group / f"ipygpumem-test-{time.time_ns()}"
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
    reason = problems or "there are none"
    raise unittest.SkipTest(f"no control group with a memory limit can be made here: {reason}")


def _group_of_this_process(version: cgroup.Version) -> Path | None:
    """Return the folder of this process's group; None if it has none of this version."""
    for version_of_group, path in cgroup.memberships(cgroup.ROOT):
        if version_of_group is version:
            return next(cgroup.groups_around(cgroup.ROOT, version, path), None)
    return None


def move(pid: int, folder: Path) -> None:
    """Move a process into a group; pages that it already has are still counted in the old one."""
    (folder / "cgroup.procs").write_text(str(pid))


def remove(folder: Path) -> None:
    """Remove a group as soon as the processes in it have ended."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)
    folder.rmdir()
