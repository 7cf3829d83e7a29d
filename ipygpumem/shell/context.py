"""The context of one shell: the services that all of its components share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ipygpumem.heap.live.garbage import Garbage
from ipygpumem.meter.meter import Meter
from ipygpumem.probes import Probe
from ipygpumem.probes.host import HostProbe
from ipygpumem.probes.outside import OutsideProbe
from ipygpumem.probes.pools import finder_of_probes
from ipygpumem.shell.cell import CellStack
from ipygpumem.shell.config import IPyGpuMem
from ipygpumem.shell.display import Display
from ipygpumem.shell.error_isolation import ErrorIsolation


@dataclass(frozen=True, eq=False, repr=False)
class ShellContext:
    """IPython's shell, our options, and the services that measure, collect garbage and show
    reports.
    """

    shell: Any
    config: IPyGpuMem
    meter: Meter
    garbage: Garbage
    cells: CellStack
    display: Display
    isolation: ErrorIsolation

    @property
    def namespace(self) -> dict[str, Any]:
        """The notebook's names."""
        return self.shell.user_ns  # type: ignore[no-any-return]  # IPython is untyped


def context_for(
    shell: Any,
    config: IPyGpuMem,
    isolation: ErrorIsolation,
    host: HostProbe,
    probes: Sequence[Probe],
) -> ShellContext:
    """Return the context of a shell that measures with ``probes``; without any, with the host and
    all accelerators.
    """
    find_more = None if probes else finder_of_probes()
    meter = Meter(probes or [host, OutsideProbe()], find_more=find_more)
    display = Display(shell, config)
    return ShellContext(shell, config, meter, Garbage(), CellStack(), display, isolation)
