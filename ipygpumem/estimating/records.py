"""The records of an estimate and of a summary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ipygpumem.records import Record

Note = Callable[[str], None]
"""Adds a line to an estimate's ``notes``."""

FITS, PERHAPS, DOES_NOT_FIT = "fits", "fits perhaps", "does not fit"
VERDICTS = ("", FITS, PERHAPS, DOES_NOT_FIT)
"""From best to worst; empty if the memory of the device is not known."""
FRAGMENTATION = "fragmentation"
_FITS_BY_VERDICT = {FITS: True, DOES_NOT_FIT: False}
_SMALL_FRACTION = 20
"""A margin below the reserved memory divided by this is small: fragmentation could use it up."""


@dataclass(frozen=True)
class DeviceEstimate(Record):
    """Memory that code would take on one device, in blocks of the CUDA caching allocator."""

    device: str
    before_bytes: int
    """Existing tensors of the notebook that the code works on: model, optimizer state, inputs."""
    peak_bytes: int
    """Maximum memory that is alive at once, existing tensors included."""
    after_bytes: int
    """Memory that is alive when the code has finished."""
    reserved_bytes: int
    """Memory that the allocator would reserve: blocks, fragmentation and its cache."""
    needed_bytes: int
    """Approximate minimum memory to complete, with the cache freed when memory is short; more
    memory suffices too.
    """
    parts: Mapping[str, int] = field(default_factory=dict)
    """Memory that is alive at the peak, by purpose."""
    room_bytes: int | None = None
    """Memory that the device has for the code: what is free, and what its tensors occupy already;
    None: unknown.
    """
    spare_bytes: int = 0
    """Headroom for buffers that kernels allocate while they run, and for the fragmentation that
    these cause.
    """
    context_bytes: int = 0
    """Assumed size of a CUDA context, 0 if there is one already; for RAM, other memory that this
    process uses.
    """
    unknown_operators: tuple[str, ...] = ()
    """Operators whose kernels allocate memory that cannot be derived from shapes."""
    unfollowed: tuple[str, ...] = ()
    """Kinds of code whose memory is not followed exactly, such as ``torch.compile``."""

    @property
    def kept_bytes(self) -> int:
        """Memory that the code would keep: after minus before."""
        return self.after_bytes - self.before_bytes

    @property
    def required_bytes(self) -> int:
        """Memory that the device must have: the allocator's minimum, headroom, context."""
        return self.needed_bytes + self.spare_bytes + self.context_bytes

    @property
    def verdict(self) -> str:
        """One of ``VERDICTS``; empty if ``room_bytes`` is unknown."""
        if self.room_bytes is None:
            return ""
        if self.required_bytes > self.room_bytes:
            return DOES_NOT_FIT
        if self.doubts:
            return PERHAPS
        return FITS

    @property
    def doubts(self) -> tuple[str, ...]:
        """All reasons why it fits only perhaps, if ``required_bytes`` are available."""
        reasons = (*self.unknown_operators, *self.unfollowed)
        if self.gaps_decide:
            return (*reasons, FRAGMENTATION)
        return reasons

    @property
    def gaps_decide(self) -> bool:
        """True if fragmentation may decide if the code fits: the device has no room for the
        allocator's whole cache, and what is left without the cache is small.
        """
        margin_bytes = (self.room_bytes or 0) - self.required_bytes
        cache_bytes = self.reserved_bytes - self.needed_bytes
        if margin_bytes >= cache_bytes:  # nothing has to be freed
            return False
        if margin_bytes < 0:
            return True
        small_bytes = self.reserved_bytes // _SMALL_FRACTION
        return margin_bytes < small_bytes < cache_bytes

    @property
    def fits(self) -> bool | None:
        """True if the code fits, False if it does not, None if that is uncertain."""
        return _FITS_BY_VERDICT.get(self.verdict)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as a dictionary of plain values, and its verdict."""
        return {**super().to_dict(), "verdict": self.verdict}


@dataclass(frozen=True)
class Estimate(Record):
    """Memory that code would take, found without running it on a device."""

    devices: tuple[DeviceEstimate, ...]
    duration_seconds: float
    """Duration of the estimate; the duration of the code is unknown."""
    guesses: tuple[str, ...] = ()
    """Lines that asked for a tensor's value and got a guess, such as 1, 1.0 or False."""
    notes: tuple[str, ...] = ()
    upper_bounds: tuple[str, ...] = ()
    """Lines whose results have a size that depends on values: it is assumed to be the largest
    possible.
    """

    @property
    def peak_bytes(self) -> int:
        """Highest peak of a device."""
        return max((device.peak_bytes for device in self.devices), default=0)

    @property
    def verdict(self) -> str:
        """Worst verdict of the devices; empty if no device's ``room_bytes`` is known."""
        verdicts = [device.verdict for device in self.devices]
        return max(verdicts, key=VERDICTS.index, default="")

    @property
    def fits(self) -> bool | None:
        """True if the code fits on every device of known memory, False if not on one, None if that
        is uncertain.
        """
        return _FITS_BY_VERDICT.get(self.verdict)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as a dictionary of plain values, and its verdict."""
        return {**super().to_dict(), "verdict": self.verdict}


@dataclass(frozen=True)
class ModuleRow(Record):
    """One module of a model."""

    name: str
    """Its path, such as ``encoder.0.linear``; empty for the model itself."""
    type_name: str
    """The name of its class."""
    depth: int
    """Number of modules that contain it; 0 for the model itself."""
    output_shape: tuple[int, ...] | None
    """Shape of the first tensor in its output; None if there is none or it was not called."""
    parameters: int
    """Number of elements of its own and its children's parameters; shared ones count once."""
    parameter_bytes: int
    """Memory of these parameters."""
    buffer_bytes: int
    """Memory of its and its children's buffers."""
    activation_bytes: int
    """Memory that its forward pass keeps alive for backward, its children's included."""
    calls: int
    """Number of calls of its forward pass."""


@dataclass(frozen=True)
class ModelSummary(Record):
    """A model, module by module; the first row is the model itself."""

    rows: tuple[ModuleRow, ...]
    trainable_parameters: int
    """Number of elements of the parameters that require gradients."""

    @property
    def total(self) -> ModuleRow:
        """The model itself."""
        return self.rows[0]
