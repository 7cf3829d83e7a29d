"""``%gpumem advise``, and what a notebook adds to a look for advice: its names, its outputs."""

from __future__ import annotations

from types import FrameType
from typing import Any

from ipygpumem.advising import advisor
from ipygpumem.advising.places import NO_OUTPUTS, Outputs, Scope
from ipygpumem.advising.records import Advised
from ipygpumem.errors import NotLoadedError
from ipygpumem.introspect import instance_dict
from ipygpumem.notebook.commands.parsing import Options
from ipygpumem.notebook.ipython.outputs import is_of_ipython
from ipygpumem.notebook.notebook import Notebook, notebook_of
from ipygpumem.objects.inventory import survey
from ipygpumem.reports.advice import advice_report
from ipygpumem.reports.layout import Report
from ipygpumem.scopes.scope import is_ownable

_WORK = "what would save memory"


def advise(notebook: Notebook, options: Options) -> list[Report]:
    """Return the report of what would save memory."""
    least = advisor.LEAST_BYTES if options.min is None else options.min
    with notebook.tools.live.work(_WORK) as progress:
        found = advisor.advise(scope_of(notebook.tools.shell), least, progress)
    return [advice_report(found, top=options.top)]


def asked_by(frame: FrameType, shell: Any, least: int) -> Advised:
    """Return the advice that code at ``frame`` asks for; where the extension is loaded, with a bar if it lasts."""
    scope = scope_of(shell, survey.locals_of(frame))
    try:
        notebook = notebook_of(shell)
    except NotLoadedError:
        return advisor.advise(scope, least)
    with notebook.tools.live.work(_WORK) as progress:
        return advisor.advise(scope, least, progress)


def scope_of(shell: Any, local: dict[str, object] | None = None) -> Scope:
    """Return the names of a notebook, and those of the function that asks."""
    return Scope(
        shell.user_ns,
        local or {},
        is_users=lambda name: is_ownable(name) and not is_of_ipython(name),
        outputs=_outputs(shell),
    )


def _outputs(shell: Any) -> Outputs:
    """Return the outputs that ``%xdel _5`` makes IPython forget wherever it keeps them."""
    cache, namespace = shell.user_ns.get("_oh"), shell.user_ns
    if type(cache) is not dict:
        return NO_OUTPUTS
    numbers = {key for key in cache if type(key) is int and namespace.get(f"_{key}") is cache[key]}
    places = [cache, namespace, shell.user_ns_hidden, shell.displayhook, shell.last_execution_result]
    keepers = {id(place) for place in places} | {id(instance_dict(place)) for place in places[3:] if place is not None}
    return Outputs(cache, frozenset(numbers), frozenset(keepers), "%xdel _{}".format)
