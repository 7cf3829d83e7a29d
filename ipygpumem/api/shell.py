"""Where a call comes from: IPython, or a script."""

from __future__ import annotations

import sys
from typing import Any


def current_shell() -> Any | None:
    """Return IPython's shell; None in a script."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython() if get_ipython is not None else None
