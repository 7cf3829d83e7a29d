"""Runs work in a forked child process: nothing that it does reaches this one, and plain data comes back.

The child has the forking thread alone, and never returns from here: it ends by ``os._exit``, without destructors,
``atexit`` and finally blocks of its parent. What it prints comes through the pipe as well.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import faulthandler
import gc
import getpass
import io
import marshal
import os
import random
import selectors
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil

from ipygpumem.errors import EstimateError
from ipygpumem.estimating.packing import frames_to, packed, traceback_of, unpacked
from ipygpumem.estimating.unsharing import unshare
from ipygpumem.estimating.users_line import users_line
from ipygpumem.introspect import instance_dict
from ipygpumem.objects import interrupts
from ipygpumem.probes.host import available_bytes
from ipygpumem.units import format_bytes

_TICK_SECONDS, _START_SECONDS, _LAST_WORDS_SECONDS = 0.1, 30.0, 2.0
_LENGTH_BYTES = 8
_STOP = getattr(signal, "SIGRTMIN", signal.SIGUSR2)
"""A signal that users' code has no handler for."""
_DIES_WITH_PARENT = 1
"""prctl's PR_SET_PDEATHSIG."""


class UnfitError(Exception):
    """No child can do the work; says why."""


class Front:
    """What a front-end does about a child; a script's does nothing."""

    def detach(self, show: Callable[[Any], None]) -> None:
        """In the child: use no socket and no display of the parent, but ``show``, which takes plain data."""

    def show(self, shown: Any) -> None:
        """In the parent: show what the child gave to ``show``."""


def run(work: Callable[[], Any], probe: Callable[[], None], *, timeout_seconds: float, front: Front) -> Any:
    """Return what ``work`` returns in a child; it must be plain data.

    Args:
        work: may do anything: its errors are raised here, with their lines.
        probe: raises in a child that is not fit for the work.
        timeout_seconds: the child is ended then, and its line named.
        front: takes the child off the front-end, and shows what it displays.

    Raises:
        UnfitError: there is no child, or ``probe`` found it unfit. Nothing of ``work`` has run then.
        EstimateError: the child was stopped, or died.
    """
    if not hasattr(os, "fork"):
        raise UnfitError("this system has no fork")
    __tracebackhide__ = True  # of the errors of ``work``
    here, dice = os.getpid(), random.getstate()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # whatever the user has put there
            stream.flush()  # or the child would print it again
    reader, writer = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads that the child will not have
            pid = os.fork()
        if pid == 0:
            _be_child(_Channel(writer), work, probe, front, dice)
    except OSError as error:
        os.close(reader)
        raise UnfitError(f"no child process could be made: {error.strerror}") from None
    finally:
        if os.getpid() != here:
            os._exit(1)
        os.close(writer)
    child = _Child(pid, reader, timeout_seconds, front)
    try:
        return child.result()
    finally:
        child.end()


# -- in the child ------------------------------------------------------------------------------------------------------


class _Channel:
    """The child's end of the pipe: whole messages, from any of its threads."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._last: bytes | None = None

    def send(self, name: str, value: Any) -> None:
        message = _framed(name, value)
        with self._lock:
            self._write(message)
        if self._last is not None:
            self._end()

    def stop(self, _: int, frame: Any) -> None:
        """Say which line runs, and end: the handler of the parent's signal."""
        self._last = _framed("stopped", (users_line(frame), frames_to(frame)))
        if self._lock.acquire(blocking=False):  # else whoever sends now does it then
            self._end()

    def leave(self) -> None:
        """Send no more: this process was forked by the child, and two would write at once."""
        self._descriptor = os.open(os.devnull, os.O_WRONLY)
        self._lock = threading.Lock()

    def _end(self) -> NoReturn:
        self._write(self._last or b"")
        os._exit(0)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]


def _framed(name: str, value: Any) -> bytes:
    data = marshal.dumps((name, value))
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


class _Text(io.TextIOBase):
    """The child's standard output or error."""

    encoding = "utf-8"

    def __init__(self, name: str, channel: _Channel) -> None:
        self._name = name
        self._channel = channel

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1 if self._name == "stdout" else 2

    def write(self, text: str) -> int:
        self._channel.send("text", (self._name, str(text)))
        return len(text)


def _be_child(
    channel: _Channel, work: Callable[[], Any], probe: Callable[[], None], front: Front, dice: Any
) -> NoReturn:
    try:
        _settle(channel, front, dice)
        try:
            with _quiet_errors():
                probe()
        except Exception as error:
            channel.send("unfit", str(error).partition("\n")[0])
        else:
            channel.send("ready", None)
            channel.send("done", work())
    except BaseException as error:  # SystemExit as well: this process answers, and ends
        channel.send("error", packed(error))
    finally:
        os._exit(0)


def _settle(channel: _Channel, front: Front, dice: Any) -> None:
    """Cut what ties this process to its parent, but for the channel."""
    gc.freeze()  # what is garbage in the parent is finalised there
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it goes to all of the terminal's; the parent tells
    signal.signal(_STOP, channel.stop)
    os.setsid()  # what it starts ends with it
    os.register_at_fork(after_in_child=channel.leave)
    unshare()
    random.setstate(dice)  # which a fork reseeds
    for name in ("stdout", "stderr"):
        text, old = _Text(name, channel), getattr(sys, name)
        setattr(sys, name, text)
        attributes = instance_dict(old)  # handlers of logging have the old one
        if attributes is not None:
            attributes.update(write=text.write, flush=text.flush)
    sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115  # for as long as the process lives
    builtins.input = getpass.getpass = _refuse_questions
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")  # rather this one than the parent
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    front.detach(lambda shown: channel.send("shown", shown))


