"""Decides which gradients one ``zero_grad()`` may clear.

A model has the gradients of all its parameters. Those of one layer may be older than the memory to
free: a cell has computed them before the experiment that trains another layer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Set
from typing import Any

from ipygpumem.heap.bulk import instances_among
from ipygpumem.heap.kinds.arrays import Array, StorageKey, described, is_of_library
from ipygpumem.heap.knowledge.graphs import gradient_of
from ipygpumem.heap.paths.ages import Ages
from ipygpumem.introspect import instance_dict, is_instance

_FURTHER_SHARE = 0.1
"""Maximum share of further gradients that a line clears if their age is unknown, by their bytes:
biases are too small for rows.
"""


class ClearableGradients:
    """Decides whether a module or optimizer may clear all of its gradients.

    Args:
        wanted: the storages of the gradients to free.
        ages: tells which gradients are older.
    """

    def __init__(self, wanted: Set[StorageKey], ages: Ages) -> None:
        self._wanted = wanted
        self._ages = ages
        self._older = {id(reference()) for reference in ages.learned.objects}
        """Identities of objects that are known to be older."""
        self._clearable: dict[int, frozenset[int]] = {}
        """Identities of the parameters of each owner that was asked about; none if one of their
        gradients must stay.
        """

    def are_cleared_by(self, owner: object, tensors: Iterable[object]) -> bool:
        """Return True if ``zero_grad()`` of a module or optimizer clears the gradients of tensors,
        and no gradient that must stay, such as an older one.
        """
        if not any(is_of_library(owner, *kind) for kind in _WITH_GRADIENTS):
            return False
        if id(owner) not in self._clearable:
            self._clearable[id(owner)] = self._parameters_to_clear(owner)
        return self._clearable[id(owner)].issuperset(map(id, tensors))

    def _parameters_to_clear(self, owner: object) -> frozenset[int]:
        """Return the identities of the parameters of a module or optimizer; none if the gradient of
        one must stay.
        """
        torch: Any = sys.modules["torch"]
        parameters = instances_among(list(_parameters_of(owner)), torch.Tensor)
        with torch._C.DisableTorchFunction():
            gradients = [each for parameter in parameters for each in gradient_of(parameter)]
        wanted_bytes = other_bytes = 0
        must_stay = False
        for gradient, array in described(gradients):
            if array.storage in self._wanted:
                wanted_bytes += array.size_bytes
            elif self._learn_if_older(gradient, array):
                must_stay = True
            else:
                other_bytes += array.size_bytes
        if not self._ages.are_known and other_bytes > _FURTHER_SHARE * wanted_bytes:
            must_stay = True
        return frozenset() if must_stay else frozenset(map(id, parameters))

    def _learn_if_older(self, gradient: object, array: Array) -> bool:
        """Note a gradient that is older than the memory to free, for later searches, to which its
        age is unknown; return True if it is older.
        """
        if id(gradient) in self._older:
            return True
        if not self._ages.are_known or not self._ages.may_be_older_array(gradient, array):
            return False
        self._older.add(id(gradient))
        self._ages.learned.add(gradient)
        return True


_WITH_GRADIENTS = (("torch.nn", "Module"), ("torch.optim", "Optimizer"))
"""Classes of torch with ``zero_grad``."""


def _parameters_of(owner: object) -> Iterator[Any]:
    """Yield the tensors whose gradients ``zero_grad()`` of a module or optimizer clears."""
    if is_of_library(owner, "torch.optim", "Optimizer"):
        attributes = instance_dict(owner) or {}
        groups: Any = attributes.get("param_groups")
        for group in groups if type(groups) is list else ():
            parameters: Any = group.get("params") if type(group) is dict else None
            if type(parameters) is list:
                yield from parameters
        return
    modules = {id(owner): owner}
    waiting = [owner]
    for module in waiting:  # the list grows
        yield from _parts(module, "_parameters")
        for inner in _parts(module, "_modules"):
            if id(inner) not in modules:
                modules[id(inner)] = inner
                waiting.append(inner)


def _parts(module: object, name: str) -> Iterator[Any]:
    """Yield the values of one of a module's dicts, such as ``_parameters``."""
    parts: Any = (instance_dict(module) or {}).get(name)
    if is_instance(parts, dict):
        yield from list(dict.values(parts))
