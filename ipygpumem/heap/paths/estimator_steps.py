"""Knows the estimators of scikit-learn: their attributes need each other, so that an estimator is
broken without one of them, while a clone is one that was never fitted.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from ipygpumem.heap.arrays import is_of_library
from ipygpumem.heap.paths.items_and_attributes import attribute_names
from ipygpumem.heap.paths.roots import module_code
from ipygpumem.introspect import is_exactly

_CLONED = (list, tuple)
"""Containers whose estimators ``clone`` clones; of a dict, it copies them with their fits."""


def is_estimator(item: object) -> bool:
    """Return True for an estimator, such as a classifier or a pipeline."""
    return is_of_library(item, "sklearn.base", "BaseEstimator")


def is_forgotten_by_clone(steps: Sequence[object]) -> bool:
    """Return True if a clone of the estimator at which some steps begin does not lead to their last
    object: one of them is an attribute that fitting has set.

    Its name begins or ends with an underscore, while those of parameters do neither:
    https://scikit-learn.org/stable/developers/develop.html
    """
    for owner, child in itertools.pairwise(steps):
        if is_estimator(owner):
            names = attribute_names(owner, child)
            if names and all(name.startswith("_") or name.endswith("_") for name in names):
                return True
        elif not is_exactly(owner, *_CLONED):
            return False
    return False


def clone_code(names: Mapping[str, object]) -> str:
    """Return the code of the function that clones estimators, for a notebook with these names."""
    return f"{module_code('sklearn.base', names)}.clone"
