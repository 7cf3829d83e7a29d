"""``ipygpumem.tensors``, ``top``, ``diff`` and ``why``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType, ModuleType

from ipygpumem.api.shell import loaded_app
from ipygpumem.errors import GpuMemError
from ipygpumem.heap.kinds.tensors import Storages
from ipygpumem.heap.paths.roots import Root, Roots
from ipygpumem.introspect import is_instance, module_dict, text_of, type_name
from ipygpumem.inventory.arrays import records, survey
from ipygpumem.inventory.arrays.records import Inventory, InventoryDiff
from ipygpumem.inventory.names import ownership
from ipygpumem.inventory.names import top as largest
from ipygpumem.inventory.names.ownership import Ownership
from ipygpumem.inventory.names.top import LargestNames
from ipygpumem.notebook import current_shell
from ipygpumem.probes.host import rss_bytes
from ipygpumem.report import tensors as _tensors  # noqa: F401  # registers how records are shown
from ipygpumem.report import why as _why  # noqa: F401  # as above; with it, those of top
from ipygpumem.units import checked_bytes

_REFERENCES_ON_STACK = 1 if sys.version_info < (3, 11) else 0
"""References that a caller's stack keeps to an argument."""


def tensors(
    *names: str, device: str | None = None, kind: str | None = None, min_bytes: float | str = 0
) -> Inventory:
    """Return the live tensors and arrays, each storage once, the largest first.

    Use it to find out which names hold the memory, or before and after a step, with ``diff``. It
    works in a script as well. In IPython it also lists the notebook's names and cells, even without
    the extension. Memory without a Python object is not listed: activations saved for backward,
    buffers in C++.

    Args:
        names: globs, of which one must match a tensor's name: ``"model.*"``; none: all, with and
            without a name.
        device: ``RAM``, ``cuda:0``, or ``cuda`` for all of its kind.
        kind: ``parameter``, ``gradient``, ``optimizer state``, ``buffer`` or ``other``.
        min_bytes: the smallest size: a number, or ``"1MiB"``.

    Raises:
        GpuMemError: a name is not a string, or there is no such kind or device.
        UnitError: ``min_bytes`` is not a size.

    >>> weights = numpy.zeros((256, 512))
    >>> ipygpumem.tensors("weights").total_bytes
    1048576
    """
    _check_names(names, "tensors", "'model.*'")
    if kind is not None and kind not in records.ROLES:
        raise GpuMemError(
            f"there is no such kind of tensor: write one of {', '.join(records.ROLES)}"
        )
    least = checked_bytes(min_bytes)
    inventory = inventory_at(sys._getframe(1))
    return records.select(inventory, names, device=device, kind=kind, min_bytes=least)


def top(*names: str, device: str | None = None, min_bytes: float | str = 0) -> LargestNames:
    """Return the names that hold the most memory, with objects of any kind, the largest first.

    Use it to find out what fills the memory: text, frames, containers, models and tensors. Memory
    that several names share is counted once. It works in a script as well, with the names that the
    calling code sees.

    Args:
        names: globs, of which one must match a name; none: all.
        device: ``RAM``, ``cuda:0``, or ``cuda`` for all of its kind.
        min_bytes: the smallest size: a number, or ``"1MiB"``.

    Raises:
        GpuMemError: a name is not a string, or there is no such device.
        UnitError: ``min_bytes`` is not a size.

    >>> log = "x" * 1_000_000
    >>> ipygpumem.top("log").names[0].type_name
    'str'
    """
    _check_names(names, "top", "'log*'")
    least = checked_bytes(min_bytes)
    frame = sys._getframe(1)
    shell = current_shell()
    if shell is None:
        all_names = _largest_in_script(frame)
    else:
        from ipygpumem.shell.notebook_inventory import (  # no script needs IPython
            largest_names as in_notebook,
        )

        all_names = in_notebook(shell, frame)
    return largest.select(all_names, names, device=device, min_bytes=least)


def names_at(frame: FrameType) -> dict[str, object]:
    """Return the objects visible to code at ``frame`` by name, in a notebook also all of its names
    and outputs.
    """
    shell = current_shell()
    if shell is None:
        return _by_name(list(survey.visible_names(frame)))

    from ipygpumem.shell.ipython.caches import names_and_outputs  # no script needs IPython

    return names_and_outputs(shell) | survey.function_locals(frame)


