"""Who refused memory: a budget, another limit on torch's allocator, or the device, by torch's own text."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from ipygpumem.errors import AutofitError
from ipygpumem.fitting import device_limits
from ipygpumem.fitting.fit import OUT_OF_MEMORY, OVER, Fit, Options
from ipygpumem.fitting.functions import run_tries
from ipygpumem.fitting.refusals import Refusal, refusal
from ipygpumem.measuring.meter import Meter
from tests.fakes import FakeProbe
from tests.test_budget import KnowingCuda

GIB = 1 << 30


def native(asked: str, free: str, allowed: str = "", live: str = "4.00 MiB", cached: str = "16.00 MiB") -> str:
    """Return what torch's caching allocator says since 2.1."""
    limit = f"{allowed} allowed; " if allowed else ""
    return (
        f"CUDA out of memory. Tried to allocate {asked}. GPU 1 has a total capacity of 24.00 GiB of which {free} is "
        f"free. Including non-PyTorch memory, this process has 432.00 MiB memory in use. {limit}Of the allocated "
        f"memory {live} is allocated by PyTorch, and {cached} is reserved by PyTorch but unallocated. If reserved but"
    )


def older(asked: str, free: str, allowed: str, reserved: str = "20.00 MiB") -> str:
    """Return what it said in 2.0."""
    return (
        f"CUDA out of memory. Tried to allocate {asked} (GPU 1; 24.00 GiB total capacity; 4.00 MiB already allocated; "
        f"{free} free; {allowed} allowed; {reserved} reserved in total by PyTorch) If reserved memory is >>"
    )


def asynchronous(asked: str, free: str, allowed: str, live: str = "4.00 MiB") -> str:
    """Return what ``cudaMallocAsync`` says."""
    return (
        f"Allocation on device 1 would exceed allowed memory. (out of memory)\nCurrently allocated     : {live}\n"
        f"Requested               : {asked}\nDevice limit            : 24.00 GiB\nFree (according to CUDA): {free}\n"
        f"PyTorch limit (set by user-supplied memory fraction)\n                        : {allowed}"
    )


@pytest.mark.parametrize("say", [native, older, asynchronous])
def test_a_limit_refused_what_the_device_had_free(say: Any) -> None:
    found = refusal(say("2.00 GiB", "23.00 GiB", "1024.00 MiB"))
    assert found == Refusal("cuda:1", GIB, 2 * GIB, 23 * GIB)
    assert found.text("It") == "It refused 2.00 GiB of cuda:1, although 23.00 GiB of it were free"


@pytest.mark.parametrize("say", [native, older, asynchronous])
def test_a_limit_refused_what_the_device_had_not_either(say: Any) -> None:
    found = refusal(say("99.00 GiB", "23.00 GiB", "1024.00 MiB"))
    assert found is not None
    assert found.text("It") == "It refused 99.00 GiB of cuda:1; the device itself had only 23.00 GiB free"


@pytest.mark.parametrize(
    "message",
    [
        native("99.00 GiB", "23.00 GiB"),
        native("2.00 GiB", "1.00 GiB", "8.00 GiB"),
        older("2.00 GiB", "1.00 GiB", "8.00 GiB"),
        asynchronous("2.00 GiB", "1.00 GiB", "24.00 GiB"),
        native("2.00 GiB", "3.00 GiB", "1.00 GiB").replace("CUDA", "XPU"),
        "CUDA out of memory",
        "",
    ],
)
def test_without_a_limit_that_was_reached_it_was_the_device(message: str) -> None:
    assert refusal(message) is None


def test_what_is_reserved_counts_against_the_limit() -> None:
    assert refusal(native("2.00 GiB", "1.00 GiB", "8.00 GiB", live="5.00 GiB", cached="1.50 GiB")) is not None


TEXT = native("2.00 GiB", "23.00 GiB", "1024.00 MiB").replace("GPU 1", "GPU 0")
FAIL = f"class OutOfMemoryError(RuntimeError): pass\ndef fail(): raise OutOfMemoryError({TEXT!r})"


