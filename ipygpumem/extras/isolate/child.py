"""Runs a cell in the forked child process; never returns to the kernel's code."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import ctypes
import faulthandler
import functools
import gc
import getpass
import io
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from ipygpumem.extras.isolate.packets import Connection, dump
from ipygpumem.introspect import mro_of, name_of, type_name
from ipygpumem.probes.host import rss_bytes
from ipygpumem.probes.own_limits import figure
from ipygpumem.scope.ownable import is_ownable
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.parsing import parse


@dataclass
class Task:
    """A cell for the child process, and its connections to the kernel."""

    app: App
    source: str
    keep: Sequence[str]
    memory_bytes: int | None
    connection: Connection
    kept: BinaryIO
    """File for the kept names."""
    stack: BinaryIO
    """File for the Python stack at a fatal signal."""
    random_state: Any
    """The state of Python's random generator, which a fork reseeds."""


def run(task: Task, parent: int) -> NoReturn:
    """Run the cell, send its outputs and names, and end this process."""
    own = os.getpid()
    try:
        _separate(task, parent)
        _run(task, own)
    except BaseException as error:  # the kernel's code must not go on in this process
        with contextlib.suppress(BaseException):
            task.connection.send("failed", *_described(error, traceback.format_exc().splitlines()))
            task.connection.send("done", 0)
    finally:
        os._exit(0)


