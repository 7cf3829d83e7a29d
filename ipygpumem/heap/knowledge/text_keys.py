"""Reads the text keys of dicts, which the collector does not report: of ``{"a": x}``, it reports
only ``x``.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence, Set
from itertools import chain, compress
from operator import eq
from typing import Any

from ipygpumem.heap.bulk import Batch, chunks, instances_among, of_types
from ipygpumem.introspect import is_instance

COMMON_REFERENCES = 100
"""A number or text with so many references is a constant, which no user owns."""
_DICT = {id(dict)}


def text_keys(
    objects: Sequence[Any], dicts: set[int], in_plain_dicts: int | None = None
) -> list[Any]:
    """Return the keys of dicts that the collector does not report: if all keys of a dict are texts,
    it reports none of them; else it reports all.

    Args:
        objects: the objects among which the dicts are.
        dicts: the types among theirs that derive from ``dict``, by identity.
        in_plain_dicts: number of references that their plain dicts report, if the caller has read
            these references anyway.
    """
    plain_dicts = of_types(_DICT, objects)
    if in_plain_dicts is None:
        in_plain_dicts = len(gc.get_referents(*plain_dicts))
    # More references than values: some of the dicts have keys other than texts. They are left out.
    if in_plain_dicts != sum(map(len, plain_dicts)):
        numbers_reported = map(len, map(gc.get_referents, plain_dicts))
        are_keys_missing = map(eq, numbers_reported, map(len, plain_dicts))
        plain_dicts = list(compress(plain_dicts, are_keys_missing))
    keys = list(chain.from_iterable(plain_dicts))
    subclasses = dicts - _DICT
    if subclasses:
        derived = of_types(subclasses, objects)
        for item in compress(derived, map(dict.__len__, derived)):  # most are empty
            keys += _unreported_keys(item)
    return keys


def referents_of(batch: Batch[Any], unvisited_types: Collection[int] = ()) -> tuple[list[Any], int]:
    """Return the objects to which the objects of a batch refer, once for each reference, and the
    number of these references that plain dicts have.

    The number is for ``text_keys``, which would visit all dicts again to count it.

    Args:
        batch: the objects.
        unvisited_types: identities of types whose objects are not visited.
    """
    referents = gc.get_referents(*batch.of_types(_DICT))
    in_plain_dicts = len(referents)
    referents += gc.get_referents(*batch.without_types(_DICT.union(unvisited_types)))
    return referents, in_plain_dicts


def _unreported_keys(item: Any) -> list[Any]:
    """Return the keys of an instance of a subclass of ``dict``, once for each reference to a key
    that the collector does not report.

    The instance reports its attributes and its class, too. An ``OrderedDict`` has a list of its
    keys next to the dict: it refers to each key twice, and reports a text key once.
    """
    references_to_key = 2 if is_instance(item, OrderedDict) else 1
    reported_ids = list(map(id, gc.get_referents(item)))
    if references_to_key == 1 and set(reported_ids).isdisjoint(map(id, dict.__iter__(item))):
        return list(dict.__iter__(item))  # nearly always; counting them takes 100 µs
    number_reported = Counter(reported_ids)
    number_as_value = Counter(map(id, dict.values(item)))
    keys = list[Any]()
    for key in dict.__iter__(item):
        number_as_key = number_reported[id(key)] - number_as_value[id(key)]
        keys += [key] * (references_to_key - number_as_key)
    return keys


def referents_with_keys(item: Any) -> list[Any]:
    """Return the objects to which an object refers; of a dict, also the text keys."""
    if not is_instance(item, dict):
        return gc.get_referents(item)
    return gc.get_referents(item) + text_keys([item], {id(type(item))})


def dicts_with_keys(objects: Sequence[Any], keys: Set[int]) -> list[Any]:
    """Return the dicts among objects that have one of the keys.

    Args:
        objects: the objects.
        keys: the identities of the keys, which are texts.
    """
    dicts = list[Any]()
    for chunk in chunks(instances_among(objects, dict)):
        keys_of_chunk = chain.from_iterable(map(dict.__iter__, chunk))
        if keys.isdisjoint(map(id, keys_of_chunk)):
            continue
        for item in chunk:
            if not keys.isdisjoint(map(id, dict.__iter__(item))):
                dicts.append(item)
    return dicts


def has_own_keys(dicts: Sequence[Any]) -> bool:
    """Return True if one of the dicts has a text key that is no constant, so that the key's memory
    belongs to the dict: ``{line: 1 for line in file}`` has such keys, ``{"name": "x"}`` has none.
    """
    keys = list(chain.from_iterable(map(dict.__iter__, dicts)))
    texts = keys
    if set(map(type, keys)) != {str}:
        texts = [key for key in keys if type(key) is str]
    return bool(texts) and min(map(sys.getrefcount, texts)) < COMMON_REFERENCES
