"""What the engines of a cluster had becomes one record and one report, by pure functions."""

from __future__ import annotations

from dataclasses import replace

from ipygpumem.model import CellRecord, EngineRecord, ExperimentRecord, Usage
from ipygpumem.reports import text
from ipygpumem.reports.engines import engine_numbers, engines_report, looks_report, merged_record, values_of
from ipygpumem.units import GIB, MIB


def usage(device: str, kept: int, peak: int) -> Usage:
    return Usage(device, GIB, GIB + kept * MIB, GIB + peak * MIB, None, "kernel")


def engine(number: int, *usages: Usage, seconds: float = 1.0, error: str = "", **changes: object) -> EngineRecord:
    """One engine whose experiment had one cell; ``changes`` are of the experiment."""
    cell = CellRecord(1, None, "s", 0.0, seconds, not error, error or None, usages)
    record = ExperimentRecord("s", 0.0, 9.0, (cell,), usages, {"cpu": MIB}, {"cpu": MIB}, ("x",), (), (), ())
    record = replace(record, **changes)  # type: ignore[arg-type]
    return EngineRecord(number, f"host{number // 2}", 100 + number, {}, {"cpu": number * GIB}, "v", error, record)


def four(*peaks: int, **changes: object) -> list[EngineRecord]:
    return [engine(number, usage("cpu", 2, peak), **changes) for number, peak in enumerate(peaks)]  # type: ignore[arg-type]


def test_each_figure_has_its_sum_lowest_median_and_highest_and_whose_they_are() -> None:
    report = engines_report(merged_record("s", 0.0, 1.0, four(10, 30, 20, 40)))
    rows = {tuple(row[:2]): row[2:] for row in report.tables[0].rows}
    assert rows["RAM", "peak"] == ("4", "", "+10 MiB", "+20 MiB", "+40 MiB", "engine 3")
    assert rows["RAM", "kept"] == ("4", "+8 MiB", "+2 MiB", "+2 MiB", "+2 MiB", "")


def test_the_cards_of_an_engine_are_one_kind_of_device() -> None:
    one = engine(0, usage("cuda:0", 5, 100), usage("cuda:1", 7, 300))
    values = values_of(one)
    assert (values["peak", "cuda"], values["kept", "cuda"]) == (300 * MIB, 12 * MIB)


def test_errors_and_notes_are_told_once_for_engines_that_are_alike() -> None:
    engines = [*four(1, 1, notes=("a note",)), *(replace(one, error="KeyError") for one in four(1, 1, 1)[2:])]
    engines = [*engines, EngineRecord(3, error="died"), EngineRecord(4, error="died")]
    engines[1] = replace(engines[1], record=replace(engines[1].record, deleted=("x", "y"), kept=("z",)))  # type: ignore[type-var]
    merged = merged_record("s", 5.0, 1.0, engines)
    assert merged.notes == (
        "engines 0-1: a note",
        "engine 2 (host1): KeyError",
        "engines 3-4: died",
    )
    assert (merged.deleted, merged.kept) == (("x", "y"), ("z",))
    assert (merged.consumed, merged.reclaimed) == ({"cpu": 3 * MIB}, {"cpu": 3 * MIB})
    (sums,) = merged.usages
    assert (sums.device, sums.peak_delta_bytes, sums.delta_bytes) == ("cpu", 3 * MIB, 6 * MIB)
    assert engines_report(merged).is_trouble


def test_of_very_many_engines_some_have_rows_and_the_rest_are_counted() -> None:
    engines = [engine(number, usage("cpu", 1, 8)) for number in range(500)]
    shown = text.render([engines_report(merged_record("s", 0.0, 1.0, engines))])
    assert "on 500 engines" in shown
    assert "and 300 more" in shown
    assert len(shown.splitlines()) < 220


def test_a_command_shows_each_engines_text_below_the_figures_and_who_has_none() -> None:
    report = looks_report(
        "%gpumem free", {0: ("a", "came back: 1\nrest", {}), 2: ("b", "", {})}, {1: "died", 3: "died"}
    )
    assert (report.headline, report.lines) == ("%gpumem free on 2 engines", ["engines 1, 3: died"])
    assert [(listing.title, listing.lines, listing.folded) for listing in report.listings] == [
        ("engine 0 (a)", ("came back: 1", "rest"), True),
        ("engine 2 (b)", (), True),
    ]


def test_numbers_of_engines_are_ranges() -> None:
    assert [engine_numbers(numbers) for numbers in ([3], [0, 1, 2, 5], [9, 4, 8])] == [
        "engine 3",
        "engines 0-2, 5",
        "engines 4, 8-9",
    ]
