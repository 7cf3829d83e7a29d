"""``%gpumem status`` names the notebooks of the user's other kernels."""

import os
import re
import sys
from collections.abc import Iterator

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.probes import nvml, other_kernels
from tests.steps import run_quietly

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="by /proc")


@pytest.fixture
def train() -> Iterator[Kernel]:
    """Another kernel, of a notebook."""
    with Kernel(env={**os.environ, "JPY_SESSION_NAME": "/home/me/my train.ipynb"}) as kernel:
        yield kernel


def test_status_names_the_notebooks_of_other_kernels(
    kernel: Kernel, train: Kernel, bare_kernel: Kernel
) -> None:
    own, other, bare = (
        int(one.value("__import__('os').getpid()")) for one in (kernel, train, bare_kernel)
    )
    (text,) = run_quietly(kernel, "%gpumem status").reports("status")
    table = text[text.index("your other Jupyter kernels, by ") :]
    rows = dict(re.findall(r"^ +[\d.]+ MiB +(\d+) +(\S.*?) *$", table, re.MULTILINE))
    assert rows[str(other)] == "/home/me/my train.ipynb"
    assert rows[str(bare)] == "unknown"
    assert str(own) not in rows


def test_a_kernel_on_a_card_has_its_notebooks_name(
    train: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = int(train.value("__import__('os').getpid()"))
    monkeypatch.setattr(nvml, "SYSTEMS_PID_NAMESPACE", os.readlink("/proc/self/ns/pid"))  # noqa: PTH115  # as text
    monkeypatch.setattr(os, "getpid", lambda: -1)  # else it was started by this process
    assert nvml.process_label(pid).endswith(", of another kernel: /home/me/my train.ipynb)")


def test_the_environment_of_other_users_is_not_read(
    train: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = int(train.value("__import__('os').getpid()"))
    assert other_kernels.notebook_of(pid) == "/home/me/my train.ipynb"
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert other_kernels.notebook_of(pid) == ""
    assert other_kernels.other_kernels() == []


def test_a_process_that_has_ended_has_no_notebook() -> None:
    assert other_kernels.notebook_of(2**22 + 1) == ""