@pytest.fixture
def limited(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """A shell with the extension, with limits that take effect on nothing, and ``fail()``."""
    cuda = KnowingCuda()
    monkeypatch.setattr(device_limits, "_cuda", lambda: cuda)
    shell.run_line_magic("load_ext", "ipygpumem")
    shell.run_cell(FAIL)
    yield shell
    shell.run_line_magic("unload_ext", "ipygpumem")  # what is still open puts its limits back: there is no torch for it


def refused_by() -> str:
    """Return what the last cell's recovery says."""
    record = ipygpumem.last()
    assert record is not None
    assert record.recovery is not None
    return record.recovery.refused_by


SAID = "refused 2.00 GiB of cuda:0, although 23.00 GiB of it were free"


def test_the_budget_of_an_experiment_is_named(limited: InteractiveShell) -> None:
    limited.run_cell("%%experiment small --budget gpu=1GiB\nfail()")
    assert refused_by() == f"the budget of experiment small (1.00 GiB) {SAID}"
    assert ipygpumem.experiments()[-1].notes == (refused_by(),)


def test_the_report_says_it(limited: InteractiveShell, capsys: Any) -> None:
    limited.run_cell("%experiment start small --budget gpu=1GiB")
    limited.run_cell("fail()")
    assert f"the budget of experiment small (1.00 GiB) {SAID}" in capsys.readouterr().out


@pytest.mark.parametrize("outer", ["1TiB", "9GiB"])
def test_the_budget_of_a_block_is_named_though_it_is_over_by_then(limited: InteractiveShell, outer: str) -> None:
    limited.run_cell(
        f"%%experiment large --budget gpu={outer}\nimport ipygpumem\n"
        "with ipygpumem.budget(gpu='1GiB') as budget:\n    try:\n        fail()\n"
        "    except Exception as error:\n        raise ValueError('mine') from error"
    )
    assert refused_by() == f"the budget of the with block (1.00 GiB) {SAID}"
    assert ipygpumem.experiments()[-1].notes == ()


def test_the_budget_of_an_experiment_over_a_block_is_named(limited: InteractiveShell) -> None:
    limited.run_cell(
        "import ipygpumem\nwith ipygpumem.experiment('small', budget={'cuda:0': '1GiB'}):\n    fail()",
    )
    assert refused_by() == f"the budget of experiment small (1.00 GiB) {SAID}"


@pytest.mark.parametrize("first", ["", "%%experiment a --budget cuda:1=1GiB", "%%experiment a --budget gpu=8GiB"])
def test_a_limit_that_is_no_budgets_is_reported_as_torchs(limited: InteractiveShell, first: str) -> None:
    limited.run_cell(f"{first}\nfail()")
    assert refused_by() == f"the limit of 1.00 GiB on torch's allocator {SAID}"


def test_an_error_that_was_caught_names_nobody(limited: InteractiveShell) -> None:
    limited.run_cell("%%experiment small --budget gpu=1GiB\ntry: fail()\nexcept Exception: pass\nraise MemoryError")
    assert refused_by() == ""


def test_a_try_that_a_budget_refused_is_over_it() -> None:
    probe = FakeProbe("cuda:0")
    meter = Meter([probe])

    class OutOfMemoryError(RuntimeError): ...

    def train(n: int) -> None:
        probe.spike(9)
        raise OutOfMemoryError(TEXT)

    limits: dict[str, int] = {}
    outcomes = []
    for limits["cuda:0"] in (GIB - 1, 4 * GIB):
        fit = Fit(Options(max_tries=0).plan({"n": 2}), meter, limits=lambda: limits)
        with pytest.raises(AutofitError, match=r"of cuda:0, of which 1\.00 GiB are allowed"):
            run_tries(train, fit)
        outcomes.append((fit.tries[-1].outcome, fit.tries[-1].limit_bytes))
    assert outcomes == [(OVER, GIB), (OUT_OF_MEMORY, GIB)]
    meter.close()


SCRIPT = f"""
import ipygpumem
from ipygpumem.fitting import device_limits
from tests.test_budget import KnowingCuda
cuda = KnowingCuda()
device_limits._cuda = lambda: cuda
{FAIL}
with ipygpumem.budget(gpu="1GiB"):
    fail()
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes before Python 3.11")
def test_in_a_script_the_error_has_a_note() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.endswith(f"\nipygpumem: the budget of the with block (1.00 GiB) {SAID}\n")
