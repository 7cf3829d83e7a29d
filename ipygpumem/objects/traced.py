"""Refuses what cannot be done while torch records or compiles the code that asks for it."""

from __future__ import annotations

import sys

from ipygpumem.errors import GpuMemError
from ipygpumem.probes.accelerators import loaded_torch


def refuse_while_traced(what: str) -> None:
    """Raise where torch records or compiles what runs: it would take our reading of tensors for the user's code."""
    tracing = getattr(getattr(loaded_torch(), "_C", None), "_get_tracing_state", None)
    compiling = getattr(sys.modules.get("torch._C._dynamo.eval_frame"), "get_eval_frame_callback", None)
    if any(state is not None and state() not in (None, False) for state in (tracing, compiling)):
        raise GpuMemError(f"torch is tracing this code (torch.jit.trace, torch.compile): {what} outside of it")
