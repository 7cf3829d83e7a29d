"""The tutorials and notebooks of examples/: each runs in a real kernel, and what its prose says of
sizes is so.
"""

import re
from importlib.util import find_spec

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.units import MIB
from tests.alone import EXAMPLES
from tests.notebooks import read

# Asked for, not imported: what this process holds makes each collection of garbage of the tests
# after these slower.
pytestmark = [
    *(pytest.mark.thorough, pytest.mark.timeout(900)),
    pytest.mark.skipif(not find_spec("torch"), reason="the tutorials need torch"),
]
NOISE_MIB = 15
"""MiB by which RSS may differ: what libraries load, and what the heap keeps."""
SIZE = r"\d(\.\d)? MiB"
CLAIMS: dict[str, dict[str, tuple[float | str, ...]]] = {
    "find_a_leak": {
        "track": (
            rf"grown by 3{SIZE[:-4]}.* MiB in each of the last 4 .* by valid_losses\[\d\]: its "
            rf"autograd graph",
        ),
        "halves": (
            rf"trace train · [^+]* \+(0|{SIZE}|[\d.]+ KiB), .*trace validate · [^+]* \+3{SIZE}",
        ),
        **{f"hook-{run}": (32,) for run in (1, 2, 3)},
        "hook-4": (32, "this cell has grown"),
        "hook-tensors": (r"128 MiB +4 +activations",),
        "hook-mended": (-128,),
        "hook-5": (0, r"^((?!has grown).)*$"),
        "default-run": (
            r"still alive.* 32 MiB +Tensor .*default argument of .*function blur.*"
            r"deleted: result\n",
        ),
        "default-leaks": (r"1 leak · 32 MiB\n.* 32 MiB +Tensor .*default argument of .*blur",),
        "default-mended": (-32,),
        "default-run-2": (r"^((?!still alive).)*$",),
        "error": (32, "stdd"),
        "error-tensors": (r"1 storage.*   \(no name\)   ",),
        "error-mended": (r"freed by: tracebacks \(RAM 32 MiB\)",),
        "check": ("no change",),
        "day": (r"deleted: hidden, doubled\n +kept: best\n((?!still alive).)*$",),
        "day-after": (r"\(False, False, True\)",),
    },
    "in_place_and_copies": {
        "chain": (rf"\+6{SIZE} +\+19{SIZE} +result = ",),
        "chain-mend": (rf"\+6{SIZE} +\+6{SIZE} +result = .* -6{SIZE} +\+\S+( KiB)? +del result",),
        "graph": (
            rf"\+(19|20){SIZE} +\+2\d{SIZE}.* \+{SIZE} +\+[5-9]{SIZE}.* \+{SIZE} +\+2\d{SIZE}",
        ),
        "checkpoint-measured": (rf" \+2[5-9]{SIZE}.* \+(9|1[0-2]){SIZE}",),
        "estimate-plain": (rf" 19{SIZE} +\d+% +activations\n +64 MiB +\d+% +temporaries",),
        "estimate-checkpointed": (rf" [34]{SIZE} +\d+% +activations\n +64 MiB +\d+% +temporaries",),
    },
    "gpu_memory": {
        "graph": (128,),
        "graph-mended": (-128,),
        "gaps": (128,),
        "gaps-drop": (0,),
        "gaps-free": (r"^freed: RAM 1[12]\d(\.\d)? MiB",),
        "graph-tensors": (r"1 storage.* 128 MiB   weights \+1   ",),
    },
    "lean_training": {
        "unfreeze-estimate": (0, rf"\+(8|9|10){SIZE} +still allocated"),
        "tidy": (-96, "released optimizer"),
        "export-gone": (-32, r"^((?!left:).)*$"),
        "end": (r"tensors and arrays · from [^\n]* RAM \+[\d.]+ KiB\n",),
    },
    # Weights and their product's left side grow by 24 MiB with each width; the product has 16.
    "cluster": {
        "widths": (
            rf"peak +4 +\+[34]{SIZE} +\+[5-7]{SIZE} +\+1[01]{SIZE}.*deleted: width, weights, "
            rf"hidden\n",
        ),
        "record": (r"(\('error',\).*){4}",),
    },
    "will_it_fit": {
        "question": (r"does not fit: needs 2\d\d\.\d+ GiB of 24",),
        "answer": (r" GiB, fits: needs 2[0-3]\.",),
    },
    "calibrate": {
        "estimate": (r"^estimate · RAM peak [67]\d\d",),  # what the first try took is near it
        "autofit": (r"\n +1024 +\S+ \wiB +out of memory\b.*\n +(512|256|128) +\S+ \wiB +fits\b",),
        "found": (r"\n(512|256|128)\n",),
        "train": (r"peak \+[1-5]\d\d(\.\d)? MiB",),  # of 550 allowed
    },
}
"""Statements of each tutorial about its cells: MiB that they keep, and the text in their reports,
results and errors.
"""


@pytest.mark.parametrize("name", CLAIMS)
def test_tutorials_run_and_their_statements_about_cells_are_true(name: str) -> None:
    if (
        needed := {"cluster": "ipyparallel", "calibrate": "sklearn", "will_it_fit": "peft"}.get(
            name
        )
    ) and not find_spec(needed):
        pytest.skip(f"the notebook needs {needed}")
    cells = [cell for cell in read(EXAMPLES / f"{name}.ipynb").cells if cell.cell_type == "code"]
    texts = {}
    with Kernel() as kernel:
        for cell in cells:
            reply = kernel.run(cell.source, timeout=280)
            fails = "raises-exception" in cell.metadata.get("tags", ())
            assert (reply.status == "error") is fails, (cell.source, reply.traceback)
            texts[cell.id] = "\n".join([*reply.reports(), reply.result or "", reply.message])
        kept = kernel.value(
            "{cell.execution_count: cell.usages[-1].delta_bytes for cell in ipygpumem.history()}"
        )

    # What is said of a cell is true: texts of its reports, or MiB that it kept.
    for number, cell in enumerate(cells, 1):
        for claim in CLAIMS[name].get(cell.id, ()):
            if isinstance(claim, str):
                assert re.search(claim, texts[cell.id], re.DOTALL), (cell.id, claim, texts[cell.id])
            else:
                assert kept[number] / MIB == pytest.approx(claim, abs=NOISE_MIB), cell.id
    assert CLAIMS[name].keys() <= texts.keys()
