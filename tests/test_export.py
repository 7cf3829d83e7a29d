"""Exports: every format, what a file on disk goes through, and what is read back."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import io
import json
import os
import re
import resource
import socket
import stat
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from ipygpumem.errors import FileError
from ipygpumem.model import CellRecord, ExperimentRecord, Held, ReclaimStep, RecoveryRecord, SessionRecord, Usage
from ipygpumem.reports.export import csv_file, files, formats, html_page, json_file, openmetrics
from ipygpumem.units import GIB
from tests.test_model import _values

MIB = 2**20
HOSTILE = "<img src=x onerror=alert(1)>\"'&\x1b[31m\n\ud800\u202e{}%s $x$"


def usage(device: str = "cpu", before: int = 100, after: int = 150, peak: int = 400) -> Usage:
    return Usage(device, before * MIB, after * MIB, peak * MIB, 1000 * MIB, "kernel", reserved_bytes=5)


def cell(number: int | None = 1, **changes: Any) -> CellRecord:
    record = CellRecord(number, "id", None, 1.5, 2.0, True, None, (usage(), usage("cuda:0")), "ab" * 8, "train()")
    return dataclasses.replace(record, **changes)


def oom() -> RecoveryRecord:
    held = Held("batch", "Tensor", (4, 4), "float32", "cuda:0", 64 * MIB, function="train", line=3)
    steps = (ReclaimStep("frames", {"cpu": 5}, {"cuda:0": 7}, 0.1),)
    return RecoveryRecord("oom", "OutOfMemoryError", "no", 2**30, {"cpu": 9}, (held,), 2, {"cpu": 5}, {"cpu": 4}, steps)


def experiment(name: str = "run", **changes: Any) -> ExperimentRecord:
    record = ExperimentRecord(
        name,
        1.0,
        3.0,
        (cell(),),
        (usage(), usage("cuda:0")),
        {"cpu": 50 * MIB, "cuda:0": 60 * MIB},
        {"cpu": 40 * MIB, "cuda:0": 55 * MIB},
        ("x",),
        (),
        ("y",),
        (),
        parameters={"lr": 1e-3, "bs": 64, "opt": "adam"},
        ooms=1,
    )
    return dataclasses.replace(record, **changes)


SESSION = SessionRecord(
    1_700_000_000.0,
    (
        cell(1),
        cell(2, success=False, error="OutOfMemoryError", recovery=oom(), experiment="run"),
        cell(None, usages=()),
    ),
    (experiment(), experiment("other", parameters={"lr": 0.1}), experiment()),
)
HOSTILE_SESSION = SessionRecord(
    0.0,
    (cell(1, source_line=HOSTILE, error=HOSTILE, cell_id=HOSTILE, experiment=HOSTILE, success=False),),
    (experiment(HOSTILE, parameters={"a": HOSTILE}, deleted=(HOSTILE,), notes=(HOSTILE,)), experiment("=1+1")),
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- formats --------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_json_is_lossless(data: st.DataObject) -> None:
    drawn = data.draw(
        st.builds(
            SessionRecord,
            saved_at=st.floats(allow_nan=False, allow_infinity=False),
            cells=_values(tuple[CellRecord, ...]),
            experiments=_values(tuple[ExperimentRecord, ...]),
        )
    )
    try:
        text = json_file.render(drawn)
    except ValueError:  # an infinite time: JSON has none, and no clock gives one
        return
    assert json_file.parse(text, "x") == drawn


@pytest.mark.parametrize("session", [SESSION, HOSTILE_SESSION, SessionRecord(0.0, (), ())])
def test_what_is_saved_is_read_back(tmp_path: Path, session: SessionRecord) -> None:
    formats.save(tmp_path / "x.json", session)
    assert ipygpumem.load(tmp_path / "x.json") == session
    head = json.loads((tmp_path / "x.json").read_text())
    assert (head["format"], head["schema"]) == ("ipygpumem", 1)


def test_csv_has_a_row_for_each_cell_and_device(tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_file.render(SESSION))))
    assert [(row["execution_count"], row["device"]) for row in rows] == [
        ("1", "cpu"),
        ("1", "cuda:0"),
        ("2", "cpu"),
        ("2", "cuda:0"),
        ("", ""),
    ]
    assert (rows[2]["delta_bytes"], rows[2]["peak_delta_bytes"], rows[2]["recovery"]) == (
        str(50 * MIB),
        str(300 * MIB),
        "oom",
    )


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", " =1", "\t=1", "\r=1", "\uff1d1", "\u00a0=1"])
def test_no_text_in_csv_is_a_formula(text: str) -> None:
    rendered = csv_file.render(SessionRecord(0.0, (cell(1, source_line=text, experiment=text),), ()))
    (row, _) = csv.DictReader(io.StringIO(rendered))
    assert row["source_line"][0] in "'\N{REPLACEMENT CHARACTER}"
    assert row["experiment"][0] in "'\N{REPLACEMENT CHARACTER}"
    assert row["before_bytes"] == str(100 * MIB)


def test_negative_figures_stay_figures_in_csv() -> None:
    (row,) = csv.DictReader(io.StringIO(csv_file.render(SessionRecord(0.0, (cell(usages=(usage(after=0),)),), ()))))
    assert row["delta_bytes"] == str(-100 * MIB)


@pytest.mark.parametrize("session", [SESSION, HOSTILE_SESSION, SessionRecord(0.0, (), ())])
def test_openmetrics_is_what_prometheus_reads(session: SessionRecord) -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    families = {family.name: family for family in parser.text_string_to_metric_families(openmetrics.render(session))}
    assert len(families) == 13
    cells = {sample.labels["success"]: sample.value for sample in families["ipygpumem_cells"].samples}
    assert cells["true"] + cells["false"] == len(session.cells)


def test_openmetrics_tells_runs_of_one_name_apart() -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    families = {family.name: family for family in parser.text_string_to_metric_families(openmetrics.render(SESSION))}
    samples = families["ipygpumem_experiment_peak_bytes"].samples
    assert families["ipygpumem_experiment_peak_bytes"].unit == "bytes"
    assert {(s.labels["experiment"], s.labels["run"], s.labels["device"]) for s in samples} == {
        (name, run, device)
        for name, run in (("run", "1"), ("run", "2"), ("other", "1"))
        for device in ("cpu", "cuda:0")
    }
    assert {sample.value for sample in samples} == {300.0 * MIB}
    parameters = families["ipygpumem_experiment_parameter"].samples
    assert {"experiment": "other", "run": "1", "parameter": "lr", "value": "0.1"} in [s.labels for s in parameters]


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("session", [SESSION, HOSTILE_SESSION, SessionRecord(0.0, (), ())])
def test_the_page_is_self_contained_and_escaped(session: SessionRecord) -> None:
    page = _Page()
    rendered = html_page.render(session)
    page.feed(rendered)
    page.close()
    assert rendered.count("<svg") == (2 + bool(session.experiments) if session.cells else 0)
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(set(ids)) == len(ids)
    assert not {"script", "img", "link", "iframe", "object", "embed", "base"} & set(page.tags)
    links = [value for name, value in page.attributes if name in ("src", "href", "xlink:href", "action")]
    assert all((link or "").startswith("#") for link in links)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert rendered.count("url(") == rendered.count("url(#")
    assert "@import" not in rendered
    assert not [letter for letter in page.text if not letter.isprintable() and letter != "\n"]


def test_the_page_has_the_experiments_the_cells_and_the_recoveries() -> None:
    page = _Page()
    page.feed(html_page.render(SESSION))
    for words in (
        "3 cells, 3 experiments",
        "run #2",
        "train()",
        "out of memory (OutOfMemoryError)",
        "0.001",
        "deleted: x",
    ):
        assert words in page.text


def test_the_bars_of_a_page_are_as_long_as_the_sessions_highest_use_and_its_pictures_may_be_dark() -> None:
    small, large = (Usage("cpu", GIB, 2 * GIB, peak * GIB, 64 * GIB, "kernel") for peak in (2, 40))
    ended = experiment(usages=(small,))
    alone = html_page.render(SessionRecord(0.0, (), (ended,)))
    among = html_page.render(SessionRecord(0.0, (cell(usages=(large,)),), (ended,)))
    assert "the bar ends at 3.00 GiB" in alone
    assert "the bar ends at 48.00 GiB" in among
    assert re.search(r"@media \(prefers-color-scheme: dark\) \{ svg \{ filter: invert", alone)


def test_a_page_without_matplotlib_or_with_one_that_fails_has_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise RuntimeError("<no> font")

    monkeypatch.setattr(importlib, "import_module", fail)
    page = html_page.render(SESSION)
    assert "could not be drawn: RuntimeError: &lt;no&gt; font" in page
    assert "train()" in page
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "Pictures" not in html_page.render(SESSION)


# -- files ----------------------------------------------------------------------------------------------------

ALL = pytest.mark.parametrize("suffix", formats.SUFFIXES)


@ALL
def test_a_file_of_ours_is_replaced_and_keeps_its_mode(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    formats.save(path, SessionRecord(0.0, (), ()))
    path.chmod(0o640)
    formats.save(path, SESSION)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert names(tmp_path) == [path.name]


@ALL
def test_a_file_of_somebody_elses_stays_without_force(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_text("precious")
    with pytest.raises(FileError, match=r"did not write: --force"):
        formats.save(path, SESSION)
    assert path.read_text() == "precious"
    formats.save(path, SESSION, force=True)
    assert path.read_text() != "precious"
    assert names(tmp_path) == [path.name]


@ALL
def test_an_empty_file_is_nobodys(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.touch()
    formats.save(path, SESSION)
    assert path.stat().st_size


def test_one_format_does_not_take_another_for_its_own() -> None:
    kinds = {".json": json_file, ".csv": csv_file, ".html": html_page, ".prom": openmetrics}
    for suffix, kind in kinds.items():
        head = kind.render(SESSION)[:4096]
        assert [other for other, module in kinds.items() if module.is_ours(head)] == [suffix]


def test_a_new_files_mode_is_the_umasks(tmp_path: Path) -> None:
    earlier = os.umask(0o027)
    try:
        formats.save(tmp_path / "x.json", SESSION)
    finally:
        os.umask(earlier)
    assert stat.S_IMODE((tmp_path / "x.json").stat().st_mode) == 0o640


def test_a_link_stays_one_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "x.json").symlink_to(tmp_path / "deep" / "y.json")
    formats.save(tmp_path / "x.json", SESSION)
    assert (tmp_path / "x.json").is_symlink()
    assert ipygpumem.load(tmp_path / "deep" / "y.json") == SESSION


def test_a_name_as_long_as_names_can_be_and_the_users_folder_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    name = "x" * 250 + ".json"
    formats.save(f"~/{name}", SESSION)
    assert (tmp_path / name).exists()


def _raises_one_line(path: str | Path, *, force: bool = True) -> str:
    with pytest.raises(FileError) as caught:
        formats.save(path, SESSION, force=force)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_a_missing_folder_a_folder_and_a_device_are_named(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "full.json").symlink_to("/dev/full")
    assert "No such file or directory" in _raises_one_line(tmp_path / "none" / "x.json")
    assert "is a folder" in _raises_one_line(tmp_path / "folder.json")
    assert "not a plain file" in _raises_one_line(tmp_path / "full.json")
    assert "Not a directory" in _raises_one_line("/dev/null/x.json")
    assert "too long" in _raises_one_line(tmp_path / ("x" * 300 + ".json"))
    assert "null" in _raises_one_line("x\0.json")
    assert names(tmp_path) == ["folder.json", "full.json"]


@pytest.mark.parametrize("name", ["x", "x.txt", "x.json.gz", ".json", ""])
def test_an_unknown_suffix_is_said_the_four(tmp_path: Path, name: str) -> None:
    assert ".json, .csv, .html or .prom" in _raises_one_line(tmp_path / name if name else "")
    assert not names(tmp_path)


def test_a_folder_that_cannot_be_written_is_named() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are the user's alone
        formats.save(Path(folder) / "before.json", SessionRecord(0.0, (), ()))
        Path(folder).chmod(0o555)
        user = os.geteuid()
        try:
            if user == 0:  # to whom nothing is read-only
                os.seteuid(65534)
            said = _raises_one_line(Path(folder) / "x.json")
        finally:
            os.seteuid(user)
    assert "Permission denied" in said


def test_a_disk_that_is_full_loses_nothing(tmp_path: Path) -> None:
    """The limit on the size of files stands in for the disk: the write fails half-way, as it does there."""
    formats.save(tmp_path / "x.json", SessionRecord(0.0, (), ()))
    earlier = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, earlier[1]))
    try:
        said = _raises_one_line(tmp_path / "x.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, earlier)
    assert "File too large" in said
    assert ipygpumem.load(tmp_path / "x.json").cells == ()
    assert names(tmp_path) == ["x.json"]


def test_a_real_disk_that_is_full_loses_nothing(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    try:
        formats.save(tmp_path / "x.json", SESSION)
        with pytest.raises(FileError, match="No space left on device"):
            formats.save(tmp_path / "x.json", dataclasses.replace(SESSION, cells=SESSION.cells * 100))
        assert ipygpumem.load(tmp_path / "x.json") == SESSION
        assert names(tmp_path) == ["x.json"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_whatever_stops_the_write_leaves_no_file_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def stop(descriptor: int) -> None:
        raise error

    monkeypatch.setattr(files.os, "fsync", stop)
    with pytest.raises((error, FileError)):
        formats.save(tmp_path / "x.json", SESSION)
    assert not names(tmp_path)


# -- reading --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not JSON"),
        (b'{"format": "ipygpumem", "schema": 1, "cells": [', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not an export"),
        (b'{"cells": []}', "not an export"),
        (b'{"format": "ipygpumem", "schema": "1"}', "not an export"),
        (b'{"format": "ipygpumem", "schema": 99}', "schema 99 and this ipygpumem reads up to 1: upgrade"),
        (b'{"format": "ipygpumem", "schema": 1}', "damaged"),
        (b'{"format": "ipygpumem", "schema": 1, "saved_at": 0, "cells": 5, "experiments": []}', "damaged"),
        (b'{"format": "ipygpumem", "schema": 1, "saved_at": 0, "cells": [1], "experiments": []}', "damaged"),
        (
            b'{"format": "ipygpumem", "schema": 1, "saved_at": "x", "cells": [], "experiments": []}',
            "damaged: str where",
        ),
        (b"\xff\xfe", "not text"),
    ],
)
def test_what_is_no_export_is_said_in_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(FileError, match=words) as caught:
        ipygpumem.load(tmp_path / "x.json")
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file"):
        ipygpumem.load(tmp_path / "x.json")
    with pytest.raises(FileError, match="Is a directory"):
        ipygpumem.load(tmp_path)


def test_a_script_exports_its_traces_without_ipython(tmp_path: Path) -> None:
    code = "import sys, ipygpumem\nwith ipygpumem.trace('x', silent=True): pass\nipygpumem.export('x.json')"
    code += "\nassert 'IPython' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    session = ipygpumem.load(tmp_path / "x.json")
    assert ([trace.label for trace in session.traces], session.host) == (["x"], socket.gethostname())


# -- in a shell -----------------------------------------------------------------------------------------------


def test_the_magic_writes_what_has_finished(
    shell: InteractiveShell, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_line_magic("load_ext", "ipygpumem")
    shell.run_cell("%%experiment one --note lr=1e-3\nx = 1")
    shell.run_cell(f"%gpumem export '{tmp_path}/my session.json'")
    assert "1 cell and 1 experiment are in" in capsys.readouterr().out
    found = ipygpumem.load(tmp_path / "my session.json")
    assert found.history == ipygpumem.history()[:1]
    assert found.experiments == tuple(ipygpumem.experiments())
    ipygpumem.export(tmp_path / "x.html")
    assert html_page.is_ours((tmp_path / "x.html").read_text())


def test_the_magics_mistakes_are_one_line(shell: InteractiveShell, tmp_path: Path) -> None:
    shell.run_line_magic("load_ext", "ipygpumem")
    for line in ("export", "export x.txt", f"export {tmp_path}/none/x.json", "export a.json b.json"):
        error = shell.run_cell(f"%gpumem {line}").error_in_exec
        assert type(error).__name__ == "UsageError", line
        assert len(str(error).splitlines()) == 1
