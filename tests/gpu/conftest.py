"""The GPU suite: its marker, the reason where it cannot run, its fixtures, and a line of JSON per
result.
"""

import functools
import importlib
import importlib.util
import json
import os
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.kernel import Kernel
from tests.gpu.support import TIDY, Card, is_simulated
from tests.steps import SharedKernel

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark this folder's tests, and skip them where there is nothing to test on, or not what they
    need.
    """
    ours = [item for item in items if HERE in item.path.parents]
    reason = why_not() if ours else None
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        name = item.originalname.removeprefix("test_").replace("_", " ")  # type: ignore[attr-defined]  # of functions
        stated = item.obj.__doc__ or f"{name[0].upper()}{name[1:]}."  # type: ignore[attr-defined]
        titled = item.module.__doc__.strip().partition("\n\n")[0].rstrip(".")  # type: ignore[attr-defined]
        item.user_properties += [
            ("statement", " ".join(stated.split())),
            ("title", " ".join(titled.split())),
        ]
        why = reason or _unfit(item)
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))


def _unfit(item: pytest.Item) -> str | None:
    """Return why a test cannot run on the kind of card that is here, or None."""
    hardware = item.get_closest_marker("hardware")
    if hardware is not None and is_simulated():
        return f"needs {hardware.args[0]}: hardware only"
    if item.get_closest_marker("simulated") is not None and not is_simulated():
        return "needs cards of a chosen number and size, or a fault on demand: simulated card only"
    return None


def why_not() -> str | None:
    """Return why no GPU test can run here, or None.

    torch is imported only where all else is there: other tests of this process want to be without
    it.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    built_for = runpy.run_path(str(Path(spec.origin).parent / "version.py"))
    if built_for.get("cuda") is None:
        return f"torch {built_for['__version__']} is built without CUDA"
    missing = _missing_driver()
    if missing is not None:
        return missing
    torch = importlib.import_module("torch")
    return None if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"


def _missing_driver() -> str | None:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return "nvidia-ml-py is not installed: the tests have nothing to compare with"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return f"no NVIDIA driver (NVML: {error})"
    return None if nvml.nvmlDeviceGetCount() else "the NVIDIA driver sees no device"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append one result to the file that GPU_RESULTS names; a run that breaks off keeps what it
    has.
    """
    path = os.environ.get("GPU_RESULTS")
    if (
        not path
        or "gpu/" not in report.nodeid
        or (report.when != "call" and report.outcome == "passed")
    ):
        return
    line = {
        **{name: value for name, value in report.user_properties if name != "figure"},
        "test": report.nodeid.split("::")[-1],
        "outcome": report.outcome,
        "figures": [str(value) for name, value in report.user_properties if name == "figure"],
        "reason": _reason(report),
    }
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _reason(report: pytest.TestReport) -> str:
    if report.outcome == "passed":
        return ""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return report.longreprtext


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Note a measured figure for docs/measured/gpu-verification.md."""

    def note(text: str) -> None:
        print(text)
        record_property("figure", text)

    return note


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """A function that chooses the simulated cards of the processes started from then on:
    ``machine(cards=2, gib=8)``.

    No other test's process is on them.
    """

    return functools.partial(choose_cards, monkeypatch, tmp_path)


def choose_cards(
    patch: pytest.MonkeyPatch, folder: Path, *, cards: int = 1, gib: float = 24, **more: object
) -> None:
    """Choose the simulated cards of the processes started from now on, until ``patch`` ends."""
    patch.setenv("SIM_DEVICES", str(cards))
    patch.setenv("SIM_TOTAL_MIB", str(round(gib * 1024)))
    patch.setenv("SIM_TABLE", str(folder / "machine"))
    for name, value in more.items():
        patch.setenv(f"SIM_{name.upper()}", str(value))


@pytest.fixture(scope="session")
def torch() -> Any:
    return importlib.import_module("torch")


@pytest.fixture(scope="session")
def card(torch: Any) -> Card:
    """The device that torch calls cuda:0, as NVML sees it."""
    return Card(torch.cuda.get_device_properties(0))


@pytest.fixture(scope="session")
def shared_gpu_kernel() -> Iterator[SharedKernel]:
    """A kernel for all tests that can do with one in which others have run before: the extension is
    loaded, torch imported, the CUDA context made. It is tidied when a test asks for it.
    """
    shared = SharedKernel(*TIDY, timeout=600)
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def gpu_kernel(shared_gpu_kernel: SharedKernel) -> Kernel:
    """The same, tidied before the first of a module's tests."""
    return shared_gpu_kernel.get()