def _separate(task: Task, parent: int) -> None:
    """Make this process independent of the kernel's sockets, threads and signals."""
    os.setpgid(0, 0)
    # PR_SET_PDEATHSIG: it ends with the kernel's process
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    with contextlib.suppress(OSError):  # the OOM killer must choose this process, not the kernel's
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTTIN, signal.SIGTTOU):  # this process is no terminal's foreground
        signal.signal(number, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable(task.stack, all_threads=False)
    random.setstate(task.random_state)
    gc.freeze()  # the kernel's garbage, whose finalizers must not run here
    asyncio._set_running_loop(None)
    asyncio.set_event_loop(asyncio.new_event_loop())


def _run(task: Task, own: int) -> None:
    app, shell, send = task.app, task.app.context.shell, task.connection.send
    before, errors = dict(shell.user_ns), _Errors(task)
    _redirect(task, errors)
    if task.memory_bytes is not None:
        private_bytes = figure(Path("/proc/self/status").read_bytes(), b"\nRssAnon:")
        line = f"guard on --limit {private_bytes + task.memory_bytes}B"
        guard, options = parse(app.commands, "%gpumem", line)
        guard.run(app, options)
    send("started", rss_bytes())
    span = app.context.meter.span()
    result = shell.run_cell(task.source, store_history=False)
    late: list[BaseException] = []  # an interrupt from here on must not lose the names to keep
    signal.signal(signal.SIGINT, lambda *_: late.append(KeyboardInterrupt()))
    if os.getpid() != own:  # the cell forked, and its child came here
        os._exit(0)
    peak = next(
        (usage.peak_delta_bytes for usage in span.stop() if usage.device == "cpu"),
        0,
    )
    with contextlib.suppress(OSError, ValueError):  # pages copied on write do not increase RSS
        peak = max(peak, figure(Path("/proc/self/smaps_rollup").read_bytes(), b"\nPrivate_Dirty:"))
    error = result.error_before_exec or result.error_in_exec
    final = errors.end(error)
    if any(
        cell.guarded and not cell.guarded.startswith("perhaps")
        for cell in app.context.cells.running()
    ):
        send("limited")
    if task.keep:
        _keep(task, before, failed=error is not None)
    if error is not None or late:
        send("failed", *(_described(late[0]) if error is None else final))
    for name in shell.user_ns.keys() - before.keys():  # files that the cell left open are closed
        del shell.user_ns[name]
    # what this deletes may hold locks that it shares with the kernel, which then ends this process
    before.clear()
    send("done", peak)


def _keep(task: Task, before: dict[str, Any], *, failed: bool) -> None:
    """Write the names to keep, until the kernel's process can load all of them, and send why some
    are lost.
    """
    now = task.app.context.namespace
    bound = [
        name
        for name, value in list(now.items())
        if is_ownable(name) and value is not before.get(name, now)
    ]
    names = list[str]()
    for pattern in task.keep:
        names += (
            [pattern]
            if pattern.isidentifier()
            else [name for name in bound if fnmatchcase(name, pattern)]
        )
    values = {name: now[name] for name in dict.fromkeys(names) if name in now}
    lost = {} if failed else {name: "there is no such name" for name in names if name not in values}
    while True:
        lost |= dump(task.kept, values, before)
        values = {name: value for name, value in values.items() if name not in lost}
        task.connection.send("kept", list(values), lost)
        lost = {}
        failing, is_last = task.connection.receive() or (None, True)
        if failing is None:
            return
        value = values.pop(failing)
        if is_last:  # memory does not suffice for it while this process lives
            dump(task.kept, {**values, failing: value}, before)
            return


class _Errors:
    """The errors that the cell shows; the kernel's process raises the one that ends it."""

    def __init__(self, task: Task) -> None:
        self._send, self._cells = task.connection.send, task.app.context.cells
        self._waiting: list[tuple[BaseException, list[str]]] = []
        self._depth = len(self._cells.running()) + 1

    def show(self, error: BaseException, lines: list[str]) -> None:
        """Show an error of an inner cell now, and any other when the next one comes: it may end the
        cell.
        """
        waiting = [*self._waiting, (error, lines)]
        self._waiting = [] if len(self._cells.running()) > self._depth else [waiting.pop()]
        for earlier, its in waiting:
            self._send("traceback", *_described(earlier, its))

    def end(self, error: BaseException | None) -> tuple[str, str, str, list[str]]:
        """Show what the cell did not raise; return its own error."""
        shown = [lines for earlier, lines in self._waiting if earlier is error]
        for earlier, lines in () if shown else self._waiting:
            self._send("traceback", *_described(earlier, lines))
        return _described(error, *shown)


def _described(
    error: BaseException | None, lines: Sequence[str] = ()
) -> tuple[str, str, str, list[str]]:
    """Return an error's type, its nearest built-in base, its message and its traceback, for another
    process.
    """
    name, text = type_name(error), ""
    base = next(
        name_of(kind) for kind in mro_of(type(error)) if vars(builtins).get(name_of(kind)) is kind
    )
    with contextlib.suppress(Exception):  # any of the user's classes may fail
        text = str(error)
    return name, base, text, list(lines) or [f"{name}: {text}"]


# -- output -------------------------------------------------------------------------------------


def _redirect(task: Task, errors: _Errors) -> None:
    """Send the cell's output to the kernel's process instead of its sockets."""
    shell, send = task.app.context.shell, task.connection.send
    for name in ("stdout", "stderr"):
        earlier = getattr(sys, name)
        stream = _Stream(name, earlier, send)
        setattr(sys, name, stream)
        if type(earlier).__module__ == "ipykernel.iostream":  # log handlers keep it
            earlier.write, earlier.flush = stream.write, stream.flush
    publisher, hook, history = shell.display_pub, shell.displayhook, shell.history_manager

    def publish(data: Any, metadata: Any = None, source: Any = None, **more: Any) -> None:
        send("publish", "publish", {"data": data, "metadata": metadata, **more})

    publisher.publish = publish
    publisher.clear_output = lambda wait=False: send("publish", "clear_output", {"wait": wait})
    hook.start_displayhook = hook.write_output_prompt = hook.finish_displayhook = lambda: None
    hook.write_format_data = lambda data, metadata=None: send("result", data, metadata)
    sys.displayhook = hook
    shell.execution_count = hook.prompt_count  # IPython 9 has counted the cell already
    if history.input_hist_parsed:
        # it decides whether a semicolon hides the result
        history.input_hist_parsed[-1] = task.source
    history.enabled = False
    history.store_inputs = history.store_output = lambda *_: None
    shell._showtraceback = lambda kind, error, lines: errors.show(error, lines)
    shell.show_usage_error = lambda error: errors.show(error, [])
    shell.loop_runner = asyncio.run
    builtins.input, getpass.getpass = (
        _asking(task.connection, kind) for kind in ("input", "getpass")
    )
    if hasattr(shell, "kernel"):
        shell.kernel.session.send = functools.partial(_pass_on, send)


def _pass_on(
    send: Callable[..., None], stream: Any, kind: Any, content: Any = None, *_: Any, **given: Any
) -> None:
    """Send a message of a widget, instead of the kernel's session."""
    if isinstance(kind, str) and kind.startswith("comm_"):
        more = {name: given.get(name) for name in ("metadata", "ident")}
        send(
            "comm",
            kind,
            content,
            {**more, "buffers": [bytes(item) for item in given.get("buffers") or ()]},
        )


def _asking(connection: Connection, kind: str) -> Callable[..., Any]:
    """Return a function that asks the user in the kernel's process."""

    def ask(prompt: object = "", *_: Any, **__: Any) -> Any:
        connection.send("ask", kind, str(prompt))
        answer = (connection.receive() or (EOFError(),))[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return ask


class _Stream(io.TextIOBase):
    """Text stream that sends what is written to the kernel's process."""

    encoding = "utf-8"

    def __init__(self, name: str, earlier: Any, send: Callable[..., None]) -> None:
        self._name, self._earlier, self._send = name, earlier, send

    def write(self, text: str) -> int:
        """Send text."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._send("write", self._name, text)
        return len(text)

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Return True if the kernel's own stream is a terminal."""
        return bool(self._earlier.isatty())

    def fileno(self) -> int:
        """Return the file descriptor that processes started by the cell write to."""
        return 1 if self._name == "stdout" else 2
