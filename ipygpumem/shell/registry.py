"""Help texts of the magics, from which their lines are parsed and completed.

To add a command, add a row to a help text, a function of the same name in ``magics``, and, where
the help text does not define an argument fully, details in ``magics.parsing``. A command of an
optional feature has a line in EXTRAS.
"""

from __future__ import annotations

import importlib
from typing import Any

EXTRAS = {
    "--fit": "fit.fit_command",
    "--on": "cluster.on_engines",
    "gpumem guard": "guard.guard_command",
    "gpumem plot": "pictures.plot_command",
    "gpumem postmortem": "recorder.recorder_commands",
    "gpumem recorder": "recorder.recorder_commands",
    "gpumemit": "lines.gpumemit",
    "isolate": "isolate.isolate",
    "memlines": "lines.memlines",
    "peak": "peak.peak_command",
    "recorder": "recorder.recorder",
}
"""Module in ``extras`` of each optional command or option, and of the recorder."""


def loaded(place: str) -> Any:
    """Import and return a function or class by its path in the package; loading the extension must
    stay fast.
    """
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(f"ipygpumem.{module}"), name)


REWRITTEN = ("experiment", "memlines", "peak", "autofit")
"""Cell magics whose first line is turned into a call, so that the body is a plain cell; see
rewriting.py.
"""

