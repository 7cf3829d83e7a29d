"""``--allocations``: torch's history of allocations, with a stand-in for torch."""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from ipygpumem.errors import FileError
from ipygpumem.shell.allocation_file import MOST_ENTRIES, AllocationFile
from ipygpumem.shell.app import app_of
from tests.fakes import FakeAllocator, fake_torch

SNAPSHOT = {"segments": [], "device_traces": [[]]}


class FakeMemory:
    """``torch.cuda.memory``: what is recorded is gone when it is switched off, as with torch's."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, dict[str, Any]]] = []
        self.enabled = False
        self.broken = False
        self.history: list[str] = []

    def _record_memory_history(self, enabled: str | None = "all", **options: Any) -> None:
        self.calls.append((enabled, options))
        self.enabled = enabled is not None
        self.history.clear()

    def _snapshot(self) -> dict[str, Any]:
        if self.broken:
            raise RuntimeError("no device")
        return {**SNAPSHOT, "history": list(self.history), "enabled": self.enabled}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> FakeMemory:
    """A torch with a CUDA device whose allocations can be recorded."""
    memory = FakeMemory()
    torch = fake_torch(FakeAllocator())
    torch.cuda.memory, torch.cuda.is_available, torch.cuda.init = memory, lambda: True, lambda: None
    torch._C._cuda_isHistoryEnabled = lambda: memory.enabled
    monkeypatch.setitem(sys.modules, "torch", torch)
    return memory


@pytest.fixture
def loaded(memory: FakeMemory, shell: InteractiveShell) -> InteractiveShell:
    """A shell with the extension, whose cells can say what the history holds."""
    shell.run_line_magic("load_ext", "ipygpumem")
    shell.user_ns["memory"] = memory
    return shell


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = pickle.loads(path.read_bytes())
    return found


def test_an_experiment_writes_while_it_still_records(
    loaded: InteractiveShell, memory: FakeMemory, tmp_path: Path
) -> None:
    path = tmp_path / "a.pickle"
    loaded.run_cell(f"%%experiment a --allocations {path}\nmemory.history.append('step')").raise_error()
    assert load(path) == {**SNAPSHOT, "history": ["step"], "enabled": True}
    options = {"context": "all", "stacks": "python", "max_entries": MOST_ENTRIES}
    assert memory.calls == [("all", options), (None, {})]
    note = app_of(loaded).experiments.finished[-1].notes[0]
    assert note.startswith(f"allocations: {path} (")
    assert [file.name for file in tmp_path.iterdir()] == ["a.pickle"]


FAILS = (
    "class Held:\n    def __del__(self): memory.history.append('freed')\n"
    "def train(n):\n    held = Held()\n    memory.history.append(n)\n    if n > 2: raise MemoryError\n    return n\n"
)


def test_an_oom_is_written_before_memory_is_freed(loaded: InteractiveShell, memory: FakeMemory, tmp_path: Path) -> None:
    path = tmp_path / "a.pickle"
    loaded.run_cell(f"%experiment start a --allocations {path}")
    loaded.run_cell(f"{FAILS}train(8)")
    assert (load(path)["history"], memory.history) == ([8], [8, "freed"])
    loaded.run_cell("%experiment end")
    assert load(path)["history"] == [8]
    assert "written when memory ran out" in app_of(loaded).experiments.finished[-1].notes[0]
    assert not memory.enabled


def test_an_oom_in_a_try_is_counted_and_written_first(
    loaded: InteractiveShell, memory: FakeMemory, tmp_path: Path
) -> None:
    path = tmp_path / "a.pickle"
    loaded.run_cell(FAILS).raise_error()
    loaded.run_cell(f"%%experiment a --allocations {path}\n%%autofit n=8\ntrain(n)").raise_error()
    assert load(path)["history"] == [8, "freed", 4]
    (record,) = app_of(loaded).experiments.finished
    assert record.ooms == 2
    assert ["written when memory ran out" in note for note in record.notes if note.startswith("alloc")] == [True]


def test_a_recording_that_runs_is_used_and_continues(
    loaded: InteractiveShell, memory: FakeMemory, tmp_path: Path
) -> None:
    path = tmp_path / "a.pickle"
    memory.enabled = True
    memory.history.append("theirs")
    loaded.run_cell(f"%%experiment a --allocations {path}\nx = 1").raise_error()
    assert memory.calls == []
    assert memory.enabled
    assert load(path)["history"] == ["theirs"]
    assert "your own recording, which continues" in app_of(loaded).experiments.finished[-1].notes[0]


def test_a_failed_write_is_reported_and_keeps_the_old_file(
    loaded: InteractiveShell, memory: FakeMemory, tmp_path: Path
) -> None:
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps(SNAPSHOT))
    memory.broken = True
    loaded.run_cell(f"%%experiment a --allocations {path}\nx = 1").raise_error()
    assert "allocations: RuntimeError: no device" in app_of(loaded).experiments.finished[-1].notes[0]
    assert load(path) == SNAPSHOT
    assert [file.name for file in tmp_path.iterdir()] == ["a.pickle"]
    assert not memory.enabled


def test_unloading_ends_a_recording_and_without_a_device_no_cell_runs(
    loaded: InteractiveShell, memory: FakeMemory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sys.modules["torch"].cuda.is_available = lambda: False
    loaded.run_cell(f"%%experiment a --allocations {tmp_path / 'a.pickle'}\nx = 1")
    assert "--allocations needs a CUDA device, and torch sees none here" in capsys.readouterr().err
    assert "x" not in loaded.user_ns
    assert memory.calls == []
    sys.modules["torch"].cuda.is_available = lambda: True
    loaded.run_cell(f"%experiment start a --allocations {tmp_path / 'a.pickle'}")
    assert memory.enabled
    loaded.run_line_magic("unload_ext", "ipygpumem")
    assert not memory.enabled


def test_an_experiment_that_cannot_begin_ends_its_recording(
    loaded: InteractiveShell, memory: FakeMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app_of(loaded).context.meter, "start", fail)
    loaded.run_cell(f"%experiment start a --allocations {tmp_path / 'a.pickle'}")
    assert memory.calls[0][0] == "all"
    assert not memory.enabled


def test_an_allocator_without_a_history_is_reported(memory: FakeMemory, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support recordHistory.\nfile an issue")

    memory._record_memory_history = refuse  # type: ignore[method-assign]
    with pytest.raises(FileError, match=r"no history here \(RuntimeError: cudaMallocAsync does not .* recordHistory\."):
        AllocationFile(tmp_path / "a.pickle").start()


@pytest.mark.parametrize("name", ["a.txt", "a", "no/a.pickle", "mine.pickle", "\0.pickle", "dir.pickle", "pipe.pickle"])
def test_a_file_that_cannot_or_must_not_be_written_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.pickle").write_bytes(pickle.dumps([1, 2, 3]))
    (tmp_path / "dir.pickle").mkdir()
    os.mkfifo(tmp_path / "pipe.pickle")
    with pytest.raises(FileError):
        AllocationFile(tmp_path / name)
    assert load(tmp_path / "mine.pickle") == [1, 2, 3]
