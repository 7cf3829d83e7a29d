"""Exports: both formats, writing to disk, and reading back; records that go to
whoever subscribes.
"""

import csv
import io
import json
import math
import os
import re
import resource
import socket
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from ipygpumem.errors import FileError
from ipygpumem.reading import IMPORTS_BY_KIND
from ipygpumem.records import (
    CellRecord,
    EngineRecord,
    ExperimentRecord,
    ReferencePath,
    RetainedArray,
    SessionRecord,
    TraceRecord,
    packed,
)
from ipygpumem.report import export
from ipygpumem.units import MIB
from tests.alone import ROOT, printed
from tests.notebooks import notebook, write
from tests.report_samples import every_report
from tests.session_samples import HOSTILE, SESSION, cell, experiment, usage

pytestmark = pytest.mark.usefixtures("others_out_of_sight")


WHOLE_SESSION = SessionRecord(
    0.0,
    (),
    (
        experiment(
            engines=(
                EngineRecord(0, "a", cards={"cuda:0": "H100"}, record=experiment()),
                EngineRecord(1, error="x"),
            ),
            survivors=(
                RetainedArray(
                    "b", "list", None, "", "cpu", 1, 2, holder=ReferencePath("x", "del x")
                ),
            ),
        ),
    ),
    (TraceRecord("epoch", 1.0, 2.0, None, (usage(),), 3),),
)
HOSTILE_SESSION = SessionRecord(
    0.0,
    (
        cell(
            1,
            source_line=HOSTILE,
            error=HOSTILE,
            cell_id=HOSTILE,
            experiment=HOSTILE,
            success=False,
        ),
    ),
    (
        experiment(HOSTILE, parameters={"a": HOSTILE}, deleted=(HOSTILE,), notes=(HOSTILE,)),
        experiment("=1+1"),
    ),
)


_WITH_NAN = {"kind": "CellRecord", **cell().to_dict(), "duration_seconds": math.nan}


def in_notebook(*ours: Any) -> bytes:
    """Return the file of a notebook with a cell, and these values as the metadata of
    its outputs.
    """
    outputs = [
        {"output_type": "display_data", "data": {}, "metadata": {"ipygpumem": item}}
        for item in ours
    ]
    others = {
        "jupyter": 3,
        "ipygpumem_like": {"records": 1},
        "parameters": {"lr": math.inf, "loss": math.nan},
    }
    theirs = [{"output_type": "stream"}, {"metadata": others}]
    cells = [{"cell_type": "markdown"}, {"cell_type": "code", "outputs": theirs + outputs}]
    return json.dumps({"nbformat": 4, "metadata": {"ipygpumem": 3}, "cells": cells}).encode()


def file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    "session", [SESSION, HOSTILE_SESSION, WHOLE_SESSION, SessionRecord(0.0, (), ())]
)
def test_a_saved_session_is_read_back(tmp_path: Path, session: SessionRecord) -> None:
    export.save(tmp_path / "x.json", session)
    assert ipygpumem.load(tmp_path / "x.json") == session
    head = json.loads((tmp_path / "x.json").read_text())
    assert (head["format"], head["schema"]) == ("ipygpumem", 1)


def rows_of(*cells: CellRecord) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(export.to_csv(SessionRecord(0.0, cells, ())))))


def test_csv_has_a_row_for_each_cell_and_device() -> None:
    rows = rows_of(*SESSION.cells, cell(4, usages=(usage(after=0),)))
    places = [("1", "cpu"), ("1", "cuda:0"), ("2", "cpu"), ("2", "cuda:0"), ("", ""), ("4", "cpu")]
    assert [(row["execution_count"], row["device"]) for row in rows] == places
    figures = [rows[2][name] for name in ("delta_bytes", "peak_delta_bytes", "recovery")]
    assert figures == [str(50 * MIB), str(300 * MIB), "oom"]
    assert rows[-1]["delta_bytes"] == str(-100 * MIB)


@pytest.mark.parametrize("text", ["=1+1", "-1", "@SUM(A1)", "\t=1", "\uff1d1", "\u00a0=1"])
def test_no_text_in_csv_is_a_formula(text: str) -> None:
    row = rows_of(cell(1, source_line=text, experiment=text))[0]
    assert row["source_line"][0] in "'\N{REPLACEMENT CHARACTER}"
    assert row["experiment"][0] in "'\N{REPLACEMENT CHARACTER}"
    assert row["before_bytes"] == str(100 * MIB)


