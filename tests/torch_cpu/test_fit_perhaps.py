"""%%estimate --fit of code that an estimate cannot follow exactly: a "perhaps" is an answer."""

import pytest

from benchmarks.harness.fit_search import search
from ipygpumem.extras.fit.fit_command import report_of_unchanged

pytestmark = pytest.mark.usefixtures("no_modules_of_users")
RECURRENT = """
import torch
from torch import nn
layer, head = nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 10)
model = nn.ModuleList([layer, head])
optimizer = torch.optim.SGD(model.parameters())
x = torch.randn(64, 256, 64)
head(layer(x)[0]).pow(2).mean().backward()
optimizer.step()
"""


def test_a_change_that_fits_perhaps_ends_the_search() -> None:
    fit = search(RECURRENT, "920MiB")
    base = fit.trial_with(fit.unchanged)
    assert base.estimate.verdict == "does not fit"
    assert fit.best is not None
    assert fit.best.fits
    assert fit.best.doubts == ("_cudnn_rnn",)
    assert max(change.passes for change in fit.best.changes) <= 4
    report = fit.report(base)
    text = str(report)
    assert "Nothing found" not in text
    assert f"cheapest that fits perhaps (_cudnn_rnn): {fit.best.title}" in text
    assert "perhaps (_cudnn_rnn)" in {cell for row in report.tables[0].rows for cell in row}


def test_code_that_fits_perhaps_needs_no_search() -> None:
    fit = search(RECURRENT, "4GiB", run=False)
    report = report_of_unchanged(fit.trial_with(fit.unchanged))
    assert report is not None
    assert "it fits perhaps without a change: it depends on _cudnn_rnn" in str(report)


def test_code_that_fits_for_certain_says_so() -> None:
    fit = search("import torch\ntorch.ones(9, device='cuda')", "4GiB", run=False)
    report = report_of_unchanged(fit.trial_with(fit.unchanged))
    assert report is not None
    assert "it fits without a change" in str(report)


def test_changes_are_tried_with_the_user_s_assumptions() -> None:
    code = "import torch\nx = torch.ones(2**20, device='cuda')\nkept = x[x > 0].exp()"
    peaks = []
    for assume in ([], ["3=0.25"]):
        fit = search(code, "4GiB", run=False, assume=assume)
        peaks.append(fit.trial_with(fit.unchanged).estimate.peak_bytes)
    at_most, assumed = peaks
    assert assumed < at_most
