"""``%gpumem leaks`` names objects that only registries keep alive: handlers of loggers,
figures, widgets.
"""

from __future__ import annotations

import re
import textwrap
from typing import NamedTuple

import pytest

from benchmarks.harness.kernel import Kernel
from tests.kernel_records import READ_WHY, lines_by_holder, why_record
from tests.steps import SHOW_LIBRARIES, experiment, needs, run_cells, run_quietly, tidied_kernel

shared_kernel, notebook = tidied_kernel("%reset -f", READ_WHY, hides_libraries=True)

MIB = 1 << 20
_RECORDS = """
import logging, logging.handlers
handler = logging.handlers.MemoryHandler(10**7, flushLevel=1000)
for number in range(4_000):
    handler.buffer.append(logging.makeLogRecord({"msg": "x" * 900 + str(number)}))
"""
_LOGGER = f"{_RECORDS}log = logging.getLogger('mine'); log.addHandler(handler); del handler"
_OF_MINE = (
    'import logging; logging.getLogger("mine").removeHandler(logging.getLogger("mine").handlers[0])'
)
_WIDGETS = """
from tests.stand_ins import install
install("ipywidgets")
import ipywidgets
"""
CASES = {
    "a handler of a logger": (f"{_LOGGER}; del log", _OF_MINE),
    "a handler of the root logger": (
        f"{_RECORDS}logging.getLogger().addHandler(handler); del handler",
        "import logging; logging.getLogger().removeHandler(logging.getLogger().handlers[0])",
    ),
    "a filter of a handler": (
        f"""{_RECORDS}
class Counting(logging.Filter):
    def __init__(self):
        self.seen = [str(number) * 20 for number in range(50_000)]
logging.getLogger('filtered').addHandler(logging.NullHandler())
logging.getLogger('filtered').handlers[0].addFilter(Counting())
del handler, Counting
""",
        'import logging; logging.getLogger("filtered").handlers[0].removeFilter('
        'logging.getLogger("filtered").handlers[0].filters[0])',
    ),
    "a filter of a logger": (
        """
import logging
logging.getLogger("strict").addHandler(logging.NullHandler())
logging.getLogger("strict").addFilter(logging.Filter())
class Counting(logging.Filter):
    def __init__(self):
        self.seen = [str(number) * 20 for number in range(50_000)]
logging.getLogger("strict").addFilter(Counting())
del Counting
""",
        'import logging; [logging.getLogger("strict").removeFilter(item) '
        'for item in logging.getLogger("strict").filters[:] '
        'if type(item).__name__ == "Counting"];',
    ),
    "widgets": (
        f"""{_WIDGETS}
for _ in range(8):
    ipywidgets.Image(value=[str(number) * 20 for number in range(10_000)])
""",
        "import ipywidgets; ipywidgets.Widget.close_all()",
    ),
}


class LargeRow(NamedTuple):
    """A row of ``%gpumem leaks``."""

    mib: float
    path: str
    line: str


def large_leaks(kernel: Kernel, smallest_mib: float = 3) -> list[LargeRow]:
    """Return the large rows of ``%gpumem leaks``."""
    (text,) = run_quietly(kernel, "%gpumem leaks").leaks()
    pattern = r"^ +([\d.]+) MiB · .* held by (.*) · to free it: (.*)$"
    rows = []
    for mib, path, line in re.findall(pattern, text, re.MULTILINE):
        if float(mib) >= smallest_mib:
            rows.append(LargeRow(float(mib), path, line))
    return rows


@pytest.mark.parametrize("case", CASES)
def test_objects_of_a_registry_share_one_row(notebook: Kernel, case: str) -> None:
    setup, line = CASES[case]
    run_quietly(notebook, textwrap.dedent(setup))
    rows = large_leaks(notebook)
    assert [row.line.removeprefix("import ipywidgets; ") for row in rows] == [
        line.removeprefix("import ipywidgets; ")
    ]
    run_quietly(notebook, rows[0].line)
    assert large_leaks(notebook) == []


