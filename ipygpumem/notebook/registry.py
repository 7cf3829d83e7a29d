"""The magics as their help tells them: lines are parsed by it, and completed from it.

A new command is a row of a help here, a function in ``commands`` that is called as the row is, and, where the help does
not say it all, what ``commands.parsing`` knows of its arguments. A command of an optional feature has a line in EXTRAS.
"""

from __future__ import annotations

import importlib
from typing import Any

EXTRAS = {
    "--on": "cluster.on_engines",
    "gpumem plot": "pictures.plot_command",
    "gpumem postmortem": "recorder.recorder_commands",
    "gpumem purge": "moving.moving_commands",
    "gpumem record": "recorder.recorder_commands",
    "gpumem release": "moving.moving_commands",
    "gpumemit": "lines.gpumemit",
    "memlines": "lines.memlines",
    "recorder": "recorder.recorder",
}
"""Module in ``extras`` of each optional command or option, and of the recorder."""


def loaded(place: str) -> Any:
    """Return a function by its module in the package and its name, imported only now: loading must be fast."""
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(f"ipygpumem.{module}"), name)


REWRITTEN = ("experiment", "memlines", "autofit")
"""``%%name`` as a cell's first line becomes a call, so that the body is a plain cell: see rewriting.py."""

MAGICS = {
    "%experiment": """Open and close scopes over many cells.

::

    %experiment start NAME         open one: [--keep NAME...] [--drop-imports] [--seed N]
                                   [--report full|compact|none] [--note NAME=VALUE...] [--budget gpu=SIZE...]
                                   [--record FILE] [--on ENGINES]
    %experiment end [NAME]         delete its names, restore what they shadowed, give memory back [--on ENGINES]
    %experiment keep NAME...       names, or globs such as 'y*', that stay at the end
    %experiment status             what is open, and what it costs so far
    %experiment list               the finished ones, one row each
    %experiment compare [NAME...]  finished ones side by side: names, globs, or A#2 for the second run of A

``%%experiment NAME`` as a cell's first line does all of it for that one cell.
""",
    "%%experiment": """Run one cell as a scope, like a function: afterwards its names are gone and its memory is back.

::

    %%experiment NAME [--keep NAME...] [--drop-imports] [--seed N] [--report full|compact|none]
                 [--note NAME=VALUE...] [--budget gpu=SIZE...] [--record FILE] [--on ENGINES]
    --keep NAME...              names or globs that stay, with blanks or commas: --keep model 'loss*'
    --drop-imports              delete the names of imported modules too
    --seed N                    reset Python's, NumPy's and torch's random generators first
    --report full|compact|none  how much to show at the end
    --note NAME=VALUE...        parameters to remember with it: --note lr=1e-3 bs=64
    --budget gpu=SIZE...        let torch have no more of a GPU: --budget gpu=8GiB
    --record FILE               where CUDA memory was allocated, for torch's memory viewer (.pickle)
    --on ENGINES                on engines of an ipyparallel cluster: all, 0-3, or a view's name
""",
    "%gpumem": """Control ipygpumem.

::

    %gpumem on                 show the line after each cell
    %gpumem off                show it no more; measuring goes on
    %gpumem status             what is on, which experiments are open, each device's memory now [--on ENGINES]
    %gpumem preload            create the accelerator's context now, and say what it costs
    %gpumem free               give memory back now: stored tracebacks, garbage, caches [--on ENGINES]
    %gpumem release NAME...    empty an object and free what only it holds
    %gpumem purge NAME...      defragment: move a model, and its optimizer's state, off the device and back
    %gpumem leaks              what did not come back, and who holds it [--min SIZE] [--on ENGINES]
    %gpumem tensors [NAME...]  tensors and arrays by storage [--device D] [--min SIZE]
                               [--kind parameter|gradient|optimizer|buffer|other] [--by name|shape|kind|cell|device]
                               [--top N]
    %gpumem history            one row per finished cell [-n 20] [--experiment NAME]
    %gpumem export FILE        what has finished, as .json or .csv [--force]
    %gpumem plot               a picture: [session|devices|experiments] [--device D] [-n N] [--save FILE] [--force]
    %gpumem record             keep a recording that outlives the kernel: on | off | status
    %gpumem postmortem [FILE]  how the last kernel died that was recorded

Alone it shows a short status and the largest names. All options: ``%config IPyGpuMem``.
""",
    "%gpumemit": """Say what a statement costs: memory kept, its peak, and the time.

::

    %gpumemit [-r RUNS] [-s 'SETUP'] STATEMENT
    -r RUNS     measured runs of each, after one to warm up (5)
    -s 'SETUP'  code to run before each run, not measured

Names that a statement binds are its own; what it does to your objects stays done. ``%%gpumemit`` compares several.
""",
    "%%gpumemit": """Say what statements cost, side by side: memory kept, its peak, and the time.

Each line of the cell is a statement; longer ones stand between lines ``---``.

::

    %%gpumemit [-r RUNS] [-s 'SETUP']
    -r RUNS     measured runs of each, after one to warm up (5)
    -s 'SETUP'  code to run before each run, not measured

Names that a statement binds are its own; what it does to your objects stays done.
""",
    "%%memlines": """Say of each line of a cell, and of functions, what it kept, its peak, its runs and its time.

::

    %%memlines [-f FUNCTION...] [--sort line|kept|peak|time|hits]
    -f FUNCTION...                   a function or method to follow too: -f train Model.forward
    --sort line|kept|peak|time|hits  the lines that ran, those that cost most first
""",
    "%%autofit": """Run a cell again with a smaller value until it fits in memory; the variable then holds that value.

::

    %%autofit NAME=VALUE... [--min N...] [--step STEP] [--headroom 5%] [--max-tries 10]
    NAME=VALUE...   such as batch_size=1024; several are reduced in turn; NAME alone: from its value now
    --min N...      the smallest value, for all or each: --min batch_size=8 seq_len=128
    --step STEP     halve, a factor such as 0.9, or search: down by halves, then up to the largest that fits
    --headroom 5%   the share of the device's memory that must stay free at the peak
    --max-tries 10  the most tries after the first

Above ``%%estimate`` it finds by estimates alone the largest value that fits, for a card that need not be here. A
function is fitted by ``ipygpumem.autofit``.
""",
    "%%estimate": """Say what a cell would take, without running it on a device: its tensors are fake.

The cell runs at once, in the notebook's process, and what it changes is put back. Build the model inside the cell:
16 GB of weights take no memory there.

::

    %%estimate [--device-memory SIZE] [--device D] [--timeout SECONDS]
    --device-memory SIZE  does it fit in this much? Without: in what is free
    --device D            take all tensors to be on this device, which need not be here
    --timeout SECONDS     stop it then, and name the line; 300 without
""",
}
"""The helps, which ``?`` shows, by name."""
