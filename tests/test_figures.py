"""Pictures: nothing overlaps, nothing leaks, nothing of the user's is touched, and what they say is right."""

from __future__ import annotations

import base64
import dataclasses
import gc
import importlib.util
import itertools
import random
import runpy
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
from IPython.core.interactiveshell import InteractiveShell
from matplotlib.text import Text

import ipygpumem
from ipygpumem.errors import NotLoadedError, PlotError
from ipygpumem.model import CellRecord, ExperimentRecord, SessionRecord, Usage
from ipygpumem.reconcile.records import Part, Reconciliation
from ipygpumem.reports.figures import axes, cells, devices, experiments, picture, session
from ipygpumem.units import GIB, MIB
from tests.kernel import Kernel

pytestmark = pytest.mark.usefixtures("others_out_of_sight")

HOSTILE = (
    r"$\frac{x}$ 100%",
    "two\nlines\x1b[31m",
    "x" * 300,
    "<script>alert('&')</script>",
    "emoji \N{FIRE}\N{ROCKET} und Ümlaut 中文",
    "",
    "\ud800",
)


def made_up(number: int, *, gpus: int = 1, seed: int = 1, names: tuple[str, ...] = ()) -> list[Any]:
    """Records of so many cells with random figures; every ninth begins an experiment of four cells."""
    chance = random.Random(seed)
    sizes = {"cpu": 300 * MIB, **{f"cuda:{index}": 0 for index in range(gpus)}}
    totals = {device: 15 * GIB if device == "cpu" else 8 * GIB for device in sizes}
    records: list[Any] = []
    moment = 1.79e9
    for index in range(1, number + 1):
        usages = []
        for device, before in sizes.items():
            after = min(max(0, before + round(chance.uniform(-0.4, 0.5) * GIB)), 7 * GIB)
            peak = max(before, after) + round(chance.random() ** 4 * GIB)
            reserved = None if device == "cpu" else peak
            usages.append(Usage(device, before, after, peak, totals[device], "kernel", reserved_bytes=reserved))
            sizes[device] = after
        error = "OutOfMemoryError" if index % 40 == 7 else "ValueError" if index % 11 == 5 else None
        seconds = chance.choice([0.01, 1, 30]) * chance.random()
        records.append(CellRecord(index, None, None, moment, seconds, error is None, error, tuple(usages)))
        moment += seconds + chance.expovariate(1 / 20)
    for start in range(2, number - 3, 9):
        name = names[start % len(names)] if names else f"sweep {start}"
        records.append(made_up_experiment(name, records[start : start + 4], {"lr": 10.0**-start, "name": name}))
    return records


def made_up_experiment(name: str, own: list[CellRecord], parameters: dict[str, Any]) -> ExperimentRecord:
    """An experiment of these cells that kept a tenth of what it consumed."""
    first, last = own[0], own[-1]
    usages, consumed, reclaimed = [], {}, {}
    for index, before in enumerate(first.usages):
        consumed[before.device] = last.usages[index].after_bytes - before.before_bytes
        kept = consumed[before.device] // 10
        reclaimed[before.device] = consumed[before.device] - kept
        peak = max(cell.usages[index].peak_bytes for cell in own)
        changed = {"after_bytes": before.before_bytes + kept, "peak_bytes": peak}
        usages.append(dataclasses.replace(before, **changed))
    seconds = last.started_at + last.duration_seconds - first.started_at
    rest: dict[str, Any] = {"deleted": (), "restored": (), "kept": (), "survivors": (), "parameters": parameters}
    return ExperimentRecord(
        name, first.started_at, seconds, tuple(own), tuple(usages), consumed, reclaimed, ooms=1, **rest
    )


def reconciliation(device: str = "cuda:0") -> Reconciliation:
    """A device with parts of all kinds: large, tiny, of unknown size."""
    sizes = {
        "tensors: parameter": 3 * GIB,
        "tensors: buffer": MIB,
        "rounding": MIB // 2,
        "waiting for a stream": 3,
        "held by C++ or autograd": GIB,
        "allocator cache": 2 * GIB,
        HOSTILE[2]: GIB,
        HOSTILE[0]: GIB,
        "unknown": 5,
        "free": 4 * GIB,
    }
    parts = [Part(name, size, "") for name, size in sizes.items()]
    nobody_knows = Part("unknown: context, libraries and other processes", None, "why")
    return Reconciliation(device, sum(sizes.values()), "the device's memory", (*parts, nobody_knows))


