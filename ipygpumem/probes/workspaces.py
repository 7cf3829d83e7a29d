"""What torch takes from its allocator for cuBLAS, as seen with torch 2.11 on simulated cards of each capability."""

from __future__ import annotations

import os
import re

from ipygpumem.units import KIB, MIB

LARGE_BYTES, SMALL_BYTES = 32 * MIB, 8320 * KIB
"""On a Hopper, and on other cards."""
_HOPPER, _LIGHT = (9, 0), MIB


def sizes(capability: tuple[int, int] | None) -> tuple[int, int]:
    """Return what a workspace of cuBLAS and of cublasLt takes on a device of this capability; None: not known.

    The most is taken to be so where it is not known: an estimate that is too high by that is no false hope.
    """
    config = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    usual = LARGE_BYTES if capability in (None, _HOPPER) else SMALL_BYTES
    full = sum(int(size) * KIB * int(count) for size, count in config) if config else usual
    given = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    light = int(given) * KIB if given.isdigit() else _LIGHT
    unified = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    return full, 0 if unified == "1" else light if unified == "0" else min(full, light)
