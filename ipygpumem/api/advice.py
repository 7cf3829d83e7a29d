"""``ipygpumem.advise``."""

from __future__ import annotations

import sys

from ipygpumem.advising import advisor
from ipygpumem.advising.places import Scope
from ipygpumem.advising.records import Advised
from ipygpumem.api.shell import current_shell
from ipygpumem.objects.inventory.survey import locals_of
from ipygpumem.units import checked_bytes


def advise(*, min_bytes: float | str = advisor.LEAST_BYTES) -> Advised:
    """Return what would save memory, what saves most first, each with one line of code.

    It works in a script as well: names are those that are seen where it is called. It changes nothing.

    Args:
        min_bytes: the smallest saving that is worth a line: a number, or ``"1MiB"``.

    Raises:
        UnitError: ``min_bytes`` is not a size.
    """
    least = checked_bytes(min_bytes)
    frame = sys._getframe(1)
    shell = current_shell()
    if shell is None:
        return advisor.advise(Scope(frame.f_globals, locals_of(frame)), least)

    from ipygpumem.notebook.commands.advise import asked_by  # no script needs IPython

    return asked_by(frame, shell, least)
