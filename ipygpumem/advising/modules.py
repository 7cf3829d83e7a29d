"""Advice on models: weights at rest of twice the size that they need, weights that could be one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ipygpumem.advising.contents import are_equal
from ipygpumem.advising.graphs import Graphs
from ipygpumem.advising.look import Look
from ipygpumem.advising.places import has_torchs, inner, tensors_of, with_parts
from ipygpumem.advising.records import Finding
from ipygpumem.introspect import instance_dict
from ipygpumem.objects.arrays import library_type

_NARROWER = {"float64": ("float32", "float"), "float32": ("bfloat16", "bfloat16")}
"""The next smaller dtype, and the method of modules that converts to it."""


def halved(look: Look, graphs: Graphs) -> Iterator[Finding]:
    """Yield models in eval mode whose weights are all of one wide dtype, and that nothing trains."""
    others = _trained(look) | graphs.waiting_for_backward | look.shared
    for module, path in look.models:
        parts = [part for _, part in with_parts(module)]
        weights = [item for part in parts for item in tensors_of(part) if _is_floating(look, item)]
        dtypes = {str(look.read("dtype", item)).removeprefix("torch.") for item in weights}
        at_rest = all((instance_dict(part) or {}).get("training") is False for part in parts)
        if len(dtypes) != 1 or not at_rest or not _NARROWER.keys() & dtypes or others & set(map(id, weights)):
            continue
        (wide,) = dtypes
        narrow, method = _NARROWER[wide]
        ids = {id(item) for item in weights}
        keys = {key for key in map(look.key, weights) if key and look.dies(key, ids) and not graphs.saves(key)}
        needed = dict.fromkeys(keys, 0)
        for item in {id(item): item for item in weights}.values():
            if (key := look.key(item)) in needed:
                needed[key] += look.read("nbytes", item) // 2
        if not has_torchs(module, method, "_apply"):
            continue
        yield from look.by_device(
            "precision",
            {key: look.sizes[key] - size for key, size in needed.items()},
            f"the weights of {path}, in eval mode, are {wide}",
            f"{path}.{method}()",
            f"if {narrow} is precise enough for what it computes; its inputs must be {narrow} then, too",
        )


def _is_floating(look: Look, item: Any) -> bool:
    return str(look.read("dtype", item)) in ("torch.float64", "torch.float32", "torch.float16", "torch.bfloat16")


def _trained(look: Look) -> set[int]:
    """Return the identities of the parameters that have a gradient or an optimizer."""
    found = {id(item) for item in look.tensors if look.read("is_leaf", item) and look.read("_grad", item) is not None}
    return found.union(*(map(id, optimized(optimizer)) for optimizer in look.heap.optimizers))


def optimized(optimizer: Any) -> list[Any]:
    """Return an optimizer's parameters."""
    groups = (instance_dict(optimizer) or {}).get("param_groups")
    lists = [group.get("params") for group in groups if type(group) is dict] if type(groups) is list else []
    return [parameter for those in lists if type(those) is list for parameter in those]


def untied(look: Look, graphs: Graphs) -> Iterator[Finding]:
    """Yield weights of one model that have equal content in two places."""
    kind = library_type("torch.nn", "Parameter")
    for module, path in look.models if kind is not None else ():
        first: dict[object, tuple[str, Any]] = {}
        for inside, part in with_parts(module):
            for name, weight in inner(part, "_parameters").items():
                key = look.key(weight)
                if type(weight) is not kind or key is None or look.sizes[key] < look.least:
                    continue
                place = look.spot(f"{path}{inside}.{name}")
                if place is None or place.value is not weight:
                    continue
                looks_like = (look.read("shape", weight), look.read("dtype", weight), look.devices[key])
                other_place, other = first.setdefault(looks_like, (place.code, weight))
                goes = look.is_only_at(weight, place) and look.dies(key, {id(weight)}) and not graphs.saves(key)
                if other is weight or not goes or not place.takes or not are_equal(look, other, weight):
                    continue
                yield from look.by_device(
                    "untied weights",
                    {key: look.sizes[key]},
                    f"{place.code} and {other_place} have equal content",
                    f"{place.code} = {other_place}",
                    "if they are to be one weight, which then trains as one; do it before you make the optimizer",
                )