def _by_name(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """Return the object of each name; of a name that is both a function's local and a global, the
    local's, which comes first in ``pairs``.
    """
    return dict(reversed(pairs))  # the last pair of a name counts


def _largest_in_script(frame: FrameType) -> LargestNames:
    """Return the memory that the names visible to a script's code hold."""
    pairs = list(survey.visible_names(frame))
    # A global that a local hides is not measured, but it refers to its object, too.
    references = Counter(id(value) for _, value in pairs)
    named = _by_name(pairs)
    pairs.clear()  # their references would count as holders
    return largest.measure_names(
        named, {"cpu": rss_bytes()}, references=references, namespaces=[id(frame.f_globals)]
    )


def _check_names(names: Sequence[object], function: str, example: str) -> None:
    """Raise GpuMemError unless all names for a function are strings, as in its ``example``."""
    for name in names:
        if type(name) is not str:
            raise GpuMemError(
                f"{function} takes names as strings, such as {example}, not {type_name(name)}; "
                f"see diff for inventories"
            )


def inventory_at(
    frame: FrameType,
    storages: Storages | None = None,
    *,
    has_arrays: bool = True,
    has_unnamed: bool = True,
) -> Inventory:
    """Return an inventory of tensors and arrays with the names visible to code at ``frame``, in a
    script or in the notebook. The other arguments are those of ``survey.take_inventory``.
    """
    shell = current_shell()
    if shell is None:
        code = frame.f_code
        return survey.take_inventory(
            survey.visible_names(frame),
            file=code.co_filename,
            line=frame.f_lineno,
            storages=storages,
            has_arrays=has_arrays,
            has_unnamed=has_unnamed,
        )

    from ipygpumem.shell.notebook_inventory import (  # no script needs IPython
        inventory_of_notebook,
    )

    return inventory_of_notebook(
        shell, frame, storages, has_arrays=has_arrays, has_unnamed=has_unnamed
    )


def diff(before: Inventory, after: Inventory) -> InventoryDiff:
    """Return the tensors and arrays that were added and removed between two inventories of
    ``tensors``.

    Use it to see what a step leaves behind. A new storage at the address of a freed one of the same
    size is missed.

    Raises:
        GpuMemError: an argument is not an inventory.

    >>> before = ipygpumem.tensors("batch")
    >>> batch = numpy.ones(2**17)
    >>> ipygpumem.diff(before, ipygpumem.tensors("batch")).changed_bytes
    {'cpu': 1048576}
    """
    for given in (before, after):
        if type(given) is not Inventory:
            raise GpuMemError(
                f"diff takes two inventories, as ipygpumem.tensors() returns them, not "
                f"{type_name(given)}"
            )
    return records.difference(before, after)


def why(obj: object) -> Ownership:
    """Return the memory behind ``obj``, the part that deleting its name would free, and the holders
    of the rest.

    Use it when ``del x`` freed less than you expected, or before you write it. The first name of
    ``obj`` in the calling function or its module does not count as a holder. Memory that a C
    library holds without telling Python's garbage collector counts as held by something unseen.

    Args:
        obj: any object.

    >>> rows = [bytes(2**20) for _ in range(4)]
    >>> last = rows[3]
    >>> found = ipygpumem.why(rows)
    >>> round(found.size_bytes / 2**20), round(found.freed_bytes["cpu"] / 2**20)
    (4, 3)
    >>> found.held[0].holder.advice
    'del last'
    """
    frame = sys._getframe(1)
    # In a list, which is all that refers to the object here: other references would be counted as
    # holders. So the variables that refer to it are deleted at once.
    holding = [obj]
    del obj
    named = [*survey.function_locals(frame).items(), *frame.f_globals.items()]
    name = next((name for name, value in named if value is holding[0]), "")
    del named
    references = 1 + _REFERENCES_ON_STACK  # of ``holding``, and of the caller's call
    if name:
        references += 1
    result = ownership.ownership_of(
        name or "object", holding, roots(frame.f_globals), references, is_name=bool(name)
    )
    app = loaded_app()
    # The line is then ``%xdel``, which finds the notebook's variables, not a function's local ones.
    if app is not None and app.context.namespace.get(name) is holding[0]:
        from ipygpumem.shell.ipython.caches import outputs_of  # scripts need no IPython

        result = replace(result, outputs=outputs_of(app.context.shell, holding[0]))
    text = holding[0]
    if type(text) is str and text in frame.f_globals and not name:  # ``why("model")``
        hint = f"this is about the text; for the variable: ipygpumem.why({text})"
        result = replace(result, notes=(*result.notes, hint))
    return result


def roots(*more: dict[str, object]) -> Roots:
    """Return the roots at which paths to objects begin: in a notebook those of its shell, in a
    script those of the main module; and the names in ``more`` namespaces.

    In a notebook, the globals of an imported module are left to the search, which writes them with
    the module's name: ``helpers.cache``. Globals of ``exec`` have no module.
    """
    app = loaded_app()
    if app is None:
        main = module_dict(sys.modules["__main__"])
        roots_here = Roots({id(main): Root.of_variable})
    else:
        roots_here = app.experiments.survivors.roots()
    further = {}
    for namespace in more:
        if app is None or not _is_of_module(namespace):
            further[id(namespace)] = Root.of_variable
    return replace(roots_here, namespaces={**further, **roots_here.namespaces})


def _is_of_module(namespace: dict[str, object]) -> bool:
    """Return True for the globals of an imported module, False for those of ``exec``."""
    module = sys.modules.get(text_of(namespace.get("__name__")))
    return is_instance(module, ModuleType) and module_dict(module) is namespace  # type: ignore[arg-type]
