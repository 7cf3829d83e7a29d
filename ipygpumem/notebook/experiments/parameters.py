"""The parameters of an experiment: ``--note lr=1e-3 bs=64``, or ``note={...}`` from Python."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from ipygpumem.errors import ExperimentError
from ipygpumem.introspect import is_instance, text_of, type_name

_NAME = re.compile(r"[^\W\d][\w.-]{0,79}")
_WHOLE = re.compile(r"[+-]?\d{1,300}", re.ASCII)


def parse_parameters(words: Iterable[str]) -> dict[str, int | float | str]:
    """Return the parameters that words such as ``lr=1e-3`` name; what reads as a number is one.

    Raises:
        ExperimentError: a word is not ``NAME=VALUE``, or a name comes twice.
    """
    found: dict[str, int | float | str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise ExperimentError(
                f"--note: {word!r} is not NAME=VALUE; write the experiment's name first, then for instance "
                "--note lr=1e-3 bs=64"
            )
        if name in found:
            raise ExperimentError(f"--note: {name} is given twice")
        found[name] = _number(value)
    return found


def checked_parameters(given: object) -> dict[str, int | float | str]:
    """Return ``note=`` with plain values, so that the record can be written to any file.

    Raises:
        ExperimentError: it is not a dictionary, or a record cannot hold a name or value.
    """
    if not is_instance(given, Mapping) and not is_instance(given, dict):
        raise ExperimentError("note must be a dictionary of parameters: note={'lr': 1e-3, 'bs': 64}")
    found: dict[str, int | float | str] = {}
    for name, value in given.items():  # type: ignore[attr-defined]  # is_instance says so
        if not _NAME.fullmatch(text_of(name)):
            raise ExperimentError(f"note: a parameter's name must be one word of text, not a {type_name(name)}")
        found[name] = _plain(name, value)
    return found


def _plain(name: str, value: object) -> int | float | str:
    if type(value) is bool:
        return str(value)
    if is_instance(value, int):
        return int.__int__(value)  # type: ignore[arg-type]  # NumPy's and enums' are made plain
    if is_instance(value, float):
        return _finite(float.__float__(value))  # type: ignore[arg-type]
    if is_instance(value, str):
        return str.__str__(value)
    raise ExperimentError(f"note: {name} is a {type_name(value)}; a parameter is a number or text, so write str(...)")


def _number(text: str) -> int | float | str:
    if _WHOLE.fullmatch(text):
        return int(text)
    try:
        return _finite(float(text)) if text.isascii() and "_" not in text else text
    except ValueError:
        return text


def _finite(value: float) -> float | str:
    """Return what JSON can hold: it has no infinity and no NaN."""
    return value if math.isfinite(value) else str(value)
