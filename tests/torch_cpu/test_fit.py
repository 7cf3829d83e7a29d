"""%%estimate --fit: each change against the cell that a user writes by hand, and the blocks that
must not run twice.
"""

import random
import re
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.harness.fit_search import search
from ipygpumem.errors import EstimateError, how_to_install
from ipygpumem.estimating.records import DeviceEstimate, Estimate
from ipygpumem.extras.fit.applying import Change
from ipygpumem.extras.fit.changes import batch_in_parts, candidates, untried
from ipygpumem.extras.fit.fit_command import ChangeSearch, Trial
from ipygpumem.report.estimate import estimate_report
from ipygpumem.units import MIB, format_bytes
from tests.alone import estimates_of_code_alone
from tests.fit_cells import ADAM, BY_HAND, LOSS, NET, PLAIN, estimated

pytestmark = pytest.mark.usefixtures("no_modules_of_users")


@pytest.fixture(scope="module")
def first_look() -> ChangeSearch:
    """The search for ``PLAIN`` after its first estimate, for tests that change nothing of it."""
    with estimates_of_code_alone():
        return search(PLAIN, "950MiB", run=False)


@pytest.fixture(scope="module")
def whole_search() -> ChangeSearch:
    """The search for ``PLAIN``, for tests that change nothing of it."""
    with estimates_of_code_alone():
        return search(PLAIN, "950MiB")


def test_each_change_is_estimated_like_the_cell_written_by_hand(whole_search: ChangeSearch) -> None:
    fit = whole_search
    lines = {trial.title: trial.changes[0].line for trial in fit.trials}
    assert lines.keys() | {trial.title for trial in fit.useless} == BY_HAND.keys()
    assert fit.failed == []
    for trial in fit.trials:
        (device,) = estimated(BY_HAND[trial.title].replace("LINE", lines[trial.title])).devices
        assert trial.device.peak_bytes == pytest.approx(device.peak_bytes, rel=0.01), trial.title
        assert trial.device.required_bytes >= 0.99 * device.required_bytes, trial.title


def test_the_first_estimate_is_the_usual_one(first_look: ChangeSearch) -> None:
    (plain,) = estimated(PLAIN).devices
    (device,) = first_look.trial_with(first_look.unchanged).estimate.devices
    assert device.peak_bytes == plain.peak_bytes
    assert device.reserved_bytes == plain.reserved_bytes
    assert device.parts == plain.parts


def test_a_library_that_the_cell_imports_removes_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tabnanny", raising=False)
    assert search(f"import tabnanny\n{PLAIN}", "1GiB", run=False).findings.trains


IN_AN_OBJECT = NET.replace("import torch\n", "from torch.optim import AdamW\n", 1)
IN_AN_OBJECT += """
class Training:
    def __init__(self):
        self.net = Net()
        self.steps = {"first": AdamW([*self.net.parameters()][2:])}

    def run(self, x, y):
        functional.cross_entropy(input=self.net(x).flatten(0, 1), target=y).backward()
        self.steps["first"].step()

from torch import randn, zeros, long
block = group = part = parts = "the user's"
batch = {"x": randn(8, 16, 256), "y": zeros(128, dtype=long)}
training = Training()
training.run(**batch)
"""
WITH_LOSS = PLAIN.replace(LOSS, "model(x, y)").replace("zeros(4096", "zeros(8, 512")
WITH_LOSS = WITH_LOSS.replace(
    "x):\n        return self.head(self.blocks(x))", "x, y):\n        x = self.head(self.blocks(x))"
)
WITH_LOSS = WITH_LOSS.replace(
    "(x))\n\n", "(x))\n        return functional.cross_entropy(x.flatten(0, 1), y.flatten())\n\n"
)
IN_A_FUNCTION = IN_AN_OBJECT.replace(
    "training = Training()\n", "def start(**batch): Training().run(**batch)\n"
)
IN_A_FUNCTION = IN_A_FUNCTION.replace("training.run", "start")


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize(
    ("cell", "comments"),
    [
        (PLAIN, ""),
        (WITH_LOSS, ""),
        (IN_AN_OBJECT, ""),
        (IN_A_FUNCTION, "Net|AdamW"),
        (PLAIN.replace("l(x)", "l(x * 1)"), "split"),
    ],
)
def test_each_line_runs_and_takes_no_name(cell: str, comments: str) -> None:
    """Each suggested line can be pasted below the cell; it is a comment if no name leads to what it
    changes.
    """
    cell = cell.replace("8, 512", "8, 16").replace("4096", "128")
    findings = search(cell, "1GiB", run=False).findings
    lines = [change.line for change in (*candidates(findings), *batch_in_parts(findings, None))]
    # Else hardly any change is offered.
    assert len(lines) > 6
    taken: dict[str, Any] = {}
    exec(cell, taken)
    for line in lines:
        names = dict(taken)
        exec(line, names)
        new = {name for name in names if names[name] is not taken.get(name)} - {
            "__warningregistry__"
        }
        assert new <= {
            "optimizer",
            "torch",
            "functools",
            *{"block", "group", "part", "parts"} - {*taken},
        } | {*("block_", "group_", "parts_")}, line
        assert line.startswith("# ") is bool(comments and re.search(comments, line)), line


