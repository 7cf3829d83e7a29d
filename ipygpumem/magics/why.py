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
from ipygpumem.inventory.names.ownership import ownership_of
from ipygpumem.magics import completions, tensors
from ipygpumem.report.layout import Report
from ipygpumem.report.why import (
    of_ipython_report,
    outputs_report,
    undefined_name_report,
    why_report,
)
from ipygpumem.report.words import clean
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.declarations import Options, argument, command, did_you_mean
from ipygpumem.shell.ipython.caches import made_by_ipython, outputs_of
from ipygpumem.shell.ipython.sources import cell_that_bound

_ONE_NAME = "one name at a time; %gpumem top {} lists several"
_SEVERAL_NAMES = re.compile(r"\w+(, *\w+)+,? *")
"""Matches several names, such as ``x, y``, which Python takes for a tuple."""


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
    """Return the report on a name, an expression, or a deleted name.

    Everything below gets the object in a list: a variable would be a reference of ours among the
    user's, which are counted.
    """
    expression = options.expression
    names = app.context.namespace
    is_name = expression in names
    try:
        only_object = [names[expression] if is_name else app.context.shell.ev(expression)]
    except Exception as error:
        if type(error) is NameError and expression.isidentifier():
            return [_report_on_missing_name(app, expression)]
        message = _message_on_failed_expression(expression, error, names)
        raise UsageError(clean(f"%gpumem why: {message}")) from None
    is_several_names = not is_name and _SEVERAL_NAMES.fullmatch(expression)  # ``x, y``
    if is_several_names and type(only_object[0]) is tuple:
        words = expression.replace(",", "")
        raise UsageError(clean(f"%gpumem why: {_ONE_NAME.format(words)}"))
    report = _report_on_ipythons_own(app, expression, only_object, is_name=is_name)
    if report is not None:
        return [report]
    return [_report_on_object(app, expression, only_object, is_name=is_name)]


def _report_on_object(
    app: App, expression: str, only_object: list[object], *, is_name: bool
) -> Report:
    """Return the report on a user's object, the only item of ``only_object``: the memory that its
    name frees, and the holders of the rest.
    """
    # Of the list, and of the name itself, which is no holder of the rest.
    references_not_counted = 2 if is_name else 1
    roots = app.experiments.survivors.roots()
    with app.context.display.working("what else holds it"):
        ownership = ownership_of(
            expression, only_object, roots, references_not_counted, is_name=is_name
        )
    outputs = outputs_of(app.context.shell, only_object[0])
    notes = ownership.notes
    text = only_object[0]
    if not is_name and type(text) is str and text in app.context.namespace:  # ``"model"``
        notes = (*notes, f"this is about the text; for the variable: %gpumem why {text}")
    return why_report(replace(ownership, outputs=outputs, notes=notes))


def _report_on_ipythons_own(
    app: App, expression: str, only_object: list[object], *, is_name: bool
) -> Report | None:
    """Return the report on the item of ``only_object`` if it is IPython's own, such as ``Out`` or
    ``In``; None for any other object.
    """
    shell = app.context.shell
    cache = app.context.namespace.get("_oh")
    if type(cache) is dict and only_object[0] is cache:
        return outputs_report(tensors.memory_of_outputs(shell), len(cache))
    description = made_by_ipython(shell, expression) if is_name else ""
    if description:
        return of_ipython_report(expression, type_name(only_object[0]), description)
    return None


def _message_on_failed_expression(expression: str, error: Exception, names: Container[str]) -> str:
    """Return the message on an expression whose evaluation has raised ``error``."""
    words = re.split(r"[\s,]+", expression)
    names_in_expression = [word for word in words if word in names]
    if type(error) is SyntaxError and len(names_in_expression) > 1:
        return _ONE_NAME.format(" ".join(names_in_expression))
    return f"{quoted(expression)}: {ellipsize(describe_error(error))}"


def _report_on_missing_name(app: App, name: str) -> Report:
    """Return the report on a name that does not exist: if a cell has bound it before, with the
    memory of its object that is still alive; else with a similar name.
    """
    cell = cell_that_bound(app.context.shell, name)
    similar_name = "" if cell is not None else did_you_mean(name, list(app.context.namespace))
    return undefined_name_report(
        name, cell, app.experiments.survivors.rows_of_deleted_name(name, cell), similar_name
    )
