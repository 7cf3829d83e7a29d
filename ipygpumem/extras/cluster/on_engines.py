"""``--on``: experiments and commands on the engines of an ipyparallel cluster; each engine measures
itself.

An engine handles messages in order, so a request sent after a cell is answered when the cell has
finished. Requests are sent as text for ``eval``, because a function would be sent as bytecode,
which another Python cannot read.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from ipygpumem import interrupts
from ipygpumem.errors import ClusterError, quoted
from ipygpumem.extras.cluster.engines_report import (
    alike,
    engine_numbers,
    engines_report,
    kind_of,
    merged_record,
    outputs_report,
)
from ipygpumem.heap.bulk import Progress, no_progress
from ipygpumem.introspect import is_exactly
from ipygpumem.records import EngineRecord, ExperimentRecord
from ipygpumem.report.layout import Report, count
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.declarations import Call, Options
from ipygpumem.units import format_seconds

_NUMBERS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_HOW = "import ipyparallel; rc = ipyparallel.Cluster(n=4).start_and_connect_sync(activate=True)"
_POLL_SECONDS = 0.1
_START_SECONDS = 30.0
"""Seconds to wait for an engine to begin; one that is busy is left out."""
_GRACE_SECONDS = 10.0
"""Seconds to wait for engines after our Ctrl-C."""
_NEWS_SECONDS = 0.5
"""Seconds to wait for the message that an engine has begun a cell."""

Asked = dict[int, Any]
"""ipyparallel's ``AsyncResult`` by engine."""


def on_engines(app: App, call: Call) -> list[Report]:
    """Run a command on engines; a Ctrl-C interrupts only the waiting: nothing stays open."""
    __tracebackhide__ = True
    options, line = call.options, _without_on(call.line)
    with interrupts.deferred() as struck:
        if call.command.name == "%%experiment":
            reports = _run_cell(app, options, line, "".join(call.cell), struck)
        elif call.command.name == "%experiment start":
            reports = _start(app, options, line.removeprefix("start").lstrip(), struck)
        elif call.command.name == "%experiment end":
            reports = _end_by_name(app, options)
        else:
            reports = _look(app, call.command.name.split()[0].lstrip("%"), line, options)
    return _unless(struck, app, reports)


def _without_on(line: str) -> str:
    """Return a line without ``--on`` and its value."""
    words = shlex.split(line)
    places = [at for at, word in enumerate(words) if word.partition("=")[0] == "--on"]
    length = 1 if "=" in words[places[0]] else 2
    del words[places[0] : places[0] + length]
    return shlex.join(words)


def _unless(struck: list[int], app: App, reports: list[Report]) -> list[Report]:
    """Return the reports; if there was a Ctrl-C, show them and raise it."""
    if struck:
        app.context.display.show(reports)
        raise KeyboardInterrupt
    return reports


def _run_cell(app: App, options: Options, line: str, cell: str, struck: list[int]) -> list[Report]:
    """Run a cell as an experiment on all engines at once; show everything, then raise its error."""
    __tracebackhide__ = True
    experiment = ClusterExperiment(
        options.name, _engines_of(app.context.shell, options.on), options.report
    )
    with app.context.display.working(
        f"experiment on {count(len(experiment.all.numbers), 'engine')}"
    ) as progress:
        record, results = experiment.run(line, cell, progress)
    ready = {number: result for number, result in results.items() if result.ready()}
    try:
        for number, result in ready.items():
            if result.wait_for_output(1):
                if len(results) > 1 and (
                    result.stdout or result.stderr or result.outputs or result.execute_result
                ):
                    sys.stdout.write(f"[engine {number}]\n")
                result.display_outputs()
        app.context.display.show(_ended(app, experiment, record))
        errors = [
            error for result in ready.values() if (error := result.exception(timeout=0)) is not None
        ]
        if errors and not struck:
            sys.modules["ipyparallel.error"].collect_exceptions(errors, "execute")
    finally:
        experiment.all.forget(results)
    return []


def _start(app: App, options: Options, line: str, struck: list[int]) -> list[Report]:
    experiment = ClusterExperiment(
        options.name, _engines_of(app.context.shell, options.on), options.report
    )
    for other in [item for item in app.on_cluster if item.name == options.name]:
        app.on_cluster.remove(other)
        if not _is_closed(other.all.client):
            app.context.display.show(_end(app, other))
    experiment.begin("start", line)
    if struck:
        experiment.end(no_progress)
    else:
        app.on_cluster.append(experiment)
    return []


