"""Estimates of random training steps, against torch's own allocator.

A failure shows the wrong figures and the code of the step. Paste it into a notebook, or run
``python -m tests.gpu.random_steps SEED --show``.
"""

import json

import pytest

from tests.alone import printed

FEW, ALL = 25, 100
"""Steps of `make gpu-sim` in one process, and in all.

Of those from 100 to 200 and from 5000 to 5100 two are known to be wrong: the peak of 188 is 0.6 %
higher, that of 5043 is 1.3 % lower.
"""
FROZEN_CELL = 5062
"""A step under autocast whose weights of an LSTM cell do not train."""
PARTS = [(0, FEW), (FROZEN_CELL, FROZEN_CELL + 1)]
PARTS += [
    pytest.param(first, first + FEW, marks=pytest.mark.thorough) for first in range(FEW, ALL, FEW)
]


@pytest.mark.simulated
@pytest.mark.parametrize(("first", "stop"), PARTS)
def test_random_steps_take_what_their_estimates_say(first: int, stop: int) -> None:
    """No step runs out of memory on a card for which the estimate says that it fits; peaks are
    right within 0.25 %, and reserved memory within 2 % or two segments.
    """
    *lines, last = printed("-m", "tests.gpu.random_steps", first, stop).splitlines()
    assert last == f"{stop - first} steps"
    wrong = dict(map(json.loads, lines))
    assert not wrong, "\n\n".join(f"# {title}\n{code}" for title, code in wrong.items())
