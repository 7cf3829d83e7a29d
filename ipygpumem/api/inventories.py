"""``ipygpumem.tensors`` and ``diff``."""

from __future__ import annotations

import sys
from types import FrameType

from ipygpumem.api.shell import current_shell
from ipygpumem.errors import GpuMemError
from ipygpumem.introspect import type_name
from ipygpumem.objects.inventory import selection, survey
from ipygpumem.objects.inventory.memory import Storages
from ipygpumem.objects.inventory.records import Inventory, InventoryDiff
from ipygpumem.units import checked_bytes


def tensors(*names: str, device: str | None = None, kind: str | None = None, min_bytes: float | str = 0) -> Inventory:
    """Return the tensors and arrays that are alive, each storage once, the largest first.

    It works in a script as well. In IPython it lists the notebook's names and cells too, even without the extension.

    Args:
        names: globs, of which one must fit a tensor's name: ``"model.*"``; none: also tensors without a name.
        device: ``cpu``, ``cuda:0``, or ``cuda`` for all of its kind.
        kind: ``parameter``, ``gradient``, ``optimizer state``, ``buffer`` or ``other``.
        min_bytes: the smallest size: a number, or ``"1MiB"``.

    Raises:
        GpuMemError: a name is no text, or there is no such kind.
        UnitError: ``min_bytes`` is not a size.
    """
    wrong = [type_name(name) for name in names if type(name) is not str]
    if wrong:
        raise GpuMemError(
            f"tensors takes names as text, such as 'model.*', and not {wrong[0]}; see diff for inventories"
        )
    if kind is not None and kind not in selection.KINDS:
        raise GpuMemError(f"there is no such kind of tensor: write one of {', '.join(selection.KINDS)}")
    least = checked_bytes(min_bytes)
    found = inventory_at(sys._getframe(1))
    return selection.select(found, names, device=device, kind=kind, min_bytes=least)


def inventory_at(frame: FrameType, storages: Storages | None = None) -> Inventory:
    """Return an inventory of everything, with the names that code at ``frame`` sees; ``storages`` as in a survey."""
    shell = current_shell()
    if shell is None:
        code = frame.f_code
        return survey.take(survey.names_in(frame), file=code.co_filename, line=frame.f_lineno, storages=storages)

    from ipygpumem.notebook.commands.tensors import asked_by  # no script needs IPython

    return asked_by(frame, shell, storages)


def diff(before: Inventory, after: Inventory) -> InventoryDiff:
    """Return what came and what went between two inventories of ``tensors``.

    Raises:
        GpuMemError: one of them is no inventory.
    """
    for given in (before, after):
        if type(given) is not Inventory:
            raise GpuMemError(
                f"diff takes two inventories, as ipygpumem.tensors() gives them, and not {type_name(given)}"
            )
    return selection.difference(before, after)
