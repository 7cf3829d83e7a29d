"""How pictures look: steps, many cells, labels in their bands, dark pages, letters that no font has."""

from __future__ import annotations

import dataclasses
import io
import itertools
import re
import warnings
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from matplotlib import image
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba

from ipygpumem.model import CellRecord, ExperimentRecord
from ipygpumem.reports.figures import cells, experiments, fonts, picture, session
from tests.test_figures import made_up, made_up_experiment, split

NAMES = ("baseline", "bs=128", "a name that is longer than most bars are", "x")


def drawn(axes: Any, **look: Any) -> list[tuple[float, float, float, float]]:
    """The boxes that were drawn on ``axes`` with a colour: left, right, bottom, top."""
    found = []
    for collection in axes.collections:
        if isinstance(collection, PolyCollection) and tuple(collection.get_facecolor()[0]) == to_rgba(look["color"]):
            for path in collection.get_paths():
                (left, low), (right, high) = path.vertices.min(0), path.vertices.max(0)
                found.append((left, right, low, high))
    return found


def in_use(axes: Any) -> list[tuple[float, float]]:
    """The line of what was in use."""
    (line,) = (line for line in axes.lines if line.get_color() == picture.IN_USE)
    return list(zip(*line.get_data(), strict=True))


# -- steps and many cells -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [3, 40, 500])
def test_what_is_in_use_changes_in_steps(number: int) -> None:
    figure = session.draw(*split(made_up(number)))
    for axes in figure.axes[1:]:
        points = in_use(axes)
        assert len(points) > number / 10
        assert all(one[0] == other[0] or one[1] == other[1] for one, other in itertools.pairwise(points))


def test_a_cell_has_what_was_in_use_before_it_until_its_end() -> None:
    records, _ = split(made_up(3, gpus=0))
    (axes,) = session.draw(records).axes[1:]
    (left, right, low, high) = drawn(axes, color=picture.PEAK)[0]
    before = [size for place, size in in_use(axes) if left < place < right or place in (left, right)]
    usage = records[0].usages[0]
    assert (low, high) == (usage.before_bytes, usage.peak_bytes)
    assert usage.before_bytes in before
    assert in_use(axes)[-1][1] == records[-1].usages[0].after_bytes


def test_five_hundred_cells_are_so_many_boxes_as_can_be_told_apart() -> None:
    records, runs = split(made_up(500))
    figure = session.draw(records, runs)
    assert "500 cells in 120 columns" in figure.summary
    for index, axes in enumerate(figure.axes[1:]):
        peaks = drawn(axes, color=picture.PEAK)
        assert 30 < len(peaks) <= 120
        usages = [cell.usages[index] for cell in records]
        assert max(high for *_, high in peaks) == max(usage.peak_bytes for usage in usages)
        assert in_use(axes)[-1][1] == usages[-1].after_bytes
        assert drawn(axes, color="#e8eaee") == []  # single cells' bands would only flicker


def test_the_bars_of_many_cells_stand_for_several_each() -> None:
    records, _ = split(made_up(500))
    figure = cells.draw(records)
    assert any(text.get_text() == "500 cells, 5 in each bar" for text in figure.texts)
    for index, axes in enumerate(figure.axes):
        peaks = drawn(axes, color=picture.PEAK)
        assert 50 < len(peaks) <= 100
        pixels = axes.transData.transform([(left, 0) for left, *_ in peaks] + [(right, 0) for _, right, *_ in peaks])
        widths = pixels[len(peaks) :, 0] - pixels[: len(peaks), 0]
        assert widths.min() > 4
        usages = [cell.usages[index] for cell in records]
        assert max(high for *_, high in peaks) == max(usage.peak_delta_bytes for usage in usages)
        kept = drawn(axes, color=picture.IN_USE)
        assert sum(high + low for _, _, low, high in kept) == sum(usage.delta_bytes for usage in usages)
    alone = cells.draw(records[:100])
    assert any(text.get_text() == "100 cells" for text in alone.texts)