MAGICS = {
    "%experiment": """Group several cells into an experiment.

::

    %experiment start NAME         open one: [--keep NAME...] [--drop-imports] [--seed N]
                                   [--report full|compact|none] [--note NAME=VALUE...] [--budget gpu=SIZE...]
                                   [--on ENGINES]
    %experiment end [NAME]         delete its names, restore overwritten ones, free the memory [--on ENGINES]
    %experiment keep NAME...       keep these names or globs, such as 'y*', at the end too
    %experiment status             show the open experiments and their memory so far
    %experiment list               show the finished experiments, one row each
    %experiment compare [NAME...]  compare finished experiments: names, globs, or A#2 for the second run of A

``%%experiment NAME`` as a cell's first line does all of this for one cell.
""",  # noqa: E501
    "%%experiment": """Run a cell like a function: at the end its new names are deleted and its memory is freed.

::

    %%experiment NAME [--keep NAME...] [--drop-imports] [--seed N] [--report full|compact|none]
                 [--note NAME=VALUE...] [--budget gpu=SIZE...] [--on ENGINES]
    --keep NAME...              names or globs to keep, separated by blanks or commas: --keep model 'loss*'
    --drop-imports              delete the names of imported modules too
    --seed N                    seed Python's, NumPy's and torch's random generators first
    --report full|compact|none  level of detail of the report
    --note NAME=VALUE...        parameters to store in the record: --note lr=1e-3 bs=64
    --budget gpu=SIZE...        limit torch's memory on a GPU: --budget gpu=8GiB
    --on ENGINES                run on engines of an ipyparallel cluster: all, 0-3, or a view's name
""",  # noqa: E501
    "%gpumem": """Show what uses memory, and free it.

::

    %gpumem on                 show a line after each cell
    %gpumem off                hide it; measuring continues
    %gpumem quiet              hide the lines of cells that moved less than 1 MiB: [on|off]
    %gpumem status             show settings, open experiments, and each device's memory [--on ENGINES]
    %gpumem preload            create the accelerator's context now, and show its cost
    %gpumem free               free memory now: printed output, tracebacks, garbage, caches [--on ENGINES]
    %gpumem leaks              list memory that was not freed, and what holds it [--min SIZE] [--on ENGINES]
    %gpumem why EXPRESSION     show what ``del`` of a name would free, and what else holds the rest
    %gpumem top [NAME...]      list the names that hold the most memory, of any kind [--device D] [--min SIZE] [-n 20]
    %gpumem tensors [NAME...]  list tensors and arrays by storage [--device D] [--min SIZE]
                               [--kind parameter|gradient|optimizer|buffer|other] [--by name|shape|kind|cell|device]
                               [--top N]
    %gpumem history            show one row per finished cell [-n 20] [--experiment NAME]
    %gpumem export FILE        write the session's records as .json or .csv [--force]
    %gpumem plot               draw a picture: [session|devices|experiments] [--device D] [-n N]
    %gpumem guard              raise MemoryError before the system kills the kernel: [on|off] [--limit SIZE] [--touched]
    %gpumem recorder           write a recording that outlives the kernel: on | off | status
    %gpumem postmortem [FILE]  show how the last recorded kernel died

``%gpumem`` alone shows a short status and the largest names. Options: ``%config IPyGpuMem``.
""",  # noqa: E501
    "%gpumemit": """Measure a statement: memory kept, peak and time.

::

    %gpumemit [-r RUNS] [-s 'SETUP'] STATEMENT
    -r RUNS     measured runs, after one warm-up run (5)
    -s 'SETUP'  code to run before each run, not measured

Names that the statement binds are local to it; its changes to your objects remain. ``%%gpumemit`` compares several.
""",  # noqa: E501
    "%%gpumemit": """Compare statements: memory kept, peak and time.

Each line of the cell is a statement; separate longer ones with lines ``---``.

::

    %%gpumemit [-r RUNS] [-s 'SETUP']
    -r RUNS     measured runs of each, after one warm-up run (5)
    -s 'SETUP'  code to run before each run, not measured

Names that a statement binds are local to it; its changes to your objects remain.
""",
    "%%isolate": """Run a cell in a child process: it may crash, run out of memory or leak, and the kernel goes on.

::

    %%isolate [--keep NAME...] [--memory SIZE] [--time SECONDS]
    --keep NAME...  names or globs that come back, separated by blanks or commas: --keep model 'loss*'
    --memory SIZE   raise MemoryError when the cell needs more than this in addition
    --time SECONDS  end the cell after this time

The cell sees all your names. Its new names and its changes end with it, except those to keep.
""",  # noqa: E501
    "%%memlines": """Measure each line of a cell, and of functions: memory kept, peak, runs and time.

::

    %%memlines [-f FUNCTION...] [--sort line|kept|peak|time|hits]
    -f FUNCTION...                   functions or methods to measure too: -f train Model.forward
    --sort line|kept|peak|time|hits  order of the lines: by number, or most expensive first
""",  # noqa: E501
    "%%peak": """Run a cell, and show what the memory held at its highest moment, by name, origin and purpose.

::

    %%peak [--top N] [--save FILE]
    --top N      number of rows to show (20)
    --save FILE  write torch's history of CUDA allocations, for pytorch.org/memory_viz

After an out-of-memory error it shows the moment of the failure.
""",  # noqa: E501
    "%%autofit": """Rerun a cell with smaller values until it fits in memory; the variable keeps the value that fits.

::

    %%autofit NAME=VALUE... [--min N...] [--step STEP] [--headroom 5%] [--max-tries 10]
    NAME=VALUE...   such as batch_size=1024; several are reduced in turn; NAME alone starts at its current value
    --min N...      smallest value, for all or each: --min batch_size=8 seq_len=128
    --step STEP     halve, a factor such as 0.9, or search: halve, then go up to the largest that fits
    --headroom 5%   share of the device's memory that must stay free at the peak
    --max-tries 10  maximum number of tries after the first

Followed by a line ``%%estimate``, it finds the largest value that fits from estimates alone, without the device.
``ipygpumem.autofit`` does the same for a function.
""",  # noqa: E501
    "%%estimate": """Estimate a cell's memory without running it on a device: its tensors are fake.

The cell runs at once, in the notebook's process, and its changes are undone. Build the model inside the cell:
16 GB of weights take no memory there.

::

    %%estimate [--device-memory SIZE] [--device D] [--timeout SECONDS] [--fit SIZE] [--batch NAME]
    --device-memory SIZE  check that it fits in this much, instead of the free memory
    --device D            assume all tensors on this device; you need not have it
    --timeout SECONDS     stop after this time and name the line (300)
    --fit SIZE            find changes with which it fits in this much, or on a device here: --fit cuda:0
    --batch NAME          the variable with the size of a batch, for --fit
""",  # noqa: E501
}
"""Help texts by magic, shown by ``?``."""
