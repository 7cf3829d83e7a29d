"""Asks the engines of an ipyparallel cluster, and runs experiments on them: each engine measures by itself.

An engine works off what it is sent in order, so a question that follows a cell is answered when the cell is over.
Questions travel as text for ``eval``: a function would travel as bytecode, which another Python cannot read.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ipygpumem.errors import ClusterError
from ipygpumem.introspect import is_exactly
from ipygpumem.model import EngineRecord, ExperimentRecord
from ipygpumem.objects import interrupts
from ipygpumem.objects.bulk import Progress, unseen
from ipygpumem.reports.engines import engine_numbers, merged_record

_MODULE = "ipygpumem.notebook.engine"
_NUMBERS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_HOW = "import ipyparallel; rc = ipyparallel.Cluster(n=4).start_and_connect_sync(activate=True)"
_POLL_SECONDS = 0.1
_START_SECONDS = 30.0
"""Seconds to wait for an engine to begin; one that is busy is left out."""
_GRACE_SECONDS = 10.0
"""Seconds to wait for engines after our Ctrl-C."""
_NEWS_SECONDS = 0.5
"""Seconds to wait for the news that an engine has begun a cell."""
_LOST = ("EngineError", "TaskAborted")

Asked = dict[int, Any]
"""ipyparallel's ``AsyncResult`` by engine."""


class Engines:
    """Some engines of a cluster."""

    def __init__(self, client: Any, numbers: Iterable[int]) -> None:
        self.client = client
        self.numbers = tuple(numbers)

    def ask(self, function: str, *words: object) -> Asked:
        """Let each engine call a function of ``engine.py`` with plain values, and return what will have the answers."""
        return self.ask_each(function, dict.fromkeys(self.numbers, words))

    def ask_each(self, function: str, words: Mapping[int, Sequence[object]]) -> Asked:
        """Let engines call it with values of their own."""
        there, asked = set(() if is_closed(self.client) else self.client.ids), Asked()
        call = f"__import__('importlib').import_module({_MODULE!r}).answer({function!r}, *"
        for number in there & words.keys():
            with _may_be_gone():
                asked[number] = self.client[number].apply_async(eval, f"{call}{tuple(words[number])!r})", {})
        return asked

    def run(self, source: str) -> Asked:
        """Let each engine run a cell."""
        asked = Asked()
        for number in self.numbers:
            with _may_be_gone():
                asked[number] = self.client[number].execute(source, silent=False, block=False)
        return asked

    def wait(
        self,
        asked: Asked,
        seconds: float | None = None,
        *,
        progress: Progress = unseen,
        to_all: bool = False,
        anew: bool = False,
    ) -> None:
        """Wait for all answers, for so long at most; a Ctrl-C ends the waiting.

        Args:
            asked: what to wait for.
            seconds: so long at most.
            progress: is told how many have answered.
            to_all: a Ctrl-C goes to the engines that run the cell, too.
            anew: a Ctrl-C of before, which has been noted, does not end it.
        """
        with interrupts.noted() as struck:
            heard = len(struck) if anew else 0
            _wait(asked, seconds, progress, struck, heard)
            if to_all and len(struck) > heard:
                heard = len(struck)  # at one more it has been long enough
                _wait(
                    {number: asked[number] for number in self.interrupt(asked)}, _GRACE_SECONDS, unseen, struck, heard
                )

    def answers(self, asked: Asked) -> tuple[dict[int, Any], dict[int, str]]:
        """Return what the engines have answered, and why others have not; the client drops the answers."""
        found: dict[int, Any] = {}
        failed = dict.fromkeys(self.numbers, "is not there any more")
        for number, result in asked.items():
            error = error_of(result) if result.ready() else None
            if not result.ready():
                failed[number] = "has not answered"
            elif error is not None:
                failed[number] = _why(error)
            elif "value" in (answer := result.get(timeout=0)):
                found[number] = answer["value"]
                del failed[number]
            else:
                failed[number] = answer["error"]
        self.forget(asked)
        return found, failed

    def interrupt(self, cells: Asked) -> list[int]:
        """Send a Ctrl-C to the engines that run these cells, and return them; take back cells that have not begun.

        An engine that has not begun runs something else, which may be another client's.
        """
        until = time.monotonic() + _NEWS_SECONDS
        while not all(self.has_begun(cells[number]) for number in unanswered(cells)) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        begun = [number for number in unanswered(cells) if self.has_begun(cells[number])]
        if begun:
            self.client.send_signal(signal.SIGINT, targets=begun, block=False)
        if later := [cells[number] for number in unanswered(cells) if number not in begun]:
            self.client.abort(later, block=False)
        return begun

    def has_begun(self, result: Any) -> bool:
        """Return True if an engine has begun its cell."""
        return self.client.metadata[result.msg_ids[0]]["execute_input"] is not None

    def forget(self, asked: Asked) -> None:
        """Drop answers from the client's cache, and take back questions that have not been begun."""
        late = [asked[number] for number in unanswered(asked)]
        if late and not is_closed(self.client):
            self.client.abort(late, block=False)
        if done := [message for result in asked.values() if result.ready() for message in result.msg_ids]:
            self.client.purge_local_results(done)


