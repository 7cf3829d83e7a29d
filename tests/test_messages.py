"""Messages and tables are short, and say only what helps a new user."""

import re
import textwrap
from collections.abc import Iterator

import pytest

import ipygpumem
from benchmarks.harness.kernel import Kernel, plain, table_rows
from ipygpumem.extras.lines import memlines
from ipygpumem.extras.lines.lines import LineCost, LinesRecord
from ipygpumem.extras.lines.statements import Cost, StatementRun
from ipygpumem.extras.panel import snapshot
from ipygpumem.extras.peak.records import DevicePeak, PeakRecord, PeakRow
from ipygpumem.extras.peak.report import peak_report
from ipygpumem.records import FreeingStep, Reading, Usage
from ipygpumem.report import text
from ipygpumem.report.devices import sizes
from ipygpumem.report.estimate import share_rows
from ipygpumem.report.freeing import freed_report
from ipygpumem.report.status import status_report
from ipygpumem.units import GIB, KIB, MIB
from tests.steps import dedented, kernel_with, needs, run_failing, run_quietly

notebook = kernel_with("%load_ext ipygpumem")


# -- cells of our own commands ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "cell",
    [
        "%gpumem top",
        "%gpumem",
        textwrap.dedent(
            """\
            # what is there?

            %gpumem status
            %gpumem history -n 2"""
        ),
        "%gpumem top \\\n  -n 3",
        "%experiment start scope",
        "%experiment end",
        "%config IPyGpuMem.bar = True",
        "%reload_ext ipygpumem",
        "%gpumem free\n%experiment status",
        "%gpumem?",
        "%%peak -h",
        "%%estimate --device-memory 24GiB --help\n1 / 0",
        "%gpumem peak -h",
        "%%isolate -h\nrows = 1",
        "gpumem top",
        "experiment list",
        "# only a comment",
        "\n  # path C:\\\n\n# rows = 1\n",
    ],
)
def test_a_cell_of_our_commands_has_no_line_and_no_row(notebook: Kernel, cell: str) -> None:
    run_quietly(notebook, "import ipygpumem")
    if cell == "%experiment end":
        run_quietly(notebook, "%experiment start scope")
    before = notebook.value("len(ipygpumem.history())")
    assert run_quietly(notebook, cell).reports("cell") == []
    if "reload" not in cell:  # which begins a new history
        assert notebook.value("len(ipygpumem.history())") == before
    if cell == "%experiment start scope":
        run_quietly(notebook, "%experiment end")


def test_a_mistake_in_our_command_has_no_line_either(notebook: Kernel) -> None:
    reply = run_failing(notebook, "%gpumem tpo", None)
    assert "did you mean top?" in reply.stderr
    assert reply.displays == []


@pytest.mark.parametrize(
    "cell",
    ["%peak", "%estimate", "%gpumemit", "%%peak", "%gpumem peak\n\n", "%%isolate", "%%autofit n=2"],
)
def test_a_command_without_code_has_no_line(notebook: Kernel, cell: str) -> None:
    assert run_failing(notebook, cell, None).displays == []


@pytest.mark.parametrize(
    "cell",
    [
        "%gpumem top\nrows = 1",
        "rows = 1\n%gpumem top",
        "%gpumem peak\nrows = 1",
        "%%experiment demo\nrows = 1",
        "%%time\n%gpumem top",
        "%config InlineBackend.rc = {}",
        "%config IPyGpuMem.bar = bool(globals().setdefault('block', bytearray(60_000_000)))",
        "text = '''\n%gpumem top\n'''",
        "%gpumem top\n# path C:\\\nrows = 1",
        "gpumem = 3; del gpumem",
        "# a comment\nrows = 1",
    ],
)
def test_a_cell_with_other_code_keeps_its_line(notebook: Kernel, cell: str) -> None:
    assert len(notebook.run(cell).reports("cell")) == 1


def test_records_of_a_notebook_leave_our_commands_out(notebook: Kernel) -> None:
    reply = run_quietly(notebook, "%gpumem top")
    assert [display["metadata"]["ipygpumem"]["reports"] for display in reply.displays] == [["top"]]
    assert "CellRecord" not in str(reply.displays[0]["metadata"])