def test_checkpointed_blocks_get_the_same_gradients(first_look: ChangeSearch) -> None:
    offered = candidates(first_look.findings)
    (line,) = (change.line for change in offered if "checkpoint" in change.title)
    gradients = []
    for change in ("", line):
        names: dict[str, Any] = {}
        torch.manual_seed(0)
        exec(
            f"{NET}model, x = Net(), torch.randn(8, 256)\n{change}\nmodel(x).sum().backward()",
            names,
        )
        gradients.append([parameter.grad for parameter in names["model"].parameters()])
    assert all(map(torch.equal, *gradients))


def test_split_batches_and_plain_loops_are_equal_up_to_rounding() -> None:
    begin = NET.replace("nn.Dropout(0.1)", "nn.Identity()")
    begin += textwrap.dedent(
        """\
        torch.manual_seed(0)
        model = Net()
        x, y = torch.randn(64, 8, 256), torch.arange(512) % 10
        """
    )
    # With a small ``eps``, the first step of AdamW divides a tiny gradient by itself, which makes
    # much of its rounding, and that depends on the CPU.
    begin += "optimizer = torch.optim.AdamW(model.parameters(), foreach=True, eps=1e-3)\n"
    whole = "functional.cross_entropy(model(x).flatten(0, 1), y).backward()"
    findings = search(f"{begin}{whole}\noptimizer.step()", "1GiB", run=False).findings
    *_, split = batch_in_parts(findings, None)
    assert (split.results, split.passes) == (
        "equal if the loss is a mean over independent rows",
        64,
    )
    loop = split.line.replace("...", f"({whole.replace('.backward()', ' / 64)')}.backward()", 1)
    loop = loop.replace("(x)", "(parts[0])").replace(", y)", ", parts[1])")
    plain = next(candidates(findings))
    assert (plain.title, plain.results) == ("foreach=False", "equal up to rounding")
    trained_weights = []
    for step in (whole, loop, f"{plain.line}\n{whole}"):
        exec(f"{begin}{step}\noptimizer.step()", names := dict[str, Any]())
        trained_weights.append(
            [one for weight in names["model"].parameters() for one in (weight.grad, weight)]
        )
    for other in trained_weights[1:]:
        for first, second in zip(trained_weights[0], other, strict=True):
            torch.testing.assert_close(second, first, rtol=1e-3, atol=1e-5)


def test_another_optimizer_has_no_state_of_earlier_steps() -> None:
    begin = textwrap.dedent(
        """\
        import torch
        from torch import nn
        net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
        """
    )
    begin += "optimizer = torch.optim.AdamW(net.parameters(), foreach=False)\n"
    step = "net(torch.randn(8, 512)).mean().backward(); optimizer.step(); optimizer.zero_grad()"
    peaks = []
    for before in ("", step):
        names: dict[str, Any] = {}
        exec(begin + before, names)
        fit = search(f"import torch\n{step}\n{step}", "1GiB", run=False, names=names)
        (change,) = (one for one in candidates(fit.findings) if one.title == "torch.optim.SGD")
        peaks.append(fit.trial_with(change).device.peak_bytes)
    assert peaks[0] == peaks[1]


