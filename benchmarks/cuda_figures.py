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
    options = {"device": "cuda:0", "device_memory": _LARGEST_MIB * _MIB} if hidden else {}
    try:
        found = ipygpumem.estimate(step, **options)
    except ipygpumem.errors.EstimateError as error:
        return {"refused": str(error)}
    card = next(figures for figures in found.devices if figures.device.startswith("cuda"))
    taken = 0 if hidden else _TAKEN_MIB
    sizes = range(taken + 1, _LARGEST_MIB)
    turn = bisect_left(sizes, True, key=lambda size: _said(card, size - taken) == "fits")
    fits = sizes[turn] if turn < len(sizes) else None  # "perhaps" on any card
    unfit = (
        sizes[
            bisect_left(sizes, True, key=lambda size: _said(card, size - taken) != "does not fit")
        ]
        - 1
    )
    figures = {
        "peak": card.peak_bytes,
        "reserved": card.reserved_bytes,
        "guesses": len(found.guesses),
    }
    return {**figures, "fits_mib": fits, "unfit_mib": unfit, "seconds": found.duration_seconds}


def _said(card: Any, room_mib: int) -> str:
    """Return the verdict on a card that has ``room_mib`` for the code."""
    return str(replace(card, room_bytes=room_mib * _MIB).verdict)


def _estimated_and_run(name: str) -> dict[str, Any]:
    step = _build(name)
    return {"card": _attempt(lambda: _estimate(step, hidden=False)), "run": _run(step)}


def _attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except Exception as error:
        traceback.print_exc()
        return {"refused": f"{type(error).__name__}: {error}"}


class _FirstCallError(Exception):
    """Stops a step at its first call of a model."""


def _first_call(step: Step) -> tuple[nn.Module, Any, Any]:
    """Return the model that the step calls first, and the arguments of the call."""
    found: list[Any] = []

    def stop(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        found.append((module, args, kwargs))
        raise _FirstCallError

    with patch.object(nn.Module, "__call__", stop), suppress(_FirstCallError):
        step()
    return found[0]


def _others(name: str) -> dict[str, int]:
    """Return other estimators' figures for the peak, where they apply."""
    step = _build(name)
    alive = gc.get_objects()
    optimizers = [value for value in alive if isinstance(value, torch.optim.Optimizer)]
    adam = bool(optimizers) and all(isinstance(value, torch.optim.Adam) for value in optimizers)
    trains = bool(optimizers)
    found: dict[str, int] = {}
    with suppress(Exception):
        model, args, kwargs = _first_call(step)
        if len(optimizers) < 2:
            holders = [
                value
                for value in alive
                if isinstance(value, nn.Module) and model in value.modules()
            ]
            whole = max(holders, key=lambda holder: len([*holder.modules()]))
            found |= _by_formulas(whole, adam=adam, trains=trains)
            found["torchinfo"] = _torchinfo(model, args, kwargs)
    return found


def _by_formulas(model: nn.Module, *, adam: bool, trains: bool) -> dict[str, int]:
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    total_bytes, _ = calculate_maximum_sizes(model)
    if not trains:
        return {"accelerate": int(total_bytes)}
    if not adam:
        return {}
    usage = estimate_training_usage(total_bytes, "float32")
    # DeepSpeed's estimate_zero2_model_states_mem_needs for one card, without offloading.
    return {
        "accelerate": int(max(usage.values())),
        "DeepSpeed": 20 * sum(parameter.numel() for parameter in model.parameters()),
    }


def _torchinfo(model: nn.Module, args: Any, kwargs: Any) -> int:
    import torchinfo

    mode = "train" if model.training else "eval"
    found = torchinfo.summary(model, input_data=args or None, verbose=0, mode=mode, **kwargs)
    return int((found.total_input or 0) + found.total_output_bytes + found.total_param_bytes)


def _mem_tracker(name: str) -> dict[str, int]:
    from torch.distributed._tools.mem_tracker import MemTracker

    step = _build(name)
    alive = gc.get_objects()
    modules = [value for value in alive if isinstance(value, nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    optimizers = [value for value in alive if isinstance(value, torch.optim.Optimizer)]
    tracker = MemTracker()
    tracker.track_external(*(module for module in modules if id(module) not in inner), *optimizers)

    def forget(
        module: nn.Module, _: Any
    ) -> None:  # it follows one call of a model, or is told to forget that
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
            os.environ |= {"SIM_TABLE": table.name, "SIM_TOTAL_MIB": str(card_mib)}
            os.environ["CUDA_VISIBLE_DEVICES"] = "" if hidden else "0"
            # torch called the driver at its import; the simulated one would refuse a forked process
            # for that.
            ctypes.CDLL("libcudart.so.13").simulate_error(0)
            os.dup2(2, 1)  # what the step prints is no figure
            with os.fdopen(sending, "w") as file:
                json.dump(_attempt(work), file)
                file.flush()
                os._exit(0)
        os.close(sending)
        with os.fdopen(receiving) as file:
            if not select.select([file], [], [], _SECONDS)[0]:
                os.kill(child, signal.SIGKILL)
            text = file.read()
        used = os.wait4(child, 0)[2]
        print(work, round(used.ru_utime + used.ru_stime, 1), file=sys.stderr)
    return json.loads(text) if text else {"refused": f"no result in {_SECONDS} s"}


def _figures(name: str) -> dict[str, Any]:
    """Return all figures of a step: estimates, counters, whether the verdicts are true, what others
    say.
    """
    found = _apart(lambda: _estimated_and_run(name))
    if "run" not in found:
        return found
    found["hidden"] = _apart(lambda: _estimate(_build(name), hidden=True), hidden=True)
    ran: dict[int, bool] = {}
    for where in (found["card"], found["hidden"]):
        for asked in ("fits_mib", "unfit_mib"):
            if size := where.get(asked):
                if size not in ran:
                    ran[size] = _runs(name, size, found["run"])
                where[asked.replace("mib", "ran")] = ran[size]
    found["others"] = _apart(lambda: _others(name)) | _apart(lambda: _mem_tracker(name))
    return found


def _runs(name: str, card_mib: int, seen: dict[str, Any]) -> bool:
    """Return True if a step runs on a card: below its tensors it does not, with more than it
    reserved it does.
    """
    room = (card_mib - _TAKEN_MIB) * _MIB
    if not seen["allocated"] <= room < seen["reserved"]:
        return bool(room >= seen["reserved"])
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
