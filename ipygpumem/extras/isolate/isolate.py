"""``%%isolate``: forks a child process for a cell, shows its output, and takes back the names to
keep.
"""

from __future__ import annotations

import builtins
import contextlib
import getpass
import os
import random
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, ClassVar

from IPython.core.error import UsageError

from ipygpumem.errors import describe_error
from ipygpumem.extras.isolate import child
from ipygpumem.extras.isolate.child_process import ChildProcess
from ipygpumem.extras.isolate.kept_names import KeptNames, memory_file
from ipygpumem.extras.isolate.needs import why_unusable
from ipygpumem.extras.isolate.packets import Connection
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
from ipygpumem.units import MIB, format_bytes, format_seconds

_PAUSE_SECONDS = 0.1
"""Time without a message after which the child process may have ended."""


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
    """Run a cell in a child process; raise its error.

    Raises:
        UsageError: this cannot be done here, or not with this cell.
    """
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
    """Note the names that a cell bound in the child process only, for the error of a later cell.

    Then its NameError says that ``--keep`` would have kept the name.
    """
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
    """A cell in a child process, as seen from the kernel's process.

    The child process sends messages: outputs, which are shown at once, questions to the user, and
    at the end the kept names and the cell's error.

    Args:
        app: the extension.
        options: the options of ``%%isolate``.
    """

    def __init__(self, app: App, options: Options) -> None:
        self._app = app
        self._options = options
        self._shell = app.context.shell
        self.notes: list[Report] = []
        """Reports to show after the cell, such as one on names that could not be kept."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection, self._connection_of_child = map(Connection, ends)
        self._process = ChildProcess()
        self._kept = KeptNames()
        """The names to keep, whose values the child process has written."""
        self._is_done = False
        """True once the child process has sent all of its results."""
        self._is_late = False
        """True if ``--time`` is over."""
        self._cells_error: BaseException | None = None
        """The error of the cell."""
        self._start_bytes = 0
        """RSS of the child process when the cell began."""
        self._peak_bytes = 0
        """The cell's peak above that."""

    def run(self, source: str, keep: list[str]) -> BaseException | None:
        """Run the cell, and bind the names to keep; return the cell's error.

        Args:
            source: the code.
            keep: names and globs.
        """
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._kept.file)
            stack_file = undo.enter_context(memory_file())
            undo.enter_context(self._connection.socket)
            undo.enter_context(self._connection_of_child.socket)
            kills = Kills()
            task = child.Task(
                self._app,
                source,
                keep,
                self._options.memory,
                self._connection_of_child,
                kept=self._kept.file,
                stack=stack_file,
                random_state=random.getstate(),
            )
            with _interrupts_handled_by(self._pass_interrupt_on):
                self._process.fork(task, self._connection)
                try:
                    self._handle_messages()
                finally:
                    status = self._end_child()
            if not self._is_done:
                stack_file.seek(0)
                stack = stack_file.read().decode("utf-8", "replace")
                self._cells_error = self._error_of_dead_child(status, kills, stack)
            elif self._kept.waiting:
                self._load_waiting_names()
        self._bind_kept_names()
        return self._cells_error

    def _load_waiting_names(self) -> None:
        """Load names again, in the memory that the child process has given back."""
        failure = self._kept.load(self._kept.waiting)
        if failure is None:
            return
        self.notes.append(_lost_name_note(failure.name, describe_error(failure.error)))
        if isinstance(failure.error, KeyboardInterrupt):
            self._cells_error = failure.error

    # -- while the child process runs ------------------------------------------------------------

    def _pass_interrupt_on(self, _number: int, _frame: FrameType | None) -> None:
        """Pass a Ctrl-C on to the child process; the second one ends it, and the loading of the
        kept names.
        """
        self._process.interrupt()
        if self._kept.is_loading and self._process.is_given_up:
            raise KeyboardInterrupt

    def _handle_messages(self) -> None:
        """Handle the messages of the child process until it has ended or its time is over."""
        deadline = time.monotonic() + (self._options.time or float("inf"))
        while not (self._is_done or self._is_late):
            seconds = min(_PAUSE_SECONDS, deadline - time.monotonic())
            self._connection.socket.settimeout(max(0.001, seconds))
            message: tuple[Any, ...] | None = ()  # nothing, or a part of a message, has come
            try:
                message = self._connection.receive()
            except TimeoutError:
                if self._process.has_ended():
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
                if self._process.has_ended():
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
        """Show or clear a display.

        Args:
            method: the name of IPython's method: ``publish`` or ``clear_output``.
            given: its arguments.
        """
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
        """Send a widget's message to the front-end.

        Args:
            kind: the type of the message, such as ``comm_msg``.
            content: its content.
            given: further arguments of the session's ``send``.
        """
        kernel = self._shell.kernel
        kernel.session.send(
            kernel.iopub_socket, kind, content, parent=kernel.get_parent("shell"), **given
        )

    def _on_ask(self, kind: str, prompt: str) -> None:
        """Ask the user, and send the answer; an error is raised in the cell.

        Args:
            kind: ``input`` or ``getpass``.
            prompt: the question.
        """
        ask = input if kind == "input" else getpass.getpass
        try:
            with _interrupts_handled_by(signal.default_int_handler):
                answer: object = ask(prompt)
        except KeyboardInterrupt:
            self._pass_interrupt_on(signal.SIGINT, None)  # it ends the wait for the answer, too
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
        """Load the names to keep, and answer with the name that cannot be loaded, if there is one:
        the child process then writes the other ones again.

        Args:
            names: the names whose values are in the file.
            lost: names whose values cannot be written, with the reasons.
        """
        failure = self._kept.load(names)
        if failure is not None:
            is_given_up = self._process.is_given_up
            if isinstance(failure.error, MemoryError) and not is_given_up:
                self._kept.postpone(names, failure.name)
            else:
                lost = {**lost, failure.name: describe_error(failure.error)}
            if not is_given_up:
                self._kept.values = {}  # they are loaded again, because names may share objects
        self.notes += [_lost_name_note(name, why) for name, why in lost.items()]
        failing_name = None if failure is None else failure.name
        with contextlib.suppress(OSError):  # it has ended
            self._connection.send(failing_name, bool(self._kept.waiting))

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
        """End the child process, note its peak for the cell, and return its wait status."""
        end = self._process.end()
        self._peak_bytes = max(self._peak_bytes, end.highest_rss_bytes - self._start_bytes)
        running = self._app.context.cells.running()
        if running:
            running[0].children.ran_in(self._peak_bytes)
        return end.status

    def _error_of_dead_child(self, status: int, kills: Kills, stack: str) -> BaseException:
        """Return the error of a cell whose child process did not finish it.

        Args:
            status: the wait status of the child process.
            kills: counts OOM kills since the start of the cell.
            stack: the Python stack that the child process has written at a fatal signal; may be
                empty.
        """
        kind = "ChildProcessError"
        lines = list[str]()
        number = -os.waitstatus_to_exitcode(status)  # of the signal; negative exit codes, or 0
        if self._is_late:
            kind = "TimeoutError"
            cause = f"was ended after {format_seconds(self._options.time)} (--time)"
        elif self._process.is_given_up:
            kind = "KeyboardInterrupt"
            cause = "was ended by the second Ctrl-C"
        elif number <= 0:
            cause = f"ended itself with exit code {-number}"
        else:
            cause = _signal_text(number, kills)
            stack_of_cell, _, _ = stack.partition(" in run_code")
            lines = re.findall(r"^  File .*", stack_of_cell, re.MULTILINE)[:-1]
        text = f"the cell's child process {cause}"
        if self._options.keep and not self._kept.values:
            text += "; no name came back"
        return _rebuilt_error(kind, kind, text, [f"{kind}: {text}", *lines])

    def _bind_kept_names(self) -> None:
        """Bind the kept names, as if the cell had done so."""
        experiments = self._app.experiments.here()
        if experiments:
            scope = experiments[-1].scope
            scope.expect_bindings(Bindings(assigned=set(self._kept.values)))
            scope.save(set(self._kept.values))
        self._app.context.namespace.update(self._kept.values)


