"""Observes the code's first run: its models, their data, and the blocks whose forward pass can be
run twice.
"""

from __future__ import annotations

import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ipygpumem.errors import EstimateError
from ipygpumem.estimating.effects import closure_of, named_by
from ipygpumem.estimating.transients import operator_name
from ipygpumem.extras.fit.applying import Run, at, is_tensor
from ipygpumem.heap.arrays import is_of_library
from ipygpumem.introspect import (
    class_dict,
    instance_dict,
    is_atom,
    is_exactly,
    is_instance,
    is_users,
    name_of,
)

_DEEPEST = 3
"""Depth to which the attributes of a block's modules are compared."""
_RANDOM = {"random", "secrets", "uuid"}
HF_WAYS = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
"""Methods of transformers, the newer first."""
_PLAIN = (torch.dtype, torch.device, torch.Size, slice)


class Blocks:
    """Modules of one type that are repeated in a list; ``reason``: why they must not run twice, or
    empty.
    """

    def __init__(self, kind: type) -> None:
        self.name = name_of(kind)  # the type would keep the cell's names alive
        self.reason = ""
        self.paths: list[str] = []
        self.code: dict[str, None] = {}
        """Code for the whole lists that consist of them, and for the remaining ones."""

    def refuse(self, reason: str) -> None:
        """Set the reason, unless there is one."""
        self.reason = self.reason or reason


