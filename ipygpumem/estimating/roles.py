"""Finds what storages are for: parameters, gradients, optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ipygpumem.estimating.storage_log import GRADIENTS, OPTIMIZER, PARAMETERS, StorageLog

_HOOKED = "_ipygpumem_hooked"


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield the tensors in an operation's arguments or results: these hold lists and tuples, and nothing deeper."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


class Roles:
    """Marks in the log what storages are for, by the hooks that torch offers for leaves and optimizers."""

    def __init__(self, log: StorageLog) -> None:
        self._log = log
        self._last_graph = -1

    def argument(self, tensor: Any) -> None:
        """Look at a fake tensor that an operation gets: a parameter, or a leaf whose gradient will come."""
        if tensor.requires_grad and tensor.is_leaf and vars(tensor).get(_HOOKED) != id(tensor):
            vars(tensor)[_HOOKED] = id(tensor)  # a copy has the original's attributes, and not its hooks
            self.follow(tensor)
        elif isinstance(tensor, torch.nn.Parameter):
            self._log.mark(tensor, PARAMETERS)

    def follow(self, tensor: Any) -> Any:
        """Mark what a tensor and its gradient are for; return the handle that ends that, or None."""
        if isinstance(tensor, torch.nn.Parameter):
            self._log.mark(tensor, PARAMETERS)
        if not tensor.requires_grad or not tensor.is_leaf:
            return None
        return tensor.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, leaf: Any) -> None:
        if leaf.grad is not None:
            self._log.mark(leaf.grad, GRADIENTS)

    def backward_is_running(self) -> bool:
        """Whether autograd runs the current operation; a backward pass that begins is noted."""
        graph = torch._C._current_graph_task_id()
        if graph > self._last_graph:
            self._last_graph = graph
            self._log.backwards.append(self._log.clock)
        return bool(graph != -1)

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """Look at an optimizer's state."""
        for state in optimizer.state.values():
            for tensor in tensors_in(state):
                self._log.mark(tensor, OPTIMIZER)
