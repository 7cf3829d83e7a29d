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
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ipygpumem import interrupts
from ipygpumem.errors import ClusterError, how_to_install, quoted
from ipygpumem.extras.cluster.engines_report import (
    EngineOutput,
    Values,
    engine_numbers,
    engines_report,
    kind_of,
    merged_record,
    outputs_report,
    texts_with_engines,
)
from ipygpumem.heap.bulk import Progress, no_progress
from ipygpumem.introspect import is_exactly
from ipygpumem.records import EngineRecord, ExperimentRecord
from ipygpumem.report.layout import Report
from ipygpumem.report.words import count
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.declarations import Call, Options
from ipygpumem.units import format_seconds

_NUMBERS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_HOW = "import ipyparallel; rc = ipyparallel.Cluster(n=4).start_and_connect_sync(activate=True)"
_MOST_ENGINES = 1_000_000
"""Longest range of engines, so that a mistyped one is cheap."""
_POLL_SECONDS = 0.1
"""Time between two looks at the results."""
_START_SECONDS = 30.0
"""Seconds to wait for an engine to begin; one that is busy is left out."""
_GRACE_SECONDS = 10.0
"""Seconds to wait for engines after our Ctrl-C."""
_NEWS_SECONDS = 0.5
"""Seconds to wait for the message that an engine has begun a cell."""

PendingResults = dict[int, Any]
"""ipyparallel's ``AsyncResult`` of a request, by engine."""


class Replies(NamedTuple):
    """The replies of engines to a request."""

    values: dict[int, Any]
    """The value that each engine has returned."""
    failed: dict[int, str]
    """Why there is none from the other engines, such as ``did not reply``."""


def on_engines(app: App, call: Call) -> list[Report]:
    """Run a command on the engines that ``--on`` names, and return its reports.

    A Ctrl-C ends only the wait for the engines, so that no experiment stays open there.
    """
    __tracebackhide__ = True
    options = call.options
    line = _without_on_option(call.line)
    with interrupts.deferred() as struck:
        if call.command.name == "%%experiment":
            if not options.name:  # each engine would take the number of another cell
                raise ClusterError("%%experiment --on: which name? Write it first: a --on all")
            reports = _run_cell(app, options, line, "".join(call.cell), struck)
        elif call.command.name == "%experiment start":
            reports = _start_experiment(app, options, line.removeprefix("start").lstrip(), struck)
        elif call.command.name == "%experiment end":
            reports = _end_by_name(app, options)
        else:
            magic = call.command.name.split()[0].lstrip("%")
            reports = _run_on_each_engine(app, magic, line, options)
    return _reports_unless_interrupted(struck, app, reports)


def _without_on_option(line: str) -> str:
    """Return a line without ``--on`` and its value."""
    words = shlex.split(line)
    names = [word.partition("=")[0] for word in words]
    position = names.index("--on")
    length = 1 if "=" in words[position] else 2  # --on=all or --on all
    del words[position : position + length]
    return shlex.join(words)


def _reports_unless_interrupted(struck: list[int], app: App, reports: list[Report]) -> list[Report]:
    """Return the reports; if there was a Ctrl-C (``struck``), show them and raise it."""
    if struck:
        app.context.display.show(reports)
        raise KeyboardInterrupt
    return reports


def _run_cell(app: App, options: Options, line: str, cell: str, struck: list[int]) -> list[Report]:
    """Run a cell as an experiment on all engines at once; show everything, then raise its error.

    Args:
        app: the services of the shell.
        options: the options of ``%%experiment``.
        line: its line without ``--on``.
        cell: the code.
        struck: gets an item for each Ctrl-C.
    """
    __tracebackhide__ = True
    experiment = _new_experiment(app, options)
    engines = count(len(experiment.named_engines.numbers), "engine")
    with app.context.display.working(f"experiment on {engines}") as progress:
        record, results = experiment.run(line, cell, progress)
    ready = {number: result for number, result in results.items() if result.ready()}
    try:
        for number, result in ready.items():
            if result.wait_for_output(1):
                _show_outputs(number, result, is_alone=len(results) == 1)
        app.context.display.show(_store_and_report(app, experiment, record))
        errors = [result.exception(timeout=0) for result in ready.values()]
        errors = [error for error in errors if error is not None]
        if errors and not struck:
            sys.modules["ipyparallel.error"].collect_exceptions(errors, "execute")
    finally:
        experiment.named_engines.forget(results)
    return []


