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
    for version, own in ((cgroup.V1, _own(cgroup.V1)), (cgroup.V2, _own(cgroup.V2))):
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
    reason = problems or "there are none"
    raise unittest.SkipTest(f"no control group with a memory limit can be made here: {reason}")


def _own(version: cgroup.Version) -> Path | None:
    for found, path in cgroup.memberships(cgroup.ROOT):
        if found is version:
            return next(cgroup.groups_around(cgroup.ROOT, version, path), None)
    return None


def move(pid: int, folder: Path) -> None:
    """Let a process be in a group from now on; the pages that it has stay where they
    are counted.
    """
    (folder / "cgroup.procs").write_text(str(pid))


def remove(folder: Path) -> None:
    """Remove a group as soon as the kernel has let go of what ran there."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)
    folder.rmdir()
