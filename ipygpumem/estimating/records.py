"""The records of an estimate and of a summary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ipygpumem.records import Record

Note = Callable[[str], None]
"""Takes what the report is to say: one of an estimate's ``notes``."""


FITS, PERHAPS, DOES_NOT_FIT = "fits", "fits perhaps", "does not fit"
VERDICTS = ("", FITS, PERHAPS, DOES_NOT_FIT)
"""From best to worst; empty if the memory of the device is not known."""
_FITS = {FITS: True, DOES_NOT_FIT: False}
_SMALL_SHARE = 20
"""A margin below this fraction of the reserved memory is small: fragmentation could use it up."""


@dataclass(frozen=True)
class DeviceEstimate(Record):
    """What code would take on one device, in blocks of the CUDA caching allocator."""

    device: str
    before_bytes: int
    """The tensors of the notebook that the code works on: model, optimizer state, inputs."""
    peak_bytes: int
    """The most that is alive at once, those included."""
    after_bytes: int
    """What is alive when the code is done."""
    reserved_bytes: int
    """What the allocator would get from the device: blocks, the gaps between them and what it keeps for later."""
    needed_bytes: int
    """Approximate minimum memory to complete, with the cache freed when memory is short; more memory suffices too."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """What is alive at the peak, by purpose."""
    room_bytes: int | None = None
    """What the device has for it: free memory, and what the tensors before hold there already; None: unknown."""
    spare_bytes: int = 0
    """What is set aside for buffers that kernels take while they run, and for the gaps that these make."""
    context_bytes: int = 0
    """What is set aside of that for a context, which is an assumption; 0 where there is one, or needs to be none."""
    unknown_operators: tuple[str, ...] = ()
    """Operators whose kernels allocate memory that cannot be derived from shapes."""

    @property
    def kept_bytes(self) -> int:
        """What the code would leave behind: after minus before."""
        return self.after_bytes - self.before_bytes

    @property
    def required_bytes(self) -> int:
        """What the device must have: what the allocator needs, and what is set aside."""
        return self.needed_bytes + self.spare_bytes + self.context_bytes

    @property
    def verdict(self) -> str:
        """One of ``VERDICTS``; empty if the room is not known."""
        if self.room_bytes is None:
            return ""
        if self.required_bytes > self.room_bytes:
            return DOES_NOT_FIT
        return PERHAPS if self.gaps_decide or self.unknown_operators else FITS

    @property
    def gaps_decide(self) -> bool:
        """True if fragmentation may decide: it does not fit, or by a small margin if the cache is freed."""
        margin, small = (self.room_bytes or 0) - self.required_bytes, self.reserved_bytes // _SMALL_SHARE
        empties_its_cache = margin < self.reserved_bytes - self.needed_bytes
        return empties_its_cache and (margin < 0 or margin < small < self.reserved_bytes - self.needed_bytes)

    @property
    def fits(self) -> bool | None:
        """True if it fits, False if it does not, None if that is not certain."""
        return _FITS.get(self.verdict)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as a dictionary of plain values, and its verdict."""
        return {**super().to_dict(), "verdict": self.verdict}


@dataclass(frozen=True)
class Estimate(Record):
    """What code would take, without having run on a device."""

    _report = "report.estimate.estimate_report"

    devices: tuple[DeviceEstimate, ...]
    duration_seconds: float
    """How long the estimate took; nothing is known of the code itself."""
    guesses: tuple[str, ...] = ()
    """The lines that asked for a tensor's value and got a stand-in: 1, 1.0 or False."""
    notes: tuple[str, ...] = ()
    upper_bounds: tuple[str, ...] = ()
    """The lines whose results have a size that depends on values: it was taken to be the largest possible."""

    @property
    def peak_bytes(self) -> int:
        """The highest peak of a device."""
        return max((device.peak_bytes for device in self.devices), default=0)

    @property
    def verdict(self) -> str:
        """The worst verdict of the devices; empty if no room is known."""
        return max((device.verdict for device in self.devices), key=VERDICTS.index, default="")

    @property
    def fits(self) -> bool | None:
        """True if it fits on every device whose room is known, False if not on one, None if that is not certain."""
        return _FITS.get(self.verdict)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as a dictionary of plain values, and its verdict."""
        return {**super().to_dict(), "verdict": self.verdict}


@dataclass(frozen=True)
class ModuleRow(Record):
    """One module of a model."""

    name: str
    """Its path, such as ``encoder.0.linear``; empty for the model itself."""
    type_name: str
    depth: int
    output_shape: tuple[int, ...] | None
    """Of its first tensor; None if it has none or was not called."""
    parameters: int
    """How many numbers: its own and its children's, those that are shared once."""
    parameter_bytes: int
    buffer_bytes: int
    activation_bytes: int
    """What its forward pass leaves alive for backward, its children's included."""
    calls: int


@dataclass(frozen=True)
class ModelSummary(Record):
    """A model, module by module; the first row is the whole."""

    _report = "report.estimate.summary_report"

    rows: tuple[ModuleRow, ...]
    trainable_parameters: int

    @property
    def total(self) -> ModuleRow:
        """The model itself."""
        return self.rows[0]
