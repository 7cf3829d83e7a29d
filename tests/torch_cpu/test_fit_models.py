"""%%estimate --fit for ten models: the lines that it writes run, and keep what they promise."""

from typing import Any

import pytest
import torch

from tests.fit_models import MODELS, cell, changes, pasted

pytestmark = pytest.mark.usefixtures("no_modules_of_users")


def gradients_of(code: str) -> list[Any]:
    """Return the gradients of the first step."""
    names: dict[str, Any] = {}
    exec(code.replace("range(2)", "range(1)"), names)
    return [parameter.grad for parameter in names["model"].parameters()]


@pytest.mark.parametrize("name", MODELS)
def test_lines_run_and_keep_the_gradients_that_they_promise(name: str) -> None:
    """If a line's results are equal under a condition, the model meets it."""
    whole = gradients_of(cell(name))
    promised = 0
    _, offered = changes(name)
    for change in offered:
        gradients = gradients_of(pasted(name, change))
        conditions = change.results.split("; ")
        if conditions[0].startswith("equal") and len(conditions) == 1:
            promised += 1
            for expected, gradient in zip(whole, gradients, strict=True):
                torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
    assert promised >= 1