@contextlib.contextmanager
def _quiet_errors() -> Iterator[None]:
    """Keep what C++ and Python say of an abort off the screen."""
    was_enabled = faulthandler.is_enabled()
    faulthandler.disable()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
        if was_enabled:
            faulthandler.enable()


def _refuse_questions(*_: Any, **__: Any) -> NoReturn:
    raise EstimateError(f"an estimate cannot ask: input in {users_line()}")


# -- in the parent -----------------------------------------------------------------------------------------------------


class _Child:
    """The parent's view of the child: takes what it sends, and sees to its limits."""

    def __init__(self, pid: int, reader: int, timeout_seconds: float, front: Front) -> None:
        self._pid = pid
        self._reader = reader
        self._front = front
        self._timeout_seconds = timeout_seconds
        self._started = time.monotonic()
        self._ready = False
        self._looked = 0.0
        self._most_bytes = 0
        self._status: int | None = None
        self._data = bytearray()

    def result(self) -> Any:
        """Return what the child's work returns, or raise its error."""
        __tracebackhide__ = True
        self._most_bytes = self._rss_bytes() + available_bytes() * 3 // 4
        with interrupts.noted() as struck:
            for name, value in self._messages():
                if struck:
                    self._interrupted(name, value)
                if name == "done":
                    return value
                self._receive(name, value)
                self._see_to_limits()
        raise self._died()

    def _messages(self) -> Iterator[tuple[str, Any]]:
        """Yield what the child sends, and a tick now and then; ends with the child."""
        data = self._data
        with selectors.DefaultSelector() as selector:
            selector.register(self._reader, selectors.EVENT_READ)
            while True:
                # A child of the child may hold the pipe open: its own end counts.
                ended = self._has_ended()
                if selector.select(0 if ended else _TICK_SECONDS):
                    got = os.read(self._reader, 1 << 16)
                    data += got
                    while (length := int.from_bytes(data[:_LENGTH_BYTES], "big") + _LENGTH_BYTES) <= len(data):
                        message = marshal.loads(bytes(data[_LENGTH_BYTES:length]))  # noqa: S302  # our own child's
                        del data[:length]
                        yield message
                    if not got and ended:
                        return
                    if not got:
                        time.sleep(_TICK_SECONDS / 10)
                elif ended:
                    return
                yield "tick", None

    def _has_ended(self) -> bool:
        if self._status is None:
            try:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has waited for it
                pid, status = self._pid, 0
            self._status = status if pid else None
        return self._status is not None

    def _rss_bytes(self) -> int:
        try:
            return int(psutil.Process(self._pid).memory_info().rss)
        except psutil.Error:
            return 0

    def _receive(self, name: str, value: Any) -> None:
        __tracebackhide__ = True
        if name == "text":
            getattr(sys, value[0]).write(value[1])
        elif name == "shown":
            self._front.show(value)
        elif name == "ready":
            self._ready = True
        elif name == "unfit":
            raise UnfitError(value)
        elif name == "error":
            raise unpacked(value)

    def _interrupted(self, name: str, value: Any) -> NoReturn:
        __tracebackhide__ = True
        if name == "text":
            self._receive(name, value)
        raise KeyboardInterrupt().with_traceback(traceback_of(self._stop()[1]))

    def _see_to_limits(self) -> None:
        now = time.monotonic()
        if not self._ready:
            if now - self._started > _START_SECONDS:
                raise UnfitError("a forked child did not begin")
            return
        if now - self._started > self._timeout_seconds + 1:  # it stops itself where it works on tensors
            raise EstimateError(stopped_text(f"after {self._timeout_seconds:g} s", self._stop()[0]))
        if now - self._looked > _TICK_SECONDS:
            self._looked = now
            took = self._rss_bytes()
            if took > self._most_bytes:
                why = f"because it took most of the host memory that was free ({format_bytes(took)} now)"
                raise EstimateError(stopped_text(why, self._stop()[0]))

    def _stop(self) -> tuple[str, Any]:
        """Stop the child, take what it said before, and return which line ran, and what led there."""
        if not self._has_ended():
            os.kill(self._pid, _STOP)
        until = time.monotonic() + _LAST_WORDS_SECONDS
        for name, value in self._messages():
            if name == "stopped":
                return str(value[0]), value[1]
            if name in ("text", "shown"):
                self._receive(name, value)
            if time.monotonic() > until:
                break
        return "an unknown line (the child process did not answer)", []

    def _died(self) -> Exception:
        status = os.waitstatus_to_exitcode(self._status or 0)
        ending = f"died of {signal.Signals(-status).name}" if status < 0 else f"ended itself with status {status}"
        if not self._ready:
            return UnfitError(f"a forked child {ending}")
        hint = ": out of host memory?" if status == -signal.SIGKILL else ""
        return EstimateError(f"the child process that the estimate ran in {ending}{hint}")

    def end(self) -> None:
        """End the child, if it lives, and what it has started."""
        os.close(self._reader)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # none of its own is left
            os.killpg(self._pid, signal.SIGKILL)
        if not self._has_ended():
            os.kill(self._pid, signal.SIGKILL)  # it may have died before it had a group
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)


def stopped_text(why: str, line: str) -> str:
    """Return what is said of an estimate that was stopped."""
    return f"the estimate was stopped {why} in {line}"
