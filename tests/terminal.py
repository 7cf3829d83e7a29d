"""A terminal IPython in a real pty, and what a person would see on its screen."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pyte


class Terminal:
    """IPython with the extension on a terminal of ``rows`` and ``columns``; pyte is the terminal's
    emulator.
    """

    def __init__(
        self, folder: Path, *, rows: int = 24, columns: int = 100, env: dict[str, str] | None = None
    ) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=1000, ratio=0.5)
        self._stream = pyte.ByteStream(self.screen)
        self._prompts = 0
        self.exit_code: int | None = None
        """Exit status of the program; None while it runs."""
        settings = {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "LANG": "C.UTF-8"}
        settings["IPYTHONDIR"] = str(folder)
        self._pid, self._descriptor = pty.fork()
        if self._pid == 0:
            arguments = [
                "-m",
                "IPython",
                "--no-banner",
                "--colors=NoColor",
                "--no-confirm-exit",
                "--quick",
            ]
            os.execve(
                sys.executable,
                [sys.executable, *arguments],
                {**os.environ, **settings, **(env or {})},
            )
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.await_prompt()
        self.run("%load_ext ipygpumem")

    def press(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    def watch(self, until: Callable[[], object]) -> None:
        """Let the screen change until the condition holds."""
        deadline = time.monotonic() + 60
        while not until():
            assert time.monotonic() < deadline, "\n".join(
                ["it did not come; the screen is:", *self.rows]
            )
            if select.select([self._descriptor], [], [], 0.02)[0]:
                try:
                    self._stream.feed(os.read(self._descriptor, 65536))
                except OSError:  # the program has ended
                    self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
                    return

    def run(self, code: str) -> None:
        self.press(code.encode() + b"\r")
        self.await_prompt()

    def await_prompt(self) -> None:
        self._prompts += 1
        prompt = re.compile(rf"In \[{self._prompts}\]:\s*$")
        self.watch(lambda: any(prompt.match(row) for row in self.rows))

    @property
    def rows(self) -> list[str]:
        return [row.rstrip() for row in self.screen.display]

    def close(self) -> None:
        if self.exit_code is None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._descriptor)
