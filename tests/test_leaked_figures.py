"""Figures that an experiment leaves open or in variables have lines that remove them alone."""

from collections.abc import Iterator

import pytest

from benchmarks.harness.kernel import Kernel
from tests.kernel_records import READ_LEAKS, leak_rows, number_alive, survivor_rows
from tests.steps import SharedKernel, experiment, needs, pairs, run_cells

_PYPLOT = """
import matplotlib
matplotlib.use("agg")
matplotlib.rcParams["figure.max_open_warning"] = 0
import matplotlib.pyplot as plt
plt.close("all")
plt.plot([1, 2])
plt.gcf().canvas.draw()
plt.close("all")
class Box: pass
"""
"""A cell that imports pyplot and lets it make, for a first figure, what it keeps for all."""


@pytest.fixture(scope="module")
def shared_figure_kernel() -> Iterator[SharedKernel]:
    needs("matplotlib")
    shared = SharedKernel("%reset -f", f"{READ_LEAKS}\n{_PYPLOT}", timeout=60, hides_libraries=True)
    yield shared
    shared.close()


@pytest.fixture
def figure_kernel(shared_figure_kernel: SharedKernel) -> Kernel:
    """A kernel that sees each figure of a test and pyplot's dict of them, but no other object of
    matplotlib.
    """
    kernel = shared_figure_kernel.get()
    run_cells(kernel, "plt._pylab_helpers.Gcf.figs = type(plt._pylab_helpers.Gcf.figs)()")
    return kernel


def test_many_figures_are_one_row(figure_kernel: Kernel) -> None:
    run_cells(
        figure_kernel,
        """
        matplotlib.rcParams["figure.max_open_warning"] = 0
        def draw(number):
            for _ in range(number):
                data = plt.figure().data = np.ones(200_000)
                watched.append(weakref.ref(data))
        """,
        experiment("draw(40)"),
    )
    assert number_alive(figure_kernel) == 40
    (row,) = [row for row in survivor_rows(figure_kernel) if "matplotlib" in row.path]
    assert (row.path, row.line) == ("40 matplotlib figures", 'plt.close("all")')
    # 40 figures, each with 200,000 numbers of 8 bytes.
    assert row.size_bytes >= 40 * 1_600_000
    assert {(row.path, row.line) for row in leak_rows(figure_kernel)} == {(row.path, row.line)}
    run_cells(figure_kernel, row.line)
    assert number_alive(figure_kernel) == 0


def test_drawn_figures_are_one_row(figure_kernel: Kernel) -> None:
    run_cells(
        figure_kernel,
        """
        %%experiment e
        for _ in range(2):
            fig, ax = plt.subplots()
            ax.plot(np.linspace(0, 1, 200_000))
            watched.append(weakref.ref(fig))
            fig.canvas.draw()
        """,
    )
    assert number_alive(figure_kernel) == 2
    (row,) = survivor_rows(figure_kernel)
    assert (row.path, row.line) == ("2 matplotlib figures", 'plt.close("all")')
    assert {(row.path, row.line) for row in leak_rows(figure_kernel)} == {(row.path, row.line)}
    run_cells(figure_kernel, row.line)
    assert number_alive(figure_kernel) == 0


@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
def test_the_array_of_a_figure_s_axes_is_removed(
    figure_kernel: Kernel, shape: tuple[int, int]
) -> None:
    """Each of the axes leads to the whole figure."""
    run_cells(
        figure_kernel,
        "kept = []",
        f"""
        %%experiment e
        fig, axes = plt.subplots(*{shape})
        for ax in axes.flat:
            ax.plot(np.arange(200_000.))
        kept.append(axes)
        watched.append(weakref.ref(fig))
        """,
    )
    (leak,) = survivor_rows(figure_kernel)
    assert leak.line == "del kept[0]; plt.close(1)"
    assert [row.line for row in leak_rows(figure_kernel)] == [leak.line]
    run_cells(figure_kernel, leak.line)
    assert number_alive(figure_kernel) == 0


_AXES_KEPT = {
    "kept.extend(axes.flat)": "del kept[1:]",
    "kept += [axes[0, 1], axes[1, 0]]": "del kept[1:]",
    "kept.extend(axes)": "del kept[1:]",
    "by_number.update(enumerate(axes.flat))": "by_number.clear()",
    "box.a, box.b, _, _ = axes.flat": "box.a = None; box.b = None",
    "kept.extend(axes); box.a = axes[0, 0]": "del kept[1:]; box.a = None",
    "kept.append(axes[0]); slots[:2] = axes[1]": "del kept[1]; slots[0] = None; slots[1] = None",
    "box.a = list(axes.flat); kept.append(axes[0])": "del kept[1]; box.a.clear()",
    "grid[1] = axes[0]; grid[2, 1] = axes[1, 1]": (
        "grid[1, 0] = None; grid[1, 1] = None; grid[2, 1] = None"
    ),
    "grid[2, 0] = axes[1, 0]": "grid[2, 0] = None",
}


