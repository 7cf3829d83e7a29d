"""The parts of a device's memory, which sum exactly to the total.

``device_parts.py`` breaks an accelerator's memory down, ``host_parts.py`` that of the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ipygpumem.records import Record


@dataclass(frozen=True)
class Part(Record):
    """A part of a device's memory, with advice for the user."""

    name: str
    size_bytes: int | None
    """None if unknown; ``advice`` then says why."""
    advice: str


@dataclass(frozen=True)
class Reconciliation(Record):
    """Breakdown of a device's memory; the parts of known size sum exactly to ``total_bytes``."""

    device: str
    total_bytes: int
    basis: str
    """Meaning of ``total_bytes``: the device's memory, a container's limit, or only reserved
    memory.
    """
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()
    """Remarks on the figures, such as why one is missing."""


class Storage(NamedTuple):
    """The memory of one or more tensors or arrays, each byte once."""

    device: str
    address: int
    size_bytes: int
    kind: str
    """Role of the memory: ``parameter``, ``gradient``, ``optimizer state``, ``buffer``, ``other``,
    ...
    """


ADVICE_BY_ROLE = {
    "parameter": "delete the model, or model.cpu(), or load it in a smaller dtype",
    "gradient": "optimizer.zero_grad() frees it until the next backward pass",
    "optimizer state": "delete the optimizer, or use one that keeps less for each parameter",
    "buffer": "part of a module, and freed with it",
    "other": "inputs, activations, results: delete their names, end their experiment",
}
"""The advice for the tensors of each role, in the order of the report."""


def kind_parts(what: str, kinds: Mapping[str, int]) -> list[Part]:
    """Return a part for each role of tensors, in the order of the report: ``tensors: parameter``.

    Args:
        what: the first word of the parts' names, such as ``tensors``.
        kinds: the bytes of each role.
    """
    parts = []
    for kind in (*ADVICE_BY_ROLE, *sorted(kinds.keys() - ADVICE_BY_ROLE)):
        if kind in kinds:
            advice = ADVICE_BY_ROLE.get(kind, ADVICE_BY_ROLE["other"])
            parts.append(Part(f"{what}: {kind}", kinds[kind], advice))
    return parts
