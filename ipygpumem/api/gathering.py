"""``ipygpumem.gather``."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from ipygpumem.api.shell import current_traces, show
from ipygpumem.errors import GpuMemError
from ipygpumem.merging.merge import merge
from ipygpumem.merging.records import Member, Merged
from ipygpumem.reports.merged import merged_report


def gather(*, silent: bool = False) -> Merged | None:
    """Collect the traces of all ranks of a ``torch.distributed`` job, and show one report on rank 0.

    Every rank has to call it, as any collective operation: it waits for all of them.

    Args:
        silent: show nothing.

    Returns:
        on rank 0 what all ranks have measured, None on others.

    Raises:
        GpuMemError: there is no process group.
    """
    torch: Any = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        raise GpuMemError("gather needs a process group: call torch.distributed.init_process_group() first")
    rank = distributed.get_rank()
    own = Member(f"rank {rank}", socket.gethostname(), os.getpid(), tuple(current_traces().finished))
    found: list[Any] | None = [None] * distributed.get_world_size() if rank == 0 else None
    distributed.gather_object(own.to_dict(), found)
    if found is None:
        return None
    merged = merge([Member.from_dict(item) for item in found if item is not None])
    if not silent:
        show(merged_report(merged))
    return merged
