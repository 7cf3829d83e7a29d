"""Runs functions of other modules inside a context manager, until it is undone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ipygpumem.introspect import text_of

Around = Callable[[tuple[Any, ...], dict[str, Any]], AbstractContextManager[None]]
"""Returns a context; gets the arguments of a call."""


def install(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Set a function in place of another one, and return a function that undoes this."""
    earlier = vars(owner).get(name)

    def undo() -> None:
        if vars(owner).get(name) is not function:  # other code has replaced it
            return
        if earlier is None:  # it was inherited
            delattr(owner, name)
        else:
            setattr(owner, name, earlier)

    setattr(owner, name, function)
    return undo


def replace(owner: Any, name: str, around: Around) -> Callable[[], None]:
    """Call a function inside ``around`` from now on, and return a function that undoes this."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        __tracebackhide__ = True  # IPython leaves this frame out of tracebacks
        with around(args, options):
            return function(*args, **options)

    if not isinstance(owner, type):
        call.__module__ = text_of(vars(owner).get("__name__"))  # pickle finds os.system by it
        call.__qualname__ = name
    return install(owner, name, call)
