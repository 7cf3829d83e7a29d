"""Knows the estimators of scikit-learn: their attributes need each other, so that an estimator is
broken without one of them, while a clone is one that was never fitted.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

from ipygpumem.heap.arrays import is_of_library
from ipygpumem.heap.paths.items_and_attributes import attribute_names
from ipygpumem.heap.paths.roots import module_code
from ipygpumem.introspect import (
    class_dict,
    instance_dict,
    is_exactly,
    is_users_class,
    mro_of,
    text_of,
)

_CLONED = (list, tuple)
"""Containers whose estimators ``clone`` clones; of a dict, it copies them with their fits."""


def is_estimator(item: object) -> bool:
    """Return True for an estimator, such as a classifier or a pipeline."""
    return is_of_library(item, "sklearn.base", "BaseEstimator")


def is_forgotten_by_clone(steps: Sequence[object]) -> bool:
    """Return True if a clone of the estimator at which some steps begin does not lead to their last
    object: one of them is an attribute that fitting has set, or the list of a pipeline's steps.
    """
    for owner, child in itertools.pairwise(steps):
        if is_estimator(owner):
            names = attribute_names(owner, child)
            if names and all(map(_is_set_by_fit, names)):
                return True
        elif not is_exactly(owner, *_CLONED):
            return False
    return _has_estimators(steps[-1])


def has_only_a_fit(estimator: object) -> bool:
    """Return True if an estimator has nothing but its parameters and what fitting has set: a clone
    has no other attributes. It makes no difference to the user's own classes, whose parameters may
    be anything.
    """
    attributes = instance_dict(estimator)
    if is_users_class(type(estimator)) or attributes is None:
        return False
    splitter = attributes.get("cv")
    if type(splitter) is str and splitter == "prefit":  # its estimators must be fitted
        return False
    parameters = set[str]()
    for kind in mro_of(type(estimator)):
        init = class_dict(kind).get("__init__")
        if type(init) is FunctionType:
            code = init.__code__
            parameters.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    names = map(text_of, attributes)
    return all(name in parameters or _is_set_by_fit(name) for name in names)


def clone_code(names: Mapping[str, object]) -> str:
    """Return the code of the function that clones estimators, for a notebook with these names."""
    return f"{module_code('sklearn.base', names)}.clone"


def _is_set_by_fit(name: str) -> bool:
    """Return True for the name of an attribute that begins or ends with an underscore, which those
    of parameters do not.

    https://scikit-learn.org/stable/developers/develop.html
    """
    return name.startswith("_") or name.endswith("_")


def _has_estimators(container: Any) -> bool:
    """Return True for a list of estimators, or of tuples with an estimator each."""
    if not is_exactly(container, *_CLONED):
        return False
    for item in container:
        parts = item if type(item) is tuple else (item,)
        if any(map(is_estimator, parts)):
            return True
    return False
