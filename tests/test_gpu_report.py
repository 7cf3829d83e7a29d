"""docs/measured/gpu-verification.md: each statement with its outcome on simulated cards and on hardware."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.gpu import report
from tests.gpu.report import Statement

MEMORY = Statement("test_a.py", "test_memory", "Memory is told.", None)
TIME = Statement("test_a.py", "test_time", "It is fast.", "hardware")
CARDS = Statement("test_a.py", "test_cards", "Two cards are told apart.", "simulated")


def result(test: str, outcome: str = "passed", *figures: str, reason: str = "") -> dict[str, Any]:
    return {"file": "test_a.py", "test": test, "outcome": outcome, "figures": list(figures), "reason": reason}


def rows(*results: dict[str, Any]) -> list[str]:
    run = {"where": [["date", "2026-11-22"], ["torch", "2.11.0"]], "quickstart": "passed", "results": list(results)}
    text = report.page([("A", [MEMORY, TIME, CARDS])], {"simulated": run} if results else {})
    return [line for line in text.splitlines() if line.endswith("|") and "---" not in line][1:4]


def test_without_any_run_nothing_is_claimed() -> None:
    assert rows() == [
        "| Memory is told. | not run yet | not run yet |",
        "| It is fast. | for hardware only | not run yet |",
        "| Two cards are told apart. | not run yet | for simulated card only |",
    ]


def test_a_run_fills_its_own_column_only() -> None:
    first = rows(result("test_memory[a]", "passed", "5 MiB"), result("test_memory[b]", "skipped", reason="no jax"))[0]
    assert first == "| Memory is told. | passed: 5 MiB; 1 of 2 not run: no jax | not run yet |"
    assert rows(result("test_memory[a]"), result("test_memory[b]", "failed"))[0].startswith(
        "| Memory is told. | failed |"
    )
    assert rows(result("test_cards", "skipped", reason="one card"))[2].endswith(
        "| not run: one card | for simulated card only |"
    )


def test_a_run_that_could_check_nothing_writes_nothing(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps(result("test_memory", "skipped", reason="no GPU")) + "\n")
    command = [sys.executable, report.__file__, str(tmp_path / "page.md"), "--results", str(results)]
    done = subprocess.run([*command, "--outcomes", str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, "could check nothing" in done.stdout) == (1, True)
    assert sorted(tmp_path.iterdir()) == [results]
