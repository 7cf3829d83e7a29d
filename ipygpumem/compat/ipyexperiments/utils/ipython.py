"""Lets go of what an error's frames hold, before IPython keeps the error: under the names of ipyexperiments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from ipygpumem.api.shell import current_shell
from ipygpumem.freeing import tracebacks

P = ParamSpec("P")
R = TypeVar("R")


def is_in_ipython() -> bool:
    """Whether the code runs in IPython, notebooks included."""
    return current_shell() is not None


IS_IN_IPYTHON = is_in_ipython()


def ipython_tb_clear_frames(func: Callable[P, R]) -> Callable[P, R]:
    """Let an error leave ``func`` without the locals of its frames; outside of IPython nothing changes.

    It is the same error, with its type, its arguments and the lines of its traceback.
    """

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return func(*args, **kwargs)
        except BaseException as error:
            if is_in_ipython():
                tracebacks.release(error)
            raise

    return wrapper


class ipython_tb_clear_frames_ctx:  # noqa: N801  # the original's name
    """Lets an error leave a ``with`` block without the locals of the functions that it came through."""

    def __enter__(self) -> ipython_tb_clear_frames_ctx:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            tracebacks.release(error)