def _signal_text(number: int, kills: Kills) -> str:
    """Return the signal that killed a child process, and if the OOM killer sent it, in words."""
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
    """Stands for a value of the child process, which has formatted it, where it is displayed.

    Args:
        data: its representations by MIME type.
        metadata: their metadata.
    """

    def __init__(self, data: Any, metadata: Any) -> None:
        self._bundle = data, metadata

    def _repr_mimebundle_(self, **_: object) -> Any:
        """Return the representations, for IPython's formatter."""
        return self._bundle


def _rebuilt_error(name: str, base_name: str, text: str, lines: list[str]) -> BaseException:
    """Return an error like one in the child process, from the fields of its ``DescribedError``.

    Its class is made here: the original one may exist in the child process only.
    """
    error: BaseException = UsageError(text)
    if name == "UsageError":
        return error
    base: Any = getattr(builtins, base_name)
    groups: Any = getattr(builtins, "BaseExceptionGroup", SyntaxError)  # from Python 3.11 on
    # IPython does not call ``_render_traceback_`` of these two.
    is_shown_otherwise = issubclass(base, (SyntaxError, groups))
    # Another base, such as SystemExit, would act on the kernel's process.
    may_be_raised = issubclass(base, (Exception, KeyboardInterrupt))
    if is_shown_otherwise or not may_be_raised:
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
    """Handle Ctrl-C with ``handler`` in the block; only the main thread gets Ctrl-Cs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)
