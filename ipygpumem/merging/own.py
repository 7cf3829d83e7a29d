"""What this process says of itself in its recording."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable

from ipygpumem.model import CellRecord, ExperimentRecord, SessionRecord, TraceRecord

_NUMBERS = (
    ("RANK", "WORLD_SIZE"),
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
"""What torchrun, MPI and Slurm set for each process: which one it is, and of how many."""


def recorded(
    cells: Iterable[CellRecord], experiments: Iterable[ExperimentRecord], traces: Iterable[TraceRecord]
) -> SessionRecord:
    """Return what this process has measured, and which process of its job it is."""
    rank, ranks = rank_of_job()
    return SessionRecord(
        time.time(), tuple(cells), tuple(experiments), tuple(traces), socket.gethostname(), os.getpid(), rank, ranks
    )


def rank_of_job() -> tuple[int | None, int | None]:
    """Return which process of its job this is, and of how many; None where its environment does not say."""
    pairs = ((_number(rank), _number(ranks)) for rank, ranks in _NUMBERS)
    return next((pair for pair in pairs if pair[0] is not None), (None, None))


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else None
