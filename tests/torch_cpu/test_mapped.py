"""Mapped files that torch shows count their pages in RAM, and shared memory counts whole."""

from pathlib import Path

import pytest
import torch

from ipygpumem.heap.sizes.sizes import MeasuredSize, Sizes
from ipygpumem.units import MIB
from tests.process_memory import assert_read, linux

pytestmark = linux


def measured(value: object) -> MeasuredSize:
    sizes = Sizes()
    size = sizes.measure(value)
    sizes.drop()
    return size


def test_loaded_files_that_are_mapped_count_their_pages(tmp_path: Path) -> None:
    torch.save({"weights": torch.ones(2 * MIB)}, tmp_path / "weights")
    state = torch.load(tmp_path / "weights", mmap=True)
    assert_read(measured(state), pages=0)
    assert state["weights"][:MIB].sum() == MIB
    assert_read(measured(state), pages=4 * MIB)


def test_pages_written_to_a_private_map_count(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(bytes(8 * MIB))
    tensor = torch.from_file(str(path), size=2 * MIB)
    assert_read(measured(tensor), pages=0)
    tensor[:MIB] = 1
    assert_read(measured(tensor), pages=4 * MIB)
    assert_read(measured(torch.UntypedStorage.from_file(str(path), nbytes=8 * MIB)), pages=0)


def test_safetensors_that_are_mapped_count_their_pages(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"weights": torch.ones(2 * MIB)}, tmp_path / "weights")
    assert_read(measured(safetensors.load_file(tmp_path / "weights")), pages=0)


def test_shared_memory_is_no_file() -> None:
    size = measured(torch.ones(2 * MIB).share_memory_())
    assert size.size_bytes == pytest.approx(8 * MIB, rel=0.01)
    assert size.notes == ()
