"""What names stood for, to see later what lives on without its name: it may be garbage that is older than a moment."""

from __future__ import annotations

import gc
import weakref
from itertools import compress
from typing import Any

from ipygpumem.garbage import weak
from ipygpumem.scope import is_ownable


class Named:
    """What names stand for at some moment, to see later whether some of it lives on without its name, maybe as garbage.

    It keeps nothing alive, and knows nothing of what only other objects refer to.

    Args:
        namespace: the names.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        now = dict(namespace)  # one object, where a list of 100,000 pairs makes the collector look at them
        in_cycles = compress(now.items(), map(gc.is_tracked, now.values()))  # nothing else is ever in one
        self._values = {name: weak(value) or id(value) for name, value in in_cycles if is_ownable(name)}

    def some_linger(self, namespace: dict[str, Any]) -> bool:
        """Return whether something has lost its name and may be alive."""
        return any(_lingers(value, namespace.get(name)) for name, value in self._values.items())


def _lingers(earlier: weakref.ref[object] | int, now: object) -> bool:
    if isinstance(earlier, int):
        return earlier != id(now)
    item = earlier()
    return item is not None and item is not now
