"""docs/measured/gpu-verification.md: each statement with its outcome on simulated cards and on hardware."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.gpu import report
from tests.gpu.report import Run, Section, Statement

MEMORY = Statement("test_a.py", "test_memory", "Memory is told.", None)
TIME = Statement("test_a.py", "test_time", "It is fast.", "hardware")
CARDS = Statement("test_a.py", "test_cards", "Two cards are told apart.", "simulated")
SECTIONS = [Section("A", [MEMORY, TIME, CARDS])]
WHERE = [["date", "2026-11-22"], ["driver", "580.00 (simulated)"], ["torch", "2.11.0"]]


def result(test: str, outcome: str = "passed", *figures: str, reason: str = "") -> dict[str, Any]:
    return {"file": "test_a.py", "test": test, "outcome": outcome, "figures": list(figures), "reason": reason}


def a_run(*results: dict[str, Any], suite_exit: int = 0) -> Run:
    return Run(WHERE, suite_exit, "passed", "cuda:0", list(results))


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.endswith("|") and "---" not in line]


def test_without_any_run_nothing_is_claimed() -> None:
    text = report.page(SECTIONS, {})
    assert rows(text)[1:] == [
        "| Memory is told. | not run yet | not run yet |",
        "| It is fast. | for hardware only | not run yet |",
        "| Two cards are told apart. | not run yet | for simulated card only |",
    ]
    assert "**Hardware: the suite has not run on it yet.**" in text


def test_a_run_fills_its_own_column_only() -> None:
    skipped = result("test_time", "skipped", reason="needs time: hardware only")
    run = a_run(result("test_memory[1 GiB]", "passed", "5 MiB"), result("test_memory[2 GiB]"), skipped)
    text = report.page(SECTIONS, {"simulated": run})
    assert rows(text)[1:4] == [
        "| Memory is told. | passed: 1 GiB: 5 MiB | not run yet |",
        "| It is fast. | not run: needs time: hardware only | not run yet |",
        "| Two cards are told apart. | not run yet | for simulated card only |",
    ]
    assert "Simulated card (torch 2.11.0, 2026-11-22): 1 passed, 1 for hardware only, 1 not run yet." in text


def test_what_a_part_of_the_parameters_was_not_run_for_is_said() -> None:
    skipped = result("test_memory[b]", "skipped", reason="jax is not installed")
    run = a_run(result("test_memory[a]", "passed", "5 MiB"), skipped, result("test_memory[c]"))
    text = report.page(SECTIONS, {"hardware": run})
    assert "| Memory is told. | not run yet | passed: a: 5 MiB (1 of 3 not run: jax is not installed) |" in text


def test_one_failure_of_many_parameters_is_a_failure_and_is_shown() -> None:
    run = a_run(result("test_memory[a]"), result("test_memory[b]", "failed", reason="assert 1 == 2"), suite_exit=1)
    text = report.page(SECTIONS, {"hardware": run})
    assert "| Memory is told. | not run yet | **failed** |" in text
    assert "assert 1 == 2" in text


def test_what_a_run_that_broke_off_did_not_reach_has_no_result() -> None:
    text = report.page(SECTIONS, {"hardware": a_run(suite_exit=124)})
    assert "| Memory is told. | not run yet | no result: the suite ended with exit code 124 |" in text


def test_a_run_is_kept_beside_that_of_the_other_kind_of_card(tmp_path: Path) -> None:
    simulated = a_run(result("test_memory"))
    hardware = Run([["driver", "580.65"], *WHERE[::2]], 0, "passed", "", [result("test_time")])
    report._keep(simulated, tmp_path)
    report._keep(hardware, tmp_path)
    assert report.kept([tmp_path]) == {"simulated": simulated, "hardware": hardware}


def test_a_run_that_could_check_nothing_writes_nothing(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps(result("test_memory", "skipped", reason="no GPU")) + "\n")
    command = [sys.executable, report.__file__, str(tmp_path / "page.md"), "--results", str(results)]
    done = subprocess.run([*command, "--outcomes", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "could check nothing" in done.stdout
    assert sorted(tmp_path.iterdir()) == [results]