# -- shared memory below a MiB ---------------------------------------------------------------------


def reading(device: str, size: int) -> Reading:
    return Reading(device, size, size, "sampled")


def test_no_report_has_shared_memory_below_a_mib() -> None:
    small = [reading("cpu", GIB), reading("shm", 4096), reading("children", 4096)]
    large = [reading("cpu", GIB), reading("shm", 4 * MIB)]
    used = {item.device: item.current_bytes for item in small}
    assert "shared memory" in text.render([status_report("", (), large)])
    assert "shared memory" in snapshot.devices(large, {})
    for shown in (
        text.render([status_report("", (), small)]),
        text.render([freed_report("freed", (), used)]),
        str(snapshot.devices(small, {})),
        str(sizes(used)),
    ):
        assert "RAM" in shown
        assert "shared memory" not in shown
        assert "child processes" not in shown


def test_no_line_or_statement_has_a_column_for_a_semaphore() -> None:
    usages = (
        Usage("cpu", 0, GIB, GIB, None, "kernel"),
        Usage("shm", 4096, 4096, 4096, None, "sampled"),
    )
    cost = Cost("f()", [StatementRun(usages, 1.0)])
    assert cost.devices == ["cpu"]
    peaks = {"cpu": GIB, "shm": 4096}
    record = LinesRecord([], {(0, 1): LineCost(1, 1.0, dict(peaks), peaks)}, 1.0)
    assert memlines._devices_changed(record) == ["cpu"]


def test_the_parts_of_ram_have_no_row_for_a_semaphore(notebook: Kernel) -> None:
    run_quietly(
        notebook,
        dedented(
            """
            import multiprocessing
            lock = multiprocessing.Lock()
            """
        ),
    )
    for command in ("%gpumem", "%gpumem status"):
        (shown,) = run_quietly(notebook, command).reports()
        rows = [line.split("   ")[0].split() for line in shown.splitlines() if "shared" in line]
        assert [row for row in rows if row[1:2] in (["KiB"], ["B"])] == []


# -- objects that users print or end a cell with ---------------------------------------------------

