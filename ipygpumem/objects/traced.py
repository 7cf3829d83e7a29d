"""Refuses what cannot be done while torch records, compiles or transforms the code that asks for it."""

from __future__ import annotations

import sys
from typing import Any

from ipygpumem.errors import GpuMemError
from ipygpumem.probes.accelerators import in_use, loaded_torch


def refuse_while_traced(what: str) -> None:
    """Raise where torch records or compiles what runs: it would take our reading of tensors for the user's code."""
    tracing = getattr(getattr(loaded_torch(), "_C", None), "_get_tracing_state", None)
    if _is_on(tracing) or _is_on(_of("torch._C._dynamo.eval_frame", "get_eval_frame_callback")):
        raise GpuMemError(f"torch is tracing this code (torch.jit.trace, torch.compile): {what} outside of it")


def refuse_while_transformed(what: str) -> None:
    """Raise also where new tensors are none of memory's own, or a device cannot be waited for."""
    refuse_while_traced(what)
    level = getattr(getattr(getattr(loaded_torch(), "_C", None), "_functorch", None), "maybe_current_level", None)
    if level is not None and level() is not None:
        raise GpuMemError(f"torch.func transforms this code (grad, vmap and their like): {what} outside of it")
    if _is_on(_of("torch.fx.experimental.proxy_tensor", "get_proxy_mode")):
        raise GpuMemError(f"torch.fx is tracing this code: {what} outside of it")
    if _is_on(getattr(in_use("cuda"), "is_current_stream_capturing", None)):
        raise GpuMemError(f"a CUDA graph is being captured here: {what} outside of it")


def _of(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def _is_on(state: Any) -> bool:
    return state is not None and state() not in (None, False)
