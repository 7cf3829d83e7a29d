"""A real kernel: run a cell, get back all that a front-end would see."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import unescape
from typing import Any

from jupyter_client.manager import KernelManager


@dataclass
class Reply:
    """Everything that a front-end would see of a cell."""

    status: str
    result: str | None = None
    stdout: str = ""
    stderr: str = ""
    error: str | None = None
    message: str = ""
    traceback: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    """Position in ``displays`` of each display with an id."""
    kinds: list[str] = field(default_factory=list)
    """Outputs of the cell in order: ``stdout``, ``stderr``, ``display``, ``result``, ``error``."""

    def add(self, message: str, content: dict[str, Any]) -> None:
        """Add the output of a message of a type such as ``stream``, as a notebook does."""
        self._note_kind(message, content)
        match message:
            case "stream":
                self._add_text(content["name"], content["text"])
            case "execute_result":
                self.result = content["data"]["text/plain"]
            case "display_data":
                display_id = content["transient"].get("display_id")
                if display_id:
                    self.places[display_id] = len(self.displays)
                self.displays.append(content)
            case "update_display_data":
                place = self.places.get(content["transient"]["display_id"])
                if place is not None:  # else another cell's
                    self.displays[place] = content
            case "error":
                self.error = content["ename"]
                self.message = content["evalue"]
                self.traceback = "\n".join(content["traceback"])

    def _note_kind(self, message: str, content: dict[str, Any]) -> None:
        """Add the kind of an output to ``kinds``. Text joins an output of the same stream that came
        just before, as in a notebook.
        """
        names = {
            "execute_result": "result",
            "display_data": "display",
            "error": "error",
            "stream": content.get("name"),
        }
        kind = names.get(message)
        joins_last = message == "stream" and self.kinds[-1:] == [kind]
        if kind and not joins_last:
            self.kinds.append(kind)

    def _add_text(self, stream: str, text: str) -> None:
        if stream == "stdout":
            self.stdout += text
        else:
            self.stderr += text

    def reports(self, kind: str | None = None) -> list[str]:
        """Return the texts of ipygpumem's displays; with ``kind``, only of displays that carry a
        report of this kind, such as ``leaks``.
        """
        texts = []
        for display in self.displays:
            kinds = _report_kinds(display)
            is_asked_for = bool(kinds) and (kind is None or kind in kinds)
            if is_asked_for and "text/plain" in display["data"]:
                texts.append(display["data"]["text/plain"])
        return texts

    def leaks(self) -> list[str]:
        """Return the reports of ``%gpumem leaks``, with each row of their tables in one line, which
        the texts fold.
        """
        texts = []
        for display in self.displays:
            if "leaks" not in _report_kinds(display):
                continue
            text = display["data"]["text/plain"]
            rows = table_rows(display["data"]["text/html"])
            if rows:
                text = "\n  ".join([text.splitlines()[0], *map(_line_of_leak, rows)])
            texts.append(text)
        return texts

    def survivors(self) -> list[str]:
        """Return the reports of experiments, of ``release`` and of ``%gpumem why`` about a deleted
        name, up to the table of what is still alive, with each of its rows in one line.
        """
        texts = []
        for display in self.displays:
            if not {"experiment", "release", "why"} & set(_report_kinds(display)):
                continue
            lines = display["data"]["text/plain"].splitlines()
            for place, line in enumerate(lines):
                if _TITLE_OF_SURVIVORS.search(line):
                    rows = table_rows(display["data"]["text/html"])
                    alive = [_line_of_leak(row) for row in rows if "what" in row]
                    del lines[place + 1 :]
                    lines += [f"  {text}" for text in alive]
                    break
            texts.append("\n".join(lines))
        return texts


def _report_kinds(display: dict[str, Any]) -> list[str]:
    """Return the kinds of ipygpumem's reports in a display."""
    return list(display["metadata"].get("ipygpumem", {}).get("reports", []))


_TITLE_OF_SURVIVORS = re.compile(
    "still alive, because|left, because something else|part of it is alive$"
)
_EQUAL = re.compile(r"in every row: (.*?)</div>")
_TEXT_COLUMNS = ("name", "what", "type", "shape", "dtype", "device", "kind", "grad", "held by")
_BEGINS_COLUMN = re.compile(f", (?=(?:{'|'.join(_TEXT_COLUMNS)}) )")
_CELLS = re.compile(r"<t[hd] [^>]*>(.*?)</t[hd]>")


def table_rows(html: str) -> list[dict[str, str]]:
    """Return the rows of the tables of a report, as texts by heading."""
    rows = list[dict[str, str]]()
    headings = list[str]()
    for line in re.findall(r"<tr .*?</tr>", html):
        cells = list(map(unescape, _CELLS.findall(line)))
        if "<th " in line:
            headings = cells
        else:
            rows.append(dict(zip(headings, cells, strict=True)))
    equal = _EQUAL.search(html)
    if equal:
        for part in _BEGINS_COLUMN.split(unescape(equal[1])):
            heading = next(name for name in _TEXT_COLUMNS if part.startswith(f"{name} "))
            for row in rows:
                row[heading] = part.removeprefix(f"{heading} ")
    return rows


