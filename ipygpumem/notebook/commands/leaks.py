"""What did not come back, and who holds it: ``%gpumem leaks``, and the survivors that an experiment's end lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ipygpumem.freeing.reclaim import trim_host_heap
from ipygpumem.introspect import is_users_module, module_dict, text_of, type_name
from ipygpumem.model import Held, Holder
from ipygpumem.notebook.commands.parsing import Parser, size
from ipygpumem.notebook.experiments.watching import Watched
from ipygpumem.notebook.ipython.sources import cell_of_file, cell_that_bound, running_cell
from ipygpumem.objects.arrays import Array, describe, watch
from ipygpumem.objects.heap import Heap, large_tensors
from ipygpumem.objects.holders.frames import running_locals
from ipygpumem.objects.holders.graphs import live_tensors
from ipygpumem.objects.holders.paths import NOTEBOOK, Place
from ipygpumem.objects.holders.search import Roots, explain
from ipygpumem.objects.progress import Progress, part, parts
from ipygpumem.reports.content import Report, leaks_report

if TYPE_CHECKING:
    from ipygpumem.notebook.notebook import Notebook

_MOST = 2000
"""How many are explained at once, the largest first."""

_OF_MODULE = re.compile(r"module ([\w.]+), global [^:]+")
_QUOTED = re.compile(r'"[^"]*"')
_SCOPES_OUTPUT = re.compile(r"Out\[(\d+)\]")
_OUTPUT = re.compile(r"_\d*|_{2,3}|_i*\d*")


def survivors(
    notebook: Notebook,
    watched: Iterable[Watched],
    known: Callable[[object, Array], bool],
    *,
    certain: bool = True,
    first_cell: int | None = None,
) -> tuple[Held, ...]:
    """Return what an experiment leaves behind, largest first, with who holds it; remember it for %gpumem leaks.

    Args:
        session: the shell's.
        watched: what the experiment's names held.
        known: says of a tensor whether its memory was there before, or stays on purpose.
        certain: whether all that was there before is known, NumPy's arrays too.
        first_cell: number of the experiment's first cell; the running one unless told.
    """
    smallest = notebook.tools.config.min_held_bytes
    alive = [
        _with_cell(notebook, item, first_cell, certain=certain) for item in watched if _size(item.alive()) >= smallest
    ]
    named = {array.storage for item in alive for array in item.alive()}
    for key, tensors in large_tensors(live_tensors(notebook.tools.garbage), smallest).items():
        array = describe(tensors[0]) if key not in named else None
        if array is not None and not known(tensors[0], array):
            alive.append(Watched(_held(tensors[0]), ((watch(tensors[0]), array),)))
    if not alive:
        return ()
    told = {
        array.storage for item in notebook.survivors.known for array in item.alive()
    }  # by an experiment inside this one
    notebook.survivors.known += [item for item in alive if any(array.storage not in told for array in item.alive())]
    with notebook.tools.live.work("who holds what is still alive") as progress:
        heap = Heap(running_locals(), part(progress, 0.0, 0.5))
        found = _explained(notebook, alive, heap, part(progress, 0.5, 1.0))
        heap.drop()
    trim_host_heap()  # what the search took must not be the next experiment's to give back
    return found


def _with_cell(notebook: Notebook, item: Watched, first_cell: int | None, *, certain: bool) -> Watched:
    """Return what a name held with the cell that bound it: later ones may bind the name to something else."""
    is_old_perhaps = not certain and any(array.storage[0] == "numpy" for array in item.alive())
    output = _SCOPES_OUTPUT.fullmatch(item.held.name)
    first = running_cell(notebook.tools.shell) if first_cell is None else first_cell
    cell = int(output[1]) if output else cell_that_bound(notebook.tools.shell, item.held.name, range(first))
    return replace(item, held=replace(item.held, cell=cell), is_old_perhaps=is_old_perhaps)


def leaks(notebook: Notebook, words: list[str]) -> list[Report]:
    """Return what survived experiments, and what no notebook name leads to, with who holds it."""
    parser = Parser(prog="%gpumem leaks", add_help=False, allow_abbrev=False)
    parser.add_argument("--min", type=size, default=notebook.tools.config.min_held_bytes)
    smallest: int = parser.parse_args(words).min
    with notebook.tools.live.work("leaks") as progress:
        begun = 0.0 if notebook.survivors.known else 0.5
        found, beyond = _look(notebook, smallest, part(progress, 0.0, begun)) if begun else ([], [])
        if notebook.survivors.known or found or beyond:
            # What nobody holds is no leak; where nothing is found before, nothing is after it.
            notebook.tools.garbage.collect()
            found, beyond = _look(notebook, smallest, part(progress, begun, 1.0))
    trim_host_heap()
    return [leaks_report(sorted(found, key=lambda held: -held.size_bytes), smallest, beyond)]


def _look(notebook: Notebook, smallest: int, progress: Progress) -> tuple[list[Held], list[Held]]:
    """Return what leaks, and what is too small to be looked into beside all that; forget survivors that are gone."""
    live_tensors(notebook.tools.garbage)  # from now on each has an object
    of_heap, of_known, of_others = parts(progress, (4, 2, 4))
    heap = Heap(running_locals(), of_heap)
    notebook.survivors.known = [item for item in notebook.survivors.known if item.alive()]
    known = [item for item in notebook.survivors.known if _size(item.alive()) >= smallest]
    found = _explained(notebook, known, heap, of_known)
    unnamed, beyond = _unnamed(notebook, heap, known, smallest, of_others)
    heap.drop()
    return [*found, *unnamed], beyond


def _size(arrays: Iterable[Array]) -> int:
    return sum(array.size_bytes for array in arrays)


def _explained(notebook: Notebook, watched: Sequence[Watched], heap: Heap, progress: Progress) -> tuple[Held, ...]:
    """Return what is alive of each, largest first, with who holds its largest array."""
    alive = sorted(((item, item.alive()) for item in watched), key=lambda pair: -_size(pair[1]))
    alive = [(item, arrays) for item, arrays in alive if arrays]
    holders = explain([arrays[0].storage for _, arrays in alive[:_MOST]], heap, roots(notebook), progress=progress)
    return tuple(
        replace(
            item.held,
            size_bytes=_size(arrays),
            arrays=len(arrays),
            holder=_in_doubt(holder) if item.is_old_perhaps else holder,
        )
        for item, arrays, holder in ((*pair, holders.get(pair[1][0].storage)) for pair in alive)
    )


def _in_doubt(holder: Holder | None) -> Holder | None:
    return holder and Holder(f"{holder.path}, perhaps since before the experiment", "")


def _unnamed(
    notebook: Notebook, heap: Heap, known: Sequence[Watched], smallest: int, progress: Progress
) -> tuple[list[Held], list[Held]]:
    """Return the tensors and arrays that no notebook name leads to and that are not among ``known``.

    Beside them those that are too many to be looked into, the smallest.
    """
    storages = {array.storage for item in known for array in item.alive()}
    found = {key: _held(same[0]) for key, same in heap.large(smallest).items() if key not in storages}
    ordered = sorted(found, key=lambda key: -found[key].size_bytes)
    holders = explain(ordered[:_MOST], heap, roots(notebook), progress=progress)
    modules = _users_modules(notebook.tools.namespace)
    unnamed = [key for key in ordered[:_MOST] if not _is_plain(holders[key].path, modules)]
    told = [replace(found[key], holder=_without_advice(holders[key])) for key in unnamed]
    return told, [found[key] for key in ordered[_MOST:]]


def _without_advice(holder: Holder) -> Holder:
    """Leave out what would take something older than the experiments; what IPython keeps by itself may go."""
    return holder if holder.advice.startswith("%") else replace(holder, advice="")


def _users_modules(namespace: dict[str, Any]) -> set[str]:
    """Return the names of modules from the user's files that the notebook can write, ``package.module`` too."""
    waiting, names = [namespace], set[str]()
    while waiting:
        found = [module_dict(item) for item in list(waiting.pop().values()) if is_users_module(item)]
        new = {text_of(inside.get("__name__")): inside for inside in found if "__file__" in inside}
        waiting += [inside for name, inside in new.items() if name not in names]
        names |= new.keys()
    return names


