"""Writes the steps of paths through the objects of torch: modules, hooks, optimizers, graphs."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ipygpumem.heap.kinds.arrays import is_array, is_of_library, library_type
from ipygpumem.heap.paths.attributes_to_remove import is_needed_by_methods
from ipygpumem.heap.paths.cuts import Cut, Kind, split
from ipygpumem.heap.paths.items_and_attributes import attribute_text
from ipygpumem.heap.paths.literals import literal
from ipygpumem.heap.paths.path_state import ASSIGNED, Path
from ipygpumem.heap.paths.remedies import NO_REMEDY, Remedy
from ipygpumem.heap.paths.roots import NOTEBOOK
from ipygpumem.introspect import (
    instance_dict,
    is_exactly,
    is_instance,
    module_of,
    text_of,
    type_name,
)

DETACH = "keep loss.item() or tensor.detach() instead of a tensor with its graph"
"""Advice for a graph that keeps memory alive."""
_PARTS = {"_modules", "_parameters", "_buffers"}
"""Attributes of modules with their parts by name."""
_LISTS = ("ModuleList", "Sequential")
"""Names of torch's modules whose parts are items."""
_HANDLE = "call the hook's handle.remove(), if you have kept the handle"


_STATE_MADE_AT_START = {"Adagrad"}
"""Names of torch's optimizers that make their state in the constructor: without it, their next step
fails.
"""


MADE_IN_STEPS = frozenset(
    [
        "step",
        "momentum_buffer",
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "mu_product",
        "exp_inf",
        "square_avg",
        "acc_delta",
        "grad_avg",
        "eta",
        "mu",
        "ax",
        "prev",
        "step_size",
        "row_var",
        "col_var",
        "variance",
        "func_evals",
        "n_iter",
        "d",
        "t",
        "old_dirs",
        "old_stps",
        "ro",
        "H_diag",
        "prev_flat_grad",
        "prev_loss",
        "al",
    ]
)
"""The names of the state that torch's optimizers make in the first step in which it is missing."""


def append_torch_step(path: Path, steps: Sequence[object], names: Mapping[str, object]) -> int:
    """Append a step through an object of torch, such as ``model.head`` or ``: its autograd graph``;
    return the number of its references.

    The number is 0 if the object is none of torch, or if the step is an attribute like any other.

    Args:
        path: the path to the object.
        steps: the object, and the objects after it.
        names: the user's names, among which the handle of a hook may be.
    """
    parent, child = steps[0], steps[1]
    is_node_of_users = module_of(child) == "torch.autograd.function"  # a subclass of ``Function``
    is_inside_graph = type_name(parent).endswith("Backward0")
    if is_node_of_users or is_inside_graph:
        path.advise(_detaching(path), words=DETACH, comment=f"and {DETACH}")
        path.append_words(f": its autograd graph ({type_name(child)})")
        return 1
    hooks_of_tensor = _hooks_of_tensor(parent, child)
    if hooks_of_tensor and len(steps) == 2:
        path.advise(path.statement("{}" + hooks_of_tensor + ".clear()"), words=_HANDLE)
        path.append_fixed(" (its hooks)")
        return 1
    if len(steps) > 2 and is_instance(child, dict):
        attribute = attribute_text(parent, child)
        kind_of_hook = _kind_of_hook(parent, attribute)
        if kind_of_hook:  # model._forward_hooks[3]
            _append_hook(path, kind_of_hook, steps, names)
            return 2
        if attribute[1:] in _PARTS:  # model._modules["head"]
            _append_part(path, steps)
            return 2
    if is_of_library(parent, "torch.optim", "Optimizer"):
        return _append_optimizer_step(path, steps)
    return 0


def _append_optimizer_step(path: Path, steps: Sequence[object]) -> int:
    """Append the step from an optimizer to a parameter that is a key of its state; return the
    number of its references.

    For any other step the number is 0, because it is an attribute like any other. If it leads into
    the state, the advice is ``optimizer.state.clear()``.
    """
    optimizer, child = steps[0], steps[1]
    if attribute_text(optimizer, child) == ".state":
        if _append_parameter_of_group(path, steps):
            return 2
        # The line ends the state, not the optimizer: the groups still lead to the parameters.
        clearing = _clearing_state(optimizer, child, path)
        path.advise(clearing, comment=_BEGINS_AGAIN, ended_object=child)
        if _is_added_state(steps):  # an average of the user, which the optimizer does not need
            return 0
    path.is_in_model = True
    return 0


