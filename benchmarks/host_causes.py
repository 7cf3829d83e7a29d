"""``python -m benchmarks.host_causes [--states N]``: stage random states of this machine's memory
and check the causes.

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
    found = ipygpumem.last().recovery
    return found and found.cause and (found.cause.kind, found.cause.text, found.cause.remedy)
"""
_HELD = (
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
_LIMITS = ("RLIMIT_AS", "RLIMIT_DATA")
_LIFT = f"unlimit{_LIMITS}"
_OTHER = (
    "other = subprocess.Popen([sys.executable, '-c', 'x = bytearray(1) * 2**27; input()'], "
    "stdin=subprocess.PIPE)"
)


class _State:
    """A random state, staged in a kernel."""

    def __init__(self, choose: random.Random, kernel: _Kernel, *, in_group: bool) -> None:
        self._kernel = kernel
        self._in_group = in_group
        self._names = [f"name_{number}" for number in range(choose.randint(0, 3))]
        self._cells = [
            choose.choice(_HELD).format(name=name, mib=choose.randrange(20, 160, 4))
            for name in self._names
        ]
        self._limits = {
            name: choose.randrange(40, 500) for name in _LIMITS if choose.random() < 0.45
        }
        self._guard = choose.choice(("", "", "--limit {}MiB", "--touched --limit {}MiB")).format(
            choose.randrange(200, 600)
        )
        if in_group and not self._guard:
            self._guard = " "
        self._used = [name for name in self._names if choose.random() < 0.3]
        if choose.random() < 0.15:
            self._request = choose.choice(_RAISED)
        elif choose.random() < 0.15:
            self._request = f"write({choose.randrange(20, 120)})"
            self._cells.append(
                f"open('/dev/shm/fill', 'wb').write(bytes({choose.randrange(0, 60)} << 20)); None"
            )
        else:
            size = choose.randrange(50, 800, 4) if choose.random() < 0.93 else 1 << 30
            self._request = choose.choice(_REQUESTS[:2] if size == 1 << 30 else _REQUESTS).format(
                mib=size
            )
        self._other = choose.random() < 0.3
        self._request = "".join(f"len({name}); " for name in self._used) + self._request

    def __str__(self) -> str:
        return (
            f"{self._cells} {self._limits} guard:{self._guard} group:{self._in_group} "
            f"{self._request}"
        )

    def stage(self) -> None:
        """Set everything up."""
        for cell in [*self._cells, _OTHER] if self._other else self._cells:
            self._run(cell)
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
        """Run the request; return the named cause, and an objection if it is wrong."""
        self.stage()
        reply = self._run(self._request)
        found = self._kernel.value("cause()") if reply.error else None
        if found is None:
            return ("not clear" if reply.error else "no error"), ""
        kind, text, remedy = found
        return kind, self._objection(kind, text, remedy)

    def _objection(self, kind: str, text: str, remedy: str) -> str:
        """Return why a cause is wrong; empty if it is right."""
        if self._request.endswith(_RAISED):
            return "the error was raised by code"
        if kind == "too large":
            total = (
                int(re.findall(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[0]) >> 10
            )
            return (
                ""
                if any(int(size) > total for size in re.findall(r"\d{9,}", self._request))
                else "it is not"
            )
        if kind == "shm":
            self._run("os.path.exists('/dev/shm/fill') and os.remove('/dev/shm/fill')")
            size = int(re.findall(r"write\((\d+)\)", self._request)[0])
            return self._fails_still(text) if size < _SHM_MIB else ""
        if kind == "guard":
            self._apply(only="guard")
            return "" if self._run(self._request).error else "the guard alone refuses nothing"
        if kind != "limit":
            return f"{kind} on the host"
        if remedy.startswith("del "):
            names = set(re.findall(r"\w+", remedy[4:]))
            if names & set(self._used):
                return f"the cell uses {names & set(self._used)}"
            self._run(remedy)
            return self._fails_still(text)
        name = re.findall(r"RLIMIT_\w+", text)[0]
        self._run(remedy)
        after = self._run(self._request).error and self._kernel.value("cause()")
        if after and after[0] == "limit" and name in after[1]:
            return "its remedy does not help"
        self._apply(only=name)
        return "" if self._run(self._request).error else "that limit alone refuses nothing"

    def _fails_still(self, text: str) -> str:
        """Return a problem if the same request is refused again after a remedy."""
        after = self._run(self._request).error and self._kernel.value("cause()")
        return (
            "its remedy does not help"
            if after and after[1].split(", ")[0] == text.split(", ")[0]
            else ""
        )

    def clear(self) -> None:
        """Undo everything."""
        self._apply(only="none")
        self._run("if 'other' in globals(): other.kill(); other.wait()")
        names = ", ".join(f"'{name}'" for name in (*self._names, "keeper", "hold", "other"))
        self._run(f"for name in ({names}): globals().pop(name, None)")
        self._run("if os.path.exists('/dev/shm/fill'): os.remove('/dev/shm/fill')")


def main() -> None:
    """Stage the states and print the causes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = Counter[str]()
    wrong = 0
    numbers = [*range(options.seed, options.seed + options.states)]
    while numbers:
        in_group = bool(numbers[0] % 2)
        with ExitStack() as undo:
            group = undo.enter_context(limited_group(_GROUP_BYTES)) if in_group else None
            kernel = undo.enter_context(_Kernel())
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
                    found["the kernel died"] += 1
                    break
                found[kind] += 1
                wrong += bool(objection)
                if objection:
                    print(f"{number}: {kind} is wrong ({objection}): {state}", flush=True)
    print(f"{sum(found.values())} states, {wrong} wrong causes: {dict(found)}")


if __name__ == "__main__":
    main()
