"""Control groups: made-up ones in a folder, and a real one with a memory limit where this machine
lets us make one.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipygpumem.probes import cgroup

V1_MOUNT = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
V2_MOUNT = "24 18 0:20 {top} {at} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
OTHER_MOUNTS = (
    "22 28 0:20 / /proc rw - proc proc rw\n33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup "
    "rw,cpu\n"
)
NO_LIMIT_V1 = 9223372036854771712


class FakeSystem:
    """The part of a file system that tells about control groups."""

    def __init__(self, root: Path, membership: str, mounts: str) -> None:
        self.root = root
        self.write("proc/self/cgroup", membership)
        self.write("proc/self/mountinfo", OTHER_MOUNTS + mounts)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def v2(self, group: str, limit: int | str, used: int, stat: str = "") -> None:
        self.write(f"sys/fs/cgroup/{group}/memory.max", f"{limit}\n")
        self.write(f"sys/fs/cgroup/{group}/memory.current", f"{used}\n")
        self.write(f"sys/fs/cgroup/{group}/memory.stat", stat)

    def v1(self, group: str, limit: int, used: int, stat: str = "") -> None:
        self.write(f"sys/fs/cgroup/memory/{group}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"sys/fs/cgroup/memory/{group}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"sys/fs/cgroup/memory/{group}/memory.stat", stat)


def v2_system(root: Path, path: str, *, top: str = "/", at: str = "/sys/fs/cgroup") -> FakeSystem:
    return FakeSystem(root, f"0::{path}\n", V2_MOUNT.format(top=top, at=at))


def v1_system(root: Path, path: str, *, top: str = "/") -> FakeSystem:
    return FakeSystem(
        root, f"11:cpuset:/\n4:memory:{path}\n1:name=systemd:/x\n", V1_MOUNT.format(top=top)
    )


@contextlib.contextmanager
def limited_group(limit_bytes: int) -> Iterator[Path]:
    """Yield the folder of a fresh group inside our own, in which processes get no more than
    ``limit_bytes``.
    """
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
    pytest.skip(
        f"no control group with a memory limit can be made here: {problems or 'there are none'}"
    )


def _own(version: cgroup.Version) -> Path | None:
    for found, path in cgroup._memberships(cgroup.ROOT):
        if found is version:
            return next(cgroup._around(cgroup.ROOT, version, path), None)
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
