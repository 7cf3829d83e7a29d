"""The notes in the report of an experiment, such as the memory that replaced objects took."""

from __future__ import annotations

import sys

from ipygpumem.errors import quoted
from ipygpumem.probes.children import children as children_now
from ipygpumem.records import COMMENT, RetainedArray
from ipygpumem.shell.experiments.ended_memory import EndingExperiment, MemoryAfter, MemoryBefore
from ipygpumem.units import format_bytes

_CLOCK_SECONDS = 0.02
"""Error of the times at which processes start."""
_LEAST_SHARE_WITHOUT_LINE = 0.3
"""Minimum share of processes without a line in the new processes' memory from which on the note
mentions them: a helper process of joblib is small.
"""


class ExperimentNotes:
    """Makes the notes of one experiment, once its memory was freed.

    Args:
        experiment: the experiment.
        before: its memory before anything was freed.
        after: the memory that is left.
    """

    def __init__(
        self, experiment: EndingExperiment, before: MemoryBefore, after: MemoryAfter
    ) -> None:
        self._experiment = experiment
        self._before = before
        self._after = after
        self._smallest_bytes = experiment.context.config.min_held_bytes
        """Memory of fewer bytes is not worth a note."""

    def all(self, *, misspelt: str) -> list[str]:
        """Return the notes on names, memory, the budget, and steps that failed.

        ``misspelt`` is the note on a misspelt name in ``keep``, or empty.
        """
        notes = list[str]()
        if misspelt:
            notes.append(misspelt)
        for pattern in self._experiment.scope.names.unmatched_keep():
            if pattern != "*":
                notes.append(f"keep: no name matches {quoted(pattern)}")
        notes += self._notes_on_replaced_objects()
        notes += self._notes_on_devices()
        budget = self._experiment.options.budget
        if budget is not None:
            notes += [*budget.notes, *budget.refusals]
        notes += self._experiment.log.remarks
        for step in self._after.steps:
            if step.error:
                notes.append(f"{step.name}: {step.error}")
        return notes

    def _notes_on_replaced_objects(self) -> list[str]:
        """Return notes on large objects that its code has replaced: they stayed in memory."""
        if not self._before.saved:
            return []
        restored = list[RetainedArray]()
        of_kept_names = list[RetainedArray]()
        for row in self._before.saved:
            if self._experiment.scope.names.stays(row.name):
                of_kept_names.append(row)
            else:
                restored.append(row)
        notes = list[str]()
        for rows, objects_text, time_text in (
            (restored, "the restored objects", "while the experiment ran"),
            (of_kept_names, "the earlier objects of kept names", "until the experiment's end"),
        ):
            saved_bytes = sum(row.size_bytes for row in rows)
            if saved_bytes >= self._smallest_bytes:
                names = ", ".join(row.name for row in rows)
                size = format_bytes(saved_bytes)
                notes.append(f"{objects_text} ({names}) took {size} {time_text}")
        return notes

    def _notes_on_devices(self) -> list[str]:
        """Return notes on devices whose memory it leaves in use, as far as the rows of objects that
        are still alive do not explain it.
        """
        bytes_left = self._bytes_left()
        notes = list[str]()
        if "polars" in sys.modules and "cpu" in bytes_left:
            notes.append("polars' allocator returns the pages of deleted frames within seconds")
        if "shm" in bytes_left:
            segments_text = self._experiment.context.meter.now()["shm"].note
            if segments_text:
                notes.append(f"shared memory: {segments_text}")
        if "cpu" in bytes_left:
            notes += self._notes_on_host(bytes_left["cpu"])
        if "children" in bytes_left:
            notes.append(self._note_on_children(bytes_left["children"]))
        return notes

    def _bytes_left(self) -> dict[str, int]:
        """Return the bytes that the experiment leaves in use on each device, without devices on
        which that is too little for a note.

        They are at most the bytes that it had consumed before its end, because the end itself
        takes memory.
        """
        consumed = {usage.device: usage.delta_bytes for usage in self._before.usages}
        bytes_left = dict[str, int]()
        for usage in self._after.usages:
            size_bytes = min(usage.delta_bytes, consumed.get(usage.device, 0))
            if size_bytes >= self._smallest_bytes:
                bytes_left[usage.device] = size_bytes
        return bytes_left

    def _notes_on_host(self, left_bytes: int) -> list[str]:
        """Return notes on older containers that grew, and on RAM without a name; remember these
        containers for ``%gpumem leaks``.

        Args:
            left_bytes: the RAM that the experiment leaves in use.
        """
        from ipygpumem.inventory.remaining import leftover  # most experiments leave less
        from ipygpumem.inventory.remaining.grown_rows import rows_of_grown_containers
        from ipygpumem.shell.searches.grown_containers import notes_on_growth

        namespace = self._experiment.context.namespace
        baseline = self._experiment.scope.baseline
        contents = baseline.contents
        roots = self._experiment.survivors.roots()
        grown_rows = rows_of_grown_containers(
            namespace, contents, self._smallest_bytes, roots, baseline.objects_at_end
        )
        self._experiment.survivors.grown.add(
            row.container for row in grown_rows if row.container is not None
        )
        notes = notes_on_growth(grown_rows)
        after = self._after
        if not after.lists_alive:
            return notes
        named_bytes = {
            "still alive": sum(row.size_bytes for row in after.alive if row.device == "cpu"),
            "kept": leftover.ram_of(contents.unrecorded_objects(namespace))
            + after.kept_in_older_bytes,
            "in what grew": sum(row.size_bytes for row in grown_rows),
        }
        # Both were measured, else the objects that are still alive would not be listed.
        ram_at_start = self._experiment.scope.ram_at_start
        assert ram_at_start is not None
        assert after.ram is not None
        return notes + leftover.notes_on_unnamed(
            ram_at_start, after.ram, left_bytes, named_bytes, baseline.knows_new_objects
        )

    def _note_on_children(self, left_bytes: int) -> str:
        """Return the note on child processes that the experiment leaves, with the lines that end
        them.

        Args:
            left_bytes: growth of the memory of all child processes.
        """
        from ipygpumem.inventory.leaks import children  # most experiments leave none

        started = self._experiment.log.started_at - _CLOCK_SECONDS
        new_children = [child for child in children_now() if child.started_at >= started]
        new_children = children.with_endings(new_children, self._experiment.context.namespace)
        lines = children.endings(new_children)
        advice = "; ".join(lines) or "%gpumem status lists them"
        bytes_without_line = sum(child.memory_bytes for child in new_children if not child.ends_by)
        if lines and bytes_without_line >= _LEAST_SHARE_WITHOUT_LINE * left_bytes:
            advice += f"{COMMENT}%gpumem status lists the rest"
        size = format_bytes(left_bytes)
        return f"child processes have {size} more than at its start; to end them: {advice}"
