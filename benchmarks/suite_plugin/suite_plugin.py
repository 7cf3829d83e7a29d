"""A plugin of pytest for benchmarks/suites.py: writes the outcome of each test, and loads the
extension into IPython's shell for tests.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_outcomes: dict[str, str] = {}


def pytest_collection_finish(session: Any) -> None:
    """Load the extension into the shell in which IPython's own tests run cells."""
    configuration = os.environ.get("SUITES_EXTENSION")
    if configuration is None:
        return
    from IPython.testing.globalipapp import get_ipython  # only in the suite that has it

    shell = get_ipython()
    shell.run_line_magic("load_ext", "ipygpumem")
    if configuration == "reports off":
        shell.run_line_magic("config", "IPyGpuMem.report = False")


def pytest_runtest_logreport(report: Any) -> None:
    """Note the outcome of a test: the first of its phases that did not pass."""
    if report.when == "call" or report.outcome != "passed":
        outcome = report.outcome
        if report.when != "call" and report.failed:
            outcome = "error"
        if _outcomes.get(report.nodeid, "passed") == "passed":
            _outcomes[report.nodeid] = outcome
    Path(os.environ["SUITES_OUTCOMES"]).write_text(json.dumps(_outcomes))
