"""Lets go of what an error's frames hold, before IPython keeps the error: under the names of ipyexperiments."""

from __future__ import annotations

import contextlib

from ipygpumem.api.decorating import F, run_inside
from ipygpumem.api.shell import current_shell
from ipygpumem.api.tracebacks import Clearing
from ipygpumem.errors import GpuMemError
from ipygpumem.introspect import type_name

__all__ = ["IS_IN_IPYTHON", "ipython_tb_clear_frames", "ipython_tb_clear_frames_ctx", "is_in_ipython"]
"""With an asterisk no more comes: ``F`` is ``torch.nn.functional`` in most notebooks."""


def is_in_ipython() -> bool:
    """Whether the code runs in IPython, notebooks included."""
    return current_shell() is not None


IS_IN_IPYTHON = is_in_ipython()


def ipython_tb_clear_frames(func: F) -> F:
    """Let an error leave ``func`` without the locals of its frames; outside of IPython nothing changes.

    It is the same error, with its type, its arguments and the lines of its traceback.

    Raises:
        GpuMemError: ``func`` is nothing that can be called.
    """
    if not callable(func) and not isinstance(func, staticmethod | classmethod):
        raise GpuMemError(f"ipython_tb_clear_frames stands above a function, and not above {type_name(func)}")
    return run_inside(func, lambda: Clearing() if is_in_ipython() else contextlib.nullcontext())


class ipython_tb_clear_frames_ctx(Clearing):  # noqa: N801  # the original's name
    """Lets an error leave a ``with`` block without the locals of the functions that it came through."""