def test_results_changed_by_dropout_or_ties_are_not_called_equal() -> None:
    begin = "import torch\nfrom torch import nn\n"
    cell = begin + "nn.Sequential(nn.Linear(64, 64), LAYER)(torch.randn(8, 64)).mean().backward()"
    cells = [cell.replace("LAYER", layer) for layer in ("nn.ReLU()", "nn.Dropout(0.1)")]
    changes = [
        next(batch_in_parts(search(one, "1GiB", run=False).findings, None)).results for one in cells
    ]
    assert changes == [
        "equal if the loss is a mean over independent rows",
        "equal if the loss is a mean over independent rows; other random numbers (dropout)",
    ]
    tied = f"{begin}a, b = nn.Embedding(9, 9), nn.Linear(9, 9, bias=False)\nb.weight = a.weight\n"
    cell = f"{tied}nn.Sequential(a, b)(torch.zeros(4, dtype=torch.long)).sum().backward()"
    assert not any(
        "freeze" in change.title for change in candidates(search(cell, "1GiB", run=False).findings)
    )


def test_no_layer_is_left_unfrozen_that_no_optimizer_trains() -> None:
    cell = textwrap.dedent(
        """\
        import torch
        from torch import nn
        net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
        """
    )
    cell += (
        "optimizer = torch.optim.Adam(net[PART].parameters())\nnet(torch.randn(8, "
        "64)).mean().backward()\n"
    )
    findings = [
        search(f"{cell.replace('PART', part)}optimizer.step()", "1GiB", run=False).findings
        for part in ("0", "1:")
    ]
    assert [any("freeze" in change.title for change in candidates(one)) for one in findings] == [
        False,
        True,
    ]