@pytest.mark.parametrize(("suffix", "other"), [(".json", ".csv"), (".csv", ".json")])
def test_only_force_replaces_a_file_of_another_program(
    tmp_path: Path, suffix: str, other: str
) -> None:
    path = tmp_path / f"x{suffix}"
    path.touch()  # an empty file may be replaced, and one of ours; it keeps its mode
    path.chmod(0o640)
    export.save(path, SESSION)
    export.save(path, SessionRecord(0.0, (), ()))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640

    # A file of another program, or of another of our formats.
    export.save(tmp_path / f"y{other}", SESSION)
    for theirs in ("precious", (tmp_path / f"y{other}").read_text()):
        path.write_text(theirs)
        with pytest.raises(FileError, match=r"did not write: --force"):
            export.save(path, SESSION)
        assert path.read_text() == theirs
    export.save(path, SESSION, force=True)
    assert path.read_text() != theirs
    assert file_names(tmp_path) == sorted([path.name, f"y{other}"])


def test_exports_work_with_links_long_names_and_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    name = "x" * 250 + ".json"
    (tmp_path / "x.json").symlink_to(tmp_path / name)
    earlier = os.umask(0o027)
    try:
        export.save("~/x.json", SESSION)
    finally:
        os.umask(earlier)
    assert (tmp_path / "x.json").is_symlink()
    assert ipygpumem.load(tmp_path / name) == SESSION
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640


