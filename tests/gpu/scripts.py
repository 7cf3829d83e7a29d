"""Runs scripts, each in a forked process in which torch is imported, and no device was used before.

Run by support.py: ``python -m tests.gpu.scripts``.
"""

import contextlib
import importlib
import io
import os
import sys
import traceback
from types import ModuleType

from tests.answering import answer_questions, forked

LATE = ("torch", "torch._dynamo", "numpy")
"""Modules that take seconds to import; estimates and optimizers import the second one."""


def run_script(code: str, environment: dict[str, str]) -> tuple[str, str]:
    """Return the output of a script, and the traceback of its error, if there was one."""
    os.environ.clear()
    os.environ.update(environment)
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(code, vars(module))
        except BaseException:
            return printed.getvalue(), traceback.format_exc()
    return printed.getvalue(), ""


if __name__ == "__main__":
    for name in LATE:
        importlib.import_module(name)
    answer_questions(lambda question: forked(lambda: run_script(*question)))
