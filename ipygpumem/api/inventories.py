"""``ipygpumem.tensors`` and ``diff``."""

from __future__ import annotations

import sys

from ipygpumem.api.shell import current_shell
from ipygpumem.objects.inventory import selection, survey
from ipygpumem.objects.inventory.records import Inventory, InventoryDiff


def tensors(*names: str, device: str | None = None, kind: str | None = None, min_bytes: int = 0) -> Inventory:
    """Return the tensors and arrays that are alive, each storage once, the largest first.

    It works in a script as well. In IPython it lists the notebook's names and cells too, even without the extension.

    Args:
        names: globs, of which one must fit a tensor's name: ``"model.*"``; none: also tensors without a name.
        device: ``cpu``, ``cuda:0``, or ``cuda`` for all of its kind.
        kind: ``parameter``, ``gradient``, ``optimizer state``, ``buffer`` or ``other``.
        min_bytes: the smallest size.
    """
    frame = sys._getframe(1)
    shell = current_shell()
    if shell is None:
        code = frame.f_code
        found = survey.take(survey.names_in(frame), file=code.co_filename, line=frame.f_lineno)
    else:
        from ipygpumem.notebook.commands.tensors import asked_by  # no script needs IPython

        found = asked_by(frame, shell)
    return selection.select(found, names, device=device, kind=kind, min_bytes=min_bytes)


def diff(before: Inventory, after: Inventory) -> InventoryDiff:
    """Return what came and what went between two inventories of ``tensors``."""
    return selection.difference(before, after)
