"""A process that answers the questions of tests one at a time, and imports libraries only once.

Each of pytest's processes asks only what its own tests need.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


class Answerer:
    """Starts a Python with some arguments, which runs ``answer_questions``."""

    def __init__(self, *arguments: str, **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            **options,
        )

    def ask(self, question: Any) -> Any:
        """Return the answer to a question; both are data of JSON."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def run_main(self, *arguments: object) -> Any:
        """Return the result of a module's ``main`` that takes a command's arguments."""
        result = self.ask([str(argument) for argument in arguments])
        assert not isinstance(result, str), result  # the text of an error
        return result

    def close(self) -> None:
        self._process.communicate()


def answer_questions(answer: Callable[[Any], Any]) -> None:
    """Answer each question until the test closes its end.

    ``answer`` must not print to the process's stdout: forked processes replace theirs.
    """
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


def forked(work: Callable[[], object]) -> Any:
    """Return the result of a function that runs in a child process, or its error as a text."""
    reader, writer = os.pipe()
    if not os.fork():
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        try:
            result = work()
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        with os.fdopen(writer, "w") as file:
            json.dump(result, file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.wait()
    return json.loads(text or '"the process has ended"')