OBJECTS = """
import ipygpumem
with ipygpumem.trace("load", silent=True) as trace:
    block = bytearray(8 << 20)
with ipygpumem.experiment("demo", report="none") as experiment:
    small = 1
with ipygpumem.peak() as peak:
    block = bytearray(8 << 20)
with ipygpumem.expect(ram="1GiB") as expected:
    pass
running = ipygpumem.Trace("step").start()
fresh = ipygpumem.Trace("fresh")
loop = ipygpumem.track(range(3), "epoch", silent=True)
tracker = ipygpumem.tracker()
ipygpumem.export("records.json", force=True)
"""


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel with the objects that users make."""
    with Kernel() as kernel:
        run_quietly(
            kernel, "%load_ext ipygpumem", f"%cd -q {tmp_path_factory.mktemp('records')}", OBJECTS
        )
        yield kernel


@pytest.mark.parametrize(
    ("expression", "begins"),
    [
        ("trace", "trace load"),
        ("running", "trace step"),
        ("fresh", "<trace fresh: not started>"),
        ("experiment", "experiment demo"),
        ("peak", "peak"),
        ("expected", "trace expected"),
        ("loop", "<loop epoch: 0 iterations measured>"),
        ("tracker", "<tracker: 0 calls>"),
        ("ipygpumem.expect(ram='1GiB')", "<expect: not finished>"),
        ("ipygpumem.experiment('next')", "<experiment next: not open>"),
        ("ipygpumem.history()", "history"),
        ("ipygpumem.history()[:1]", "history"),
        ("ipygpumem.last()", ""),
        ("ipygpumem.load('records.json')", "history"),
        ("ipygpumem.experiments()[0]", "experiment demo"),
        ("ipygpumem.traces()[0]", "trace"),
    ],
)
def test_an_object_shows_its_report_and_no_address(
    objects: Kernel, expression: str, begins: str
) -> None:
    shown = [
        run_quietly(objects, expression).result or "",
        run_quietly(objects, f"print({expression})").stdout,
    ]
    for shape in shown:
        assert shape.startswith(begins)
        assert " at 0x" not in shape
        assert "Record(" not in shape


def test_displayed_records_are_not_stored_again_in_the_output(objects: Kernel) -> None:
    reply = run_quietly(objects, "ipygpumem.history()")
    metadata = [display["metadata"].get("ipygpumem", {}) for display in reply.displays]
    assert [len(item.get("records", [])) for item in metadata] == [1]  # the cell's own


# -- tracebacks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first_line", ["%%peak", "%%experiment demo", "%%memlines", "%gpumem peak"]
)
def test_a_traceback_shows_no_frame_of_ipygpumem(notebook: Kernel, first_line: str) -> None:
    traceback = run_failing(notebook, f"{first_line}\n1 / 0", "ZeroDivisionError").traceback
    assert "run_line_magic" not in traceback
    assert "1 / 0" in plain(traceback)


@pytest.mark.parametrize(
    "call",
    [
        "ipygpumem.load('missing.json')",
        "ipygpumem.top(5)",
        "ipygpumem.estimate(print, device='nothing:0')",
        "ipygpumem.export('no/such/folder/x.json')",
        "ipygpumem.trace('a', devices=3)",
        "with ipygpumem.expect(ram='1KiB'): block = bytearray(8 << 20)",
    ],
)
def test_a_traceback_of_our_own_error_has_only_the_users_frames(
    notebook: Kernel, call: str
) -> None:
    cell = dedented(
        f"""
        import ipygpumem
        def mine():
            {call}
        mine()
        """
    )
    shown = plain(notebook.run(cell).traceback)
    if not shown:
        return  # this call is right
    assert "mine()" in shown
    if "TypeError" not in shown:
        assert "ipygpumem/" not in shown
        assert "contextlib" not in shown


def test_an_error_that_the_user_handles_stays_in_the_traceback(notebook: Kernel) -> None:
    cell = dedented(
        """
        import ipygpumem
        try:
            1 / 0
        except ZeroDivisionError:
            ipygpumem.load('missing.json')
        """
    )
    shown = plain(run_failing(notebook, cell, "FileError").traceback)
    assert "ZeroDivisionError" in shown
    assert "FileNotFoundError" not in shown


@pytest.mark.parametrize("cell", ["%%estimate\n1", "%gpumem preload"])
def test_a_missing_package_is_no_wrong_usage(notebook: Kernel, cell: str) -> None:
    run_quietly(notebook, "import importlib.util; real = importlib.util.find_spec")
    hide = "lambda name, *more: None if name == 'torch' else real(name, *more)"
    run_quietly(notebook, f"importlib.util.find_spec = {hide}")
    reply = run_failing(notebook, cell, "MissingPackageError")
    run_quietly(notebook, "importlib.util.find_spec = real")
    assert plain(reply.traceback).strip().endswith("not installed: %pip install torch")
    assert "UsageError" not in reply.stderr + reply.traceback
    if not cell.startswith("%%"):  # which runs the user's code
        assert reply.reports("cell") == []


# -- tensors without a name ------------------------------------------------------------------------


def test_equal_unnamed_tensors_share_one_row_with_their_holder(notebook: Kernel) -> None:
    needs("numpy")
    run_quietly(
        notebook,
        dedented(
            """
            import functools, numpy
            @functools.lru_cache
            def load(number): return numpy.ones(1 << 18)
            for number in range(30): load(number);
            named = numpy.ones(1 << 19)
            """
        ),
    )
    (shown,) = run_quietly(notebook, "%gpumem tensors").displays
    rows = [row for row in table_rows(shown["data"]["text/html"]) if "ndarray" in row["type"]]
    (row,) = [row for row in rows if "(no name)" in row["name"]]
    assert (row["size"], row["name"]) == ("60 MiB", "30 × (no name)")
    assert "lru_cache of function load" in row["held by"]
    assert [row["held by"] for row in rows if row["name"] == "named"] == [""]
    run_quietly(notebook, "load.cache_clear(); del named")


# -- figures that a user asks for with a text, and at the top level of a cell ----------------------


def test_a_name_in_quotes_gets_the_call_for_the_variable(notebook: Kernel) -> None:
    run_quietly(notebook, "import ipygpumem\nnoise = bytearray(8 << 20)")
    shown = run_quietly(notebook, "ipygpumem.why('noise')").result
    assert "for the variable: ipygpumem.why(noise)" in shown
    assert re.match(r"object · str · \d+ B", shown)
    assert "for the variable" not in run_quietly(notebook, "ipygpumem.why('nothing')").result


def test_memory_of_a_cells_own_code_has_no_name_of_a_frame(objects: Kernel) -> None:
    needs("memray")
    needs("numpy")
    run_quietly(objects, "import numpy")
    (shown,) = run_quietly(objects, "%%peak\nrows = numpy.ones(1 << 20)\nmore = rows + 1").reports(
        "peak"
    )
    assert "top level, line 3: more = rows + 1" in shown
    assert "<module>" not in shown


# -- rows in bytes ---------------------------------------------------------------------------------


def test_rows_of_a_peak_in_bytes_are_folded() -> None:
    rows = [PeakRow(12 * KIB, "data", name="images")]
    rows += [PeakRow(40 + number, "data", name=f"n{number}") for number in range(5)]
    total = sum(row.size_bytes for row in rows)
    device = DevicePeak("cpu", "memray", total, rows=tuple(rows))
    shown = text.render([peak_report(PeakRecord((device,), 1.0))])
    assert "images" in shown
    assert "5 smaller rows" in shown
    assert not re.search(r"^ +\d+ B +n", shown, re.MULTILINE)


def test_a_row_without_origin_is_listed_with_a_list_of_modules() -> None:
    rows = [PeakRow(9 * MIB, "parameters", module=f"net.{number}") for number in range(3)]
    rows.append(PeakRow(2 * MIB, "data"))
    device = DevicePeak("cpu", "storages", 29 * MIB, rows=tuple(rows))
    shown = text.render([peak_report(PeakRecord((device,), 1.0))])
    assert re.search(r"9 MiB +parameters +net\.0", shown)
    assert re.search(r"2 MiB +data", shown)


def test_a_device_with_hardly_any_memory_has_no_table() -> None:
    tensors = DevicePeak(
        "cpu", "storages", 64 * MIB, rows=(PeakRow(64 * MIB, "data", name="images"),)
    )
    outside = DevicePeak("cpu", "memray", 5 * KIB, rows=(PeakRow(5 * KIB, "data", name="small"),))
    shown = text.render([peak_report(PeakRecord((tensors, outside), 1.0))])
    assert "5 KiB" in shown.splitlines()[0]
    assert "images" in shown
    assert "small" not in shown
    alone = text.render([peak_report(PeakRecord((outside,), 1.0))])
    assert "small" in alone


# -- options ---------------------------------------------------------------------------------------


def test_the_options_explain_their_values(notebook: Kernel) -> None:
    shown = " ".join(run_quietly(notebook, "%config IPyGpuMem").stdout.split())
    assert "%config IPyGpuMem.quiet = True" in shown
    assert "'oom': out-of-memory errors" in shown
    assert "'oom+interrupt': Ctrl-C too" in shown
    assert "a number of bytes, or a text such as '2MiB'" in shown
    assert "'compact'" in shown


# -- names and outputs -----------------------------------------------------------------------------


def test_why_of_the_outputs_lists_their_memory(notebook: Kernel) -> None:
    needs("numpy")

    # Three outputs: with a name, an item of it, and an array of its own.
    run_quietly(notebook, "import numpy\nshown = [numpy.ones(1 << 20)]")
    numbers = []
    for code in ("shown;\nshown", "shown[0]", "numpy.ones(1 << 19)"):
        run_quietly(notebook, code)
        numbers.append(notebook.value("max(Out)"))
    whole, part, alone = numbers

    # The first line.
    (report,) = run_quietly(notebook, "%gpumem why Out").reports("why")
    headline = report.splitlines()[0]
    assert re.match(r"Out · \d+ outputs · RAM 1\d\.?\d* MiB · del Out frees 0 B", headline)

    # The row of each.
    rows = [" ".join(line.split()) for line in report.splitlines()]
    (row,) = [line for line in rows if f"shown, Out[{whole}]" in line]
    assert row.startswith("8 MiB")
    line = f'get_ipython().run_line_magic("xdel", "shown") # also held by Out[{part}]'
    assert line in " ".join(rows)
    assert any(f"Out[{alone}] ndarray" in line and f"%xdel _{alone}" in line for line in rows)

    # The lines that it names free all.
    run_quietly(notebook, "%xdel shown", f"%xdel _{part}", f"%xdel _{alone}")
    (report,) = run_quietly(notebook, "%gpumem why Out").reports("why")
    assert "MiB" not in report


def test_the_lines_that_free_all_outputs_do(notebook: Kernel) -> None:
    needs("numpy")
    run_quietly(notebook, "import numpy, weakref", "numpy.ones(1 << 20)", "first = weakref.ref(_)")
    run_quietly(notebook, "numpy.ones(1 << 20)", "last = weakref.ref(_)")
    (report,) = run_quietly(notebook, "%gpumem why Out").reports("why")
    lines = report.rpartition("to free all outputs: ")[2].strip().split(", then ")
    assert len(lines) == 2
    run_quietly(notebook, *lines)
    assert notebook.value("[first() is None, last() is None]") == [True, True]


def test_a_second_name_of_an_object_finds_its_row(notebook: Kernel) -> None:
    run_quietly(notebook, "first = second = bytearray(8 << 20)")
    for command in ("second", "'sec*'", "first"):
        (report,) = run_quietly(notebook, f"%gpumem top {command}").reports("top")
        assert "first, second" in report
    run_quietly(notebook, "del first, second")


def test_a_small_name_is_said_to_be_small(notebook: Kernel) -> None:
    run_quietly(notebook, "small = 5; tiny = [small]; large = bytearray(8 << 20)")
    (report,) = run_quietly(notebook, "%gpumem top small tiny").reports("top")
    assert "small, tiny: less than 1 KiB" in report
    (report,) = run_quietly(notebook, "%gpumem top small large").reports("top")
    assert "small: less than 1 KiB" in report
    (report,) = run_quietly(notebook, "%gpumem top large").reports("top")
    assert "less than" not in report
    run_quietly(notebook, "del small, tiny, large")


def test_top_says_that_shared_memory_counts_once(notebook: Kernel) -> None:
    run_quietly(notebook, "rows = [bytearray(8 << 20) for _ in range(2)]\nlast = rows[1]")
    (report,) = run_quietly(notebook, "%gpumem top rows last").reports("top")
    assert "counted once" in report
    (report,) = run_quietly(notebook, "del last", "%gpumem top rows").reports("top")
    assert "counted once" not in report
    run_quietly(notebook, "del rows")


def test_tensors_have_no_row_without_memory(notebook: Kernel) -> None:
    needs("numpy")
    run_quietly(notebook, "import numpy\nempty, full = numpy.zeros(0), numpy.ones(1 << 18)")
    (report,) = run_quietly(notebook, "%gpumem tensors").reports("tensors")
    assert "full" in report
    assert "empty" not in report
    assert " 0 B " not in report
    (report,) = run_quietly(notebook, "%gpumem tensors empty").reports("tensors")
    assert "empty" in report  # the user asks for it
    run_quietly(notebook, "del empty, full")


def test_copies_of_an_output_are_not_listed(notebook: Kernel) -> None:
    needs("numpy")
    run_quietly(notebook, "import numpy\nseen = numpy.ones(1 << 20)", "seen", "seen")
    (report,) = run_quietly(notebook, "%gpumem why seen").reports("why")
    numbers = notebook.value("sorted(Out)[-2:]")
    assert f"Out[{numbers[0]}], Out[{numbers[1]}]" in " ".join(report.split())
    assert "IPython's output _" not in report
    run_quietly(notebook, "%xdel seen")


# -- what a command has done ----------------------------------------------------------------------


def test_a_start_names_the_open_experiments(notebook: Kernel) -> None:
    (line,) = run_quietly(notebook, "%experiment start outer").reports("note")
    assert line == "experiment outer is open: %experiment end ends it"
    (line,) = run_quietly(notebook, "%experiment start inner --keep a").reports("note")
    assert line == "experiment inner is open inside outer: %experiment end ends it"
    run_quietly(notebook, "%experiment end outer")


def test_a_start_with_no_report_says_nothing(notebook: Kernel) -> None:
    assert run_quietly(notebook, "%experiment start silent --report none").displays == []
    assert run_quietly(notebook, "%experiment keep x").displays == []
    run_quietly(notebook, "x = 1", "%experiment end")


def test_keep_lists_kept_names_and_names_that_do_not_exist_yet(notebook: Kernel) -> None:
    run_quietly(notebook, "%experiment start kept --keep first", "second = 2; other = 3")
    (line,) = run_quietly(notebook, "%experiment keep second").reports("note")
    assert line == "experiment kept keeps first, second (no name matches first yet)"
    (line,) = run_quietly(notebook, "%experiment keep second 'oth*'").reports("note")
    assert line == "experiment kept keeps first, second, oth* (no name matches first yet)"
    run_quietly(notebook, "first = 1")
    (line,) = run_quietly(notebook, "%experiment keep second").reports("note")
    assert line == "experiment kept keeps first, second, oth*"
    (report,) = run_quietly(notebook, "%experiment end").reports("experiment")
    assert "kept: second, other, first" in " ".join(report.split())
    run_quietly(notebook, "del first, second, other")


def test_a_trivial_experiment_names_no_step_that_freed_it(notebook: Kernel) -> None:
    run_quietly(notebook, "%gpumem free")  # what earlier tests have left in the heap
    (report,) = run_quietly(notebook, "%%experiment trivial\nsmall = 1").reports("experiment")
    assert "freed by" not in report


def test_small_trims_are_not_told_and_large_ones_are() -> None:
    small = FreeingStep("free heap pages", {"cpu": 3 * MIB}, {}, 0.1)
    large = FreeingStep("free heap pages", {"cpu": 30 * MIB}, {}, 0.1)
    assert "free heap" not in text.render([freed_report("freed", [small], small.freed)])
    assert "free heap pages (RAM 30 MiB)" in text.render(
        [freed_report("freed", [large], large.freed)]
    )


def test_the_status_says_once_how_much_has_no_name(notebook: Kernel) -> None:
    cell = """
    import ctypes
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    block = ctypes.c_void_p(libc.malloc(128 << 20))
    libc.memset(block, 1, 128 << 20);
    """
    run_quietly(notebook, dedented(cell))
    (report,) = run_quietly(notebook, "%gpumem status").reports("status")
    assert report.count("not named") == 1
    run_quietly(notebook, "libc.free(block)")


def test_a_row_of_several_names_and_why_agree(notebook: Kernel) -> None:
    needs("numpy")
    run_quietly(notebook, "import numpy; rows = [numpy.ones(1 << 20)]; rows", "rows")
    (top,) = run_quietly(notebook, "%gpumem top rows").reports("top")
    assert "%xdel rows" in top
    assert "a row with several names: its line deletes all of them" in top
    (why,) = run_quietly(notebook, "%gpumem why rows").reports("why")
    assert "in one line: %xdel rows" in why
    run_quietly(notebook, "import weakref; array = weakref.ref(rows[0])", "%xdel rows")
    assert notebook.value("array() is None") is True


@pytest.mark.parametrize("name", ["In", "_ih", "_i", "_ii", "_iN", "_dh", "exit", "get_ipython"])
def test_why_says_that_a_name_is_ipythons(notebook: Kernel, name: str) -> None:
    run_quietly(notebook, "pass")
    number = notebook.value("get_ipython().execution_count - 1")  # %reset deletes earlier names
    name = name.replace("N", str(number))
    (report,) = run_quietly(notebook, f"%gpumem why {name}").reports("why")
    assert report.startswith(f"{name} · ")
    assert "IPython" in report
    assert "frees" not in report
    assert "still held" not in report


@pytest.mark.parametrize("name", ["_", "__", "___"])
def test_why_says_that_there_is_no_output_yet(name: str) -> None:
    with Kernel() as kernel:
        run_quietly(kernel, "%load_ext ipygpumem")
        (report,) = run_quietly(kernel, f"%gpumem why {name}").reports("why")
    assert "there is none yet" in report


def test_why_of_a_rebound_name_of_ipython_is_about_its_object(notebook: Kernel) -> None:
    run_quietly(notebook, "_i1 = bytearray(8 << 20)")
    (report,) = run_quietly(notebook, "%gpumem why _i1").reports("why")
    assert "del _i1 frees all of it" in report
    run_quietly(notebook, "del _i1")


def test_tiny_parts_of_an_estimate_are_one_row() -> None:
    parts = {"parameters": GIB, "gradients": 900 * KIB, "buffers": KIB, "other": 2 * KIB}
    rows = share_rows(parts, sum(parts.values()))
    shown = [(row["size"], row["share"], row["at the peak"]) for row in rows]
    assert shown == [
        ("1.00 GiB", "100%", "parameters"),
        ("903 KiB", "<1%", "3 smaller parts"),
    ]
    (_, row) = share_rows({"parameters": GIB, "other": KIB}, GIB + KIB)
    assert (row["share"], row["at the peak"]) == ("<1%", "other")


def test_a_missing_name_of_an_isolated_cell_gets_the_keep_option(notebook: Kernel) -> None:
    run_quietly(notebook, "%%isolate\ninner, other = 1, 2")
    (line,) = run_failing(notebook, "inner", "NameError").reports("cell")
    assert "inner ended with the child process of %%isolate: --keep inner keeps it" in line
    run_quietly(notebook, "inner = 1", "del inner")
    assert "ended with" not in str(run_failing(notebook, "inner", "NameError").reports("cell"))
    run_quietly(notebook, "%%isolate --keep other\nother = 2", "del other")
    assert "ended with" not in str(run_failing(notebook, "other", "NameError").reports("cell"))


@pytest.mark.parametrize(
    "cell",
    [
        "%%experiment demo --kep x\nx = 1",
        "%%experiment demo keep x\nx = 1",
        "%%peak --tpo 3\nx = 1",
        "%%autofit\nx = 1",
        "%%estimate --fit\nx = 1",
    ],
)
def test_a_cell_whose_first_line_is_wrong_has_no_line(notebook: Kernel, cell: str) -> None:
    run_quietly(notebook, "import ipygpumem")
    before = notebook.value("len(ipygpumem.history())")
    reply = run_failing(notebook, cell, None)
    assert "UsageError" in reply.stderr
    assert reply.displays == []
    assert notebook.value("len(ipygpumem.history())") == before


def test_a_wrong_command_after_code_leaves_the_cell_its_line(notebook: Kernel) -> None:
    cell = "%%experiment demo\nblock = bytearray(8 << 20)\n%gpumem tpo"
    assert len(notebook.run(cell).reports("cell")) == 1
    cell = "ran = 1\nget_ipython().run_cell_magic('peak', '--tpo', 'x = 1')"
    assert len(notebook.run(cell).reports("cell")) == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("%gpumem statsu", "no such command 'statsu' (did you mean status?): %gpumem help"),
        ("%experiment strat a", "(did you mean start?): %experiment help lists the commands"),
        ("%%estimate --fit\nx = 1", "%%estimate: --fit needs a value: --fit SIZE"),
        ("%experiment start a --keep", "--keep needs a value: --keep NAME..."),
        ("%gpumem leaks --min 1", "%gpumem leaks: --min: '1' has no unit"),
        ("%gpumem top -n", "%gpumem top: -n needs a value: -n N"),
    ],
)
def test_a_mistake_in_a_line_is_named_in_few_words(notebook: Kernel, line: str, says: str) -> None:
    reply = run_failing(notebook, line, None)
    assert says in " ".join(reply.stderr.split())
    # Two lines of a terminal at most.
    assert len(reply.stderr) < 150


def test_a_misspelt_name_is_suggested(notebook: Kernel) -> None:
    run_quietly(notebook, "dataset = bytearray(8 << 20)")
    (report,) = run_quietly(notebook, "%gpumem why datsaet").reports("why")
    assert "datsaet is not defined (did you mean dataset?)" in report
    run_quietly(notebook, "del dataset")


def test_the_status_begins_with_a_short_line(notebook: Kernel) -> None:
    (report,) = run_quietly(notebook, "%gpumem status").reports("status")
    first, *more = report.splitlines()
    assert re.fullmatch(r"ipygpumem · reports on · \d+ cells? and \d+ experiments? measured", first)
    kept = "  memory held by out-of-memory errors and interrupts is freed after the cell"
    assert more.count(kept) == 1


def test_help_called_as_a_function_is_named() -> None:
    with pytest.raises(AttributeError, match="it is a command, %gpumem help"):
        _ = ipygpumem.help


def test_the_name_of_a_variable_stands_for_the_arrays_in_it(notebook: Kernel) -> None:
    run_quietly(
        notebook,
        """
        import numpy
        parts = [numpy.ones(1 << 18), numpy.ones(1 << 18)]; parts_of_more = [numpy.ones(1 << 18)]
        """,
    )
    (report,) = run_quietly(notebook, "%gpumem tensors parts").reports("tensors")
    assert "parts[0]" in report
    assert "parts[1]" in report
    assert "parts_of_more" not in report
    run_quietly(notebook, "del parts, parts_of_more")


def test_tensors_leave_out_tiny_arrays_without_a_name(notebook: Kernel) -> None:
    needs("numpy")
    run_quietly(notebook, "import numpy; rows = numpy.ones(1 << 18); small = numpy.ones(2)")
    run_quietly(notebook, "kept = lambda array=numpy.ones(3): 0; numpy.random.rand(2);")
    (report,) = run_quietly(notebook, "%gpumem tensors").reports("tensors")
    assert "small" in report
    lines = [line for line in report.splitlines() if "(no name)" in line]
    assert [line for line in lines if line.split()[1] == "B"] == []
    run_quietly(notebook, "del rows, small, kept")


def test_why_of_a_module_promises_nothing(notebook: Kernel) -> None:
    run_quietly(notebook, "import json")
    (report,) = run_quietly(notebook, "%gpumem why json").reports("why")
    assert report.splitlines()[0] == "json · module"
    assert "is not counted: %gpumem why json.NAME" in report


@pytest.mark.parametrize("name", ["len", "small"])
def test_why_of_a_tiny_object_has_no_table(notebook: Kernel, name: str) -> None:
    run_quietly(notebook, "def small(): return 1\nuse = small")
    (report,) = run_quietly(notebook, f"%gpumem why {name}").reports("why")
    head, *lines = report.splitlines()
    assert head.startswith(f"{name} · ")
    assert [line.strip() for line in lines] == ["it is too small to search for what else uses it"]
    run_quietly(notebook, "del small, use")


def test_why_of_several_names_says_how_to_see_them(notebook: Kernel) -> None:
    run_quietly(notebook, "first = second = bytearray(8 << 20)")
    for line in ("first second", "first, second"):
        shown = run_failing(notebook, f"%gpumem why {line}", None).stderr
        assert "%gpumem why: one name at a time; %gpumem top first second lists several" in shown
    run_quietly(notebook, "del first, second")


def test_why_of_a_name_in_quotes_names_the_variable(notebook: Kernel) -> None:
    run_quietly(notebook, "dataset = bytearray(8 << 20)")
    (report,) = run_quietly(notebook, "%gpumem why 'dataset'").reports("why")
    assert "this is about the text; for the variable: %gpumem why dataset" in report
    run_quietly(notebook, "del dataset")


def test_a_value_of_autofit_that_is_no_number_leaves_no_line(notebook: Kernel) -> None:
    reply = run_failing(notebook, "%%autofit size=10**6\nx = 1", None)
    assert "is not a number" in reply.stderr
    assert reply.displays == []