def _show_outputs(number: int, result: Any, *, is_alone: bool) -> None:
    """Show what a cell printed and displayed on an engine, with the engine's number above it."""
    has_output = result.stdout or result.stderr or result.outputs or result.execute_result
    if has_output and not is_alone:
        sys.stdout.write(f"[engine {number}]\n")
    result.display_outputs()


def _start_experiment(app: App, options: Options, line: str, struck: list[int]) -> list[Report]:
    """Open an experiment on engines; an open one of the same name is ended first."""
    experiment = _new_experiment(app, options)
    for earlier in list(app.on_cluster):
        if earlier.name != options.name:
            continue
        app.on_cluster.remove(earlier)
        if not _is_closed(earlier.named_engines.client):
            app.context.display.show(_end_and_report(app, earlier))
    experiment.begin("start", line)
    if struck:
        experiment.collect_record(no_progress)  # ends it on the engines that have begun
    else:
        app.on_cluster.append(experiment)
    return []


def _new_experiment(app: App, options: Options) -> ClusterExperiment:
    """Return an experiment on the engines that ``--on`` names, which has not begun."""
    engines = _engines_of(app.context.shell, options.on)
    return ClusterExperiment(options.name, engines, options.report)


def end_experiment(app: App, experiment: ClusterExperiment) -> list[Report]:
    """End an experiment that is open on engines, and return its report; a Ctrl-C takes effect
    afterwards.
    """
    app.on_cluster.remove(experiment)
    if _is_closed(experiment.named_engines.client):
        again = "connect again, and end it with %experiment end NAME --on all"
        raise ClusterError(f"the client that began {quoted(experiment.name)} is closed: {again}")
    with interrupts.deferred() as struck:
        reports = _end_and_report(app, experiment)
    return _reports_unless_interrupted(struck, app, reports)


def _end_by_name(app: App, options: Options) -> list[Report]:
    """End an experiment by name, even one that another client has started."""
    if not options.name:
        raise ClusterError("%experiment end --on: which experiment? Write its name")
    for experiment in reversed(app.on_cluster):
        if experiment.name == options.name and not _is_closed(experiment.named_engines.client):
            return end_experiment(app, experiment)
    engines = _engines_of(app.context.shell, options.on)
    return _end_and_report(app, ClusterExperiment(options.name, engines), is_ours=False)


def _end_and_report(
    app: App, experiment: ClusterExperiment, *, is_ours: bool = True
) -> list[Report]:
    """End an experiment, and return its report.

    Args:
        app: the services of the shell.
        experiment: the experiment.
        is_ours: this client has begun it.

    Raises:
        ClusterError: another client has begun it, and no engine has a record of it.
    """
    with app.context.display.working(f"experiment {experiment.name}") as progress:
        record = experiment.collect_record(progress)
    has_records = any(engine.record for engine in record.engines)
    if not is_ours and not has_records:
        raise ClusterError(record.notes[0])
    return _store_and_report(app, experiment, record)


def _store_and_report(
    app: App, experiment: ClusterExperiment, record: ExperimentRecord
) -> list[Report]:
    """Store the record of an ended experiment, and return its report."""
    app.experiments.finished.append(record)
    app.subscribers.add(record)
    detail = experiment.report or app.context.config.experiment_report
    if detail == "none":
        return []
    return [engines_report(record)]


def _run_on_each_engine(app: App, magic: str, line: str, options: Options) -> list[Report]:
    """Run a command on each engine, and return its reports below one table of figures."""
    engines = _engines_of(app.context.shell, options.on)
    pending = engines.ask("look", magic, line)
    with app.context.display.working(f"%{magic} {line}") as progress:
        engines.wait(pending, progress)
    replies = engines.replies(pending)
    outputs = {}
    for number, reply in replies.values.items():
        values = _values_of_reply(reply, has_freed=line == "free")
        outputs[number] = EngineOutput(reply["host"], reply["text"], values)
    return [outputs_report(f"%{magic} {line}", outputs, replies.failed)]


def _values_of_reply(reply: dict[str, Any], *, has_freed: bool) -> Values:
    """Return an engine's memory after a command, by figure and kind of device."""
    values: dict[tuple[str, str], int] = defaultdict(int)
    for device, size in reply["after"].items():
        kind = kind_of(device)
        values["in use", kind] += size
        if has_freed:
            values["freed", kind] += reply["before"].get(device, 0) - size
        if device in reply["free"]:
            values["free", kind] += reply["free"][device]
    return values


