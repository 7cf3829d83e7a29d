"""A text or path of any length that a user gives is repeated in few letters."""

from __future__ import annotations

from typing import Any

import pytest

import ipygpumem
from ipygpumem.errors import GpuMemError, short
from tests.kernel import Kernel

LONG = "x" * 100_000
DEEP = "/tmp/" + "/".join(["d" * 200] * 500)
PATHS = {"a name": LONG, "folders": DEEP, "a user": "~" + LONG, "a null": "a\0" + LONG}
MOST = 800


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
@pytest.mark.parametrize("suffix", [".json", ".pickle", ""])
@pytest.mark.parametrize("what", ["load", "tracker"])
def test_a_path_of_any_length_is_shortened(what: str, suffix: str, path: str) -> None:
    calls: dict[str, Any] = {
        "load": ipygpumem.load,
        "tracker": lambda place: ipygpumem.tracker(place + "/none"),
    }
    with pytest.raises(GpuMemError) as raised:
        calls[what](path + suffix)
    assert len(str(raised.value)) < MOST


def test_what_is_given_in_a_notebook_is_shortened(bare_kernel: Kernel) -> None:
    bare_kernel.run("%load_ext ipygpumem\nimport ipygpumem\nx = 'x' * 100_000\nlong = 'x' * 3000")
    for call in (
        *(f"ipygpumem.export({path!r})" for path in ("LONG", "LONG.json", "~LONG.json", "LONG/a.json")),
        *(f"ipygpumem.experiment('n', record={path!r})" for path in ("LONG", "LONG.pickle", "LONG/a.pickle")),
        "ipygpumem.experiment('n', report=x)",
        "ipygpumem.experiment('n', report=[x])",
        "ipygpumem.experiment(x).usage()",
        "ipygpumem.experiment(x).finish()",
    ):
        reply = bare_kernel.run(call.replace("'LONG", "x + '").replace("'~LONG", "'~' + x + '"))
        assert reply.error in ("FileError", "ExperimentError"), (call, reply.message[:200])
        assert len(reply.message) < MOST, call
    for line in (
        *(f"%gpumem export {path}" for path in ("{long}", "{long}.json", "{long}/a.json")),
        "%gpumem plot session {long}",
        "%gpumem postmortem {long}",
        "%gpumem postmortem ~{long}",
        "%gpumem postmortem /",
        "%gpumem history --experiment {long}",
        "%gpumem compare {long} other",
        "%experiment start a --record {long}.pickle",
        "%experiment start a --report {long}",
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