@pytest.mark.parametrize("kept", [6 * 2**20, -3 * 2**20])
def test_what_an_experiment_gave_back_ends_where_its_consumption_did_also_if_it_kept_less_than_nothing(
    kept: int,
) -> None:
    _, runs = split(made_up(30, gpus=0))
    (usage,) = runs[0].usages
    usage = dataclasses.replace(usage, after_bytes=usage.before_bytes + kept)
    consumed = usage.peak_delta_bytes
    run = dataclasses.replace(
        runs[0], usages=(usage,), consumed={usage.device: consumed}, reclaimed={usage.device: consumed - kept}
    )
    axes = experiments.draw([run]).axes[1]
    ((left, right, *_),) = drawn(axes, color=picture.GIVEN_BACK)
    assert (left, right) == (kept, consumed)
    ((left, right, *_),) = drawn(axes, color=picture.IN_USE)
    assert (left, right) == (min(0, kept), max(0, kept))


# -- labels -------------------------------------------------------------------------------------------------------


def strip_texts(figure: picture.Picture) -> list[tuple[str, float, float, float]]:
    """The texts of the time line's strip: text, left, right, middle; in the strip's own units."""
    figure.canvas.draw()
    strip = figure.axes[0]
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]  # Agg's
    found = []
    for text in strip.texts:
        box = text.get_window_extent(renderer).transformed(strip.transData.inverted())
        if text.get_text() not in ("experiments", "cells"):
            found.append((text.get_text(), box.x0, box.x1, (box.y0 + box.y1) / 2))
    return found


@pytest.mark.parametrize(("number", "seed"), [(15, 1), (40, 2), (60, 3), (110, 4)])
def test_a_label_is_within_its_band_or_wholly_beside_it(number: int, seed: int) -> None:
    records, runs = split(made_up(number, seed=seed, names=NAMES))
    figure = session.draw(records, runs)
    strip = figure.axes[0]
    bars = [patch.get_bbox() for patch in strip.patches]
    bands = drawn(strip, color="#e8eaee") + drawn(strip, color="#f4f5f7")
    slack = 0.01 * strip.get_xlim()[1] / 7.95
    named = 0
    for text, left, right, middle in strip_texts(figure):
        boxes = [(bar.x0, bar.x1) for bar in bars if min(bar.y0, bar.y1) < middle < max(bar.y0, bar.y1)]
        if not boxes:  # a cell's number
            boxes = [(start, end) for start, end, *_ in bands]
            assert any(start - slack <= left and right <= end + slack for start, end in boxes), text
            continue
        named += 1
        for start, end in boxes:
            inside = start - slack <= left and right <= end + slack
            assert inside or right <= start + slack or left >= end - slack, text
    assert named


def test_experiments_one_after_the_other_that_are_shorter_than_their_names_have_them_in_rows_of_their_own() -> None:
    records, _ = split(made_up(12, gpus=0))
    runs = [made_up_experiment(f"learning rate {number}", [records[number]], {}) for number in (4, 5, 6)]
    figure = session.draw(
        [dataclasses.replace(item, duration_seconds=300.0) for item in records[:4]] + records[4:], runs
    )
    strip = figure.axes[0]
    bars = [patch.get_bbox() for patch in strip.patches]
    found = {text: (left, middle) for text, left, _, middle in strip_texts(figure) if text.startswith("l")}
    assert list(found) == [run.name for run in runs]
    for bar, (left, middle) in zip(bars, found.values(), strict=True):
        assert min(bar.y0, bar.y1) < middle < max(bar.y0, bar.y1)
        assert left >= bar.x1
    assert len({middle for _, middle in found.values()}) == 3


def test_in_a_dense_strip_no_number_leaves_it() -> None:
    records, runs = split(made_up(500))
    figure = session.draw(records, runs)
    length = figure.axes[0].get_xlim()[1]
    texts = strip_texts(figure)
    assert len(texts) > 5
    assert all(left >= 0 and right <= length * 1.001 for _, left, right, _ in texts)


# -- dark pages ---------------------------------------------------------------------------------------------------


def test_a_dark_picture_has_light_ink_on_dark_paper_and_the_same_hues() -> None:
    figure = session.draw(*split(made_up(15)))
    light, dark = (image.imread(io.BytesIO(figure.render(dark=dark))) for dark in (False, True))
    assert light.shape[:2] == dark.shape[:2]
    assert light[0, 0, :3].mean() > 0.95
    assert dark[0, 0, :3].mean() < 0.12
    assert light[..., :3].min() < 0.2
    assert dark[..., :3].max() > 0.7
    svg = figure.render("svg", dark=True).decode()
    assert picture.PAPER not in svg
    assert picture.PAPER in figure.render("svg").decode()
    for colour in (picture.IN_USE, picture.PEAK_EDGE, picture.TROUBLE):
        before = np.array(mpl.colors.to_rgb(colour))
        assert np.argmax(picture.darkened(before)) == np.argmax(before)


