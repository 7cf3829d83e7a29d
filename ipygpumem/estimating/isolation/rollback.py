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

    Afterwards no tensor of the mode ``fakes`` should be alive. ``note`` gets a line for each
    failure.
    """

    def __init__(self, fakes: FakeTensorMode, note: Note) -> None:
        super().__init__(MOST_KEPT, find=())
        self._fakes = fakes
        self._note = note
        self._states = ObjectStates(note)
        self._unfreezes = False
        """True while ``put_back`` has to unfreeze the existing objects."""
        self._spare_threads()
        self._modules = set(sys.modules)
        self._save_settings()
        self._spare_libraries()
        modules = list(sys.modules.values())
        self.save(*[module_dict(module) for module in modules if is_imported_users_module(module)])

    def _spare_threads(self) -> None:
        """Exclude containers that the code of the user's other threads names: rollback would undo
        their changes.
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

    def _spare_libraries(self) -> None:
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
        deque(steps, maxlen=0)  # takes all steps

    def kind_of(self, item: object) -> str:
        """Return "leading" for each object, but "skip" for a plain number, text or None."""
        if type(item) is bytearray:
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
                self._fail(type_name(value))

    # -- settings --------------------------------------------------------------------------------

    def _save_settings(self) -> None:
        """Save the states of Python's, NumPy's and torch's random generators, and settings of torch
        and the process.
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

    def _fail(self, what: str) -> None:
        self._note(f"this could not be put back: {what}")

    def put_back(self) -> None:
        """Restore all saved states; note each failure, and each object that still holds a fake
        tensor.
        """
        if not self.complete:
            self._fail(f"the last of more than {MOST_KEPT:,} objects")
        steps = [*reversed(self._states.undo), self._states.undo.clear, self.drop]
        steps += [self._forget_modules, self._name_holders, self._unfreeze]
        # An error raised here would hide the code's own error.
        for step in steps:
            try:
                step()
            except Exception as error:  # noqa: PERF203  # the remaining steps still run
                first_line, _, _ = str(error).partition("\n")
                self._fail(first_line)

    def _forget_modules(self) -> None:
        """Forget the user's modules that the code imported: they may have made fake tensors."""
        new_modules = set(sys.modules) - self._modules
        for name in new_modules:
            if is_users_module(sys.modules[name]):
                _forget_module(name)

    def _unfreeze(self) -> None:
        if self._unfreezes:
            self._unfreezes = False
            gc.unfreeze()

    def _name_holders(self) -> None:
        """Note the objects that hold fake tensors after the estimate, after emptying the caches
        that do.
        """
        if not self._fakes_that_survive():
            return
        if self._unfreezes:  # older objects hold them, or garbage among these
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
    """Return the values that a frame's code names, and their attributes that it may name."""
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
