"""Counts the pages of large storages in RAM: ``torch.empty(2**28)`` reserves 1 GiB, uses none."""

from __future__ import annotations

from typing import Any

from ipygpumem.estimating.memory.storages import StorageLife, StorageLog
from ipygpumem.probes.pages import PAGE_BYTES, resident_bytes
from ipygpumem.units import MIB

LEAST_COUNTED_BYTES = 8 * MIB
"""Bytes of the smallest storage whose pages are counted, which takes some microseconds a MiB."""


class PagesLog(StorageLog):
    """Logs storages, and splits the bytes of large ones in RAM into used and reserved ones."""

    def note_freed(self, life: StorageLife) -> None:
        """Count the pages of a large storage in RAM that is freed.

        The log calls this before torch frees the bytes.
        """
        if life.device == "cpu":
            resident = _resident_bytes(life.address, _whole_bytes(life))
            if resident:  # not 0: ``resize_`` has freed the pages before
                _note_pages(life, resident)

    def note_address(self, life: StorageLife, tensor: Any) -> None:
        """Note the address of a tensor's storage if its pages are to be counted."""
        if life.size_bytes >= LEAST_COUNTED_BYTES:
            life.address = tensor.untyped_storage().data_ptr()

    def count_pages(self) -> None:
        """Count the pages of the storages that are alive, as far as code has used them by now."""
        for life, reference in list(self.alive.values()):
            storage = reference()
            if storage is None or life.device != "cpu" or not life.address:
                continue
            life.address = storage.data_ptr()
            size_bytes = min(storage.nbytes(), _whole_bytes(life))
            resident = _resident_bytes(life.address, size_bytes)
            if resident is not None:
                _note_pages(life, resident)


def _resident_bytes(address: int, size_bytes: int) -> int | None:
    """Return the bytes of an address range that have a page in RAM; None if the system does not
    tell.
    """
    try:
        return resident_bytes(address, size_bytes)
    except OSError:
        return None


def _whole_bytes(life: StorageLife) -> int:
    """Return the size of a storage, of which an earlier count may have found a part unused."""
    return life.size_bytes + life.reserved_bytes


def _note_pages(life: StorageLife, resident: int) -> None:
    """Split the bytes of a storage: bytes with a page in RAM are used, all other ones are reserved.

    Args:
        life: the storage.
        resident: its bytes with a page in RAM.
    """
    whole = _whole_bytes(life)
    rounding = whole % PAGE_BYTES  # the log rounds sizes up to 512 bytes, beyond the last page
    life.size_bytes = min(whole, resident + rounding)
    life.reserved_bytes = whole - life.size_bytes
