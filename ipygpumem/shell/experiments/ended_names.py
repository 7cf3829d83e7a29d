"""Explains a ``NameError`` of a name that an experiment, or a child process, has ended.

Below the cell's line: ``x belonged to experiment demo, which has ended: --keep x keeps it``
"""

from __future__ import annotations

from collections.abc import Sequence

from ipygpumem.heap.knowledge.frames import last_step
from ipygpumem.notebook import running_cell
from ipygpumem.reclaim.exceptions import traceback_of
from ipygpumem.report.words import clean_name
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.experiments.experiments import ExperimentManager
from ipygpumem.shell.ipython.sources import cell_that_bound, running_cell_deletes


def remarks_on_missing_name(
    error: NameError, context: ShellContext, experiments: ExperimentManager
) -> list[str]:
    """Return a remark if an experiment has deleted the missing name, or if it has ended in another
    way; none for a name that user code has bound again, and deleted, since.

    Args:
        error: the cell's error.
        context: the shell's services.
        experiments: the finished experiments, and ``ended_elsewhere``, such as names of %%isolate.
    """
    name = error.name
    if type(name) is not str:
        return []
    traceback = traceback_of(error)
    if traceback is None or last_step(traceback).tb_frame.f_globals is not context.namespace:
        return []  # a module's code misses a name of that module
    if name in experiments.ended_elsewhere:
        number, remark = experiments.ended_elsewhere[name]
        if not _was_bound_again(name, [number], context):
            return [remark]
    for record in reversed(experiments.finished):
        if name not in record.deleted:
            continue
        numbers = [cell.execution_count or 0 for cell in record.cells]
        if _was_bound_again(name, numbers, context):
            return []
        ended = f"experiment {clean_name(record.name)}, which has ended"
        shown = clean_name(name)
        return [f"{shown} belonged to {ended}: --keep {shown} keeps it"]
    return []


def _was_bound_again(name: str, numbers: Sequence[int], context: ShellContext) -> bool:
    """Return True if user code has bound a name again since it ended: then the name is missing
    because user code has deleted it.

    A running cell such as ``data = data + 1`` has bound nothing yet, unless it deletes the name
    itself.

    Args:
        name: the name.
        numbers: the numbers of the cells in which it ended.
        context: the shell's services.
    """
    shell = context.shell
    if running_cell_deletes(shell, name):
        return True
    if not numbers:
        return False
    failed_at = context.cells.failed_at
    bound_in = cell_that_bound(shell, name, {running_cell(shell)}, failed_at)
    return bound_in is not None and bound_in > max(numbers)
