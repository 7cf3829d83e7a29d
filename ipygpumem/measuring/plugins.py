"""Measures with probes that others wrote, which cannot harm a cell.

Such a probe may raise, hang, or answer nonsense. Each has a thread of its own, which makes it and asks it; the meter
waits for a short time at most, and what comes is checked. Packages offer probes as entry points of the group
``ipygpumem.probes`` (https://packaging.python.org/specifications/entry-points).
"""

from __future__ import annotations

import functools
import os
import queue
import re
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, get_args

from ipygpumem.errors import ProbeError
from ipygpumem.introspect import text_of, type_name
from ipygpumem.measuring.meter import Meter
from ipygpumem.measuring.worker import leave_signals_to_others
from ipygpumem.model import Method, Reading
from ipygpumem.probes.accelerators import TORCH_DEVICES
from ipygpumem.probes.pools import POOLS

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

SETTLE_SECONDS = 0.5
"""The longest that the first span waits for that look."""
GROUP = "ipygpumem.probes"

_OWN = TORCH_DEVICES | POOLS.keys() | {"cpu"}
_NAME = re.compile(r"[A-Za-z][\w-]*")
_SECONDS = 0.5
"""A boundary waits no longer for one probe."""
_MOST_LATE = 3
"""A probe that was late so often is asked no more: every cell would wait for it."""


class PluginProbe:
    """A probe of others', behind the protocol of ours.

    Args:
        name: its devices are called so, or begin with it and a colon.
        make: makes the probe; it runs in the probe's thread, so that a slow import makes no cell wait.

    Raises:
        ProbeError: the name is none for a device, or is one of ours.
    """

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        if type(name) is not str or not _NAME.fullmatch(name) or name in _OWN:
            raise ProbeError(f"a probe needs a name of letters and digits for its devices, other than {_listed(_OWN)}")
        self.name = name
        self.sampled = False
        self._make = make
        self._late = 0
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        arguments = (self.name, self._make, self._questions)
        threading.Thread(target=_serve, args=arguments, name="ipygpumem-probe", daemon=True).start()
        self._last = self._put("make")

    def _put(self, what: str, **how: bool) -> _Question:
        question = _Question(what, how)
        self._questions.put(question)
        return question

    def answer(self, what: str = "read", seconds: float = _SECONDS, **how: bool) -> Any:
        """Return what the probe answers.

        Raises:
            ProbeError: it raised, answered nonsense, or has not answered in time.
        """
        if os.getpid() != self._pid:  # its thread stayed in the parent process
            self._begin()
        if self._late >= _MOST_LATE:
            raise ProbeError(f"it was too slow {_MOST_LATE} times and is asked no more")
        if not self._last.done.is_set():
            raise ProbeError("it has not answered yet")
        self._last = question = self._put(what, **how)
        if not question.done.wait(seconds):
            self._late += 1
            raise ProbeError(f"it took longer than {seconds:g} s")
        if question.error:
            raise ProbeError(question.error)
        return question.answer

    def check(self, seconds: float) -> None:
        """Read once, and wait longer than a cell would.

        Raises:
            ProbeError: no reading came that may be true.
        """
        self._last.done.wait(seconds)
        self.answer(seconds=seconds, detail=True, peak=True)

    def read(self, *, detail: bool = False, peak: bool = True) -> tuple[Reading, ...]:
        """Return what the probe reads (``ProbeError`` if that fails or makes no sense)."""
        self.sampled, readings = self.answer("read", detail=detail, peak=peak)
        return readings  # type: ignore[no-any-return]  # they were checked

    def glance(self) -> tuple[Reading, ...]:
        """Return nothing: a cell that runs must not wait for a probe that we do not know."""
        return ()

    def rearm(self) -> None:
        """Let the probe begin a new peak."""
        self.answer("rearm")

    def close(self) -> None:
        """Let the probe and its thread end, and wait for neither."""
        self._put("close")
        self._questions.put(None)


class _Question:
    """What the thread of a probe is asked, and what it answers."""

    def __init__(self, what: str, how: dict[str, bool]) -> None:
        self.what = what
        self.how = how
        self.answer: Any = None
        self.error = ""
        self.done = threading.Event()


def _serve(name: str, make: Callable[[], Any], questions: queue.SimpleQueue[_Question | None]) -> None:
    """Make the probe and answer what is asked, until None comes."""
    leave_signals_to_others()
    probe, broken = None, ""
    while (question := questions.get()) is not None:
        try:
            if question.what == "make":
                probe = make()
            elif not broken:
                question.answer = _ask(name, probe, question)
        except BaseException as error:  # also SystemExit: it is told, and the thread goes on
            question.error = f"{type_name(error)}: {_text(error)}" if type(error) is not ProbeError else str(error)
        if question.what == "make":
            broken = question.error
        question.error = question.error or broken
        question.done.set()


def _ask(name: str, probe: Any, question: _Question) -> Any:
    if question.what == "read":
        readings = tuple([_checked(name, reading) for reading in probe.read(**question.how)])
        return bool(getattr(probe, "sampled", False)), readings
    wanted = getattr(probe, question.what, None)
    return wanted() if wanted is not None else None  # a probe need not have more than ``read``


def _checked(name: str, reading: Any) -> Reading:
    """Return ``reading`` if it may be true (``ProbeError`` if it may not)."""
    if type(reading) is not Reading:
        raise ProbeError(f"read() must return Readings, not {type_name(reading)}")
    device, current, peak, method, total, *more, note = reading
    if type(device) is not str or not (device == name or device.startswith(f"{name}:")):
        raise ProbeError(f"its devices must be called {name}, or {name}:0 and so on")
    if any(type(size) is not int or size < 0 for size in (current, peak)):
        raise ProbeError("bytes must be whole numbers from 0 on")
    if any(size is not None and (type(size) is not int or size < 0) for size in (total, *more)):
        raise ProbeError("bytes must be None or whole numbers from 0 on")
    if method not in get_args(Method) or type(note) is not str:
        raise ProbeError(f"method must be one of {_listed(get_args(Method))}, and note a text")
    if peak < current or (total is not None and current > total):
        raise ProbeError("a peak cannot be below what is in use, nor that above the total")
    return reading


def _text(error: BaseException) -> str:
    try:
        return text_of(str(error)).partition("\n")[0]
    except Exception:  # whatever its own __str__ raises
        return "it cannot be said"


def _listed(words: Iterable[str]) -> str:
    return ", ".join(sorted(words))


def find_installed(meter: Meter) -> threading.Event:
    """Let ``meter`` look for installed probes, in its thread: to read what all packages say takes 40 ms, and a MiB.

    Returns:
        What is set once that is done: the first span waits for it, or it would be charged with that.
    """
    settled = threading.Event()

    def look() -> None:
        from importlib.metadata import entry_points

        try:
            for entry in entry_points(group=GROUP):
                add_installed(meter, entry.name, functools.partial(_made, entry))
        except Exception as error:  # a package whose files are broken
            meter.failures[GROUP] = f"{type_name(error)}: {_text(error)}"
        meter.worker.remove(look)
        settled.set()

    meter.worker.add(look)
    return settled


def _made(entry: EntryPoint) -> Any:
    return entry.load()()


def add_installed(meter: Meter, name: str, make: Callable[[], Any]) -> None:
    """Measure with an installed probe; one that cannot be taken is named among the meter's failures."""
    try:
        meter.add(PluginProbe(name, make))
    except ProbeError as error:
        meter.failures[name] = str(error)
