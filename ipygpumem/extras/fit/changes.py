"""The changes that may make code fit. Each has the line that a user writes, and does the same to
the running code.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from ipygpumem.errors import how_to_install
from ipygpumem.estimating.storages import tensors_in
from ipygpumem.extras.fit.applying import EQUAL, Change, Run, is_tensor
from ipygpumem.extras.fit.observing import Blocks, Observed
from ipygpumem.extras.fit.reduction import MEAN, MEAN_AND_SUM, SUM, UNCLEAR
from ipygpumem.introspect import is_instance

_ROUNDED = "equal up to rounding"
_RANK = 16


def candidates(seen: Observed) -> Iterator[Change]:
    """Yield the changes that may help the code, cheapest first, without parts of the batch."""
    kinds = {getattr(torch.optim, kind, None) for kind in seen.optimizers.values()} - {None}
    if kinds:
        group, groups = (
            seen.free("group"),
            [f"{name or kind}.param_groups" for name, kind in seen.optimizers.items()],
        )
        each = groups[0] if len(groups) < 2 else f"[*{', *'.join(groups)}]"
        line = seen.code(
            f'for {group} in {each}: {group}["foreach"] = False', owners=seen.optimizers
        )
        yield Change("foreach=False", line, _ROUNDED, _plain_loop)
    if seen.trains:
        yield from _checkpoints(seen)
    if seen.has_float32 and not seen.casts:
        yield _autocast(seen)
    lean = [
        getattr(torch.optim, name) for name in ("Adafactor", "SGD") if hasattr(torch.optim, name)
    ]
    if kinds - {*lean, torch.optim.LBFGS, torch.optim.SparseAdam}:
        yield from (_optimizer(seen, kind) for kind in lean)
    if seen.trains and not seen.is_adapted:
        if seen.hf_path is not None and importlib.util.find_spec("peft") is not None:
            yield _low_rank(seen)
        if seen.last:
            yield _frozen(seen)


def untried(seen: Observed) -> Iterator[str]:
    """Yield changes that may help, too, but are not estimated."""
    if seen.trains and not (
        seen.is_adapted or seen.hf_path is None or importlib.util.find_spec("peft")
    ):
        yield f"LoRA ({how_to_install('peft')})"
    if seen.has_float32:
        yield f"bfloat16 weights ({seen.of_root()}.to(torch.bfloat16))"


def _plain_loop(run: Run) -> None:
    """Let optimizers update one parameter after another, without temporary lists of tensors."""

    def step(optimizer: Any, args: Any, kwargs: Any) -> Any:
        for group in optimizer.param_groups:
            if group.get("foreach") and not group.get("fused"):
                group["foreach"] = False
        return args, kwargs

    run.on(step=step)


def parts(seen: Observed, name: str | None) -> Iterator[Change]:
    """Yield the batch in equal parts, whose gradients are accumulated, at least twice as many each
    time.
    """
    passes = 1
    while 2 * passes <= seen.rows:
        passes = next(
            number for number in range(2 * passes, seen.rows + 1) if seen.rows % number == 0
        )
        size = seen.rows // passes
        splits = ", ".join(
            f"{given or 'batch'}.split({rows // passes})" for given, rows in seen.given.items()
        )
        is_one = len(seen.given) == 1
        line = (
            f"for {seen.free('part' if is_one else 'parts')} in "
            f"{splits if is_one else f'zip({splits})'}: ..."
        )
        line = f"{name} = {size}" if seen.is_size else line
        if seen.trains:
            line += f"  # {_advice(seen, passes)}, then one step()"
        line = line if seen.is_size else seen.code(line, owners=seen.given)
        title = f"{name or 'batch'} {size} instead of {seen.rows}"
        split = functools.partial(_split, seen, name, passes)
        yield Change(title, line, "; ".join(_results_of_parts(seen)), split, "batch", passes)


_EQUAL_IF = {
    MEAN: "equal if the loss is a mean over independent rows",
    SUM: "equal if the loss is a sum over independent rows",
    MEAN_AND_SUM: "not equal: the loss adds a mean over the rows to a sum",
    UNCLEAR: "equal if the loss is a mean, or a sum, over independent rows",
}


def _advice(seen: Observed, passes: int) -> str:
    """Return how to run backward for each part so that the gradients are the whole batch's."""
    loss = seen.loss.kind
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


