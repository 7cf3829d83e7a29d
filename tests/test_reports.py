"""Text and bars of reports; nothing in them breaks out, and front-ends' rules are obeyed."""

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.kernel import Kernel
from ipygpumem.estimating.records import DeviceEstimate, Estimate
from ipygpumem.inventory.arrays.records import Inventory, InventoryDiff, TensorGroup, TensorRecord
from ipygpumem.inventory.devices.breakdown import Part, Reconciliation
from ipygpumem.probes.children import Child
from ipygpumem.records import FreeingStep, KeptObject, ReferencePath, RetainedArray, Usage
from ipygpumem.report import html, tensors, text
from ipygpumem.report.cells import cell_report, is_quiet
from ipygpumem.report.colours import PEAK
from ipygpumem.report.estimate import estimate_report
from ipygpumem.report.experiments import experiment_reports
from ipygpumem.report.freeing import freed_report
from ipygpumem.report.html import html_bar
from ipygpumem.report.layout import Bar, Report, Table
from ipygpumem.report.leaks import ReclaimableItem, leaks_report
from ipygpumem.report.recovery import recovery_reports
from ipygpumem.report.scales import Scales
from ipygpumem.report.status import status_report
from ipygpumem.report.text import ASCII, BAR_COLUMNS, columns, text_bar
from ipygpumem.units import GIB, MIB, parse_bytes
from tests.parsed_page import Page
from tests.report_samples import RAM, cell, every_report, experiment, recovery


def test_the_line_has_errors_and_children_but_no_idle_devices() -> None:
    idle = Usage("cuda:1", 0, 0, 0, 140 * GIB, "allocator", reserved_bytes=0)
    sampled = Usage("cpu", 0, 0, MIB, None, "sampled")
    below = Usage("children", 0, 5 * MIB, 5 * MIB, None, "sampled", note="RSS")
    line = cell_report(
        cell(execution_count=None, error="ValueError", usages=(sampled, below, idle))
    ).headline
    usages = "RAM +0, peak +1 MiB (sampled), 0 B now · child processes by RSS +5 MiB, 5 MiB now"
    assert line == f"cell · 3.21 s · ValueError · {usages}"


STILL = Usage("cpu", 61 * MIB, 61 * MIB + 90_000, 61 * MIB + 700_000, 16 * GIB, "kernel")
STILL_CUDA = Usage(
    "cuda:0", GIB, GIB, GIB + 512, 24 * GIB, "allocator", reserved_bytes=2 * GIB, used_bytes=3 * GIB
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "RAM 61.1 MiB"),
        ({"device": "shm", "total_bytes": 64 * MIB}, "shared memory 61.1 MiB of 64 MiB"),
        ({"after_bytes": 60 * MIB}, "RAM -1 MiB, peak +683.6 KiB, 60 MiB now"),
        ({"peak_bytes": 62 * MIB}, "RAM +87.9 KiB, peak +1 MiB, 61.1 MiB now"),
        ({"after_bytes": 62 * MIB, "peak_bytes": 62 * MIB}, "RAM +1 MiB, peak +1 MiB, 62 MiB now"),
    ],
)
def test_a_device_that_changed_below_a_mib_shows_only_its_size(
    changes: dict[str, int], said: str
) -> None:
    record = cell(usages=(dataclasses.replace(STILL, **changes), STILL_CUDA))
    has_changed = "peak" in said
    assert cell_report(record).headline == f"cell 12 · 3.21 s · {said} · cuda:0 3.00/24.00 GiB"
    short = cell_report(dataclasses.replace(record, duration_seconds=0.9)).headline
    time = "900 ms · " if has_changed else ""
    assert short == f"cell 12 · {time}{said} · cuda:0 3.00/24.00 GiB"
    assert is_quiet(record) is not bool(changes)
    assert not is_quiet(dataclasses.replace(record, error="ValueError"))
    assert not is_quiet(dataclasses.replace(record, recovery=recovery()))


def test_the_report_of_an_experiment_in_each_style() -> None:
    (report,) = experiment_reports(experiment(), "full")
    assert text.render([report]).splitlines() == [
        "experiment small · 2 cells · 4.20 s",
        "  device   consumed    freed        peak",
        "  ──────────────────────────────────────",
        "  RAM      +600 MiB   88 MiB   +1.31 GiB",
        "  still alive, because something outside the experiment refers to it",
        "    size   what",
        "  ──────────────────────────────────────────",
        "  32 MiB   b: Tensor float32 8 × 1024 × 1024",
        "  deleted: a, b",
        "  restored: x",
        "  freed by: names (RAM 88 MiB, cuda:0 reserved 2 MiB)",
        "  keep: no name matches 'q'",
    ]
    (report,) = experiment_reports(experiment(name="n" * 500, freed={"cpu": -2 * MIB}), "compact")
    assert report.headline.endswith(
        "n · 2 cells · 4.20 s · RAM consumed +600 MiB, freed 0 B, peak +1.31 GiB"
    )
    assert len(report.headline) < 170
    assert experiment_reports(experiment(), "none") == []


