"""The tutorials of examples/: each runs in a real kernel, and what its prose says of sizes is so."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from tests.tutorials import Tutorial

# Asked for, not imported: what this process holds makes each collection of garbage of the tests after these slower.
pytestmark = [pytest.mark.thorough, pytest.mark.skipif(not find_spec("torch"), reason="the tutorials need torch")]
NOISE = 12  # MiB; what the tutorials lose or keep are multiples of 32
"""MiB by which RSS may differ: what libraries load, and what the heap keeps."""


@pytest.fixture(scope="module")
def leak() -> Tutorial:
    return Tutorial("find_a_leak")


def test_a_validation_keeps_a_hidden_layer_and_a_training_nothing(leak: Tutorial) -> None:
    assert leak.trace("train") == pytest.approx(0, abs=NOISE)
    assert leak.trace("validate") == pytest.approx(32, abs=NOISE)
    text = leak.text("track")
    size = r"3\d(\.\d)?"
    assert re.search(rf"{leak.device} has grown by {size}( to {size})? MiB in each of the last 4 iterations", text)
    assert "to which no name of yours leads" in text


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


def test_the_parts_sum_to_the_total_in_every_table(gpu_memory: Tutorial) -> None:
    for cell in ("libraries-status", "tensors-status", "graph-status", "gaps-status", "others-status"):
        total, *parts = gpu_memory.parts(cell).values()
        assert len(parts) > 4
        assert sum(parts) == pytest.approx(total, abs=6 * len(parts))  # GiB are shown with two decimals


def test_what_a_graph_holds_is_in_no_list_of_tensors_and_has_its_part(gpu_memory: Tutorial) -> None:
    assert gpu_memory.kept("graph") == pytest.approx(128, abs=NOISE)
    assert "1 storage" in gpu_memory.text("graph-tensors")
    assert "128 MiB   weights +1   " in gpu_memory.text("graph-tensors")
    part = "this process, beside arrays" if gpu_memory.device == "RAM" else "held by C++ or autograd"
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


def test_the_gradients_of_the_body_are_named_and_given_back(lean: Tutorial) -> None:
    assert "held by notebook variable body.7.weight.grad" in lean.text("body")
    assert lean.kept("body-clean") == pytest.approx(-32, abs=NOISE)


def test_the_frozen_phase_has_by_far_the_lowest_peak(lean: Tutorial) -> None:
    peaks = {name: phase.usages[-1].peak_delta_bytes / 2**20 for name, phase in lean.experiments.items()}
    assert peaks["head"] < min(peaks["pretrain"], peaks["finetune"]) - 64


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
