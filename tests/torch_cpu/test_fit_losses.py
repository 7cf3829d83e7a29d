"""%%estimate --fit and the loss: parts of a batch get the gradients of the whole if the advice is
followed, for means as well as for sums.
"""

import re
from typing import Any

import pytest
import torch

from benchmarks.harness.fit_search import search
from ipygpumem.extras.fit.changes import batch_in_parts

pytestmark = pytest.mark.usefixtures("no_modules_of_users")
MEAN = "equal if the loss is a mean over independent rows"
SUM = "equal if the loss is a sum over independent rows"
EITHER = "equal if the loss is a mean, or a sum, over independent rows"
NEITHER = "not equal: the loss adds a mean over the rows to a sum"
MODEL_AND_BATCH = """
import torch
from torch import nn
from torch.nn import functional
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))
x = torch.randn(8, 16)
"""
TRAINING_STEP = """
y = torch.arange(8) % 10
out = model(x)
loss = LOSS
loss.backward()
"""
LOSSES = {
    "functional.cross_entropy(out, y)": MEAN,
    "functional.cross_entropy(out, y, reduction='sum')": SUM,
    "nn.CrossEntropyLoss(reduction='sum')(out, y)": SUM,
    "nn.MSELoss(reduction='sum')(out, out.detach() * 2)": SUM,
    "nn.SmoothL1Loss()(out, out.detach() * 2)": MEAN,
    "functional.l1_loss(out, out.detach() * 2, reduction='sum')": SUM,
    "functional.binary_cross_entropy_with_logits(out, out.detach().sigmoid())": MEAN,
    "out.pow(2).sum()": SUM,
    "out.pow(2).sum(1).sum()": SUM,
    "out.pow(2).mean()": MEAN,
    "out.pow(2).sum(1).mean()": MEAN,
    "out.pow(2).mean(1).sum()": SUM,
    "out.pow(2).sum(0).mean()": SUM,
    "out.pow(2).mean(0).sum()": MEAN,
    "torch.logsumexp(out, 1).sum()": SUM,
    "sum(functional.cross_entropy(out, y, reduction='none'))": SUM,
    "0.5 * out.pow(2).sum() + functional.cross_entropy(out, y, reduction='sum') / 3": SUM,
    "-out.log_softmax(1).gather(1, y[:, None]).sum()": SUM,
    "-out.log_softmax(1)[torch.arange(len(out)), y].mean()": MEAN,
    "out.mean() + 0.01 * sum(weight.pow(2).sum() for weight in model.parameters())": MEAN,
    "torch.einsum('bi,bi->', out, out)": EITHER,
    "out.pow(2).sum() / len(out)": EITHER,
    "out.pow(2).sum() / torch.ones(8).sum()": EITHER,
    "out.pow(2).mean().sqrt()": EITHER,
    "functional.cross_entropy(out, y) + out.pow(2).sum()": NEITHER,
}


def first_part(cell: str, **options: Any) -> Any:
    return next(
        batch_in_parts(search(cell, "1GiB", run=False, **options).findings, options.get("batch"))
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_recognised_as_a_mean_or_a_sum(loss: str) -> None:
    assert first_part(MODEL_AND_BATCH + TRAINING_STEP.replace("LOSS", loss)).results == LOSSES[loss]


def gradients_of(step: str) -> list[Any]:
    names: dict[str, Any] = {}
    exec(MODEL_AND_BATCH + step, names)
    return [parameter.grad for parameter in names["model"].parameters()]


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if LOSSES[loss] in (MEAN, SUM)])
def test_parts_of_a_batch_get_the_gradients_of_the_whole(loss: str) -> None:
    """As the advice for the backward pass of each part says, unless weights alone are counted."""
    step = TRAINING_STEP.replace("LOSS", loss)
    advice = re.search(
        r"# ([^#]*backward\(\)) for each part", first_part(MODEL_AND_BATCH + step).line
    )
    assert advice is not None
    part = step.replace("(x)", "(x[rows])").replace("% 10", "% 10; y = y[rows]")
    part = part.replace("loss.backward()", advice[1])
    loop = "".join(f"\nrows = slice({4 * number}, {4 * number + 4}){part}" for number in (0, 1))
    for whole, added in zip(gradients_of(step), gradients_of(loop), strict=True):
        torch.testing.assert_close(added, whole)


def test_all_conditions_of_a_split_batch_are_said() -> None:
    cell = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.1))
model(torch.randn(8, 64)).sum().backward()
"""
    change = first_part(cell)
    assert change.results.split("; ") == [
        SUM,
        "other random numbers (dropout)",
        "other BatchNorm statistics",
    ]
    assert "# loss.backward() for each part, then one step()" in change.line


@pytest.mark.parametrize(
    ("loss", "advice"),
    [
        ("out.pow(2).sum()", "n = 4  # loss.backward() for each part, then one step()"),
        ("out.pow(2).mean()", "n = 4  # (loss / 2).backward() for each part, then one step()"),
    ],
)
def test_a_named_size_gets_the_same_advice(loss: str, advice: str) -> None:
    cell = MODEL_AND_BATCH.replace("x = torch.randn(8", "n = 8\nx = torch.randn(n")
    step = TRAINING_STEP.replace("LOSS", loss).replace("arange(8)", "arange(n)")
    assert first_part(cell + step, batch="n").line == advice


@pytest.mark.parametrize(("way", "results"), [("sum", SUM), ("mean", MEAN)])
def test_a_loss_inside_a_model_and_a_scaler_are_followed(way: str, results: str) -> None:
    cell = f"""{MODEL_AND_BATCH}
class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model
    def forward(self, x):
        return self.model(x).pow(2).{way}()
scaler = torch.amp.GradScaler("cuda")
scaler.scale(Whole()(x)).backward()
"""
    assert first_part(cell).results == results


def test_the_gradient_of_each_row_adds_up() -> None:
    step = TRAINING_STEP.replace("LOSS", "out.pow(2).mean(1)").replace(
        "backward()", "backward(torch.ones(8))"
    )
    assert first_part(MODEL_AND_BATCH + step).results == SUM


def test_two_backward_passes_of_different_kinds_are_told_apart() -> None:
    step = TRAINING_STEP.replace("LOSS", "out.mean()") + "model(x).sum().backward()\n"
    assert first_part(MODEL_AND_BATCH + step).results == EITHER


def test_a_sum_says_that_terms_of_the_weights_count_again() -> None:
    loss = "out.sum() + 0.01 * sum(weight.pow(2).sum() for weight in model.parameters())"
    assert first_part(MODEL_AND_BATCH + TRAINING_STEP.replace("LOSS", loss)).results.split(
        "; "
    ) == [
        SUM,
        "terms of the weights alone count once for each part",
    ]