@pytest.mark.parametrize(("keep", "is_open"), pairs(_AXES_KEPT, [True, False]))
def test_all_axes_of_a_figure_are_removed_together(
    figure_kernel: Kernel, keep: str, *, is_open: bool
) -> None:
    """Each of the axes leads to the whole figure, wherever it is kept."""
    run_cells(
        figure_kernel,
        """
        kept, by_number, box = ["text"], {}, Box()
        slots = np.array([None, None, "text"])
        grid = np.array([["text", None], [None, None], [None, None]])
        """,
    )
    # Otherwise a new array may be mistaken for that of an earlier case at its place.
    leak_rows(figure_kernel)
    run_cells(
        figure_kernel,
        f"""
        %%experiment e
        fig, axes = plt.subplots(2, 2)
        axes[0, 0].plot(np.arange(400_000.))
        watched.append(weakref.ref(fig))
        {keep}
        {"" if is_open else "plt.close(fig)"}
        """,
    )
    line = _AXES_KEPT[keep] + ("; plt.close(1)" if is_open else "")
    (leak,) = survivor_rows(figure_kernel)
    assert leak.line == line
    assert [row.line for row in leak_rows(figure_kernel)] == [line]
    run_cells(figure_kernel, line)
    assert number_alive(figure_kernel) == 0
    assert leak_rows(figure_kernel) == []
    assert figure_kernel.value("[kept[0], slots[2], grid[0, 0]]") == ["text"] * 3


@pytest.mark.parametrize(
    ("place", "keep"),
    [
        pytest.param("kept[0]", "box.pair = (line, kept[0])", id="the same axes"),
        pytest.param("kept[0]", "box.pair = (line, kept[1])", id="axes next to them"),
        pytest.param(
            "by_name['axes'][0]",
            "box.pair = (line, by_name['axes'][1])",
            id="axes of another figure",
        ),
        pytest.param(
            "kept[0]",
            """
            figure, other = plt.subplots()
            other.plot(np.arange(4e5))
            box.pair = (line, other)
            watched.append(weakref.ref(figure))
            plt.close(figure)
            """,
            id="new axes of a closed figure",
        ),
    ],
)
def test_an_older_figure_stays_if_a_tuple_has_a_new_line(
    figure_kernel: Kernel, place: str, keep: str
) -> None:
    """The older axes in the tuple lead to all that their figure has."""
    run_cells(
        figure_kernel,
        """
        box, kept, by_name = Box(), [*plt.subplots(1, 2)[1]], {"axes": plt.subplots(1, 2)[1]}
        plt.close("all")
        """,
    )
    leak_rows(figure_kernel)
    run_cells(
        figure_kernel,
        experiment(
            f"line, = {place}.plot(np.arange(400_000.))",
            "watched.append(weakref.ref(line))",
            keep,
        ),
    )
    lines = [row.line for row in survivor_rows(figure_kernel)]
    assert [row.line for row in leak_rows(figure_kernel)] == lines
    run_cells(figure_kernel, *lines)
    assert number_alive(figure_kernel) == 0
    figures = "[len(axes.figure.axes) for axes in (*kept, *by_name['axes'])]"
    assert figure_kernel.value(figures) == [2, 2, 2, 2]
    assert leak_rows(figure_kernel) == []


def test_a_line_is_removed_from_an_older_figure_in_a_list(figure_kernel: Kernel) -> None:
    run_cells(
        figure_kernel,
        """
        kept = [plt.subplots(2, 2)[1], *plt.subplots(1, 2)[1]]
        figures = [weakref.ref(plt.figure(number)) for number in plt.get_fignums()]
        plt.close("all")
        """,
        """
        %%experiment e
        for ax in (kept[0][0, 0], kept[1]):
            line, = ax.plot(np.arange(400_000.))
            watched.append(weakref.ref(line))
        del ax, line
        """,
    )
    lines = [row.line for row in survivor_rows(figure_kernel)]
    assert [row.line for row in leak_rows(figure_kernel)] == lines
    run_cells(figure_kernel, *lines)
    assert number_alive(figure_kernel) == 0
    assert figure_kernel.value("[figure() is not None for figure in figures]") == [True, True]
    assert leak_rows(figure_kernel) == []