def end(app: App, experiment: ClusterExperiment) -> list[Report]:
    """End an experiment that is open on engines, and return its report."""
    app.on_cluster.remove(experiment)
    if _is_closed(experiment.all.client):
        again = "connect again, and end it with %experiment end NAME --on all"
        raise ClusterError(f"the client that began {quoted(experiment.name)} is closed: {again}")
    with interrupts.deferred() as struck:
        reports = _end(app, experiment)
    return _unless(struck, app, reports)


def _end_by_name(app: App, options: Options) -> list[Report]:
    """End an experiment by name, even one that another client has started."""
    if not options.name:
        raise ClusterError("%experiment end --on: which experiment? Write its name")
    named = [
        item
        for item in app.on_cluster
        if item.name == options.name and not _is_closed(item.all.client)
    ]
    if named:
        return end(app, named[-1])
    engines = _engines_of(app.context.shell, options.on)
    return _end(app, ClusterExperiment(options.name, engines), is_ours=False)


def _end(app: App, experiment: ClusterExperiment, *, is_ours: bool = True) -> list[Report]:
    with app.context.display.working(f"experiment {experiment.name}") as progress:
        record = experiment.end(progress)
    if not is_ours and not any(engine.record for engine in record.engines):
        raise ClusterError(record.notes[0])
    return _ended(app, experiment, record)


def _ended(app: App, experiment: ClusterExperiment, record: ExperimentRecord) -> list[Report]:
    """Store the record of an ended experiment, and return its report."""
    app.experiments.finished.append(record)
    app.subscribers.add(record)
    is_shown = (experiment.report or app.context.config.experiment_report) != "none"
    return [engines_report(record)] if is_shown else []


def _look(app: App, magic: str, line: str, options: Options) -> list[Report]:
    """Run a command on each engine, and return its reports below one table of figures."""
    engines = _engines_of(app.context.shell, options.on)
    asked = engines.ask("look", magic, line)
    with app.context.display.working(f"%{magic} {line}") as progress:
        engines.wait(asked, progress)
    found, failed = engines.replies(asked)
    outputs = {}
    for number, reply in found.items():
        values: dict[tuple[str, str], int] = defaultdict(int)
        for device, size in reply["after"].items():
            values["in use", kind_of(device)] += size
            if line == "free":
                values["freed", kind_of(device)] += reply["before"].get(device, 0) - size
            if device in reply["free"]:
                values["free", kind_of(device)] += reply["free"][device]
        outputs[number] = (reply["host"], reply["text"], values)
    return [outputs_report(f"%{magic} {line}", outputs, failed)]


# -- experiments and engines --------------------------------------------------------------------


