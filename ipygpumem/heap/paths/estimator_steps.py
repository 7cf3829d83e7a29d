"""Recognises estimators of scikit-learn, which a line replaces by a clone that was never fitted:
``model = sklearn.base.clone(model)``. Without one of its attributes an estimator would be broken.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

from ipygpumem.heap.kinds.arrays import is_of_library
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
    """Return True if a clone of an estimator does not lead to a chain's last object.

    The chain leads through an attribute that fitting has set, such as ``model.coef_``. Or it ends
    at the list of a pipeline's steps, which the clone has as clones, too.

    Args:
        steps: the estimator, and the objects after it.
    """
    for owner, child in itertools.pairwise(steps):
        if is_estimator(owner):
            names = attribute_names(owner, child)
            if names and all(map(_is_set_by_fit, names)):
                return True
        elif not is_exactly(owner, *_CLONED):
            return False
    return _has_estimators(steps[-1])


def has_only_parameters_and_fit(estimator: object) -> bool:
    """Return True if an estimator of a library has no attributes but its parameters, which a clone
    has, too, and those that fitting has set.

    It is False for the user's own classes, whose parameters may be anything.
    """
    attributes = instance_dict(estimator)
    if is_users_class(type(estimator)) or attributes is None:
        return False
    splitter = attributes.get("cv")
    if type(splitter) is str and splitter == "prefit":  # its estimators must be fitted
        return False
    parameters = _constructor_parameters(type(estimator))
    names = map(text_of, attributes)
    return all(name in parameters or _is_set_by_fit(name) for name in names)


def _constructor_parameters(kind: type) -> set[str]:
    """Return the names of the parameters of a class and its bases."""
    parameters = set[str]()
    for base in mro_of(kind):
        init = class_dict(base).get("__init__")
        if type(init) is FunctionType:
            code = init.__code__
            parameters.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    return parameters


def clone_code(names: Mapping[str, object]) -> str:
    """Return the code of the function that clones estimators, ``sklearn.base.clone``.

    Args:
        names: the notebook's names, one of which may be the module.
    """
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