def test_figures_of_an_experiment_leave_older_ones_open(figure_kernel: Kernel) -> None:
    run_cells(
        figure_kernel,
        "plt.figure()",
        """
        %%experiment e
        for _ in range(2):
            plt.figure()
            plt.plot(np.ones(400_000))
        """,
    )
    (row,) = [row for row in survivor_rows(figure_kernel) if "matplotlib figure" in row.path]
    run_cells(figure_kernel, row.line)
    assert figure_kernel.value("plt.get_fignums()") == [1]
    run_cells(figure_kernel, "plt.close('all')")


_PYPLOT_KEEPS = {
    "plt.plot(np.arange(400_000.))": "plt.gca().lines",
    "plt.gca().plot(np.arange(400_000.))": "plt.gca().lines",
    "plt.scatter(np.arange(2e5), np.arange(2e5))": "plt.gca().collections",
    "plt.imshow(np.ones((1000, 400)))": "plt.gca().images",
    "plt.figure(1); plt.plot(np.arange(400_000.))": "plt.gca().lines",
    "plt.errorbar(np.arange(4e5), np.arange(4e5), yerr=1, errorevery=99999)": (
        "plt.gca().containers"
    ),
}


@pytest.mark.parametrize(("draw", "older_length"), pairs(_PYPLOT_KEEPS, [9, 200_000]))
def test_an_older_figure_stays_open_without_a_new_artist(
    figure_kernel: Kernel, draw: str, older_length: int
) -> None:
    """Only pyplot keeps the figure."""
    run_cells(
        figure_kernel,
        f"""
        for number in (1, 2):
            plt.figure(number)
            plt.plot(np.arange({older_length}.)); plt.title("older")
        """,
    )
    leak_rows(figure_kernel)
    run_cells(
        figure_kernel,
        f"""
        %%experiment e
        {draw}
        drawn = {_PYPLOT_KEEPS[draw]}[-1]
        watched.append(weakref.ref(drawn if hasattr(drawn, "axes") else drawn[0]))
        """,
    )
    (leak,) = survivor_rows(figure_kernel)
    assert leak.line in [
        row.line for row in leak_rows(figure_kernel)
    ]  # next to the older data, without a name
    run_cells(figure_kernel, leak.line)
    assert number_alive(figure_kernel) == 0
    assert "also drops" not in leak.line
    assert figure_kernel.value("plt.get_fignums()") == [1, 2]
    figures = "[[len(plt.figure(n).axes[0].lines), plt.gca().get_title()] for n in (1, 2)]"
    assert figure_kernel.value(figures) == [[1, "older"], [1, "older"]]
    run_cells(figure_kernel, "[plt.figure(number).canvas.draw() for number in (1, 2)]")


_DRAWINGS = [
    "drawn = kept.imshow(np.random.rand(1000, 1000)); kept.figure.colorbar(drawn, ax=kept)",
    "plt.sca(kept); drawn = plt.imshow(np.random.rand(1000, 1000)); plt.colorbar()",
    "plt.sca(kept); drawn = plt.scatter(*np.random.rand(3, 100_000)); plt.colorbar(drawn)",
    "plt.sca(kept); drawn = plt.hexbin(*np.random.rand(2, 9), gridsize=300); plt.colorbar()",
    "drawn = kept.imshow(np.random.rand(1000, 1000)); kept.figure.add_subplot(222)",
    "drawn = kept.twinx().plot(np.random.rand(400_000))[0]",
]

_FIGURES_KEPT = ["figure = plt.gcf()", "kept = plt.gca()", "plt.close('all')"]


@pytest.mark.parametrize(("draw", "keeps"), pairs(_DRAWINGS, _FIGURES_KEPT))
def test_an_image_leaves_an_older_figure_with_its_colorbar(
    figure_kernel: Kernel, draw: str, keeps: str
) -> None:
    run_cells(
        figure_kernel,
        f"""
        kept = plt.subplots(1, 2)[1][0]
        older = [weakref.ref(axes) for axes in kept.figure.axes]
        {keeps}
        """,
    )
    leak_rows(figure_kernel)
    run_cells(
        figure_kernel,
        f"""
        %%experiment e
        {draw}
        watched.append(weakref.ref(drawn))
        """,
    )
    lines = [row.line for row in survivor_rows(figure_kernel)]
    assert [row.line for row in leak_rows(figure_kernel)] == lines
    run_cells(figure_kernel, *lines)
    assert number_alive(figure_kernel) == 0
    run_cells(figure_kernel, "older[0]().figure.canvas.draw()")
    assert figure_kernel.value("all(one() in older[0]().figure.axes for one in older)") is True
    assert leak_rows(figure_kernel) == []
    run_cells(figure_kernel, "del kept; figure = None; plt.close('all')")