def split(records: list[Any]) -> tuple[list[CellRecord], list[ExperimentRecord]]:
    """The cells and the experiments of ``made_up``."""
    return (
        [item for item in records if isinstance(item, CellRecord)],
        [item for item in records if isinstance(item, ExperimentRecord)],
    )


@pytest.fixture(autouse=True)
def nothing_of_the_users_is_touched() -> Iterator[None]:
    """No picture is in pyplot's registry, and neither settings nor the backend have changed."""
    settings, backend = dict(mpl.rcParams), mpl.get_backend()
    yield
    assert plt.get_fignums() == []
    assert dict(mpl.rcParams) == settings
    assert mpl.get_backend() == backend


# -- what stands where ----------------------------------------------------------------------------------------


def texts(figure: picture.Picture) -> list[tuple[str, Any]]:
    """Every text that is drawn, with its box in pixels."""
    figure.canvas.draw()  # ticks are placed by drawing
    legends = [*figure.legends, *filter(None, (panel.get_legend() for panel in figure.axes))]
    items = [*figure.texts, *(item for legend in legends for item in legend.get_texts())]
    for panel in figure.axes:
        items += [*panel.texts, panel._left_title]  # type: ignore[attr-defined]  # where titles go
        for axis in (panel.xaxis, panel.yaxis) if panel.axison else ():
            items += [axis.label, *(tick.label1 for tick in axis._update_ticks())]  # those within the limits
    assert {item for item in items if item.get_text()} <= set(figure.findobj(Text))
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]  # Agg's
    with picture.drawing():
        return [(item.get_text(), item.get_window_extent(renderer)) for item in items if item.get_text().strip()]


def check(figure: picture.Picture) -> None:
    """No text overlaps another, and none leaves the figure."""
    found = texts(figure)
    assert len(found) > 3
    whole = figure.bbox
    for text, box in found:
        inside = whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1
        assert inside, (text, box, whole)
    for (one, box), (other, other_box) in itertools.combinations(found, 2):
        width = min(box.x1, other_box.x1) - max(box.x0, other_box.x0)
        height = min(box.y1, other_box.y1) - max(box.y0, other_box.y0)
        assert width <= 0.5 or height <= 2, (one, other, box, other_box)  # lines have 2 pixels of air in their boxes


@pytest.mark.parametrize(
    ("number", "gpus"), [(1, 0), (1, 1), (2, 1), (5, 1), (12, 1), (60, 3), (200, 0), (200, 3), (2000, 1)]
)
def test_no_text_of_a_session_or_its_cells_overlaps_or_is_cut_off(number: int, gpus: int) -> None:
    own, scopes = split(made_up(number, gpus=gpus, seed=number))
    check(session.draw(own, scopes))
    check(cells.draw(own))


@pytest.mark.parametrize(("number", "gpus"), [(1, 0), (1, 4), (3, 1), (14, 0), (60, 2)])
def test_no_text_of_a_comparison_overlaps_or_is_cut_off(number: int, gpus: int) -> None:
    scopes = split(made_up(9 * number, gpus=gpus, names=(*HOSTILE, "short")))[1]
    check(experiments.draw(scopes))


def test_no_text_of_a_stacked_bar_overlaps_or_is_cut_off() -> None:
    check(devices.draw([reconciliation("cpu"), reconciliation(), reconciliation(HOSTILE[2])]))


def test_the_pictures_of_the_documentation_are_whole() -> None:
    made = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "plots.py"))["pictures"]()
    assert sorted(made) == ["cells", "devices", "experiments", "session"]
    for figure in made.values():
        check(figure)


def test_hostile_names_are_cleaned_and_shortened_and_are_no_formulas() -> None:
    own, scopes = split(made_up(120, names=HOSTILE))
    strange = [dataclasses.replace(cell, experiment=HOSTILE[index % 7]) for index, cell in enumerate(own)]
    for figure in (session.draw(strange, scopes), experiments.draw(scopes)):
        check(figure)
        shown = [text for text, _ in texts(figure)]
        assert not any(item.get_parse_math() for item in figure.findobj(Text) if item.get_text())
        assert not [text for text in shown if not text.isprintable() or len(text) > 200]
    assert any(text.startswith(r"$\frac") for text in shown)
    assert any(text.startswith("<script>") for text in shown)
    assert figure.svg().count("<script>") == 0


