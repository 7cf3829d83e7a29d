"""Advice on activations that could write their result into their input: the graph keeps one storage, and not two.

Only of some does torch then save the result (measured with torch 2.11 and 2.13). ``ReLU`` saves its result either way;
of ``SiLU``, ``Hardtanh``, ``Threshold`` and others torch copies the input before it is written to.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from ipygpumem.advising.flow import Flow, is_plain
from ipygpumem.advising.graphs import Graphs
from ipygpumem.advising.look import Look
from ipygpumem.advising.places import has_torchs, inner, outermost, parameters_of, with_parts
from ipygpumem.advising.records import Finding
from ipygpumem.introspect import class_dict, instance_dict, is_exactly, is_instance, module_of, name_of, type_name
from ipygpumem.objects.arrays import StorageKey, library_type

_FEW = 4
"""So many modules are named one by one."""


class _Kind(NamedTuple):
    """Activations whose nodes in graphs have one name."""

    classes: tuple[str, ...]
    functions: frozenset[str]
    """What has the same nodes without a module."""
    slope: str
    """A number of the module: below zero, the input cannot be told from the result."""
    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32", "float64")
    """In which backward comes to the same from the result: where it needs more than the sign, half loses too much."""


_KINDS = {
    "LeakyReluBackward0": _Kind(("LeakyReLU",), frozenset({"leaky_relu"}), "negative_slope"),
    "EluBackward0": _Kind(("ELU", "SELU"), frozenset({"elu", "selu"}), "alpha", ("float32", "float64")),
    "CeluBackward0": _Kind(("CELU",), frozenset({"celu"}), "alpha", ("float32", "float64")),
    "RreluWithNoiseBackward0": _Kind(("RReLU",), frozenset({"rrelu"}), "lower"),
}


def in_place(look: Look, graphs: Graphs) -> Iterator[Finding]:
    """Yield activation modules that keep their inputs for backward, where their results would do."""
    there = {name_of(type(node)) for node in graphs.nodes} & _KINDS.keys()
    for name in sorted(there):
        kind, flow = _KINDS[name], graphs.flow
        nodes = [key for key in flow.named(name) if _is_waiting(flow.nodes[key])]
        classes = [found for one in kind.classes if (found := library_type("torch.nn", one)) is not None]
        models = outermost(look.heap.modules) if nodes else []
        having = [model for model in models if any(is_instance(p, c) for _, p in with_parts(model) for c in classes)]
        bits = {id(model): 1 << number for number, model in enumerate(having)}
        of_weights = Counter[int]()
        for model in having:
            for weight in parameters_of(model):
                of_weights[id(weight)] |= bits[id(model)]
        reached = flow.reach(of_weights, operator.or_)
        for model, path in look.named(having):
            bit = bits[id(model)]
            of_model = [key for key in nodes if reached[key] & bit]
            parts = dict(with_parts(model))
            # Where a graph leads through two such models, nobody can tell whose a node is.
            if all(reached[key] == bit for key in of_model) and _may_change(model, parts, kind, classes):
                ours = _of_classes(parts, classes)
                if _are_models_alone(look, parts, ours):
                    yield from _of_model(look, graphs, of_model, path, ours)


def _of_classes(parts: dict[str, Any], classes: list[Any]) -> dict[str, Any]:
    return {path: part for path, part in parts.items() if any(type(part) is kind for kind in classes)}


def _is_waiting(node: Any) -> bool:
    """Whether no backward pass has gone through a node."""
    try:
        return node._raw_saved_self is not None
    except (AttributeError, RuntimeError):  # torch 2.0; freed
        return False


def _may_change(model: Any, parts: dict[str, Any], kind: _Kind, classes: list[Any]) -> bool:
    """Whether all that computes such an activation in a model are plain modules of one class, out of place."""
    every = list(parts.values())
    ours = list(_of_classes(parts, classes).values())
    if not ours or any(type(part) is not type(ours[0]) for part in ours) or not is_plain(every):
        return False
    derived = sum(is_instance(part, one) for part in every for one in classes)
    if derived != len(ours) or not has_torchs(model, "modules", "named_modules") or any(map(_is_changed, ours)):
        return False
    if not all(_is_right(part, kind.slope) for part in ours):
        return False
    return not any(_calls(part, kind.functions) for part in every)


def _are_models_alone(look: Look, parts: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether no other model and no name has the activations: lists do, with which a model was made."""
    own = {id((instance_dict(part) or {}).get("_modules")) for part in parts.values()}
    wanted = {id(part): part for part in ours.values()}
    if wanted.keys() & look.shared or any(map(look.is_in_frames, ours.values())):
        return False
    others = [one for one, _ in look.heap.referrers(wanted) if id(one) not in own]
    return all(type(one) is list or type(one) is tuple for one in others)


