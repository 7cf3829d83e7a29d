"""``%gpumem why``: shows the memory that deleting a name would free, and the holders
of the rest.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import replace

from IPython.core.error import UsageError

from ipygpumem.errors import describe_error, ellipsize, quoted
from ipygpumem.introspect import type_name
from ipygpumem.inventory.ownership import ownership_of
from ipygpumem.magics import completions, tensors
from ipygpumem.report.layout import Report, clean
from ipygpumem.report.why import left_report, of_ipython_report, outputs_report, why_report
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.declarations import Options, argument, command, did_you_mean
from ipygpumem.shell.ipython.caches import made_by_ipython, outputs_of
from ipygpumem.shell.ipython.sources import cell_that_bound

_ONE_NAME = "one name at a time; %gpumem top {} lists several"
_NAMES = re.compile(r"\w+(, *\w+)+,? *")
"""Matches several names, which Python takes for a tuple."""


@command(
    "%gpumem why",
    "show what ``del`` of a name would free, and what else holds the rest",
    argument(
        "expression",
        "EXPRESSION",
        offers=completions.names,
        is_code=True,
        missing="which name? For instance: %gpumem why model",
    ),
)
def why(app: App, options: Options) -> list[Report]:
    """Return the report on a name, an expression, or a deleted name."""
    expression = options.expression
    names = app.context.namespace
    is_name = expression in names
    try:
        # the list is the only reference to the object here
        holding = [names[expression] if is_name else app.context.shell.ev(expression)]
    except Exception as error:
        if type(error) is NameError and expression.isidentifier():
            return [_report_of_deleted(app, expression)]
        raise UsageError(clean(f"%gpumem why: {_problem(expression, error, names)}")) from None
    if not is_name and type(holding[0]) is tuple and _NAMES.fullmatch(expression):
        words = expression.replace(",", "")
        raise UsageError(clean(f"%gpumem why: {_ONE_NAME.format(words)}"))
    report = _report_of_ipythons(app, expression, holding, is_name=is_name)
    if report is not None:
        return [report]
    references = 2 if is_name else 1  # of the list, and of the name
    roots = app.experiments.survivors.roots()
    with app.context.display.working("what else holds it"):
        ownership = ownership_of(expression, holding, roots, references, is_name=is_name)
    ownership = replace(ownership, outputs=outputs_of(app.context.shell, holding[0]))
    text = holding[0]
    if not is_name and type(text) is str and text in names:
        hint = f"this is about the text; for the variable: %gpumem why {text}"
        ownership = replace(ownership, notes=(*ownership.notes, hint))
    return [why_report(ownership)]


def _report_of_ipythons(
    app: App, expression: str, holding: list[object], *, is_name: bool
) -> Report | None:
    """Return the report on the only object in ``holding`` if it is IPython's own, such as its
    outputs; None for another one.
    """
    shell = app.context.shell
    cache = app.context.namespace.get("_oh")
    if type(cache) is dict and holding[0] is cache:
        return outputs_report(tensors.outputs(shell), len(cache))
    made = made_by_ipython(shell, expression) if is_name else ""
    if made:
        return of_ipython_report(expression, type_name(holding[0]), made)
    return None


def _problem(expression: str, error: Exception, names: Container[str]) -> str:
    """Return the message on an expression that cannot be evaluated."""
    words = re.split(r"[\s,]+", expression)
    several = [word for word in words if word in names]
    if type(error) is SyntaxError and len(several) > 1:
        return _ONE_NAME.format(" ".join(several))
    return f"{quoted(expression)}: {ellipsize(describe_error(error))}"


def _report_of_deleted(app: App, name: str) -> Report:
    """Return the report on a name that does not exist, or no longer."""
    cell = cell_that_bound(app.context.shell, name)
    meant = "" if cell is not None else did_you_mean(name, list(app.context.namespace))
    return left_report(name, cell, app.experiments.survivors.left_by(name, cell), meant)
