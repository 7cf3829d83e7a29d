"""Waiting in tests, and in code of a kernel or terminal under test: a sleep would depend on the
machine.
"""

import time
from collections.abc import Callable
from pathlib import Path


def announce() -> None:
    """Say that the cell has come here, and wait for its interrupt.

    In short steps: Python notices a signal that comes just before it sleeps when the sleep is over.
    """
    print("waits here", flush=True)
    for _ in range(6000):
        time.sleep(0.1)


def until(path: str) -> None:
    """Wait until the test has made a file."""
    while not Path(path).exists():
        time.sleep(0.01)


def wait_for(condition: Callable[[], object]) -> None:
    """Wait in a test until something holds."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.005)
