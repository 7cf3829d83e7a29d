"""Observes the code's first run: its models, their data, and the blocks whose forward pass can be
run twice.
"""

from __future__ import annotations

import random
import sys
import types
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ipygpumem.errors import EstimateError
from ipygpumem.estimating.effects import closure_of, names_in
from ipygpumem.estimating.memory.storages import tensors_in
from ipygpumem.estimating.operators.transients import operator_name
from ipygpumem.extras.fit.applying import ChangedRun, code_of_path, is_tensor
from ipygpumem.extras.fit.reduction import Loss, LossGraph, sequence_number
from ipygpumem.heap.kinds.arrays import is_of_library
from ipygpumem.introspect import (
    class_dict,
    instance_dict,
    is_atom,
    is_exactly,
    is_instance,
    is_users,
    name_of,
)

_COMPARED_DEPTH = 3
"""Depth to which the attributes of a block's modules are compared."""
_RANDOM_MODULES = {"random", "secrets", "uuid"}
"""Modules whose functions return other values in a second run."""
_CHECKPOINT_METHODS = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
"""Methods of transformers, the newer first."""
_PLAIN_TYPES = (torch.dtype, torch.device, torch.Size, slice)
"""Types of values that no code can change."""


class RepeatedModules:
    """Modules of one type that are repeated in a list, such as a transformer's blocks.

    They may be checkpointed, which runs them again in the backward pass, unless a second run could
    have other results: then they are refused, with a reason.
    """

    def __init__(self, kind: type) -> None:
        self.name = name_of(kind)  # the type would keep the cell's names alive
        self._reasons: dict[str, None] = {}
        self.paths: list[str] = []
        self.code: dict[str, None] = {}
        """Code that lists them: ``*model.layers`` for a list that has nothing else, and
        ``model.mixed[2]`` for each of them in another list. The values mean nothing."""

    @property
    def reason(self) -> str:
        """All reasons why they must not run twice; empty if they may."""
        return ", and ".join(self._reasons)

    def refuse(self, reason: str) -> None:
        """Add a reason, unless it is empty."""
        if reason:
            self._reasons[reason] = None


@dataclass
class ModelBatch:
    """The rows that the code's models get at once."""

    name: str | None
    """Name that the user gave for the batch or its size."""
    rows: int = 0
    """Size of a batch: the value of that name, or the first dimension of the first tensor that a
    root gets.
    """
    is_size: bool = False
    """True if the user's name is that of the size, not of a tensor."""
    data: dict[str, int] = field(default_factory=dict)
    """Names of the tensors with these rows that the roots and loss functions got, and their first
    dimensions.
    """


@dataclass
class LargestModel:
    """The root with the most parameters."""

    number: int = -1
    """Its number among the roots."""
    name: str = ""
    """A name of the code that leads to it; empty if there is none."""
    type_name: str = "model"
    device_type: str = "cuda"
    """The type of its parameters' device."""
    parameters: int = 0
    """Number of its parameters."""
    last_layer: str = ""
    """Path of the layer that ran last."""
    transformers_path: str | None = None
    """Path of the transformers model in it."""
    checkpoint_method: str = ""
    """Method of the transformers model that enables checkpoints."""
    is_checkpointed: bool = False
    is_adapted: bool = False
    """True if it has LoRA adapters."""

    def code(self, path: str = "") -> str:
        """Return the code for the model, or for a module inside it; comments call a model without a
        name by its type.
        """
        return (self.name or self.type_name) + code_of_path(path)


