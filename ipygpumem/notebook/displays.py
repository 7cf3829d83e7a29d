"""Who looks at the outputs of a running cell."""

from __future__ import annotations

import re
from typing import Any

_JUPYTER_CLIENT_ID = re.compile(r"[0-9a-f]+-[0-9a-f]+_\d+_\d+")


def is_watched(shell: Any) -> bool:
    """Whether a person may sit before the running cell of a kernel.

    Who cannot be asked anything (``allow_stdin``) is a program: nbconvert, papermill.
    """
    return bool(shell.kernel.get_parent("shell").get("content", {}).get("allow_stdin"))


def shows_updates(shell: Any) -> bool:
    """Whether what replaces a display is seen by who asked for the running cell.

    Consoles built on jupyter_client ignore updates. Their requests have ids of its own form, those of front-ends in
    JavaScript are UUIDs.
    """
    return not _JUPYTER_CLIENT_ID.fullmatch(shell.kernel.get_parent("shell")["header"]["msg_id"])
