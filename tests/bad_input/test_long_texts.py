"""A text or path of any length that a user gives is repeated in few letters."""

from __future__ import annotations

import pytest

import ipygpumem
from ipygpumem.errors import GpuMemError, short
from tests.kernel import Kernel

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


def test_both_ends_of_a_path_are_shown_and_a_usual_one_is_whole() -> None:
    assert short("/home/me/results.json") == "/home/me/results.json"
    shown = short("/home/me/" + LONG + "/results.json")
    assert shown.startswith("/home/me/xxx")
    assert shown.endswith("xxx/results.json")
    assert len(shown) == 161
