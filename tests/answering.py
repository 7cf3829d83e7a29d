"""A process that answers the questions of tests one at a time, and imports libraries only once.

Each of pytest's processes asks only what its own tests need.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tests.alone import ROOT


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

    def close(self) -> None:
        self._process.communicate()


def answer_questions(answer: Callable[[Any], Any]) -> None:
    """Answer each question until the test closes its end.

    ``answer`` must not print to the process's stdout: forked processes replace theirs.
    """
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
