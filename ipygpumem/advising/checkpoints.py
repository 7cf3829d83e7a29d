"""Advice on checkpointing: what graphs keep of the inside of repeated blocks, and need not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ipygpumem.advising.chains import Chain
from ipygpumem.advising.flow import is_plain
from ipygpumem.advising.graphs import Graphs
from ipygpumem.advising.look import Look
from ipygpumem.advising.places import has_torchs, inner, parameters_of, with_parts
from ipygpumem.advising.records import Finding
from ipygpumem.introspect import class_dict, module_of, text_of
from ipygpumem.objects.arrays import StorageKey, library_type

_UNSURE = 1.1
"""So much more a promise may be if what is between the blocks is in them; half of that is promised."""
_MOST = 8
"""Containers of one model that are looked at: each takes a walk through all graphs."""
_OWN, _ABLE = "gradient_checkpointing_enable", "supports_gradient_checkpointing"
_CONDITION = (
    "from the next forward pass on; these blocks run twice then, the second time in backward(): it takes longer"
)


class _Blocks(NamedTuple):
    """The blocks of one container."""

    path: str
    """Of the container, from the model."""
    blocks: list[Any]
    sure: bool
    """Whether nothing runs between two blocks: a library's code calls them."""


def checkpointing(look: Look, graphs: Graphs) -> Iterator[Finding]:
    """Yield models of repeated blocks whose graphs keep more of a block than what goes into it."""
    for model, path in look.models if graphs.complete and graphs.saved else ():
        parts = dict(with_parts(model))
        own = _enables_itself(model)
        several = [one for one in _containers(parts) if _may_run_twice(look, one.blocks, own=own)][:_MOST]
        trained = set(map(id, graphs.flow.leaves.values())) if several and is_plain(list(parts.values())) else set()
        if not trained & set(map(id, parameters_of(model))):
            continue
        found = [(one, _shares(look, graphs, one, whole=own)) for one in several]
        if own and found and all(shares for _, shares in found):
            shares = {key: size for _, of_one in found for key, size in of_one.items()}
            yield from _finding(look, path, found, shares, f"{path}.gradient_checkpointing_enable()")
        for one, shares in found if not own else ():
            place = look.spot(f"{path}{one.path}")
            if place is not None and place.value is parts[one.path]:
                yield from _finding(look, place.code, [(one, shares)], shares, _line(place.code))


def _finding(
    look: Look, path: str, found: list[tuple[_Blocks, Any]], shares: dict[StorageKey, int], code: str
) -> Iterator[Finding]:
    number = sum(len(one.blocks) for one, _ in found)
    what = f"graphs keep what {number:,} blocks of {path} compute inside, until backward()"
    yield from look.by_device("checkpointing", shares, what, code, _CONDITION)


def _line(path: str) -> str:
    """Return a line for all blocks but the last: its backward pass comes first, and it would only run twice."""
    of_each = 'setattr(block, "forward", partial(checkpoint, block.forward, use_reentrant=False))'
    imports = "from functools import partial; from torch.utils.checkpoint import checkpoint"
    return f"{imports}; [{of_each} for block in {path}[:-1]];"


def _enables_itself(model: Any) -> bool:
    """Whether a model is one of transformers', with its own way to checkpoint its blocks."""
    found = [class_dict(kind) for kind in type.mro(type(model))]
    written = next((text_of(getattr(one[_OWN], "__module__", "")) for one in found if _OWN in one), "")
    able = next((one[_ABLE] for one in found if _ABLE in one), False)
    return f"{written}.".startswith("transformers.") and _is_transformers(model) and able is True


def _containers(parts: dict[str, Any]) -> Iterator[_Blocks]:
    """Yield the containers of blocks of one class, but for those inside a block."""
    kinds = (library_type("torch.nn", "Sequential"), library_type("torch.nn", "ModuleList"))
    inside: set[int] = set()
    for path, part in parts.items():
        blocks = list(inner(part, "_modules").values())
        alike = len(blocks) > 1 and all(type(block) is type(blocks[0]) for block in blocks)
        if id(part) in inside or not alike or not any(type(part) is kind for kind in kinds):
            continue
        if not has_torchs(part, "__getitem__", "__len__", "__iter__") or not all(map(_has_parts, blocks)):
            continue
        inside.update(id(one) for block in blocks for _, one in with_parts(block))
        owner = parts.get(path.rpartition(".")[0]) if path else part
        sure = type(part) is kinds[0] or module_of(owner).startswith(("torch.nn.", "transformers."))
        yield _Blocks(path, blocks, sure)


def _has_parts(block: Any) -> bool:
    return bool(inner(block, "_modules"))


def _may_run_twice(look: Look, blocks: list[Any], *, own: bool) -> bool:
    """Whether blocks share no weight, and none keeps a count of how often it ran, as BatchNorm and spectral norm do."""
    weights = [{id(weight) for weight in parameters_of(block)} for block in blocks]
    if not all(weights) or len(set().union(*weights)) != sum(map(len, weights)):
        return False
    parts = [part for block in blocks for _, part in with_parts(block)]
    buffers = [inner(part, "_buffers") for part in parts]
    if any("running_mean" in one or any(look.read("_version", item) for item in one.values()) for one in buffers):
        return False
    # transformers' blocks write to a cache, a second time too if nothing but their forward() knows.
    return own or all(has_torchs(one, "__call__", "__setattr__") and not _is_transformers(one) for one in blocks)


def _is_transformers(module: Any) -> bool:
    return any(
        text_of(class_dict(kind).get("__module__")).startswith("transformers.") for kind in type.mro(type(module))
    )


def _shares(look: Look, graphs: Graphs, one: _Blocks, *, whole: bool) -> dict[StorageKey, int]:
    """Return what checkpointing would not keep: of all blocks, or of all but the last."""
    chain = Chain(look, graphs, one.blocks)
    if not chain.is_one or (whole and not chain.has_end):
        return {}
    most = chain.freed(whole=whole)
    ends = range(len(one.blocks)) if not one.sure else [len(one.blocks) - 1] if chain.takes_data else []
    least = chain.freed(whole=whole, without_end=ends) if ends else most
    if sum(most.values()) > _UNSURE * sum(least.values()):
        return {}
    return {key: (size + least.get(key, 0)) // 2 for key, size in most.items()}