class Observed:
    """Findings of the first run.

    ``batch`` is the name that the user gave for a batch or its size, ``taken`` has the names of the
    notebook.
    """

    def __init__(self, batch: str | None, taken: Iterable[str]) -> None:
        self._batch, self._taken = batch, set(taken)
        self.rows = 0
        """Size of a batch: the value of that name, or the first dimension of the first tensor that
        a root gets.
        """
        self.is_size = False
        """True if the user's name is that of the size, not of a tensor."""
        self.given: dict[str, int] = {}
        """Names of the tensors with these rows that the roots and loss functions got, and their
        first dimensions.
        """
        self.root, self.name, self.what, self.kind, self.most = -1, "", "model", "cuda", 0
        """Number, name and type of the root with the most parameters, their device's type and
        number.
        """
        self.trains = self.casts = self.has_float32 = self.normalizes = self.is_adapted = (
            self.is_checkpointed
        ) = False
        self.draws = False
        """True if a model draws random numbers."""
        self.hf_path: str | None = None
        self.hf_way = ""
        """Path of the transformers model in that root, and its method that enables checkpoints."""
        self.optimizers: dict[str, str] = {}
        """Types of the optimizers by name."""
        self.blocks: dict[str, Blocks] = {}
        self.last = ""
        """Path of the layer that ran last."""

    def apply(self, run: Run) -> None:  # noqa: C901  # one small function after another
        """Add the hooks of the first run; they hold references that are weak, so that it frees what
        the code frees.
        """
        roots: dict[int, Any] = {}
        watched: dict[int, Blocks] = {}
        inside: list[Blocks] = []
        running: list[None] = []
        last: list[Any] = []
        own: set[int] = set()
        stepped: set[int] = set()

        def changed(value: Any) -> Any:
            self.is_size = type(value) is int
            if not (self.is_size and value > 0) and not (is_tensor(value) and len(value)):
                raise EstimateError(
                    f"--batch {self._batch}: it must be a whole number from 1 on, or a tensor "
                    f"whose first dimension is "
                    "the batch (for a DataLoader leave --batch out)"
                )
            self.rows = value if self.is_size else len(value)
            return value

        def given(tensor: Any) -> Any:
            if (
                self.rows
                and len(tensor) % self.rows == 0
                and not self.trains
                and "" not in self.given
            ):
                self.given[run.name_of(tensor)] = len(tensor)
            return tensor

        def begin(number: int, root: Any) -> None:
            roots[number] = weakref.ref(root)
            parameters = list(root.parameters())
            self.has_float32 |= any(one.dtype is torch.float32 for one in parameters)
            self.kind = torch.device(run.place_of(parameters[0])).type
            if (count := sum(one.numel() for one in parameters)) > self.most:
                self.most, self.root = count, number
                self.name, self.what = run.name_of(root), name_of(type(root))
                self._see_model(root, watched)

        def call(root: Any, args: Any, kwargs: Any) -> Any:
            for tensor in tensors(args, kwargs):
                self.rows = self.rows or len(tensor) * (not self._batch)
                if len(tensor) == self.rows:
                    given(tensor)
            self.casts |= torch.is_autocast_enabled(self.kind)
            return args, kwargs

        def enter(module: Any, args: Any, kwargs: Any) -> Any:
            running.append(None)
            blocks = watched.get(id(module))
            if blocks is None or not torch.is_grad_enabled():
                return None
            inside.append(blocks)
            if not _is_plain((args, kwargs)):
                blocks.refuse("they get objects, which a second run could find changed")
            return _generators(), _state(module, args, kwargs)

        def leave(module: Any, args: Any, kwargs: Any, mark: Any) -> None:
            running.pop()
            if next(module.children(), None) is None and any(
                one.dim() > 1 for one in module.parameters()
            ):
                last[:] = [weakref.ref(module)]
            if mark is not None:
                blocks, (drawn, state) = inside.pop(), mark
                if drawn != _generators():
                    blocks.refuse("they draw random numbers that torch does not restore")
                if state != _state(module, args, kwargs):
                    blocks.refuse("they change attributes, buffers or inputs")

        def operation(func: Any, args: Any, kwargs: Any) -> None:
            name, why = operator_name(func), ""
            self.draws |= bool(running) and any(
                word in name for word in ("dropout", "bernoulli", "rand")
            )
            if kwargs.get("generator") is not None:
                why = "they draw from a random generator of their own"
            elif (
                name.endswith(("batch_norm", "batch_norm_legit"))
                and args[3] is not None
                and args[5]
            ):
                why, self.normalizes = "they update running statistics (BatchNorm)", True
            for blocks in inside if why else ():
                blocks.refuse(why)

        def backward() -> None:
            self.trains = True
            root = roots[self.root]() if self.root in roots else None
            modules = () if root is None else root.named_modules()
            named = [] if root is None else list(root.named_parameters(remove_duplicate=False))
            for path, module in modules:
                if last and module is last[0]():
                    own.clear()
                    own.update(map(id, module.parameters()))
                    is_tied = any(
                        id(one) in own
                        for at, one in named
                        if not at.startswith(f"{path}.".lstrip("."))
                    )
                    self.last = "" if is_tied else path  # tied weights are the embedding's, too

        def step(optimizer: Any) -> None:
            self.optimizers.setdefault(run.name_of(optimizer), name_of(type(optimizer)))
            stepped.update(id(one) for group in optimizer.param_groups for one in group["params"])

        def end() -> None:
            self._taken.update(dict.keys(run.names))
            if self.optimizers and not own <= stepped:  # no optimizer would train the last layer
                self.last = ""

        if self._batch:
            if self._batch in run.names:
                changed(run.names[self._batch])
            run.names.changed[self._batch] = changed  # type: ignore[attr-defined]  # a Namespace
        run.on(
            begin=begin, call=call, enter=enter, leave=leave, operation=operation, backward=backward
        )
        run.on(loss=lambda _, target: target if running else given(target))  # else a model got it
        run.on(stepped=step)
        run.at_end(end)

    def code(self, line: str, *imports: str, owners: Iterable[str]) -> str:
        """Return a line with the imports that it needs, or as a comment if no name leads to one of
        its ``owners``.
        """
        lines = [*(f"import {module}" for module in imports if module not in self._taken), line]
        return "\n".join(lines) if all(owners) else f"# {line}"

    def free(self, name: str) -> str:
        """Return a name that the notebook and the code do not use."""
        return name if name not in self._taken else self.free(f"{name}_")

    def of_root(self, path: str = "") -> str:
        """Return the code for the root, or for a module inside it; comments call a root without a
        name by its type.
        """
        return (self.name or self.what) + at(path)

    def _see_model(self, root: Any, watched: dict[int, Blocks]) -> None:
        """Note the parts of a model, and watch its blocks."""
        base: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
        named = list(root.named_modules()) if base is not None else []
        found = (
            (path, one)
            for path, one in named
            if is_instance(one, base) and one.supports_gradient_checkpointing
        )
        self.hf_path, model = next(found, (None, None))
        self.hf_way = next((way for way in HF_WAYS if hasattr(model, way)), "")
        self.is_checkpointed = any(vars(one).get("gradient_checkpointing") for _, one in named)
        self.is_adapted = any("lora_" in path for path, _ in named)
        self.blocks = {}
        watched.clear()
        for path, container in root.named_modules():
            is_list = is_instance(container, torch.nn.ModuleList) or is_instance(
                container, torch.nn.Sequential
            )
            is_hfs = self.hf_path is not None and f"{path}.".startswith(
                f"{self.hf_path}.".lstrip(".")
            )
            # else its own way knows them
            members = dict(container.named_children()) if is_list and not is_hfs else {}
            kinds = {name: type(module) for name, module in members.items()}
            for name, module in members.items():
                twins = sum(kind is kinds[name] for kind in kinds.values())
                is_part = (
                    next(module.children(), None) is None or next(module.parameters(), None) is None
                )
                if (
                    twins > 1
                    and not is_part
                    and not is_exactly(module, torch.nn.Sequential, torch.nn.ModuleList)
                ):
                    blocks = watched[id(module)] = self.blocks.setdefault(
                        name_of(kinds[name]), Blocks(kinds[name])
                    )
                    blocks.paths.append(f"{path}.{name}".lstrip("."))
                    is_whole = twins == len(kinds)
                    blocks.code[
                        "*" * is_whole + self.of_root(path if is_whole else blocks.paths[-1])
                    ] = None
                    for kind in {type(part) for part in module.modules()}:
                        blocks.refuse(_hidden_randomness(kind))


