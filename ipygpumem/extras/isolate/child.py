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
from typing import Any, BinaryIO, NamedTuple, NoReturn

from ipygpumem.extras.isolate.packets import Connection, dump
from ipygpumem.introspect import mro_of, name_of, type_name
from ipygpumem.meter.meter import Span
from ipygpumem.probes.host import rss_bytes
from ipygpumem.probes.own_limits import figure
from ipygpumem.scope.ownable import is_ownable
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.parsing import parse


@dataclass
class Task:
    """A cell for the child process, and its connections to the kernel."""

    app: App
    """The extension."""
    source: str
    """The code of the cell."""
    keep: Sequence[str]
    """The names whose values the kernel gets."""
    memory_bytes: int | None
    """The user's ``--memory``; None without one."""
    connection: Connection
    """Sends messages to the kernel's process, and receives the user's answers."""
    kept: BinaryIO
    """File for the kept names."""
    stack: BinaryIO
    """File for the Python stack at a fatal signal."""
    random_state: Any
    """The state of Python's random generator, which a fork reseeds."""


def run(task: Task, parent: int) -> NoReturn:
    """Run the cell, send its outputs and names, and end this process.

    Args:
        task: the cell.
        parent: the number of the kernel's process.
    """
    pid = os.getpid()
    try:
        _become_independent(task, parent)
        _run_cell_here(task, pid)
    except BaseException as error:  # the kernel's code must not go on in this process
        with contextlib.suppress(BaseException):
            lines = traceback.format_exc().splitlines()
            task.connection.send("failed", *_described(error, lines))
            unknown_peak_bytes = 0
            task.connection.send("done", unknown_peak_bytes)
    finally:
        os._exit(0)


def _become_independent(task: Task, parent: int) -> None:
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


def _run_cell_here(task: Task, pid: int) -> None:
    """Run the cell in this process, whose number is ``pid``, and send its outputs and results."""
    app = task.app
    shell = task.app.context.shell
    before = dict(shell.user_ns)
    errors = _Errors(task)
    _redirect(task, errors)
    if task.memory_bytes is not None:
        _limit_memory(app, task.memory_bytes)
    task.connection.send("started", rss_bytes())
    span = app.context.meter.span()
    result = shell.run_cell(task.source, store_history=False)
    late_interrupts: list[BaseException] = []
    """Interrupts from here on, which must not lose the names to keep."""
    signal.signal(signal.SIGINT, lambda *_: late_interrupts.append(KeyboardInterrupt()))
    if os.getpid() != pid:  # the cell forked, and its child came here
        os._exit(0)
    peak_bytes = _peak_bytes(span)
    error = result.error_before_exec or result.error_in_exec
    _send_results(task, before, errors, error, late_interrupts)
    for name in shell.user_ns.keys() - before.keys():  # files that the cell left open are closed
        del shell.user_ns[name]
    # Before "done", after which the kernel kills this process: the values that this deletes may
    # hold a lock that it shares with the kernel, such as that of a queue, and release it now.
    before.clear()
    task.connection.send("done", peak_bytes)


def _send_results(
    task: Task,
    before: dict[str, Any],
    errors: _Errors,
    error: BaseException | None,
    late_interrupts: Sequence[BaseException],
) -> None:
    """Send the names to keep and the cell's error.

    Args:
        task: the cell.
        before: the notebook's names before the cell.
        errors: the errors that the cell has shown.
        error: the error that ended it.
        late_interrupts: interrupts after its end.
    """
    send = task.connection.send
    described = errors.end(error)
    if _is_limit_reached(task.app):
        send("limited")
    if task.keep:
        _send_kept_names(task, before, failed=error is not None)
    if error is not None:
        send("failed", *described)
    elif late_interrupts:
        send("failed", *_described(late_interrupts[0]))


def _limit_memory(app: App, memory_bytes: int) -> None:
    """Let the memory guard refuse allocations once this process has ``memory_bytes`` more private
    memory than now.
    """
    private_bytes = figure(Path("/proc/self/status").read_bytes(), b"\nRssAnon:")
    line = f"guard on --limit {private_bytes + memory_bytes}B"
    guard, options = parse(app.commands, "%gpumem", line)
    guard.run(app, options)


def _is_limit_reached(app: App) -> bool:
    """Return True if the memory guard has refused memory to the cell, or to one inside it."""
    return any(cell.errors.is_from_guard for cell in app.context.cells.running())


