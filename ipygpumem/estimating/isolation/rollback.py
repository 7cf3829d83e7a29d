"""Rollback of an estimate: saves state that its code can change without a copy, and restores it
afterwards.

This covers the user's modules with their classes and objects, objects that copies share with their
originals, and settings of torch and of the process.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ipygpumem import interrupts
from ipygpumem.estimating.isolation.object_states import (
    CONTAINERS,
    ObjectStates,
    is_imported_users_module,
)
from ipygpumem.estimating.isolation.settings import SETTINGS
from ipygpumem.estimating.isolation.surviving_fakes import empty_caches, fakes_of, names_of_holders
from ipygpumem.estimating.records import Note
from ipygpumem.heap.knowledge.frames import background_frames, peek
from ipygpumem.heap.walks.walk import MOST_KEPT, Group, Walk
from ipygpumem.introspect import (
    instance_dict,
    is_atom,
    is_instance,
    is_users_module,
    module_dict,
    type_name,
)


class Rollback(Walk):
    """Saves the state of each object once, before code can change it; ``put_back`` restores all
    states.

    It is a walk over objects: each object whose state is saved leads to the objects that it holds.

    Args:
        fakes: the mode of the estimate's fake tensors, none of which should be alive afterwards.
        note: gets a line for each failure.
    """

    def __init__(self, fakes: FakeTensorMode, note: Note) -> None:
        super().__init__(MOST_KEPT, find=())
        self._fakes = fakes
        self._note = note
        self._states = ObjectStates(note)
        self._unfreezes = False
        """True while ``put_back`` has to unfreeze the existing objects."""
        self._modules_before = set(sys.modules)
        self._spare_containers_of_threads()
        self._save_settings()
        self._spare_namespaces_of_libraries()
        modules = list(sys.modules.values())
        self.save(*[module_dict(module) for module in modules if is_imported_users_module(module)])

    def _spare_containers_of_threads(self) -> None:
        """Exclude containers that the code of the user's other threads names: a rollback would undo
        these threads' changes. The threads are noted.
        """
        threads = set()
        for frame, thread in background_frames():
            threads.add(thread)
            for value in _named_values(frame):
                if any(is_instance(value, kind) for kind in CONTAINERS):
                    self._states.spared[id(value)] = value
        if threads:
            names = ", ".join(sorted(threads))
            self._note(
                f"threads of yours are running ({names}): lists and dicts that their code names "
                "are not rolled back, but other changes of theirs to modules and classes may be"
            )

    def _spare_namespaces_of_libraries(self) -> None:
        """Exclude the namespaces of libraries, which a name of the user's may lead to.

        For instance, ``vars(torch)`` has ``builtins``, whose functions a rollback itself calls.
        """
        for module in list(sys.modules.values()):
            if not is_instance(module, types.ModuleType) or is_users_module(module):
                continue
            space = module_dict(module)
            self._states.spared[id(space)] = space

    def save(self, *values: Any) -> None:
        """Save the state of ``values`` and of all objects that they lead to."""
        steps = self.walk_from([(values, None)])
        deque(steps, maxlen=0)  # runs through all steps, and keeps none

    def kind_of(self, item: object) -> str:
        """Return "leading" for each object, but "skip" for a plain number, text or None."""
        if type(item) is bytearray:  # an atom that code can change
            return "leading"
        if is_atom(item):
            return "skip"
        return "leading"

    def enter(self, objects: Sequence[Any], path: str) -> Iterator[Group]:
        """Save the state of each of ``objects``, and yield the objects that it holds, whose states
        are saved next.
        """
        for value in objects:
            try:
                yield self._states.save(value), None
            except Exception:  # noqa: PERF203  # one unusual object must not end the estimate
                self._note_failure(type_name(value))

    # -- settings --------------------------------------------------------------------------------

    def _save_settings(self) -> None:
        """Save the states of Python's, NumPy's and torch's random generators, the settings of torch
        and the process, and the path of imports.
        """
        numpy_random: Any = getattr(sys.modules.get("numpy"), "random", None)
        if numpy_random is not None:
            self._states.save_state(numpy_random.get_state, numpy_random.set_state)
        self._states.save_state(torch.get_rng_state, torch.set_rng_state)
        if torch.cuda.is_initialized():
            self._states.save_state(torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all)
        for get, put in SETTINGS:
            # Suppressed: it is not in this torch, or the folder is gone.
            with contextlib.suppress(AttributeError, OSError):
                self._states.save_state(get, put, operator.eq)
        shared_random = getattr(random, "_inst", None)  # the object behind random.random()
        self.save(sys.path, shared_random)

    def freeze_heap(self) -> None:
        """Exclude the existing objects from collections until ``put_back``.

        With large libraries loaded, each collection of all objects takes 0.2 s. What the user has
        frozen stays frozen.
        """
        self._unfreezes = gc.get_freeze_count() == 0
        if self._unfreezes:
            gc.freeze()

    # -- the end ---------------------------------------------------------------------------------

    def _note_failure(self, what: str) -> None:
        self._note(f"this could not be put back: {what}")

    def put_back(self) -> None:
        """Restore all saved states; note each failure, and each object that still holds a fake
        tensor.
        """
        if not self.complete:
            self._note_failure(f"the last of more than {MOST_KEPT:,} objects")
        steps = [*reversed(self._states.undo), self._states.undo.clear, self.drop]
        steps += [self._forget_modules, self._name_holders, self._unfreeze]
        # An error raised here would hide the code's own error.
        for step in steps:
            try:
                step()
            except Exception as error:  # noqa: PERF203  # the remaining steps still run
                first_line, _, _ = str(error).partition("\n")
                self._note_failure(first_line)

    def _forget_modules(self) -> None:
        """Forget the user's modules that the code imported: they may have made fake tensors."""
        new_modules = set(sys.modules) - self._modules_before
        for name in new_modules:
            if is_users_module(sys.modules[name]):
                _forget_module(name)

    def _unfreeze(self) -> None:
        if self._unfreezes:
            self._unfreezes = False
            gc.unfreeze()

    def _name_holders(self) -> None:
        """Note the objects that still hold fake tensors of the estimate.

        First the objects of before the estimate are unfrozen, since garbage among them may hold the
        tensors, and then the caches of ``functools.lru_cache`` that hold some are emptied.
        """
        if not self._fakes_that_survive():
            return
        if self._unfreezes:
            self._unfreeze()
            if not self._fakes_that_survive():
                return
        empty_caches()
        for holder in names_of_holders(self._fakes):
            self._note(f"{holder} still holds a fake tensor of this estimate: delete or empty it")

    def _fakes_that_survive(self) -> list[Any]:
        """Return the fake tensors that are alive after a collection."""
        with interrupts.reraise_swallowed():
            gc.collect()
        return fakes_of(self._fakes)


def _named_values(frame: types.FrameType) -> list[Any]:
    """Return the values that a frame's code names, and these values' attributes that it may name.

    For ``self.jobs.append(x)`` these are ``self``, ``x`` and the attribute ``jobs``.
    """
    names = frame.f_code.co_names
    space = frame.f_globals
    values = list(peek(frame).values())
    values += [space[name] for name in names if name in space]
    items: list[Any] = []
    for value in values:
        attributes = instance_dict(value) or {}
        items += map(attributes.get, names)
    return [*values, *items]


def _forget_module(name: str) -> None:
    """Remove a module, also from its package, so that its tensors are freed."""
    module = sys.modules.pop(name)
    parent, _, last = name.rpartition(".")
    if parent not in sys.modules:
        return
    space = module_dict(sys.modules[parent])
    if space.get(last) is module:
        del space[last]
