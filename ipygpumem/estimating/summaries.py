"""Summarises models: the parameters and activations of each module, by one forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ipygpumem.errors import EstimateError
from ipygpumem.estimating.memory.storages import StorageLife, StorageLog, tensors_in
from ipygpumem.estimating.records import ModelSummary, ModuleRow
from ipygpumem.estimating.running import Estimation
from ipygpumem.introspect import is_instance, type_name


@dataclass
class _Calls:
    """The calls of one module during the forward pass."""

    starts_of_open_calls: list[int] = field(default_factory=list)
    """When the calls that have not ended began, on the log's clock."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """When each call began and ended."""
    output_shape: tuple[int, ...] | None = None
    """Shape of the first tensor in the last output."""

    def follow(self, module: Any, log: StorageLog) -> None:
        """Note the calls of a module from now on, by hooks that stay on it."""

        def note_start(module: Any, args: Any) -> None:
            self.starts_of_open_calls.append(log.clock)

        def note_end(module: Any, args: Any, output: Any) -> None:
            span = (self.starts_of_open_calls.pop(), log.clock)
            self.spans.append(span)
            self.output_shape = None
            for tensor in tensors_in(output):
                self.output_shape = tuple(tensor.shape)
                break

        module.register_forward_pre_hook(note_start)
        module.register_forward_hook(note_end)

    def allocated(self, life: StorageLife) -> bool:
        """Return True if one of the calls allocated a storage."""
        return any(began < life.born <= ended for began, ended in self.spans)

    def allocated_bytes(self, lives: Iterable[StorageLife]) -> int:
        """Return the bytes of the storages that the calls allocated."""
        return sum(life.size_bytes for life in lives if self.allocated(life))


def summarize(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModelSummary:
    """Return the summary of a model from one forward pass of a copy; the model is not changed."""
    if not is_instance(model, torch.nn.Module):
        raise EstimateError(f"a summary takes a torch.nn.Module, not {type_name(model)}")
    __tracebackhide__ = True  # of the user's errors
    estimation = Estimation()
    calls: dict[str, _Calls] = {}

    def forward() -> Any:
        copy_of = estimation.copies.of
        copy = copy_of(model)
        for name, module in copy.named_modules():
            calls[name] = _Calls()
            calls[name].follow(module, estimation.log)
        with torch.enable_grad():
            return copy(*copy_of(args), **copy_of(dict(kwargs)))

    def summarized() -> ModelSummary:
        estimation.run_on_fakes(forward)
        return _summary(model, calls, estimation.log)

    return estimation.with_rollback(summarized)


def _summary(model: Any, calls: Mapping[str, _Calls], log: StorageLog) -> ModelSummary:
    """Return the summary of a model, from the calls of its modules and the log of its storages."""
    # The storages that backward would need:
    activations = [life for life in log.lives if life.recorded and life.died is None]
    rows = []
    for name, module in model.named_modules():
        rows.append(_module_row(name, module, calls[name], activations))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return ModelSummary(tuple(rows), _number_of_elements(trainable))


def _module_row(name: str, module: Any, calls: _Calls, activations: list[StorageLife]) -> ModuleRow:
    """Return the row of a module.

    Args:
        name: its dotted name in the model; empty for the model itself.
        module: the module.
        calls: its calls.
        activations: all storages that backward would need.
    """
    parameters = list(module.parameters())
    buffers = list(module.buffers())
    depth = 0
    if name:
        depth = len(name.split("."))
    return ModuleRow(
        name=name,
        type_name=type_name(module),
        depth=depth,
        output_shape=calls.output_shape,
        parameters=_number_of_elements(parameters),
        parameter_bytes=_size_bytes(parameters),
        buffer_bytes=_size_bytes(buffers),
        activation_bytes=calls.allocated_bytes(activations),
        calls=len(calls.spans),
    )


def _number_of_elements(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _size_bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
