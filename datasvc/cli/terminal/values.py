"""How values of samples are printed: blobs as sizes, everything else so that a terminal or JSON can have it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any


def json_value(value: Any) -> Any:
    """Return a sample's value as JSON values; bytes become `{"bytes": their number}`."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": len(value)}
    if isinstance(value, Mapping):
        return {str(name): json_value(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(each) for each in value]
    if isinstance(value, Decimal) and value.as_tuple().exponent == 0:
        return int(value)  # sums of integers
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def text_value(value: Any) -> str:
    """Return a sample's value on one line; control characters, which could command a terminal, are escaped."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"{len(value)} bytes"
    text = value if isinstance(value, str) else str(json_value(value))
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()
