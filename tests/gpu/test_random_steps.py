"""Estimates of random and of usual training steps, against torch's own allocator.

A failure shows the wrong figures and the code of the step. Paste it into a notebook, or run
``python -m tests.gpu.random_steps SEED --show``, or ``python -m tests.gpu.training_steps NAME``.
"""

import json

import pytest

from tests.alone import printed

FEW, ALL = 25, 200
"""Steps of `make gpu-sim` in one process, and in all."""
FROZEN_CELL = 5062
"""A step under autocast whose weights of an LSTM cell do not train."""
CELLS_UNDER_AUTOCAST = 5043
"""A step whose cells convert their arguments in an order that decides the places of blocks."""
LOSS_OF_PERMUTED = 188
"""A step with an MSE loss of a permuted output, whose gradient is contiguous on a card."""
SINGLE = (FROZEN_CELL, CELLS_UNDER_AUTOCAST, LOSS_OF_PERMUTED)
PARTS = [(0, FEW), *[(seed, seed + 1) for seed in SINGLE]]
PARTS += [
    pytest.param(first, first + FEW, marks=pytest.mark.thorough) for first in range(FEW, ALL, FEW)
]


@pytest.mark.simulated
@pytest.mark.parametrize(("first", "stop"), PARTS)
def test_random_steps_use_as_much_as_their_estimates_say(first: int, stop: int) -> None:
    """No step runs out of memory on a card for which the estimate says that it fits; peaks are
    right within 0.25 %, and reserved memory within 2 % or two segments.
    """
    *lines, last = printed("-m", "tests.gpu.random_steps", first, stop).splitlines()
    assert last == f"{stop - first} steps"
    wrong = dict(map(json.loads, lines))
    assert not wrong, "\n\n".join(f"# {title}\n{code}" for title, code in wrong.items())


@pytest.mark.simulated
def test_usual_steps_use_as_much_as_their_estimates_say() -> None:
    """The same of 21 steps as in public projects; an estimate that depends on values is not
    below the allocator's figure, and names the lines.
    """
    *lines, last = printed("-m", "tests.gpu.training_steps").splitlines()
    assert last == "21 steps"
    wrong = dict(map(json.loads, lines))
    assert not wrong, "\n\n".join(f"# {title}\n{code}" for title, code in wrong.items())
