"""One experiment on the engines of a cluster: each opens and ends it by itself, and their records are merged."""

from __future__ import annotations

import shlex
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ipygpumem.errors import ClusterError
from ipygpumem.merging import engine_numbers, merged_record
from ipygpumem.model import CellRecord, EngineRecord, ExperimentRecord
from ipygpumem.notebook.cluster.engines import Asked, Engines, unanswered
from ipygpumem.objects.progress import Progress, unseen

_START_SECONDS = 30.0
"""So long an engine has to begin; one that is busy is left out."""
_CELL_SECONDS = 2.0
"""So long a cell's line waits for the engines."""

Wait = Callable[[Asked], bool]
"""Waits for answers; whether there was a Ctrl-C."""


class RanCell(NamedTuple):
    """A cell on an engine, and what was free there after it, by device."""

    record: CellRecord
    free: dict[str, int]


class ClusterExperiment:
    """An experiment that engines have open.

    Args:
        name: of it.
        engines: that are to run it.
        report: how much to show at its end; by default what the options say.
    """

    def __init__(self, name: str, engines: Engines, report: str | None = None) -> None:
        self.name = name
        self.report = report
        self.all = engines
        self.engines = engines.only(())
        """Those that began it."""
        self.record: ExperimentRecord | None = None
        self._failed: dict[int, str] = {}
        self._places: dict[int, dict[str, Any]] = {}
        self._known: dict[int, int] = {}
        """How many of its cells each engine has told us."""
        self._sent = 0
        self._asked: Asked = {}
        """Questions for cells to engines that were busy: they answer once they are done."""
        self._token = ""
        """By which engines know it; empty where another client has begun it."""
        self._started_at, self._started = time.time(), time.perf_counter()

    def start(self, line: str, *, is_for_cell: bool = False) -> None:
        """Open it on all engines; names that come before or after the cell it is for are others'.

        Raises:
            ClusterError: none of them could.
            KeyboardInterrupt: Ctrl-C; those that had begun have ended it.
        """
        self._token = token = uuid.uuid4().hex
        words = {number: (_for_engine(line, number), token, is_for_cell) for number in self.all.numbers}
        asked = self.all.ask_each("start", words)
        interrupted = self.all.wait(asked, _START_SECONDS)
        late = unanswered(asked)
        self._places, self._failed = self.all.answers(asked)
        self.engines = self.all.only(self._places)
        self.all.forget(asked)
        self.all.only(late).ask("cancel", token)  # which have begun, and answer too late
        if interrupted:
            self.end(unseen)
            raise KeyboardInterrupt
        if not self._places:
            raise ClusterError(self.reasons)
        self._sent = len(self.all.client.history)

    def run(self, source: str, wait: Wait) -> tuple[Asked, bool]:
        """Run a cell on the engines, ``wait`` for it; return its results, and whether there was a Ctrl-C."""
        results = self.engines.run(source)
        try:
            return results, wait(results)
        finally:  # after a second Ctrl-C, too: who still runs it cannot end the experiment
            gone = self.engines.lost(results)
            later = [number for number in unanswered(results) if not self.engines.has_begun(results[number])]
            self.engines.only(later).ask("cancel", self._token)
            self._failed |= gone
            self.engines = self.engines.only(number for number in self.engines.numbers if number not in gone)

    def keep(self, line: str) -> None:
        """Let names stay on the engines."""
        asked = self.engines.ask("keep", line)
        self.engines.wait(asked, _START_SECONDS, anew=True)
        _, failed = self.engines.answers(asked)
        self.engines.forget(asked)
        if failed:
            raise ClusterError("; ".join(_together(failed)))

    def new_cells(self, seconds: float = _CELL_SECONDS) -> tuple[dict[int, RanCell], list[int]]:
        """Return the last cell that each engine ran since we asked, and the engines that turned out to be busy.

        It asks nobody unless the client has sent something, waits for so long at most, and not again for a busy one.
        """
        earlier = self._asked
        if len(self.engines.client.history) == self._sent and not earlier:
            return {}, []
        free = self.engines.only(number for number in self.engines.numbers if number not in earlier)
        known = {number: (self.name, self._token, self._known.get(number, 0)) for number in free.numbers}
        asked = free.ask_each("cells", known)
        free.wait(asked, seconds, anew=True)
        busy = unanswered(asked)
        every = {**earlier, **asked}
        self._asked = {number: every[number] for number in unanswered(every)}
        done = {number: result for number, result in every.items() if number not in self._asked}
        found, _ = self.engines.only(done).answers(done)
        self.engines.forget(done)
        if not earlier:  # else the client may have sent more since it was asked
            self._sent = len(self.engines.client.history)
        last: dict[int, RanCell] = {}
        for number, answer in found.items():
            self._known[number] = answer["count"]
            if answer["cells"]:
                last[number] = RanCell(CellRecord.from_dict(answer["cells"][-1]), answer["free"])
        return last, busy

    @property
    def reasons(self) -> str:
        """Who failed, and why."""
        return "; ".join(_together(self._failed))

    @property
    def records(self) -> list[ExperimentRecord]:
        """Those of the engines, once it is over."""
        return [own.record for own in (self.record.engines if self.record else ()) if own.record is not None]

    @property
    def elapsed_seconds(self) -> float:
        """Time since the start."""
        return time.perf_counter() - self._started

    def end(self, progress: Progress) -> bool:
        """End it on the engines, and merge their records into ``record``; return whether there was a Ctrl-C."""
        self.engines.forget(self._asked)
        asked = self.engines.ask("end", self.name, self._token)
        interrupted = self.engines.wait(asked, progress=progress, anew=True)
        found, failed = self.engines.answers(asked)
        self.engines.forget(asked)
        self._failed |= failed
        made = [self._engine(number, found.get(number)) for number in self.all.numbers]
        self.record = merged_record(self.name, self._started_at, self.elapsed_seconds, made)
        return interrupted

    def _engine(self, number: int, answer: dict[str, Any] | None) -> EngineRecord:
        where = {**self._places.get(number, {}), **(answer or {})}
        if answer is None:
            where["error"] = self._failed.get(number, "")
        try:
            return EngineRecord.from_dict({"engine": number, **where})
        except (ValueError, TypeError, KeyError) as error:  # another version's
            return EngineRecord(number, error=f"its record cannot be read ({error}); it ran {where.get('version')}")


def _for_engine(line: str, number: int) -> str:
    """Return the words for one engine: each writes a file of its own, ``memory-3.pickle`` of engine 3."""
    words = shlex.split(line.replace("--record=", "--record "))
    if "--record" in words[:-1] and Path(words[words.index("--record") + 1]).name:
        file = words.index("--record") + 1
        path = Path(words[file])
        words[file] = str(path.with_stem(f"{path.stem}-{number}"))
    return shlex.join(words)


def _together(failed: dict[int, str]) -> Iterable[str]:
    """Return each reason once, with its engines."""
    for why in dict.fromkeys(failed.values()):
        yield f"{engine_numbers([number for number, own in failed.items() if own == why])}: {why}"