class Observed:
    """Findings of the first, unchanged run, from which the changes to try are chosen.

    Args:
        batch: the name that the user gave for a batch or its size; None without one.
        taken: the names of the notebook, which the code of a change must not bind.
    """

    def __init__(self, batch: str | None, taken: Iterable[str]) -> None:
        self.batch = ModelBatch(batch)
        self.model = LargestModel()
        self.taken = set(taken)
        self.trains = False
        """True if the code runs a backward pass."""
        self.casts = False
        """True if a model runs under autocast."""
        self._bytes_by_dtype = Counter[torch.dtype]()
        """Sizes of the models' parameters."""
        self.normalizes = False
        """True if a model updates running statistics."""
        self.draws = False
        """True if a model draws random numbers."""
        self.loss = Loss()
        """Kinds of the losses: means or sums over the rows of a batch."""
        self.optimizers: dict[str, str] = {}
        """Types of the optimizers by name."""
        self.blocks: dict[str, RepeatedModules] = {}
        """Modules of the largest model that are repeated in lists, by the name of their type."""

    @property
    def has_float32(self) -> bool:
        """True if a model has parameters in float32."""
        return torch.float32 in self._bytes_by_dtype

    @property
    def float32_share(self) -> float:
        """The share of the parameters' bytes that are in float32."""
        total_bytes = self._bytes_by_dtype.total()
        return self._bytes_by_dtype[torch.float32] / total_bytes if total_bytes else 0.0

    def note_parameters(self, parameters: Iterable[Any]) -> None:
        """Note the sizes of a model's parameters."""
        for parameter in parameters:
            self._bytes_by_dtype[parameter.dtype] += parameter.numel() * parameter.itemsize

    def apply(self, run: ChangedRun) -> None:
        """Observe a run: this is the ``apply`` of a change that changes nothing."""
        _FirstRunHooks(self, run).install()

    def code(self, line: str, *imports: str, owners: Iterable[str]) -> str:
        """Return a line of a change as code to paste, below the imports that the notebook lacks.

        Args:
            line: the line.
            imports: modules that it needs.
            owners: the names of the objects that it changes. If one of them is empty, the line
                becomes a comment, because it names that object only by its type.
        """
        if not all(owners):
            return f"# {line}"
        missing = [f"import {module}" for module in imports if module not in self.taken]
        return "\n".join([*missing, line])

    def free_name(self, name: str) -> str:
        """Return a name that the notebook and the code do not use."""
        while name in self.taken:
            name += "_"
        return name


