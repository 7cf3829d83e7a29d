"""Runs functions of other modules inside a context manager, until it is undone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ipygpumem.introspect import text_of

Around = Callable[[tuple[Any, ...], dict[str, Any]], AbstractContextManager[None]]
"""Returns a context; gets the arguments of a call."""


def replace(owner: Any, name: str, around: Around) -> Callable[[], None]:
    """Call a function inside ``around`` from now on, and return a function that undoes this."""
    earlier, function = vars(owner).get(name), getattr(owner, name)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        __tracebackhide__ = True  # IPython leaves this frame out of tracebacks
        with around(args, options):
            return function(*args, **options)

    def undo() -> None:
        if vars(owner).get(name) is not call:  # other code has replaced it
            return
        if earlier is None:  # it was inherited
            delattr(owner, name)
        else:
            setattr(owner, name, earlier)

    if not isinstance(owner, type):
        call.__module__ = text_of(vars(owner).get("__name__"))  # pickle finds os.system by it
        call.__qualname__ = name
    setattr(owner, name, call)
    return undo
