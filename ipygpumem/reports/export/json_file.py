"""Writes and reads the lossless format: every record, as JSON."""

from __future__ import annotations

import json
from typing import Any

from ipygpumem.errors import FileError, quoted, short
from ipygpumem.model import SessionRecord

SCHEMA = 1
"""Raised when a reader of before would misunderstand; a field more does not."""
_NAME = "ipygpumem"
_HEAD = f'{{"format": "{_NAME}", "schema": '


def render(record: SessionRecord) -> str:
    """Return the record as JSON, in ASCII, so that even broken text in it survives."""
    return json.dumps({"format": _NAME, "schema": SCHEMA, **record.to_dict()}, allow_nan=False)


def is_ours(head: str) -> bool:
    """Whether a file that begins with ``head`` was written by ``render``."""
    return head.startswith(_HEAD)


def parse(text: str, name: str) -> SessionRecord:
    """Return the record that ``render`` wrote.

    Raises:
        FileError: the text is none of ours, is damaged, or has a newer schema.
    """
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{name} is not JSON, or only a part of it ({error})") from None
    if type(data) is not dict or data.get("format") != _NAME or type(data.get("schema")) is not int:
        raise FileError(f"{name} is not an export of ipygpumem: %gpumem export writes one")
    if data["schema"] > SCHEMA:
        raise FileError(
            f"{name} has schema {quoted(data['schema'])} and this ipygpumem reads up to {SCHEMA}: upgrade it"
        )
    try:
        return SessionRecord.from_dict(data)
    except (TypeError, ValueError) as error:
        raise FileError(f"{name} is damaged: {short(error)}") from None
