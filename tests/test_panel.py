"""The live panel without a browser: what it sends and when, its button, and what is
left after it.
"""

import gc
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from benchmarks.harness.kernel import Kernel
from ipygpumem.extras.panel import panel as module
from ipygpumem.extras.panel import snapshot
from ipygpumem.extras.panel.panel import Feed
from ipygpumem.inventory.names.top import NamedSize
from ipygpumem.probes.accelerators import WholeDevice
from ipygpumem.probes.nvml import CardLoad
from ipygpumem.records import Reading
from ipygpumem.shell.app import app_of
from ipygpumem.units import MIB
from tests.counted_calls import calls_in, least_calls_in


class FakeWidget:
    """Stands for the widget, so that no test here needs anywidget: keeps the messages."""

    def __init__(self, state: Callable[[], Any], receive: Callable[[Any], None]) -> None:
        self.state = state
        self.click = receive
        self.sent: list[Any] = []
        self.is_open = True
        self.comm: Any = self

    def send(self, message: Any) -> None:
        assert self.is_open
        self.sent.append(message)

    def close(self) -> None:
        self.is_open = False

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return {"application/vnd.jupyter.widget-view+json": {}}, {}


@pytest.fixture
def notebook(loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> InteractiveShell:
    """A shell that shows widgets; its panel's thread does nothing by itself."""
    anywidget = ModuleType("anywidget")
    anywidget.__spec__ = ModuleSpec("anywidget", None)
    monkeypatch.setitem(sys.modules, "anywidget", anywidget)
    monkeypatch.setitem(
        sys.modules, "ipygpumem.extras.panel.widget", SimpleNamespace(PanelWidget=FakeWidget)
    )  # type: ignore[arg-type]
    monkeypatch.setattr(loaded, "kernel", SimpleNamespace(), raising=False)
    monkeypatch.setattr(module, "_SEARCH_SECONDS", 600)  # no test depends on speed
    worker = app_of(loaded).context.meter.worker
    jobs = dict[Any, int]()
    monkeypatch.setattr(worker, "add", lambda job: jobs.setdefault(job, 0))
    monkeypatch.setattr(worker, "wake", lambda job: jobs.__setitem__(job, jobs[job] + 1))
    monkeypatch.setattr(worker, "remove", lambda job: jobs.pop(job, None))
    loaded.jobs = jobs  # type: ignore[attr-defined]
    return loaded


def opened(shell: InteractiveShell) -> tuple[Any, Feed, Any]:
    handle = ipygpumem.panel()
    feed = handle._feed()
    assert feed is not None
    return handle, feed, feed.widget


def test_a_terminal_shows_one_line_and_starts_nothing(loaded: InteractiveShell) -> None:
    assert repr(ipygpumem.panel()).startswith("<the panel needs a notebook")
    assert app_of(loaded).session.observers == (app_of(loaded).experiments,)


def test_changed_figures_are_sent_at_most_twice_a_second(notebook: InteractiveShell) -> None:
    _, feed, widget = opened(notebook)
    readings = {"cpu": Reading("cpu", 100 * MIB, 0, "kernel")}
    feed._app.context.meter.glance = lambda: readings  # type: ignore[method-assign]
    assert notebook.jobs == {feed._tick: 0}  # type: ignore[attr-defined]
    assert feed._tick() == feed._tick() == 0.5
    readings["cpu"] = readings["cpu"]._replace(current_bytes=100 * MIB + 1000)
    feed._tick()
    assert len(widget.sent) == 1
    readings["cpu"] = readings["cpu"]._replace(current_bytes=150 * MIB)
    feed._tick()
    rows = [message["rows"][0] for message in widget.sent]
    assert [row["devices"]["RAM"] for row in rows] == [{"own": 100 * MIB}, {"own": 150 * MIB}]
    assert rows == widget.state()["rows"]


def test_the_running_cell_and_its_time_are_sent_while_it_runs(notebook: InteractiveShell) -> None:
    _, feed, widget = opened(notebook)
    notebook.run_cell("1", store_history=True)
    notebook.user_ns["tick"] = feed._tick
    notebook.run_cell("tick()", store_history=True)
    assert widget.sent[-1]["state"]["is_running"]
    assert widget.sent[-1]["state"]["cell"] == widget.sent[-1]["rows"][0]["cell"] == 2
    feed._tick()
    assert not widget.sent[-1]["state"]["is_running"]
    assert (
        widget.sent[-1]["state"]["seconds"] == app_of(notebook).session.history[-1].duration_seconds
    )


def test_the_largest_names_are_found_after_each_cell(notebook: InteractiveShell) -> None:
    _, feed, widget = opened(notebook)
    many = "; ".join(f"n{size} = bytearray({size} * 2**20)" for size in range(1, 8))
    notebook.run_cell(many, store_history=True)
    feed._tick()
    largest = widget.sent[-1]["state"]["largest"]
    assert (largest["cell"], [row["name"] for row in largest["names"]]) == (
        1,
        ["n7", "n6", "n5", "n4", "n3"],
    )
    assert (largest["names"][0]["devices"], largest["names"][0]["size"] // MIB) == ("RAM", 7)


def test_names_that_take_too_long_to_find_stay_as_they_were(
    notebook: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, feed, _ = opened(notebook)
    calls: list[str] = []

    def slow(shell: Any, progress: Callable[[float], None]) -> Any:
        calls.append("look")
        progress(0.5)

    monkeypatch.setattr(module, "largest_names", slow)
    monkeypatch.setattr(module, "_SEARCH_SECONDS", 1e-9)
    monkeypatch.setattr(module, "_SEARCH_SHARE", 0)  # not more for a cell that happens to take long
    for _ in range(3):
        notebook.run_cell("1")
    assert (calls, feed._largest_names) == (["look"], {})


def test_the_button_frees_between_cells_only(notebook: InteractiveShell) -> None:
    _, feed, widget = opened(notebook)
    told: list[str] = []

    def click() -> None:
        widget.click({"kind": "free", "cell": None})
        told.append(feed._message)

    # During a cell.
    notebook.user_ns["click"] = click
    notebook.run_cell(
        """
        kept = [1]
        click()
        """,
        store_history=True,
    )
    assert told == ["not freed: a cell is running"]
    assert feed._message == ""  # the cell has ended

    # After a cell.
    widget.click({"kind": "free", "cell": None})  # it was sent before the cell ran
    assert feed._message == "not freed: a cell ran after the click"
    widget.click({"kind": "free", "cell": 1})
    feed._tick()
    assert widget.sent[-1]["state"]["message"].startswith("freed: RAM")
    assert notebook.user_ns["kept"] == [1]


def test_a_click_in_a_subshell_frees_in_the_main_thread(notebook: InteractiveShell) -> None:
    _, feed, widget = opened(notebook)
    waiting: list[Callable[[], None]] = []
    add = lambda action, cell: waiting.append(lambda: action(cell))  # noqa: E731
    notebook.kernel.io_loop = SimpleNamespace(add_callback=add)  # type: ignore[attr-defined]
    thread = threading.Thread(target=widget.click, args=({"kind": "free", "cell": None},))
    thread.start()
    thread.join()
    assert feed._message == ""
    waiting.pop()()
    assert feed._message.startswith("freed")


def test_a_panel_without_a_view_reads_nothing_until_it_is_shown(notebook: InteractiveShell) -> None:
    _, feed, widget = opened(notebook)
    widget.click({"kind": "views", "count": 0})
    assert notebook.jobs == {}  # type: ignore[attr-defined]
    assert widget.sent == [{"ask": True}]  # other pages may show it
    widget.click({"kind": "views", "count": 1})
    assert notebook.jobs == {feed._tick: 1}  # type: ignore[attr-defined]


def test_a_closed_panel_costs_no_call_and_leaves_no_object(notebook: InteractiveShell) -> None:
    calls_in(notebook, "1")
    before = least_calls_in(notebook, "1", runs=9)
    handle, feed, widget = opened(notebook)
    assert least_calls_in(notebook, "1") > before
    references = weakref.ref(feed), weakref.ref(widget)
    handle.close()
    handle.close()
    assert (repr(handle), widget.is_open) == ("<the panel is closed>", False)
    assert notebook.jobs == {}  # type: ignore[attr-defined]
    assert least_calls_in(notebook, "1", runs=9) <= before  # another test may have left work
    del feed, widget
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_a_second_call_shows_the_same_panel_until_it_is_closed(notebook: InteractiveShell) -> None:
    first, feed, widget = opened(notebook)
    assert ipygpumem.panel()._feed() is feed
    data, _ = first._repr_mimebundle_()
    assert set(data) == {"application/vnd.jupyter.widget-view+json", "text/plain"}
    widget.click({"kind": "close"})
    assert feed.is_closed
    assert ipygpumem.panel()._feed() is not feed


def test_a_panel_whose_widget_other_code_closed_is_replaced(notebook: InteractiveShell) -> None:
    _, feed, widget = opened(notebook)
    widget.comm = None
    assert ipygpumem.panel()._feed() is not feed
    assert feed.is_closed


def test_the_panel_is_closed_with_the_extension(notebook: InteractiveShell) -> None:
    _, feed, widget = opened(notebook)
    notebook.run_line_magic("unload_ext", "ipygpumem")
    assert feed.is_closed
    assert not widget.is_open
    assert notebook.jobs == {}  # type: ignore[attr-defined]


def test_the_panels_thread_sends_as_part_of_its_own_request(notebook: InteractiveShell) -> None:
    request, large = ContextVar[Any]("request"), ContextVar[Any]("large")
    notebook.kernel.get_parent = lambda: request.get()  # type: ignore[attr-defined]  # as in ipykernel 7.0
    tokens = request.set({"header": {}}), large.set(bytearray(10))
    _, feed, widget = opened(notebook)
    widget.send = lambda message: widget.sent.append(request.get())
    thread = threading.Thread(target=feed._tick)
    thread.start()
    thread.join()
    assert widget.sent == [{"header": {}}]
    assert list(feed._request) == [request]
    request.reset(tokens[0])
    large.reset(tokens[1])


def test_a_failure_stops_the_panel_with_one_line(
    notebook: InteractiveShell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, feed, _ = opened(notebook)
    monkeypatch.setattr(snapshot, "devices", lambda *_: 1 / 0)
    feed._tick()
    assert notebook.jobs == {}  # type: ignore[attr-defined]
    for _ in range(2):
        notebook.run_cell("1")
    assert capsys.readouterr().out.count("the panel stopped (ZeroDivisionError") == 1


def test_a_panel_and_its_handle_are_no_user_objects(notebook: InteractiveShell) -> None:
    handle, feed, _ = opened(notebook)
    notebook.user_ns["p"] = handle
    feed._rows.extend({"time": 0.0, "filler": "x" * 10_000 + str(number)} for number in range(200))
    notebook.run_cell("""
    import ipygpumem
    found = ipygpumem.top()
    """)
    assert [row.name for row in notebook.user_ns["found"].names] == []


def test_figures_of_cards_are_the_process_own_and_the_drivers() -> None:
    readings = [
        Reading("cpu", 100 * MIB + 1, 0, "kernel", 1000 * MIB),
        Reading("cuda:0", 10 * MIB, 0, "allocator", 500 * MIB, 20 * MIB, None),
        Reading("children", 5 * MIB, 0, "sampled"),
    ]
    cards = {
        0: CardLoad(WholeDevice(500 * MIB, 60 * MIB), 87),
        1: CardLoad(WholeDevice(500 * MIB, 3 * MIB), None),
    }
    assert snapshot.devices(readings, cards) == {
        "RAM": {"own": 100 * MIB, "total": 1000 * MIB},
        "cuda:0": {
            "allocated": 10 * MIB,
            "reserved": 20 * MIB,
            "used": 60 * MIB,
            "total": 500 * MIB,
            "load": 87,
        },
        "child processes": {"own": 5 * MIB},
        "cuda:1": {"used": 3 * MIB, "total": 500 * MIB},
    }


def test_a_name_lists_devices_that_hold_much_of_its_memory() -> None:
    row = NamedSize("x\x1b[31m" + "y" * 200, "Net", {"cpu": 10, "cuda:0": 5000, "cuda:1": 5000})
    (shown,) = snapshot.names([row])
    assert (shown["devices"], shown["size"]) == ("cuda:0 + cuda:1", 10_010)
    assert shown["name"].isprintable()
    # The name has more than 200 characters.
    assert len(shown["name"]) <= 80
    assert not shown["at_least"]


def test_a_name_whose_bytes_are_not_all_counted_says_at_least(notebook: InteractiveShell) -> None:
    _, feed, widget = opened(notebook)
    code = """
        import lzma
        archive = [lzma.LZMACompressor(), bytearray(2**21)]
        numbers = bytearray(2**20)
    """
    notebook.run_cell(textwrap.dedent(code), store_history=True)
    feed._tick()
    rows = widget.sent[-1]["state"]["largest"]["names"]
    assert {row["name"]: row["at_least"] for row in rows} == {"archive": True, "numbers": False}


def test_a_kernel_without_anywidget_names_the_package_to_install(kernel: Kernel) -> None:
    assert (
        kernel.run("""
            import sys
            sys.modules['anywidget'] = None
            import ipygpumem
            """).status
        == "ok"
    )
    reply = kernel.run("ipygpumem.panel()")
    assert reply.result == (
        "the panel needs anywidget: run %pip install anywidget, reload the page, then run this "
        "cell again"
    )
