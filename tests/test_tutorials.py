"""The tutorials and notebooks of examples/: each runs in a real kernel, and what its prose says of sizes is so."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from ipygpumem.model import CellRecord, ExperimentRecord, TraceRecord, Usage
from ipygpumem.units import MIB, parse_bytes
from tests.kernel import Kernel, Reply
from tests.notebooks import Node, read
from tests.test_demo import EXAMPLES, outputs

# Asked for, not imported: what this process holds makes each collection of garbage of the tests after these slower.
pytestmark = [pytest.mark.thorough, pytest.mark.skipif(not find_spec("torch"), reason="the tutorials need torch")]
NOISE = 15  # MiB; what the tutorials lose or keep are multiples of 32
"""MiB by which RSS may differ: what libraries load, and what the heap keeps."""


class Tutorial:
    """One tutorial, run from top to bottom; a cell fails if it is tagged so, and no other does.

    Figures are in MiB, and those of the device that the tutorial works on: the GPU if there is one, else RAM.
    """

    def __init__(self, name: str) -> None:
        self.replies: dict[str, Reply] = {}
        with Kernel() as kernel:
            for cell in read(EXAMPLES / f"{name}.ipynb").cells:
                if cell.cell_type == "code":
                    reply = self.replies[cell.id] = kernel.run(cell.source)
                    fails = "raises-exception" in cell.metadata.get("tags", ())
                    assert (reply.status == "error") is fails, (cell.source, reply.traceback)
            kernel.run("def plain(records):\n    return [record.to_dict() for record in records]", silent=True)
            cells, experiments, traces = (
                kernel.value(f"plain(ipygpumem.{kind}())") for kind in ("history", "experiments", "traces")
            )
        self._records = {record["execution_count"]: CellRecord.from_dict(record) for record in cells}
        self.experiments = {record["name"]: ExperimentRecord.from_dict(record) for record in experiments}
        self.traces = [TraceRecord.from_dict(record) for record in traces]

    def text(self, cell: str) -> str:
        return "\n".join(self.replies[cell].reports())

    def pictures(self, cell: str) -> int:
        return sum("image/png" in display["data"] for display in self.replies[cell].displays)

    def usages(self, cell: str) -> tuple[Usage, ...]:
        """Return what a cell cost on each device, RAM first."""
        return self._records[list(self.replies).index(cell) + 1].usages

    def kept(self, cell: str) -> float:
        return self.usages(cell)[-1].delta_bytes / MIB

    @property
    def device(self) -> str:
        """What reports call the device."""
        device = list(self._records.values())[-1].usages[-1].device
        return "RAM" if device == "cpu" else device

    def trace(self, label: str) -> float:
        """Return what the only trace of this label kept."""
        (found,) = [trace for trace in self.traces if trace.label == label]
        return found.usages[-1].delta_bytes / MIB

    def statements(self, cell: str) -> list[tuple[float, float]]:
        """Return what each statement of a ``%%gpumemit`` kept, and its peak."""
        rows = self.text(cell).partition("\n  noise:")[0].splitlines()
        parts = [row.partition(f"   {self.device} ")[2] for row in rows]
        return [(sizes[0], sizes[1]) for sizes in map(_signed, parts) if len(sizes) == 2]

    def lines(self, cell: str) -> list[tuple[float, float]]:
        """Return what each line of a ``%%memlines`` that ran kept, and its peak."""
        rows = re.findall(r"^ +\d+ +\d+ +[\d.]+ \ws? (.*)", self.text(cell), re.MULTILINE)
        return [(sizes[-2], sizes[-1]) for sizes in map(_signed, rows)]

    def parts(self, cell: str) -> dict[str, float]:
        """Return the parts of the device's memory in a ``%gpumem status``, with the total under an empty name."""
        _, name, *tables = re.split(r"^  (\S+): (?=[\d.]+ [KMG]iB, )", self.text(cell), flags=re.MULTILINE)
        table = dict(zip([name, *tables[1::2]], tables[::2], strict=True))[self.device]
        rows = re.findall(r"^ +([\d.]+ (?:[KMG]i)?B)   (\S.*?)   ", table, re.MULTILINE)
        total = table.partition(",")[0]
        return {name: parse_bytes(size) / MIB for size, name in [(total, ""), *rows]}


def _signed(text: str) -> list[float]:
    found = re.findall(r"([+-])(\d[\d.]*(?: (?:[KMG]i)?B)?)(?= |$)", text)
    return [float(f"{sign}{parse_bytes(size)}") / MIB for sign, size in found]


