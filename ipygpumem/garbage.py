"""Collects garbage after a cell, but only where that is cheap beside what the cell did."""

from __future__ import annotations

import gc
import sys
import time


class GarbageBudget:
    """Collects garbage after a cell when that is cheap beside the work that the cell did.

    The cost of a collection grows with the heap, so it is predicted from the number of allocated blocks and the
    time that earlier collections took per block.
    """

    SHORTEST_SECONDS = 0.02
    _FIRST_GUESS_SECONDS = 2e-7

    def __init__(self) -> None:
        self._seconds_per_block = self._FIRST_GUESS_SECONDS
        self._cpu_seen = time.process_time()

    def collect_if_cheap(self, cell_seconds: float, share: float) -> bool:
        """Collect if the predicted time is at most ``share`` of the work; return whether it did.

        The work is the CPU time since the last call, so that short cells need not be timed, but no more than the
        cell took: one that only waited has made no garbage.

        Args:
            cell_seconds: how long the cell took.
            share: of the work.
        """
        cpu, earlier = time.process_time(), self._cpu_seen
        self._cpu_seen = cpu
        worked = min(cell_seconds, cpu - earlier)
        if worked < self.SHORTEST_SECONDS or not gc.isenabled():
            return False
        blocks = sys.getallocatedblocks()
        if blocks * self._seconds_per_block > share * worked:
            return False
        started = time.perf_counter()
        gc.collect()
        self._seconds_per_block = (time.perf_counter() - started) / blocks
        return True