def test_two_thousand_cells_are_drawn_as_a_few_artists() -> None:
    own = split(made_up(2000))[0]
    for figure in (session.draw(own), cells.draw(own)):
        assert sum(len(part.patches) + len(part.collections) + len(part.lines) for part in figure.axes) < 260
        figure.release()


def test_the_numbers_of_two_thousand_cells_are_measured_by_how_many_digits_they_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = []
    inches = picture.inches
    monkeypatch.setattr(
        picture, "inches", lambda text, *options, **more: measured.append(text) or inches(text, *options, **more)
    )
    session.draw(split(made_up(2000))[0])
    assert 0 < len(measured) < 50


def test_a_session_says_which_cells_and_how_many_experiments_are_left_out() -> None:
    records = made_up(30)
    own = split(records)[0]
    figure = ipygpumem.plot.session(records, last=20)
    assert "last 20 cells (10 earlier left out)" in figure.summary
    assert any("last 20 cells (10 earlier left out)" in text for text, _ in texts(figure))
    assert "left out" not in ipygpumem.plot.session(records).summary
    nested = [made_up_experiment(f"level {index}", own[index : 20 - index], {}) for index in range(6)]
    assert "4 experiments and 2 more" in session.draw(own, nested).summary


def test_small_parts_are_one_and_the_unknown_is_never_among_them() -> None:
    shown = [text for text, _ in texts(devices.draw([reconciliation()]))]
    assert any(text.startswith("3 small parts · ") for text in shown)
    assert not any(text.startswith("rounding") for text in shown)
    assert "unknown · 5 B, <1 %" in shown
    assert sum(1 for text in shown if text.startswith("unknown: context") and text.endswith(" · unknown")) == 1


def test_the_comparison_names_parameters_and_numbers_what_has_one_name() -> None:
    own = split(made_up(4))[0]
    scopes = [made_up_experiment("sweep", own, {"lr": 0.5}), made_up_experiment("sweep", own, {"lr": 0.25})]
    shown = [text for text, _ in texts(experiments.draw(scopes))]
    assert {"sweep #1", "sweep #2", "lr=0.5", "lr=0.25", "RAM", "cuda:0"} <= set(shown)


def test_an_experiment_that_is_still_open_is_on_the_time_line() -> None:
    own = [dataclasses.replace(cell, experiment="open") for cell in split(made_up(3))[0]]
    assert "open" in [text for text, _ in texts(session.draw(own))]


# -- axes -----------------------------------------------------------------------------------------------------


def shown_ticks(panel: Any) -> list[str]:
    """The labels of the ticks within the limits."""
    low, high = panel.get_ylim()
    return [panel.yaxis.get_major_formatter()(value) for value in panel.get_yticks() if low <= value <= high]


def test_memory_is_counted_in_binary_units() -> None:
    panel = picture.Picture(4, "", "").subplots()
    panel.set_ylim(0, 1.3 * GIB)
    axes.set_bytes(panel.yaxis)
    assert shown_ticks(panel) == ["0", "0.25 GiB", "0.5 GiB", "0.75 GiB", "1 GiB", "1.25 GiB"]
    panel.set_ylim(-3 * MIB, 5 * MIB)
    axes.set_bytes(panel.yaxis)
    assert shown_ticks(panel) == ["−2 MiB", "0", "2 MiB", "4 MiB"]


def test_long_pauses_are_shortened_and_the_axis_says_so() -> None:
    axis = axes.TimeAxis([(0, 10), (11, 20), (3620, 3630)])
    assert axis.place([0, 10, 11, 20]).tolist() == [0, 10, 11, 20]
    assert axis.shortened == [3600]
    assert axis.place(3620) == pytest.approx(20 + axis.longest_pause)
    assert axis.length == pytest.approx(29 / 0.75)
    assert (axis.place(3620), "1:00:20") in axis.ticks(0.1 * axis.length)


def test_short_pauses_stay_as_they_are() -> None:
    axis = axes.TimeAxis([(100, 110), (112, 120)])
    assert axis.shortened == []
    assert axis.place([112, 500]).tolist() == [12, 20]
    assert [label for _, label in axis.ticks(4)] == ["0", "0:05", "0:10", "0:15"]