class ClusterExperiment:
    """An experiment on engines."""

    def __init__(self, name: str, engines: Engines, report: str | None = None) -> None:
        self.name, self.report = name, report
        self.all = self.engines = engines
        """The participating engines."""
        self._failed: dict[int, str] = {}
        self._places: dict[int, dict[str, Any]] = {}
        self._started_at, self._started = time.time(), time.perf_counter()

    @property
    def elapsed_seconds(self) -> float:
        """Time since the start."""
        return time.perf_counter() - self._started

    @property
    def description(self) -> str:
        """A line about it while it is open."""
        where = engine_numbers(self.engines.numbers)
        span = format_seconds(self.elapsed_seconds)
        return f"experiment {self.name} · on {where} · span {span}"

    def finish(self, app: App) -> list[Report]:
        """End it, and return its report."""
        return end(app, self)

    def begin(self, function: str, line: str) -> None:
        """Ask all engines; those that reply participate, and a busy one will not begin later."""
        asked = self.all.ask(function, line)
        with interrupts.deferred() as struck:
            self.all.wait(asked, seconds=_START_SECONDS)
        late = _unanswered(asked)
        self._places, self._failed = self.all.replies(asked)
        self.engines = Engines(self.all.client, self._places)
        if not self._places and not struck:
            raise ClusterError("; ".join(alike(self._failed.items())))
        if function == "start":
            Engines(self.all.client, late).ask("end", self.name, "own")

    def run(self, line: str, source: str, progress: Progress) -> tuple[ExperimentRecord, Asked]:
        """Run a cell as an experiment that ends with it, on all engines; return the merged record
        and the results.
        """
        self.begin("prepare", line)
        with interrupts.deferred() as struck:
            if struck:
                raise KeyboardInterrupt
            results = self.engines.run(f"%%experiment {line} --report none\n{source}")
            self.engines.wait(results, progress)
            if struck:
                begun = {number: results[number] for number in self.engines.interrupt(results)}
                self.engines.wait(begun, seconds=_GRACE_SECONDS, heard=len(struck))
        for number, result in results.items():
            if not result.ready():
                state = (
                    "continues"
                    if self.engines.has_begun(result)
                    else "had not begun and was cancelled"
                )
                self._failed[number] = f"did not reply: its cell {state}"
            elif getattr(error := result.exception(timeout=0), "ename", "") in (
                "EngineError",
                "TaskAborted",
            ):
                self._failed[number] = _why(error)
        there = Engines(
            self.all.client, [number for number in results if number not in self._failed]
        )
        since = {number: place["time"] for number, place in self._places.items()}
        return self._merged(there.ask("record", self.name, since), progress), results

    def end(self, progress: Progress) -> ExperimentRecord:
        """End it on the engines, and return the merged record."""
        return self._merged(self.engines.ask("end", self.name), progress)

    def _merged(self, asked: Asked, progress: Progress) -> ExperimentRecord:
        with interrupts.deferred() as struck:
            self.engines.wait(asked, progress, heard=len(struck))
        found, failed = self.engines.replies(asked)
        self._failed = failed | self._failed
        made = [self._engine(number, found.get(number)) for number in self.all.numbers]
        return merged_record(self.name, self._started_at, self.elapsed_seconds, made)

    def _engine(self, number: int, reply: dict[str, Any] | None) -> EngineRecord:
        where = {
            **self._places.get(number, {}),
            **(reply or {"error": self._failed.get(number, "")}),
        }
        try:
            return EngineRecord.from_dict({"engine": number, **where})
        except (ValueError, TypeError, KeyError) as error:  # another version's
            return EngineRecord(
                number, error=f"its record cannot be read ({error}); it ran {where.get('version')}"
            )


class Engines:
    """Some engines of a cluster."""

    def __init__(self, client: Any, numbers: Iterable[int]) -> None:
        self.client = client
        self.numbers = tuple(numbers)

    def ask(self, function: str, *words: object) -> Asked:
        """Call a function of ``engine.py`` with plain values on each engine, and return the pending
        results.
        """
        module = "__import__('importlib').import_module('ipygpumem.extras.cluster.engine')"
        return self._sent("apply_async", eval, f"{module}.answer({function!r}, *{words!r})", {})

    def run(self, source: str) -> Asked:
        """Run a cell on each engine."""
        return self._sent("execute", source, silent=False, block=False)

    def _sent(self, how: str, *words: object, **options: object) -> Asked:
        asked = Asked()
        for number in self.numbers:
            with contextlib.suppress(
                LookupError, sys.modules["ipyparallel.error"].NoEnginesRegistered
            ):  # it is gone
                if not _is_closed(self.client) and number in self.client.ids:
                    asked[number] = getattr(self.client[number], how)(*words, **options)
        return asked

    def wait(
        self,
        asked: Asked,
        progress: Progress = no_progress,
        *,
        seconds: float = float("inf"),
        heard: int = 0,
    ) -> None:
        """Wait for all results, up to ``seconds``; a Ctrl-C after ``heard`` earlier ones ends the
        wait.
        """
        until = time.monotonic() + seconds
        with interrupts.deferred() as struck:
            while (
                (waiting := _unanswered(asked))
                and len(struck) <= heard
                and time.monotonic() < until
            ):
                progress(1 - len(waiting) / len(asked))
                asked[waiting[0]].wait(_POLL_SECONDS)

    def replies(self, asked: Asked) -> tuple[dict[int, Any], dict[int, str]]:
        """Return the engines' results, and the reasons for missing ones; the client drops the
        results.
        """
        found, failed = dict[int, Any](), dict.fromkeys(self.numbers, "has stopped")
        for number, result in asked.items():
            if not result.ready():
                failed[number] = "did not reply"
            elif (error := result.exception(timeout=0)) is not None:
                failed[number] = _why(error)
            elif "value" in (reply := result.get(timeout=0)):
                found[number] = reply["value"]
                del failed[number]
            else:
                failed[number] = reply["error"]
        self.forget(asked)
        return found, failed

    def interrupt(self, cells: Asked) -> list[int]:
        """Send a Ctrl-C to the engines that run these cells, and return them; cancel cells that
        have not begun.

        An engine that has not begun is running something else, maybe another client's code.
        """
        until = time.monotonic() + _NEWS_SECONDS
        while (
            not all(self.has_begun(cells[number]) for number in _unanswered(cells))
            and time.monotonic() < until
        ):
            time.sleep(_POLL_SECONDS)
        begun = [number for number in _unanswered(cells) if self.has_begun(cells[number])]
        if begun:
            self.client.send_signal(signal.SIGINT, targets=begun, block=False)
        if later := [cells[number] for number in _unanswered(cells) if number not in begun]:
            self.client.abort(later, block=False)
        return begun

    def has_begun(self, result: Any) -> bool:
        """Return True if an engine has begun its cell."""
        return self.client.metadata[result.msg_ids[0]]["execute_input"] is not None

    def forget(self, asked: Asked) -> None:
        """Drop results from the client's cache, and cancel requests that have not begun."""
        late = [asked[number] for number in _unanswered(asked)]
        if late and not _is_closed(self.client):
            self.client.abort(late, block=False)
        if done := [
            message for result in asked.values() if result.ready() for message in result.msg_ids
        ]:
            self.client.purge_local_results(done)


