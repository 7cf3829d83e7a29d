"""Made-up control groups in a folder; benchmarks/harness/control_group.py makes real ones."""

from pathlib import Path

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