# -- experiments and engines --------------------------------------------------------------------


class ClusterExperiment:
    """An experiment on engines.

    Args:
        name: its name.
        engines: the engines that the user has named.
        report: the option ``--report``; None for the configured one.
    """

    def __init__(self, name: str, engines: Engines, report: str | None = None) -> None:
        self.name = name
        self.report = report
        self.named_engines = engines
        """The engines that the user has named."""
        self.engines = engines
        """The participating engines: those that began the experiment."""
        self._failed: dict[int, str] = {}
        """Why an engine has no record."""
        self._places: dict[int, dict[str, Any]] = {}
        """Each participating engine's host, process, versions and time at the start."""
        self._started_at = time.time()
        self._started = time.perf_counter()

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
        return end_experiment(app, self)

    def begin(self, function: str, line: str) -> None:
        """Ask all engines to begin. The engines that reply in time participate; a busy one is told
        to end the experiment, so that it does not begin later.

        Args:
            function: ``start`` to open the experiment, ``prepare`` for one of a single cell.
            line: the line of the command.

        Raises:
            ClusterError: no engine has begun.
        """
        pending = self.named_engines.ask(function, line)
        with interrupts.deferred() as struck:
            self.named_engines.wait(pending, seconds=_START_SECONDS)
        late = _unanswered(pending)
        replies = self.named_engines.replies(pending)
        self._places = replies.values
        self._failed = replies.failed
        self.engines = Engines(self.named_engines.client, self._places)
        if not self._places and not struck:
            raise ClusterError("; ".join(texts_with_engines(self._failed.items())))
        if function == "start":
            Engines(self.named_engines.client, late).ask("end", self.name, "own")

    def run(
        self, line: str, source: str, progress: Progress
    ) -> tuple[ExperimentRecord, PendingResults]:
        """Run a cell as an experiment that ends with it, on all engines; return the merged record
        and the results, which have the cell's outputs and errors.

        Args:
            line: the line of ``%%experiment``.
            source: the code below it.
            progress: is called with the share of the engines that have finished.
        """
        self.begin("prepare", line)
        with interrupts.deferred() as struck:
            if struck:
                raise KeyboardInterrupt
            results = self.engines.run(f"%%experiment {line} --report none\n{source}")
            self.engines.wait(results, progress)
            if struck:
                begun = {number: results[number] for number in self.engines.interrupt(results)}
                self.engines.wait(begun, seconds=_GRACE_SECONDS, earlier_interrupts=len(struck))
        for number, result in results.items():
            problem = self._why_no_record(result)
            if problem:
                self._failed[number] = problem
        finished = [number for number in results if number not in self._failed]
        since = {number: place["time"] for number, place in self._places.items()}
        pending = Engines(self.named_engines.client, finished).ask("record", self.name, since)
        return self._merged_record(pending, progress), results

    def _why_no_record(self, result: Any) -> str:
        """Return why an engine has no record of its cell; an empty text if it has one."""
        if not result.ready():
            has_begun = self.engines.has_begun(result)
            state = "continues" if has_begun else "had not begun and was cancelled"
            return f"did not reply: its cell {state}"
        error = result.exception(timeout=0)
        if getattr(error, "ename", "") in ("EngineError", "TaskAborted"):
            return _error_in_one_line(error)
        return ""

    def collect_record(self, progress: Progress) -> ExperimentRecord:
        """End it on the engines, and return the merged record."""
        return self._merged_record(self.engines.ask("end", self.name), progress)

    def _merged_record(self, pending: PendingResults, progress: Progress) -> ExperimentRecord:
        """Wait for the engines' records, and return them as one."""
        with interrupts.deferred() as struck:
            self.engines.wait(pending, progress, earlier_interrupts=len(struck))
        replies = self.engines.replies(pending)
        self._failed = replies.failed | self._failed  # the earlier reason is the cause
        engines = [
            self._engine_record(number, replies.values.get(number))
            for number in self.named_engines.numbers
        ]
        return merged_record(self.name, self._started_at, self.elapsed_seconds, engines)

    def _engine_record(self, number: int, reply: dict[str, Any] | None) -> EngineRecord:
        """Return the record of one engine.

        Args:
            number: the engine's number.
            reply: the record as plain values; None if the engine has none: then its error says why.
        """
        values = self._places.get(number, {}) | {"engine": number}
        values |= reply or {"error": self._failed.get(number, "")}
        try:
            return EngineRecord.from_dict(values)
        except (ValueError, TypeError, KeyError) as error:  # another version's
            version = values.get("version")
            text = f"its record cannot be read ({error}); it ran {version}"
            return EngineRecord(number, error=text)