def _unanswered(asked: Asked) -> list[int]:
    return [number for number, result in asked.items() if not result.ready()]


def _why(error: BaseException | None) -> str:
    name = getattr(error, "ename", type(error).__name__)
    text = str(getattr(error, "evalue", error)).partition("\n")[0]
    if name in ("ModuleNotFoundError", "ImportError"):
        return f"has no ipygpumem, or an older one ({text})"
    return "died" if name == "EngineError" else f"{name}: {text}"


# -- words of --on ------------------------------------------------------------------------------


def _engines_of(shell: Any, words: str) -> Engines:
    """Return the engines selected by ``all``, ``0-3,5`` or the name of a view."""
    named = shell.user_ns.get(words)
    if is_exactly(named, _library("DirectView"), _library("BroadcastView")):
        client, numbers = named.client, named.targets
    else:
        client = _client(shell)
        if words != "all" and not _NUMBERS.fullmatch(words):
            raise ClusterError(
                f"--on {words}: write all, numbers of engines such as 0-3 or 0,2, or a view's name"
            )
        numbers = (
            words
            if words == "all"
            else [number for part in words.split(",") for number in _range(part)]
        )
    if _is_closed(client):
        raise ClusterError(f"--on {words}: the client of that view is closed")
    there = client.ids
    wanted = (
        there
        if numbers in ("all", None)
        else [numbers]
        if type(numbers) is int
        else list(dict.fromkeys(numbers))
    )
    if not there:
        raise ClusterError("the cluster has no engine: none has started yet, or all have died")
    if not wanted:
        raise ClusterError(f"--on names no engine; the cluster has {engine_numbers(there)}")
    if lacking := [number for number in wanted if number not in there]:
        raise ClusterError(
            f"the cluster has no {engine_numbers(lacking)}; it has {engine_numbers(there)}"
        )
    return Engines(client, wanted)


def _range(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), min(int(last or first), int(first) + 1_000_000) + 1)


def _library(name: str) -> Any:
    return getattr(sys.modules.get("ipyparallel"), name, ())


def _client(shell: Any) -> Any:
    """Return the client of the active view, or the only one that a notebook's name refers to."""
    if "ipyparallel" not in sys.modules:
        raise ClusterError(f"--on needs a running cluster: pip install ipyparallel, then {_HOW}")
    if sys.modules["ipyparallel"].version_info[0] < 8:
        raise ClusterError("--on needs ipyparallel 8 or newer")
    view = getattr(shell.magics_manager.registry.get("ParallelMagics"), "view", None)
    if view is not None and not _is_closed(view.client):
        return view.client
    found = [value for value in list(shell.user_ns.values()) if type(value) is _library("Client")]
    clients = {id(client): client for client in found if not _is_closed(client)}
    if len(clients) > 1:
        raise ClusterError(
            "--on: there are several clusters; name a view, such as view = rc[:] and --on view"
        )
    if not clients:
        raise ClusterError(f"--on needs a running cluster: {_HOW}")
    return next(iter(clients.values()))


def _is_closed(client: Any) -> bool:
    return getattr(client, "_closed", False) is True
