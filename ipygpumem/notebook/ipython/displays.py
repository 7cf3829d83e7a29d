"""Who looks at the outputs of a running cell, and the streams that lead there."""

from __future__ import annotations

import re
import sys
from typing import Any

_JUPYTER_CLIENT_ID = re.compile(r"[0-9a-f]+-[0-9a-f]+_\d+_\d+")


def is_watched(shell: Any) -> bool:
    """Whether a person may sit before the running cell of a kernel.

    Who cannot be asked anything (``allow_stdin``) is a program: nbconvert, papermill.
    """
    return bool(shell.kernel.get_parent("shell").get("content", {}).get("allow_stdin"))


def shows_updates(shell: Any) -> bool:
    """Whether the front-end of the running cell shows updates of displays.

    Consoles built on jupyter_client ignore updates. Their requests have ids of its own form, those of front-ends in
    JavaScript are UUIDs.
    """
    return not _JUPYTER_CLIENT_ID.fullmatch(shell.kernel.get_parent("shell")["header"]["msg_id"])


def is_kernels(stream: Any) -> bool:
    """Whether ``stream`` is the kernel's own, and nothing of a user's that passes on to it.

    What passes on may have all of its attributes, and yet hold text of its own, or a lock that is held by who waits for
    the kernel's thread.
    """
    return type(stream) is getattr(sys.modules.get("ipykernel.iostream"), "OutStream", None)