def test_text_on_dark_paper_has_the_contrast_of_wcag_aa() -> None:
    def luminance(colour: str) -> float:
        values = picture.darkened(np.array(mpl.colors.to_rgb(colour)))
        linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    for ink in (picture.INK, picture.FAINT_INK, picture.TROUBLE):
        assert (luminance(ink) + 0.05) / (luminance(picture.PAPER) + 0.05) > 4.5


def test_a_page_gets_one_image_that_its_theme_may_turn_dark() -> None:
    figure = session.draw(*split(made_up(3, gpus=0)))
    data, _ = figure.bundle()
    assert set(data) == {"text/html", "image/png", "text/plain"}
    assert data["text/html"].count("<img") == 1
    (rule,) = re.findall("<style>(.+?)</style>", data["text/html"])
    for selector in rule.partition("{")[0].split(","):
        assert selector.strip().endswith(" .ipygpumem-picture")  # nothing else on the page is meant


def test_a_dark_picture_is_saved_where_it_is_asked_for(shell: InteractiveShell, tmp_path: Any) -> None:
    shell.run_line_magic("load_ext", "ipygpumem")
    shell.run_cell("1")
    shell.run_line_magic("gpumem", f"plot --save {tmp_path}/dark.png --dark")
    shell.run_line_magic("gpumem", f"plot --save {tmp_path}/light.png")
    corners = [image.imread(tmp_path / f"{name}.png")[0, 0, :3].mean() for name in ("dark", "light")]
    assert corners[0] < 0.12
    assert corners[1] > 0.95


# -- letters ------------------------------------------------------------------------------------------------------


def renamed(name: str) -> tuple[list[CellRecord], list[ExperimentRecord]]:
    records, runs = split(made_up(15))
    return records, [dataclasses.replace(run, name=name) for run in runs]


@pytest.fixture
def no_other_fonts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has matplotlib's own font alone."""
    monkeypatch.setattr(fonts, "_family_with", lambda letter: None)
    monkeypatch.setattr(fonts, "families", lambda: ["DejaVu Sans"])


@pytest.mark.parametrize("draw", [session.draw, lambda _, runs: experiments.draw(runs)])
def test_letters_that_no_font_has_are_said_in_one_line(no_other_fonts: None, draw: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = draw(*renamed("实验 🔥"))
        figure.render()
    texts = [text.get_text() for text in figure.findobj(mpl.text.Text)]
    assert "no font here has U+5B9E, U+9A8C, U+1F525: drawn as ?" in texts
    assert texts.count("no font here has U+5B9E, U+9A8C, U+1F525: drawn as ?") == 1
    assert any(text.startswith("?? ?") for text in texts)
    assert not any("实" in text for text in texts)
    assert figure.summary.endswith("no font here has U+5B9E, U+9A8C, U+1F525: drawn as ?")


def test_many_missing_letters_are_still_one_line(no_other_fonts: None) -> None:
    figure = session.draw(*renamed("实验基线一二"))
    figure.render()
    texts = [text.get_text() for text in figure.findobj(mpl.text.Text)]
    assert "no font here has U+5B9E, U+9A8C, U+57FA, U+7EBF and 2 more: drawn as ?" in texts


def test_marks_that_only_change_other_letters_are_dropped() -> None:
    selector = "\N{VARIATION SELECTOR-16}"
    assert fonts.without(f"a实{selector}b", ["实", selector]) == "a?b"
    assert fonts.missing_line([selector]) == ""


def test_a_font_of_this_machine_that_has_the_letters_is_used() -> None:
    """Matplotlib brings STIX with it, which has letters that its own font lacks."""
    own, other = (fonts._letters(fonts._path(name)) for name in ("DejaVu Sans", "STIXGeneral"))
    letter = next(chr(code) for code in sorted(other - own) if chr(code).isalpha())
    figure = session.draw(*renamed(f"with {letter}"))
    figure.render()
    named = [text for text in figure.findobj(mpl.text.Text) if text.get_text() == f"with {letter}"]
    assert named
    assert all(ord(letter) in fonts._letters(fonts._path(text.get_fontfamily()[-1])) for text in named)
    assert "no font" not in figure.summary


def test_plain_names_ask_for_no_font(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "_family_with", lambda letter: pytest.fail("fonts were searched"))
    figure = session.draw(*renamed("Ümlaut, Ελληνικά, русский"))
    figure.render()
    assert "no font" not in figure.summary