def test_a_widgets_connection_is_no_holder(notebook: Kernel) -> None:
    run_cells(notebook, SHOW_LIBRARIES)
    run_quietly(
        notebook,
        _WIDGETS,
        """
        import numpy as np
        from comm import create_comm
        def connected(**traits):
            widget = ipywidgets.Image(**traits)
            widget._trait_values["comm"] = connection = create_comm(target_name="jupyter.widget")
            connection.on_msg(widget.close)
            return widget
        older = connected()
        lost = connected(value=np.ones(1_000_000))
        del lost
        """,
    )
    (row,) = large_leaks(notebook)
    assert re.fullmatch("the registry of widgets, Image [0-9a-f]+", row.path)
    assert re.fullmatch(
        r'ipywidgets\.widgets\.widget\._instances\["[0-9a-f]+"\]\.close\(\)', row.line
    )
    run_quietly(
        notebook,
        """
        for connection in list(get_ipython().kernel.comm_manager.comms.values()):
            connection.close()
        ipywidgets.Widget.close_all()
        del connection, older
        """,
    )


def test_each_handler_has_a_row_and_a_line_that_keeps_the_rest(notebook: Kernel) -> None:
    run_quietly(
        notebook,
        _RECORDS,
        """
        logging.getLogger('several').addHandler(handler)
        for number in range(2):
            handler = logging.handlers.MemoryHandler(10**7, flushLevel=1000)
            for count in range(3_000):
                handler.buffer.append(logging.makeLogRecord({"msg": "y" * 900 + str(count)}))
            logging.getLogger("several").addHandler(handler)
        logging.getLogger("several").addHandler(logging.NullHandler())
        del handler
        """,
    )
    rows = large_leaks(notebook)
    assert len(rows) == 3
    for row in rows:
        run_quietly(notebook, row.line)
    assert large_leaks(notebook) == []
    run_quietly(
        notebook,
        'assert [type(item).__name__ for item in logging.getLogger("several").handlers] == '
        '["NullHandler"]; logging.getLogger("several").handlers.clear()',
    )


def test_figures_of_pyplot_are_one_row(notebook: Kernel) -> None:
    needs("matplotlib")
    run_quietly(
        notebook,
        """
        import matplotlib
        matplotlib.use("agg")
        import matplotlib.pyplot as plt
        import numpy as np
        for number in range(12):
            figure, axes = plt.subplots()
            axes.plot(np.random.rand(20_000))
        """,
    )
    (row,) = large_leaks(notebook)
    # Eleven figures, each with some arrays of 160 kB.
    assert row.mib > 6
    # The last one is not left: names refer to it.
    assert row.path == "11 matplotlib figures"
    assert row.line == "[plt.close(number) for number in range(1, 12)];"
    run_quietly(
        notebook, row.line, "assert plt.get_fignums() == [12]", "plt.close(12); del figure, axes"
    )
    assert large_leaks(notebook) == []


@pytest.mark.parametrize("name", ["figure", "axes"])
def test_a_figure_that_a_name_refers_to_stays_open(name: str, notebook: Kernel) -> None:
    needs("matplotlib")
    run_quietly(
        notebook,
        f"""
import matplotlib
matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
figure, axes = plt.subplots(num="wanted")
del {"axes" if name == "figure" else "figure"}
for number in range(5):
    plt.figure().kept = np.ones(100_000)
del number
""",
    )
    (row,) = large_leaks(notebook)
    assert row.path == "5 matplotlib figures"
    run_quietly(notebook, row.line, "assert plt.get_figlabels() == ['wanted']")
    assert large_leaks(notebook) == []
    run_quietly(notebook, f"plt.close(); del {name}")


def test_a_logger_is_held_by_its_module(notebook: Kernel) -> None:
    run_cells(notebook, SHOW_LIBRARIES)
    run_quietly(notebook, _LOGGER, "other = logging.getLogger('mine.child')")
    answer = why_record(notebook, "log")
    # The records that its handler keeps.
    assert sum(answer["device_bytes"].values()) > 4 * MIB
    assert sum(answer["freed_bytes"].values()) < MIB
    line = "log.handlers.clear()"
    assert lines_by_holder(answer) == {'the logging module, logger "mine"': line}
    of_child = why_record(notebook, "other")
    assert sum(of_child["device_bytes"].values()) < MIB, "each logger leads to all loggers"
    run_quietly(notebook, "handler = log.handlers[0]")
    ((path, line),) = lines_by_holder(why_record(notebook, "handler")).items()
    assert path == 'the logging module, logger "mine".handlers[0]'
    assert line == "log.removeHandler(log.handlers[0])"
    run_quietly(
        notebook, line, "import weakref; handler = weakref.ref(handler); assert handler() is None"
    )