class ClusterExperiment:
    """An experiment on engines."""

    def __init__(self, name: str, engines: Engines, report: str | None = None) -> None:
        self.name = name
        self.report = report
        self.all = self.engines = engines
        self.failed: dict[int, str] = {}
        self._places: dict[int, dict[str, Any]] = {}
        self._token = ""
        """By which engines know it; empty where another client has begun it."""
        self._started_at, self._started = time.time(), time.perf_counter()

    def start(self, line: str) -> None:
        """Open it on all engines that are not busy."""
        self._token = uuid.uuid4().hex
        late = self._begin("start", line, self._token)
        Engines(self.all.client, late).ask("cancel", self._token)

    def _begin(self, function: str, *words: object) -> list[int]:
        """Ask all engines; those that answer take part. Return those that are late."""
        asked = self.all.ask(function, *words)
        with interrupts.noted() as struck:
            self.all.wait(asked, _START_SECONDS)
        late = unanswered(asked)
        self._places, self.failed = self.all.answers(asked)
        self.engines = Engines(self.all.client, self._places)
        if not self._places and not struck:
            raise ClusterError("; ".join(_together(self.failed)))
        return late

    def run(self, line: str, source: str, progress: Progress) -> tuple[ExperimentRecord, Asked]:
        """Run a cell as an experiment that ends with it, on all engines; return the merged record and the results."""
        self._begin("prepare", line)
        with interrupts.noted() as struck:
            if struck:
                raise KeyboardInterrupt
            results = self.engines.run(f"%%experiment {line} --report none\n{source}")
            self.engines.wait(results, progress=progress, to_all=True)
        for number, result in results.items():
            if not result.ready():
                goes_on = "goes on" if self.engines.has_begun(result) else "has not begun, and is taken back"
                self.failed[number] = f"has not answered: its cell {goes_on}"
            elif getattr(error_of(result), "ename", "") in _LOST:
                self.failed[number] = _why(error_of(result))
        words = {at: result.msg_ids for at, result in results.items() if at not in self.failed}
        return self._merged(self.engines.ask_each("record", words), progress), results

    def end(self, progress: Progress) -> ExperimentRecord:
        """End it on the engines, and return the merged record."""
        return self._merged(self.engines.ask("end", self.name, self._token), progress)

    def _merged(self, asked: Asked, progress: Progress) -> ExperimentRecord:
        self.engines.wait(asked, progress=progress, anew=True)
        found, failed = self.engines.answers(asked)
        self.failed = failed | self.failed
        made = [self._engine(number, found.get(number)) for number in self.all.numbers]
        return merged_record(self.name, self._started_at, self.elapsed_seconds, made)

    def _engine(self, number: int, answer: dict[str, Any] | None) -> EngineRecord:
        where = {**self._places.get(number, {}), **(answer or {"error": self.failed.get(number, "")})}
        try:
            return EngineRecord.from_dict({"engine": number, **where})
        except (ValueError, TypeError, KeyError) as error:  # another version's
            return EngineRecord(number, error=f"its record cannot be read ({error}); it ran {where.get('version')}")

    @property
    def elapsed_seconds(self) -> float:
        """Time since the start."""
        return time.perf_counter() - self._started


