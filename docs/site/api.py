"""Writes the reference in docs/python.md from the docstrings: ``python docs/site/api.py``."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "python.md"
MARK = "<!-- written by docs/site/api.py from here on -->\n"

FUNCTIONS = {
    "Measure": "last history experiment experiments trace Trace traces track tracker peak expect subscribe",  # noqa: E501
    "Find what uses memory": "top why tensors diff memory panel",
    "Free memory": "release purge offload clear_tracebacks",
    "Will it fit?": "estimate summary autofit budget",
    "Export, test, extend": "export load plot allocate leave_free preload register_probe",
}
RECORDS = {
    "records": "Usage CellRecord TraceRecord ExperimentRecord EngineRecord SessionRecord RecoveryRecord "  # noqa: E501
    "CutListing KeptError Cause RetainedArray ReferencePath FreeingStep Reading",
    "extras.tracker.tracker": "TrackerRecord",
    "inventory.arrays.records": "Inventory TensorRecord InventoryDiff",
    "inventory.names.top": "LargestNames NamedSize",
    "inventory.names.ownership": "Ownership HeldPart",
    "inventory.devices.breakdown": "Reconciliation Part",
    "estimating.records": "Estimate DeviceEstimate ModelSummary ModuleRow",
    "extras.peak.records": "PeakRecord DevicePeak PeakRow",
    "extras.moving.releasing": "ReleaseRecord",
    "extras.moving.moving": "PurgeRecord",
    "probes.device_memory": "DeviceMemory",
}


def reference() -> str:
    """Return the reference as Markdown."""
    package = importlib.import_module("ipygpumem")
    parts = [
        "\n## Functions\n\nAll are in `ipygpumem`; `help(ipygpumem.top)` lists a function's "
        "arguments and errors.\n"
    ]
    for title, names in FUNCTIONS.items():
        parts += [
            f"\n### {title}\n",
            *(_function(name, getattr(package, name)) for name in names.split()),
        ]
    parts.append(
        "\n## Records\n\nFrozen dataclasses. Bytes are `int`, times are `float` seconds or Unix "
        "time.\n"
    )
    for module, names in RECORDS.items():
        place = importlib.import_module(f"ipygpumem.{module}")
        parts += [_record(getattr(place, name)) for name in names.split()]
    return "".join(parts)


def _function(name: str, thing: Any) -> str:
    if inspect.ismodule(thing):
        members = {f"{name}.{each}": inspect.getdoc(getattr(thing, each)) for each in thing.__all__}
        return f"\n#### `{name}`\n\n{_text(thing)}\n{_table('function', members)}"
    methods = {}
    if inspect.isclass(thing):
        methods = {
            f"{name}.{each}": inspect.getdoc(value)
            for each, value in vars(thing).items()
            if _is_public(each, value)
        }
    return (
        f"\n#### `{name}`\n\n```text\n{_signature(name, thing)}\n```\n\n{_text(thing)}\n"
        f"{_table('method', methods)}"
    )


def _is_public(name: str, value: object) -> bool:
    return not name.startswith("_") and inspect.isfunction(value)


def _table(kind: str, meanings: dict[str, Any]) -> str:
    rows = [f"| `{_escaped(name)}` | {_cell(text or '')} |\n" for name, text in meanings.items()]
    return "".join([f"\n| {kind} | meaning |\n| --- | --- |\n", *rows]) if rows else ""


def _signature(name: str, thing: Any) -> str:
    signature = inspect.signature(thing)
    empty = inspect.Parameter.empty
    parameters = [
        each.replace(annotation=empty)
        for each in signature.parameters.values()
        if each.name != "self"
    ]
    text = f"{name}{signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)}"  # noqa: E501
    return textwrap.fill(text, 100, subsequent_indent="    ", break_on_hyphens=False)


def _record(kind: type) -> str:
    fields = _fields(kind)
    names = textwrap.fill(", ".join(name for name, _, _ in fields), 100)
    meanings = {f"{name}: {hint}": text for name, hint, text in fields if text}
    meanings |= {
        name: inspect.getdoc(value)
        for name, value in vars(kind).items()
        if isinstance(value, property)
    }
    return (
        f"\n### `{kind.__name__}`\n\n```text\n{names}\n```\n\n{_text(kind)}\n"
        f"{_table('field', meanings)}"
    )


def _fields(kind: type) -> list[tuple[str, str, str]]:
    """Return the name, the type and the docstring of each field of a class."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    found = []
    for field, text in zip(definition.body, [*definition.body[1:], ast.Pass()], strict=True):
        is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and not (name := ast.unparse(field.target)).startswith(
            "_"
        ):
            meaning = inspect.cleandoc(ast.literal_eval(text.value)) if is_text else ""
            found.append((name, ast.unparse(field.annotation), meaning))
    return found


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _cell(text: str) -> str:
    """Return the text before a blank line or an example, in one line of a table."""
    return _escaped(_code(" ".join(text.split("\n\n")[0].partition("\n>>>")[0].split())))


def _code(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", text)


def _text(thing: Any) -> str:
    """Return a docstring as Markdown: examples become code; arguments are in its help."""
    blocks = []
    for block in (inspect.getdoc(thing) or "").split("\n\n"):
        if block.startswith(">>>"):
            blocks.append(f"```pycon\n{block}\n```")
        elif not block.startswith(("Args:", "Raises:", "Returns:")):
            blocks.append(_code(block))
    return "\n\n".join(blocks)


def main() -> None:
    """Replace the page's reference."""
    written, _, _ = PAGE.read_text("utf-8").partition(MARK)
    PAGE.write_text(written + MARK + reference(), encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