def _append_parameter_of_group(path: Path, steps: Sequence[object]) -> bool:
    """Append the step from an optimizer to a parameter that is a key of its state, if a group has
    the parameter; return True if it does.

    Clearing the state frees nothing that such a parameter refers to, for instance by its hooks.
    """
    if len(steps) < 3 or not _is_key_of_state(steps[1], steps[2]):
        return False
    groups: Any = (instance_dict(steps[0]) or {}).get("param_groups")
    if not is_exactly(groups, list):
        return False
    for group_number, group in enumerate(groups):
        parameters: Any = dict.get(group, "params") if is_instance(group, dict) else None
        if not is_exactly(parameters, list):
            continue
        for number, parameter in enumerate(parameters):
            if parameter is steps[2]:
                step = f'.param_groups[{group_number}]["params"][{number}]'
                path.is_in_model = True
                path.append_removable(step, path.code and f"{path.code}{step}")
                return True
    return False


def _is_key_of_state(state: Any, item: object) -> bool:
    """Return True if an object, such as a parameter, is a key of an optimizer's state."""
    if not is_instance(state, dict):
        return False
    return any(key is item for key in list(dict.keys(state)))


def _is_added_state(steps: Sequence[object]) -> bool:
    """Return True if a chain from one of torch's optimizers leads to an entry that users have added
    to a parameter's state, such as an average of their own.
    """
    if len(steps) < 4 or not module_of(steps[0]).startswith("torch.optim."):
        return False
    of_parameter, entry = steps[2], steps[3]
    if not is_instance(of_parameter, dict):
        return False
    key = _key_in_dict(of_parameter, entry)
    return key is not None and not (type(key) is str and key in MADE_IN_STEPS)


def is_needed_by_optimizer(steps: Sequence[object]) -> bool:
    """Return True if a chain leads through what the next step of an optimizer needs: its state, or
    the parameters and options of a group.
    """
    for position, (owner, child) in enumerate(itertools.pairwise(steps)):
        if not is_of_library(owner, "torch.optim", "Optimizer"):
            continue
        name = attribute_text(owner, child)
        following = steps[position + 2 :]
        if name == ".state" and not _is_behind_parameter(child, following):
            return True
        if name == ".param_groups" and _is_needed_option(owner, following):
            return True
    return False


def _is_behind_parameter(state: object, following: Sequence[object]) -> bool:
    """Return True if a parameter that is a key of an optimizer's state leads to a chain's last
    object, such as one of its hooks.
    """
    return len(following) > 1 and _is_key_of_state(state, following[0])


def words_for_parameter(steps: Sequence[object]) -> str:
    """Return words that say how to free a parameter to which an optimizer leads; empty for another
    object.

    An example is the head of an older model, for which an experiment has added a group of
    parameters: no line takes a parameter out of a group.
    """
    for position, (owner, child) in enumerate(itertools.pairwise(steps)):
        if not is_of_library(owner, "torch.optim", "Optimizer"):
            continue
        name = attribute_text(owner, child)
        is_key = name == ".state" and _is_key_of_state(child, steps[-1])
        is_last_step = position == len(steps) - 3  # optimizer, state, parameter
        if name == ".param_groups" or (is_key and is_last_step):
            return "make the optimizer again, without it"
    return ""


def _is_needed_option(optimizer: object, steps: Sequence[object]) -> bool:
    """Return True if a chain leads from a group of an optimizer to its parameters, or to an option
    that each group has, such as the learning rate.
    """
    if len(steps) < 2:
        return False
    group: Any = steps[0]
    if not is_instance(group, dict):
        return False
    defaults: Any = (instance_dict(optimizer) or {}).get("defaults")
    names = {"params"}
    if is_exactly(defaults, dict):
        names.update(defaults)
    return any(dict.get(group, name) is steps[1] for name in names)