def test_kept_names_show_their_memory_where_much_of_it_is() -> None:
    record = experiment(
        kept=("count", "model", "rows"),
        kept_objects=(
            KeptObject("model", {"cuda:0": 2 * GIB, "cpu": 10 * MIB}),
            KeptObject("rows", {"cuda:0": GIB, "cpu": GIB}, is_at_least=True),
        ),
    )
    (report,) = experiment_reports(record, "full")
    kept = "kept: model (cuda:0 2.00 GiB), rows (at least cuda:0 1.00 GiB, RAM 1.00 GiB), count"
    assert f"  {kept}" in text.render([report]).splitlines()


def test_the_table_of_leaks_fits_a_narrow_terminal() -> None:
    line = 'del best["run3"][0]'
    holder = ReferencePath("notebook variable best['run3'][0]", line)
    array = RetainedArray("b", "Tensor", (8, 1024, 1024), "float32", "cuda:0", 32 * MIB)
    survivor = dataclasses.replace(array, holder=holder, cell=7)

    # The rows.
    reports = experiment_reports(experiment(survivors=(survivor,)), "full")
    _, survivors = reports[0].tables
    assert survivors.columns == ("size", "what", "device", "cell", "held by", "to free it")
    assert survivors.rows[0][-1] == line

    # As text and as HTML.
    for width in (60, 100):
        shown = text.render(reports, text.Style(width=width))
        assert max(map(len, shown.splitlines())) <= width
        assert line in shown  # a line to paste is broken last
    assert "del best[&quot;run3&quot;][0]<" in html.render(reports)

    # A long table is folded.
    many = [dataclasses.replace(survivor, name=f"b{number}") for number in range(9)]
    _, table = experiment_reports(experiment(survivors=tuple(many)), "full")[0].tables
    assert table.is_collapsed


def test_no_steps_share_is_larger_than_the_total_freed() -> None:
    def step(name: str, size: int) -> FreeingStep:
        return FreeingStep(name, {"cpu": size}, {"cuda:0": 3 * MIB}, 0.1)

    steps = (step("names", 32 * MIB), step("garbage", -8 * MIB))
    (report,) = experiment_reports(experiment(steps=steps, freed={"cpu": 28 * MIB}), "full")
    assert report.facts[-1].values == [
        "names (RAM 28 MiB, cuda:0 reserved 3 MiB)",
        "garbage (cuda:0 reserved 3 MiB)",
    ]
    (report,) = experiment_reports(experiment(steps=steps, freed={"cpu": 97 * MIB}), "full")
    assert report.facts[-1].values[-1] == "allocators by themselves (RAM 65 MiB)"
    freed = freed_report("freed", steps[:1], {"cpu": -1, "cuda:0": 0})
    assert freed.headline == "freed: RAM 0 B, cuda:0 reserved 3 MiB"
    assert freed.lines == ("freed by: names (cuda:0 reserved 3 MiB)",)


def test_a_status_lists_no_part_of_a_few_bytes() -> None:
    parts = (Part("stacks", 4 * MIB, ""), Part("data of pyarrow", 26, ""), Part("gone", None, ""))
    reconciliation = Reconciliation("cpu", 4 * MIB + 26, "of it", parts)
    table = status_report("", (), (), (reconciliation,)).tables[-1]
    assert [row[:2] for row in table.rows] == [("4 MiB", "stacks"), ("unknown", "gone")]