def _results_of_parts(seen: Observed) -> list[str]:
    """Return the conditions and effects of a batch in parts: none replaces another."""
    results = [_EQUAL_IF[seen.loss.kind] if seen.trains else EQUAL]
    if seen.trains and seen.loss.has_weight_terms and seen.loss.kind != MEAN:
        results.append("terms of the weights alone count once for each part")
    if seen.draws:
        results.append("other random numbers (dropout)")
    if seen.normalizes:
        results.append("other BatchNorm statistics")
    return results


def _split(  # noqa: C901  # one small function after another
    seen: Observed, name: str | None, passes: int, run: Run
) -> None:
    """Give roots a part of the rows, after a whole pass with such a part before each step, as in
    accumulation.
    """
    passed: list[Any] = []

    def reduced(value: Any) -> Any:
        return value // passes if seen.is_size else value[: len(value) // passes]

    def part(value: Any) -> Any:
        if type(value) is dict:
            return {key: part(item) for key, item in value.items()}
        return reduced(value) if is_tensor(value) and len(value) == seen.rows else value

    def loss(given: Any, target: Any) -> Any:
        return target[: len(given)] if len(target) == passes * len(given) else target

    def call(root: Any, args: Any, kwargs: Any) -> Any:
        if not seen.is_size:
            args, kwargs = tuple(map(part, args)), part(kwargs)
        is_first = (
            seen.trains and torch.is_grad_enabled() and all(known() is not root for known in passed)
        )
        if is_first and next(root.parameters(), None) is not None:
            passed.append(weakref.ref(root))
            flops = run.flops
            own = (args, kwargs)  # whose graph the code needs later
            alone = tree_map_only(
                torch.Tensor, lambda one: one.detach().requires_grad_(one.requires_grad), own
            )
            _accumulate(root(*alone[0], **alone[1]))
            run.flops = flops
        return args, kwargs

    run.on(call=call, stepped=lambda _: passed.clear())
    if not seen.is_size:
        run.on(loss=loss)
    if name is not None:
        if name in run.names:
            run.names[name] = reduced(run.names[name])
        run.names.changed[name] = reduced  # type: ignore[attr-defined]  # a Namespace


def _accumulate(result: Any) -> None:
    """Run backward from a model's loss, or from all its results."""
    loss = dict.get(result, "loss") if is_instance(result, dict) else None
    found = [one for one in tensors_in(result if loss is None else loss) if one.requires_grad]
    del result, loss  # code that takes the loss alone frees the rest
    torch.autograd.backward(found, [torch.ones_like(one) for one in found])


def _checkpoints(seen: Observed) -> Iterator[Change]:
    """Yield checkpoints of each kind of blocks: they keep only their inputs, and run again in
    backward.
    """
    if seen.hf_path is not None and not seen.is_checkpointed:
        line = seen.code(
            f'{seen.of_root(seen.hf_path)}.{seen.hf_way}({{"use_reentrant": False}})',
            owners=[seen.name],
        )
        apply = _to_root(
            seen,
            lambda root: getattr(root.get_submodule(seen.hf_path), seen.hf_way)(
                {"use_reentrant": False}
            ),
        )
        yield Change(f"{seen.hf_way}()", line, EQUAL, apply, "checkpoint")
    for blocks in seen.blocks.values():
        if not blocks.reason:
            block, each = seen.free("block"), ", ".join(blocks.code)
            each = each[1:] if each.startswith("*") and len(blocks.code) == 1 else f"[{each}]"
            line = f"for {block} in {each}: {block}.forward = functools.partial("
            line += f"torch.utils.checkpoint.checkpoint, {block}.forward, use_reentrant=False)"
            line = seen.code(line, "functools", "torch.utils.checkpoint", owners=[seen.name])
            apply = _to_root(seen, functools.partial(_checkpoint, blocks))
            yield Change(
                f"checkpoint {len(blocks.paths)} {blocks.name}", line, EQUAL, apply, "checkpoint"
            )


def _checkpoint(blocks: Blocks, root: Any) -> None:
    for block in map(root.get_submodule, blocks.paths):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def _to_root(seen: Observed, work: Callable[[Any], object]) -> Callable[[Run], None]:
    """Return a change that calls ``work`` with the root with the most parameters before its first
    call.
    """
    return lambda run: run.on(
        begin=lambda number, root: work(root) if number == seen.root else None
    )


