"""Compares the estimates of usual training steps with torch's real allocator on a card.

Run by test_random_steps in a process of its own:

    python -m tests.gpu.training_steps        # prints a line of JSON for each step that is wrong
    python -m tests.gpu.training_steps MAML   # the figures of the steps with this in their names
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from tests.gpu.step_figures import compared, prepare

AT_MOST = {
    "sparse embeddings": "the number of different indices",
    "packed sequences of unknown lengths": "the lengths of the sequences",
    "LBFGS": "the number of its iterations, whose history it keeps",
}
"""Steps whose memory depends on values, and on which. A simulated card computes none: all indices
are zero there, and LBFGS ends early, without a history.
"""


def steps() -> dict[str, str]:
    """Return the code of each step by its name."""
    text = Path(__file__).with_name("training_cells.py").read_text("utf-8")
    imports, *cells = re.split(r"^# %% (?=.)", text, flags=re.MULTILINE)
    steps_by_name = {}
    for cell in cells:
        name, _, code = cell.partition("\n")
        steps_by_name[name] = imports + code
    return steps_by_name


def main() -> None:
    """Compare the steps; those with a word in their names if there is one."""
    word = "".join(sys.argv[1:])
    prepare()
    chosen = {name: code for name, code in steps().items() if word in name}
    for name, code in chosen.items():
        figures = compared(name, code, is_bound=name in AT_MOST)
        if word:
            print(figures)
        elif figures.mistakes:
            print(json.dumps([figures.title, code]), flush=True)
    print(f"{len(chosen)} steps", flush=True)
    # On simulated cards, torch 2.11 aborts every other process that ends after vmap, with or
    # without an estimate.
    os._exit(0)


if __name__ == "__main__":
    main()
