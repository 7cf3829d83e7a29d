"""Estimates and runs the steps of cuda_steps.py: ``python -m benchmarks.cuda_figures`` reads names,
prints figures.

It runs in the environment of the simulated card. Each figure comes from a process of its own, which
is forked from this one after the imports: what the card has and whether it is visible is decided
there.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import os
import select
import signal
import sys
import tempfile
import traceback
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import timm  # noqa: F401  # what the steps need is loaded once, where it does not ask for a card
import torch
import torchvision  # noqa: F401
import transformers.modeling_utils  # noqa: F401
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import ipygpumem
import ipygpumem.estimating.running
from benchmarks.cuda_steps import STEPS, Step

_MIB = 2**20
_GIB = 2**30
_LARGEST_MIB = 160 * 1024
_TAKEN_MIB = 412 + 256
"""Memory that a context and the driver take on the simulated card."""
_SECONDS = 300
"""Seconds before a process is killed, on a busy machine."""


def _build(name: str) -> Step:
    """Return a step with its model, on the card where one is visible."""
    # Without a card, models lie on the meta device. Weights have no values on the card, and erfinv_
    # needs a compiler.
    place = "cuda" if torch.cuda.is_available() else "meta"
    with patch.object(torch.Tensor, "erfinv_", lambda tensor: tensor), torch.device(place):
        return STEPS[name]()


# -- what runs in a process of its own ----------------------------------------------------------


def _run(step: Step) -> dict[str, Any]:
    """Return the counters of the card's allocator after the step."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        step()
    except torch.OutOfMemoryError:
        return {"ran": False}
    return {
        "ran": True,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def _estimate(step: Step, *, hidden: bool) -> dict[str, Any]:
    """Return an estimate's bytes and seconds, and the smallest card in MiB on which it says that
    the step fits, and the largest on which it says that it does not; or why it refuses.
    """
    options: dict[str, Any] = {}
    taken_mib = _TAKEN_MIB
    if hidden:
        options = {"device": "cuda:0", "device_memory": _LARGEST_MIB * _MIB}
        taken_mib = 0
    try:
        estimate = ipygpumem.estimate(step, **options)
    except ipygpumem.errors.EstimateError as error:
        return {"refused": str(error)}
    card = next(figures for figures in estimate.devices if figures.device.startswith("cuda"))

    def verdict(card_mib: int) -> str:
        room_bytes = (card_mib - taken_mib) * _MIB
        return str(replace(card, room_bytes=room_bytes).verdict)

    sizes_mib = range(taken_mib + 1, _LARGEST_MIB)
    place = bisect_left(sizes_mib, True, key=lambda size: verdict(size) == "fits")
    fits_mib = None  # "perhaps" on any card
    if place < len(sizes_mib):
        fits_mib = sizes_mib[place]
    place = bisect_left(sizes_mib, True, key=lambda size: verdict(size) != "does not fit")
    unfit_mib = sizes_mib[place] - 1
    return {
        "peak": card.peak_bytes,
        "reserved": card.reserved_bytes,
        "guesses": len(estimate.guesses),
        "fits_mib": fits_mib,
        "unfit_mib": unfit_mib,
        "seconds": estimate.duration_seconds,
    }


def _estimated_and_run(name: str) -> dict[str, Any]:
    """Return the figures of a step's estimate and of its run, in one process."""
    step = _build(name)
    return {"card": _attempt(lambda: _estimate(step, hidden=False)), "run": _run(step)}


def _attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of ``work``, or its error as a refusal."""
    try:
        return work()
    except Exception as error:
        traceback.print_exc()
        return {"refused": f"{type(error).__name__}: {error}"}


class _FirstCallError(Exception):
    """Stops a step at its first call of a model."""


def _first_call(step: Step) -> tuple[nn.Module, Any, Any]:
    """Return the model that the step calls first, and the arguments of the call."""
    calls: list[Any] = []

    def stop(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        calls.append((module, args, kwargs))
        raise _FirstCallError

    with patch.object(nn.Module, "__call__", stop), suppress(_FirstCallError):
        step()
    return calls[0]


def _others(name: str) -> dict[str, int]:
    """Return other estimators' figures for the peak in bytes, by estimator, where they apply."""
    step = _build(name)
    alive = gc.get_objects()
    optimizers = [value for value in alive if isinstance(value, torch.optim.Optimizer)]
    peaks: dict[str, int] = {}
    with suppress(Exception):
        model, args, kwargs = _first_call(step)
        if len(optimizers) < 2:
            peaks |= _by_formulas(_outermost(model, alive), optimizers)
            peaks["torchinfo"] = _torchinfo(model, args, kwargs)
    return peaks


def _outermost(model: nn.Module, objects: list[Any]) -> nn.Module:
    """Return the largest module among objects that contains ``model``, or ``model`` itself."""
    modules = [value for value in objects if isinstance(value, nn.Module)]
    holders = [module for module in modules if model in module.modules()]
    return max(holders, key=lambda holder: len([*holder.modules()]))


def _by_formulas(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, int]:
    """Return the peaks by formulas of the parameters; none for optimizers other than Adam."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    total_bytes, _ = calculate_maximum_sizes(model)
    if not optimizers:
        return {"accelerate": int(total_bytes)}
    if not all(isinstance(optimizer, torch.optim.Adam) for optimizer in optimizers):
        return {}
    usage = estimate_training_usage(total_bytes, "float32")
    # DeepSpeed's estimate_zero2_model_states_mem_needs for one card, without offloading.
    return {
        "accelerate": int(max(usage.values())),
        "DeepSpeed": 20 * sum(parameter.numel() for parameter in model.parameters()),
    }


def _torchinfo(model: nn.Module, args: Any, kwargs: Any) -> int:
    """Return torchinfo's total in bytes."""
    import torchinfo

    mode = "train" if model.training else "eval"
    summary = torchinfo.summary(model, input_data=args or None, verbose=0, mode=mode, **kwargs)
    input_bytes = summary.total_input or 0
    return int(input_bytes + summary.total_output_bytes + summary.total_param_bytes)


def _mem_tracker(name: str) -> dict[str, int]:
    """Return the peak in bytes that torch's tracker adds up while the step runs on the card."""
    from torch.distributed._tools.mem_tracker import MemTracker

    step = _build(name)
    alive = gc.get_objects()
    modules = [value for value in alive if isinstance(value, nn.Module)]
    child_ids: set[int] = set()
    for module in modules:
        child_ids.update(map(id, module.children()))
    outer_modules = [module for module in modules if id(module) not in child_ids]
    optimizers = [value for value in alive if isinstance(value, torch.optim.Optimizer)]
    tracker = MemTracker()
    tracker.track_external(*outer_modules, *optimizers)

    def forget(module: nn.Module, _: Any) -> None:
        # It follows one call of a model, unless it forgets that.
        if not tracker._mod_tracker.is_bw and tracker._mod_tracker.parents == {"Global"}:
            tracker.memory_tracking.pop(module, None)

    with register_module_forward_pre_hook(forget), tracker:
        step()
    return {"MemTracker": tracker.get_tracker_snapshot("peak")[torch.device("cuda:0")]["Total"]}


# -- processes ----------------------------------------------------------------------------------


def _apart(
    work: Callable[[], dict[str, Any]], card_mib: int = _LARGEST_MIB, *, hidden: bool = False
) -> dict[str, Any]:
    """Return the result of ``work`` in a process of its own, on a machine with one card of this
    size.
    """
    receiving, sending = os.pipe()
    with tempfile.NamedTemporaryFile() as table:
        child = os.fork()
        if not child:
            os.close(receiving)
            _set_card(table.name, card_mib, hidden=hidden)
            os.dup2(2, 1)  # what the step prints is no figure
            with os.fdopen(sending, "w") as file:
                json.dump(_attempt(work), file)
                file.flush()
                os._exit(0)
        os.close(sending)
        with os.fdopen(receiving) as file:
            readable, _, _ = select.select([file], [], [], _SECONDS)
            if not readable:
                os.kill(child, signal.SIGKILL)
            text = file.read()
        _, _, usage = os.wait4(child, 0)
        print(work, round(usage.ru_utime + usage.ru_stime, 1), file=sys.stderr)
    if not text:
        return {"refused": f"no result in {_SECONDS} s"}
    return dict(json.loads(text))


def _set_card(table: str, card_mib: int, *, hidden: bool) -> None:
    """Give this process a simulated machine with one card, whose state is in the file ``table``."""
    os.environ["SIM_TABLE"] = table
    os.environ["SIM_TOTAL_MIB"] = str(card_mib)
    os.environ["CUDA_VISIBLE_DEVICES"] = "" if hidden else "0"
    # torch called the driver at its import; the simulated one would refuse a forked process for
    # that.
    ctypes.CDLL("libcudart.so.13").simulate_error(0)


def _figures(name: str) -> dict[str, Any]:
    """Return all figures of a step: estimates, counters, whether the verdicts are true, and other
    tools' peaks.
    """
    figures = _apart(lambda: _estimated_and_run(name))
    if "run" not in figures:
        return figures
    figures["hidden"] = _apart(lambda: _estimate(_build(name), hidden=True), hidden=True)
    ran_on_card: dict[int, bool] = {}  # by the card's MiB
    for estimate in (figures["card"], figures["hidden"]):
        for verdict in ("fits", "unfit"):
            card_mib = estimate.get(f"{verdict}_mib")
            if not card_mib:
                continue
            if card_mib not in ran_on_card:
                ran_on_card[card_mib] = _runs(name, card_mib, figures["run"])
            estimate[f"{verdict}_ran"] = ran_on_card[card_mib]
    figures["others"] = _apart(lambda: _others(name)) | _apart(lambda: _mem_tracker(name))
    return figures


def _runs(name: str, card_mib: int, counters: dict[str, Any]) -> bool:
    """Return True if a step runs on a card. It need not be tried on one without room for its
    tensors, or with room for all the memory that it reserved.
    """
    room_bytes = (card_mib - _TAKEN_MIB) * _MIB
    if room_bytes < counters["allocated"]:
        return False
    if room_bytes >= counters["reserved"]:
        return True
    return bool(_apart(lambda: _run(_build(name)), card_mib).get("ran"))


def main() -> None:
    """Print the figures of each step that standard input names, as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the steps' names")
    if parser.parse_args().list:
        print(json.dumps([*STEPS]))
        return
    logging.disable(logging.WARNING)
    for line in sys.stdin:
        print(json.dumps(_figures(line.strip())), flush=True)


if __name__ == "__main__":
    main()
