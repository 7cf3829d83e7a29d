"""Runs functions of other modules inside a context manager, until it is undone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ipygpumem.introspect import text_of

Around = Callable[[tuple[Any, ...], dict[str, Any]], AbstractContextManager[None]]
"""Gets the positional and the named arguments of a call, and returns the context for it."""


def install(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Set ``owner.name`` to a function, and return a function that undoes this.

    Undoing restores nothing if other code has replaced the function since: its function, which may
    call ours, stays.

    Args:
        owner: a module, class or object.
        name: the attribute.
        function: the new function.
    """
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
    """Call ``owner.name`` inside the context of ``around`` from now on, and return a function that
    undoes this.
    """
    function = getattr(owner, name)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        __tracebackhide__ = True  # IPython leaves this frame out of tracebacks
        with around(args, options):
            return function(*args, **options)

    if not isinstance(owner, type):
        # pickle finds a function by these two: os.system, whose own module is "posix"
        call.__module__ = text_of(vars(owner).get("__name__"))
        call.__qualname__ = name
    return install(owner, name, call)
