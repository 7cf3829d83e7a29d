"""``%%isolate``: forks a child process for a cell, shows its output, and takes back the names to
keep.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import getpass
import os
import random
import re
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, ClassVar

from IPython.core.error import UsageError

from ipygpumem.errors import describe_error
from ipygpumem.extras.isolate import child
from ipygpumem.extras.isolate.needs import why_unusable
from ipygpumem.extras.isolate.packets import Connection, load
from ipygpumem.introspect import code_lines
from ipygpumem.magics import completions
from ipygpumem.magics.experiment import patterns_of
from ipygpumem.notebook import running_cell
from ipygpumem.probes.oom_kills import Kills
from ipygpumem.report.layout import Report, note
from ipygpumem.report.words import clean
from ipygpumem.scope.bindings import Bindings
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.declarations import Options, byte_size, command, duration, option
from ipygpumem.shell.ipython.sources import bound_names
from ipygpumem.units import KIB, MIB, format_bytes, format_seconds

_PAUSE_SECONDS = 0.1
"""Time without a message after which the child process may have ended."""
_OPENMP = re.compile(r"/\S*/libgomp[-.][^/\n]*$", re.MULTILINE)
"""GNU's OpenMP; the one of LLVM and Intel handles forks itself."""
_PAUSE, _PAUSE_HARD = "omp_pause_resource_all", 2
"""Function and argument that end OpenMP's threads, from version 5 on (GCC 9)."""


@command(
    "%%isolate",
    "run a cell in a child process: "
    "it may crash, run out of memory or leak, and the kernel goes on",
    option(
        "--keep",
        "NAME",
        "names or globs that come back, separated by blanks or commas: --keep model 'loss*'",
        offers=completions.names,
        many=True,
    ),
    option(
        "--memory",
        "SIZE",
        "raise MemoryError when the cell needs more than this in addition",
        to=byte_size(minimum=64 * MIB),
    ),
    option("--time", "SECONDS", "end the cell after this time", to=duration),
    details=(
        "The cell sees all your names. Its new names and its changes end with it, except those to "
        "keep."
    ),
)
def of_cell(app: App, options: Options, cell: str) -> list[Report]:
    """Run a cell in a child process; raise its error."""
    __tracebackhide__ = True
    if sys.platform != "linux":
        reason = "other systems' libraries break in a fork"
        if sys.platform == "win32":
            reason = "Windows has no fork"
        raise UsageError(f"%%isolate works on Linux only: {reason}")
    if not cell.strip():
        raise UsageError(
            "%%isolate: the cell is empty: write the code to run below the line with %%isolate"
        )
    keep = patterns_of("%%isolate --keep", options.keep)
    reason = why_unusable(app.context.shell, cell)
    if reason:
        raise UsageError(f"%%isolate: {clean(reason)}")
    isolated = IsolatedCell(app, options)
    error = isolated.run(_with_lines_above(app, cell), keep)
    _note_ended_names(app, cell)
    app.context.display.show(isolated.notes)
    if error is not None:
        raise error from None
    return []


def _note_ended_names(app: App, cell: str) -> None:
    """Note the names that a cell bound in the child process only, for the error of a later cell."""
    shell = app.context.shell
    ended = app.experiments.ended_elsewhere
    for name in bound_names(shell, cell):
        ended.pop(name, None)
        if name not in app.context.namespace:
            remark = f"{name} ended with the child process of %%isolate: --keep {name} keeps it"
            ended[name] = (running_cell(shell), remark)


def _with_lines_above(app: App, cell: str) -> str:
    """Return the body below comments for the lines above it, so that line numbers are those of the
    cell.
    """
    if cell.lstrip().startswith("%%"):  # a cell magic must be the first line
        return cell
    running = app.context.cells.running()
    source = running[-1].source if running else ""
    above, body, _ = source.rpartition(cell.rstrip())
    lines = code_lines(above)[:-1] if body else [""]
    comments = [f"#{line}\n" for line in lines]
    return "".join(comments) + cell