def words_for_needed(steps: Sequence[object], path: Path) -> str:
    """Return words that say how to free a tensor, array or module that is an attribute of a torch
    module, if the module's own methods need it; empty if they do not.

    An example is a buffer ``mask`` that ``forward`` reads, to which a cell assigned a larger one.
    """
    child = steps[-1]
    is_replaceable = (
        is_array(child)
        or is_of_library(child, "torch", "Tensor")
        or is_of_library(child, "torch.nn", "Module")
    )
    module, name = _last_attribute(steps)
    if not is_replaceable or not is_of_library(module, "torch.nn", "Module"):
        return ""
    if not is_needed_by_methods(type(module), name):
        return ""
    target = split(path.code)[1] or "it"
    return f"assign something smaller to {target}: methods of {type_name(module)} read it"


def _last_attribute(steps: Sequence[object]) -> tuple[object, str]:
    """Return the object and the name of its attribute by which a chain leads to its last object:
    ``model`` and ``head`` for ``model.head``, although that is in a dict of the module.
    """
    if len(steps) < 2:
        return None, ""
    owner, child = steps[-2:]
    module = steps[-3] if len(steps) > 2 else None
    is_in_module = is_of_library(module, "torch.nn", "Module")
    if is_in_module and attribute_text(module, owner)[1:] in _PARTS:
        return module, text_of(_key_in_dict(owner, child))
    return owner, attribute_text(owner, child)[1:]


def _append_hook(
    path: Path, hook: str, steps: Sequence[object], names: Mapping[str, object]
) -> None:
    """Append a hook of a tensor, module or optimizer.

    Args:
        path: the path to the owner.
        hook: the kind of the hook, such as ``forward hook``.
        steps: the owner, the dict of its hooks, the hook, and the objects after it.
        names: the user's names.
    """
    owner, hooks = steps[0], steps[1]
    attribute = attribute_text(owner, hooks) or _hooks_of_tensor(owner, hooks)
    key = _key_in_dict(hooks, steps[2])
    removal = _removal_by_handle(hooks, key, names)
    if not removal and attribute:
        # ``pop`` would return the hook, which IPython would keep in ``Out``.
        template = f"del {{}}{attribute}[{literal(key)}]"
        if len(hooks) == 1:  # type: ignore[arg-type]  # it is a dict
            template = f"{{}}{attribute}.clear()"
        removal = path.statement(template)
    # The line ends this dict only: hooks of other modules may lead to the same objects.
    path.advise(removal, words=_HANDLE, ended_object=hooks)
    path.text.replace_by_words(f"{hook} on {path.text.shown.removeprefix(NOTEBOOK)}")
    path.code = ""


def _removal_by_handle(hooks: object, key: object, names: Mapping[str, object]) -> str:
    """Return the statement that removes a hook by its handle, ``handle.remove()``; empty if no
    name refers to the handle.

    Args:
        hooks: the dict of the hooks.
        key: the key of the hook.
        names: the user's names.
    """
    for name, value in list(names.items()):
        if not is_of_library(value, "torch.utils.hooks", "RemovableHandle"):
            continue
        handle = instance_dict(value) or {}
        if handle.get("id") == key and handle["hooks_dict_ref"]() is hooks:
            return f"{name}.remove()"
    return ""


def _append_part(path: Path, steps: Sequence[object]) -> None:
    """Append a module, parameter or buffer of a module: ``model.head``, or ``layers[3]`` of a
    ``ModuleList``.
    """
    module, parts, child = steps[:3]
    key = text_of(_key_in_dict(parts, child))
    kind: Kind | None = None
    position = size = 0
    part = f".get_submodule({literal(key)})"
    if key.isidentifier():
        part = f".{key}"
        # A module's part that is None stays among its parts; a dict of modules would offer it.
        is_module = is_of_library(child, "torch.nn", "Module")
        kind = Kind.DELETED_ATTRIBUTE if is_module else Kind.ATTRIBUTE
    elif _is_position(module, parts, key):
        part = f"[{key}]"
        kind, position, size = Kind.ITEM, int(key), len(parts)  # type: ignore[arg-type]  # a dict
    target = path.code and f"{path.code}{part}"
    cut = None
    if target and kind is not None:
        # The dict is the owner: the module's other parts stay.
        cut = Cut(kind, id(parts), path.code, target, position, size)
    path.is_in_model = True
    path.append_removable(f"[{key}]" if key.isdecimal() else part, target, cut)


