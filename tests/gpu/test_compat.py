"""Notebooks that were written for ipyexperiments, on a device."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ipygpumem.units import MIB, format_bytes
from tests.gpu.support import ROUNDING, Card, run_ok, script
from tests.kernel import Kernel

_FULL = "ipygpumem.compat.ipyexperiments"
_NOTEBOOK = (
    "from PEER import IPyExperimentsPytorch\nimport torch, time",
    "def mib(n): return torch.ones(n << 18, device='cuda')\nolder = mib(32)",
    "exp = IPyExperimentsPytorch(cl_compact=True)",
    "model = mib(256); kept = mib(64); spike = mib(512); time.sleep(0.5); del spike",
    "cell = tuple(exp.cl.data.gpu); same = older; exp.keep_var_names('cell', 'kept', 'final')",
    "final = exp.finish()",
)


def figures(package: str, cells: Sequence[str] = _NOTEBOOK) -> Any:
    """Run the notebook in a kernel of its own, and return what it has then."""
    with Kernel(env=dict(os.environ)) as kernel:
        for cell in cells:
            run_ok(kernel, cell.replace("PEER", package))
        return kernel.value(
            "sorted(set(globals()) & {'model', 'older', 'kept', 'same'}), cell, tuple(final.gpu), final._fields"
        )


def test_a_notebook_written_for_ipyexperiments(figure: Callable[[str], None]) -> None:
    """`IPyExperimentsPytorch` of `ipygpumem.compat.ipyexperiments` has exact figures: what a cell kept and its peak
    above that, what the experiment consumed and what came back; a name from before it stays."""
    names, cell, gpu, fields = figures(_FULL)
    assert names == ["kept", "older"]
    assert cell[:2] == (320 * MIB, 512 * MIB)
    assert gpu[:2] == (320 * MIB, 256 * MIB)
    assert fields == ("cpu", "gpu")
    figure(f"a cell kept {format_bytes(cell[0])} and needed {format_bytes(cell[1])} more")


@pytest.mark.skipif(importlib.util.find_spec("ipyexperiments") is None, reason="ipyexperiments is not installed")
def test_the_same_notebook_under_the_original(card: Card) -> None:
    """ipyexperiments 0.1.29 and ours give the same figures for a device, but for what the driver rounds; the original
    deletes an older name of an object that has a new one, ours does not."""
    names, cell, gpu, fields = figures("ipyexperiments")
    card.settle()
    ours = figures(_FULL)
    assert (names, ours[0]) == (["kept"], ["kept", "older"])
    assert fields == ours[3]
    for theirs, own in zip((*cell, gpu[0]), (*ours[1], ours[2][0]), strict=True):
        assert abs(theirs - own) <= ROUNDING
    # With the older tensor, which the original has deleted:
    assert abs(gpu[1] - ours[2][1] - 32 * MIB) <= ROUNDING
    assert abs(gpu[2] - ours[2][2] - 32 * MIB) <= ROUNDING


def test_memory_functions_of_ipyexperiments(card: Card) -> None:
    """`utils.mem` of `ipygpumem.compat.ipyexperiments` says what the driver says, and fills a device so that what was
    asked for stays free."""
    code = (
        f"import json, torch\nfrom {_FULL}.utils.mem import *\nfrom {_FULL}.utils import mem\n"
        "preload_pytorch(); before = gpu_mem_get_mbs(); held = gpu_mem_allocate_mbs(100)\n"
        "after = gpu_mem_get_used_mbs(); del held; emptied = gpu_mem_get_used_no_cache_mbs()\n"
        "filler = gpu_mem_leave_free_mbs(500); left = gpu_mem_get_free_mbs(); del filler\n"
        "impossible = gpu_mem_allocate_mbs(1 << 30)\n"
        "assert {mem.gpu_mem_get_mbs(number) for number in (-1, '0', 0.5)} == {(0, 0, 0)}\n"
        "assert gpu_mem_allocate_mbs(1.5).nbytes == 3 << 19\n"
        "print(json.dumps([before, after, emptied, left, impossible, mem.gpu_mem_get_mbs(99), mem.get_nvml_gpu_id(0),"
        " use_gpu]))"
    )
    (total, free, used), after, emptied, left, impossible, unknown, number, has_gpu = script(code)
    assert total == card.total_bytes // MIB
    assert abs(total - free - used) <= 1
    assert 100 <= after - used <= 102
    assert 0 <= used - emptied <= 2  # the segment of the tensor that made the context
    assert abs(left - 500) <= 2
    assert (impossible, unknown, number, has_gpu) == (None, [0, 0, 0], 0, True)


@pytest.mark.usefixtures("card")
def test_memory_functions_of_ipyexperiments_say_in_one_line_what_they_cannot_use() -> None:
    """The functions of `utils.mem` that take a device or a size name what they got instead, in one line."""
    calls = [
        *(
            f"{name}({given})"
            for name in ("preload_pytorch", "get_nvml_gpu_id")
            for given in ("99", "-1", "'0'", "0.5")
        ),
        *(f"gpu_mem_allocate_mbs({given})" for given in ("'1'", "-1", "None", "float('nan')", "float('inf')")),
        *(f"gpu_mem_leave_free_mbs({given})" for given in ("'1'", "-1", "None", "float('nan')")),
    ]
    code = (
        f"import json\nfrom {_FULL}.utils.mem import *\nfrom ipygpumem.errors import GpuMemError\nfound = []\n"
        f"for call in {calls!r}:\n    try: found.append(repr(eval(call)))\n"
        "    except GpuMemError as error: found.append(str(error))\n"
        "assert gpu_mem_allocate_mbs(1 << 80) is None\n"
        "print(json.dumps(found))"
    )
    found = script(code)
    for call, text in zip(calls, found, strict=True):
        wanted = "torch numbers its CUDA devices from 0 to " if "_mbs" not in call else "this takes a number of MiB"
        assert text.startswith(wanted), (call, text)
        assert "\n" not in text


def test_attributes_of_an_experiment_on_a_device() -> None:
    """An experiment's attributes give a GPU's figures, too: what was in use when it began, what a cell kept and needed
    more, what was consumed in all."""
    cells = [
        f"from {_FULL} import IPyExperimentsPytorch\nimport torch\nexp = IPyExperimentsPytorch()",
        "block = torch.ones(64 << 18, device='cuda'); spike = torch.ones(32 << 18, device='cuda'); del spike",
        "cl = exp.cl\nfound = cl.gpu_mem_used_delta, cl.gpu_mem_peaked_delta, cl.backend, exp.gpu_ram_used_start > 0",
        "exp.keep_var_names('found', 'cl')\nexp.finish()",
    ]
    with Kernel(env=dict(os.environ)) as kernel:
        for cell in cells:
            run_ok(kernel, cell)
        assert kernel.value("found") == (64 * MIB, 32 * MIB, "pytorch", True)
        assert kernel.value("exp.gpu_ram_cons") == 64 * MIB
