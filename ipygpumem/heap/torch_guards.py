"""Refuses operations while torch traces or compiles the calling code."""

from __future__ import annotations

import sys

from ipygpumem.errors import GpuMemError
from ipygpumem.probes.accelerators import loaded_torch


def refuse_while_traced(what: str) -> None:
    """Raise if torch traces or compiles the calling code, which would record our reading of tensors."""
    tracing = getattr(getattr(loaded_torch(), "_C", None), "_get_tracing_state", None)
    compiling = getattr(sys.modules.get("torch._C._dynamo.eval_frame"), "get_eval_frame_callback", None)
    if any(state is not None and state() not in (None, False) for state in (tracing, compiling)):
        raise GpuMemError(f"torch is tracing this code (torch.jit.trace, torch.compile): {what} outside of it")
