"""Tells what the memory of a storage, or of a block of CUDA's allocator, is for and from where."""

from __future__ import annotations

from ipygpumem.estimating.memory.storages import (
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    TEMPORARIES,
    WORKSPACES,
    StorageLife,
    StorageLog,
)
from ipygpumem.estimating.operators.cublas import all_workspace_sizes
from ipygpumem.extras.peak.cuda import BlockOrigin
from ipygpumem.extras.peak.origins import BEFORE, Origin, is_owned
from ipygpumem.extras.peak.timeline import RowKey
from ipygpumem.inventory.arrays.records import Inventory

BUFFERS = "buffers"
DATA = "data"
ROLES = {
    "parameter": PARAMETERS,
    "gradient": GRADIENTS,
    "optimizer state": OPTIMIZER,
    "buffer": BUFFERS,
}
"""Roles by the kinds of an inventory."""


class RowKeys:
    """Returns the roles and the rows of the storages in a log, and of the allocator's blocks.

    The origin of a storage is an ``Origin``, that of a block a ``BlockOrigin``.
    """

    def __init__(self, log: StorageLog) -> None:
        self._log = log
        self._replaced_origins: set[Origin] = set()
        """Origins of tensors whose names had other values when the code ended."""

    def add_names(self, inventory: Inventory) -> None:
        """Give the storages that are alive the names and roles of an inventory."""
        for record in inventory.tensors:
            life = self._log.life(record.storage) if record.library == "torch" else None
            if life is None:
                continue
            # A role that was noted while the code ran stays, except that parameters are certain.
            if record.kind != "other" and (not life.role or record.kind == "parameter"):
                life.role = ROLES[record.kind]
            # A module's path says more than the name of one of its tensors.
            if record.name is not None and not is_owned(life):
                life.origin = Origin(name=record.name)

    def note_replaced_values(self) -> None:
        """Note the earlier values of names and parameters, which the code has freed.

        After ``x = x * 2``, the first ``x`` is "x (earlier value)".
        """
        for life in self._log.lives:
            if not life.existed_before or life.died is None or not life.origin:
                continue
            if life.role == PARAMETERS or life.origin.name:
                self._replaced_origins.add(life.origin)

    def role(self, life: StorageLife) -> str:
        """Return the role of a storage, or of a block and the storage in it."""
        if type(life.origin) is not BlockOrigin:
            role = self._log.role(life)
            return DATA if role == OTHER else role
        if life.origin.storage is not None:
            return self.role(life.origin.storage)
        is_of_workspace = life.size_bytes in all_workspace_sizes()
        if life.died is None and is_of_workspace:
            return WORKSPACES
        return DATA if life.existed_before else TEMPORARIES

    def key(self, life: StorageLife) -> RowKey:
        """Return the role, name, module, operation and line of a storage or block."""
        if type(life.origin) is BlockOrigin:
            return self._key_of_block(life, life.origin)
        origin: Origin = life.origin or BEFORE
        name, module = origin.name, origin.module
        if life.existed_before and origin in self._replaced_origins:
            whole_name = name or module.partition(".")[0]  # ``model`` for ``model.layers.0``
            name, module = f"{whole_name} (earlier value)", ""
        return self.role(life), name, module, origin.operation, origin.line

    def _key_of_block(self, life: StorageLife, block: BlockOrigin) -> RowKey:
        """Return the row of an allocator's block: the row of the storage in it, if it is known."""
        if block.storage is not None:
            return self.key(block.storage)
        operation = f"inside {block.operation or 'an operation'}"
        if life.existed_before:
            operation = "autograd or C++ code"
        return self.role(life), "", "", operation, block.line
