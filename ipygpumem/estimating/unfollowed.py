"""Notes code whose memory an estimate does not follow exactly, such as compiled code.

Such an estimate fits perhaps, never for certain.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad

from ipygpumem.estimating.effects import closure_of
from ipygpumem.estimating.records import Note
from ipygpumem.estimating.user_lines import user_line
from ipygpumem.introspect import instance_dict, is_exactly, is_instance

COMPILER = "torch.compile"
_SCRIPTS = "torch.jit"
_COUNTS = "torch.bincount"
_ONE_HOT = "torch.nn.functional.one_hot"
_NOTE_ON_COMPILED_CODE = f"{COMPILER}: the figures are those of eager code"
_TRANSFORMS = (
    ("torch._functorch.vmap", "_vmap_increment_nesting", "torch.vmap"),
    ("torch._C", "_vmapmode_increment_nesting", "torch.vmap"),
    ("torch._functorch.eager_transforms", "_func_increment_nesting", "torch.func.functionalize"),
    ("torch._functorch.eager_transforms", "_jvp_increment_nesting", "forward-mode gradients"),
    (forward_ad.__name__, "enter_dual_level", "forward-mode gradients"),
)
"""Functions that torch calls when a transform of functions begins: module, name, and the transform.

``torch.func.grad`` is not among them: on simulated cards its estimates are exact.
"""
_VARIABLES_THAT_DISABLE = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
_EAGER_BACKEND = "eager"
"""Backend of torch.compile that runs the operations of the code one by one."""


class Unfollowed:
    """The kinds of code that ran and that an estimate does not follow exactly."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._kinds: dict[str, None] = {}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds in the order of their first run, such as ``torch.compile``."""
        return tuple(self._kinds)

    def note_compiled(self, *, is_eager: bool) -> None:
        """Note compiled code.

        ``is_eager``: it runs the operations of eager code, so that its memory is followed.
        """
        self._note(_NOTE_ON_COMPILED_CODE)
        if not is_eager:
            self._kinds[COMPILER] = None

    def note_script(self) -> None:
        """Note a function or module of ``torch.jit``, which fuses operations on a card."""
        self._kinds[_SCRIPTS] = None
        self._note(f"{_SCRIPTS}: the figures are those of code whose operations are not fused")

    def call_script_maker(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that makes code of ``torch.jit``, such as ``torch.jit.trace``."""
        self.note_script()
        return original(*args, **kwargs)

    def note_counting_line(self, line: str) -> None:
        """Note a line that counts values; the largest value is unknown, and has no bound."""
        self._kinds[_COUNTS] = None
        self._note(
            f"{line}: {_COUNTS} is assumed to return minlength numbers, or else one for each "
            f"value; --assume says how many, as a share of the values"
        )

    def note_one_hot_line(self, line: str, count: int) -> None:
        """Note a line whose one-hot vectors have a guessed length, ``count``: one more than the
        largest label.
        """
        self._kinds[_ONE_HOT] = None
        self._note(
            f"{line}: {_ONE_HOT} without num_classes is assumed to find {count} classes; "
            f"num_classes= makes it exact"
        )

    def transform_wrappers(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Yield the module and the name of each function with which a transform begins, and a
        function to call instead, which notes the transform.
        """
        for module_name, name, kind in _TRANSFORMS:
            module = sys.modules.get(module_name)
            yield module, name, self._wrapper_that_notes(kind)

    def _wrapper_that_notes(self, kind: str) -> Callable[..., Any]:
        """Return a function that notes a kind of code, and then calls its first argument, the
        original function.
        """

        def call_and_note(original: Any, *args: Any, **kwargs: Any) -> Any:
            self._kinds[kind] = None
            line = user_line()
            self._note(f"{line}: {kind} may copy arguments, which is not counted")
            return original(*args, **kwargs)

        return call_and_note


def is_script(value: Any) -> bool:
    """Return True for a function or module of ``torch.jit``."""
    if is_instance(value, torch.jit.ScriptModule):
        return True
    return is_exactly(value, torch.jit.ScriptFunction)


def is_eager(options: Any) -> bool:
    """Return True if the options of a call of ``torch.compile`` leave the code eager."""
    if options.get("disable") or _is_disabled():
        return True
    return bool(options.get("backend") == _EAGER_BACKEND)


def runs_eagerly(compiled: Any) -> bool:
    """Return True if compiled code runs the operations of eager code.

    Args:
        compiled: a function or a module that ``torch.compile`` made.
    """
    if _is_disabled():
        return True
    attributes = instance_dict(compiled) or {}
    variables = closure_of(compiled)
    values = [*attributes.values(), *variables.values()]
    return any(map(_has_eager_backend, values))


def _has_eager_backend(value: Any) -> bool:
    """Return True for a context of torch's compiler with the backend ``eager``."""
    if type(value).__module__ != "torch._dynamo.eval_frame":
        return False
    backend: Any = getattr(value, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    # torch wraps a backend that it knows by name.
    return getattr(backend, "compiler_name", "") == _EAGER_BACKEND


def _is_disabled() -> bool:
    """Return True if the user has switched torch's compiler off."""
    if any(os.environ.get(name) == "1" for name in _VARIABLES_THAT_DISABLE):
        return True
    compiler = sys.modules.get("torch._dynamo")
    config = getattr(compiler, "config", None)
    return bool(getattr(config, "disable", False))
