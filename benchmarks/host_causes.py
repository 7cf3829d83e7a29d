"""Checks the causes that reports name when a request for RAM fails.

``python -m benchmarks.host_causes [--states N]`` stages random states of this machine's memory and
prints how many of the named causes are wrong.

Each state has names, limits of the process, the memory guard, another process and a full or empty
``/dev/shm`` of its own, and a request that may fail. A cause that the report names is tried:
without it the request must succeed, and with nothing else against it the request must fail. It
needs Linux, and the rights to make control groups and mounts.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from benchmarks.guard import _Kernel
from benchmarks.harness.control_group import limited_group, move
from benchmarks.harness.kernel import Reply

_GROUP_BYTES = 1 << 30
_SHM_MIB = 64
_PRELUDE = f"""
import ctypes, functools, os, resource, subprocess, sys, mmap, numpy as np, ipygpumem
libc = ctypes.CDLL(None)
assert libc.unshare(0x20000) == 0 and libc.mount(b"none", b"/", None, 0x44000, None) == 0
assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size={_SHM_MIB}m") == 0
def limit(name, mib):
    label = {{"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData"}}[name]
    with open("/proc/self/status") as file:
        kib = next(int(line.split()[1]) for line in file if line.startswith(label))
    resource.setrlimit(getattr(resource, name), ((kib << 10) + (mib << 20), -1))
def unlimit(*names):
    for name in names: resource.setrlimit(getattr(resource, name), (-1, -1))
def ones(mib): return np.ones(mib << 17)
def shared(mib): return np.frombuffer(mmap.mmap(-1, mib << 20), "u1")
def write(mib):
    try:
        with open("/dev/shm/new", "wb") as file: file.write(bytes(mib << 20))
    finally: os.remove("/dev/shm/new")
def cause():
    recovery = ipygpumem.last().recovery
    cause = recovery and recovery.cause
    return cause and (cause.kind, cause.text, cause.remedy)
