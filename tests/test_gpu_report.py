"""docs/measured/gpu-verification.md: each statement with its outcome on simulated cards and on hardware."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.gpu import report


def result(outcome: str = "passed", *figures: str, statement: str = "Memory is told.", reason: str = "") -> Any:
    return {"title": "A", "statement": statement, "outcome": outcome, "figures": figures, "reason": reason}


def test_a_run_fills_its_own_column_only() -> None:
    results = [result("passed", "5 MiB"), result("skipped", reason="no jax")]
    results += [result("passed", statement="Two cards."), result("failed", statement="Two cards.")]
    run = {"where": [["date", "2026-11-22"], ["torch", "2.11.0"]], "quickstart": "passed"}
    for each in results:
        each["test"] = "test_a"
    text = report.page({"simulated": {**run, "results": results}})
    assert "| Memory is told. | passed: 5 MiB; 1 of 2 not run: no jax | not run yet |" in text
    assert "| Two cards. | failed | not run yet |" in text
    assert "**Simulated card (torch 2.11.0, 2026-11-22): 1 passed, 1 failed.**" in text
    assert "**Hardware: 2 not run yet.**" in text


def test_a_run_that_could_check_nothing_writes_nothing(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps(result("skipped", reason="no GPU")) + "\n")
    command = [sys.executable, report.__file__, str(tmp_path / "page.md"), "--results", str(results)]
    done = subprocess.run([*command, "--outcomes", str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, "could check nothing" in done.stdout) == (1, True)
    assert sorted(tmp_path.iterdir()) == [results]