def test_an_object_reachable_from_a_name_is_no_leak(notebook: Kernel) -> None:
    run_cells(notebook, SHOW_LIBRARIES)
    run_quietly(notebook, _LOGGER, "handler = log.handlers[0]")
    assert large_leaks(notebook) == []
    run_quietly(notebook, _OF_MINE)


_AXES = """
import matplotlib
matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
fig, ax = plt.subplots()
line, = ax.plot([1, 2])
numbers = np.arange(200_000)
"""


@pytest.mark.parametrize(
    "draw",
    [
        pytest.param("ax.errorbar(numbers, numbers / 2);", id="error bars"),
        pytest.param(
            """
            ax.stem([1, 2])
            ax.errorbar(numbers, numbers / 2, label='second');
            """,
            id="error bars after a stem",
        ),
        pytest.param(
            """
            ax.bar([1, 2], [3, 4], yerr=1)
            ax.errorbar(numbers, numbers / 2);
            """,
            id="error bars after bars",
        ),
    ],
)
def test_no_list_of_axes_keeps_a_removed_artist(notebook: Kernel, draw: str) -> None:
    needs("matplotlib")
    run_quietly(notebook, _AXES, experiment(draw))
    lines = large_leaks(notebook, smallest_mib=1)
    assert lines
    for _, _, line in lines:
        run_quietly(notebook, line)
    assert [row for row in large_leaks(notebook, smallest_mib=1) if "ax" in row.path] == []
    run_quietly(notebook, "fig.canvas.draw(); plt.close('all')")


_OLDER = "kept, by_name, other = ax.plot([1, 2]), {'a': 1}, None"


@pytest.mark.parametrize(
    "draw",
    [
        pytest.param("kept += ax.plot(numbers)", id="a list of lines"),
        pytest.param("kept.append(ax.scatter(numbers, numbers))", id="points"),
        pytest.param("by_name['line'], = ax.plot(numbers)", id="a line in a dict"),
        pytest.param("by_name['line'], = other, = ax.plot(numbers)", id="a line with two names"),
        pytest.param("kept.append(ax.fill_between(numbers, numbers))", id="an area"),
        pytest.param(
            """
            ax.add_line(plt.Line2D(numbers, numbers))
            kept.append(ax.lines[-1])
            """,
            id="a line added by hand",
        ),
        pytest.param("by_name['bars'] = ax.errorbar(numbers, numbers)", id="error bars"),
    ],
)
def test_an_artist_that_users_keep_is_taken_out_of_its_axes_too(
    notebook: Kernel, draw: str
) -> None:
    needs("matplotlib")
    run_quietly(notebook, _AXES, _OLDER, "fig.canvas.draw()", experiment(draw))
    rows = large_leaks(notebook, smallest_mib=1)
    assert rows
    for line in dict.fromkeys(row.line for row in rows):
        run_quietly(notebook, line)
    run_quietly(notebook, "fig.canvas.draw()")
    assert large_leaks(notebook, smallest_mib=1) == []
    assert notebook.value("[len(ax.lines), len(kept), list(by_name)]") == [2, 1, ["a"]]
    assert notebook.value("line.axes is ax") is True
    run_quietly(notebook, "plt.close('all')")


def test_the_only_artist_of_axes_is_removed_if_a_list_holds_it(notebook: Kernel) -> None:
    needs("matplotlib")
    run_cells(notebook, SHOW_LIBRARIES)
    run_quietly(
        notebook,
        """
        import matplotlib
        matplotlib.use("agg")
        import matplotlib.pyplot as plt
        import numpy as np
        fig, ax = plt.subplots()
        kept = []
        """,
        experiment("kept += ax.plot(np.arange(4e6))", name="drawing"),
    )
    (row,) = large_leaks(notebook, smallest_mib=1)
    run_quietly(notebook, row.line)
    assert large_leaks(notebook, smallest_mib=1) == []
    run_quietly(notebook, "assert not kept and not ax.lines; plt.close('all')")