def test_the_report_of_a_recovery() -> None:
    (report,) = recovery_reports(recovery(freed={"cpu": -5, "shm": 0, "cuda:0": 3 * MIB}), MIB)
    assert report.headline == (
        "out of memory (OutOfMemoryError) · asked for 20.00 GiB · free: RAM 10.00 GiB, cuda:0 3.00 "
        "GiB · "
        "freed: RAM 0 B, cuda:0 3 MiB"
    )
    assert report.tables[0].rows == (
        ("2 MiB", "train", "7", "batch", "Tensor", "512 × 1024", "float32", "cuda:0"),
        ("1 MiB", "main", "2", "lists", "dict", "3 arrays", "float32", "cuda:0"),
    )
    assert recovery_reports(recovery(kind="interrupt", held=()), MIB) == []
    # All rows add up to what came back: those that are too small for one of their own, and what no
    # frame held.
    small = tuple(
        RetainedArray(f"x{n}", "Tensor", (1,), "f", "cpu, cuda:0", MIB // 2, function="f")
        for n in range(3)
    )
    failed = recovery(freed={"cpu": -5, "cuda:0": 9 * MIB}, held=(*recovery().held, *small))
    (report,) = recovery_reports(failed, MIB)
    assert report.tables[0].columns[1:4] == ("function", "line", "name")
    assert [(*row[:2], row[3], row[-1]) for row in report.tables[0].rows] == [
        ("2 MiB", "train", "batch", "cuda:0"),
        ("1 MiB", "main", "lists", "cuda:0"),
        ("4.5 MiB", "", "garbage and caches", "cuda:0"),
        ("1.5 MiB", "", "and 3 more", ""),
    ]
    (broken,) = recovery_reports(recovery(kind="error", held=(), poisoned=True), MIB)
    assert "Restart the kernel" in broken.lines[0]


def test_long_lists_are_collapsed_and_the_longest_end_with_a_sum() -> None:
    arrays = tuple(RetainedArray(f"x{n}", "Tensor", (1,), "f", "cpu", 2 * MIB) for n in range(30))
    few, many = (recovery_reports(recovery(held=some), MIB) for some in (arrays[:8], arrays))
    assert [html.render(reports).count("<details open") for reports in (few, many)] == [2, 1]
    assert "held by the traceback: 60\N{NO-BREAK SPACE}MiB</summary>" in html.render(many)
    assert many[0].tables[0].rows[-1][:2] == ("20 MiB", "and 10 more")
    names = tuple(f"n{number}" for number in range(50))
    named = experiment_reports(experiment(deleted=names), "full")
    assert "n39 and 10 more\n" in text.render(named)
    assert "n39</code> and 10 more</div>" in html.render(named)


ELEMENTS = {
    "b",
    "br",
    "code",
    "details",
    "div",
    "span",
    "summary",
    "table",
    "tbody",
    "td",
    "th",
    "thead",
    "tr",
}


def test_html_has_few_elements_and_only_safe_inline_styles() -> None:
    page = Page(html.render(every_report()))
    assert page.elements == ELEMENTS - {"br"}
    assert {name for name, _ in page.attributes} == {"style", "title", "role", "aria-label", "open"}
    styles = " ".join(value for name, value in page.attributes if name == "style")
    for forbidden in ("url(", "@import", "expression", "position", "<"):
        assert forbidden not in styles
    line = cell_report(cell())  # GitHub and others drop styles, and with them the bars
    shown = "".join(Page(html.render([line])).texts).replace("\N{NO-BREAK SPACE}", " ")
    assert shown.replace("  ", " ") == line.headline
    words = 'aria-label="RAM: 3.50 GiB of 16.00 GiB in use; the bar ends at 6.00 GiB"'
    assert words in html.render([cell_report(cell(usages=(RAM,)))])
    assert 'role="img"' not in html.render([line, *every_report()], bars=False)


def test_each_kind_of_report_of_a_record_has_a_sample() -> None:
    made = r'(?:\bReport(?:\.of)?\(\s*|kind=)"(\w+)"'
    room = Path(html.__file__).parent
    files = [*room.rglob("*.py"), *room.parent.glob("extras/*/[!p]*.py")]
    sources = [path.read_text(encoding="utf-8") for path in files]
    kinds = {kind for source in sources for kind in re.findall(made, source)}
    assert kinds - {"fit"} == {report.kind for report in every_report()}


HOSTILE = (
    "<img src=x onerror=alert(1)>\x1b[31m&\"'</div>\n",
    '" onmouseover="alert(1)" x="',
    "' onclick='alert(1)",
    "</details></summary><script>alert(1)</script>",
    "{{ 7 * 7 }}{% raw %}<!--",
    "]]>&lt;b&gt;&#60;i&#62;<b",
    "a\r\x00b\x08\x7f\x9b31m\x1b]0;title\x07",
    "\u202egnp.exe\u2066\u200f\u061c",
    "\ud800lone\udfff",
    "\u2028\u2029\ufeff\u200b",
    "long" * 500,
    "汉" * 300,
)
STYLES = (text.PLAIN, *(text.Style(width=width, colour=True, bars=True) for width in (24, 80, 200)))


@pytest.mark.parametrize("word", HOSTILE, ids=lambda word: ascii(word[:20]))
def test_no_text_of_the_users_breaks_out_of_a_report(word: str) -> None:
    page = Page(html.render(every_report(word)))
    assert page.elements <= ELEMENTS
    assert {name for name, _ in page.attributes} <= {"style", "title", "role", "aria-label", "open"}
    assert "alert" not in " ".join(value for name, value in page.attributes if name == "style")
    told = "".join([*page.texts, *(value for _, value in page.attributes)])
    assert told.replace("\n", "").replace("\N{NO-BREAK SPACE}", " ").isprintable()
    for style in STYLES:
        shown = re.sub("\x1b\\[\\d+m", "", text.render(every_report(word), style))
        assert shown.replace("\n", "").isprintable()
        shown.encode()  # no lone surrogate
        assert max(map(columns, shown.splitlines())) <= (style.width or 20_000)


def test_a_narrow_table_shows_equal_cells_once() -> None:
    rows = [
        {"size": f"{n} GiB", "name": f"layers.{n}.weight", "dtype": "float32", "device": "cuda:0"}
        for n in (10, 20)
    ]
    shown = text.render(
        [Report("tensors", "two", tables=[Table.of(rows, {"size"})])], text.Style(width=32)
    )
    assert shown.splitlines() == [
        "two",
        "    size   name",
        "  ─────────────────────────",
        "  10 GiB   layers.10.weight",
        "  20 GiB   layers.20.weight",
        "  in every row: dtype float32,",
        "    device cuda:0",
    ]


def test_a_wrapped_line_has_no_separator_at_its_ends() -> None:
    assert text.wrap("1 leak · 64 MiB · batch", 10) == ["1 leak", "64 MiB", "batch"]


def test_a_narrow_terminal_drops_the_bar_then_breaks_by_device() -> None:
    report = [cell_report(cell())]
    wide, narrow, narrower = (
        text.render(report, text.Style(width=width, bars=True)) for width in (140, 118, 80)
    )
    assert wide == (
        "cell 12 · 3.21 s · RAM +512 MiB, peak +1.31 GiB, 3.50 GiB now ▕▒▒▒▒█░  ▏ · "
        "cuda:0 +1.00 GiB, peak +6.20 GiB, 8.39/140.00 GiB ▕▒█░░░░  ▏"
    )
    assert narrow == report[0].headline
    assert narrower == wide.replace(" · cuda", "\n  cuda")


def test_colour_changes_only_colour_and_ascii_moves_no_column() -> None:
    shown = text.render(every_report(), text.Style(width=100, bars=True))
    coloured = text.render(every_report(), text.Style(width=100, bars=True, colour=True))
    assert "\x1b[1m" in coloured
    assert re.sub("\x1b\\[\\d+m", "", coloured) == shown
    plain = shown.translate(text.ASCII)
    assert not shown.isascii()
    assert plain.isascii()
    lengths = [len(line) + 2 * line.count("…") + line.count("→") for line in shown.splitlines()]
    assert [len(line) for line in plain.splitlines()] == lengths


def test_a_wide_table_is_wrapped_and_then_becomes_lines() -> None:
    rows = (("x" * 20, "1.00 GiB", "one two three four five six"),)
    table = Table("", ("name", "size", "what you can do"), rows, frozenset({"size"}))
    report = [Report("note", "head", tables=(table,))]
    assert text.render(report, text.Style(width=58)).splitlines()[3:] == [
        f"  {'x' * 20}   1.00 GiB   one two three four",
        f"  {'':20}              five six",
    ]
    assert text.render(report, text.Style(width=40)).splitlines()[1:] == [
        f"  name {'x' * 20}",
        "    size 1.00 GiB · what you can do one",
        "    two three four five six",
    ]


def test_a_long_comment_is_broken_into_comment_lines() -> None:
    line = 'del box["top"]'
    rows = (("x" * 20, f"{line}  # also drops 16 MiB of older data"),)
    code = frozenset({"to free it"})
    table = Table("", ("name", "to free it"), rows, code=code, whole=code)
    report = [Report("note", "head", tables=(table,))]
    wide, narrow = (text.render(report, text.Style(width=width)) for width in (80, 50))
    assert rows[0][1] in wide
    assert narrow.splitlines()[3:] == [
        f"  {'x' * 20}   {line}",
        f"  {'':20}   # also drops 16 MiB of",
        f"  {'':20}   # older data",
    ]


def test_a_wide_table_drops_expendable_columns_in_order() -> None:
    columns = ("size", "share", "name", "type")
    rows = (
        ("1.00 GiB", "50%", "x" * 12, "DataFrame"),
        ("512 MiB", "25%", "y" * 12, "Sequential"),
    )
    table = Table("", columns, rows, {"size", "share"}, expendable=("type", "share"))
    report = [Report("note", "head", tables=(table,))]
    assert text.render(report, text.Style(width=40)).splitlines()[1:] == [
        "      size   share   name",
        "  ───────────────────────────────",
        "  1.00 GiB     50%   xxxxxxxxxxxx",
        "   512 MiB     25%   yyyyyyyyyyyy",
        "  columns left out in this width: type",
    ]
    lines = text.render(report, text.Style(width=26)).splitlines()
    assert lines[1] == "      size   name"
    assert lines[-1].split() == ["share"]


def leak(path: str, *, name: str = "", size: int = MIB) -> RetainedArray:
    return RetainedArray(
        name, "Tensor", (4,), "f", "cpu", size, holder=ReferencePath(path, "del it")
    )


def rows_of(report: Report) -> list[str]:
    """Return the filled cells of each row of a report's only table, with separators."""
    (table,) = report.tables
    return [" · ".join(filter(None, row)) for row in table.rows]


def test_leaks_in_one_container_share_a_line_largest_first() -> None:
    graph = ": its autograd graph (ReluBackward0)"
    leaks = [
        leak("cache[0]"),
        leak("cache[1]"),
        leak("x", size=4 * MIB),
        leak("cache[7]"),
        leak("other[0]"),
    ]
    leaks += [leak(f"losses[{n}]{graph}", size=MIB // 4) for n in range(8)]
    leaks += [leak('runs["a[1]"]'), leak('runs["a[2]"]')]
    report = leaks_report(leaks, MIB)
    assert report.headline == "6 leaks · 12 MiB"
    assert rows_of(report) == [
        "4 MiB · Tensor f 4 · x · del it",
        "3 MiB · 3 × Tensor f 4 · cache[…] · del it",
        f"2 MiB · 8 × Tensor f 4 · losses[…]{graph} · del it",
        "1 MiB · Tensor f 4 · other[0] · del it",
        '1 MiB · Tensor f 4 · runs["a[1]"] · del it',
        '1 MiB · Tensor f 4 · runs["a[2]"] · del it',
    ]
    holders = [ReferencePath(f"Out[{n}]", f"%xdel _{n}") for n in (3, 5)]
    leaks = [
        RetainedArray("", "Tensor", (4,), "f", "cpu", MIB, holder=holder) for holder in holders
    ]
    assert [row.split("%")[1] for row in rows_of(leaks_report(leaks, MIB))] == [
        "xdel _3",
        "xdel _5",
    ]


def test_leaks_from_all_searches_are_sorted_by_size() -> None:
    leak = RetainedArray(
        "x", "Tensor", (4,), "f", "cpu", 3 << 20, holder=ReferencePath("x", "del x")
    )
    graphs = ReclaimableItem(5 * MIB, "cpu", "losses keep their graphs", "losses.clear()", 5 * MIB)
    output = ReclaimableItem(MIB, "cpu", "Out[3]", "%xdel _3", MIB)
    report = leaks_report([leak], 1 << 20, kept=[output, graphs])
    assert report.headline == "1 leak, 2 reclaimable items · 9 MiB"
    assert [row.partition(" ")[0] for row in rows_of(report)] == ["5", "3", "1"]


def test_a_row_of_leaks_counts_nothing_of_earlier_rows() -> None:
    graphs = ReclaimableItem(5 * MIB, "cpu", "losses keep their graphs", "losses.clear()", 2 * MIB)
    report = leaks_report([leak("x", size=3 * MIB)], MIB, kept=[graphs])
    assert report.headline == "1 leak, 1 reclaimable item · 5 MiB"
    assert rows_of(report)[1] == (
        "2 MiB · losses keep their graphs (3 MiB more of it in the rows of leaks) · losses.clear()"
    )


def test_leaks_say_at_least_where_memory_is_not_counted() -> None:
    index = dataclasses.replace(leak("x"), is_at_least=True, uncounted=("faiss",))
    report = leaks_report([index, leak("y")], MIB)
    assert report.headline == "2 leaks · at least 2 MiB"
    assert rows_of(report)[0] == (
        "at least 1 MiB · Tensor f 4; faiss keeps memory that is not counted · x · del it"
    )
    output = ReclaimableItem(MIB, "cpu", "Out[3]", "%xdel _3", MIB, is_at_least=True)
    report = leaks_report([], MIB, kept=[output])
    assert report.headline == (
        "no leak of at least 1 MiB, but at least 1 MiB are kept by what is listed below"
    )
    assert rows_of(report) == ["at least 1 MiB · Out[3] · %xdel _3"]


def test_objects_of_several_types_are_counted_with_their_types() -> None:
    mixed = dataclasses.replace(
        leak("x", name="fig"),
        type_name="object",
        shape=None,
        dtype="",
        arrays=0,
        objects=89,
        parts={"Figure": MIB, "ndarray": MIB // 2},
    )
    assert rows_of(leaks_report([mixed], MIB)) == [
        "1 MiB · fig: 89 objects (Figure 1 MiB, ndarray 512 KiB) · x · del it"
    ]


def test_an_object_is_shown_with_its_large_parts_alone() -> None:
    """A ``functools.partial`` was shown with 64 B of keywords."""
    partial = dataclasses.replace(
        leak("x"),
        type_name="partial",
        shape=None,
        dtype="",
        parts={".args": MIB, ".keywords": 64},
    )
    assert rows_of(leaks_report([partial], MIB)) == [
        "1 MiB · partial with .args 1 MiB · x · del it"
    ]


def test_leaks_that_are_too_many_to_examine_are_counted() -> None:
    line = (
        "2 smaller storages, 2 MiB in total: too many to examine; free larger ones first, then run "
        "it again"
    )
    report = leaks_report([leak("a\x1b[2Jb", name="x\ny")], MIB, [leak("y"), leak("z")])
    assert (report.headline, report.lines) == ("1 leak, 2 unexamined storages · 3 MiB", [line])
    assert rows_of(report)[0].isprintable()
    assert leaks_report([], MIB, [leak("y"), leak("z")]).lines == [line]


def test_leaks_that_are_too_many_to_show_are_counted() -> None:
    rows = rows_of(leaks_report([leak(f"x{n}") for n in range(23)], MIB))
    assert (len(rows), rows[-1]) == (21, "3 MiB · and 3 more")


def test_reclaimable_items_are_listed_below_the_leaks() -> None:
    items = []
    for number in range(1, 24):
        size_bytes = number * MIB
        items.append(
            ReclaimableItem(size_bytes, "cpu", f"losses{number - 1}", "del it", size_bytes)
        )
    headline = leaks_report([leak("x")], MIB, (), items).headline
    assert headline == "1 leak, 23 reclaimable items · 277 MiB"
    report = leaks_report([], MIB, (), items, ["a note"])
    headline = "no leak of at least 1 MiB, but 276 MiB are kept by what is listed below"
    assert report.headline == headline
    rows = rows_of(report)
    assert (rows[0], rows[-1]) == ("23 MiB · losses22 · del it", "6 MiB · and 3 more")
    assert report.lines == ["a note"]


def test_leaks_are_a_table_with_a_column_for_the_line_that_frees() -> None:
    output = ReclaimableItem(MIB, "cuda:0", "Out[3]", "%xdel _3", MIB)
    report = leaks_report([dataclasses.replace(leak("x", name="a"), cell=7)], MIB, (), [output])
    (table,) = report.tables
    assert table.columns == ("size", "what", "device", "cell", "held by", "to free it")
    assert set(table.rows) == {
        ("1 MiB", "a: Tensor f 4", "", "7", "x", "del it"),
        ("1 MiB", "Out[3]", "cuda:0", "", "", "%xdel _3"),
    }
    assert "in every row" not in text.render([leaks_report([leak("x"), leak("y")], MIB)])


def test_an_estimate_is_three_groups_that_add_up() -> None:
    device = DeviceEstimate(
        "cuda:0",
        before_bytes=MIB,
        peak_bytes=8 * MIB,
        after_bytes=3 * MIB,
        reserved_bytes=12 * MIB,
        needed_bytes=10 * MIB,
        parts={"parameters": 6 * MIB, "activations": 2 * MIB},
        room_bytes=GIB,
        spare_bytes=16 * MIB,
        context_bytes=400 * MIB,
    )
    parts, added, verdict = estimate_report(Estimate((device,), 0.1)).tables
    assert parts.rows == (
        ("6 MiB", "75%", "parameters"),
        ("2 MiB", "25%", "activations"),
        ("8 MiB", "", "sum: the peak"),
    )
    assert added.rows == (
        ("+2 MiB", "fragmentation"),
        ("+16 MiB", "headroom for GPU kernels"),
        ("+400 MiB", "CUDA context"),
        ("426 MiB", "sum: needed in total"),
    )
    assert verdict.rows[-1] == ("1.00 GiB", "available: fits")


TENSORS = tuple(
    TensorRecord(f"x[{n}]", "Tensor", (1,), "f", "cpu", (40 - n) * MIB) for n in range(35)
)
CUT = {
    "tensors": tensors.tensors_report(Inventory(TENSORS, 0.0), top=7),
    "groups": tensors.groups_report(
        Inventory(TENSORS, 0.0),
        "shape",
        [TensorGroup(str(t.name), 1, t.size_bytes) for t in TENSORS],
        top=7,
    ),
    "added": tensors.difference_report(InventoryDiff(TENSORS, (), "", ""), top=7),
    "held": recovery_reports(
        recovery(held=tuple(leak("", size=t.size_bytes) for t in TENSORS), freed={}), 0
    )[0],
    "children": status_report(
        "", (), (), (), [Child(n, "", 0.0, t.size_bytes, True) for n, t in enumerate(TENSORS)]
    ),
}


@pytest.mark.parametrize("report", CUT.values(), ids=CUT)
def test_the_sizes_in_a_table_that_is_cut_add_up(report: Report) -> None:
    (table,) = [table for table in report.tables if "size" in table.columns]
    place = table.columns.index("size")
    assert sum(parse_bytes(row[place]) for row in table.rows) == sum(
        tensor.size_bytes for tensor in TENSORS
    )
    number = next(
        int(match[1]) for text in table.rows[-1] if (match := re.match(r"and (\d+) more", text))
    )
    assert number + len(table.rows) - 1 == len(TENSORS)


SIZES = st.integers(-(2**50), 2**50)
BAR = Bar("cuda:0: half", 16, 6, 4, 2)


def cuda(before: int, after: int, peak: int, reserved: int, used: int) -> Usage:
    sizes = (before * GIB, after * GIB, peak * GIB)
    return Usage(
        "cuda:0",
        *sizes,
        80 * GIB,
        "allocator",
        reserved_bytes=reserved * GIB,
        used_bytes=used * GIB,
    )


def ram(before: int, after: int, peak: int, total: int = 64 * GIB) -> Usage:
    return Usage("cpu", before * MIB, after * MIB, peak * MIB, total, "kernel")


def gib(bar: Bar | None) -> tuple[int, ...]:
    assert bar is not None
    return tuple(size // GIB for size in (bar.used_bytes, bar.kept_bytes, bar.peak_bytes))


def test_in_use_kept_peak_and_free_have_their_own_characters() -> None:
    assert text_bar(BAR) == "▕▒▒▒██░  ┃"
    assert text_bar(BAR).translate(ASCII) == "[===##-  |"


def test_a_bar_is_as_long_as_the_sessions_highest_use_rounded_up() -> None:
    scales = Scales()
    change = ram(1000, 1080, 1080)
    bar = scales.bar(change)
    assert bar is not None
    assert (bar.length_bytes, bar.is_whole) == (1536 * MIB, False)
    assert bar.label == "RAM: 1.05 GiB of 64.00 GiB in use; the bar ends at 1.50 GiB"
    # 4090 is so near to 4 GiB that the bar would look full.
    for highest, length in ((3900, 4), (4090, 6)):
        scales.lengthen_for([ram(1000, 1000, highest)])
        bar = scales.bar(change)
        assert bar is not None
        assert bar.length_bytes == length * GIB

    # Changes that are too small for a bar, and large enough.
    scales.lengthen_for([ram(0, 0, 8000)])
    assert scales.bar(change) is None  # 80 MiB are below 1 % of 12 GiB
    assert scales.bar(ram(1150, 1000, 1150)) is not None  # given back
    scales.lengthen_for([Usage("cuda:0", 0, 0, GIB, 8 * GIB, "allocator")])
    assert scales.bar(ram(1000, 1150, 1150)) is not None


def test_a_peak_is_converted_to_the_whole_devices_use() -> None:
    scales = Scales()
    # 5 GiB are others', 30 reserved, of which 10 were in use before, 12 after and 25 at the peak
    assert gib(scales.bar(cuda(10, 12, 25, 30, 35))) == (20, 2, 13)
    # the cache was given back within the cell
    assert gib(scales.bar(cuda(10, 12, 25, 12, 17))) == (15, 2, 13)
    # memory that was freed lies between what is left and the peak
    assert gib(scales.bar(cuda(10, 2, 11, 2, 7))) == (7, 0, 9)
    # where the device's use is not known, the process's own is shown, and without a total nothing
    assert gib(Scales().bar(Usage("cpu", 2 * GIB, 3 * GIB, 4 * GIB, 8 * GIB, "kernel"))) == (
        2,
        1,
        1,
    )
    assert Scales().bar(Usage("cpu", 2, 3, 4, None, "kernel")) is None
    assert Scales().bar(Usage("cpu", 2, 3, 4, 0, "kernel")) is None


@given(st.integers(1, 2**50), SIZES, SIZES, SIZES)
def test_a_bar_is_never_longer_than_its_cells(total: int, used: int, kept: int, peak: int) -> None:
    bar = Bar("", total, used, kept, peak)
    assert sum(bar.pieces) <= total
    assert (
        all(piece == 0 or piece * 100 >= total for piece in bar.pieces) or sum(bar.pieces) == total
    )
    assert len(text_bar(bar)) == BAR_COLUMNS
    assert sum(map(float, re.findall(r" width: ([\d.]+)%", html_bar(bar)))) <= 100.2


# Front-ends that are not run here, by the rules that they document or carry in their sources; our
# bundles obey them.
#
# - VS Code: ``NOTEBOOK_DISPLAY_ORDER`` and ``ACCESSIBLE_NOTEBOOK_DISPLAY_ORDER`` in
#   microsoft/vscode, src/vs/workbench/contrib/notebook/common/notebookCommon.ts; all outputs of a
# notebook share one
#   webview, whose theme is custom properties named ``--vscode-...`` (its webview guide). Its
#   renderer (extensions/notebook-renderers/src/index.ts) inserts HTML as it is, and none in a
#   workspace that is not trusted: there the first type that is always secure is shown
#   (notebookCommon.ts, cellOutputViewModel.ts).
# - Colab: each output is a document of its own in a sandboxed iframe whose theme is ``--colab-...``
#   properties and the
#   page's own text colour; a notebook with outputs may have 20 MB.
# - JupyterLab 4: the sanitizer of @jupyterlab/apputils for notebooks that are not trusted: lists of
#   elements,
#   attributes and style properties, whose values must match patterns without ``var()``.
# - GitHub drops every style.

VS_CODE_ORDER = (
    *(
        "application/json",
        "application/javascript",
        "text/html",
        "image/svg+xml",
        "text/latex",
        "text/markdown",
    ),
    *("image/png", "image/jpeg", "text/plain"),
)
VS_CODE_ACCESSIBLE_ORDER = (
    *(
        "text/latex",
        "text/markdown",
        "application/json",
        "text/html",
        "image/svg+xml",
        "image/png",
        "image/jpeg",
    ),
    "text/plain",
)
VS_CODE_SECURE = {"text/latex", "text/markdown", "application/json", "text/plain"}
VS_CODE_SECURE |= {"image/png", "image/jpeg"}
LAB_ATTRIBUTES = {"style", "title", "open"}
LAB_PROPERTIES = {
    *("align-items", "background", "border", "border-bottom", "border-collapse", "border-left"),
    *("border-radius", "border-right", "box-sizing", "cursor", "display", "flex"),
    *("flex-wrap", "font-family", "font-size", "font-weight", "height", "line-height"),
    *("margin", "margin-left", "max-width", "min-width", "opacity", "overflow"),
    *("overflow-wrap", "overflow-x", "padding", "padding-left", "text-align", "white-space"),
    "width",
}

PAGE = html.render(every_report())
DECLARED = [value for name, value in sorted(Page(PAGE).attributes) if name == "style"]


def declarations(style: str) -> list[tuple[str, str]]:
    pairs = (part.split(":", 1) for part in style.split(";") if part.strip())
    return [(name.strip(), value.strip()) for name, value in pairs]


class Sanitizer(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.kept = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ELEMENTS:
            return
        kept = {name: value or "" for name, value in attributes if name in LAB_ATTRIBUTES}
        if "style" in kept:
            known = [pair for pair in declarations(kept["style"]) if pair[0] in LAB_PROPERTIES]
            kept["style"] = "; ".join(
                f"{name}: {value}" for name, value in known if "var(" not in value
            )
        self.kept += (
            f"<{tag}{''.join(f' {name}={json.dumps(value)}' for name, value in kept.items())}>"
        )

    def handle_endtag(self, tag: str) -> None:
        self.kept += f"</{tag}>" if tag in ELEMENTS else ""

    def handle_data(self, data: str) -> None:
        self.kept += data


@pytest.mark.parametrize("order", [VS_CODE_ORDER, VS_CODE_ACCESSIBLE_ORDER])
def test_vs_code_finds_html_first_in_every_bundle(order: tuple[str, ...], kernel: Kernel) -> None:
    kernel.run("%%experiment one\nx = bytearray(4 << 20)")
    for code in ("1", "%%experiment two\ny = 1", "%gpumem status", "%gpumem leaks", "%gpumem free"):
        displays = [
            display for display in kernel.run(code).displays if "ipygpumem" in display["metadata"]
        ]
        assert displays, code
        for display in displays:
            assert set(display["data"]) <= set(order)
            assert min(display["data"], key=order.index) == "text/html"
            secure = VS_CODE_SECURE & set(display["data"])
            assert min(secure, key=order.index) == "text/plain"  # in a workspace without trust


def test_styles_stay_inside_the_output_and_use_the_pages_colour() -> None:
    assert not re.search(
        r"<style|<script|<link|\sid=|\sclass=|\son\w+=|position:|z-index:|100v[wh]", PAGE
    )
    assert "color" not in {name for style in DECLARED for name, _ in declarations(style)}


def test_every_theme_variable_has_a_plain_value_to_fall_back_on() -> None:
    used = [pair for style in DECLARED for pair in declarations(style) if "var(" in pair[1]]
    assert used
    for style in DECLARED:
        pairs = declarations(style)
        for number, (name, value) in enumerate(pairs):
            assert value.count("var(") == len(
                re.findall(r"var\(--(?:jp|vscode)-[\w-]+, ", value)
            ), value
            if "var(" in value:
                before = {earlier for earlier, plain in pairs[:number] if "var(" not in plain}
                assert name in before or name.rsplit("-", 1)[0] in before or "margin" in before, (
                    name,
                    style,
                )


def test_jupyterlab_keeps_reports_of_an_untrusted_notebook() -> None:
    before = Page(PAGE)
    after = Page(Sanitizer(PAGE).kept)
    assert after.elements == before.elements
    assert "".join(after.texts) == "".join(before.texts)
    assert {name for name, _ in after.attributes} == LAB_ATTRIBUTES
    bar = Sanitizer(html.render([cell_report(cell(usages=(RAM,)))])).kept
    assert re.findall(r'width: ([\d.]+)%; background: (.+?)"', bar) == [
        ("50.0", "rgba(128, 128, 128, 0.6)"),
        ("8.4", "#1e88e5"),
        ("13.6", PEAK),
    ]
