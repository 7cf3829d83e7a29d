"""Names the namespaces and objects from which the user of a shell can reach objects.

A *root* is where the path to a holder begins, such as the variable ``model`` or ``Out[5]``. Each
function ``_root_of_...`` returns the root of one key of a namespace.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from ipygpumem.heap.holders.registries import Registries
from ipygpumem.heap.paths.attributes_to_remove import is_added
from ipygpumem.heap.paths.cuts import Cut, Kind
from ipygpumem.heap.paths.literals import literal
from ipygpumem.heap.paths.roots import KEPT, LAST_ERROR, Rank, Root, RootOf, Roots
from ipygpumem.introspect import instance_dict, module_dict, text_of
from ipygpumem.notebook import cell_of_file, code_of_output, deletion_of_output
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.ipython.caches import global_of_run, is_of_ipython

_FREED_OF_SHELL = {
    "displayhook",
    "display_pub",
    "last_execution_result",
    "InteractiveTB",
    "history_manager",
    "_db",
    "db",
}
"""Attributes of IPython's shell whose copies of outputs and errors are freed by ``%gpumem free``.
"""


def roots_of_notebook(
    context: ShellContext,
    saved: Iterable[tuple[str, object]],
    ours: object,
    keepers: Container[str],
) -> Roots:
    """Return the namespaces and objects from which the user can reach objects.

    Args:
        context: the shell's.
        saved: the names of open experiments, and the values that they restore at their end.
        ours: the object that holds all that the extension keeps.
        keepers: names that come last, because they keep objects on purpose.
    """
    shell = context.shell
    registries = Registries.read(context.namespace)
    namespaces = _namespaces(context, keepers)
    for name, values in saved:
        namespaces[id(values)] = functools.partial(_root_of_saved_object, name)
    namespaces.update(registries.namespaces)
    namespaces.update(_attributes_of_shell(shell))
    objects = {
        id(shell): Root.freed_by_command("IPython's shell", Rank.IPYTHON),
        id(ours): Root("ipygpumem itself", Rank.OURS, advice="please report this bug in ipygpumem"),
    }
    return Roots(
        namespaces,
        objects,
        registries.registered,
        frozenset(registries.hidden),
        cell_of=lambda filename: cell_of_file(shell, filename),
        names=context.namespace,
    )


def _namespaces(context: ShellContext, keepers: Container[str]) -> dict[int, RootOf]:
    """Return the functions that name the roots in IPython's namespaces, by the namespaces'
    identities.
    """
    shell = context.shell
    namespace = context.namespace
    root_of_name: RootOf = _root_of_variable
    if keepers:
        root_of_name = functools.partial(_root_of_variable_or_keeper, keepers)
    namespaces: dict[int, RootOf] = {
        id(namespace): root_of_name,
        id(shell.user_ns_hidden): _root_of_hidden_copy,
    }
    outputs = namespace.get("_oh")
    if type(outputs) is dict:
        namespaces[id(outputs)] = _root_of_output
    stored = instance_dict(getattr(shell, "InteractiveTB", None))
    if stored is not None:
        namespaces[id(stored)] = _root_of_last_error
    for name, module in list(getattr(shell, "_main_mod_cache", {}).items()):
        namespaces[id(module_dict(module))] = functools.partial(_root_of_script_global, name)
    return namespaces


def _attributes_of_shell(shell: Any) -> dict[int, RootOf]:
    """Return the functions that name the attributes of IPython's shell, by the identities of the
    dicts that have the attributes: its own dict, and the one of its traits.
    """
    attributes = instance_dict(shell) or {}
    dicts = [attributes, attributes.get("_trait_values")]
    root_of_attribute = functools.partial(_root_of_shell_attribute, shell)
    return {id(item): root_of_attribute for item in dicts if type(item) is dict}


# -- the root of each kind of key -----------------------------------------------------------------


def _root_of_variable(key: object) -> Root:
    """Return the root of a variable, or of one of IPython's names for outputs."""
    name = text_of(key)
    if is_of_ipython(name):
        return Root(f"IPython's output {name}", Rank.MODULE, advice=f"%xdel {name}", is_output=True)
    return Root.of_variable(key)


def _root_of_variable_or_keeper(keepers: Container[str], key: object) -> Root:
    """Return the root of a variable, last in the order of roots if it keeps its objects on
    purpose.
    """
    name = text_of(key)
    if name in keepers:
        return Root(f"{KEPT}{name}", Rank.KEPT, advice=f"delete {name} when you no longer need it")
    return _root_of_variable(key)


def _root_of_output(key: object) -> Root:
    """Return the root of an item of ``Out``."""
    if type(key) is int:
        # ``del`` and ``%reset -f out`` leave copies; %xdel knows where IPython keeps them.
        return Root(
            code_of_output(key),
            Rank.PLACE,
            advice=deletion_of_output(key),
            name="Out",
            is_output=True,
        )
    key_code = literal(key)  # the user has added it
    if not key_code:
        return Root("an item of Out", Rank.PLACE, is_of_library=True)
    code = f"Out[{key_code}]"
    return Root(code, Rank.PLACE, code=code, cut=Cut.of_root(Kind.KEY, code), name="Out")


def _root_of_hidden_copy(key: object) -> Root:
    """Return the root of a copy of a name or an output that IPython keeps in ``user_ns_hidden``."""
    name = text_of(key)
    if not name.startswith("_"):
        code = f'get_ipython().user_ns_hidden["{name}"]'
        cut = Cut.of_root(Kind.KEY, code)
        return Root(f"IPython's hidden copy of {name}", Rank.IPYTHON, code=code, cut=cut)
    return Root.freed_by_command(f"IPython's hidden copy of {name}", Rank.IPYTHON)


def _root_of_last_error(key: object) -> Root:
    """Return the root of the traceback that IPython has shown last."""
    return LAST_ERROR


def _root_of_script_global(file: str, key: object) -> Root:
    """Return the root of a global of a script that ``%run`` has run."""
    name = text_of(key)
    code = global_of_run(file, name)
    cut = Cut.of_root(Kind.ATTRIBUTE, code)
    return Root(f"module of %run {Path(file).name}, global {name}", Rank.MODULE, code=code, cut=cut)


def _root_of_saved_object(experiment: str, key: object) -> Root:
    """Return the root of an object that an open experiment restores at its end."""
    restores = f"experiment {experiment}, which restores {text_of(key)} at its end"
    return Root(restores, Rank.VARIABLE, advice="end it, then delete the name")


def _root_of_shell_attribute(shell: object, key: object) -> Root:
    """Return the root of an attribute of IPython's shell."""
    name = text_of(key)
    if name in _FREED_OF_SHELL or name.startswith("_"):
        return Root.freed_by_command(f"IPython's shell, {name}", Rank.IPYTHON)
    code = f"get_ipython().{name}"
    if name == "CustomTB":
        call = Cut.of_root(Kind.CALL, "get_ipython().set_custom_exc((), None)", id(shell))
        return Root(code, Rank.IPYTHON, is_removed_as_whole=True, cut=call)
    if is_added(shell, name, None):
        cut = Cut(Kind.DELETED_ATTRIBUTE, id(shell), "get_ipython()", code)
        return Root(code, Rank.IPYTHON, code=code, cut=cut)
    return Root(code, Rank.IPYTHON, code=code)
