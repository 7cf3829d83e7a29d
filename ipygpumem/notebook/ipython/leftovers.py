"""What IPython keeps besides outputs, where nobody looks: the modules of %run, %store's objects, the debugger.

None of it is the user's: a script's names are in the notebook, a stored object is in its file, and the debugger is
made anew when it is asked for.
"""

from __future__ import annotations

from typing import Any

StoredMark = dict[Any, float]
"""The time of each file that %store's database has a copy of in memory."""


class Leftovers:
    """The leftovers of one shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def mark(self) -> StoredMark:
        """Return which copies of stored objects are in memory now."""
        return {path: time for path, (_, time) in self._stored().items()}

    def forget_since(self, mark: StoredMark) -> None:
        """Drop copies of objects stored after ``mark``, and other leftovers of no use to later cells.

        That is the modules of scripts, which %run clears itself before it runs one again; the debugger, which keeps
        each frame in which it displays something; and the record of warnings, which IPython drops before each cell.
        """
        shell, stored = self._shell, self._stored()
        for path in [path for path, (_, time) in stored.items() if mark.get(path) != time]:
            del stored[path]
        shell.clear_main_mod_cache()
        if getattr(shell.InteractiveTB, "pdb", None) is not None:
            shell.InteractiveTB.pdb = None
        shell.user_ns.pop("__warningregistry__", None)

    def _stored(self) -> dict[Any, tuple[Any, float]]:
        own = vars(self._shell)
        database = own.get("_db", own.get("db"))  # asking for ``db`` would make one in IPython 9
        cache = getattr(database, "cache", None)
        return cache if type(cache) is dict else {}
