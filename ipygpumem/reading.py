"""``ipygpumem.load``: reads exports, and the records in the outputs of notebooks.

It stands above all rooms, because an output may have the records of any of them, even of an
optional feature. Each function below imports the class of a kind of record, and the report that
shows it; reading the cells of an export needs none of them.
"""

from __future__ import annotations

import os

from ipygpumem.records import SessionRecord
from ipygpumem.report import export
from ipygpumem.report import printed_records as _printed  # noqa: F401  # registers them


def load(path: str | os.PathLike[str]) -> SessionRecord:
    """Return the session exported to a .json file, or the records in a notebook's outputs.

    Use it to compare sessions, or notebooks that papermill or nbconvert have run: each report that
    they show has its figures in its output's metadata, in a ``.ipynb`` file. It needs neither
    IPython nor the extension.

    Raises:
        FileError: the file cannot be read, was not exported by ipygpumem, or was written by a newer
            version.

    >>> ipygpumem.export("run.json")
    >>> ipygpumem.load("run.json")
    <SessionRecord of 0 cells, 0 experiments and 0 traces>
    """
    return export.load(path, IMPORTS_BY_KIND)


def _estimates() -> None:
    from ipygpumem.report import estimate  # noqa: F401  # only if a notebook has such a record


def _inventories() -> None:
    from ipygpumem.report import tensors, why  # noqa: F401  # as above; with why, those of top


def _reconciliations() -> None:
    from ipygpumem.inventory.devices import breakdown  # noqa: F401  # as above


def _tries() -> None:
    from ipygpumem.fitting import fit  # noqa: F401  # as above


def _trackers() -> None:
    from ipygpumem.extras.tracker import tracker  # noqa: F401  # as above


def _peaks() -> None:
    from ipygpumem.extras.peak import report  # noqa: F401  # as above


def _purges() -> None:
    from ipygpumem.extras.moving import moving  # noqa: F401  # as above


def _releases() -> None:
    from ipygpumem.extras.moving import releasing  # noqa: F401  # as above


IMPORTS_BY_KIND = {
    "Estimate": _estimates,
    "ModelSummary": _estimates,
    "Inventory": _inventories,
    "InventoryDiff": _inventories,
    "LargestNames": _inventories,
    "Ownership": _inventories,
    "Reconciliation": _reconciliations,
    "Try": _tries,
    "TrackerRecord": _trackers,
    "PeakRecord": _peaks,
    "PurgeRecord": _purges,
    "ReleaseRecord": _releases,
}
"""Functions that import the class of a kind of record which outputs carry, and its report."""
