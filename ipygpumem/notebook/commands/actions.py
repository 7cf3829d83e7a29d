"""What the magics do beyond experiments: each action takes the session and returns reports to show."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError

from ipygpumem.errors import ExperimentError, said
from ipygpumem.freeing import reclaim
from ipygpumem.freeing.steps import steps_that_free
from ipygpumem.model import ReclaimStep
from ipygpumem.notebook.experiments.experiment import Experiment
from ipygpumem.notebook.session import Session
from ipygpumem.objects.inventory.survey import roles_of_objects
from ipygpumem.reconcile import findings
from ipygpumem.reports import content
from ipygpumem.reports.status import status_report
from ipygpumem.units import format_bytes, format_change, format_seconds

_Action = Callable[[Session], list[content.Report]]


def _alone(action: _Action) -> Callable[[Session, list[str]], list[content.Report]]:
    """Let a command that has no options say so."""

    @functools.wraps(action)
    def call(session: Session, words: list[str]) -> list[content.Report]:
        if words:
            raise UsageError(f"%gpumem: {content.clean(words[0])!r} is one word too many: this command has no options")
        return action(session)

    return call


@_alone
def switch_on(session: Session) -> list[content.Report]:
    """Show the line after each cell from now on."""
    return _switch(session, on=True)


@_alone
def switch_off(session: Session) -> list[content.Report]:
    """Show no line after cells any more; measuring goes on."""
    return _switch(session, on=False)


def _switch(session: Session, *, on: bool) -> list[content.Report]:
    session.config.report = on
    return [content.note(f"the report after each cell is {'on' if on else 'off'}")]


@_alone
def status(session: Session) -> list[content.Report]:
    """Return what is on, what is open, and each device's memory now."""
    config = session.config
    lines_shown = "off" if not config.report else "on, quiet" if config.quiet else "on"
    headline = (
        f"ipygpumem · reports {lines_shown} · frames released after: {config.release_frames} · "
        f"{content.count(len(session.history), 'cell')} and "
        f"{content.count(len(session.experiments), 'experiment')} measured"
    )
    lines = [_describe(experiment) for experiment in session.open] or ["no experiment is open"]
    found = reconcile(session)
    lines += [f"{probe} cannot be read: {error}" for probe, error in session.meter.failures.items()]
    lines += [f"{source} cannot be told: {error}" for source, error in found.failures.items()]
    return [status_report(headline, lines, found.readings.values(), found.reconciliations)]


def reconcile(session: Session) -> findings.Findings:
    """Return each device's memory now, and the parts that it consists of."""
    read = functools.partial(session.meter.now, detail=True)
    return findings.reconcile(read, lambda: findings.storages_of(roles_of_objects()))


def experiment_status(session: Session, words: list[str]) -> list[content.Report]:
    """Return what is open and what it costs so far."""
    if not session.open:
        return [content.note("no experiment is open")]
    return [content.note(_describe(experiment)) for experiment in session.open]


def _describe(experiment: Experiment) -> str:
    parts = [f"experiment {experiment.name}", format_seconds(experiment.elapsed_seconds)]
    parts += content.usage_parts(experiment.usage())
    names = experiment.scope.own_names()
    parts.append(f"names: {content.name_list(names) or 'none yet'}")
    waiting = experiment.waiting()
    if waiting:
        held = ", ".join(f"{item.name} {format_bytes(item.size_bytes)}" for item in waiting)
        parts.append(f"waiting to be restored: {held}")
    return " · ".join(parts)


@_alone
def free(session: Session) -> list[content.Report]:
    """Give memory back now: the frames of stored tracebacks, garbage, caches."""
    before = session.meter.now()
    steps: list[ReclaimStep] = []
    session.outputs.forget_hidden()
    notes: list[str] = []
    tracebacks_step = ("tracebacks", lambda: notes.extend(session.recoveries.release_stored_tracebacks()))
    reclaim.run_steps(session.meter, [tracebacks_step, *steps_that_free(session.garbage)], steps)
    after = session.meter.now()
    reclaimed = reclaim.fallen(reclaim.current(before), reclaim.current(after))
    return [content.freed_report("came back", steps, reclaimed, notes)]


@_alone
def preload(session: Session) -> list[content.Report]:
    """Create the context of torch's accelerator now, so that no cell pays for it, and say what it costs.

    Raises:
        ExperimentError: torch is not installed, or its accelerator does not work.
    """
    if importlib.util.find_spec("torch") is None:
        raise ExperimentError("%gpumem preload needs torch, which is not installed")
    torch: Any = importlib.import_module("torch")
    name = next((name for name in ("cuda", "xpu", "mps") if _is_available(torch, name)), None)
    if name is None:
        return [content.note("torch sees no accelerator here: there is nothing to preload")]
    started = time.perf_counter()
    span = session.meter.start()
    try:
        torch.ones(1, device=name).add_(1).cpu()
    except RuntimeError as error:
        session.meter.stop(span)
        raise ExperimentError(f"{name} cannot be used ({said(error)})") from None
    costs = []
    for usage in session.meter.stop(span):
        if usage.device == "cpu":
            costs.append(f"RAM {format_change(usage.delta_bytes)}")
        elif usage.used_bytes is not None:
            costs.append(f"{usage.device} {format_bytes(usage.used_bytes)} used by all")
    text = f"{name} is ready · {format_seconds(time.perf_counter() - started)} · {' · '.join(costs)}"
    return [content.note(text)]


def _is_available(torch: Any, name: str) -> bool:
    module = getattr(torch.backends, "mps", None) if name == "mps" else getattr(torch, name, None)
    return module is not None and bool(module.is_available())


def record(session: Session, words: list[str]) -> list[content.Report]:
    """Do what ``%gpumem record`` asks for."""
    from ipygpumem.notebook.commands import postmortem  # loading the extension must stay fast

    return postmortem.record(session, words)


def postmortem(session: Session, words: list[str]) -> list[content.Report]:
    """Return the report that ``%gpumem postmortem`` asks for."""
    from ipygpumem.notebook.commands import postmortem  # loading the extension must stay fast

    return postmortem.postmortem(session, words)