def _line_of_leak(row: dict[str, str]) -> str:
    """Return a row of leaks in one line."""
    parts = [row["size"], row["what"]]
    if row.get("device"):
        parts[-1] += f" on {row['device']}"
    if row.get("cell"):
        parts.append(f"cell {row['cell']}")
    if row.get("held by"):
        parts.append(f"held by {row['held by']}")
    if row.get("to free it"):
        parts.append(f"to free it: {row['to free it']}")
    return " · ".join(parts)


class Kernel:
    """A fresh kernel in a process of its own, with the interpreter of this one."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        options: dict[str, Any] = {"extra_arguments": list(arguments)}
        if env is not None:
            options["env"] = env
        for tries_left in (2, 1, 0):
            self._manager = KernelManager(kernel_name="python3")
            self._manager.kernel_spec.argv[0] = sys.executable
            self._manager.start_kernel(**options)
            self._client = self._manager.blocking_client()
            self._client.start_channels()
            # As a program: on a busy machine our own work would show a progress bar.
            self._client.allow_stdin = False
            try:
                self._wait_until_ready(600)
                break
            except RuntimeError:  # it died, because another program has taken its port
                Kernel.close(self)  # not a subclass's, whose folder is needed again
                if not tries_left:
                    raise

    def _wait_until_ready(self, timeout: float) -> None:
        """Wait until the kernel replies and its messages arrive.

        jupyter_client's ``wait_for_ready`` also waits for 0.2 s of silence, in hundreds of kernels.
        """
        deadline = time.monotonic() + timeout
        while True:
            message_id = self._client.kernel_info()
            with contextlib.suppress(queue.Empty):
                self._reply(message_id, timeout=1)
                # The channel of outputs may be connected later: then these messages were lost.
                while not _is_end(self._client.get_iopub_msg(timeout=0.05), message_id):
                    pass
                return
            if not self._manager.is_alive():
                raise RuntimeError("the kernel died before it was ready")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the kernel was not ready in {timeout} s")

    def run(
        self,
        code: str,
        *,
        timeout: float = 600,
        answers: Sequence[str] = (),
        interrupt_when: str = "",
        **options: Any,
    ) -> Reply:
        """Execute ``code`` and return all its outputs.

        Args:
            code: the cell.
            timeout: seconds to wait for its end.
            answers: texts to type where the cell asks for input; "q" after them.
            interrupt_when: a text; when the cell has printed it, Ctrl-C is sent. After a fixed
                time, different machines would be at different places of the cell.
            options: further arguments of jupyter_client's ``execute``.

        Raises:
            TimeoutError: After ``timeout`` seconds.
            RuntimeError: The kernel died.
        """
        message_id = self._client.execute(code, **{"allow_stdin": bool(answers), **options})
        outputs = Reply("")
        typed = iter(answers)
        deadline = time.monotonic() + timeout
        while not self._take(message_id, outputs):
            if not self._manager.is_alive():
                raise RuntimeError(f"the kernel died: {code}")
            if answers:
                with contextlib.suppress(queue.Empty):
                    self._client.get_stdin_msg(timeout=0)
                    self._client.input(next(typed, "q"))
            if interrupt_when and interrupt_when in outputs.stdout + outputs.stderr:
                self._manager.interrupt_kernel()
                interrupt_when = ""
            if time.monotonic() > deadline:
                raise TimeoutError(f"no end of: {code}")
        outputs.status = self._reply(message_id, timeout)["status"]
        return outputs

    def _reply(self, message_id: str, timeout: float = 600) -> dict[str, Any]:
        """Return the content of the reply to a request."""
        while True:
            reply = self._client.get_shell_msg(timeout=timeout)
            if reply["parent_header"].get("msg_id") == message_id:
                return dict(reply["content"])

    def _take(self, message_id: str, outputs: Reply) -> bool:
        """Add one message to ``outputs``; True when the kernel is idle again."""
        try:
            message = self._client.get_iopub_msg(timeout=0.05)
        except queue.Empty:
            return False
        if message["parent_header"].get("msg_id") != message_id:
            return False
        outputs.add(message["msg_type"], message["content"])
        return _is_end(message, message_id)

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the kernel, without leaving an output behind."""
        message_id = self._client.execute(
            "", user_expressions={"value": expression}, store_history=False, silent=True
        )
        answer = self._reply(message_id)["user_expressions"]["value"]
        if answer["status"] != "ok":
            raise AssertionError(f"{expression}: {answer}")
        return eval(answer["data"]["text/plain"])

    def complete(self, code: str) -> list[str]:
        """Return the completions at the end of ``code``."""
        return list(self._reply(self._client.complete(code))["matches"])

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.stop_channels()
        self._kill()
        self._manager.shutdown_kernel(now=True)

    def _kill(self) -> None:
        """Kill the kernel and wait for its end, which jupyter_client looks for every 0.1 s."""
        if hasattr(os, "waitid") and self._manager.has_kernel:
            self._manager.signal_kernel(signal.SIGKILL)
            process_id = self._manager.provisioner.pid
            with contextlib.suppress(ChildProcessError):  # its end was noticed before
                os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOWAIT)


def _is_end(message: dict[str, Any], request: str) -> bool:
    """Return True for the message with which the kernel ends a request."""
    if message["parent_header"].get("msg_id") != request:
        return False
    is_status = message["msg_type"] == "status"
    return is_status and message["content"]["execution_state"] == "idle"


def plain(text: str) -> str:
    """Return ``text`` without the colours of a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