class _FirstRunHooks:
    """Hooks of the first run. Their references are weak, so that it frees what the code frees."""

    def __init__(self, findings: Observed, run: ChangedRun) -> None:
        self._findings = findings
        self._run = run
        self._roots: dict[int, weakref.ref[Any]] = {}
        """The models that the code calls, by their numbers."""
        self._blocks_by_module: dict[int, RepeatedModules] = {}
        """Blocks of the largest model, by the identities of their modules."""
        self._running_blocks: list[RepeatedModules] = []
        """Blocks whose forward pass is under way, the innermost last."""
        self._depth = 0
        """Number of modules whose forward pass is under way."""
        self._last_layer: weakref.ref[Any] | None = None
        """The layer with a matrix that ran last."""
        self._last_parameters: set[int] = set()
        """Identities of its parameters at the last backward pass."""
        self._stepped: set[int] = set()
        """Identities of the parameters that optimizers have updated."""
        self._layer_nodes: set[int] = set()
        """Sequence numbers of the graph's nodes that made the results of layers."""
        self._scaling_nodes: set[int] = set()
        """Sequence numbers of the nodes with which a GradScaler multiplied losses."""

    def install(self) -> None:
        """Add the hooks."""
        run, batch = self._run, self._findings.batch.name
        if batch:
            if batch in run.names:
                self._note_batch(run.names[batch])
            run.names.value_changes[batch] = self._note_batch  # type: ignore[attr-defined]
        run.on(
            begin=self._note_root,
            call=self._note_arguments,
            enter=self._state_before_block,
            leave=self._compare_state_after_block,
            result_of=self._note_result_nodes,
            scaled=self._note_scaling_nodes,
            operation=self._refuse_unrepeatable,
            backward=self._note_backward,
            loss=self._note_targets,
            stepped=self._note_step,
        )
        run.at_end(self._finish)

    def _note_batch(self, value: Any) -> Any:
        """Note the size of the batch when the code binds the user's name for it; return the value.

        Raises:
            EstimateError: the value is neither a size nor a tensor with rows.
        """
        batch = self._findings.batch
        batch.is_size = type(value) is int
        if batch.is_size and value > 0:
            batch.rows = value
        elif is_tensor(value) and len(value):
            batch.rows = len(value)
        else:
            raise EstimateError(
                f"--batch {batch.name}: it must be a whole number from 1 on, or a tensor "
                "whose first dimension is the batch (for a DataLoader leave --batch out)"
            )
        return value

    def _note_data(self, tensor: Any) -> None:
        """Note a tensor that holds whole batches, before the first backward pass."""
        batch = self._findings.batch
        # After a tensor without a name, the line to paste cannot name all of them anyway.
        is_complete = self._findings.trains or "" in batch.data
        if batch.rows and len(tensor) % batch.rows == 0 and not is_complete:
            batch.data[self._run.name_of(tensor)] = len(tensor)

    def _note_root(self, number: int, root: Any) -> None:
        """Note a root, and its parts if it is the largest so far."""
        findings, model = self._findings, self._findings.model
        self._roots[number] = weakref.ref(root)
        parameters = list(root.parameters())
        findings.note_parameters(parameters)
        model.device_type = torch.device(self._run.assumed_device_of(parameters[0])).type
        count = sum(parameter.numel() for parameter in parameters)
        if count > model.parameters:
            model.parameters, model.number = count, number
            model.name = self._run.name_of(root)
            model.type_name = name_of(type(root))
            self._blocks_by_module = _note_parts(findings, root)

    def _note_arguments(self, root: Any, args: Any, kwargs: Any) -> Any:
        """Note the data that a root gets; return its arguments unchanged."""
        batch = self._findings.batch
        for tensor in tensors(args, kwargs):
            if not batch.rows and not batch.name:
                batch.rows = len(tensor)
            if len(tensor) == batch.rows:
                self._note_data(tensor)
        self._findings.casts |= torch.is_autocast_enabled(self._findings.model.device_type)
        return args, kwargs

    def _note_targets(self, predicted: Any, target: Any) -> Any:
        """Note the targets of a loss function that the code calls itself; return them unchanged.

        The targets of a loss that a model computes were noted with its data.
        """
        if not self._depth:
            self._note_data(target)
        return target

    def _state_before_block(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Return the state of random generators and of a block before its forward pass; None for
        any other module.
        """
        self._depth += 1
        blocks = self._blocks_by_module.get(id(module))
        if blocks is None or not torch.is_grad_enabled():
            return None
        self._running_blocks.append(blocks)
        if not _is_plain((args, kwargs)):
            blocks.refuse("they get objects, which a second run could find changed")
        return _generator_states(), _changeable_state(module, args, kwargs)

    def _compare_state_after_block(self, module: Any, args: Any, kwargs: Any, mark: Any) -> None:
        """Refuse to run a block twice if its forward pass has changed its state, ``mark``.

        Also note the layer that ran last.
        """
        self._depth -= 1
        is_layer = next(module.children(), None) is None
        if is_layer and any(parameter.dim() > 1 for parameter in module.parameters()):
            self._last_layer = weakref.ref(module)
        if mark is None:
            return
        blocks = self._running_blocks.pop()
        generators, state = mark
        if generators != _generator_states():
            blocks.refuse("they draw random numbers that torch does not restore")
        if state != _changeable_state(module, args, kwargs):
            blocks.refuse("they change attributes, buffers or inputs")

    def _refuse_unrepeatable(self, func: Any, args: Any, kwargs: Any) -> None:
        """Refuse to run the running blocks twice if an operation in them would have other results
        the second time: one with a random generator of its own, or a BatchNorm in training.
        """
        name = operator_name(func)
        if self._depth and any(word in name for word in ("dropout", "bernoulli", "rand")):
            self._findings.draws = True
        reason = ""
        if kwargs.get("generator") is not None:
            reason = "they draw from a random generator of their own"
        elif name.endswith(("batch_norm", "batch_norm_legit")):
            running_mean, is_training = args[3], args[5]
            if running_mean is not None and is_training:
                self._findings.normalizes = True
                reason = "they update running statistics (BatchNorm)"
        if reason:
            for blocks in self._running_blocks:
                blocks.refuse(reason)

    def _note_result_nodes(self, module: Any, result: Any) -> None:
        """Note the autograd nodes that made a layer's result, if it has the rows of a batch."""
        rows = self._findings.batch.rows
        if not rows or next(module.parameters(), None) is None:
            return
        for tensor in filter(is_tensor, tensors_in(result)):
            number = sequence_number(tensor)
            if number is not None and tensor.numel() % rows == 0:
                self._layer_nodes.add(number)

    def _note_scaling_nodes(self, losses: Any) -> None:
        """Note the nodes with which a GradScaler has multiplied losses."""
        for loss in tensors_in(losses):
            number = sequence_number(loss)
            if number is not None:
                self._scaling_nodes.add(number)

    def _note_losses(self, tensors: Any) -> None:
        """Note for each loss of a backward pass if it is a mean or a sum over the rows."""
        batch = self._findings.batch
        if not batch.rows:
            return
        graph = LossGraph(
            rows=batch.rows,
            # the first dimension of a named tensor; a named size may be any dimension
            has_leading_rows=not batch.is_size,
            layers=self._layer_nodes,
            constants=self._scaling_nodes,
        )
        for tensor in tensors:
            if is_instance(tensor, torch.Tensor):
                graph.record_kind(self._findings.loss, tensor)

    def _note_backward(self, tensors: Any) -> None:
        """Note the losses, from which a backward pass starts, and the path of the layer that ran
        last, unless it shares its weights with another layer.
        """
        self._note_losses(tensors)
        self._findings.trains = True
        model = self._findings.model
        reference = self._roots.get(model.number)
        root = None if reference is None else reference()
        layer = None if self._last_layer is None else self._last_layer()
        if root is None or layer is None:
            return
        for path, module in root.named_modules():
            if module is layer:
                self._last_parameters = set(map(id, module.parameters()))
                is_tied = self._has_parameters_outside(root, path)
                model.last_layer = "" if is_tied else path

    def _has_parameters_outside(self, root: Any, path: str) -> bool:
        """Return True if parameters of the last layer, which is at ``path``, also belong to another
        layer: an embedding's weights are often those of the last layer, too.
        """
        prefix = f"{path}.".lstrip(".")
        for path, parameter in root.named_parameters(remove_duplicate=False):
            if id(parameter) in self._last_parameters and not path.startswith(prefix):
                return True
        return False

    def _note_step(self, optimizer: Any) -> None:
        """Note an optimizer, and the parameters that it has updated."""
        name = self._run.name_of(optimizer)
        self._findings.optimizers.setdefault(name, name_of(type(optimizer)))
        for group in optimizer.param_groups:
            self._stepped.update(map(id, group["params"]))

    def _finish(self) -> None:
        """Note the names at the code's end; forget the last layer if no optimizer trains it."""
        findings = self._findings
        findings.taken.update(dict.keys(self._run.names))
        if findings.optimizers and not self._last_parameters <= self._stepped:
            findings.model.last_layer = ""  # no optimizer would train the last layer


def _note_parts(findings: Observed, root: Any) -> dict[int, RepeatedModules]:
    """Note the transformers model and the blocks of a model, and return the blocks by the
    identities of their modules.
    """
    _find_transformers_model(findings.model, root)
    findings.blocks = {}
    blocks_by_module: dict[int, RepeatedModules] = {}
    for path, container in root.named_modules():
        is_followed = not _is_within(path, findings.model.transformers_path)
        if _is_list(container) and is_followed:
            blocks_by_module |= _note_repeated_modules(findings, path, container)
    return blocks_by_module


def _find_transformers_model(model: LargestModel, root: Any) -> None:
    """Note the first transformers model in a root, and if it has checkpoints and adapters."""
    model.transformers_path, model.checkpoint_method = None, ""
    model.is_checkpointed = model.is_adapted = False
    base: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if base is None:
        return
    for path, module in root.named_modules():
        model.is_checkpointed |= bool(vars(module).get("gradient_checkpointing"))
        model.is_adapted |= "lora_" in path
        is_first = model.transformers_path is None
        if is_first and is_instance(module, base) and module.supports_gradient_checkpointing:
            model.transformers_path = path
            model.checkpoint_method = _checkpoint_method(module)


def _checkpoint_method(module: Any) -> str:
    """Return the name of a transformers model's method that enables checkpoints."""
    for name in _CHECKPOINT_METHODS:
        if hasattr(module, name):
            return name
    return ""


def _is_list(module: Any) -> bool:
    """Return True for a ``ModuleList`` or a ``Sequential``."""
    return is_instance(module, torch.nn.ModuleList) or is_instance(module, torch.nn.Sequential)


def _is_within(path: str, transformers_path: str | None) -> bool:
    """Return True for a path in a transformers model, whose own method checkpoints its blocks.

    ``transformers_path`` is None if there is no such model, and empty if the root is one.
    """
    if transformers_path is None:
        return False
    prefix = f"{transformers_path}.".lstrip(".")
    return f"{path}.".startswith(prefix)


def _note_repeated_modules(
    findings: Observed, path: str, container: Any
) -> dict[int, RepeatedModules]:
    """Note the modules of a list whose type is repeated in it: they may be checkpointed.

    Args:
        findings: gets the blocks.
        path: the path of the list.
        container: the list.

    Returns:
        The blocks by the identities of their modules.
    """
    members = dict(container.named_children())
    counts = Counter(id(type(module)) for module in members.values())  # a type may refuse to hash
    blocks_by_module = {}
    for name, module in members.items():
        kind = type(module)
        number_of_kind = counts[id(kind)]
        if number_of_kind == 1 or not _is_block(module):
            continue
        blocks = findings.blocks.setdefault(name_of(kind), RepeatedModules(kind))
        blocks_by_module[id(module)] = blocks
        member_path = f"{path}.{name}".lstrip(".")
        blocks.paths.append(member_path)
        if number_of_kind == len(members):
            blocks.code[f"*{findings.model.code(path)}"] = None
        else:
            blocks.code[findings.model.code(member_path)] = None
        for part_kind in {type(part) for part in module.modules()}:
            blocks.refuse(_hidden_randomness(part_kind))
    return blocks_by_module


def _is_block(module: Any) -> bool:
    """Return True for a module that has children and parameters, such as a transformer's layer, and
    is no ``Sequential`` or ``ModuleList``.
    """
    if next(module.children(), None) is None or next(module.parameters(), None) is None:
        return False
    return not is_exactly(module, torch.nn.Sequential, torch.nn.ModuleList)


def tensors(args: Any, kwargs: Any) -> Iterator[Any]:
    """Yield the tensors with dimensions among arguments, and in arguments that are dicts."""
    for value in (*args, *kwargs.values()):
        items = value.values() if type(value) is dict else (value,)
        yield from filter(is_tensor, items)


# -- blocks that may run twice ------------------------------------------------------------------


def _hidden_randomness(kind: type) -> str:
    """Return the reason to refuse a class of the user whose code names a random generator; empty if
    it names none.
    """
    for function in _functions_of(kind):
        if is_users(function.__code__.co_filename):
            name = _random_name(function)
            if name:
                return f"their code names {name}"
    return ""


def _functions_of(kind: type) -> list[types.FunctionType]:
    """Return the functions that a class and its bases define."""
    functions: list[types.FunctionType] = []
    for base in type.mro(kind):
        members = list(class_dict(base).values())
        functions += [member for member in members if type(member) is types.FunctionType]
    return functions


def _random_name(function: types.FunctionType) -> str:
    """Return the name of a random generator in a function's code; empty if there is none."""
    namespace = function.__globals__
    # The estimate's copy of a namespace has the values that it has not copied yet in another dict.
    original = getattr(namespace, "_original", {})
    spaces = (closure_of(function), namespace, original)
    for named in names_in(function.__code__, spaces):
        is_of_module = not _RANDOM_MODULES.isdisjoint((named.names[0], *named.module.split(".")))
        if is_of_module or _is_generator(named.value) or _is_generator(named.owner):
            return ".".join(named.names)
    return ""


def _is_generator(value: Any) -> bool:
    """Return True for a random generator of Python, NumPy or torch."""
    if is_instance(value, random.Random) or is_instance(value, torch.Generator):
        return True
    names = ("Generator", "RandomState")
    return any(is_of_library(value, "numpy.random", name) for name in names)


def _generator_states() -> Any:
    """Return the states of Python's and NumPy's global generators."""
    numpys: Any = getattr(sys.modules.get("numpy"), "random", None)
    if numpys is None:
        return random.getstate(), None
    return random.getstate(), str(numpys.get_state(legacy=False)["state"])


def _changeable_state(module: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return marks of all values that a run of a module could change: its arguments, and the
    attributes of the module and of the modules inside it.
    """
    state: list[Any] = []
    with torch._C.DisableTorchFunction():
        for value in (*args, *kwargs.values()):
            state += _change_marks(value)
        for part in module.modules():
            for value in vars(part).values():
                state += _change_marks(value)
    return state


def _change_marks(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield marks of a value, which are different once the value was replaced or changed.

    They are its identity, the version of a tensor, and the marks of the objects inside it.

    Args:
        value: an argument or attribute.
        depth: the number of containers and objects around it.
    """
    yield value if is_atom(value) else id(value)
    if is_instance(value, torch.Tensor):
        yield value._version
    elif depth < _COMPARED_DEPTH:
        for item in _parts_of(value):
            yield from _change_marks(item, depth + 1)


def _parts_of(value: Any) -> Iterable[Any]:
    """Return the items of a container, or the attributes of a plain object."""
    if type(value) is dict:
        return [*value, *value.values()]
    if is_exactly(value, list, tuple, set, deque):
        return list(value)
    if is_atom(value) or is_instance(value, torch.nn.Module):
        return ()
    if is_instance(value, type) or callable(value):
        return ()
    return (instance_dict(value) or {}).values()


def _is_plain(value: Any) -> bool:
    """Return True for tensors, values that cannot change, and dicts, lists and tuples of them."""
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    if is_exactly(value, list, tuple):
        return all(map(_is_plain, value))
    return is_atom(value) or is_instance(value, torch.Tensor) or is_exactly(value, *_PLAIN_TYPES)