def _is_position(module: object, parts: Any, key: str) -> bool:
    """Return True if a part's key in the dict of a ``ModuleList`` or ``Sequential`` is also its
    position: the name of a part may be another number.
    """
    is_list = any(is_of_library(module, "torch.nn", name) for name in _LISTS)
    return is_list and key.isdecimal() and list(parts)[int(key) : int(key) + 1] == [key]


def _key_in_dict(items: Any, value: object) -> object:
    """Return the key of a value in a dict; None if it is not there."""
    return next((key for key, item in list(dict.items(items)) if item is value), None)


def _clearing_state(optimizer: object, state: Any, path: Path) -> str:
    """Return the statement that drops the state of an optimizer, ``optimizer.state.clear()``; empty
    if that may do harm.

    It does no harm to most of torch's own optimizers, which begin without state and make it in the
    first step. But the user may have added state, which is lost then.
    """
    module = module_of(optimizer)
    if not module.startswith("torch.optim.") or type_name(optimizer) in _STATE_MADE_AT_START:
        return ""
    for of_parameter in list(dict.values(state)):
        if not is_instance(of_parameter, dict):
            return ""
        for key in list(dict.keys(of_parameter)):
            if type(key) is not str or key not in MADE_IN_STEPS:
                return ""
    return path.statement("{}.state.clear()")


def _kind_of_hook(owner: object, name: str) -> str:
    """Return the kind of hooks in an attribute of a tensor, module or optimizer: ``forward hook``
    for ``._forward_hooks``; empty if it has no hooks.

    Args:
        owner: the object.
        name: the attribute; empty for the hooks of a tensor, which are in none.
    """
    kinds = (("torch.nn", "Module"), ("torch.optim", "Optimizer"))
    has_hooks = is_of_library(owner, "torch", "Tensor") or (
        name.endswith("_hooks") and any(is_of_library(owner, *kind) for kind in kinds)
    )
    return f"{name.strip('._').removesuffix('hooks').replace('_', ' ')}hook" if has_hooks else ""


def _hooks_of_tensor(tensor: object, hooks: object) -> str:
    """Return ``.name`` for the attribute of a tensor that is ``hooks``; empty if there is none."""
    if not is_instance(hooks, dict) or not is_of_library(tensor, "torch", "Tensor"):
        return ""
    base: Any = library_type("torch", "Tensor")
    with sys.modules["torch"]._C.DisableTorchFunction():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if hasattr(base, name) and getattr(base, name).__get__(tensor) is hooks:
                return f".{name}"
    return ""


_BEGINS_AGAIN = "all its averages and momentum begin again"


def remedy_for_graph(steps: Sequence[object], path: Path) -> Remedy:
    """Return the remedy for a tensor that keeps a graph: to replace it by one without the graph,
    ``loss = loss.detach()``.

    From a list, the tensor is removed instead, and only this one: the other items may be older, and
    their graphs still needed.
    """
    cut = path.cut
    if cut is None:
        return NO_REMEDY
    is_in_list = len(steps) > 1 and is_exactly(steps[-2], list, deque)
    is_removed_from_list = is_in_list and cut.kind is Kind.ITEM and not path.is_fixed
    if not is_removed_from_list:
        cut = _without_graph(cut, path)
    return Remedy(cut.statement, f"and {DETACH}", (cut,))


def _detaching(path: Path) -> str:
    """Return the statement that replaces a path's tensor by one without its graph, or removes it if
    its place takes no other tensor; empty if there is none.
    """
    if path.cut is None:
        return ""
    return _without_graph(path.cut, path).statement


def _without_graph(cut: Cut, path: Path) -> Cut:
    """Return the reference to a tensor with which a path ends, so that its line only removes the
    graph: ``losses[3] = losses[3].detach()`` instead of ``del losses[3]``.

    If nothing can be assigned there, such as an item of a tuple, it is returned as it is.
    """
    is_replaceable = not path.is_fixed and cut.kind in ASSIGNED and cut.target == path.code
    return replace(cut, is_detached=True) if is_replaceable else cut