"""
_VALUES = (
    "{name} = ones({mib})",
    "{name} = [ones({mib} // 2), ones({mib} // 2)]",
    "{name} = bytearray(b'1') * ({mib} << 20)",
    "{name} = shared({mib})",
    "{name} = ones({mib}); keeper = {name}[1:]",
    "{name} = ones({mib}); hold = functools.partial(len, {name})",
    "{name} = {{'inner': ones({mib})}}",
)
_REQUESTS = (
    "ones({mib})[0]",
    "len(bytearray({mib} << 20))",
    "np.ones({mib} << 17, 'u1').astype('f8')[0]",
    "len(b'1' * ({mib} << 20))",
    "np.concatenate([np.ones({mib} << 16)] * 1 + [np.ones({mib} << 16)])[0]",
)
_RAISED = (
    "raise MemoryError",
    "raise MemoryError('Unable to allocate 9.00 GiB')",
    "raise OSError(28, 'No space left')",
)
_HUGE_MIB = 1 << 30
"""Size of a request that no machine can serve."""
_GUARDS = ("", "", "--limit {mib}MiB", "--touched --limit {mib}MiB")
"""Arguments of ``%gpumem guard on``; no guard where they are empty."""
_LIMITS = ("RLIMIT_AS", "RLIMIT_DATA")
_LIFT = f"unlimit{_LIMITS}"
_OTHER = (
    "other = subprocess.Popen([sys.executable, '-c', 'x = bytearray(1) * 2**27; input()'], "
    "stdin=subprocess.PIPE)"
)


class _Cause(NamedTuple):
    """The cause that a report names, such as ``limit``, with its text and its remedy."""

    kind: str
    text: str
    remedy: str


class _State:
    """A random state, staged in a kernel."""

    def __init__(self, choose: random.Random, kernel: _Kernel, *, in_group: bool) -> None:
        """Draw the state; the order of the draws is that of each seed's figures."""
        self._kernel = kernel
        self._in_group = in_group
        self._names = [f"name_{number}" for number in range(choose.randint(0, 3))]
        self._cells: list[str] = []
        """Cells that fill memory."""
        for name in self._names:
            cell = choose.choice(_VALUES)
            self._cells.append(cell.format(name=name, mib=choose.randrange(20, 160, 4)))
        self._limits: dict[str, int] = {}
        """MiB that a limit leaves, by the limit's name."""
        for name in _LIMITS:
            # The size is drawn only where there is the limit.
            if choose.random() < 0.45:
                self._limits[name] = choose.randrange(40, 500)
        self._guard = choose.choice(_GUARDS).format(mib=choose.randrange(200, 600))
        """Arguments of the guard; none where it is off."""
        if in_group and not self._guard:
            self._guard = " "
        self._used = [name for name in self._names if choose.random() < 0.3]
        """Names that the request uses, so that no remedy may delete them."""
        request = self._random_request(choose)
        self._has_other_process = choose.random() < 0.3
        self._request = "".join(f"len({name}); " for name in self._used) + request

    def _random_request(self, choose: random.Random) -> str:
        """Return the code of a request; where it writes to /dev/shm, add a cell that fills that."""
        if choose.random() < 0.15:
            return choose.choice(_RAISED)
        if choose.random() < 0.15:
            request = f"write({choose.randrange(20, 120)})"
            filled_mib = choose.randrange(0, 60)
            cell = f"open('/dev/shm/fill', 'wb').write(bytes({filled_mib} << 20)); None"
            self._cells.append(cell)
            return request
        if choose.random() < 0.93:
            mib = choose.randrange(50, 800, 4)
            return choose.choice(_REQUESTS).format(mib=mib)
        return choose.choice(_REQUESTS[:2]).format(mib=_HUGE_MIB)

    def __str__(self) -> str:
        return (
            f"{self._cells} {self._limits} guard:{self._guard} group:{self._in_group} "
            f"{self._request}"
        )

    def stage(self) -> None:
        """Set everything up."""
        for cell in self._cells:
            self._run(cell)
        if self._has_other_process:
            self._run(_OTHER)
        self._apply()

    def _apply(self, *, only: str = "") -> None:
        """Set the limits and the guard, all or ``only`` one."""
        self._run("%gpumem guard off")
        self._run(_LIFT)
        self._run("%gpumem free")
        for name, mib in self._limits.items():
            if only in ("", name):
                self._run(f"limit('{name}', {mib})")
        if self._guard and only in ("", "guard"):
            self._run(f"%gpumem guard on {self._guard}")

    def _run(self, cell: str) -> Reply:
        reply = self._kernel.reply_to(cell)
        if reply is None:
            raise TimeoutError(f"the kernel died or hangs: {cell}")
        return reply

    def verdict(self) -> tuple[str, str]:
        """Run the request; return the kind of the named cause, and an objection if it is wrong."""
        self.stage()
        if not self._run(self._request).error:
            return "no error", ""
        cause = self._named_cause()
        if cause is None:
            return "not clear", ""
        return cause.kind, self._objection(cause)

    def _named_cause(self) -> _Cause | None:
        """Return the cause in the report of the last error, if it names one."""
        fields = self._kernel.value("cause()")
        if not fields:
            return None
        return _Cause(*fields)

    def _objection(self, cause: _Cause) -> str:
        """Return why a cause is wrong; empty if it is right."""
        if self._request.endswith(_RAISED):
            return "the error was raised by code"
        match cause.kind:
            case "too large":
                return self._objection_to_size()
            case "shm":
                return self._objection_to_shm(cause)
            case "guard":
                self._apply(only="guard")
                if self._run(self._request).error:
                    return ""
                return "the guard alone refuses nothing"
            case "limit":
                if cause.remedy.startswith("del "):
                    return self._objection_to_names(cause)
                return self._objection_to_limit(cause)
        return f"{cause.kind} on the host"

    def _objection_to_size(self) -> str:
        """Return a problem if the machine's RAM has room for the request."""
        total_kib = re.findall(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[0]
        total_mib = int(total_kib) >> 10
        sizes_mib = [int(size) for size in re.findall(r"\d{9,}", self._request)]
        if any(size > total_mib for size in sizes_mib):
            return ""
        return "it is not"

    def _objection_to_shm(self, cause: _Cause) -> str:
        """Return a problem if the request fails although nothing else is in /dev/shm."""
        self._run("os.path.exists('/dev/shm/fill') and os.remove('/dev/shm/fill')")
        size_mib = int(re.findall(r"write\((\d+)\)", self._request)[0])
        if size_mib >= _SHM_MIB:
            return ""
        return self._objection_to_remedy(cause)

    def _objection_to_names(self, cause: _Cause) -> str:
        """Return a problem if the cell uses a name to delete, or its deletion does not help."""
        used = set(re.findall(r"\w+", cause.remedy[4:])) & set(self._used)
        if used:
            return f"the cell uses {used}"
        self._run(cause.remedy)
        return self._objection_to_remedy(cause)

    def _objection_to_limit(self, cause: _Cause) -> str:
        """Return a problem if the request fails for the limit without it, or succeeds with nothing
        but it.
        """
        limit = re.findall(r"RLIMIT_\w+", cause.text)[0]
        self._run(cause.remedy)
        second_cause = self._cause_of_second_run()
        if second_cause and second_cause.kind == "limit" and limit in second_cause.text:
            return "its remedy does not help"
        self._apply(only=limit)
        if self._run(self._request).error:
            return ""
        return "that limit alone refuses nothing"

    def _objection_to_remedy(self, cause: _Cause) -> str:
        """Return a problem if the same request is refused again after a remedy."""
        second_cause = self._cause_of_second_run()
        if second_cause and second_cause.text.split(", ")[0] == cause.text.split(", ")[0]:
            return "its remedy does not help"
        return ""

    def _cause_of_second_run(self) -> _Cause | None:
        """Run the request again; return the named cause if it fails again."""
        if not self._run(self._request).error:
            return None
        return self._named_cause()

    def clear(self) -> None:
        """Undo everything."""
        self._apply(only="none")
        self._run("if 'other' in globals(): other.kill(); other.wait()")
        names = ", ".join(f"'{name}'" for name in (*self._names, "keeper", "hold", "other"))
        self._run(f"for name in ({names}): globals().pop(name, None)")
        self._run("if os.path.exists('/dev/shm/fill'): os.remove('/dev/shm/fill')")


class _Counts:
    """Number of states by the kind of their named cause, and the number of wrong causes."""

    def __init__(self) -> None:
        self.states_by_kind = Counter[str]()
        self.wrong = 0


def _check_states(numbers: list[int], counts: _Counts, *, in_group: bool) -> None:
    """Stage states in one kernel until it dies, and remove their numbers from ``numbers``.

    Args:
        numbers: seeds of the states that are left; the kernel takes the even ones, or the odd ones
            if it is in a control group.
        counts: where the causes are counted.
        in_group: True if the kernel runs in a control group with a limit.
    """
    with ExitStack() as stack:
        group = None
        if in_group:
            group = stack.enter_context(limited_group(_GROUP_BYTES))
        kernel = stack.enter_context(_Kernel())
        kernel.run("%load_ext ipygpumem")
        assert kernel.run(_PRELUDE).error is None
        if group is not None:
            move(int(kernel.value("os.getpid()")), group)
        for number in [number for number in numbers if number % 2 == in_group]:
            numbers.remove(number)
            state = _State(random.Random(number), kernel, in_group=in_group)
            try:
                kind, objection = state.verdict()
                state.clear()
            except TimeoutError as error:
                print(f"{number}: {error}: {state}", flush=True)
                counts.states_by_kind["the kernel died"] += 1
                return
            counts.states_by_kind[kind] += 1
            if objection:
                counts.wrong += 1
                print(f"{number}: {kind} is wrong ({objection}): {state}", flush=True)


def main() -> None:
    """Stage the states and print the causes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    numbers = list(range(options.seed, options.seed + options.states))
    counts = _Counts()
    while numbers:
        _check_states(numbers, counts, in_group=bool(numbers[0] % 2))
    total = sum(counts.states_by_kind.values())
    print(f"{total} states, {counts.wrong} wrong causes: {dict(counts.states_by_kind)}")


if __name__ == "__main__":
    main()