def _autocast(seen: Observed) -> Change:
    """Return autocast, from the first call of a root to the backward pass."""

    def apply(run: Run) -> None:
        opened: list[Any] = []

        def call(root: Any, args: Any, kwargs: Any) -> Any:
            if not opened and next(root.parameters(), None) is not None:
                opened.append(torch.autocast(seen.kind, dtype=torch.bfloat16))
                opened[0].__enter__()
            return args, kwargs

        def close(*_: Any) -> None:
            while opened:
                opened.pop().__exit__(None, None, None)

        run.on(
            call=call, backward=close, result=lambda: None if torch.is_grad_enabled() else close()
        )
        run.at_end(close)

    line = (
        f'with torch.autocast("{seen.kind}", dtype=torch.bfloat16): ...  # the forward pass and '
        f"the loss"
    )
    line = seen.code(line, "torch", owners=())
    return Change("bfloat16 autocast", line, "products in bfloat16", apply)


def _optimizer(seen: Observed, kind: Any) -> Change:
    """Return another optimizer, which makes the steps; the code's own finds no gradients, so it
    makes no state.
    """

    def apply(run: Run) -> None:
        steppers: list[tuple[Any, Any]] = []
        kept: list[tuple[Any, Any]] = []

        def step(optimizer: Any, args: Any, kwargs: Any) -> Any:
            if is_instance(optimizer, kind):
                return args, kwargs
            if all(own is not optimizer for own, _ in steppers):
                # of earlier steps: the other one never had it
                run.erase(tensors_in(list(optimizer.state.values())))
                optimizer.state.clear()
                steppers.append(
                    (
                        optimizer,
                        kind(
                            [{"params": group["params"]} for group in optimizer.param_groups],
                            lr=0.01,
                        ),
                    )
                )
            other = next(other for own, other in steppers if own is optimizer)
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            loss = other.step(closure)
            for parameter in [one for group in other.param_groups for one in group["params"]]:
                kept.append((parameter, parameter.grad))
                parameter.grad = None
            return (args[0], closure and (lambda: loss)), {}

        def stepped(optimizer: Any) -> None:
            while kept and not is_instance(optimizer, kind):
                parameter, gradient = kept.pop()
                parameter.grad = gradient

        run.on(step=step, stepped=stepped)

    title = f"torch.optim.{kind.__name__}"
    names = [name or own for name, own in seen.optimizers.items()]
    lines = [
        f'{name} = {title}([one for group in {name}.param_groups for one in group["params"]])'
        for name in names
    ]
    line = seen.code("; ".join(lines), "torch", owners=seen.optimizers)
    return Change(title, line, "another optimizer", apply, "optimizer")


def _low_rank(seen: Observed) -> Change:
    """Return adapters of low rank, which are trained in place of the model's own parameters."""

    def apply(run: Run) -> None:
        new: list[Any] = []

        def begin(number: int, root: Any) -> None:
            if number == seen.root:
                peft: Any = importlib.import_module("peft")
                config = peft.LoraConfig(r=_RANK, target_modules="all-linear")
                peft.get_peft_model(root.get_submodule(seen.hf_path), config)
                new.extend(root.parameters())

        def step(optimizer: Any, args: Any, kwargs: Any) -> Any:
            there = {id(one) for group in optimizer.param_groups for one in group["params"]}
            if any(id(one) in there for one in new):  # it is this model's
                missing = [one for one in new if one.requires_grad and id(one) not in there]
                if missing:
                    optimizer.add_param_group({"params": missing})
            return args, kwargs

        run.on(begin=begin, step=step)

    name = seen.of_root(seen.hf_path or "")
    line = (
        f"{name} = peft.get_peft_model({name}, peft.LoraConfig(r={_RANK}, "
        f'target_modules="all-linear"))'
    )
    line = seen.code(f"{line}  # before the optimizer is made", "peft", owners=[seen.name])
    return Change(f"LoRA of rank {_RANK}", line, "trains adapters only", apply, "trained")


def _frozen(seen: Observed) -> Change:
    def freeze(root: Any) -> None:
        root.requires_grad_(False)
        root.get_submodule(seen.last).requires_grad_(True)

    line = f"{seen.of_root()}.requires_grad_(False); {seen.of_root(seen.last)}.requires_grad_(True)"
    line = seen.code(line, owners=[seen.name])
    title, results = "freeze all but the last layer", "trains the last layer only"
    return Change(title, line, results, _to_root(seen, freeze), "trained")
