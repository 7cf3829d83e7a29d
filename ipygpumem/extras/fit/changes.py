"""The changes that may make code fit. Each has the line that a user writes, and does the same to
the running code.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from ipygpumem.errors import how_to_install
from ipygpumem.estimating.memory.storages import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    tensors_in,
)
from ipygpumem.extras.fit.applying import EQUAL, Change, ChangedRun, is_tensor
from ipygpumem.extras.fit.observing import Observed, RepeatedModules
from ipygpumem.extras.fit.reduction import MEAN, MEAN_AND_SUM, SUM, UNCLEAR
from ipygpumem.introspect import is_instance

_ROUNDED = "equal up to rounding"
_RANK = 16
_TINY_PART = 1000
"""The peak, divided by this, is too little to be named as a saving."""
_IN_8_BITS = ("Adagrad", "Adam", "AdamW", "RMSprop", "SGD")
"""torch's optimizers for which bitsandbytes has one with a state of 8 bits."""
_WITH_SMALL_STATE = ("Adafactor", "SGD")
"""torch's optimizers with little or no state."""
_IRREPLACEABLE = ("LBFGS", "SparseAdam")
"""torch's optimizers that no other one can replace."""


def candidates(findings: Observed) -> Iterator[Change]:
    """Yield the changes that may help the code, cheapest first.

    ``batch_in_parts`` yields further ones.
    """
    kinds = set(_optimizers_of_torch(findings.optimizers.values()))
    if kinds:
        yield _plain_loops(findings)
    if findings.trains:
        yield from _checkpoints(findings)
    if findings.has_float32 and not findings.casts:
        yield _autocast(findings)
    with_small_state = _optimizers_of_torch(_WITH_SMALL_STATE)
    if kinds.difference(with_small_state, _optimizers_of_torch(_IRREPLACEABLE)):
        for kind in with_small_state:
            yield _other_optimizer(findings, kind)
    model = findings.model
    if findings.trains and not model.is_adapted:
        if model.transformers_path is not None and _has_peft():
            yield _adapters(findings, model.transformers_path)
        if model.last_layer:
            yield _freeze_all_but_last_layer(findings)


