"""Compares the estimate of a training step with torch's real allocator on a card.

A step is notebook code that defines ``train``. It is estimated, then run twice: without a limit,
and with the estimate's minimum as the limit.
"""

from __future__ import annotations

import gc
import linecache
import math
import traceback
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch

from ipygpumem.estimating.records import FITS
from ipygpumem.estimating.running import Estimation

PEAK_SHARE = 0.0025
"""Largest difference of a peak, as a share of the allocator's."""
RESERVED_SHARE = 0.02
"""The same of the reserved memory."""
PEAK_BYTES, RESERVED_BYTES = 64 << 10, 4 << 20
"""Differences that small steps may have: a few blocks, and two small segments."""
MOST_OF_BOUND = 1.25
"""Largest estimate of a step that depends on values, as a multiple of the allocator's figure."""


@dataclass
class Figures:
    """Figures of one step: those of the estimate, and those of torch's allocator."""

    name: str
    peak_bytes: int = 0
    reserved_bytes: int = 0
    required_bytes: int = 0
    """Memory with which the step runs, by the estimate."""
    verdict: str = ""
    """The estimate's verdict for a card with so much memory."""
    true_peak_bytes: int = 0
    true_reserved_bytes: int = 0
    runs: bool = False
    """True if the step runs with ``required_bytes``."""
    is_bound: bool = False
    """True if the memory depends on values, so that the estimate is the most that it may be."""
    says_so: bool = False
    """True if the estimate names a line with such values, or what it assumes."""
    error: str = ""

    @property
    def title(self) -> str:
        """The step's name with its mistakes."""
        return f"{self.name}: {'; '.join(self.mistakes)}"

    @property
    def mistakes(self) -> list[str]:
        """Descriptions of the figures that are wrong."""
        if self.error:
            return [self.error]
        mistakes: list[str] = []
        if self.verdict == FITS and not self.runs:
            mistakes.append(f"does not run with {self.required_bytes:,} bytes")
        if self.is_bound and not self.says_so:
            mistakes.append("does not say that it depends on values")
        pairs = (
            ("peak", self.peak_bytes, self.true_peak_bytes, PEAK_BYTES, PEAK_SHARE),
            (
                "reserved",
                self.reserved_bytes,
                self.true_reserved_bytes,
                RESERVED_BYTES,
                RESERVED_SHARE,
            ),
        )
        for name, estimated, true, least, share in pairs:
            allowed_bytes = max(least, share * true)
            most_bytes = MOST_OF_BOUND * true if self.is_bound else true + allowed_bytes
            if not true - allowed_bytes <= estimated <= most_bytes:
                mistakes.append(
                    f"{name} {estimated:,}, true {true:,} ({estimated / true - 1:+.2%})"
                )
        return mistakes


def clean() -> None:
    """Free all memory on the card, also cuBLAS's workspaces."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def always_step(_: Any, optimizer: Any, __: Any, *args: Any, **kwargs: Any) -> Any:
    """Step as an estimate does: a card whose kernels compute nothing may report an overflow."""
    return optimizer.step(*args, **kwargs)


def made(name: str, code: str) -> dict[str, Any]:
    """Run a program, and return its names."""
    file = f"<{name}>"
    linecache.cache[file] = len(code), None, code.splitlines(keepends=True), file
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, file, "exec"), names)
    return names


def runs_within(name: str, code: str, limit_bytes: int) -> bool:
    """Return True if a step runs with a limit of the memory that torch's allocator reserves.

    The model is made before, as it was for the estimate: making it leaves segments in the cache.
    """
    clean()
    train = made(name, code)["train"]
    clean()
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (limit_bytes + 1) / total_bytes))
    try:
        train()
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return True


def compare(name: str, code: str, *, is_bound: bool = False) -> Figures:
    """Estimate a step, and run it."""
    figures = Figures(name, is_bound=is_bound)
    clean()
    names = made(name, code)
    train = names["train"]
    clean()
    # A machine may be so busy that an estimate takes longer than notebooks wait.
    estimation = Estimation(timeout_seconds=math.inf)
    estimate = estimation.of_call(train, (), {}, (names,))
    (device,) = (device for device in estimate.devices if device.device.startswith("cuda"))
    assumptions = [note for note in estimate.notes if "assumed to run" in note]
    figures.says_so = bool(estimate.upper_bounds or assumptions)
    figures.peak_bytes = device.peak_bytes
    figures.reserved_bytes = device.reserved_bytes
    required_bytes = device.needed_bytes + device.spare_bytes
    device = replace(device, context_bytes=0, room_bytes=required_bytes)
    figures.required_bytes = required_bytes
    figures.verdict = device.verdict
    clean()
    train()
    figures.true_peak_bytes = torch.cuda.max_memory_allocated()
    figures.true_reserved_bytes = torch.cuda.max_memory_reserved()
    del names, train
    figures.runs = runs_within(name, code, figures.required_bytes)
    return figures


def compared(name: str, code: str, *, is_bound: bool = False) -> Figures:
    """Return the figures of a step, or those with the error that it raises."""
    try:
        return compare(name, code, is_bound=is_bound)
    except Exception as error:
        line = str(error).partition("\n")[0]
        where = traceback.extract_tb(error.__traceback__)[-1]
        traceback.clear_frames(error.__traceback__)  # else the next step finds its tensors
        return Figures(name, error=f"{type(error).__name__}: {line} ({where.name})")


def prepare() -> None:
    """Prepare this process for the first comparison."""
    warnings.simplefilter("ignore")
    torch.cuda.init()
    torch.amp.GradScaler._maybe_opt_step = always_step  # type: ignore[method-assign]
    # The first estimate imports torch's compiler, which each later collection would pass over.
    Estimation().of_call(torch.ones, (1,), {"device": "cuda"}, ())
    gc.collect()
    gc.freeze()
