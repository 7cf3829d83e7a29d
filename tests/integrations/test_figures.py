"""Pictures: they say the right figures, leave nothing behind, and change nothing of the user's."""

import io
import itertools
import random
import runpy
import sys
from collections.abc import Iterator

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb, to_rgba
from matplotlib.text import Text

import ipygpumem
from benchmarks.harness.kernel import Kernel
from ipygpumem.errors import NotLoadedError, PlotError
from ipygpumem.extras import pictures
from ipygpumem.extras.peak.records import DevicePeak, PeakPoint, PeakRecord
from ipygpumem.extras.peak.report import peak_report  # noqa: F401  # registers the picture
from ipygpumem.extras.pictures import figures
from ipygpumem.inventory.devices.breakdown import Part, Reconciliation
from ipygpumem.records import CellRecord, SessionRecord, Usage
from ipygpumem.report.colours import IN_USE, OUT_OF_MEMORY, PEAK
from ipygpumem.units import GIB
from tests.alone import ROOT
from tests.session_samples import HOSTILE, experiment

pytestmark = pytest.mark.usefixtures("others_out_of_sight")


def made_up(number: int, names: tuple[str | None, ...] = (None,)) -> list[CellRecord]:
    """Return a history of this many cells on RAM and a card, three in a row in an experiment of
    each name; every ninth runs out of memory.
    """
    chance = random.Random(number)
    records = []
    for index in range(1, number + 1):
        before, after, peak = sorted(chance.randrange(8 * GIB) for _ in range(3))
        usages = tuple(
            Usage(name, before, after, peak, 9 * GIB, "kernel", peak) for name in ("cpu", "cuda:0")
        )
        error = None if index % 9 else "OutOfMemoryError"
        name = names[index // 3 % len(names)]
        records.append(
            CellRecord(
                index, None, name, 9.0 * index, chance.random(), error is None, error, usages
            )
        )
    return records


def reconciliation(device: str = "cuda:0") -> Reconciliation:
    sizes = {
        "tensors: parameter": 3 * GIB,
        "rounding": 3,
        HOSTILE: GIB,
        "unknown": 5,
        "free": 4 * GIB,
        "nothing": 0,
    }
    parts = [Part(name, size, "") for name, size in sizes.items()]
    return Reconciliation(
        device, sum(sizes.values()), "its memory", (*parts, Part("unknown: others", None, "why"))
    )


def texts(figure: figures.Picture) -> list[str]:
    figure.canvas.draw()  # ticks are placed by drawing
    return [item.get_text() for item in figure.findobj(Text) if item.get_text().strip()]


@pytest.fixture(autouse=True)
def nothing_of_the_users_is_touched() -> Iterator[None]:
    """No picture is in pyplot's registry, and neither settings nor the backend have changed."""
    settings = dict(mpl.rcParams)
    backend = mpl.get_backend()
    yield
    assert plt.get_fignums() == []
    assert dict(mpl.rcParams) == settings
    assert mpl.get_backend() == backend


@pytest.mark.filterwarnings("ignore:Glyph")
def test_hostile_names_are_cleaned_and_are_no_formulas() -> None:
    names = (HOSTILE, "$\\frac{x}$ 100%", "x" * 300, "Ümlaut 中文", "")
    runs = [experiment(name, parameters={"a": name}) for name in names]
    pictures = [figures.session(made_up(20, names)), figures.experiments(runs)]
    for figure in (*pictures, figures.devices([reconciliation(HOSTILE)])):
        shown = texts(figure)
        assert not any(item.get_parse_math() for item in figure.findobj(Text) if item.get_text())
        assert all(
            line.isprintable() and len(line) <= 200 for text in shown for line in text.splitlines()
        )
    assert any(text.startswith(r"$\frac") for text in texts(pictures[0]))


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG."""
    parts = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in to_rgb(colour)
    ]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(colour: str, page: str) -> float:
    low, high = sorted([luminance(colour), luminance(page)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("page", ["#ffffff", "#111111"])
def test_a_picture_is_readable_on_a_light_and_on_a_dark_page(page: str) -> None:
    figure = figures.session(made_up(20, ("run",)))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    buffer.seek(0)
    assert plt.imread(buffer)[0, 0, 3] == 0  # the page shows through
    for text in figure.findobj(Text):
        # Text needs a higher contrast than areas.
        assert contrast(text.get_color(), page) > 4
    assert min(contrast(colour, page) for colour in (PEAK, IN_USE, OUT_OF_MEMORY)) > 3


def test_the_users_matplotlib_style_is_kept() -> None:
    with plt.style.context("dark_background"):
        figure = figures.session(made_up(20))
    assert figure.get_facecolor() == to_rgba("black")
    assert {to_rgba(text.get_color()) for text in figure.texts} <= {to_rgba("white")}


def test_the_peak_has_one_colour_everywhere() -> None:
    # The charts of a session, of experiments, and of a peak.
    session = figures.session(made_up(20)).axes[-1]
    runs = figures.experiments([experiment()]).axes[-1]
    points = (PeakPoint(0.0, {"data": 1}), PeakPoint(1.0, {"data": GIB}))
    device = DevicePeak("cpu", "storages", GIB, 1.0, curve=points)
    of_peak = PeakRecord((device,), 1.0).picture().axes[0]

    # The colours of what is called a peak, and of the rest.
    colours = set()
    for axes in (session, runs):
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            if label.startswith("peak"):
                patch = handle if isinstance(handle, Artist) else handle[0]
                colours.add(to_hex(np.ravel(patch.get_facecolor())[:3]))
    colours.update(to_hex(text.get_color()) for text in of_peak.texts)
    assert colours == {PEAK}
    roles = {to_hex(np.ravel(area.get_facecolor())[:3]) for area in of_peak.collections}
    assert PEAK not in roles


@pytest.mark.parametrize("number", [1, 5, 2500])
def test_sessions_of_any_length_are_drawn_in_steps(number: int) -> None:
    cells = made_up(number, (None, "a"))
    figure = figures.session(cells)
    strip, ram, _card = figure.axes
    line = ram.lines[0].get_xydata().tolist()  # type: ignore[union-attr]  # it has data
    assert all(one[0] == other[0] or one[1] == other[1] for one, other in itertools.pairwise(line))
    assert line[-1] == [pytest.approx(strip.get_xlim()[1]), cells[-1].usages[0].after_bytes]
    # A picture has the last 2,000 cells; short sessions have no cell that ran out of memory.
    assert ("(500 earlier left out)" in figure.summary) == (number == 2500)
    assert ("out of memory" in texts(figure)) == (number >= 9)
    # one has no experiment, and 2500 have no room for a name
    assert ("a" in texts(figure)) == (number == 5)


def test_experiments_of_one_name_are_numbered_in_figures() -> None:
    runs = [
        experiment("sweep", parameters={"lr": 0.5}),
        experiment("sweep", parameters={"lr": 0.25}),
    ]
    shown = texts(figures.experiments(runs))
    assert {"sweep #1\nlr=0.5", "sweep #2\nlr=0.25", "RAM", "cuda:0", "3.00 s, 1 OOM"} <= set(shown)
    assert shown.count("peak +300 MiB\nkept +50 MiB") == 4
    assert figures.experiments(runs * 30, last=50).summary.startswith(
        "40 experiments (20 earlier left out)"
    )


def test_the_pictures_of_the_documentation_can_be_made() -> None:
    made = runpy.run_path(str(ROOT / "examples" / "plots.py"))["pictures"]()
    assert sorted(made) == ["devices", "experiments", "session"]


@pytest.mark.skipif(sys.platform != "linux", reason="of memfds")
def test_the_picture_of_host_memory_shows_the_held_memory() -> None:
    pytest.importorskip("pandas")
    figure = runpy.run_path(str(ROOT / "examples" / "host_memory.py"))["picture"](8)
    shown = {text.get_text().rpartition(" ")[0].rpartition(" ")[0] for text in figure.findobj(Text)}
    assert {
        "arrays: other",
        "Python objects",
        "free heap pages",
        "free blocks of Python",
        "shared memory",
        "child processes",
    } <= shown


@pytest.fixture
def terminal(shell: InteractiveShell) -> InteractiveShell:
    """A terminal with the extension and one finished cell."""
    shell.run_line_magic("load_ext", "ipygpumem")
    shell.run_cell("%%experiment first --note lr=0.5 --report none\nx = 1", store_history=True)
    return shell


def printed(shell: InteractiveShell, line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output of ``%gpumem plot``, or its error."""
    capsys.readouterr()
    result = shell.run_cell(f"%gpumem off\n%gpumem plot {line}")
    error = result.error_in_exec
    return capsys.readouterr().out if error is None else f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", ["session", "devices"])
def test_a_terminal_shows_words(
    terminal: InteractiveShell, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    out = printed(terminal, f"{name} --device RAM", capsys)
    assert "RAM" in out
    assert f"ipygpumem.plot.{name}().savefig('FILE.png')" in out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--device tpu", "'tpu' is not a device: write RAM or a name such as cuda:0"),
        ("--device cuda:7", "device 'cuda:7' was not in use; there are: RAM"),
    ],
)
def test_a_mistake_is_one_line(
    terminal: InteractiveShell, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    out = printed(terminal, line, capsys)
    assert out.startswith("UsageError: ")
    assert words in out
    assert "\n" not in out


def test_plot_without_matplotlib_names_the_package_to_install(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ipygpumem.extras.pictures.figures")
    monkeypatch.delattr(pictures, "figures")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert printed(loaded, "", capsys).endswith("which is not installed: %pip install matplotlib")


def test_given_records_are_drawn_without_the_extension() -> None:
    cells, run = made_up(12), experiment(cells=tuple(made_up(4)))

    # Records of a session, as a list or whole, and one record alone.
    for source in ([*cells, run], SessionRecord(0.0, tuple(cells), (run,))):
        assert ipygpumem.plot.session(source, last=5).summary.startswith(
            "memory over the session · 5 cells (7 earlier"
        )
        assert ipygpumem.plot.experiments(source, device="RAM").summary.startswith("1 experiment")
    assert "4 cells" in ipygpumem.plot.session(run).summary
    assert "cuda:0 · " in ipygpumem.plot.devices([reconciliation()]).summary

    # Wrong arguments.
    for wrong in (7, "history", [1, 2]):
        with pytest.raises(PlotError, match="pass records of cells and experiments"):
            ipygpumem.plot.session(wrong)
    with pytest.raises(PlotError, match="an experiment inside one cell has no cells of its own"):
        ipygpumem.plot.session(experiment(cells=()))

    # Without records, the extension is needed.
    with pytest.raises(
        NotLoadedError, match=r"run the script as ipython --ext ipygpumem SCRIPT\.py$"
    ):
        ipygpumem.plot.session()
    with pytest.raises(NotLoadedError, match="or put the code into a function"):
        ipygpumem.experiment("a")


def test_a_notebook_shows_an_image_without_importing_pyplot(kernel: Kernel) -> None:
    kernel.run("data = bytearray(2**26)")
    reply = kernel.run("%gpumem plot")
    (shown,) = [
        item
        for item in reply.displays
        if item["metadata"].get("ipygpumem") == {"reports": ["plot"]}
    ]
    assert set(shown["data"]) == {"image/png", "text/plain"}
    assert shown["data"]["text/plain"].startswith("memory over the session · 1 cell")
    assert shown["metadata"]["image/png"] == {"width": 864}
    assert kernel.run("import sys; 'matplotlib.pyplot' in sys.modules").result == "False"
    kernel.run("""
        import ipygpumem
        %matplotlib inline
        import matplotlib.pyplot
        """)
    images = [
        item
        for item in kernel.run("ipygpumem.plot.session()").displays
        if "image/png" in item["data"]
    ]
    assert [item["data"]["text/plain"].splitlines()[0][:24] for item in images] == [
        "memory over the session "
    ]


def test_a_renderer_may_keep_more_than_its_picture() -> None:
    figure = mpl.figure.Figure()
    axes = figure.add_subplot()
    axes.scatter(*np.random.default_rng(0).random((2, 1000)))
    FigureCanvasAgg(figure).draw()
    drawn = ipygpumem.why(figure)
    assert drawn.is_at_least
    assert "matplotlib may keep more after drawing many points" in drawn.notes