def tensors(args: Any, kwargs: Any) -> Iterator[Any]:
    """Yield the tensors with dimensions among arguments, and in arguments that are dicts."""
    for value in (*args, *kwargs.values()):
        yield from filter(is_tensor, value.values() if type(value) is dict else (value,))


# -- blocks that may run twice ------------------------------------------------------------------


def _hidden_randomness(kind: type) -> str:
    """Return the reason if the code of a user's class names a random generator; empty if it does
    not.
    """
    functions = [
        one
        for base in type.mro(kind)
        for one in class_dict(base).values()
        if type(one) is types.FunctionType
    ]
    for function in functions:
        space = function.__globals__
        # of a copied namespace
        spaces = (
            closure_of(function),
            space,
            getattr(space, "_original", {}),
        )
        users = is_users(function.__code__.co_filename)
        for names, value, module, owner in named_by(function.__code__, spaces) if users else ():
            if (
                _is_generator(value)
                or _is_generator(owner)
                or {names[0], *module.split(".")} & _RANDOM
            ):
                return f"their code names {'.'.join(names)}"
    return ""


def _is_generator(value: Any) -> bool:
    is_numpys = any(
        is_of_library(value, "numpy.random", name) for name in ("Generator", "RandomState")
    )
    return is_numpys or is_instance(value, random.Random) or is_instance(value, torch.Generator)


def _generators() -> Any:
    """Return the states of Python's and NumPy's global generators."""
    numpys: Any = getattr(sys.modules.get("numpy"), "random", None)
    return random.getstate(), None if numpys is None else str(
        numpys.get_state(legacy=False)["state"]
    )


def _state(module: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the state that a run of a module could change: attributes of its modules, versions of
    tensors.
    """
    with torch._C.DisableTorchFunction():
        spaces = ({**dict(enumerate(args)), **kwargs}, *map(vars, module.modules()))
        return [one for space in spaces for value in space.values() for one in _versions(value)]


def _versions(value: Any, depth: int = 0) -> Iterator[Any]:
    yield value if is_atom(value) else id(value)
    inner: Any = ()
    if is_instance(value, torch.Tensor):
        yield value._version
    elif type(value) is dict:
        inner = [*value, *value.values()]
    elif is_exactly(value, list, tuple, set, deque):
        inner = list(value)
    elif not (
        is_atom(value)
        or is_instance(value, torch.nn.Module)
        or is_instance(value, type)
        or callable(value)
    ):
        inner = (instance_dict(value) or {}).values()
    for item in inner if depth < _DEEPEST else ():
        yield from _versions(item, depth + 1)


def _is_plain(value: Any) -> bool:
    """Return True for tensors and plain values, also in containers."""
    if is_exactly(value, dict, list, tuple):
        return all(map(_is_plain, value.values() if type(value) is dict else value))
    return is_atom(value) or is_instance(value, torch.Tensor) or is_exactly(value, *_PLAIN)
