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
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from IPython.core.error import UsageError

from ipygpumem.errors import describe_error
from ipygpumem.extras.isolate import child
from ipygpumem.extras.isolate.needs import unusable
from ipygpumem.extras.isolate.packets import Connection, load
from ipygpumem.introspect import text_of
from ipygpumem.magics import sources
from ipygpumem.magics.experiment import patterns_of
from ipygpumem.probes.cgroup import Kills
from ipygpumem.report.layout import Report, clean, note
from ipygpumem.scope.bindings import Bindings
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.declarations import Options, byte_size, command, duration, option
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
        offers=sources.names,
        many=True,
    ),
    option(
        "--memory",
        "SIZE",
        "raise MemoryError when the cell needs more than this in addition",
        to=byte_size(least=64 * MIB),
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
        reason = (
            "Windows has no fork"
            if sys.platform == "win32"
            else "other systems' libraries break in a fork"
        )
        raise UsageError(f"%%isolate works on Linux only: {reason}")
    keep = patterns_of("%%isolate --keep", options.keep)
    if reason := unusable(app.context.shell, cell):
        raise UsageError(f"%%isolate: {clean(reason)}")
    isolated = IsolatedCell(app, options)
    error = isolated.run(_with_lines(app, cell), keep)
    app.context.display.show(isolated.notes)
    if error is not None:
        raise error from None
    return []


def _with_lines(app: App, cell: str) -> str:
    """Return the body below comments for the lines above it, so that line numbers are those of the
    cell.
    """
    running = [getattr(running.info, "raw_cell", "") for running in app.context.cells.running()]
    above, found, _ = text_of(running[-1] if running else "").rpartition(cell.rstrip())
    lines = above.splitlines() if found else [""]
    return (
        cell if cell.lstrip().startswith("%%") else "".join(f"#{line}\n" for line in lines) + cell
    )


class IsolatedCell:
    """A cell in a child process, as seen from the kernel's process."""

    def __init__(self, app: App, options: Options) -> None:
        self._app, self._options, self._shell = app, options, app.context.shell
        self.notes: list[Report] = []
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection, self._childs = map(Connection, ends)
        self._pid = self._interrupts = 0
        self._is_done = self._is_late = self._is_loading = False
        self._error: BaseException | None = None
        self._values: dict[str, object] = {}
        self._later: list[str] = []
        """Names to load once the child process has ended, the one that took too much memory last.
        """
        self._start_bytes = self._peak_bytes = 0

    def run(self, source: str, keep: list[str]) -> BaseException | None:
        """Run the cell; return its error."""
        with contextlib.ExitStack() as undo:
            kept, stack = (
                undo.enter_context(os.fdopen(os.memfd_create("isolate"), "w+b")) for _ in range(2)
            )
            undo.enter_context(self._connection.socket)
            undo.enter_context(self._childs.socket)
            kills, memory = Kills(), self._options.memory
            task = child.Task(
                self._app, source, keep, memory, self._childs, kept, stack, random.getstate()
            )
            self._file = kept
            with _interrupts_call(self._interrupted):
                self._fork(task)
                try:
                    self._follow()
                finally:
                    status = self._end()
            if not self._is_done:
                stack.seek(0)
                self._error = self._death(status, kills, stack.read().decode("utf-8", "replace"))
            elif self._later:  # in the memory that the child process has given back
                failing, error = self._load(self._later)
                if error is not None:
                    self.notes.append(_lost(failing, describe_error(error)))
                self._error = error if isinstance(error, KeyboardInterrupt) else self._error
        self._take_back()
        return self._error

    def _fork(self, task: child.Task) -> None:
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
        self._childs.socket.close()
        with contextlib.suppress(OSError):  # it may have done so itself, and even have ended
            os.setpgid(pid, pid)
        self._pid = pid
        if self._interrupts:
            self._signal(signal.SIGINT)

    # -- while the child process runs ------------------------------------------------------------

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        """Pass a Ctrl-C on to the child process; the second one ends it, and the loading of the
        kept names.
        """
        self._interrupts += 1
        if self._pid:
            self._signal(signal.SIGINT if self._interrupts == 1 else signal.SIGKILL)
        if self._is_loading and self._interrupts > 1:
            raise KeyboardInterrupt

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, number)

    def _has_ended(self) -> bool:
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return True

    def _follow(self) -> None:
        """Show the outputs until the child process has ended or its time is over."""
        deadline = time.monotonic() + (self._options.time or float("inf"))
        while not (self._is_done or self._is_late):
            self._connection.socket.settimeout(
                max(0.001, min(_PAUSE_SECONDS, deadline - time.monotonic()))
            )
            message: tuple[Any, ...] | None = ()
            try:
                message = self._connection.receive()
            except TimeoutError:
                if self._has_ended():
                    break
            except OSError:
                break
            except Exception as error:  # the class of an output may exist in the child process only
                self.notes.append(
                    note(clean(f"%%isolate: an output was lost: {describe_error(error)}"))
                )
            if message:
                getattr(self, f"_{message[0]}")(*message[1:])
            elif message is None:  # it is ending, or the cell has closed all files
                if self._has_ended():
                    break
                time.sleep(_PAUSE_SECONDS / 10)
            self._is_late = time.monotonic() > deadline

    def _started(self, rss_bytes: int) -> None:
        self._start_bytes = rss_bytes

    def _write(self, name: str, text: str) -> None:
        getattr(sys, name).write(text)

    def _publish(self, method: str, given: dict[str, Any]) -> None:
        getattr(self._shell.display_pub, method)(**given)

    def _result(self, data: Any, metadata: Any) -> None:
        hook = sys.displayhook
        if hook is not self._shell.displayhook:  # that of %%capture
            hook(_Shown(data, metadata))
            return
        hook.start_displayhook()
        hook.write_output_prompt()
        hook.write_format_data(data, metadata)
        hook.finish_displayhook()

    def _comm(self, kind: str, content: Any, given: dict[str, Any]) -> None:
        kernel = self._shell.kernel
        kernel.session.send(
            kernel.iopub_socket, kind, content, parent=kernel.get_parent("shell"), **given
        )

    def _ask(self, kind: str, prompt: str) -> None:
        try:
            with _interrupts_call(signal.default_int_handler):
                answer: object = (input if kind == "input" else getpass.getpass)(prompt)
        except KeyboardInterrupt:
            self._interrupted(signal.SIGINT, None)
            return
        except Exception as error:  # raised in the cell
            answer = error
        self._connection.send(answer)

    def _traceback(self, *described: Any) -> None:
        error = _made(*described)
        if type(error) is UsageError:
            self._shell.show_usage_error(error)
        else:
            self._shell._showtraceback(type(error), error, described[-1])

    def _failed(self, *described: Any) -> None:
        self._error = _made(*described)

    def _limited(self) -> None:
        if self._options.memory:
            limit = format_bytes(self._options.memory)
            self.notes.append(note(f"%%isolate: the limit of {limit} (--memory) was reached"))

    def _kept(self, names: list[str], lost: dict[str, str]) -> None:
        """Load the kept names; if one fails, the child process writes the rest again."""
        failing, error = self._load(names)
        if isinstance(error, MemoryError) and self._interrupts < 2:
            self._later = [*(name for name in names if name != failing), failing]
        elif error is not None:
            lost = {**lost, failing: describe_error(error)}
        if (
            error is not None and self._interrupts < 2
        ):  # they are loaded again, because names may share objects
            self._values = {}
        self.notes += [_lost(name, why) for name, why in lost.items()]
        with contextlib.suppress(OSError):  # it has ended
            self._connection.send(failing or None, bool(self._later))

    def _load(self, names: list[str]) -> tuple[str, BaseException | None]:
        """Load the kept names; return the one that fails, and its error."""
        self._values = {}
        try:
            self._is_loading = True
            try:
                load(self._file, self._values, len(names))
            finally:
                self._is_loading = False
        except BaseException as error:  # any of the user's classes may fail
            return names[len(self._values)], error
        return "", None

    def _done(self, peak_bytes: int) -> None:
        self._is_done, self._peak_bytes = True, peak_bytes

    # -- after it --------------------------------------------------------------------------------

    def _end(self) -> int:
        """End the child process and the processes that it has started; return its wait status."""
        status = 0
        self._signal(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            _, status, usage = os.wait4(self._pid, 0)
            self._peak_bytes = max(self._peak_bytes, usage.ru_maxrss * KIB - self._start_bytes)
        for cell in self._app.context.cells.running()[:1]:
            cell.children.ran_in(self._peak_bytes)
        return status

    def _death(self, status: int, kills: Kills, stack: str) -> BaseException:
        """Return the error of a cell whose child process did not finish it."""
        name, lines, number = "ChildProcessError", list[str](), -os.waitstatus_to_exitcode(status)
        if self._is_late:
            name, cause = (
                "TimeoutError",
                f"was ended after {format_seconds(self._options.time)} (--time)",
            )
        elif self._interrupts > 1:
            name, cause = "KeyboardInterrupt", "was ended by the second Ctrl-C"
        elif number <= 0:
            cause = f"ended itself with exit code {-number}"
        else:
            names = {int(item): item.name for item in signal.Signals}
            cause = f"was killed by {names.get(number, number)} ({signal.strsignal(number)})"
            lines = re.findall(r"^  File .*", stack.partition(" in run_code")[0], re.MULTILINE)[:-1]
            if number == signal.SIGKILL and kills.new():
                whose = "the machine's memory" if kills.of_machine else "its control group's memory"
                cause += f": the OOM killer ended it, because {whose} was used up"
        lost = "; no name came back" * bool(self._options.keep and not self._values)
        text = f"the cell's child process {cause}{lost}"
        return _made(name, name, text, [f"{name}: {text}", *lines])

    def _take_back(self) -> None:
        """Bind the kept names, as if the cell had done so."""
        for experiment in self._app.experiments.here()[-1:]:
            experiment.scope.note(Bindings(assigned=set(self._values)))
            experiment.scope.save(set(self._values))
        self._app.context.namespace.update(self._values)


def _lost(name: str, why: str) -> Report:
    return note(clean(f"%%isolate --keep: {name} did not come back: {why}"))


class _Shown:
    """A value that the child process has formatted."""

    def __init__(self, data: Any, metadata: Any) -> None:
        self._bundle = data, metadata

    def _repr_mimebundle_(self, **_: object) -> Any:
        return self._bundle


def _made(name: str, base_name: str, text: str, lines: list[str]) -> BaseException:
    """Return an error with the name, built-in base, message and traceback of one in the child
    process.
    """
    error: BaseException = UsageError(text)
    if name == "UsageError":
        return error
    base: Any = getattr(builtins, base_name)
    # by IPython
    shown_otherwise = (
        SyntaxError,
        getattr(builtins, "BaseExceptionGroup", SyntaxError),
    )
    if not issubclass(base, (Exception, KeyboardInterrupt)) or issubclass(base, shown_otherwise):
        base = RuntimeError
    members = {
        "__str__": lambda self: text,
        "_render_traceback_": lambda self: lines,
        "__module__": "builtins",
    }
    made: BaseException = base.__new__(type(name, (base,), members))
    return made


@contextlib.contextmanager
def _interrupts_call(handler: Any) -> Iterator[None]:
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
    paths = set(_OPENMP.findall(Path("/proc/self/maps").read_text("utf-8", "replace")))
    libraries = [ctypes.CDLL(path) for path in paths if Path(path).exists()]
    for library in libraries:
        getattr(library, _PAUSE, int)(_PAUSE_HARD)
    return [library for library in libraries if not hasattr(library, _PAUSE)]
