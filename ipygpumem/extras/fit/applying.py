"""Applies changes to estimated code from outside: at its calls of modules, backward passes and
optimizer steps.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.flop_counter import flop_registry

from ipygpumem.introspect import instance_dict, is_exactly, is_instance

EQUAL = "equal"


@dataclass(frozen=True)
class Change:
    """One change of the code."""

    title: str
    """Its name in the report, in a few words."""
    line: str
    """The code that a user writes for it: safe to run below the code, or comments."""
    results: str
    """Its effects on the code's results, joined by semicolons; ``EQUAL`` if there are none."""
    apply: Callable[[ChangedRun], None]
    """Adds the hooks that make the change to one run."""
    excludes: str = ""
    """Changes with the same word here cannot be combined."""
    passes: int = 1
    """Forward and backward passes for each of the code's."""


class ChangedRun:
    """A ``with`` block in which an estimation's code runs with changes.

    ``names`` is the copy of the code's namespace. A change adds hooks with ``on``. A *root* is a
    module that the code itself calls.

    ====================================  ==========================================================
    ``begin(number, root)``               before the first call of a root with parameters
    ``call(root, args, kwargs)``          before each call of a root; returns the arguments
    ``result()``                          after each call of a root
    ``enter(module, args, kwargs)``       before each call of a module outside backward
    ``leave(module, args, kwargs, m)``    after it; ``m`` is the value that ``enter`` has returned
    ``result_of(module, result)``         after it
    ``loss(predicted, target)``           before one of torch's loss functions; returns the target
    ``scaled(loss)``                      after a GradScaler has scaled a loss
    ``backward(tensors)``                 before a backward pass from these tensors; without tensors
                                          if the pass does not add up gradients
    ``step(optimizer, args, kwargs)``     before a step of an optimizer; returns the arguments
    ``stepped(optimizer)``                after it
    ``operation(func, args, kwargs)``     after each operation outside backward
    ====================================  ==========================================================
    """

    def __init__(self, estimation: Any, names: dict[str, Any], changes: Sequence[Change]) -> None:
        self.assumed_device_of = estimation.assumed_device_of
        self.erase = estimation.log.erase
        self.names = names
        self.flops = 0
        """Floating-point operations so far, by the formulas of ``torch.utils.flop_counter``."""
        self._changes = changes
        self._hooks: dict[str, list[Any]] = defaultdict(list)
        self._roots: list[Any] = []
        """Weak references to the roots whose ``begin`` hooks were called."""
        self._depth = 0
        """Number of modules whose call is under way."""
        self._backwards = 0
        """Number of backward passes that are under way, one inside the other."""

    def on(self, **hooks: Callable[..., Any]) -> None:
        """Add hooks."""
        for name, hook in hooks.items():
            self._hooks[name].append(hook)

    def at_end(self, work: Callable[[], Any]) -> None:
        """Call ``work`` when the code has run or failed."""
        self._undo.callback(work)

    def _call_hooks(self, name: str, *args: Any) -> None:
        """Call the hooks of a name."""
        for hook in self._hooks[name]:
            hook(*args)

    def __enter__(self) -> None:
        self._undo = ExitStack()
        for change in self._changes:
            change.apply(self)
        self.wrap(torch.nn.Module, "__call__", self._call_module)
        self.wrap(torch.autograd, "_engine_run_backward", self._run_backward)
        if self._hooks["scaled"]:
            self.wrap(torch.amp.GradScaler, "scale", self._scale_losses)
        if self._hooks["loss"]:
            for name in _loss_functions():
                self.wrap(functional, name, self._call_loss_function)
        self._undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._undo.callback(register_optimizer_step_post_hook(self._after_step).remove)

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        self._roots, self.names = [], {}  # fake tensors must not outlive the run
        self._hooks.clear()

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Call ``around`` in place of a function during the run.

        Args:
            owner: the module or class that has the function.
            name: the function's name.
            around: gets the original function, and the arguments of the call.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        self._undo.enter_context(patch.object(owner, name, call))

    def name_of(self, wanted: Any) -> str:
        """Return an expression that leads from a name of the code to an object, such as
        ``trainer.model``; "" if there is none.

        It follows attributes and keys, twice at most.
        """
        # Not self.names.items(): each look-up in this namespace copies another value for the run.
        items = dict.items(self.names)
        level = [(name, value) for name, value in items if not name.startswith("_")]
        for _ in range(3):  # the names themselves, and two steps from them
            for name, value in level:
                if value is wanted:
                    return name
            level = _next_level(level)
        return ""

    def _call_module(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a module, and the hooks before and after its forward pass."""
        is_recomputed = self._backwards > 0  # by a checkpoint, in backward
        is_followed_thread = torch._C._len_torch_dispatch_stack() > 0
        if is_recomputed or not is_followed_thread:
            return original(module, *args, **kwargs)
        is_root = not self._depth
        if is_root:
            self._begin_root(module)
            for hook in self._hooks["call"]:
                args, kwargs = hook(module, args, kwargs)
        marks = [enter(module, args, kwargs) for enter in self._hooks["enter"]]
        self._depth += 1
        try:
            result = original(module, *args, **kwargs)
        finally:
            self._depth -= 1
        for leave, mark in zip(self._hooks["leave"], marks, strict=True):
            leave(module, args, kwargs, mark)
        self._call_hooks("result_of", module, result)
        if is_root:
            self._call_hooks("result")
        return result

    def _begin_root(self, module: Any) -> None:
        """Call the ``begin`` hooks, if the code calls a root with parameters for the first time."""
        if any(reference() is module for reference in self._roots):
            return
        if next(module.parameters(), None) is not None:
            self._roots.append(weakref.ref(module))
            self._call_hooks("begin", len(self._roots) - 1, module)

    def _call_loss_function(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a loss function of torch with the target that the hooks return."""
        predicted = args[0] if args else kwargs.get("input")
        target = args[1] if len(args) > 1 else kwargs.get("target")
        if is_tensor(predicted) and is_tensor(target):
            for hook in self._hooks["loss"]:
                target = hook(predicted, target)
            if len(args) > 1:
                args = (predicted, target, *args[2:])
            else:
                kwargs["target"] = target
        return original(*args, **kwargs)

    def _run_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass; the outermost one calls the hooks first."""
        if not self._backwards:
            # ``torch.autograd.grad`` does not accumulate: it trains no parameters
            tensors = args[0] if kwargs.get("accumulate_grad") else ()
            self._call_hooks("backward", tensors)
        self._backwards += 1
        try:
            return original(*args, **kwargs)
        finally:
            self._backwards -= 1

    def _scale_losses(self, original: Any, scaler: Any, losses: Any) -> Any:
        """Scale losses with a GradScaler, and show the results to the hooks."""
        result = original(scaler, losses)
        self._call_hooks("scaled", result)
        return result

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Return the arguments for an optimizer's step, as the hooks have changed them."""
        # Adapters come before the optimizer that steps them.
        for hook in reversed(self._hooks["step"]):
            args, kwargs = hook(optimizer, args, kwargs)
        return args, kwargs

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        """Tell the hooks that an optimizer has made its step."""
        self._call_hooks("stepped", optimizer)

    def observe(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count the floating-point operations of an operation, and call the hooks.

        The estimation calls this after each operation.
        """
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        if not self._backwards:
            self._call_hooks("operation", func, args, kwargs)


def _loss_functions() -> list[str]:
    """Return the names of torch's loss functions."""
    endings = ("_loss", "cross_entropy", "_with_logits", "kl_div")
    names = [name for name in vars(functional) if name.endswith(endings)]
    return [name for name in names if not name.startswith("_")]


def _next_level(level: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the objects one step inside named objects, each with its code: ``model.layers`` and
    ``model.head`` for ``model``.
    """
    inner_level: list[tuple[str, Any]] = []
    for name, value in level:
        inner_level += [(f"{name}{step}", inner) for step, inner in _objects_inside(value)]
    return inner_level


def _objects_inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects in an object's attributes, or in a dict, with the code that follows a name
    for it.
    """
    if type(value) is dict:
        for key, inner in value.items():
            if is_exactly(key, str, int):
                yield f"[{key!r}]", inner
        return
    if is_instance(value, types.ModuleType) or is_instance(value, type):
        return
    attributes = dict(instance_dict(value) or {})
    if is_instance(value, torch.nn.Module):
        attributes |= attributes.get("_modules") or {}
    for name, inner in attributes.items():
        yield code_of_path(name), inner


def code_of_path(path: str) -> str:
    """Return the code that follows a module's name for one inside it, such as ``.layers[2]``."""
    names = path.split(".") if path else []
    if not all(name.isdigit() or name.isidentifier() for name in names):
        return f".get_submodule({path!r})"
    return "".join(f"[{name}]" if name.isdigit() else f".{name}" for name in names)


def is_tensor(value: Any) -> bool:
    """Return True for a tensor with dimensions."""
    return is_instance(value, torch.Tensor) and value.dim() > 0