def _is_plain(path: str, modules: set[str]) -> bool:
    """Whether a path leads through a variable's items and attributes only: such data is kept on purpose.

    So is what the notebook can write as ``module.name[index].attribute``, with one of the user's ``modules``.
    """
    path = _QUOTED.sub("", path)  # a key may hold anything
    module = _OF_MODULE.fullmatch(path)
    return (path.startswith(NOTEBOOK) and ": " not in path) or (module is not None and module[1] in modules)


def _held(item: object) -> Held:
    """Return what a tensor or array without a name is."""
    array = describe(item)
    if array is None:  # it was readable a moment ago
        return Held("", type_name(item), None, "", "", 0)
    return Held("", array.type_name, array.shape, array.dtype, array.device, array.size_bytes)


def roots(notebook: Notebook) -> Roots:
    """Return what the user of a notebook can name."""
    shell, outputs = notebook.tools.shell, notebook.tools.namespace.get("_oh")
    namespaces: dict[int, Callable[[object], Place]] = {
        id(notebook.tools.namespace): _variable,
        id(shell.user_ns_hidden): _hidden,
    }
    if type(outputs) is dict:
        namespaces[id(outputs)] = _output
    for experiment in notebook.experiments.open:
        namespaces[id(experiment.scope.waiting)] = _waits_in(experiment.name)
    objects = {
        id(shell): Place("IPython's shell", 3, "%gpumem free"),
        id(notebook): Place("ipygpumem itself", 4, "report this: it should not"),
    }
    return Roots(namespaces, objects, cell_of=lambda filename: cell_of_file(shell, filename))


def _variable(key: object) -> Place:
    name = text_of(key)
    if _OUTPUT.fullmatch(name):
        return Place(f"IPython's output {name}", 2, f"%xdel {name}")
    return Place.of_variable(key)


def _output(key: object) -> Place:
    # ``del`` and ``%reset -f out`` leave copies; %xdel knows where IPython keeps them.
    return Place(f"Out[{key}]", 1, f"%xdel _{key}; a line that ends with ; is not kept")


def _hidden(key: object) -> Place:
    return Place(f"IPython's hidden copy of {text_of(key)}", 3, "%gpumem free lets go of it")


def _waits_in(experiment: str) -> Callable[[object], Place]:
    def place(key: object) -> Place:
        return Place(
            f"experiment {experiment}, which gives {text_of(key)} back", 0, "it is back at the experiment's end"
        )

    return place
