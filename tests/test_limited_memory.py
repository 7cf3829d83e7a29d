"""The reconciliation of the host inside a control group with a memory limit, made for the test by the real kernel."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipygpumem.units import GIB, MIB, parse_bytes
from tests.control_group import limited_group
from tests.kernel import Kernel
from tests.steps import works

LIMIT = GIB
_ROW = re.compile(r"^ +([\d.]+ (?:[KMGTP]i)?B)  +(\S.*?)  +\S", re.MULTILINE)


@pytest.fixture
def group() -> Iterator[Path]:
    """A group of processes that may have 1 GiB; skips where none can be made."""
    with limited_group(LIMIT) as folder:
        yield folder


@contextlib.contextmanager
def kernel_in(group: Path, folder: Path) -> Iterator[Kernel]:
    """A kernel that is in ``group`` from its first page on; later it would take none of its pages along."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\necho $$ > {group / "cgroup.procs"}\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        kernel = Kernel()
    with contextlib.closing(kernel):
        works(kernel, "%load_ext ipygpumem")
        yield kernel


def status(kernel: Kernel) -> tuple[str, dict[str, int]]:
    """Return the title of the host's table and its rows."""
    (text,) = works(kernel, "%gpumem status").reports("status")
    title = re.search(r"^  (RAM: .+)$", text, re.MULTILINE)
    assert title is not None, text
    table = re.split(r"\n  (?:no experiment is open|child processes, by )", text[title.end() :])[0]
    return title[1], {name: parse_bytes(size) for size, name in _ROW.findall(table)}


def test_the_limit_is_the_total_and_the_parts_sum_to_it(group: Path, tmp_path: Path) -> None:
    with kernel_in(group, tmp_path) as kernel:
        title, before = status(kernel)
        works(kernel, "block = bytearray(b'x') * (256 << 20)")
        _, held = status(kernel)
        (file,) = [name for name in ("memory.usage_in_bytes", "memory.current") if (group / name).exists()]
        used = int((group / file).read_text())
    assert title == "RAM: 1.00 GiB, the container's limit (cgroup)"
    assert abs(sum(before.values()) - LIMIT) < MIB
    assert abs(sum(held.values()) - LIMIT) < MIB
    assert abs(held["this process"] - before["this process"] - 256 * MIB) < 8 * MIB
    assert abs(before["free"] - held["free"] - 256 * MIB) < 16 * MIB
    assert abs(LIMIT - held["free"] - used) < 16 * MIB