@pytest.mark.parametrize("enough", [2, 64, 1 << 10, 1 << 20])
def test_few_sizes_of_a_batch_are_estimated(enough: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest part of 1,024 rows that fits takes four estimates, not ten."""
    asked: list[int] = []

    def trial_with(_: ChangeSearch, *changes: Any) -> Any:
        asked.append(changes[0].passes)
        device = SimpleNamespace(required_bytes=2 + (asked[-1] < enough))
        return SimpleNamespace(fits=asked[-1] >= enough, device=device, passes=asked[-1], title="")

    monkeypatch.setattr(ChangeSearch, "trial_with", trial_with)
    fit = search("", "1GiB", run=False)
    fit.findings.batch.rows = 1 << 10
    base: Any = SimpleNamespace(device=SimpleNamespace(required_bytes=4))
    del asked[:]
    fit._note_first_fitting(base, list(batch_in_parts(fit.findings, None)))
    assert [trial.passes for trial in fit.trials] == [min(enough, 1 << 10)]  # type: ignore[attr-defined]
    # Few estimates: not one for each size.
    assert len(asked) <= 4


def test_changes_are_combined_if_none_suffices() -> None:
    """Needless changes are left out, and the batch is no smaller than it must be."""
    fit = search(PLAIN, "885MiB")
    assert [trial.title for trial in fit.trials if trial.fits] == []
    assert fit.best is not None
    assert (fit.best.title, fit.best.fits) == (
        "batch 4 instead of 8 + freeze all but the last layer",
        True,
    )
    report = fit.report(fit.trial_with(fit.unchanged))
    assert report.tables[0].rows[-1][:1] == (fit.best.title,)
    assert report.listings[-1].lines == [change.line for change in fit.best.changes]


def test_combinations_include_each_change_that_saves_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A change may help a little, or only below another; one that makes it worse, or fails, is left
    out.
    """
    needs = {
        "plain loop": 100,
        "checkpoint": 80,
        "autocast": 101,
        "Adafactor": 99,
        "SGD": 99.5,
        "freeze": 0,
    }
    changes = [
        Change(title, "", "", print, "optimizer" * (title in ("Adafactor", "SGD")))
        for title in needs
    ]

    def trial_with(_: ChangeSearch, *changes: Any) -> Any:
        titles = [change.title for change in changes]
        if len(titles) > 1 and "freeze" in titles:
            raise RuntimeError(titles)
        need = 100 + sum(needs[title] - 100 for title in titles if title and title != "freeze")
        need -= ("plain loop" in titles and "checkpoint" in titles) + ("freeze" in titles) * 3
        figures = DeviceEstimate("cuda:0", 0, 0, 0, 0, round(need * 10), room_bytes=10)
        return Trial(changes, Estimate((figures,), 0.0), 0)

    # The search finds the two changes that help, and one that helps only below another.
    monkeypatch.setattr(ChangeSearch, "trial_with", trial_with)
    monkeypatch.setattr("ipygpumem.extras.fit.fit_command.candidates", lambda _: changes)
    fit = search("", "1GiB")
    assert [trial.title for trial in fit.useless] == ["plain loop", "autocast"]
    assert fit.best is not None
    assert fit.best.title == "checkpoint + Adafactor + plain loop"


RNG = np.random.default_rng(0)
DICE = torch.Generator()


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.calls = nn.Linear(64, 64), nn.BatchNorm1d(64, affine=False), 0
        self.seen: list[Any] = []


class Dropping(Base):
    def forward(self, x: Any) -> Any:
        return nn.functional.dropout(self.linear(x), 0.5)


class Normalizing(Base):
    def forward(self, x: Any) -> Any:
        return self.norm(self.linear(x))


class Counting(Base):
    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.linear(x)


class Collecting(Base):
    def forward(self, x: Any) -> Any:
        self.seen.append(1)
        return self.linear(x)


class Diced(Base):
    def forward(self, x: Any) -> Any:
        return self.linear(x) * (random.random() < 0.5)


class NumPys(Base):
    def forward(self, x: Any) -> Any:
        return self.linear(x) * RNG.random()


class Generated(Base):
    def forward(self, x: Any) -> Any:
        return self.linear(x) + torch.rand(64, generator=DICE)


class InPlace(Base):
    def forward(self, x: Any) -> Any:
        return self.linear(x.mul_(2))


class Caching(Base):
    def forward(self, x: Any, cache: Any = ()) -> Any:
        cache.append(1)
        return self.linear(x)


UNSAFE = {
    Dropping: "",
    Normalizing: "they update running statistics",
    Counting: "they change attributes",
    Collecting: "they change attributes",
    Diced: "their code names random",
    NumPys: "their code names RNG",
    Generated: "their code names DICE",
    InPlace: "they change attributes, buffers or inputs",
    Caching: "they get objects",
}
BLOCKS = """
import torch
from collections import UserList
from torch import nn
model = nn.ModuleList(Kind() for _ in range(3))
class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = model
    def forward(self, x):
        for block in self.blocks:
            x = block(x, UserList()) if Kind.__name__ == "Caching" else block(x)
        return x
Whole()(torch.randn(8, 64) * 1).sum().backward()
"""


@pytest.mark.parametrize("kind", UNSAFE)
def test_blocks_are_checkpointed_only_if_a_second_run_is_equal(kind: Any) -> None:
    fit = search(BLOCKS, "8MiB", names={"Kind": kind}, run=False, device=None)
    (blocks,) = fit.findings.blocks.values()
    assert (blocks.name, bool(blocks.reason)) == (kind.__name__, bool(UNSAFE[kind]))
    assert UNSAFE[kind] in blocks.reason


def test_a_named_batch_is_reduced_in_each_place_that_sets_it() -> None:
    cell = (
        PLAIN.replace("x, y =", "n = 8\nx, y =")
        .replace("8, 512", "n, 512")
        .replace("4096", "n * 512")
    )
    fit = search(cell, "950MiB", batch="n")
    (trial,) = (trial for trial in fit.trials if trial.changes[0].excludes == "batch")
    (device,) = estimated(cell.replace("n = 8", "n = 4")).devices
    assert trial.changes[0].line.startswith("n = 4  # (loss / 2)")
    assert device.peak_bytes <= trial.device.peak_bytes <= device.peak_bytes + 8 * MIB  # gradients


def test_a_named_batch_may_be_a_tensor() -> None:
    fit = search(PLAIN, "950MiB", batch="x", run=False)
    base = fit.trial_with(fit.unchanged)
    change = next(batch_in_parts(fit.findings, "x"))
    (device,) = estimated(BY_HAND["batch 4 instead of 8"]).devices
    assert change.title == "x 4 instead of 8"
    assert fit.trial_with(change).device.peak_bytes == pytest.approx(device.peak_bytes, rel=0.01)
    assert fit.trial_with(change).device.peak_bytes < base.device.peak_bytes
    loader = "from torch.utils.data import DataLoader\nx = DataLoader(range(8))"
    for wrong in ("x = 0.5", "x = 0", "x = torch.ones(())", loader):
        with pytest.raises(
            EstimateError, match=r"^--batch x: it must be a whole number .* leave --batch out\)$"
        ):
            search(f"import torch\n{wrong}", "900MiB", batch="x", run=False)


def test_a_search_without_a_fit_names_the_changes_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = (
        "import torch\nnet = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4)))"
    )
    step = "net(torch.randn(8, 2048)).mean().backward(); optimizer.step(); optimizer.zero_grad()"
    fit = search(f"{begin}\noptimizer = {ADAM.replace('model', 'net')}\n{step}\n{step}", "790MiB")
    report = fit.report(fit.trial_with(fit.unchanged))
    assert (fit.best is not None and fit.best.fits, len(report.lines)) == (False, 1)
    assert "Nothing found for 790 MiB" in report.lines[0]
    assert "all of them together need" in report.lines[0]
    assert [listing.title for listing in report.listings if listing.lines] == ["not estimated"]
    monkeypatch.setitem(sys.modules, "peft", None)
    fit.findings.model.transformers_path = ""  # as of a transformers model
    (others,) = (
        listing.lines
        for listing in fit.report(fit.trial_with(fit.unchanged)).listings
        if listing.title == "not estimated"
    )
    state = 2 * 4 * 2048 * 2049 * 4  # Adam keeps two numbers for each parameter
    assert others == [
        f"LoRA ({how_to_install('peft')}): up to 192.1 MiB less",
        f"bfloat16 weights (net.to(torch.bfloat16)): up to {format_bytes(state)} less",
        "an 8-bit optimizer, such as bitsandbytes.optim.AdamW8bit: up to 96 MiB less",
        "an optimizer whose state is in RAM, such as DeepSpeed's: up to 128.1 MiB less",
    ]


def test_code_is_written_only_for_changes_that_fit(whole_search: ChangeSearch) -> None:
    fit = whole_search
    report = fit.report(fit.trial_with(fit.unchanged))
    (listing,) = (listing for listing in report.listings if listing.title == "write")
    written = {line.removeprefix("# ") for line in listing.lines}
    fitting = {trial.title for trial in fit.trials if trial.fits}
    assert 0 < len(fitting) < len(fit.trials)
    assert written & {trial.title for trial in fit.trials} == fitting


@pytest.mark.parametrize(
    ("size", "room", "unit"),
    [("950MiB", "950 MiB", " MiB"), ("1GB", "1 GB", " GB"), ("0.9 g", "0.9 GiB", " GiB")],
)
def test_sizes_have_the_unit_that_was_typed(size: str, room: str, unit: str) -> None:
    fit = search(PLAIN, size, run=False)
    base = fit.trial_with(fit.unchanged)
    assert estimate_report(base.estimate, size).headline.count(unit) >= 2
    fit.trials.append(base)
    report = fit.report(base)
    assert f"cuda:0 {room}" in report.headline
    assert f"Nothing found for {room}" in report.lines[0]
    (row,) = report.tables[0].rows
    assert sum(cell.endswith(unit) for cell in row) == 2


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adafactor", "LBFGS"])
def test_only_optimizers_that_exist_in_8_bits_are_named(
    name: str, first_look: ChangeSearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only if they have a state at the peak."""
    findings = first_look.findings
    monkeypatch.setattr(findings, "optimizers", {"optimizer": name})
    saved = dict(untried(findings, {"optimizer state": 4 * MIB, "parameters": 4 * MIB}))
    title = f"an 8-bit optimizer, such as bitsandbytes.optim.{name}8bit"
    assert saved.get(title) == (3 * MIB if name in ("SGD", "AdamW") else None)
    assert not any("8-bit" in title for title, _ in untried(findings, {"parameters": MIB}))


def test_a_saving_below_a_thousandth_of_the_peak_is_not_named(first_look: ChangeSearch) -> None:
    saved = dict(untried(first_look.findings, {"activations": 4096, "other": 4 * MIB}))
    assert saved == {}


def test_activations_may_be_kept_in_ram(first_look: ChangeSearch) -> None:
    saved = dict(untried(first_look.findings, {"activations": 4 * MIB}))
    assert saved["activations in RAM: with torch.autograd.graph.save_on_cpu(): ..."] == 4 * MIB
