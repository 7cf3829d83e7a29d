"""Values that were found, for the same code, on the same devices, with about as much memory free; in a file, too."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ipygpumem.fitting.plan import Values
from ipygpumem.fitting.room import Limits
from ipygpumem.folders import make_private
from ipygpumem.model import Reading
from ipygpumem.probes.accelerators import loaded_torch
from ipygpumem.probes.host import available_bytes

_MOST = 500
"""Values that the file holds; the oldest go first."""


class Remembered:
    """Found values under ``key_of``: those of this session, and those that a file has from earlier ones.

    Args:
        path: the file; made with its folder when something is found. One that cannot be read counts as empty.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._own: dict[str, Values] = {}

    def get(self, key: str, names: Iterable[str]) -> Values | None:
        """Return what was found under ``key`` for the variables ``names``."""
        found = {**self._read(), **self._own}.get(key)
        if type(found) is not dict or set(found) != set(names):
            return None
        return dict(found) if all(type(value) in (int, float) and value > 0 for value in found.values()) else None

    def put(self, key: str, values: Values) -> None:
        """Remember ``values``; where the file cannot be written that is a warning, and they last for the session."""
        self._own[key] = dict(values)
        if self._path is None:
            return
        found = self._read()
        found.pop(key, None)
        found[key] = dict(values)  # the newest is the last
        try:
            _replace(self._path, json.dumps(dict(list(found.items())[-_MOST:])))
        except OSError as error:
            text = f"ipygpumem: what fits is remembered for this session only: {type(error).__name__}: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _read(self) -> dict[str, Any]:
        if self._path is None:
            return {}
        try:
            found = json.loads(self._path.read_bytes())
        except (OSError, ValueError, RecursionError):  # none yet, or somebody else's: what is found replaces it
            return {}
        return found if type(found) is dict else {}


def _replace(path: Path, text: str) -> None:
    make_private(path.parent)
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")  # in the same folder, or replacing is not one step
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:  # an interrupt, too
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def key_of(code: str, start: Mapping[str, object], options: object, readings: Iterable[Reading], limits: Limits) -> str:
    """Return what a found value is remembered under: it tells these from all others.

    Args:
        code: tells the code from any other.
        start: the variables and where they started.
        options: how they were looked for.
        readings: the devices now, in detail. Free memory counts by its power of two.
        limits: the budgets by device.
    """
    devices = [(r.device, _device_name(r.device), r.total_bytes, _free_bytes(r).bit_length()) for r in readings]
    parts = (code, sorted(start.items()), options, sorted(devices), sorted(limits.items()))
    return hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _device_name(device: str) -> str:
    kind, _, index = device.partition(":")
    properties = getattr(getattr(loaded_torch(), kind, None), "get_device_properties", None)
    return str(getattr(properties(int(index)), "name", "")) if properties is not None and index else ""


def _free_bytes(reading: Reading) -> int:
    if reading.device == "cpu":
        return available_bytes()
    return max(0, (reading.total_bytes or 0) - (reading.used_bytes or reading.reserved_bytes or 0))


def code_of(function: Callable[..., Any]) -> str:
    """Return the qualified name and the source of a function, or of what a partial calls."""
    inner = getattr(function, "func", function)
    name = getattr(inner, "__qualname__", "")
    try:
        return f"{name}\n{inspect.getsource(inner)}"
    except (OSError, TypeError):
        return f"{name}"
