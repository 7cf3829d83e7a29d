"""Runs cells in a real kernel as a front-end does, and measures the seconds until it is idle.

Also returns the messages that the cell sent, and values of expressions that no tool sees.
"""

from __future__ import annotations

import ast
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

_TIMEOUT_SECONDS = 120.0
_COMMAND = (
    sys.executable,
    "-m",
    "ipykernel_launcher",
    "-f",
    "{connection_file}",
    "--log-level=ERROR",
)
# IPython's own thread writes each cell to a database file while the cell runs: milliseconds of disk
# time at random moments, with or without a tool, which hide what is to be measured.
_OPTIONS = ("--HistoryManager.hist_file=:memory:",)


class CellError(Exception):
    """A cell of a benchmark failed, so there is no figure; ``seconds`` is how long that took, where
    it was a cell.
    """

    seconds: float | None = None


@dataclass(frozen=True)
class Run:
    """One executed cell: time from the client's request to the kernel's ``idle``, and the messages
    between.
    """

    seconds: float
    messages: tuple[dict[str, Any], ...]

    @property
    def text(self) -> str:
        """All that the cell and the tools printed or displayed, as text."""
        parts = []
        for message in self.messages:
            content = message["content"]
            printed = content.get("text")
            displayed = content.get("data", {}).get("text/plain")
            parts.append(printed or displayed or "")
        return "".join(parts)


class Kernel:
    """An ipykernel of this interpreter: a fresh IPython directory, its history in memory, 2 threads
    for BLAS.
    """

    def __init__(self, wrapper: tuple[str, ...] = ()) -> None:
        """Start it; ``wrapper`` is a command that runs the interpreter with its arguments."""
        self._directory = tempfile.TemporaryDirectory(prefix="ipygpumem-bench-")
        self._manager = KernelManager()
        spec = self._manager.kernel_spec
        assert spec is not None
        spec.argv = [*_COMMAND, *_OPTIONS]
        if wrapper:
            tool, *arguments = wrapper
            tool_path = str(Path(sys.executable).with_name(tool))
            spec.argv = [tool_path, *arguments, "python", *_COMMAND[1:], *_OPTIONS]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "2")
        paths = {
            "IPYTHONDIR": self._directory.name,
            "PYTHONPATH": str(Path(__file__).parent.parent),
        }
        # Some tools write files into the working directory.
        self._manager.start_kernel(env={**os.environ, **threads, **paths}, cwd=self._directory.name)
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=_TIMEOUT_SECONDS)

    def run(self, code: str, *, watched: bool = False) -> Run:
        """Execute a cell and return its time and messages; if ``watched``, as a front-end does that
        a person uses, which can type an answer.

        Raises:
            CellError: the cell failed.
        """
        started = time.perf_counter()
        request = self._client.execute(code, allow_stdin=watched)
        messages = self._until_idle(request)
        seconds = time.perf_counter() - started
        try:
            self._reply(request)
        except CellError as error:
            error.seconds = seconds
            raise
        return Run(seconds, tuple(messages))

    def ask(self, expression: str) -> Any:
        """Return the value of an expression, by an execution that no tool sees (``silent``)."""
        request = self._client.execute(
            "pass", silent=True, allow_stdin=False, user_expressions={"value": expression}
        )
        self._until_idle(request)
        answer = self._reply(request)["user_expressions"]["value"]
        if answer["status"] != "ok":
            raise CellError(f"{expression}: {answer.get('ename')}: {answer.get('evalue')}")
        return ast.literal_eval(answer["data"]["text/plain"])

    def _until_idle(self, request: str) -> list[dict[str, Any]]:
        """Return the outputs of a request, when the kernel is idle again."""
        messages: list[dict[str, Any]] = []
        while True:
            message = self._client.get_iopub_msg(timeout=_TIMEOUT_SECONDS)
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["msg_type"] == "status":
                if message["content"]["execution_state"] == "idle":
                    return messages
            elif message["msg_type"] != "execute_input":
                messages.append(message)

    def _reply(self, request: str) -> dict[str, Any]:
        """Return the content of the reply to a request.

        Raises:
            CellError: the reply says that the request failed.
        """
        while True:
            message = self._client.get_shell_msg(timeout=_TIMEOUT_SECONDS)
            if message["parent_header"].get("msg_id") == request:
                content: dict[str, Any] = message["content"]
                if content["status"] != "ok":
                    raise CellError(f"{content.get('ename')}: {content.get('evalue')}")
                return content

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._directory.cleanup()
