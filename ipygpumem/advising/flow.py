"""How tensors went through a model, as live autograd graphs show it: which node made what others take."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ipygpumem.introspect import class_dict, instance_dict, name_of, text_of
from ipygpumem.objects.arrays import StorageKey, library_type

Following = dict[int, Any]
"""By a node's identity its ``next_functions``: what made its inputs."""
Saved = dict[int, list[tuple[StorageKey, Any]]]
"""By a node's identity the tensors that it has saved, with their storages; its leaf, where it stands for one."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_WRAPPED = ("torch.nn.parallel.", "torch.distributed.", "torch._dynamo.", "torch.jit.", "torch.fx.")


class Flow:
    """The nodes of all live graphs, those first that ran first.

    Attributes:
        nodes: all of them, by their identities.
        sources: what made a node's inputs, and which of its outputs that was; without what needs no gradient.
        takers: the nodes that take a node's outputs, once for each.
        leaves: the parameter or other leaf that a node stands for.
        savers: the nodes that have saved a storage, once for each time.
    """

    def __init__(self, nodes: list[Any], following: Following, saved: Saved) -> None:
        self.nodes = {id(node): node for node in nodes}
        self._by_name: dict[str, list[int]] = {}
        for key, node in self.nodes.items():
            self._by_name.setdefault(name_of(type(node)), []).append(key)
        self.sources: dict[int, list[tuple[int, int]]] = {}
        self.takers: dict[int, list[int]] = {key: [] for key in self.nodes}
        for key in self.nodes:
            self.sources[key] = [(id(node), place) for node, place in following[key] if node is not None]
            for source, _ in self.sources[key]:
                self.takers[source].append(key)
        self.leaves: dict[int, Any] = {}
        self.savers: dict[StorageKey, list[int]] = {}
        self.leaves.update((key, saved[key][0][1]) for key in self.named("AccumulateGrad") if key in saved)
        for key in self.nodes.keys() - self.leaves:
            for storage, _ in saved.get(key, ()):
                self.savers.setdefault(storage, []).append(key)
        self._places = {key: place for place, key in enumerate(self._sorted())}

    def named(self, name: str) -> list[int]:
        """Return the nodes of one type."""
        return self._by_name.get(name, [])

    def _sorted(self) -> list[int]:
        missing = {key: len(sources) for key, sources in self.sources.items()}
        found = [key for key, number in missing.items() if not number]
        for key in found:  # the list grows
            for taker in self.takers[key]:
                missing[taker] -= 1
                if not missing[taker]:
                    found.append(taker)
        return found

    def reach(self, groups: Mapping[int, int], combined: Callable[[int, int], int] = max) -> Counter[int]:
        """Return what is combined of the numbers of all leaves behind each node; ``groups`` has them by identity.

        Nodes that lead to none of them have no number: to follow one model takes no time for all the others.
        """
        found = Counter({key: groups[id(leaf)] for key, leaf in self.leaves.items() if id(leaf) in groups})
        behind, waiting = set[int](), list(found)
        while waiting:
            new = [taker for taker in self.takers[waiting.pop()] if taker not in behind]
            behind.update(new)
            waiting += new
        for key in sorted(behind, key=self._places.__getitem__):
            found[key] = functools.reduce(combined, (found[source] for source, _ in self.sources[key]))
        return found


def is_plain(parts: list[Any]) -> bool:
    """Whether modules are in training, and run as their classes say: no hook, no compiler, no wrapper."""
    return not _has_hooks_for_all() and all(map(_is_plain, parts))


def is_wrapper(part: Any) -> bool:
    """Whether a module hands a model's parts to other code, as parallel and compiled ones do."""
    where = [text_of(class_dict(kind).get("__module__")) for kind in type.mro(type(part))]
    return any(f"{module}.".startswith(_WRAPPED) for module in where)


def _is_plain(part: Any) -> bool:
    attributes = instance_dict(part) or {}
    if attributes.get("training") is not True or "forward" in attributes or attributes.get("_compiled_call_impl"):
        return False
    return not any(attributes.get(hooks) for hooks in _HOOKS) and not is_wrapper(part)


def _has_hooks_for_all() -> bool:
    base: Any = library_type("torch.nn", "Module")
    names = vars(sys.modules[base.__module__])
    return any(names.get(f"_global{hooks}") for hooks in _HOOKS)
