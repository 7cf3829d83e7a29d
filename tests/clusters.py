"""A kernel with the extension, connected to a real local cluster of four engines."""

import inspect
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.kernel import Kernel
from tests.steps import run_cells
from tests.waiting import until


def ctrl_c(*conditions: Callable[[], bool]) -> None:
    """Give this process a Ctrl-C as soon as it waits for engines and the first condition holds,
    then the second.
    """
    main = threading.main_thread().ident

    def waits() -> bool:
        frame = sys._current_frames()[main]
        while frame is not None and not (
            frame.f_code.co_name == "wait" and frame.f_locals.get("pending")
        ):
            frame = frame.f_back
        return frame is not None

    def strike() -> None:
        for condition in conditions:
            while not (waits() and condition()):
                time.sleep(0.05)
            time.sleep(0.2)
            os.kill(os.getpid(), 2)

    threading.Thread(target=strike, daemon=True).start()


START = textwrap.dedent(
    """\
    import ipyparallel
    cluster = ipyparallel.Cluster(n={number}, log_level=50, profile_dir={folder!r})
    rc = cluster.start_and_connect_sync(activate=True)"""
)
ID = "get_ipython().kernel.engine_id"
CTRL_C = (
    "from __future__ import annotations\nimport os, sys, threading, time\n"
    + inspect.getsource(ctrl_c)
)
UNTIL = "import time\nfrom pathlib import Path\n" + inspect.getsource(until)
"""Cells that define them, the latter on an engine."""


def start_cluster(kernel: Kernel, folder: Path, number: int = 4) -> None:
    """Start a cluster from a notebook, with its files in ``folder``, and wait for its engines."""
    run_cells(kernel, START.format(number=number, folder=str(folder)))
    assert kernel.value("len(rc.ids)") == number


def on_engines(kernel: Kernel, expression: str) -> list[Any]:
    return list(kernel.value(f"rc[:].apply_sync(eval, {expression!r})"))


def last_record(kernel: Kernel) -> dict[str, Any]:
    last_experiment: dict[str, Any] = kernel.value(
        "__import__('ipygpumem').experiments()[-1].to_dict()"
    )
    return last_experiment
