"""``%gpumem leaks`` names objects that only registries keep alive: handlers of loggers,
figures, widgets.
"""

from __future__ import annotations

import re
import textwrap

import pytest

from benchmarks.harness.kernel import Kernel
from tests.kernel_records import READ_WHY, lines_by_holder, why_record
from tests.steps import SHOW_LIBRARIES, needs, run_cells, run_quietly, tidied_kernel

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


def left(kernel: Kernel, least: float = 3) -> list[tuple[float, str, str]]:
    """Return the MiB, the holder and the line of each large row of ``%gpumem leaks``."""
    (text,) = run_quietly(kernel, "%gpumem leaks").leaks()
    rows = re.findall(r"^ +([\d.]+) MiB · .* held by (.*) · to free it: (.*)$", text, re.MULTILINE)
    return [(float(row[0]), row[1], row[2]) for row in rows if float(row[0]) >= least]


@pytest.mark.parametrize("case", CASES)
def test_objects_of_a_registry_share_one_row(notebook: Kernel, case: str) -> None:
    setup, line = CASES[case]
    run_quietly(notebook, textwrap.dedent(setup))
    rows = left(notebook)
    assert [row[2].removeprefix("import ipywidgets; ") for row in rows] == [
        line.removeprefix("import ipywidgets; ")
    ]
    run_quietly(notebook, rows[0][2])
    assert left(notebook) == []


def test_a_widgets_connection_is_no_holder(notebook: Kernel) -> None:
    run_cells(notebook, SHOW_LIBRARIES)
    run_quietly(
        notebook,
        f"""{_WIDGETS}
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
    ((_, holder, line),) = left(notebook)
    assert re.fullmatch("the registry of widgets, Image [0-9a-f]+", holder)
    assert re.fullmatch(r'ipywidgets\.widgets\.widget\._instances\["[0-9a-f]+"\]\.close\(\)', line)
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
        f"""
{_RECORDS}
logging.getLogger('several').addHandler(handler)
for number in range(2):
    handler = logging.handlers.MemoryHandler(10**7, flushLevel=1000)
    for count in range(3_000):
        handler.buffer.append(logging.makeLogRecord({{"msg": "y" * 900 + str(count)}}))
    logging.getLogger("several").addHandler(handler)
logging.getLogger("several").addHandler(logging.NullHandler())
del handler
""",
    )
    rows = left(notebook)
    assert len(rows) == 3
    for _, _, line in rows:
        run_quietly(notebook, line)
    assert left(notebook) == []
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
    ((size, path, line),) = left(notebook)
    assert size > 6
    # The last one is not left: names refer to it.
    assert path == "11 matplotlib figures"
    assert line == "[plt.close(number) for number in range(1, 12)];"
    run_quietly(
        notebook, line, "assert plt.get_fignums() == [12]", "plt.close(12); del figure, axes"
    )
    assert left(notebook) == []


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
    ((_, path, line),) = left(notebook)
    assert path == "5 matplotlib figures"
    run_quietly(notebook, line, "assert plt.get_figlabels() == ['wanted']")
    assert left(notebook) == []
    run_quietly(notebook, f"plt.close(); del {name}")


def test_a_logger_is_held_by_its_module(notebook: Kernel) -> None:
    run_cells(notebook, SHOW_LIBRARIES)
    run_quietly(notebook, _LOGGER, "other = logging.getLogger('mine.child')")
    answer = why_record(notebook, "log")
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
    assert left(notebook) == []
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
        "ax.errorbar(numbers, numbers / 2);",
        "ax.stem([1, 2]); ax.errorbar(numbers, numbers / 2, label='second');",
        "ax.bar([1, 2], [3, 4], yerr=1); ax.errorbar(numbers, numbers / 2);",
    ],
)
def test_no_list_of_axes_keeps_a_removed_artist(notebook: Kernel, draw: str) -> None:
    needs("matplotlib")
    run_quietly(notebook, _AXES, f"%%experiment drawing\n{draw}")
    lines = left(notebook, least=1)
    assert lines
    for _, _, line in lines:
        run_quietly(notebook, line)
    assert [row for row in left(notebook, least=1) if "ax" in row[1]] == []
    run_quietly(notebook, "fig.canvas.draw(); plt.close('all')")


_OLDER = "kept, by_name, other = ax.plot([1, 2]), {'a': 1}, None"


@pytest.mark.parametrize(
    "draw",
    [
        "kept += ax.plot(numbers)",
        "kept.append(ax.scatter(numbers, numbers))",
        "by_name['line'], = ax.plot(numbers)",
        "by_name['line'], = other, = ax.plot(numbers)",
        "kept.append(ax.fill_between(numbers, numbers))",
        "ax.add_line(plt.Line2D(numbers, numbers)); kept.append(ax.lines[-1])",
        "by_name['bars'] = ax.errorbar(numbers, numbers)",
    ],
)
def test_an_artist_that_users_keep_is_taken_out_of_its_axes_too(
    notebook: Kernel, draw: str
) -> None:
    needs("matplotlib")
    run_quietly(notebook, _AXES, _OLDER, "fig.canvas.draw()", f"%%experiment drawing\n{draw};")
    rows = left(notebook, least=1)
    assert rows
    for line in {line: None for *_, line in rows}:
        run_quietly(notebook, line)
    run_quietly(notebook, "fig.canvas.draw()")
    assert left(notebook, least=1) == []
    assert notebook.value("[len(ax.lines), len(kept), list(by_name), line.axes is ax]") == [
        2,
        1,
        ["a"],
        True,
    ]
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
        "%%experiment drawing\nkept += ax.plot(np.arange(4e6))",
    )
    ((_, _, line),) = left(notebook, least=1)
    run_quietly(notebook, line)
    assert left(notebook, least=1) == []
    run_quietly(notebook, "assert not kept and not ax.lines; plt.close('all')")