def engines_of(shell: Any, words: str) -> Engines:
    """Return the engines that ``all``, ``0-3,5`` or the name of a view stands for."""
    named = shell.user_ns.get(words)
    if is_exactly(named, _library("DirectView"), _library("BroadcastView")):
        client, numbers = named.client, named.targets
    else:
        client = _client(shell)
        if words != "all" and not _NUMBERS.fullmatch(words):
            raise ClusterError(f"--on {words}: write all, numbers of engines such as 0-3 or 0,2, or a view's name")
        numbers = words if words == "all" else [number for part in words.split(",") for number in _range(part)]
    if is_closed(client):
        raise ClusterError(f"--on {words}: the client of that view is closed")
    there = client.ids
    wanted = there if numbers in ("all", None) else [numbers] if type(numbers) is int else list(dict.fromkeys(numbers))
    lacking = [number for number in wanted if number not in there]
    if not there:
        raise ClusterError("the cluster has no engine: none has started yet, or all have died")
    if not wanted:
        raise ClusterError(f"--on names no engine; the cluster has {engine_numbers(there)}")
    if lacking:
        raise ClusterError(f"the cluster has no {engine_numbers(lacking)}; it has {engine_numbers(there)}")
    return Engines(client, wanted)


def _range(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), min(int(last or first), int(first) + 1_000_000) + 1)


def _library(name: str) -> Any:
    return getattr(sys.modules.get("ipyparallel"), name, ())


def _client(shell: Any) -> Any:
    """Return the client of the active view, or the only one that a name of the notebook's holds."""
    if "ipyparallel" not in sys.modules:
        raise ClusterError(f"--on needs a running cluster: pip install ipyparallel, then {_HOW}")
    if sys.modules["ipyparallel"].version_info[0] < 8:
        raise ClusterError("--on needs ipyparallel 8 or newer")
    magics = shell.magics_manager.registry.get("ParallelMagics")
    view = getattr(magics, "view", None)
    if view is not None and not is_closed(view.client):
        return view.client
    found = [value for value in list(shell.user_ns.values()) if type(value) is _library("Client")]
    clients = {id(client): client for client in found if not is_closed(client)}
    if len(clients) > 1:
        raise ClusterError("--on: there are several clusters; name a view, such as view = rc[:] and --on view")
    if not clients:
        raise ClusterError(f"--on needs a running cluster: {_HOW}")
    return next(iter(clients.values()))


def is_closed(client: Any) -> bool:
    """Return True if nothing can be asked through a client any more."""
    return getattr(client, "_closed", False) is True


def _may_be_gone() -> Any:
    return contextlib.suppress(LookupError, sys.modules["ipyparallel.error"].NoEnginesRegistered)


def _wait(asked: Asked, seconds: float | None, progress: Progress, struck: list[int], heard: int) -> None:
    until = time.monotonic() + (float("inf") if seconds is None else seconds)
    while (waiting := unanswered(asked)) and len(struck) == heard and time.monotonic() < until:
        progress(1 - len(waiting) / len(asked))
        asked[waiting[0]].wait(_POLL_SECONDS)


def unanswered(asked: Asked) -> list[int]:
    """Return the engines that have not answered yet."""
    return [number for number, result in asked.items() if not result.ready()]


def error_of(result: Any) -> BaseException | None:
    """Return the error of an answer that is there."""
    found: BaseException | None = result.exception(timeout=0)
    return found


def _why(error: BaseException | None) -> str:
    name = getattr(error, "ename", type(error).__name__)
    text = str(getattr(error, "evalue", error)).partition("\n")[0]
    if name in ("ModuleNotFoundError", "ImportError"):
        return f"has no ipygpumem, or an older one ({text})"
    return "died" if name == "EngineError" else f"{name}: {text}"


def _together(failed: dict[int, str]) -> Iterable[str]:
    """Return each reason once, with its engines."""
    for why in dict.fromkeys(failed.values()):
        yield f"{engine_numbers([number for number, own in failed.items() if own == why])}: {why}"