class IsolatedCell:
    """A cell in a child process, as seen from the kernel's process."""

    def __init__(self, app: App, options: Options) -> None:
        self._app = app
        self._options = options
        self._shell = app.context.shell
        self.notes: list[Report] = []
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection, self._connection_of_child = map(Connection, ends)
        self._pid = 0
        """The child process; 0 before it is started."""
        self._interrupts = 0
        """Number of Ctrl-Cs so far."""
        self._is_done = False
        """True once the child process has sent all of its results."""
        self._is_late = False
        """True if ``--time`` is over."""
        self._is_loading = False
        """True while kept names are loaded."""
        self._cells_error: BaseException | None = None
        """The error of the cell."""
        self._kept_values: dict[str, object] = {}
        """The kept names that were loaded."""
        self._names_to_load_later: list[str] = []
        """Names to load once the child process has ended, the one that took too much memory last.
        """
        self._start_bytes = 0
        self._peak_bytes = 0

    def run(self, source: str, keep: list[str]) -> BaseException | None:
        """Run the cell; return its error."""
        with contextlib.ExitStack() as undo:
            values_file = undo.enter_context(_memory_file())
            stack_file = undo.enter_context(_memory_file())
            undo.enter_context(self._connection.socket)
            undo.enter_context(self._connection_of_child.socket)
            kills = Kills()
            task = child.Task(
                self._app,
                source,
                keep,
                self._options.memory,
                self._connection_of_child,
                kept=values_file,
                stack=stack_file,
                random_state=random.getstate(),
            )
            self._file = values_file
            with _interrupts_handled_by(self._pass_interrupt_on):
                self._fork(task)
                try:
                    self._handle_messages()
                finally:
                    status = self._end_child()
            if not self._is_done:
                stack_file.seek(0)
                stack = stack_file.read().decode("utf-8", "replace")
                self._cells_error = self._error_of_dead_child(status, kills, stack)
            elif self._names_to_load_later:
                self._load_later()
        self._bind_kept_names()
        return self._cells_error

    def _load_later(self) -> None:
        """Load the names again in the memory that the child process has given back."""
        failing, error = self._load_kept_names(self._names_to_load_later)
        if error is not None:
            self.notes.append(_lost_name_note(failing, describe_error(error)))
        if isinstance(error, KeyboardInterrupt):
            self._cells_error = error

    def _fork(self, task: child.Task) -> None:
        """Start the child process, which never returns from here."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the user's own
                stream.flush()
        without_threads = _pause_openmp()
        parent = os.getpid()
        # until the child process handles it
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about threads
                pid = os.fork()
        except OSError as error:
            raise UsageError(
                f"%%isolate: the system starts no child process: {describe_error(error)}"
            ) from None
        finally:
            if os.getpid() == parent:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if pid == 0:
            for library in without_threads:
                library.omp_set_num_threads(1)
            self._connection.socket.close()
            child.run(task, parent)
        self._connection_of_child.socket.close()
        with contextlib.suppress(OSError):  # it may have done so itself, and even have ended
            os.setpgid(pid, pid)
        self._pid = pid
        if self._interrupts:
            self._send_signal(signal.SIGINT)

    # -- while the child process runs ------------------------------------------------------------

    def _pass_interrupt_on(self, _number: int, _frame: FrameType | None) -> None:
        """Pass a Ctrl-C on to the child process; the second one ends it, and the loading of the
        kept names.
        """
        self._interrupts += 1
        if self._pid:
            self._send_signal(signal.SIGKILL if self._is_given_up else signal.SIGINT)
        if self._is_loading and self._is_given_up:
            raise KeyboardInterrupt

    @property
    def _is_given_up(self) -> bool:
        """True from the second Ctrl-C on."""
        return self._interrupts > 1

    def _send_signal(self, number: int) -> None:
        """Send a signal to the child process and those that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, number)

    def _has_ended(self) -> bool:
        """Return True if the child process has ended; its status can still be read."""
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return True

    def _handle_messages(self) -> None:
        """Handle the messages of the child process until it has ended or its time is over."""
        deadline = time.monotonic() + (self._options.time or float("inf"))
        while not (self._is_done or self._is_late):
            seconds = min(_PAUSE_SECONDS, deadline - time.monotonic())
            self._connection.socket.settimeout(max(0.001, seconds))
            message: tuple[Any, ...] | None = ()  # nothing came
            try:
                message = self._connection.receive()
            except TimeoutError:
                if self._has_ended():
                    break
            except OSError:
                break
            except Exception as error:  # the class of an output may exist in the child process only
                text = f"%%isolate: an output was lost: {describe_error(error)}"
                self.notes.append(note(clean(text)))
            if message:
                kind, *values = message
                self._HANDLERS[kind](self, *values)
            elif message is None:  # it is ending, or the cell has closed all files
                if self._has_ended():
                    break
                time.sleep(_PAUSE_SECONDS / 10)
            self._is_late = time.monotonic() > deadline

    def _on_started(self, rss_bytes: int) -> None:
        """Note the RSS of the child process when the cell began."""
        self._start_bytes = rss_bytes

    def _on_write(self, name: str, text: str) -> None:
        """Write printed text to a stream of this process."""
        getattr(sys, name).write(text)

    def _on_publish(self, method: str, given: dict[str, Any]) -> None:
        """Show or clear a display."""
        getattr(self._shell.display_pub, method)(**given)

    def _on_result(self, data: Any, metadata: Any) -> None:
        """Show the result of an expression, which the child process has formatted."""
        hook = sys.displayhook
        if hook is not self._shell.displayhook:  # that of %%capture
            hook(_FormattedValue(data, metadata))
            return
        hook.start_displayhook()
        hook.write_output_prompt()
        hook.write_format_data(data, metadata)
        hook.finish_displayhook()

    def _on_comm(self, kind: str, content: Any, given: dict[str, Any]) -> None:
        """Send a widget's message to the front-end."""
        kernel = self._shell.kernel
        kernel.session.send(
            kernel.iopub_socket, kind, content, parent=kernel.get_parent("shell"), **given
        )

    def _on_ask(self, kind: str, prompt: str) -> None:
        """Ask the user, and send the answer; an error is raised in the cell."""
        ask = input if kind == "input" else getpass.getpass
        try:
            with _interrupts_handled_by(signal.default_int_handler):
                answer: object = ask(prompt)
        except KeyboardInterrupt:
            self._pass_interrupt_on(signal.SIGINT, None)
            return
        except Exception as error:  # raised in the cell
            answer = error
        self._connection.send(answer)

    def _on_traceback(self, *described: Any) -> None:
        """Show an error of the cell, by the fields of its ``DescribedError``."""
        error = _rebuilt_error(*described)
        if type(error) is UsageError:
            self._shell.show_usage_error(error)
        else:
            self._shell._showtraceback(type(error), error, described[-1])

    def _on_failed(self, *described: Any) -> None:
        """Note the error that ended the cell, by the fields of its ``DescribedError``."""
        self._cells_error = _rebuilt_error(*described)

    def _on_limited(self) -> None:
        """Note that the memory guard has refused memory to the cell."""
        if self._options.memory:
            limit = format_bytes(self._options.memory)
            self.notes.append(note(f"%%isolate: the limit of {limit} (--memory) was reached"))

    def _on_kept(self, names: list[str], lost: dict[str, str]) -> None:
        """Load the names to keep. If one cannot be loaded, ask the child process to write the other
        names again.
        """
        failing, error = self._load_kept_names(names)
        if isinstance(error, MemoryError) and not self._is_given_up:
            self._names_to_load_later = [*(name for name in names if name != failing), failing]
        elif error is not None:
            lost = {**lost, failing: describe_error(error)}
        if error is not None and not self._is_given_up:
            self._kept_values = {}  # they are loaded again, because names may share objects
        self.notes += [_lost_name_note(name, why) for name, why in lost.items()]
        with contextlib.suppress(OSError):  # it has ended
            self._connection.send(failing or None, bool(self._names_to_load_later))

    def _load_kept_names(self, names: list[str]) -> tuple[str, BaseException | None]:
        """Load the values of ``names`` from the file. Return the first name that cannot be loaded,
        with its error; ``"", None`` if all were loaded.
        """
        self._kept_values = {}
        try:
            self._is_loading = True
            try:
                load(self._file, self._kept_values, len(names))
            finally:
                self._is_loading = False
        except BaseException as error:  # any of the user's classes may fail
            return names[len(self._kept_values)], error
        return "", None

    def _on_done(self, peak_bytes: int) -> None:
        """Note that the child process has sent all of its results."""
        self._is_done = True
        self._peak_bytes = peak_bytes

    _HANDLERS: ClassVar[dict[str, Callable[..., None]]] = {
        "started": _on_started,
        "write": _on_write,
        "publish": _on_publish,
        "result": _on_result,
        "comm": _on_comm,
        "ask": _on_ask,
        "traceback": _on_traceback,
        "failed": _on_failed,
        "limited": _on_limited,
        "kept": _on_kept,
        "done": _on_done,
    }
    """Methods by the kind of message that the child process sends."""

    # -- after it --------------------------------------------------------------------------------

    def _end_child(self) -> int:
        """End the child process and the processes that it has started; return its wait status."""
        status = 0
        self._send_signal(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            _, status, usage = os.wait4(self._pid, 0)
            self._peak_bytes = max(self._peak_bytes, usage.ru_maxrss * KIB - self._start_bytes)
        running = self._app.context.cells.running()
        if running:
            running[0].children.ran_in(self._peak_bytes)
        return status

    def _error_of_dead_child(self, status: int, kills: Kills, stack: str) -> BaseException:
        """Return the error of a cell whose child process did not finish it."""
        kind = "ChildProcessError"
        lines = list[str]()
        number = -os.waitstatus_to_exitcode(status)
        if self._is_late:
            kind = "TimeoutError"
            cause = f"was ended after {format_seconds(self._options.time)} (--time)"
        elif self._is_given_up:
            kind = "KeyboardInterrupt"
            cause = "was ended by the second Ctrl-C"
        elif number <= 0:
            cause = f"ended itself with exit code {-number}"
        else:
            cause = _signal_text(number, kills)
            stack_of_cell, _, _ = stack.partition(" in run_code")
            lines = re.findall(r"^  File .*", stack_of_cell, re.MULTILINE)[:-1]
        text = f"the cell's child process {cause}"
        if self._options.keep and not self._kept_values:
            text += "; no name came back"
        return _rebuilt_error(kind, kind, text, [f"{kind}: {text}", *lines])

    def _bind_kept_names(self) -> None:
        """Bind the kept names, as if the cell had done so."""
        experiments = self._app.experiments.here()
        if experiments:
            scope = experiments[-1].scope
            scope.expect_bindings(Bindings(assigned=set(self._kept_values)))
            scope.save(set(self._kept_values))
        self._app.context.namespace.update(self._kept_values)


def _memory_file() -> BinaryIO:
    """Return a file without a name, in memory."""
    return os.fdopen(os.memfd_create("isolate"), "w+b")


def _signal_text(number: int, kills: Kills) -> str:
    """Return the signal that killed a child process, and whether it came from the OOM killer."""
    names = {int(item): item.name for item in signal.Signals}
    text = f"was killed by {names.get(number, number)} ({signal.strsignal(number)})"
    if number == signal.SIGKILL and kills.since_last_call():
        memory = "the machine's memory" if kills.of_machine else "its control group's memory"
        text += f": the OOM killer ended it, because {memory} was used up"
    return text


def _lost_name_note(name: str, why: str) -> Report:
    """Return the note about a name that did not come back."""
    return note(clean(f"%%isolate --keep: {name} did not come back: {why}"))


class _FormattedValue:
    """A value that the child process has formatted."""

    def __init__(self, data: Any, metadata: Any) -> None:
        self._bundle = data, metadata

    def _repr_mimebundle_(self, **_: object) -> Any:
        return self._bundle


def _rebuilt_error(name: str, base_name: str, text: str, lines: list[str]) -> BaseException:
    """Return an error with the name, built-in base, message and traceback of one in the child
    process.
    """
    error: BaseException = UsageError(text)
    if name == "UsageError":
        return error
    base: Any = getattr(builtins, base_name)
    groups: Any = getattr(builtins, "BaseExceptionGroup", SyntaxError)  # from Python 3.11 on
    # IPython shows these two in ways of their own
    is_shown_otherwise = issubclass(base, (SyntaxError, groups))
    if is_shown_otherwise or not issubclass(base, (Exception, KeyboardInterrupt)):
        base = RuntimeError
    members = {
        "__str__": lambda self: text,
        "_render_traceback_": lambda self: lines,
        "__module__": "builtins",
    }
    made: BaseException = base.__new__(type(name, (base,), members))
    return made


@contextlib.contextmanager
def _interrupts_handled_by(handler: Any) -> Iterator[None]:
    """Handle Ctrl-C with ``handler``, in the thread that it reaches."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)


def _pause_openmp() -> list[Any]:
    """End OpenMP's idle threads, for which a child process would wait; return the libraries that
    cannot do so.

    They start again when needed.
    """
    maps = Path("/proc/self/maps").read_text("utf-8", "replace")
    paths = set(_OPENMP.findall(maps))
    libraries = [ctypes.CDLL(path) for path in paths if Path(path).exists()]
    without_pause = []
    for library in libraries:
        pause = getattr(library, _PAUSE, None)
        if pause is None:
            without_pause.append(library)
        else:
            pause(_PAUSE_HARD)
    return without_pause
