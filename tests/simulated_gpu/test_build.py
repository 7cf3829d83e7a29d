"""``make gpu-sim`` where something is missing: one line that says what, and how to get it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated_gpu import build

pytestmark = pytest.mark.thorough


def run(folder: Path, **env: str) -> str:
    """Return the one line with which build.py refuses."""
    done = subprocess.run(
        [sys.executable, build.__file__, str(folder / "simgpu")],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    return line


def test_no_compiler(tmp_path: Path) -> None:
    line = run(tmp_path, PATH=str(tmp_path))
    assert line == "simulated GPU: gcc and objdump not found: apt-get install gcc libc6-dev binutils"


@pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("objdump")), reason="asked for before the wheel")
def test_no_wheel_to_be_had(tmp_path: Path) -> None:
    line = run(tmp_path, SIM_TORCH="0.0.1", PIP_NO_INDEX="1")
    assert line.startswith("simulated GPU: pip cannot install torch==0.0.1 for Python 3.")
    assert "SIM_TORCH another version, PYTHON another interpreter" in line


@pytest.mark.parametrize(
    ("cuda", "told"),
    [
        ("None", "is built without CUDA here: the simulated card needs a CUDA build"),
        ("'14.1'", "is built for CUDA 14, known is 13: add its runtime to HEADERS in build.py"),
    ],
)
def test_a_torch_that_is_unknown(tmp_path: Path, cuda: str, told: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(f"from typing import Optional\ncuda: Optional[str] = {cuda}\n")
    with pytest.raises(build.CannotBuildError, match=told):
        build._headers(Path(sys.executable), tmp_path, tmp_path)


def test_a_library_that_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_wanted", lambda libraries: ({}, {"libcudart.so.13", "libcufresh.so.1"}))
    monkeypatch.setattr(build, "_compile", lambda library, *arguments: library.touch())
    with pytest.raises(build.CannotBuildError, match=r"needs libcufresh\.so\.1, which PREFIXES in build\.py"):
        build._build_libraries([], tmp_path, tmp_path)
