"""Lines and arguments that are wrong or long, and names to keep that are not there."""

from __future__ import annotations

import pytest

import ipygpumem
from ipygpumem.errors import GpuMemError
from tests.kernel import Kernel
from tests.steps import fails, goes_on, names, open_now, refused, works


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("%experiment", "a command is missing"),
        ("%experiment bogus", "bogus"),
        ("%experiment end", "no experiment is open"),
        ("%experiment start", "name"),
        ("%%experiment\nx = 1", "name"),
        ("%%experiment --keep x\nx = 1", "which name?"),
        ("%%experiment --keep x run\nx = 1", "Write it before the options"),
        ("%experiment start --budget gpu=4GiB run", "Write it before the options"),
        ("%experiment start a --bogus", "--bogus"),
        ("%%experiment a --bogus 3\nx = 1", "--bogus"),
        ("%experiment start a --help", "--help"),
        ("%experiment start a --see 1", "--see"),
        ("%experiment start a --seed x", "--seed"),
        ("%experiment start a --report loud", "--report"),
        ("%experiment start a --keep", "--keep"),
        ("%experiment start a --keep 'x y'", "x y"),
        ("%experiment start don't", "quotation"),
        ("%%experiment 'unclosed\nx = 1", "quotation"),
        ("%gpumem", "on"),
        ("%gpumem bogus", "status"),
        ("%gpumem on off", "takes none"),
        ("%gpumem release", "which object?"),
        ("%gpumem release nothing", "there is no variable 'nothing' here"),
        ("%gpumem release In", "`In` (list) cannot be emptied"),
        ("%gpumem purge", "which model?"),
        ("%gpumem purge In", "purge moves torch's modules, and torch is not loaded"),
        ("%gpumem purge In In In", "it takes a model and its optimizer"),
    ],
)
def test_a_wrong_line_gets_one_line_that_names_the_mistake_and_opens_nothing(
    notebook: Kernel, line: str, part: str
) -> None:
    assert part in refused(notebook, line)
    assert (open_now(notebook), names(notebook)) == ([], [])


@pytest.mark.parametrize("seed", ["99999999999999999999999999", "-99999999999999999999999999"])
def test_a_seed_that_no_generator_takes_is_refused_before_anything_is_open(notebook: Kernel, seed: str) -> None:
    assert "seed" in refused(notebook, f"%%experiment a --seed {seed}\nx = 1")
    assert "seed" in refused(notebook, f"%experiment start a --seed {seed}")
    assert (open_now(notebook), names(notebook)) == ([], [])


@pytest.mark.parametrize(
    "call",
    [
        "experiment(7)",
        "experiment('')",
        "experiment('a', keep=[1])",
        "experiment('a', seed='x')",
        "experiment('a', seed=1 << 80)",
        "experiment('a', report='loud')",
    ],
)
def test_a_wrong_argument_in_python_is_refused_when_it_is_given_and_loses_no_name(notebook: Kernel, call: str) -> None:
    works(notebook, "import ipygpumem\nx = 'old'\ndef attempt():\n    return ipygpumem." + call + ".start()")
    reply = fails(notebook, "handle = attempt()\nx = 'new'")
    assert reply.error in ("ExperimentError", "TypeError", "ValueError"), reply
    assert (notebook.value("x"), open_now(notebook)) == ("old", [])
    goes_on(notebook)


def test_keep_of_a_name_that_does_not_exist_is_said_and_harms_nothing(notebook: Kernel) -> None:
    reply = works(notebook, "%%experiment a --keep missing --keep 'no*' --keep here\nhere, gone = 1, 2")
    (text,) = reply.reports("experiment")
    assert all(f"no name matches '{name}'" in text for name in ("missing", "no*"))
    assert "'here'" not in text
    assert names(notebook) == ["here"]


LONG = "x" * 100_000
MOST = 800


@pytest.mark.parametrize("path", [LONG, "/tmp/" + "/".join(["d" * 200] * 500), "~" + LONG, "a\0" + LONG])
@pytest.mark.parametrize("end", [".json", "/none.pickle", ""])
def test_a_path_of_any_length_is_shortened(end: str, path: str) -> None:
    with pytest.raises(GpuMemError) as raised:
        ipygpumem.load(path + end)
    assert len(str(raised.value)) < MOST


def test_what_is_given_in_a_notebook_is_shortened(bare_kernel: Kernel) -> None:
    bare_kernel.run("%load_ext ipygpumem\nimport ipygpumem\nx = 'x' * 100_000\nlong = 'x' * 3000")
    for call in (
        *(f"export({path})" for path in ("x", "x + '.json'", "'~' + x + '.json'", "x + '/a.json'")),
        *(f"experiment('n', record={path})" for path in ("x", "x + '/a.pickle'")),
        *("experiment('n', report=x)", "experiment('n', report=[x])", "experiment(x).usage()", "tracker(x + '/none')"),
    ):
        reply = bare_kernel.run(f"ipygpumem.{call}")
        assert reply.error in ("FileError", "ExperimentError"), (call, reply.error, reply.message[:200])
        assert len(reply.message) < MOST, call
    for line in (
        *("%gpumem export {long}.json", "%gpumem plot session {long}", "%gpumem postmortem ~{long}"),
        *("%gpumem history --experiment {long}", "%gpumem compare {long} other"),
        *("%experiment start a --record {long}.pickle", "%experiment start a --report {long}"),
    ):
        reply = bare_kernel.run(line)
        assert reply.stderr.startswith("UsageError"), (line, reply.stderr[:200])
        assert len(reply.stderr) < MOST, (line, reply.stderr[:200])