class Engines:
    """Some engines of a cluster.

    Args:
        client: ipyparallel's client.
        numbers: the numbers of the engines.
    """

    def __init__(self, client: Any, numbers: Iterable[int]) -> None:
        self.client = client
        self.numbers = tuple(numbers)

    def ask(self, function: str, *words: object) -> PendingResults:
        """Call a function of ``engine.py`` with plain values on each engine, and return the pending
        results.
        """
        module = "__import__('importlib').import_module('ipygpumem.extras.cluster.engine')"
        call = f"{module}.answer({function!r}, *{words!r})"
        return self._request_of_each(lambda view: view.apply_async(eval, call, {}))

    def run(self, source: str) -> PendingResults:
        """Run a cell on each engine."""
        return self._request_of_each(lambda view: view.execute(source, silent=False, block=False))

    def _request_of_each(self, request: Callable[[Any], Any]) -> PendingResults:
        """Make a request of each engine that is still there, and return the pending results."""
        pending = PendingResults()
        no_engines = sys.modules["ipyparallel.error"].NoEnginesRegistered
        for number in self.numbers:
            with contextlib.suppress(LookupError, no_engines):  # it is gone
                if not _is_closed(self.client) and number in self.client.ids:
                    pending[number] = request(self.client[number])
        return pending

    def wait(
        self,
        pending: PendingResults,
        progress: Progress = no_progress,
        *,
        seconds: float = float("inf"),
        earlier_interrupts: int = 0,
    ) -> None:
        """Wait for all results, up to ``seconds``.

        A Ctrl-C ends the wait, except ``earlier_interrupts`` ones, which came before it.
        """
        until = time.monotonic() + seconds
        with interrupts.deferred() as struck:
            while len(struck) <= earlier_interrupts and time.monotonic() < until:
                waiting = _unanswered(pending)
                if not waiting:
                    break
                progress(1 - len(waiting) / len(pending))
                pending[waiting[0]].wait(_POLL_SECONDS)

    def replies(self, pending: PendingResults) -> Replies:
        """Return the replies of these engines that have come so far; ipyparallel's client forgets
        the results.
        """
        values: dict[int, Any] = {}
        failed: dict[int, str] = {}
        for number in self.numbers:
            if number not in pending:
                failed[number] = "has stopped"
                continue
            result = pending[number]
            if not result.ready():
                failed[number] = "did not reply"
                continue
            error = result.exception(timeout=0)
            if error is not None:
                failed[number] = _error_in_one_line(error)
                continue
            reply = result.get(timeout=0)
            if "value" in reply:
                values[number] = reply["value"]
            else:
                failed[number] = reply["error"]
        self.forget(pending)
        return Replies(values, failed)

    def interrupt(self, cells: PendingResults) -> list[int]:
        """Send a Ctrl-C to the engines that run these cells, and return their numbers; cancel cells
        that have not begun.

        An engine that has not begun is running something else, maybe another client's code.
        """
        until = time.monotonic() + _NEWS_SECONDS
        while time.monotonic() < until and self._not_begun(cells):
            time.sleep(_POLL_SECONDS)
        begun = [number for number in _unanswered(cells) if self.has_begun(cells[number])]
        if begun:
            self.client.send_signal(signal.SIGINT, targets=begun, block=False)
        not_begun = [cells[number] for number in _unanswered(cells) if number not in begun]
        if not_begun:
            self.client.abort(not_begun, block=False)
        return begun

    def _not_begun(self, cells: PendingResults) -> list[int]:
        """Return the engines that have neither begun their cell nor replied."""
        return [number for number in _unanswered(cells) if not self.has_begun(cells[number])]

    def has_begun(self, result: Any) -> bool:
        """Return True if an engine has begun its cell."""
        return self.client.metadata[result.msg_ids[0]]["execute_input"] is not None

    def forget(self, pending: PendingResults) -> None:
        """Drop results from the client's cache, and cancel requests that have not begun."""
        late = [pending[number] for number in _unanswered(pending)]
        if late and not _is_closed(self.client):
            self.client.abort(late, block=False)
        messages = list[str]()
        for result in pending.values():
            if result.ready():
                messages += result.msg_ids
        if messages:
            self.client.purge_local_results(messages)


