"""ipygpumem: notebook code with real scopes, and what every cell costs in host and GPU memory.

In a notebook: ``%load_ext ipygpumem``, then ``%%experiment``. From Python: ``experiment``,
``last``, ``history`` and ``experiments`` below, and the records in ``ipygpumem.records``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ipygpumem.api.fitting import autofit, budget, estimate, summary
    from ipygpumem.api.freeing import clear_tracebacks
    from ipygpumem.api.inventories import diff, tensors, top, why
    from ipygpumem.api.loops import track
    from ipygpumem.api.traces import Trace, export, preload, register_probe, trace, traces
    from ipygpumem.extras.expectations.expect import expect
    from ipygpumem.extras.moving.moving import offload, purge
    from ipygpumem.extras.moving.releasing import release
    from ipygpumem.extras.panel.panel import panel
    from ipygpumem.extras.peak.peak import peak
    from ipygpumem.extras.pictures import plot as plot
    from ipygpumem.extras.tracker.tracker import tracker
    from ipygpumem.fitting.reservations import allocate, leave_free
    from ipygpumem.probes.device_memory import memory
    from ipygpumem.reading import load
    from ipygpumem.shell.python import experiment, experiments, history, last, subscribe

_PLACES = {
    "api.fitting": ("autofit", "budget", "estimate", "summary"),
    "api.freeing": ("clear_tracebacks",),
    "api.inventories": ("diff", "tensors", "top", "why"),
    "api.loops": ("track",),
    "api.traces": ("Trace", "export", "preload", "register_probe", "trace", "traces"),
    "extras.expectations.expect": ("expect",),
    "extras.moving.moving": ("offload", "purge"),
    "extras.moving.releasing": ("release",),
    "extras.panel.panel": ("panel",),
    "extras.peak.peak": ("peak",),
    "extras.tracker.tracker": ("tracker",),
    "fitting.reservations": ("allocate", "leave_free"),
    "reading": ("load",),
    "shell.python": ("experiment", "experiments", "history", "last", "subscribe"),
    "probes.device_memory": ("memory",),
}
"""Public functions by module; those outside ``shell`` also work in scripts, where nothing imports
IPython.
"""

__all__ = ["load_ipython_extension", "plot", "unload_ipython_extension"]
__all__ += ["autofit", "budget", "estimate", "summary"]
__all__ += ["clear_tracebacks", "offload", "purge", "release"]
__all__ += ["diff", "panel", "peak", "tensors", "top", "track", "tracker", "why"]
__all__ += ["Trace", "expect", "export", "load", "preload", "register_probe", "trace", "traces"]
__all__ += ["allocate", "leave_free", "memory"]
__all__ += ["experiment", "experiments", "history", "last", "subscribe"]
_COMMANDS = ("free", "guard", "help", "leaks", "postmortem", "recorder", "status")
"""Commands that have no function, which users try as functions."""


def __getattr__(name: str) -> Any:
    """Import a public function on first use, so that loading the extension stays fast."""
    if name == "plot":
        return importlib.import_module("ipygpumem.extras.pictures.plot")
    place = next((place for place, names in _PLACES.items() if name in names), None)
    if place is None:
        problem = f"module {__name__!r} has no attribute {name!r}"
        if name in _COMMANDS:
            problem += f": it is a command, %gpumem {name}"
        raise AttributeError(problem)
    function = getattr(importlib.import_module(f"ipygpumem.{place}"), name)
    globals()[name] = function  # later uses find it without this function
    return function


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: Any) -> None:
    """Install the extension; IPython calls this for ``%load_ext ipygpumem``."""
    from ipygpumem.features import all_features  # reading an export needs no IPython
    from ipygpumem.shell.extension import load

    load(shell, all_features())


def unload_ipython_extension(shell: Any) -> None:
    """Remove the extension and everything it registered; open experiments are not changed."""
    from ipygpumem.shell.extension import unload  # as above

    unload(shell)
