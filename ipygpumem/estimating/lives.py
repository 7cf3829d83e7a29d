"""The life of every storage while code runs: a log of births and deaths, and what each storage was for."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

BLOCK_BYTES = 512
"""The CUDA caching allocator hands out multiples of this."""

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES, OTHER = (
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "temporaries",
    "other",
)
PARTS = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES, OTHER)
"""In the order of the reports; ``other`` is what was there before: inputs, buffers, tensors of the notebook."""


@dataclass(slots=True)
class Life:
    """One storage: its size as the allocator rounds it, when it came and went, and what is known of its purpose."""

    device: str
    size_bytes: int
    born: int
    before: bool
    """Whether it is there from the start, as a twin of a tensor of the notebook."""
    recorded: bool = False
    """Whether a forward pass made it that autograd records: backward may need it."""
    in_backward: bool = False
    part: str = ""
    died: int | None = None


@dataclass
class Log:
    """The storages that a run has seen; time counts births and deaths."""

    lives: list[Life] = field(default_factory=list)
    clock: int = 0
    backwards: list[int] = field(default_factory=list)
    """When each backward pass began."""
    now: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    """Bytes alive by device, and the most so far."""
    _alive: dict[int, tuple[Life, Any]] = field(default_factory=dict)

    def see(
        self, tensor: Any, device: str, *, before: bool = False, recorded: bool = False, in_backward: bool = False
    ) -> Life | None:
        """Note the storage of ``tensor``, and return its life if it is new."""
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse: its indices and values are tensors of their own
            return None
        key = storage._cdata
        if key in self._alive:
            return None
        if not before:
            self.clock += 1
        born = 0 if before else self.clock
        life = Life(device, rounded(storage.nbytes()), born, before, recorded, in_backward)
        self.lives.append(life)
        self.now[device] = now = self.now.get(device, 0) + life.size_bytes
        self.peak[device] = max(self.peak.get(device, 0), now)
        # The object in Python lives as long as the storage, whoever holds it: autograd's C++, too.
        self._alive[key] = life, weakref.ref(storage, lambda _: self._gone(key))
        return life

    def _gone(self, key: int) -> None:
        self.clock += 1
        life = self._alive.pop(key)[0]
        life.died = self.clock
        self.now[life.device] -= life.size_bytes

    def mark(self, tensor: Any, part: str) -> None:
        """Note what a storage that was seen is for; the first word counts, but parameters are always parameters."""
        try:
            found = self._alive.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # as above: it was not seen either
            return
        if found is not None and (not found[0].part or part == PARAMETERS):
            found[0].part = part

    def close(self) -> None:
        """Note no deaths from now on: what is alive is what the run kept."""
        self._alive.clear()


def rounded(size_bytes: int) -> int:
    """Return what the CUDA caching allocator takes for ``size_bytes``."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
