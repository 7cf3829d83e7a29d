"""Builds the services of one shell, and passes to each the services that it needs: ``App``."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from IPython import get_ipython

from ipygpumem.errors import NOT_LOADED, NotLoadedError
from ipygpumem.meter.traces import Traces
from ipygpumem.probes import Probe
from ipygpumem.probes.host import HostProbe
from ipygpumem.records import SessionRecord
from ipygpumem.shell.cell import HISTORY_LENGTH
from ipygpumem.shell.commands.declarations import Features
from ipygpumem.shell.config import IPyGpuMem, config_of
from ipygpumem.shell.context import context_for
from ipygpumem.shell.error_isolation import ErrorIsolation
from ipygpumem.shell.experiments.experiments import ExperimentManager
from ipygpumem.shell.recovery import Recovery
from ipygpumem.shell.session import Session
from ipygpumem.shell.subscribers import Subscribers


class LastLook(NamedTuple):
    """The memory that the last ``%gpumem`` has shown."""

    device_bytes: Mapping[str, int]
    """The bytes in use on each device."""
    name_bytes: Mapping[str, int]
    """The bytes that each name holds."""


class App:
    """The services of one shell.

    Args:
        shell: IPython's shell.
        config: the options.
        probes: measure the memory; without any, the host and all accelerators are measured.
        features: the commands, and the flight recorder.
        isolation: isolates our failures from user code.
    """

    def __init__(
        self,
        shell: Any,
        config: IPyGpuMem,
        probes: Sequence[Probe] = (),
        features: Features | None = None,
        isolation: ErrorIsolation | None = None,
    ) -> None:
        self._features = features or Features()
        self.commands = self._features.commands
        self.host = HostProbe(exact=config.host_peak == "kernel")
        self.context = context = context_for(
            shell, config, isolation or ErrorIsolation(), self.host, probes
        )
        self.recovery = Recovery(context)
        self.subscribers = Subscribers(shell)
        self.experiments = ExperimentManager(context, self.recovery, self.subscribers)
        self.on_cluster: list[Any] = []
        """Experiments open on engines of a cluster: objects of ``extras/cluster``."""
        self.traces = Traces(context.meter, HISTORY_LENGTH)
        self.last_look: LastLook | None = None
        """The figures of the last ``%gpumem``."""
        self.session = Session(context, self.recovery, self.experiments, self.subscribers)

    @functools.cached_property
    def recorder(self) -> Any:
        """The flight recorder, registered as a cell observer on first use."""
        recorder = self._features.recorder(self.context)
        self.session.observers = (*self.session.observers, recorder)
        return recorder

    def records(self) -> SessionRecord:
        """Return the finished cells, experiments and traces as one record."""
        return SessionRecord.of(
            self.session.history, self.experiments.finished, self.traces.finished
        )

    def close(self) -> list[str]:
        """Close all services; return the names of open experiments."""
        names = [
            experiment.name for experiment in self.experiments.open if not experiment.is_ending
        ]
        with contextlib.ExitStack() as stack:  # called in reverse, even if one fails
            if loaded := sys.modules.get("ipygpumem.heap.live.live_tensors"):
                stack.callback(loaded.stop_letting_swap)
            stack.callback(self.context.garbage.forget)
            stack.callback(self.context.meter.close)
            for observer in self.session.observers:
                stack.callback(observer.close)
            stack.callback(self.context.cells.close)
        return names


def find_app(shell: Any) -> App | None:
    """Return the ``App`` of ``shell``, or None if the extension is not loaded.

    If nothing has needed the ``App`` yet, this builds it.
    """
    config = config_of(shell)
    if config is None:
        return None
    app = config.extension.app
    return app if type(app) is App else None


def app_of(shell: Any, otherwise: str = "") -> App:
    """Return the ``App`` of ``shell``.

    Args:
        shell: IPython's shell; None in a script.
        otherwise: ends the error's message in a script: a way to do without IPython.

    Raises:
        NotLoadedError: the extension is not loaded, or there is no shell.
    """
    app = find_app(shell)
    if app is not None:
        return app
    if shell is None:
        raise NotLoadedError(
            f"this needs a notebook or IPython: run the script as ipython --ext ipygpumem "
            f"SCRIPT.py{otherwise}"
        )
    raise NotLoadedError(NOT_LOADED)


def current_app(otherwise: str = "") -> App:
    """Return the ``App`` of the current shell.

    Args:
        otherwise: ends the error's message in a script, as in ``app_of``.

    Raises:
        NotLoadedError: the extension is not loaded, or there is no shell.
    """
    return app_of(get_ipython(), otherwise)
