"""Finds out whether anybody else leads to an object that is to go."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import CodeType

from ipygpumem.introspect import instance_dict
from ipygpumem.objects.heap import Heap
from ipygpumem.objects.holders.frames import peek, running_frames, running_ids
from ipygpumem.objects.holders.paths import Place, Writer
from ipygpumem.objects.holders.search import MOST_LOOKS, Roots, Search, with_own_dict
from ipygpumem.objects.progress import unseen


def others(item: object, given: Sequence[str], heap: Heap, roots: Roots, spared: Iterable[object]) -> str | None:
    """Return what else of the user's leads to an object; None if nothing does.

    Args:
        item: an object to which one global name may lead, and one of each running function: they pass it on.
        given: the names by which it is to go.
        heap: what is alive.
        roots: what the user can name.
        spared: ways through these objects do not count.
    """
    hidden = running_ids().union(*({id(one), id(instance_dict(one))} for one in spared))
    local_names = list[str]()
    for frame, thread in running_frames():
        values = peek(frame)
        found = [key for key, value in values.items() if value is item]
        found = _besides(found, given) if thread == threading.current_thread().name else found
        local_names += [Place.of_running(frame, thread, key).text for key in found]
        hidden.update({id(values.get(key)) for key in _rest_of_arguments(frame.f_code)})
    roots = replace(roots, hidden=roots.hidden | hidden)
    search = Search([], heap, roots, MOST_LOOKS)
    names, holders = list[str](), list[object]()
    for referrer, held in heap.referrers({id(item): item}):
        for holder, _ in () if id(referrer) in hidden else with_own_dict(referrer, held):
            places = search.names_in(holder, item)
            names += [place.text for place in places if place.is_users]
            holders += [holder] if not places and id(holder) not in hidden else []
    for text in (*_besides(sorted(names), given), *local_names):
        return text
    search = Search(holders, heap, roots, MOST_LOOKS)
    search.run(nobody=False, progress=unseen)
    chains = [chain for holder in holders if (chain := search.found(holder)) is not None and chain.place.is_users]
    writer = Writer(roots.cell_of)
    return min((writer.holder(one.place, (*one.chain, item)).path for one in chains), key=len, default=None)


def _besides(names: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return names without those that are given: as many others are if it is called by others there."""
    rest = [name for name in names if name.rpartition(" ")[2] not in given]
    return rest[max(0, len(given) - len(names) + len(rest)) :]


def _rest_of_arguments(code: CodeType) -> tuple[str, ...]:
    """Return the name of ``*args``, if a function has it: that tuple only passes objects on."""
    first = code.co_argcount + code.co_kwonlyargcount
    return code.co_varnames[first : first + 1] if code.co_flags & inspect.CO_VARARGS else ()