def _unanswered(pending: PendingResults) -> list[int]:
    """Return the engines whose results are pending."""
    return [number for number, result in pending.items() if not result.ready()]


def _error_in_one_line(error: BaseException | None) -> str:
    """Return an error in one line; for an engine's error, with the name and the text that it had
    there.
    """
    name = getattr(error, "ename", type(error).__name__)
    text = str(getattr(error, "evalue", error)).partition("\n")[0]
    if name in ("ModuleNotFoundError", "ImportError"):
        return f"has no ipygpumem, or an older one ({text})"
    if name == "EngineError":
        return "died"
    return f"{name}: {text}"


# -- words of --on ------------------------------------------------------------------------------


def _engines_of(shell: Any, words: str) -> Engines:
    """Return the engines selected by ``all``, ``0-3,5`` or the name of a view.

    Raises:
        ClusterError: there are no such engines.
    """
    view = shell.user_ns.get(words)
    view_types = map(_class_of_ipyparallel, ("DirectView", "BroadcastView"))
    if is_exactly(view, *view_types):
        client = view.client
        numbers = _engines_of_view(view)
    else:
        client = _client_here(shell)
        numbers = _engines_by_number(words)
    if _is_closed(client):
        raise ClusterError(f"--on {words}: the client of that view is closed")
    existing = client.ids
    if not existing:
        raise ClusterError("the cluster has no engine: none has started yet, or all have died")
    if numbers is None:
        return Engines(client, existing)
    if not numbers:
        raise ClusterError(f"--on names no engine; the cluster has {engine_numbers(existing)}")
    missing = [number for number in numbers if number not in existing]
    if missing:
        raise ClusterError(
            f"the cluster has no {engine_numbers(missing)}; it has {engine_numbers(existing)}"
        )
    return Engines(client, numbers)


def _engines_of_view(view: Any) -> list[int] | None:
    """Return the engines of a view, each once; None stands for all."""
    targets = view.targets
    if targets in ("all", None):
        return None
    if type(targets) is int:
        return [targets]
    return list(dict.fromkeys(targets))


def _engines_by_number(words: str) -> list[int] | None:
    """Return the engines that ``0-3,5`` stands for, each once; None for ``all``."""
    if words == "all":
        return None
    if not _NUMBERS.fullmatch(words):
        raise ClusterError(
            f"--on {words}: write all, numbers of engines such as 0-3 or 0,2, or a view's name"
        )
    numbers: dict[int, None] = {}
    for part in words.split(","):
        first, _, last = part.partition("-")
        end = min(int(last or first), int(first) + _MOST_ENGINES)
        numbers |= dict.fromkeys(range(int(first), end + 1))
    return list(numbers)


def _class_of_ipyparallel(name: str) -> Any:
    """Return a class of ipyparallel; ``()``, which is no object's type, if it is missing."""
    return getattr(sys.modules.get("ipyparallel"), name, ())


def _client_here(shell: Any) -> Any:
    """Return the client of the active view, or the only one that a notebook's name refers to."""
    if "ipyparallel" not in sys.modules:
        line = how_to_install("ipyparallel")
        raise ClusterError(f"--on needs a running cluster: {line}, then {_HOW}")
    if sys.modules["ipyparallel"].version_info[0] < 8:
        raise ClusterError("--on needs ipyparallel 8 or newer")
    view = getattr(shell.magics_manager.registry.get("ParallelMagics"), "view", None)
    if view is not None and not _is_closed(view.client):
        return view.client
    client_type = _class_of_ipyparallel("Client")
    clients: dict[int, Any] = {}
    for value in list(shell.user_ns.values()):
        if type(value) is client_type and not _is_closed(value):
            clients[id(value)] = value
    if len(clients) > 1:
        raise ClusterError(
            "--on: there are several clusters; name a view, such as view = rc[:] and --on view"
        )
    if not clients:
        raise ClusterError(f"--on needs a running cluster: {_HOW}")
    return next(iter(clients.values()))


def _is_closed(client: Any) -> bool:
    """Return True for a client whose connection to the cluster was closed."""
    return getattr(client, "_closed", False) is True