@pytest.fixture(scope="module")
def leak() -> Tutorial:
    return Tutorial("find_a_leak")


def test_a_validation_keeps_a_hidden_layer_and_a_training_nothing(leak: Tutorial) -> None:
    assert leak.trace("train") == pytest.approx(0, abs=NOISE)
    assert leak.trace("validate") == pytest.approx(32, abs=NOISE)
    text = leak.text("track")
    size = r"3\d(\.\d)?"
    assert re.search(rf"{leak.device} has grown by {size}( to {size})? MiB in each of the last 4 iterations", text)
    assert re.search(r"held by valid_losses\[\d\]: its autograd graph", text)


def test_the_hook_is_noticed_at_the_fourth_run_and_its_list_named(leak: Tutorial) -> None:
    runs = [f"hook-{run}" for run in range(1, 5)]
    assert [leak.kept(run) for run in runs] == pytest.approx([32] * 4, abs=NOISE)
    assert [run for run in runs if "this cell has grown" in leak.text(run)] == ["hook-4"]
    assert leak.text("hook-tensors").splitlines()[3].split() == ["128", "MiB", "4", "activations"]
    assert leak.kept("hook-mended") == pytest.approx(-128, abs=NOISE)
    assert leak.kept("hook-5") == pytest.approx(0, abs=NOISE)


def test_the_list_in_a_default_argument_is_named_by_the_experiment_and_later(leak: Tutorial) -> None:
    for cell in ("default-run", "default-leaks"):
        (line,) = [line for line in leak.text(cell).splitlines() if "default argument of function blur" in line]
        assert line.split()[:2] == ["32", "MiB"]
    assert leak.experiments["blurring"].deleted == ("result",)
    assert "1 leak " in leak.text("default-leaks")
    assert leak.kept("default-mended") == pytest.approx(-32, abs=NOISE)
    assert leak.experiments["blurring_again"].survivors == ()


def test_the_frame_of_an_error_holds_a_tensor_without_a_name_until_it_is_freed(leak: Tutorial) -> None:
    assert "stdd" in leak.replies["error"].message
    assert leak.kept("error") == pytest.approx(32, abs=NOISE)
    assert "1 storage" in leak.text("error-tensors")
    assert "   (no name)   " in leak.text("error-tensors")
    assert leak.kept("error-mended") == pytest.approx(-32, abs=NOISE + 4)


def test_nothing_is_left_of_an_epoch_and_of_a_day_but_the_best(leak: Tutorial) -> None:
    assert (leak.replies["check"].result or "").endswith("no change")
    day = leak.experiments["day"]
    assert (day.deleted, day.kept, day.survivors) == (("hidden", "doubled"), ("best",), ())
    assert leak.replies["day-after"].result == "(False, False, True)"
    assert leak.pictures("plot") == 1


@pytest.fixture(scope="module")
def copies() -> Tutorial:
    return Tutorial("in_place_and_copies")


def test_a_line_has_three_tensors_at_once_and_the_mended_lines_one(copies: Tutorial) -> None:
    assert copies.lines("chain")[0] == pytest.approx((64, 192), abs=NOISE)
    made, added, gone = copies.lines("chain-mend")
    assert made == pytest.approx((64, 64), abs=NOISE)
    assert added == pytest.approx((0, 0), abs=NOISE)
    assert gone == pytest.approx((-64, 0), abs=NOISE)


def test_without_gradients_little_is_kept_and_the_peak_is_low_and_detach_comes_too_late(copies: Tutorial) -> None:
    with_graph, without, detached = copies.statements("graph")
    assert with_graph[0] == pytest.approx(6 * 33, abs=NOISE)
    assert (without[0], detached[0]) == pytest.approx((1, 1), abs=2)
    assert without[1] < with_graph[1] / 2
    assert detached[1] == pytest.approx(with_graph[1], abs=NOISE)


def test_checkpointing_more_than_halves_the_peak_and_the_estimate_knows_where(copies: Tutorial) -> None:
    (_, plain), (_, checkpointed) = copies.statements("checkpoint-measured")
    assert checkpointed < plain / 2
    rows = [shares(copies.text(f"estimate-{way}")) for way in ("plain", "checkpointed")]
    assert rows[1]["activations"] < rows[0]["activations"] / 2
    assert rows[1]["temporaries"] == rows[0]["temporaries"]


