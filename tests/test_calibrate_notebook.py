"""examples/calibrate.ipynb: a real kernel chooses a batch size for a real network, and what the notebook says is so."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from ipygpumem.units import MIB, parse_bytes
from tests.notebooks import Node, read
from tests.test_demo import EXAMPLES, outputs

# Asked for, not imported: what this process holds makes each collection of garbage of the tests after these slower.
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        not (find_spec("torch") and find_spec("sklearn")), reason="the network needs torch, its images scikit-learn"
    ),
]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Node:
    """The notebook, run from top to bottom; every cell succeeded."""
    folder = tmp_path_factory.mktemp("calibrate")
    command = [sys.executable, EXAMPLES / "run_demo.py", folder, "calibrate"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr
    assert (folder / "calibrate.html").exists()
    return read(folder / "calibrate.ipynb")


def sizes(text: str) -> list[float]:
    """Return the sizes in a line of text, in MiB."""
    return [parse_bytes(size) / MIB for size in re.findall(r"[\d.]+ (?:[KMG]iB|B)", text)]


def test_the_estimate_is_near_what_the_first_try_really_took(notebook: Node) -> None:
    (estimated,) = re.findall(r"^estimate · RAM peak ([\d.]+ MiB), fits", outputs(notebook, "estimate"), re.MULTILINE)
    (risen,) = re.findall(r"^cell \d+ · .* peak \+([\d.]+ \w+),", outputs(notebook, "autofit"), re.MULTILINE)
    # The process has more than its tensors: what the heap keeps, and what kernels use inside themselves.
    assert sizes(risen)[0] == pytest.approx(sizes(estimated)[0], rel=0.3)


def test_a_batch_of_1024_does_not_fit_and_a_smaller_one_fits_and_is_kept(notebook: Node) -> None:
    text = outputs(notebook, "autofit")
    rows = re.findall(r"^ +(\d+) +([\d.]+ \w+) +(out of memory|fits)\b", text, re.MULTILINE)
    assert [row[2] for row in rows] == [*["out of memory"] * (len(rows) - 1), "fits"]
    assert [int(row[0]) for row in rows] == [1024 >> turn for turn in range(len(rows))]
    assert 2 <= len(rows) <= 3
    assert outputs(notebook, "found").splitlines()[0] == rows[-1][0]


def test_relu_in_place_takes_nothing_and_the_other_a_tensor(notebook: Node) -> None:
    found = int(outputs(notebook, "found").splitlines()[0])
    text = outputs(notebook, "gpumemit")
    (copy,) = re.findall(r"^ +F\.relu\(x\) .*", text, re.MULTILINE)
    (in_place,) = re.findall(r"^ +F\.relu_\(x\) .*", text, re.MULTILINE)
    assert max(sizes(copy)) == pytest.approx(found * 8 * 64 * 64 * 4 / MIB, rel=0.05)
    assert max(sizes(in_place), default=0) < 2


def test_the_lines_of_the_step_and_the_blocks_are_followed(notebook: Node) -> None:
    text = outputs(notebook, "memlines")
    (forward,) = re.findall(r"^ +\d+ +1 .* loss = F\.cross_entropy\(model\(x\), y\)$", text, re.MULTILINE)
    assert sizes(forward)[1] > 50
    assert re.search(r"^ +\d+ +3 .* return F\.relu", text, re.MULTILINE)


def test_the_network_learns_with_the_batch_that_was_found(notebook: Node) -> None:
    ((first, last),) = re.findall(r"from ([\d.]+) to ([\d.]+) in \d steps", outputs(notebook, "train"))
    assert float(last) < float(first)
    assert re.match(r"peak \d+ MiB", outputs(notebook, "record"))
