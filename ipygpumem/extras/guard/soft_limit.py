"""Sets this process's soft ``RLIMIT_DATA``, and restores the user's own."""

from __future__ import annotations

from ipygpumem.probes.own_limits import resource
from ipygpumem.probes.pages import PAGE_BYTES

NO_LIMIT = -1
_MARK = 1907
"""Our limits, divided by the page size, have this remainder, by which they are recognised. Linux
ignores it; code of the user may save and restore such a limit.
"""


class SoftLimit:
    """The soft limit on this process's private address space; nothing where there is none."""

    def __init__(self) -> None:
        self._users_bytes = NO_LIMIT
        """The user's own limit, which was in force before ours."""
        if resource is not None:
            self._users_bytes = int(resource.getrlimit(resource.RLIMIT_DATA)[0])

    def is_set_by_user(self) -> bool:
        """Return True if other code has set a limit since this guard was switched on.

        That code may also have lifted the user's limit, which is then forgotten.
        """
        if resource is None:
            return False
        soft_bytes = int(resource.getrlimit(resource.RLIMIT_DATA)[0])
        if soft_bytes == NO_LIMIT:
            self._users_bytes = NO_LIMIT
        is_ours = soft_bytes % PAGE_BYTES == _MARK
        return soft_bytes != self._users_bytes and not is_ours

    def set(self, size_bytes: int) -> None:
        """Set the limit, or restore the user's with ``NO_LIMIT``; the user's is never exceeded."""
        if resource is None or self.is_set_by_user():
            return
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        bounds = [bound for bound in (self._users_bytes, hard) if bound != NO_LIMIT]
        if size_bytes != NO_LIMIT:
            bounds.append(size_bytes // PAGE_BYTES * PAGE_BYTES + _MARK)
        resource.setrlimit(resource.RLIMIT_DATA, (min(bounds, default=NO_LIMIT), hard))