def shares(estimate: str) -> dict[str, float]:
    rows = [line.split() for line in estimate.splitlines() if "%   " in line]
    return {row[3]: float(row[0]) for row in rows if row[1] == "MiB"}


@pytest.fixture(scope="module")
def gpu_memory() -> Tutorial:
    return Tutorial("gpu_memory")


def test_what_a_graph_holds_is_in_no_list_of_tensors_and_has_its_part(gpu_memory: Tutorial) -> None:
    assert gpu_memory.kept("graph") == pytest.approx(128, abs=NOISE)
    assert "1 storage" in gpu_memory.text("graph-tensors")
    assert "128 MiB   weights +1   " in gpu_memory.text("graph-tensors")
    part = "this process, except arrays" if gpu_memory.device == "RAM" else "held by C++ or autograd"
    rise = gpu_memory.parts("graph-status")[part] - gpu_memory.parts("tensors-status").get(part, 0)
    assert rise == pytest.approx(128, abs=NOISE + 5)
    assert gpu_memory.kept("graph-mended") == pytest.approx(-128, abs=NOISE)


def test_gaps_stay_until_somebody_asks_for_them(gpu_memory: Tutorial) -> None:
    assert gpu_memory.kept("gaps") == pytest.approx(128, abs=NOISE)
    if gpu_memory.device == "RAM":
        assert gpu_memory.kept("gaps-drop") == pytest.approx(0, abs=NOISE)
        assert gpu_memory.kept("gaps-free") == pytest.approx(-120, abs=NOISE)
    else:
        assert gpu_memory.parts("gaps-status")["fragmentation"] == pytest.approx(120, abs=NOISE)
        before, after = (gpu_memory.usages(cell)[-1].reserved_bytes or 0 for cell in ("gaps-free", "gaps-free-2"))
        assert (before - after) / 2**20 == pytest.approx(120, abs=12)


@pytest.fixture(scope="module")
def lean() -> Tutorial:
    return Tutorial("lean_training")


def test_the_estimate_takes_no_memory_and_foretells_what_fine_tuning_keeps(lean: Tutorial) -> None:
    assert lean.kept("unfreeze-estimate") == pytest.approx(0, abs=NOISE)
    (kept,) = re.findall(r"^ +\+([\d.]+) MiB +kept$", lean.text("unfreeze-estimate"), re.MULTILINE)
    assert float(kept) == pytest.approx(lean.experiments["finetune"].usages[-1].delta_bytes / 2**20, abs=NOISE)


def test_gradients_and_optimizer_state_are_three_times_the_weights_and_go_by_hand(lean: Tutorial) -> None:
    assert lean.experiments["finetune"].usages[-1].delta_bytes / 2**20 == pytest.approx(96, abs=NOISE)
    assert lean.kept("tidy") == pytest.approx(-96, abs=NOISE)
    assert "released optimizer" in lean.text("tidy")
    assert "left:" not in lean.text("export-gone")
    assert lean.kept("export-gone") == pytest.approx(-32, abs=NOISE)


@pytest.fixture(scope="module")
def cluster() -> Tutorial:
    if not find_spec("ipyparallel"):
        pytest.skip("the notebook needs ipyparallel")
    return Tutorial("cluster")


def test_each_engine_needs_as_much_as_its_width_says(cluster: Tutorial) -> None:
    experiment = cluster.experiments["widths"]
    peaks = [engine.record.usages[0].peak_delta_bytes / MIB for engine in experiment.engines if engine.record]
    # Weights and their product's left side grow by 24 MiB with each width; the product has 16.
    assert peaks == pytest.approx([16 + 24 * number for number in (1, 2, 3, 4)], abs=12)
    assert (experiment.deleted, experiment.kept) == (("width", "weights", "hidden"), ("error",))
    assert "whose" in cluster.text("widths")
    assert cluster.replies["record"].result is not None
    assert cluster.replies["record"].result.count("('error',)") == 4


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Node:
    """The notebook, run from top to bottom; every cell succeeded."""
    if not find_spec("sklearn"):
        pytest.skip("the images are scikit-learn's")
    folder = tmp_path_factory.mktemp("calibrate")
    command = [sys.executable, EXAMPLES / "run_demo.py", folder, "calibrate"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr
    assert (folder / "calibrate.html").exists()
    return read(folder / "calibrate.ipynb")


def sizes(text: str) -> list[float]:
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
