"""``ipygpumem.export`` and ``load``."""

from __future__ import annotations

import os

from ipygpumem.api.shell import current_shell, current_traces, loaded_notebook
from ipygpumem.errors import NotLoadedError
from ipygpumem.model import SessionRecord
from ipygpumem.reports import export as formats

Place = str | os.PathLike[str]


def export(path: Place, *, force: bool = False) -> None:
    """Write the finished cells and experiments to a file, whole or not at all; its suffix says the format.

    In a script, without IPython, it writes the finished traces.

    Args:
        path: ends in ``.json`` (all of it, for ``load``) or ``.csv``.
        force: replace a file that ipygpumem did not write.

    Raises:
        NotLoadedError: the extension is not loaded in this IPython.
        FileError: the suffix is neither of these, another program wrote the file, or it cannot be written.
    """
    notebook = loaded_notebook()
    if notebook is None and current_shell() is not None:
        raise NotLoadedError("ipygpumem is not loaded here: run %load_ext ipygpumem first")
    record = SessionRecord.of((), (), current_traces().finished) if notebook is None else notebook.records()
    formats.save(path, record, force=force)


def load(path: Place) -> SessionRecord:
    """Return what was exported to a .json file; it needs neither IPython nor the extension.

    Raises:
        FileError: the file cannot be read, was not exported by ipygpumem, or was written by a newer ipygpumem.
    """
    return formats.load(path)
