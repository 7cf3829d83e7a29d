"""Reads the text keys of dicts, which the collector does not report."""

from __future__ import annotations

import gc
import sys
from collections import Counter, OrderedDict
from collections.abc import Sequence, Set
from itertools import chain, compress
from operator import eq
from typing import Any

from ipygpumem.heap.bulk import chunks, kinds_of, of_types
from ipygpumem.introspect import is_instance

COMMON_REFERENCES = 100
"""A number or text with as many references is a constant, which no user owns."""
_DICT = {id(dict)}


def text_keys(objects: Sequence[Any], dicts: set[int]) -> list[Any]:
    """Return the text keys of dicts, which the collector leaves out; of a dict with any other key,
    it reports all.

    Args:
        objects: any objects.
        dicts: the types among theirs that derive from ``dict``, by identity.
    """
    plain = of_types(_DICT, objects)
    if len(gc.get_referents(*plain)) != sum(map(len, plain)):
        numbers_reported = map(len, map(gc.get_referents, plain))
        are_keys_missing = map(eq, numbers_reported, map(len, plain))
        plain = list(compress(plain, are_keys_missing))
    keys = list(chain.from_iterable(plain))
    subclasses = dicts - _DICT
    if subclasses:
        for item in of_types(subclasses, objects):
            keys += _unreported_keys(item)
    return keys


def _unreported_keys(item: Any) -> list[Any]:
    """Return the keys of an instance of a subclass, once for each reference that is not reported.

    It reports its attributes and its class, too. An ``OrderedDict`` has a list of its keys besides
    the dict: it refers to each key twice, and reports a text key once.
    """
    reported = Counter(map(id, gc.get_referents(item)))
    reported.subtract(map(id, dict.values(item)))
    references = 2 if is_instance(item, OrderedDict) else 1
    keys = list[Any]()
    for key in dict.__iter__(item):
        keys += [key] * (references - reported[id(key)])
    return keys


def referents_with_keys(item: Any) -> list[Any]:
    """Return the objects to which an object refers, with the text keys of a dict."""
    if not is_instance(item, dict):
        return gc.get_referents(item)
    return gc.get_referents(item) + text_keys([item], {id(type(item))})


def dicts_with_keys(objects: Sequence[Any], keys: Set[int]) -> list[Any]:
    """Return the dicts among some objects that have one of the text ``keys``, by identity."""
    with_keys = list[Any]()
    for part in chunks(of_types(kinds_of(objects, dict), objects)):
        keys_of_part = chain.from_iterable(map(dict.__iter__, part))
        if keys.isdisjoint(map(id, keys_of_part)):
            continue
        for item in part:
            if not keys.isdisjoint(map(id, dict.__iter__(item))):
                with_keys.append(item)
    return with_keys


def has_own_keys(dicts: Sequence[Any]) -> bool:
    """Return True if dicts have text keys that few other objects refer to."""
    keys = list(chain.from_iterable(map(dict.__iter__, dicts)))
    texts = keys
    if set(map(type, keys)) != {str}:
        texts = [key for key in keys if type(key) is str]
    return bool(texts) and min(map(sys.getrefcount, texts)) < COMMON_REFERENCES
