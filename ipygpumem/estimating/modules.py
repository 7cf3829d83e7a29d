"""Summarizes a model: what each module has, and what its forward pass leaves alive, seen with fake tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ipygpumem.errors import EstimateError
from ipygpumem.estimating.following import tensors_in
from ipygpumem.estimating.records import ModelSummary, ModuleRow
from ipygpumem.estimating.running import Estimation
from ipygpumem.estimating.storage_log import StorageLog
from ipygpumem.introspect import is_instance, type_name


@dataclass
class _Calls:
    """When a module was called, in the log's time."""

    begun: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    output_shape: tuple[int, ...] | None = None


def summarize(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModelSummary:
    """Return what one forward pass of ``model`` shows of it; the model stays as it is.

    Raises:
        EstimateError: ``model`` is no module.
    """
    if not is_instance(model, torch.nn.Module):
        raise EstimateError(f"a summary takes a torch.nn.Module, not {type_name(model)}")
    __tracebackhide__ = True  # of the user's errors
    run = Estimation()
    calls: dict[str, _Calls] = {}

    def forward() -> Any:
        copy = run.copies.of(model)
        for name, module in copy.named_modules():
            calls[name] = _Calls()
            _listen(module, calls[name], run.log)
        with torch.enable_grad():
            return copy(*run.copies.of(args), **run.copies.of(dict(kwargs)))

    def summarized() -> ModelSummary:
        run.run(forward)
        rows = [_row(name, module, calls[name], run.log) for name, module in model.named_modules()]
        trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        return ModelSummary(tuple(rows), trainable)

    return run.carry_out(summarized)


def _listen(module: Any, calls: _Calls, log: StorageLog) -> None:
    def begins(*_: Any) -> None:
        calls.begun.append(log.clock)

    def ends(module: Any, args: Any, output: Any) -> None:
        calls.spans.append((calls.begun.pop(), log.clock))
        first = next(tensors_in(output), None)
        calls.output_shape = None if first is None else tuple(first.shape)

    module.register_forward_pre_hook(begins)
    module.register_forward_hook(ends)


def _row(name: str, module: Any, calls: _Calls, log: StorageLog) -> ModuleRow:
    parameters, buffers = list(module.parameters()), list(module.buffers())
    kept = [life for life in log.lives if life.recorded and life.died is None]  # for backward
    return ModuleRow(
        name=name,
        type_name=type_name(module),
        depth=name.count(".") + bool(name),
        output_shape=calls.output_shape,
        parameters=sum(parameter.numel() for parameter in parameters),
        parameter_bytes=_bytes_of(parameters),
        buffer_bytes=_bytes_of(buffers),
        activation_bytes=sum(life.size_bytes for life in kept if any(a < life.born <= b for a, b in calls.spans)),
        calls=len(calls.spans),
    )


def _bytes_of(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