def untried(findings: Observed, parts_at_peak: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield the titles of further changes, which no estimate has tried, each with the bytes that it
    would save at most.

    Args:
        findings: what the first run has shown.
        parts_at_peak: the memory at the peak in bytes, by purpose.
    """
    alternatives = (
        _untried_adapters(findings, parts_at_peak),
        _untried_bfloat16(findings, parts_at_peak),
        _untried_8_bits(findings, parts_at_peak),
        ("an optimizer whose state is in RAM, such as DeepSpeed's", parts_at_peak.get(OPTIMIZER)),
        (
            "activations in RAM: with torch.autograd.graph.save_on_cpu(): ...",
            parts_at_peak.get(ACTIVATIONS),
        ),
    )
    tiny_bytes = sum(parts_at_peak.values()) // _TINY_PART
    for title, saved_bytes in alternatives:
        if saved_bytes and saved_bytes > tiny_bytes:
            yield title, saved_bytes


def _untried_adapters(findings: Observed, parts_at_peak: Mapping[str, int]) -> tuple[str, int]:
    """Return the title of LoRA, and the bytes that it would save; 0 if an estimate tries it.

    The model's own weights then get neither gradients nor a state.
    """
    model = findings.model
    is_tried = model.transformers_path is not None and _has_peft()
    if not findings.trains or model.is_adapted or is_tried:
        return "", 0
    title = "LoRA" if _has_peft() else f"LoRA ({how_to_install('peft')})"
    return title, parts_at_peak.get(GRADIENTS, 0) + parts_at_peak.get(OPTIMIZER, 0)


def _untried_bfloat16(findings: Observed, parts_at_peak: Mapping[str, int]) -> tuple[str, int]:
    """Return the title of weights in bfloat16, and the bytes that they would save.

    Gradients, the optimizer's state and activations have the type of the weights. All of them that
    are in float32 would take half.
    """
    of_weights = sum(parts_at_peak.get(name, 0) for name in (PARAMETERS, GRADIENTS, OPTIMIZER))
    float32_bytes = int(of_weights * findings.float32_share)
    if findings.has_float32 and not findings.casts:
        float32_bytes += parts_at_peak.get(ACTIVATIONS, 0)
    return f"bfloat16 weights ({findings.model.code()}.to(torch.bfloat16))", float32_bytes // 2


def _untried_8_bits(findings: Observed, parts_at_peak: Mapping[str, int]) -> tuple[str, int]:
    """Return the title of an optimizer with one byte for each number of its state, and the bytes
    that it would save; 0 if there is none.
    """
    for kind in findings.optimizers.values():
        if kind in _IN_8_BITS:
            # Instead of four, or of two for weights in 16 bits.
            saved_share = 0.5 + 0.25 * findings.float32_share
            saved_bytes = int(parts_at_peak.get(OPTIMIZER, 0) * saved_share)
            return f"an 8-bit optimizer, such as bitsandbytes.optim.{kind}8bit", saved_bytes
    return "", 0


def _optimizers_of_torch(names: Iterable[str]) -> list[Any]:
    """Return torch's optimizers of these names, such as ``SGD``, as far as this version of torch
    has them.
    """
    return [getattr(torch.optim, name) for name in names if hasattr(torch.optim, name)]


def _has_peft() -> bool:
    """Return True if the library for LoRA adapters is installed."""
    return importlib.util.find_spec("peft") is not None


def _parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# -- parameters that are updated one by one --------------------------------------------------------


def _plain_loops(findings: Observed) -> Change:
    """Return the change to optimizers' plain loops.

    By default torch updates all parameters at once (``foreach``), with temporary lists of tensors.
    """
    groups = [f"{name or kind}.param_groups" for name, kind in findings.optimizers.items()]
    all_groups = groups[0] if len(groups) == 1 else f"[*{', *'.join(groups)}]"
    group = findings.free_name("group")
    line = f'for {group} in {all_groups}: {group}["foreach"] = False'
    line = findings.code(line, owners=findings.optimizers)
    return Change("foreach=False", line, _ROUNDED, _update_one_by_one)


def _update_one_by_one(run: ChangedRun) -> None:
    """Let optimizers update one parameter after another."""

    def step(optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Switch ``foreach`` off before a step, and return its arguments."""
        for group in optimizer.param_groups:
            if group.get("foreach") and not group.get("fused"):
                group["foreach"] = False
        return args, kwargs

    run.on(step=step)


# -- a batch in parts ------------------------------------------------------------------------------


def batch_in_parts(findings: Observed, name: str | None) -> Iterator[Change]:
    """Yield changes that split the batch into equal parts, whose gradients are accumulated; each
    change makes at least twice as many parts as the one before.

    Args:
        findings: what the first run has shown.
        name: the user's name for the batch or its size; None without one.
    """
    for passes in _numbers_of_parts(findings.batch.rows):
        size = findings.batch.rows // passes
        yield Change(
            f"{name or 'batch'} {size} instead of {findings.batch.rows}",
            _line_of_parts(findings, name, passes),
            "; ".join(_results_of_parts(findings)),
            functools.partial(_work_on_part, findings, name, passes),
            "batch",
            passes,
        )


def _numbers_of_parts(rows: int) -> Iterator[int]:
    """Yield divisors of a number of rows, each at least twice as large as the one before: 2, 4, 12
    for 12 rows.
    """
    passes = 1
    while 2 * passes <= rows:
        passes = next(number for number in range(2 * passes, rows + 1) if rows % number == 0)
        yield passes


def _line_of_parts(findings: Observed, name: str | None, passes: int) -> str:
    """Return the line that makes the parts, and how to run backward for each."""
    batch = findings.batch
    advice = ""
    if findings.trains:
        advice = f"  # {_backward_of_parts(findings, passes)}, then one step()"
    if batch.is_size:
        return f"{name} = {batch.rows // passes}{advice}"
    splits = [f"{data or 'batch'}.split({rows // passes})" for data, rows in batch.data.items()]
    if len(splits) == 1:
        line = f"for {findings.free_name('part')} in {splits[0]}: ..."
    else:
        line = f"for {findings.free_name('parts')} in zip({', '.join(splits)}): ..."
    return findings.code(f"{line}{advice}", owners=batch.data)


_EQUAL_IF = {
    MEAN: "equal if the loss is a mean over independent rows",
    SUM: "equal if the loss is a sum over independent rows",
    MEAN_AND_SUM: "not equal: the loss adds a mean over the rows to a sum",
    UNCLEAR: "equal if the loss is a mean, or a sum, over independent rows",
}


def _backward_of_parts(findings: Observed, passes: int) -> str:
    """Return how to run backward for each part so that the gradients are the whole batch's."""
    loss = findings.loss.kind
    if loss == MEAN:
        return f"(loss / {passes}).backward() for each part"
    if loss == SUM:
        return "loss.backward() for each part"
    if loss == MEAN_AND_SUM:
        return f"divide the mean, but not the sum, by {passes}; backward() for each part"
    return (
        f"loss.backward() for each part if it is a sum, (loss / {passes}).backward() if it is a "
        f"mean"
    )


def _results_of_parts(findings: Observed) -> list[str]:
    """Return the effects of a batch in parts on the code's results, each of which is shown."""
    results = [_EQUAL_IF[findings.loss.kind] if findings.trains else EQUAL]
    if findings.trains and findings.loss.has_weight_terms and findings.loss.kind != MEAN:
        results.append("terms of the weights alone count once for each part")
    if findings.draws:
        results.append("other random numbers (dropout)")
    if findings.normalizes:
        results.append("other BatchNorm statistics")
    return results


def _work_on_part(findings: Observed, name: str | None, passes: int, run: ChangedRun) -> None:
    """Let a run work on one of ``passes`` equal parts of its batch, as in gradient accumulation."""
    split = _PartOfBatch(findings, passes, run)
    run.on(call=split.call, stepped=split.stepped)
    if not findings.batch.is_size:
        run.on(loss=split.loss)
    if name is not None:
        if name in run.names:
            run.names[name] = split.part_of_batch(run.names[name])
        run.names.value_changes[name] = split.part_of_batch  # type: ignore[attr-defined]  # a Namespace


class _PartOfBatch:
    """Gives models one part of the rows of a batch, as in the last pass of an accumulation.

    In that pass the gradients of earlier parts are in memory. So before a model's first call since
    the last step, another part runs forward and backward.

    Args:
        findings: those of the first run, with the batch.
        passes: the number of parts.
        run: the run that gets the parts.
    """

    def __init__(self, findings: Observed, passes: int, run: ChangedRun) -> None:
        self._findings = findings
        self._batch = findings.batch
        self._passes = passes
        self._run = run
        self._accumulated: list[weakref.ref[Any]] = []
        """Models that have gradients of an earlier part since the last step."""

    def part_of_batch(self, value: Any) -> Any:
        """Return a part of a batch, or of its size."""
        if self._batch.is_size:
            return value // self._passes
        return value[: len(value) // self._passes]

    def call(self, root: Any, args: Any, kwargs: Any) -> Any:
        """Return a model's arguments with one part of the rows; run another part before."""
        if not self._batch.is_size:
            args = tuple(map(self._with_part_of_batch, args))
            kwargs = self._with_part_of_batch(kwargs)
        if self._needs_earlier_part(root):
            self._accumulated.append(weakref.ref(root))
            flops = self._run.flops
            _accumulate_alone(root, args, kwargs)
            self._run.flops = flops  # ``Change.passes`` counts the operations of all parts
        return args, kwargs

    def loss(self, predicted: Any, target: Any) -> Any:
        """Return the targets of the part, for a loss function that the code calls itself."""
        if len(target) == self._passes * len(predicted):
            return target[: len(predicted)]
        return target

    def stepped(self, _: Any) -> None:
        """Note the step of an optimizer: the gradients of the next parts are not there yet."""
        self._accumulated.clear()

    def _with_part_of_batch(self, value: Any) -> Any:
        """Return an argument with one part of the rows instead of whole batches."""
        if type(value) is dict:
            return {key: self._with_part_of_batch(item) for key, item in value.items()}
        if is_tensor(value) and len(value) == self._batch.rows:
            return self.part_of_batch(value)
        return value

    def _needs_earlier_part(self, root: Any) -> bool:
        """Return True for the first call of a model in training since the last step."""
        if not self._findings.trains or not torch.is_grad_enabled():
            return False
        if any(reference() is root for reference in self._accumulated):
            return False
        return next(root.parameters(), None) is not None


def _accumulate_alone(root: Any, args: Any, kwargs: Any) -> None:
    """Run a model's forward and backward pass, without the graph below its arguments.

    The code needs that graph later.
    """

    def detached(tensor: Any) -> Any:
        """Return the tensor without its graph; gradients flow to it as to the original."""
        return tensor.detach().requires_grad_(tensor.requires_grad)

    args, kwargs = tree_map_only(torch.Tensor, detached, (args, kwargs))
    _run_backward_from(root(*args, **kwargs))


def _run_backward_from(result: Any) -> None:
    """Run backward from a model's loss, or from all its results."""
    loss = dict.get(result, "loss") if is_instance(result, dict) else None
    results = tensors_in(result if loss is None else loss)
    starts = [tensor for tensor in results if tensor.requires_grad]
    del result, results, loss  # code that takes the loss alone frees the rest
    torch.autograd.backward(starts, [torch.ones_like(tensor) for tensor in starts])


# -- checkpoints -----------------------------------------------------------------------------------


def _checkpoints(findings: Observed) -> Iterator[Change]:
    """Yield checkpoints of each kind of blocks: they keep only their inputs, and run again in
    backward.
    """
    model = findings.model
    if model.transformers_path is not None and not model.is_checkpointed:
        yield _checkpoints_of_transformers(findings, model.transformers_path)
    for blocks in findings.blocks.values():
        if not blocks.reason:
            yield _checkpoints_of_blocks(findings, blocks)


def _checkpoints_of_transformers(findings: Observed, path: str) -> Change:
    """Return the checkpoints that a transformers model makes itself."""
    model = findings.model
    method = model.checkpoint_method

    def apply(root: Any) -> None:
        getattr(root.get_submodule(path), method)({"use_reentrant": False})

    line = f'{model.code(path)}.{method}({{"use_reentrant": False}})'
    line = findings.code(line, owners=[model.name])
    return Change(
        f"{method}()", line, EQUAL, _change_of_largest_model(findings, apply), "checkpoint"
    )


def _checkpoints_of_blocks(findings: Observed, blocks: RepeatedModules) -> Change:
    """Return the change that checkpoints each of the repeated modules."""
    block, lists = findings.free_name("block"), list(blocks.code)
    if len(lists) == 1 and lists[0].startswith("*"):
        each = lists[0].removeprefix("*")
    else:
        each = f"[{', '.join(lists)}]"
    line = (
        f"for {block} in {each}: {block}.forward = functools.partial("
        f"torch.utils.checkpoint.checkpoint, {block}.forward, use_reentrant=False)"
    )
    imports = ("functools", "torch.utils.checkpoint")
    line = findings.code(line, *imports, owners=[findings.model.name])
    apply = _change_of_largest_model(findings, functools.partial(_run_blocks_checkpointed, blocks))
    title = f"checkpoint {len(blocks.paths)} {blocks.name}"
    return Change(title, line, EQUAL, apply, "checkpoint")


def _run_blocks_checkpointed(blocks: RepeatedModules, root: Any) -> None:
    """Let the repeated modules of a model keep only their inputs, and run again in backward."""
    for block in map(root.get_submodule, blocks.paths):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def _change_of_largest_model(
    findings: Observed, work: Callable[[Any], object]
) -> Callable[[ChangedRun], None]:
    """Return the ``apply`` of a change that calls ``work`` with the largest model, once, before the
    code's first call of the model.
    """

    def begin(number: int, root: Any) -> None:
        if number == findings.model.number:
            work(root)

    return lambda run: run.on(begin=begin)


# -- autocast --------------------------------------------------------------------------------------


def _autocast(findings: Observed) -> Change:
    """Return autocast, from the first call of a model to the backward pass."""
    device_type = findings.model.device_type
    context = f'torch.autocast("{device_type}", dtype=torch.bfloat16)'
    line = f"with {context}: ...  # the forward pass and the loss"
    line = findings.code(line, "torch", owners=())
    apply = functools.partial(_run_under_autocast, device_type)
    return Change("bfloat16 autocast", line, "products in bfloat16", apply)


def _run_under_autocast(device_type: str, run: ChangedRun) -> None:
    """Run models under autocast on a type of device, such as ``cuda``."""
    open_contexts: list[Any] = []
    """The context of autocast, from the first call of a model to the backward pass."""

    def open_once(root: Any, args: Any, kwargs: Any) -> Any:
        """Enter the context at the first call of a model, and return its arguments."""
        has_parameters = next(root.parameters(), None) is not None
        if not open_contexts and has_parameters:
            open_contexts.append(torch.autocast(device_type, dtype=torch.bfloat16))
            open_contexts[0].__enter__()
        return args, kwargs

    def close(*_: Any) -> None:
        """Leave the context."""
        while open_contexts:
            open_contexts.pop().__exit__(None, None, None)

    def close_without_backward() -> None:
        """Leave the context after a model's call if no backward pass will come."""
        if not torch.is_grad_enabled():
            close()

    run.on(call=open_once, backward=close, result=close_without_backward)
    run.at_end(close)


# -- another optimizer -----------------------------------------------------------------------------


def _other_optimizer(findings: Observed, kind: Any) -> Change:
    """Return the change to another optimizer, of the type ``kind``, which makes the steps."""
    title = f"torch.optim.{kind.__name__}"
    lines: list[str] = []
    for name, present_kind in findings.optimizers.items():
        target = name or present_kind
        parameters = f'[weight for group in {target}.param_groups for weight in group["params"]]'
        lines.append(f"{target} = {title}({parameters})")
    line = findings.code("; ".join(lines), "torch", owners=findings.optimizers)
    apply = functools.partial(_step_with, kind)
    return Change(title, line, "another optimizer", apply, "optimizer")


def _step_with(kind: Any, run: ChangedRun) -> None:
    """Let optimizers of another type make the steps of a run."""
    replacement = _Replacement(kind, run)
    run.on(step=replacement.step, stepped=replacement.stepped)


class _Replacement:
    """Steps with an optimizer of another type before each step of the code's own optimizer.

    That one then finds no gradients, so it makes no state.
    """

    def __init__(self, kind: Any, run: ChangedRun) -> None:
        self._kind = kind
        self._run = run
        self._stand_ins: list[tuple[Any, Any]] = []
        """The code's optimizers, each with the one that makes its steps."""
        self._hidden_gradients: list[tuple[Any, Any]] = []
        """Parameters, each with its gradient, which the code's optimizer must not find."""

    def step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Step with the replacing optimizer, and return arguments for the code's own optimizer.

        They are the optimizer itself and a closure that only returns the loss, because the code's
        closure has run already (``optimizer.step(closure)``); None if the code has passed none.
        """
        if is_instance(optimizer, self._kind):
            return args, kwargs
        stand_in = self._stand_in_for(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        loss = stand_in.step(closure)
        for parameter in _parameters_of(stand_in):
            self._hidden_gradients.append((parameter, parameter.grad))
            parameter.grad = None
        return (args[0], closure and (lambda: loss)), {}

    def stepped(self, optimizer: Any) -> None:
        """Restore the gradients after the step of the code's optimizer."""
        if is_instance(optimizer, self._kind):
            return
        while self._hidden_gradients:
            parameter, gradient = self._hidden_gradients.pop()
            parameter.grad = gradient

    def _stand_in_for(self, optimizer: Any) -> Any:
        """Return the optimizer that steps for one of the code's; make it for its first step."""
        for replaced, stand_in in self._stand_ins:
            if replaced is optimizer:
                return stand_in
        # State of steps before this run counts as freed: the stand-in would never have made it.
        self._run.erase(tensors_in(list(optimizer.state.values())))
        optimizer.state.clear()
        groups = [{"params": group["params"]} for group in optimizer.param_groups]
        stand_in = self._kind(groups, lr=0.01)
        self._stand_ins.append((optimizer, stand_in))
        return stand_in


# -- fewer parameters that are trained -------------------------------------------------------------


def _adapters(findings: Observed, path: str) -> Change:
    """Return the change to adapters of low rank, trained in place of the model's own parameters.

    Args:
        findings: what the first run has shown.
        path: the path of the transformers model in the largest model.
    """
    model = findings.model
    name = model.code(path)
    config = f'peft.LoraConfig(r={_RANK}, target_modules="all-linear")'
    line = f"{name} = peft.get_peft_model({name}, {config})  # before the optimizer is made"
    line = findings.code(line, "peft", owners=[model.name])
    apply = functools.partial(_add_adapters, model.number, path)
    return Change(f"LoRA of rank {_RANK}", line, "trains adapters only", apply, "trained")


def _add_adapters(number: int, path: str, run: ChangedRun) -> None:
    """Add adapters to the part of a model at a path, and to the optimizer that trains it.

    Args:
        number: the model's number among the roots.
        path: the path in it.
        run: the run to change.
    """
    adapted: list[Any] = []
    """The parameters of the model, with those of its adapters."""

    def add_adapters(number_of_root: int, root: Any) -> None:
        """Add the adapters before the first call of the model."""
        if number_of_root == number:
            peft: Any = importlib.import_module("peft")
            config = peft.LoraConfig(r=_RANK, target_modules="all-linear")
            peft.get_peft_model(root.get_submodule(path), config)
            adapted.extend(root.parameters())

    def step_adapters(optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Add the adapters' parameters to an optimizer of the model, and return its arguments."""
        in_optimizer = set(map(id, _parameters_of(optimizer)))
        is_of_model = any(id(parameter) in in_optimizer for parameter in adapted)
        if is_of_model:
            missing = list[Any]()
            for parameter in adapted:
                if parameter.requires_grad and id(parameter) not in in_optimizer:
                    missing.append(parameter)
            if missing:
                optimizer.add_param_group({"params": missing})
        return args, kwargs

    run.on(begin=add_adapters, step=step_adapters)


def _freeze_all_but_last_layer(findings: Observed) -> Change:
    """Return the change that trains the last layer of the largest model only."""
    model = findings.model

    def freeze(root: Any) -> None:
        """Let the model train its last layer only."""
        root.requires_grad_(False)
        root.get_submodule(model.last_layer).requires_grad_(True)

    line = (
        f"{model.code()}.requires_grad_(False); {model.code(model.last_layer)}.requires_grad_(True)"
    )
    line = findings.code(line, owners=[model.name])
    title, results = "freeze all but the last layer", "trains the last layer only"
    return Change(title, line, results, _change_of_largest_model(findings, freeze), "trained")
