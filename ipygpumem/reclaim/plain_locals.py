"""Lists the numbers and short texts among the locals of an error's frames, which are cleared."""

from __future__ import annotations

import re
from types import FrameType

from ipygpumem.introspect import is_exactly, is_users
from ipygpumem.reclaim.frames import finished_frames, names_in

_FRAMES_SHOWN = 12
"""Maximum number of frames to show."""
_LOCALS_SHOWN = 12
"""Maximum number of plain locals to show of each frame."""
_LONGEST_TEXT = 40
"""Maximum number of letters of a local text to show."""
_LONGEST_NUMBER = 128
"""Maximum number of bits of an integer to show."""
_SECRET = re.compile(
    r"passw|credential|token|secret_|_secret|(api|access|private)_?key", re.IGNORECASE
)
"""Names of locals whose texts are not shown."""


def plain_locals(error: BaseException) -> tuple[str, ...]:
    """Return the numbers and short texts among the locals of the innermost user frames, one line
    per frame: ``train, line 3: step = 12, lr = 0.1``.
    """
    lines = list[str]()
    for frame, line in reversed(list(finished_frames(error))):
        if len(lines) == _FRAMES_SHOWN:  # a deep recursion has many thousand frames
            break
        if not is_users(frame.f_code.co_filename):
            continue
        assignments = _plain_assignments(frame)
        if assignments:
            values = ", ".join(assignments)
            lines.append(f"{frame.f_code.co_name}, line {line}: {values}")
    return tuple(reversed(lines))


def _plain_assignments(frame: FrameType) -> list[str]:
    """Return the first plain locals of a frame, as in ``step = 3``."""
    assignments = list[str]()
    for name, value in names_in(frame).items():
        if len(assignments) == _LOCALS_SHOWN:
            break
        if type(name) is str and name.isidentifier():
            text = _plain_text(name, value)
            if text:
                assignments.append(f"{name} = {text}")
    return assignments


def _plain_text(name: str, value: object) -> str:
    """Return the source text of a number or a text, which is ``…`` if the name is that of a secret,
    and cut if it is long; empty for any other object.
    """
    if type(value) is str:
        if _SECRET.search(name):
            return "…"
        if len(value) > _LONGEST_TEXT:
            return repr(value[:_LONGEST_TEXT]) + "…"
        return repr(value)
    if type(value) is int and value.bit_length() > _LONGEST_NUMBER:
        return ""
    if is_exactly(value, int, float, bool, type(None)):
        return repr(value)
    return ""