def test_times_between_seconds_have_as_many_digits_as_the_steps() -> None:
    axis = axes.TimeAxis([(0, 0.2), (10.253141, 10.45)])
    assert "10.25 s" in [label for _, label in axis.ticks(0.04)]


@pytest.mark.parametrize("spans", [[(5.0, 5.0)], [(5.0, 5.0), (9e9, 9e9)], [(0, 1e-5)], [(0, 1), (1e7, 1e7 + 1)]])
def test_every_time_axis_has_a_beginning_and_a_length(spans: list[tuple[float, float]]) -> None:
    axis = axes.TimeAxis(spans)
    assert axis.length > 0
    assert axis.ticks(axis.length / 8)[0] == (0, "0")


# -- nothing stays --------------------------------------------------------------------------------------------


def test_a_picture_that_nobody_holds_is_gone_with_its_memory() -> None:
    own, scopes = split(made_up(12))
    gc.collect()
    gone: list[weakref.ref[Any]] = []
    for figure in (
        session.draw(own, scopes),
        cells.draw(own),
        experiments.draw(scopes),
        devices.draw([reconciliation()]),
    ):
        figure.render()
        gone.append(weakref.ref(figure))
        gone += [weakref.ref(item) for item in figure.axes]
    del figure
    gc.collect()
    assert [item() for item in gone] == [None] * len(gone)


def test_a_shown_picture_lets_go_of_its_pixels_without_the_garbage_collector() -> None:
    figure = cells.draw(split(made_up(3))[0])
    figure.render()
    pixels = weakref.ref(figure.canvas)
    gc.collect()
    gc.disable()
    try:
        figure.release()
        assert pixels() is None
    finally:
        gc.enable()


def test_the_users_style_changes_nothing_in_a_picture() -> None:
    own = split(made_up(3))[0]
    plain = cells.draw(own).render()
    with (
        plt.style.context("dark_background"),
        mpl.rc_context({"font.size": 30, "axes.grid": False, "text.parse_math": True}),
    ):
        assert cells.draw(own).render() == plain


def test_equal_pictures_are_equal_files() -> None:
    own = split(made_up(5))[0]
    for kind in ("png", "svg"):
        assert session.draw(own).render(kind) == session.draw(own).render(kind)
    assert session.draw(own).svg().startswith("<svg")


# -- from a notebook ------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(shell: InteractiveShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InteractiveShell:
    """A terminal with the extension and one finished cell, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    shell.run_line_magic("load_ext", "ipygpumem")
    shell.run_cell("%%experiment first --note lr=0.5 --report none\nx = 1", store_history=True)
    return shell


def said(shell: InteractiveShell, line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What ``%gpumem plot`` prints, or its error."""
    capsys.readouterr()
    result = shell.run_cell(f"%gpumem off\n%gpumem plot {line}")
    error = result.error_in_exec
    return capsys.readouterr().out if error is None else f"{type(error).__name__}: {error}"


def test_a_terminal_says_the_figures_and_how_to_get_the_picture(
    terminal: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    out = said(terminal, "", capsys)
    assert "memory over the session · 1 cell · 1 experiment" in out
    assert "RAM · " in out
    assert "--save FILE.png" in out


@pytest.mark.parametrize("name", ["session", "cells", "devices", "experiments"])
def test_each_picture_is_written_to_a_file(
    terminal: InteractiveShell, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    assert "saved: " in said(terminal, f"{name} --device RAM --save {name}.png", capsys)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "saved: " in said(terminal, f"{name} -n 1 --save {name}.svg", capsys)
    assert (tmp_path / f"{name}.svg").read_text("utf-8").rstrip().endswith("</svg>")
    assert "saved: " in said(terminal, f"{name} --save {name}.svg", capsys)  # ours may be written over
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.png", f"{name}.svg"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pie", "invalid choice: 'pie'"),
        ("cells -n 0", "-n 0: how many cells? Write a number of 1 or more"),
        ("cells -n many", "argument -n: invalid int value: 'many'"),
        ("cells --device tpu", "device 'tpu' was not in use; there are: RAM"),
        ("devices --device tpu", "device 'tpu' is not known; there are: RAM"),
        ("cells --save cells.gif", "cells.gif: write a file name that ends in .png or .svg"),
        ("cells --save cells", "cells: write a file name that ends in .png or .svg"),
        ("cells --save nowhere/cells.png", "nowhere/cells.png cannot be written: No such file or directory"),
        ("cells --save cat.png", "cat.png is a file that ipygpumem did not write: --force"),
    ],
)
def test_a_mistake_is_said_in_one_line_and_writes_nothing(
    terminal: InteractiveShell, capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, words: str
) -> None:
    (tmp_path / "cat.png").write_bytes(b"a cat")
    out = said(terminal, line, capsys)
    assert out.startswith("UsageError: ")
    assert words in out
    assert "\n" not in out
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("cat.png", b"a cat")]


