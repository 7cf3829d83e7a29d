"""Isolates our own failures from user code: the code runs all the same, and one line says what was
not done.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from ipygpumem.errors import GpuMemError, describe_error
from ipygpumem.interrupts import is_from_signal, stop_listening

if TYPE_CHECKING:
    from ipygpumem.records import MimeBundle, Record  # a sixth of the time of loading

_told: set[tuple[str, str]] = set()
"""Kinds of failures that have been told since the extension was loaded: the component and the type
of its error. The whole process has one set, because ``with`` blocks also run without a shell.
"""


def forget_told() -> None:
    """Tell all failures again, because the extension is being loaded."""
    _told.clear()


def tell_failure(component: str, error: Exception, lost: str = "", *, asked: bool = False) -> None:
    """Tell the user on stderr that one of our components has failed: once for each type of error.

    The texts of errors may differ in a number or an address, and one failure may come from several
    places.

    Args:
        component: its name.
        error: its error.
        lost: the work that was not done because of it, as in "this cell's memory was not measured".
        asked: the user asked for just this work, so that a repeated failure is told again, without
            its reason.
    """
    kind = component, type(error).__name__
    if kind in _told and not asked:
        return
    reason = " again" if kind in _told else f" ({_text_of(error)})"
    _told.add(kind)
    write_failure(f"{component} failed{reason}", lost)


def write_failure(failure: str, lost: str = "") -> None:
    """Write the line about a failure: "ipygpumem: %%peak failed again. Your code is not affected".

    Args:
        failure: the words about it, ``%%peak failed again``.
        lost: the work that was not done because of it.
    """
    but = f", but {lost}" if lost else ""
    write_line(f"{failure}. Your code is not affected{but}.")


def write_line(text: str) -> None:
    """Write one line of ours to stderr, which the user may have replaced."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"ipygpumem: {text}\n")


def _text_of(error: Exception) -> str:
    """Return an error's type and message; the type alone if reading the message fails, too."""
    try:
        return describe_error(error)
    except Exception:  # of a user's class, whose ``__str__`` raises
        return type(error).__name__


def is_own_failure(error: BaseException) -> TypeGuard[Exception]:
    """Return True for our own failure, not for a user's mistake or a signal's exception."""
    return (
        isinstance(error, Exception)
        and not isinstance(error, GpuMemError)
        and not is_from_signal(error)
    )


@dataclass
class failures_told:  # noqa: N801  # reads as part of the "with" statement
    """A ``with`` block around our work: our own failure ends the block and is told, and the code
    after it runs as the fallback. A user's mistake and a signal's exception are raised.

    For the work of a function that a user calls. Hooks have ``ErrorIsolation``, and the ``with``
    blocks of users ``GuardedBlock``. The fields are the arguments of ``tell_failure``.

    ::

        with failures_told("a budget", "it limits nothing", asked=True):
            return Budget(sizes)
        return Budget({})
    """

    # A dataclass: a generated constructor, so that no line of ours runs before the block begins.
    component: str
    lost: str = ""
    asked: bool = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if error is None or not is_own_failure(error):
            return False
        tell_failure(self.component, error, self.lost, asked=self.asked)
        return True


class GuardedBlock:
    """Base class of the ``with`` blocks that users write: if our work at an end fails, the user's
    code still runs.

    The ``try`` statements are in the methods that Python itself calls, so that no call of ours is
    outside them. The hooks that subclasses override are private, because users see the methods of
    their blocks.
    """

    _block_name = "a block"
    """The component in the line about a failure, such as ``an experiment``."""
    _lost_at_start = ""
    """The work that is not done if the start fails."""
    _lost_at_end = ""
    """The work that is not done if the end fails."""
    _is_told_again = False
    """True if each failed start is told, because the user must know of it: without a scope, for
    instance, names are not deleted.
    """

    def _record_to_show(self) -> Record | None:
        """Return the record whose report shows the block; None before there is one."""
        return None

    def __repr__(self) -> str:
        name = self._block_name.removeprefix("an ").removeprefix("a ")
        state = "not finished" if self._record_to_show() is None else "finished"
        return f"<{name}: {state}>"

    def __str__(self) -> str:
        record = self._record_to_show()
        if record is None:
            return repr(self)
        return str(record)

    def _repr_mimebundle_(self, **_: object) -> MimeBundle:
        from ipygpumem.records import mimebundle  # there is a block, so it was imported

        record = self._record_to_show()
        shown = {} if record is None else mimebundle(record)[0]
        return shown or {"text/plain": str(self)}, {}

    def _open_block(self) -> Any:
        """Do our work at the start of the block; return the object that ``as`` binds."""
        return self

    def _close_block(self, error: BaseException | None) -> None:
        """Do our work at the end of the block, which ``error`` leaves, if any."""

    def __enter__(self) -> Any:
        try:
            return self._open_block()
        except BaseException as error:
            if is_from_signal(error):
                stop_listening()
            if not is_own_failure(error):
                raise
            tell_failure(
                f"the start of {self._block_name}",
                error,
                self._lost_at_start,
                asked=self._is_told_again,
            )
            return self._after_failed_start()

    def _after_failed_start(self) -> Any:
        """Return the object that ``as`` binds after a failed start."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        try:
            self._close_block(error)
        except BaseException as problem:
            if is_from_signal(problem):
                stop_listening()
                self._after_failed_end()  # the block is over all the same
            if not is_own_failure(problem):
                raise
            tell_failure(f"the end of {self._block_name}", problem, self._lost_at_end)
            self._after_failed_end()

    def _after_failed_end(self) -> None:
        """Undo what is still in force after a failed end."""


@dataclass
class CallBlock(GuardedBlock):
    """A block around one call of a decorated function: if it cannot be created, the function still
    runs.
    """

    create: Callable[[], AbstractContextManager[object]]
    block: AbstractContextManager[object] | None = None
    """The block that was created and opened."""
    _block_name = "a decorator"
    _lost_at_start = _lost_at_end = "this call was not measured"

    def _open_block(self) -> Any:
        """Create and open the block."""
        block = self.create()
        opened = block.__enter__()
        self.block = block
        return opened

    def _close_block(self, error: BaseException | None) -> None:
        """Close the block, if it was opened."""
        if self.block is None:
            return
        if error is None:
            self.block.__exit__(None, None, None)
        else:
            self.block.__exit__(type(error), error, error.__traceback__)
