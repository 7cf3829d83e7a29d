"""``ipygpumem.expect`` and the pytest marker ``memory`` fail where a peak exceeds its limit."""

import subprocess
import sys
from pathlib import Path

import pytest

import ipygpumem
from ipygpumem.errors import MemoryExpectationError, TraceError, UnitError
from ipygpumem.extras.expectations import pytest_plugin

MIB = 2**20

MARKED = """
import unittest

import numpy as np
import pytest

kept = []

@pytest.mark.memory(ram="32MiB", leaks=0)
def test_little():
    np.ones(1000)

@pytest.mark.memory(ram="32MiB")
def test_much():
    np.ones(8 << 20)

@pytest.mark.memory(leaks=1)
def test_leaves_one():
    kept.append(np.ones(1000))

@pytest.mark.memory(leaks=0)
def test_leaves_two():
    kept.extend([np.ones(1000), np.zeros(2000)])

@pytest.mark.memory(ram="1MiB")
def test_own_error():
    np.ones(8 << 20)
    raise ValueError("mine")

@pytest.mark.memory("1MiB")
def test_wrong():
    pass

@pytest.mark.memory()
def test_no_limit():
    pass

@pytest.mark.memory(leaks=-1)
def test_negative():
    pass

class OldTest(unittest.TestCase):
    @pytest.mark.memory(ram="32MiB")
    def test_of_unittest(self):
        np.ones(8 << 20)

class AsyncTest(unittest.IsolatedAsyncioTestCase):
    @pytest.mark.memory(ram="32MiB")
    async def test_async(self):
        pass
"""


def test_a_block_or_function_fails_above_its_expected_peak() -> None:
    with ipygpumem.expect(ram="32MiB"):
        kept = bytearray(MIB)
    with pytest.raises(MemoryExpectationError) as raised, ipygpumem.expect(ram="32MiB", gpu="1MiB"):
        bytearray(64 * MIB)
    first, figures = str(raised.value).splitlines()
    assert first.startswith("RAM: the peak was 6")
    assert first.endswith("MiB above the start, expected 32 MiB")
    assert figures.startswith("trace expected")
    assert "peak +6" in figures

    @ipygpumem.expect(ram="32MiB")
    def take(size: int) -> int:
        return len(bytearray(size))

    assert take(MIB) == len(kept)
    with pytest.raises(AssertionError, match="expected 32 MiB"):
        take(64 * MIB)


def test_an_error_of_the_code_itself_is_raised() -> None:
    with pytest.raises(ValueError, match="mine"), ipygpumem.expect(ram=1):
        raise ValueError(len(bytearray(8 * MIB)) and "mine")


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TraceError, match="needs a limit"):
        ipygpumem.expect()
    with pytest.raises(UnitError):
        ipygpumem.expect(ram="much")
    with pytest.raises(TraceError, match="cannot decorate"):
        ipygpumem.expect(ram=1)(dict)


def test_the_marker_fails_tests_above_their_expected_memory(tmp_path: Path) -> None:
    (tmp_path / "test_marked.py").write_text(MARKED)
    plugin = ["-p", pytest_plugin.__name__] * (not _is_installed())
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--strict-markers",
        "-rfp",
        "-p",
        "no:cacheprovider",
        *plugin,
    ]
    done = subprocess.run(
        [*command, tmp_path], capture_output=True, text=True, timeout=900, check=False
    )
    results = dict(
        line.split(" ")[1::-1]
        for line in done.stdout.splitlines()
        if line.startswith(("PASSED", "FAILED"))
    )
    assert {name.rpartition("::")[2]: result for name, result in results.items()} == {
        "test_little": "PASSED",
        "test_much": "FAILED",
        "test_leaves_one": "PASSED",
        "test_leaves_two": "FAILED",
        "test_own_error": "FAILED",
        "test_wrong": "FAILED",
        "test_no_limit": "FAILED",
        "test_negative": "FAILED",
        "test_of_unittest": "FAILED",
        "test_async": "FAILED",
    }

    # Each kind of failure has its own text.
    for text in (
        "MiB above the start, expected 32 MiB",
        "tensors and arrays that stay alive: 2, expected 0",
        "ndarray",
        "cannot measure unittest's async tests",
        "ValueError: mine",
        'the marker memory takes ram="200MiB", gpu="8GiB" and leaks=0',
    ):
        assert text in done.stdout


def _is_installed() -> bool:
    from importlib.metadata import entry_points

    return any(point.value == pytest_plugin.__name__ for point in entry_points(group="pytest11"))