def _raises_one_line(path: str | Path, *, force: bool = True) -> str:
    with pytest.raises(FileError) as caught:
        export.save(path, SESSION, force=force)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "full.json").symlink_to("/dev/full")
    assert "No such file or directory" in _raises_one_line(tmp_path / "none" / "x.json")
    assert "is a folder" in _raises_one_line(tmp_path / "folder.json")
    assert "not a plain file" in _raises_one_line(tmp_path / "full.json")
    assert "null" in _raises_one_line("x\0.json")
    for name in ("x", "x.html", "x.json.gz", ".json"):
        assert "the suffix selects the format: .json or .csv" in _raises_one_line(tmp_path / name)
    assert file_names(tmp_path) == ["folder.json", "full.json"]


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """The limit on the size of files stands in for the disk: the write fails half-way, as it does
    there.
    """
    export.save(tmp_path / "x.json", SessionRecord(0.0, (), ()))
    earlier = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, earlier[1]))
    try:
        message = _raises_one_line(tmp_path / "x.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, earlier)
    assert "File too large" in message
    assert ipygpumem.load(tmp_path / "x.json").cells == ()
    assert file_names(tmp_path) == ["x.json"]


KILLED = """
import os, signal, ipygpumem
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
ipygpumem.export("x.json")
"""


def test_an_export_removes_a_killed_process_partial_file(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, check=False)
    assert done.returncode == -9
    (left,) = file_names(tmp_path)
    stays = [
        re.sub(r"-\d+-", f"-{os.getpid()}-", left, count=1),  # of a process that runs
        ".ipygpumem-1-0badcafe-00.tmp",  # of another machine's
        ".ipygpumem-notes.tmp",
        "ipygpumem-1-00.tmp",
    ]
    for name in (*stays, ".ipygpumem-2-0badcafe-00.tmp", ".ipygpumem-0123456789abcdef.tmp"):
        (tmp_path / name).touch()
    for name in (
        ".ipygpumem-2-0badcafe-00.tmp",
        ".ipygpumem-0123456789abcdef.tmp",
        ".ipygpumem-notes.tmp",
    ):
        os.utime(tmp_path / name, (1, 1))
    export.save(tmp_path / "y.csv", SESSION)
    assert file_names(tmp_path) == sorted([*stays, "y.csv"])


def test_an_interrupted_write_leaves_no_file_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        export.save(tmp_path / "x.json", SESSION)
    assert not file_names(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"format": "ipygpumem", "schema": 1, "cells": [', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"format": "ipygpumem", "schema": "1"}', "neither an export"),
        (
            b'{"format": "ipygpumem", "schema": 99}',
            "schema 99 and this ipygpumem reads up to 1: upgrade",
        ),
        (
            b'{"format": "ipygpumem", "schema": 1, "saved_at": 0, "cells": [1], "experiments": []}',
            "damaged",
        ),
        (b"\xff\xfe", "not text"),
        (b'{"nbformat": 4}', "damaged, or not a notebook"),
        (b'{"nbformat": 4, "cells": [{"outputs": 3}]}', "damaged, or not a notebook"),
        (in_notebook(3), "damaged, or not a notebook"),
        (in_notebook({"schema": 1, "records": [{}]}), "damaged, or not a notebook"),
        (in_notebook({"schema": 1, "records": [_WITH_NAN]}), "damaged: str where float"),
        (
            in_notebook({"schema": 1, "records": [{"kind": "CellRecord"}]}),
            "damaged, or not a notebook",
        ),
        (in_notebook({"schema": 1, "records": [{"kind": "Estimate"}]}), "damaged"),
        (in_notebook({"schema": 99}), "schema 99 and this ipygpumem reads up to 1: upgrade"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_no_export_is_one_line(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "x.json").write_bytes(content)
    refused_by_load(tmp_path / "x.json", words)


def refused_by_load(path: Any, words: str) -> None:
    with pytest.raises(FileError, match=words) as caught:
        ipygpumem.load(path)
    assert len(str(caught.value).splitlines()) == 1


def test_the_records_in_the_outputs_of_a_notebook_are_read(tmp_path: Path) -> None:
    records = [cell(2, started_at=9.0), experiment(), *WHOLE_SESSION.traces, cell(1)]
    later = {**packed([]), "records": [{"kind": "RecordOfTomorrow"}], "more": 1}
    large = packed([experiment(cells=(cell(),) * 1000), cell(3, started_at=10.0)])
    content = in_notebook(
        packed(records[:2]), packed(records[2:]), later, large, {"reports": ["plot"]}
    )
    (tmp_path / "x.ipynb").write_bytes(content)
    session = ipygpumem.load(tmp_path / "x.ipynb")
    assert session.cells == (cell(1), records[0], cell(3, started_at=10.0))
    assert (session.experiments, session.traces) == ((experiment(),), WHOLE_SESSION.traces)
    assert session.left_out == {"ExperimentRecord": 1}
    assert session.saved_at == (tmp_path / "x.ipynb").stat().st_mtime
    (tmp_path / "empty.ipynb").write_bytes(in_notebook())
    assert ipygpumem.load(tmp_path / "empty.ipynb").cells == ()


def test_each_kind_of_record_with_a_report_is_read_back() -> None:
    records = [record for report in every_report("x\ud800") for record in report.records]
    session = SessionRecord(0.0, (), (), results=tuple(records))
    assert {type(record).__name__ for record in records} >= IMPORTS_BY_KIND.keys()
    assert SessionRecord.from_dict(json.loads(json.dumps(session.to_dict()))) == session
    clean = json.dumps(packed(records), ensure_ascii=False).encode()  # as a front-end does
    assert [item["kind"] for item in json.loads(clean)["records"]] == [
        type(record).__name__ for record in records
    ]


NEW_PROCESS = """
from ipygpumem.reading import IMPORTS_BY_KIND
from ipygpumem.records import class_of, mimebundle
for kind, import_it in IMPORTS_BY_KIND.items():
    import_it()
    has_report = mimebundle.dispatch(class_of(kind)) is not mimebundle.dispatch(object)
    print(kind, has_report)
"""


def test_a_new_process_reads_and_reports_each_kind_of_record() -> None:
    lines = printed("-c", NEW_PROCESS).splitlines()
    without_report = {"Reconciliation", "Try"}  # parts of others
    assert lines == [f"{kind} {kind not in without_report}" for kind in IMPORTS_BY_KIND]


STEPS = (
    "%load_ext ipygpumem",
    "import ipygpumem, numpy",
    "%%experiment one --note lr=0.1\nx = numpy.ones(1 << 20)",
    "for _ in ipygpumem.track(range(3)): pass",
    "%gpumem quiet on\n%config IPyGpuMem.report = False",
    textwrap.dedent(
        """\
        def f():
            held = numpy.ones(1 << 20)
            raise MemoryError
        f()"""
    ),
    "ipygpumem.tensors()",
)


def test_an_executed_notebook_has_the_figures_of_its_reports(tmp_path: Path) -> None:
    cells = notebook(*STEPS)
    cells.cells[5].metadata.tags = ["raises-exception"]
    write(cells, tmp_path / "x.ipynb")
    command = ("-m", "nbconvert", "--to", "notebook", "--execute", "--inplace", "x.ipynb")
    printed(*command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    session = ipygpumem.load(tmp_path / "x.ipynb")
    assert [record.execution_count for record in session.cells] == [2, 3, 4, 6]
    assert session.cells[-1].recovery is not None  # also where the cells' lines are hidden
    (one,) = session.experiments
    assert (one.parameters, one.cells) == ({"lr": 0.1}, session.cells[1:2])
    # the last of several updates of one display
    assert [trace.iteration for trace in session.traces] == [
        1,
        2,
        3,
    ]
    (inventory,) = session.results
    assert type(inventory).__name__ == "Inventory"


def nested(levels: int) -> str:
    """Return an experiment in an engine's record in an experiment, and so on."""
    inner = json.dumps(experiment("inner").to_dict())
    around = json.dumps(
        experiment(engines=(EngineRecord(0, record=experiment("inner")),)).to_dict()
    ).split(inner)
    return around[0] * levels + inner + around[1] * levels


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"experiments": [', '"experiments": [' + nested(400) + ", "),
        ('"before_bytes": 1', '"before_bytes": 1' + "0" * 400),
        ('"duration_seconds": 2.0', '"duration_seconds": 1e400'),
        ('"duration_seconds": 2.0', '"duration_seconds": NaN'),
        ('"duration_seconds": 2.0', '"duration_seconds": -2.0'),
        ('"started_at": ', '"started_at": 1e18, "_": '),
        ('"lr": 0.001', '"lr": Infinity'),
        ('"bs": 64', '"bs": 6' + "4" * 5000),
    ],
)
def test_an_export_with_impossible_content_is_refused(tmp_path: Path, old: str, new: str) -> None:
    is_refused(tmp_path, old, new)


def is_refused(folder: Path, old: str, new: str) -> None:
    """Check that an export with a replaced text is refused."""
    whole = export.to_json(SESSION)
    assert old in whole
    (folder / "x.json").write_text(whole.replace(old, new, 1))
    refused_by_load(folder / "x.json", "damaged|not JSON")


def test_an_export_with_too_many_devices_is_refused(tmp_path: Path) -> None:
    devices = "".join(f'"cuda:{n}": 1, ' for n in range(20_000))
    is_refused(tmp_path, '"consumed": {', '"consumed": {' + devices)


def test_an_export_with_too_many_usages_is_refused(tmp_path: Path) -> None:
    usages = (json.dumps(usage().to_dict()) + ", ") * 20_000
    is_refused(tmp_path, '"usages": [', '"usages": [' + usages)


def test_an_export_with_too_many_cells_is_refused(tmp_path: Path) -> None:
    cells = [cell(usages=(usage(str(n)),)) for n in range(10_001)]
    texts = "".join(f"{json.dumps(record.to_dict())}, " for record in cells)
    is_refused(tmp_path, '"cells": [', '"cells": [' + texts)


def test_an_export_with_too_many_engines_is_refused(tmp_path: Path) -> None:
    engines = ", ".join([json.dumps(EngineRecord(0).to_dict())] * 20_000)
    is_refused(tmp_path, '"engines": []', f'"engines": [{engines}]')


def test_only_plain_files_of_an_exports_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "pipe.json")
    (tmp_path / "huge.json").touch()
    os.truncate(tmp_path / "huge.json", 2**40)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket.json"))
        for path in (
            "pipe.json",
            "folder.json",
            "link.json",
            "socket.json",
            "/dev/zero",
            "/dev/tty",
        ):
            refused_by_load(tmp_path / path, "cannot be read: not a plain file")
    refused_by_load(tmp_path / "huge.json", "1.00 TiB: too large for an export")


@pytest.mark.parametrize("path", [None, 7, ["x.json"], object()])
def test_a_path_that_names_no_file_is_refused(path: Any) -> None:
    refused_by_load(path, "a file name must be a string or a path, not")
    with pytest.raises(FileError, match="a file name must be"):
        ipygpumem.export(path)


def test_a_script_exports_its_traces_without_ipython(tmp_path: Path) -> None:
    code = textwrap.dedent(
        """\
        import sys, ipygpumem
        with ipygpumem.trace('x', silent=True): pass
        ipygpumem.export('x.json')"""
    )
    code += "\nassert 'IPython' not in sys.modules"
    printed("-c", code, cwd=tmp_path)
    session = ipygpumem.load(tmp_path / "x.json")
    assert ([trace.label for trace in session.traces], session.host) == (
        ["x"],
        socket.gethostname(),
    )


def test_export_writes_done_cells(
    loaded: InteractiveShell, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded.run_cell("%%experiment one --note lr=1e-3\nx = 1")
    loaded.run_cell(f"%gpumem export '{tmp_path}/my session.json'")
    assert "wrote 1 cell and 1 experiment to" in capsys.readouterr().out
    session = ipygpumem.load(tmp_path / "my session.json")
    assert session.history == ipygpumem.history()[:1]
    assert session.experiments == tuple(ipygpumem.experiments())
    ipygpumem.export(tmp_path / "x.csv")
    lines = (tmp_path / "x.csv").read_text().splitlines()
    # Another test's progress bar may have left a semaphore, which is shared memory.
    assert len([line for line in lines if ",shm," not in line]) == 2
    for line in (
        "export",
        "export x.txt",
        f"export {tmp_path}/none/x.json",
        "export a.json b.json",
    ):
        error = loaded.run_cell(f"%gpumem {line}").error_in_exec
        assert type(error).__name__ == "UsageError", line
        assert len(str(error).splitlines()) == 1


def test_subscribers_get_each_record_once_in_order_of_its_end(loaded: InteractiveShell) -> None:
    records: list[Any] = []
    undo = ipygpumem.subscribe(records.append)
    loaded.run_cell("x = 1")
    loaded.run_cell("%%experiment one\ny = 2")
    loaded.run_cell("%experiment start two")
    loaded.run_cell("%experiment end")
    undo()
    undo()
    loaded.run_cell("z = 3")
    kinds = [type(record) for record in records]
    assert kinds == [
        CellRecord,
        CellRecord,
        ExperimentRecord,
        ExperimentRecord,
    ]  # no cell of our own commands
    assert [record.name for record in records if type(record) is ExperimentRecord] == ["one", "two"]
    assert [record for record in records if type(record) is CellRecord] == list(
        ipygpumem.history()
    )[:-1]


def test_a_failing_subscriber_is_dropped_an_interrupted_one_kept(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    records: list[Any] = []

    def broken(record: Any) -> None:
        raise ValueError("no space\nleft")

    def leave(record: Any) -> None:
        raise SystemExit

    def slow(record: Any) -> None:
        records.append(record)
        raise KeyboardInterrupt

    # Two fail at the first record; one is interrupted, and sees both, as `records.append` does.
    for one in (broken, leave, slow):
        ipygpumem.subscribe(one)
    undo = ipygpumem.subscribe(records.append)
    assert loaded.run_cell("x = 1").success
    assert loaded.run_cell("x = 2").success
    undo()
    said = capsys.readouterr().err
    assert (
        said.count("broken failed and gets no further records (ValueError: no space\ufffdleft)")
        == 1
    )
    assert "slow was interrupted; it stays subscribed" in said
    assert len(records) == 4


def test_a_subscription_and_its_undo_survive_a_reload(shell: InteractiveShell) -> None:
    records: list[Any] = []
    shell.run_line_magic("load_ext", "ipygpumem")
    undo = ipygpumem.subscribe(records.append)
    shell.run_line_magic("unload_ext", "ipygpumem")
    shell.run_cell("x = 1")
    shell.run_line_magic("load_ext", "ipygpumem")
    shell.run_cell("x = 2")
    assert [record.source_line for record in records] == ["x = 2"]
    undo()
    shell.run_cell("x = 3")
    assert len(records) == 1
    assert not [name for name in vars(shell) if "ipygpumem" in name]