def _is_changed(part: Any) -> bool:
    return not has_torchs(part, "forward", "__call__", "__setattr__")


def _is_right(part: Any, slope: str) -> bool:
    attributes = instance_dict(part) or {}
    number = attributes.get(slope, 1.0)
    return attributes.get("inplace") is False and is_exactly(number, int, float) and number >= 0


def _calls(part: Any, functions: frozenset[str]) -> bool:
    """Whether the code of a module's class names one of ``functions``, but for a module under that name."""
    if module_of(part).startswith("torch.nn."):
        return False
    own = functions - inner(part, "_modules").keys()
    methods = [item for kind in type.mro(type(part)) for item in class_dict(kind).values()]
    codes = [item.__code__ for item in methods if type(item) is FunctionType and item.__module__ != _base_module()]
    for code in codes:  # the list grows
        codes += [constant for constant in code.co_consts if type(constant) is CodeType]
        if any(name.rstrip("_") in own for name in code.co_names):
            return True
    return False


def _base_module() -> str:
    base: Any = library_type("torch.nn", "Module")
    return str(base.__module__)


def _of_model(look: Look, graphs: Graphs, nodes: list[int], path: str, parts: dict[str, Any]) -> Iterator[Finding]:
    if not nodes or len(nodes) % len(parts):  # the activation is computed elsewhere, too
        return
    shares: dict[StorageKey, int] = {}
    for node in nodes:
        key = _input(look, graphs, node)
        if key is None:
            return
        results = [look.sizes[result] for result in graphs.results.get((node, 0), ()) if result != key]
        if results:
            shares[key] = min(look.sizes[key], *results)
    places = [look.spot(f"{path}{inside}") for inside in parts]
    found = [place.code for place, part in zip(places, parts.values(), strict=True) if place and place.value is part]
    if len(found) == len(parts):
        kind = type_name(next(iter(parts.values())))
        yield from look.by_device(
            "in-place activation",
            shares,
            f"{len(nodes):,} inputs of {kind} in {path} wait for backward(), where their results would do",
            _line(path, found),
            "from the next forward pass on, if nothing else uses what goes into it, as a hook, a detach() or a mask",
        )


def _line(path: str, places: list[str]) -> str:
    if len(places) == 1:
        return f"{places[0]}.inplace = True"
    those = f"({', '.join(places)})"
    if len(places) > _FEW:
        those = f"[part for part in {path}.modules() if type(part) is type({places[0]})]"
    return f"for part in {those}: part.inplace = True"


def _input(look: Look, graphs: Graphs, node: int) -> StorageKey | None:
    """Return the storage of an activation's input if the result may be written into it."""
    flow: Flow = graphs.flow
    data: Any = getattr(flow.nodes[node]._raw_saved_self, "data", None)
    base: Any = library_type("torch", "Tensor")
    sources = flow.sources[node]
    if not is_instance(data, base) or len(sources) != 1:  # packed by a hook of the user's
        return None
    if str(look.read("dtype", data)).removeprefix("torch.") not in _KINDS[name_of(type(flow.nodes[node]))].dtypes:
        return None
    ((source, place),) = sources
    key = look.key(data)
    if key is None or not look.dies(key, set()) or flow.savers.get(key) != [node]:
        return None
    if source in flow.leaves or _is_users(flow.nodes[source]) or look.read("_base", data) is not None:
        return None
    if name_of(type(flow.nodes[source])) in _KINDS:  # in place it saves its result, which this one would overwrite
        return None
    taken = [(other, at) for taker in set(flow.takers[source]) for other, at in flow.sources[taker]]
    return key if taken.count((source, place)) == 1 else None


def _is_users(node: Any) -> bool:
    """Whether a node is a Function's that is written in Python: torch may refuse to write into what that made."""
    base = library_type("torch._C", "_FunctionBase")
    return base is None or is_instance(node, base)