def test_options_and_files_are_completed(terminal: InteractiveShell, tmp_path: Path) -> None:
    (tmp_path / "old.png").touch()
    (tmp_path / "notes.txt").touch()
    terminal.Completer.use_jedi = False  # its trees would stay: as many objects as all the rest of the process
    for line, words in (
        ("plot ", {"cells", "--save"}),
        ("plot cells --device ", {"RAM"}),
        ("plot --save ", {"old.png"}),
    ):
        found = terminal.complete("", f"%gpumem {line}")[1]
        assert words <= set(found), (line, found)
        assert "notes.txt" not in found


def test_force_writes_over_any_file(
    terminal: InteractiveShell, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "cat.png").write_bytes(b"a cat")
    assert "saved: " in said(terminal, "cells --save cat.png --force", capsys)
    assert (tmp_path / "cat.png").read_bytes() != b"a cat"


def test_before_the_first_cell_there_is_nothing_to_draw(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_line_magic("load_ext", "ipygpumem")
    with pytest.raises(PlotError, match="nothing to draw: no cell has finished yet"):
        ipygpumem.plot.session()
    with pytest.raises(PlotError, match="nothing to draw: no experiment has finished yet"):
        ipygpumem.plot.experiments()
    assert len(texts(ipygpumem.plot.devices())) > 3


def test_without_matplotlib_the_error_says_what_to_install(
    terminal: InteractiveShell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert said(terminal, "", capsys).endswith("which is not installed: pip install matplotlib")


def test_given_records_are_drawn_without_the_extension(tmp_path: Path) -> None:
    records = made_up(12)
    own, scopes = split(records)
    for source in (records, SessionRecord(0.0, tuple(own), tuple(scopes))):
        assert "12 cells · 1 experiment" in ipygpumem.plot.session(source).summary
        assert ipygpumem.plot.cells(source, last=5).summary.startswith("memory of 5 cells")
        assert ipygpumem.plot.experiments(source, device="RAM").summary.startswith("1 experiment")
    assert "4 cells · 1 experiment" in ipygpumem.plot.session(scopes[0]).summary
    assert "cuda:0: " in ipygpumem.plot.devices([reconciliation()]).summary
    for wrong in (7, "history", [1, 2]):
        with pytest.raises(PlotError, match="pass records of cells and experiments"):
            ipygpumem.plot.session(wrong)
    with pytest.raises(NotLoadedError):
        ipygpumem.plot.session()


def test_a_notebook_shows_an_image_with_its_words_and_pyplot_is_not_imported(kernel: Kernel) -> None:
    kernel.run("data = bytearray(2**26)")
    reply = kernel.run("%gpumem plot cells")
    (shown,) = [item for item in reply.displays if item["metadata"].get("ipygpumem") == {"reports": ["plot"]}]
    assert set(shown["data"]) == {"image/png", "text/html", "text/plain"}
    assert shown["data"]["text/plain"].startswith("memory of 1 cell\n  RAM · kept by all +64")
    assert shown["metadata"]["image/png"] == {"width": 864}
    assert kernel.run("import sys; 'matplotlib.pyplot' in sys.modules").result == "False"


def test_a_figure_that_is_a_cells_value_is_shown_whole_beside_inline_figures(kernel: Kernel) -> None:
    kernel.run("import ipygpumem\n%matplotlib inline\nimport matplotlib.pyplot")
    shown = [item["data"] for item in kernel.run("ipygpumem.plot.session()").displays if "image/png" in item["data"]]
    assert [data["text/plain"].split(" · ")[:2] for data in shown] == [["memory over the session", "1 cell"]]
    width = int.from_bytes(base64.b64decode(shown[0]["image/png"])[16:20], "big")
    assert width == 2 * 864
