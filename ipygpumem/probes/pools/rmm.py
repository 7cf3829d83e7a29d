"""RMM: the counts of its statistics adaptor, where the user has one (``rmm.statistics.enable_statistics()``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ipygpumem.probes.pools import Pool


def pools(rmm: Any) -> Iterator[Pool]:
    """Yield the counts of the current device's resource. RMM does not say which device that is."""
    counts = getattr(rmm.mr.get_current_device_resource(), "allocation_counts", None)
    if counts is not None:
        yield Pool(None, counts.current_bytes, counts.peak_bytes)
