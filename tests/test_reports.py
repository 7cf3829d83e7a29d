"""What reports say, and that nothing in them can break out."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ipygpumem.model import CellRecord, ExperimentRecord, Held, Holder, ReclaimStep, RecoveryRecord, Usage
from ipygpumem.reports import content, html, text
from ipygpumem.units import GIB, MIB

RAM = Usage("cpu", 3 * GIB, 3 * GIB + 512 * MIB, 3 * GIB + 1341 * MIB, 16 * GIB, "kernel")
CUDA = Usage(
    "cuda:0",
    0,
    GIB,
    6 * GIB + 200 * MIB,
    140 * GIB,
    "allocator",
    reserved_bytes=7 * GIB,
    used_bytes=8 * GIB + 400 * MIB,
)


def cell(**changes: Any) -> CellRecord:
    values: dict[str, Any] = {
        "execution_count": 12,
        "cell_id": None,
        "experiment": None,
        "started_at": 0.0,
        "duration_seconds": 3.21,
        "success": True,
        "error": None,
        "usages": (RAM, CUDA),
    }
    return CellRecord(**{**values, **changes})


def experiment(**changes: Any) -> ExperimentRecord:
    values: dict[str, Any] = {
        "name": "small",
        "started_at": 0.0,
        "duration_seconds": 4.2,
        "cells": (cell(), cell()),
        "usages": (RAM,),
        "consumed": {"cpu": 600 * MIB},
        "reclaimed": {"cpu": 88 * MIB},
        "deleted": ("a", "b"),
        "restored": ("x",),
        "kept": (),
        "survivors": (Held("b", "Tensor", (8, 1024, 1024), "float32", "cpu", 32 * MIB),),
        "steps": (ReclaimStep("names", {"cpu": 88 * MIB}, {"cuda:0": 2 * MIB}, 0.1),),
        "notes": ("keep: no name matches 'q'",),
    }
    return ExperimentRecord(**{**values, **changes})


def recovery(**changes: Any) -> RecoveryRecord:
    values: dict[str, Any] = {
        "kind": "oom",
        "error": "OutOfMemoryError",
        "message": "...",
        "requested_bytes": 20 * GIB,
        "free": {"cpu": 10 * GIB, "cuda:0": 3 * GIB},
        "held": (
            Held("batch", "Tensor", (512, 1024), "float32", "cuda:0", 2 * MIB, function="train", line=7),
            Held("lists", "dict", None, "float32", "cuda:0", MIB, arrays=3, function="main", line=2),
        ),
        "frames": 4,
        "reclaimed": {"cpu": -5, "cuda:0": 3 * MIB},
        "now": {"cpu": GIB, "cuda:0": 0},
    }
    return RecoveryRecord(**{**values, **changes})


def test_the_line_after_a_cell() -> None:
    assert content.cell_report(cell()).headline == (
        "cell 12 · 3.21 s · RAM +512 MiB, peak +1.31 GiB, 3.50 GiB now · "
        "cuda:0 +1.00 GiB, peak +6.20 GiB, 8.39/140.00 GiB"
    )


def test_the_line_names_an_error_children_and_samples_and_leaves_idle_devices_out() -> None:
    idle = Usage("cuda:1", 0, 0, 0, 140 * GIB, "allocator", reserved_bytes=0)
    sampled = Usage("cpu", 0, 0, MIB, None, "sampled", children_bytes=5 * MIB)
    line = content.cell_report(cell(execution_count=None, error="ValueError", usages=(sampled, idle))).headline
    assert line == "cell · 3.21 s · ValueError · RAM +0, peak +1 MiB (sampled), 0 B now, children 5 MiB"


def test_the_full_report_of_an_experiment() -> None:
    (report,) = content.experiment_reports(experiment(), "full")
    assert report.headline == "experiment small · 2 cells · 4.20 s"
    assert report.tables[0].rows == (("RAM", "+600 MiB", "88 MiB", "+1.31 GiB", "3.50 GiB"),)
    assert report.lines == (
        "deleted: a, b",
        "restored: x",
        "given back: names (RAM 88 MiB, cuda:0 reserved 2 MiB)",
        "keep: no name matches 'q'",
        "still alive, because something outside the experiment refers to it:",
        "32 MiB · b: Tensor float32 8 × 1024 × 1024 on cpu",
    )


def test_the_compact_and_the_silent_report_of_an_experiment() -> None:
    (report,) = content.experiment_reports(experiment(), "compact")
    assert report.headline == (
        "experiment small · 2 cells · 4.20 s · RAM consumed +600 MiB, reclaimed 88 MiB, peak +1.31 GiB, 3.50 GiB now"
    )
    assert content.experiment_reports(experiment(), "none") == []


def test_many_names_are_counted_instead_of_listed() -> None:
    names = tuple(f"n{number}" for number in range(50))
    (report,) = content.experiment_reports(experiment(deleted=names), "full")
    assert report.lines[0].endswith("n39 and 10 more")


def test_the_report_of_a_recovery() -> None:
    (report,) = content.recovery_reports(recovery(), MIB)
    assert report.headline == (
        "out of memory (OutOfMemoryError) · asked for 20.00 GiB · free: RAM 10.00 GiB, cuda:0 3.00 GiB · "
        "came back: RAM 0 B, cuda:0 3 MiB · now: RAM 1.00 GiB, cuda:0 0 B"
    )
    assert report.tables[0].rows == (
        ("train", "7", "batch", "Tensor", "512 × 1024", "float32", "cuda:0", "2 MiB"),
        ("main", "2", "lists", "dict", "3 arrays", "float32", "cuda:0", "1 MiB"),
    )


def test_a_long_table_ends_with_a_sum() -> None:
    held = tuple(Held(f"x{n}", "Tensor", (1,), "f", "cpu", 2 * MIB, function="f", line=n) for n in range(30))
    (report,) = content.recovery_reports(recovery(held=held), MIB)
    assert report.tables[0].rows[-1] == ("and 10 more", "", "", "", "", "", "", "20 MiB")


def test_an_interrupt_that_held_nothing_is_not_worth_a_report() -> None:
    assert content.recovery_reports(recovery(kind="interrupt", held=()), MIB) == []


def test_a_broken_context_is_not_promised_a_recovery() -> None:
    (report,) = content.recovery_reports(recovery(kind="error", held=(), poisoned=True), MIB)
    assert "Restart the kernel" in report.lines[0]


def test_text_is_one_line_for_a_cell_and_an_aligned_table_for_an_experiment() -> None:
    assert "\n" not in text.render([content.cell_report(cell())])
    lines = text.render(content.experiment_reports(experiment(), "full")).splitlines()
    assert lines[0] == "experiment small · 2 cells · 4.20 s"
    assert lines[1].split() == ["device", "consumed", "reclaimed", "peak", "now"]


def test_html_has_no_script_and_no_outside_resource() -> None:
    page = html.render([*content.experiment_reports(experiment(), "full"), *content.recovery_reports(recovery(), MIB)])
    assert "<table" in page
    for forbidden in ("<script", "src=", "href=", "url(", "@import"):
        assert forbidden not in page


HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m&\"'</div>\n"


def test_every_text_of_the_users_is_escaped_in_html_and_harmless_in_a_terminal() -> None:
    held = (Held(HOSTILE, HOSTILE, (1,), "f", "cpu", 9 * MIB, function=HOSTILE, line=1),)
    names = (HOSTILE,)
    reports = [
        content.cell_report(cell(error=HOSTILE)),
        *content.experiment_reports(
            experiment(name=HOSTILE, deleted=names, restored=names, kept=names, survivors=held, notes=names), "full"
        ),
        *content.recovery_reports(recovery(error=HOSTILE, held=held, message=HOSTILE), MIB),
        content.note(HOSTILE),
        content.interrupted_exit(HOSTILE),
    ]
    page = html.render(reports)
    assert "<img" not in page
    assert page.count("&lt;img") >= 10
    shown = text.render(reports)
    assert "\x1b" not in shown


@given(st.text())
def test_cleaned_text_is_one_printable_line_of_the_same_length(value: str) -> None:
    cleaned = content.clean(value)
    assert len(cleaned) == len(value)
    assert cleaned.isprintable()


def leak(path: str, *, name: str = "", size: int = MIB) -> Held:
    return Held(name, "Tensor", (4,), "f", "cpu", size, holder=Holder(path, "del it"))


def test_leaks_in_one_container_are_one_line_and_the_largest_comes_first() -> None:
    found = [leak("cache[0]"), leak("cache[1]"), leak("x", size=3 * MIB), leak("cache[7]"), leak("other[0]")]
    assert content.leaks_report(found, MIB).lines == (
        "3 MiB · 3 × Tensor f 4 on cpu · held by cache[…] · to free it: del it",
        "3 MiB · Tensor f 4 on cpu · held by x · to free it: del it",
        "1 MiB · Tensor f 4 on cpu · held by other[0] · to free it: del it",
    )


def test_leaks_beyond_the_page_are_counted() -> None:
    lines = content.leaks_report([leak(f"x{n}") for n in range(23)], MIB).lines
    assert (len(lines), lines[-1]) == (21, "and 3 more: 3 MiB")


def test_a_leaks_path_and_name_are_cleaned() -> None:
    (line,) = content.leaks_report([leak("a\x1b[2Jb", name="x\ny")], MIB).lines
    assert line.isprintable()