def _peak_bytes(span: Span) -> int:
    """Return the cell's peak of RAM; pages copied on write do not increase RSS, but count here."""
    peak_bytes = 0
    for usage in span.stop():
        if usage.device == "cpu":
            peak_bytes = usage.peak_delta_bytes
    with contextlib.suppress(OSError, ValueError):
        smaps = Path("/proc/self/smaps_rollup").read_bytes()
        peak_bytes = max(peak_bytes, figure(smaps, b"\nPrivate_Dirty:"))
    return peak_bytes


def _send_kept_names(task: Task, before: dict[str, Any], *, failed: bool) -> None:
    """Write the names to keep, and send the reasons for lost ones, until the kernel's process can
    load all of them.

    Args:
        task: the cell.
        before: the notebook's names before the cell.
        failed: the cell has failed, so that it may not have come to all of the names.
    """
    namespace = task.app.context.namespace
    names = _names_to_keep(task, before)
    values = {name: namespace[name] for name in names if name in namespace}
    lost: dict[str, str] = {}
    if not failed:
        lost = {name: "there is no such name" for name in names if name not in values}
    while True:
        lost |= dump(task.kept, values, before)
        values = {name: value for name, value in values.items() if name not in lost}
        task.connection.send("kept", list(values), lost)
        lost = {}
        # The name that the kernel's process cannot load; None if it has loaded all, or has gone.
        failing, is_last = task.connection.receive() or (None, True)
        if failing is None:
            return
        value = values.pop(failing)
        if is_last:  # memory does not suffice for it while this process lives
            dump(task.kept, {**values, failing: value}, before)
            return


def _names_to_keep(task: Task, before: dict[str, Any]) -> list[str]:
    """Return the names that ``--keep`` asks for, each once; a glob stands for names that the cell
    has bound.
    """
    namespace = task.app.context.namespace
    no_value = object()
    bound = []
    for name, value in list(namespace.items()):
        if is_ownable(name) and value is not before.get(name, no_value):
            bound.append(name)
    names: dict[str, None] = {}
    for pattern in task.keep:
        if pattern.isidentifier():
            names[pattern] = None
        else:
            names |= dict.fromkeys(name for name in bound if fnmatchcase(name, pattern))
    return list(names)


class _Errors:
    """The errors that IPython shows in this process.

    The error that ends the cell is not shown here, because the kernel's process raises it. IPython
    shows an error before ``run_cell`` returns it, so the last one waits until that is known.
    """

    def __init__(self, task: Task) -> None:
        self._send = task.connection.send
        self._cells = task.app.context.cells
        self._waiting: list[tuple[BaseException, list[str]]] = []
        """The last error with its traceback, which may be the one that ends the cell."""
        self._depth = len(self._cells.running()) + 1
        """Number of running cells in the isolated one, including itself."""

    def show(self, error: BaseException, lines: list[str]) -> None:
        """Show an error of a cell run inside the isolated one at once. An error of the isolated
        cell itself may end it, so it is shown when the next error comes.
        """
        errors = [*self._waiting, (error, lines)]
        self._waiting = []
        is_of_inner_cell = len(self._cells.running()) > self._depth
        if not is_of_inner_cell:
            self._waiting = [errors.pop()]
        for earlier, its_lines in errors:
            self._send("traceback", *_described(earlier, its_lines))

    def end(self, error: BaseException | None) -> DescribedError:
        """Return the description of the error that ended the cell; show the waiting error first if
        that is another one.
        """
        for waiting, lines in self._waiting:
            if waiting is error:
                return _described(error, lines)
        for waiting, lines in self._waiting:
            self._send("traceback", *_described(waiting, lines))
        return _described(error)


class DescribedError(NamedTuple):
    """An error in texts, for another process."""

    name: str
    """The name of its class."""
    base_name: str
    """The name of its nearest built-in base."""
    message: str
    """Its text; empty if the class fails to make one."""
    lines: list[str]
    """Its traceback as IPython shows it."""


def _described(error: BaseException | None, lines: Sequence[str] = ()) -> DescribedError:
    """Return an error in texts; without ``lines``, its traceback is one line."""
    name = type_name(error)
    message = ""
    with contextlib.suppress(Exception):  # any of the user's classes may fail
        message = str(error)
    return DescribedError(
        name, _built_in_name(error), message, list(lines) or [f"{name}: {message}"]
    )


