"""``ipygpumem.load``."""

from __future__ import annotations

import os

from ipygpumem.model import SessionRecord
from ipygpumem.reports.export import formats


def load(path: str | os.PathLike[str]) -> SessionRecord:
    """Return what was exported to a .json file; it needs neither IPython nor the extension.

    Raises:
        FileError: the file cannot be read, was not exported by ipygpumem, or was written by a newer ipygpumem.
    """
    return formats.load(path)