def _built_in_name(error: BaseException | None) -> str:
    """Return the name of an error's nearest built-in base: ``ValueError`` for ``json``'s errors."""
    for kind in mro_of(type(error)):
        name = name_of(kind)
        if vars(builtins).get(name) is kind:
            return name
    return "Exception"


# -- output -------------------------------------------------------------------------------------


def _redirect(task: Task, errors: _Errors) -> None:
    """Send the cell's output to the kernel's process instead of its sockets."""
    send = task.connection.send
    shell = task.app.context.shell
    sys.stdout = _stream("stdout", sys.stdout, send)
    sys.stderr = _stream("stderr", sys.stderr, send)
    _redirect_displays(shell, send)
    _redirect_history(shell, task.source)
    shell._showtraceback = lambda kind, error, lines: errors.show(error, lines)
    shell.show_usage_error = lambda error: errors.show(error, [])
    shell.loop_runner = asyncio.run
    builtins.input = _function_that_asks(task.connection, "input")
    getpass.getpass = _function_that_asks(task.connection, "getpass")
    if hasattr(shell, "kernel"):
        shell.kernel.session.send = functools.partial(_send_widget_message, send)


def _stream(name: str, earlier: Any, send: Callable[..., None]) -> Any:
    """Return the stream that replaces ``earlier``, to which log handlers may still write."""
    stream = _OutputStream(name, earlier, send)
    if type(earlier).__module__ == "ipykernel.iostream":
        earlier.write = stream.write
        earlier.flush = stream.flush
    return stream


def _redirect_displays(shell: Any, send: Callable[..., None]) -> None:
    """Send the cell's displays and its results, in place of IPython's methods for them."""
    publisher = shell.display_pub
    hook = shell.displayhook

    def publish(data: Any, metadata: Any = None, source: Any = None, **more: Any) -> None:
        """Send a display; ``source`` is deprecated in IPython, which ignores it, too."""
        send("publish", "publish", {"data": data, "metadata": metadata, **more})

    def clear_output(wait: bool = False) -> None:
        """Send the request to clear the cell's output."""
        send("publish", "clear_output", {"wait": wait})

    def write_result(data: Any, metadata: Any = None) -> None:
        """Send the formatted value of an expression."""
        send("result", data, metadata)

    def nothing() -> None:
        """Leave the frame of a result to the kernel's process, which shows it."""

    publisher.publish = publish
    publisher.clear_output = clear_output
    hook.start_displayhook = hook.write_output_prompt = hook.finish_displayhook = nothing
    hook.write_format_data = write_result
    sys.displayhook = hook
    shell.execution_count = hook.prompt_count  # IPython 9 has counted the cell already


def _redirect_history(shell: Any, source: str) -> None:
    """Keep the cell out of the kernel's history."""
    history = shell.history_manager
    if history.input_hist_parsed:
        # it decides whether a semicolon hides the result
        history.input_hist_parsed[-1] = source
    history.enabled = False
    history.store_inputs = history.store_output = lambda *_: None


def _send_widget_message(
    send: Callable[..., None], stream: Any, kind: Any, content: Any = None, *_: Any, **given: Any
) -> None:
    """Send a message of a widget, in place of the session's ``send`` with the same arguments; drop
    other messages.
    """
    if isinstance(kind, str) and kind.startswith("comm_"):
        buffers = [bytes(item) for item in given.get("buffers") or ()]
        more = {
            "metadata": given.get("metadata"),
            "ident": given.get("ident"),
            "buffers": buffers,
        }
        send("comm", kind, content, more)


def _function_that_asks(connection: Connection, kind: str) -> Callable[..., Any]:
    """Return a function that asks the user in the kernel's process.

    Args:
        connection: the connection to that process.
        kind: ``input`` or ``getpass``.
    """

    def ask(prompt: object = "", *_: Any, **__: Any) -> Any:
        """Return the user's answer; raise the error of the kernel's function."""
        connection.send("ask", kind, str(prompt))
        answer = (connection.receive() or (EOFError(),))[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return ask


class _OutputStream(io.TextIOBase):
    """Text stream that sends all written text to the kernel's process.

    Args:
        name: ``stdout`` or ``stderr``.
        earlier: the stream that it replaces.
        send: sends a message to the kernel's process.
    """

    encoding = "utf-8"

    def __init__(self, name: str, earlier: Any, send: Callable[..., None]) -> None:
        self._name = name
        self._earlier = earlier
        self._send = send

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
