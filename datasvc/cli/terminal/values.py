"""Conversion of sample values to JSON values and to printable text. Blobs are represented by their sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from datasvc.printable import escape_controls


def json_value(value: Any) -> Any:
    """Return a sample's value as a JSON value; bytes become `{"bytes": length}`."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": len(value)}
    if isinstance(value, Mapping):
        return {str(name): json_value(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if isinstance(value, Decimal) and value.as_tuple().exponent == 0:
        return int(value)  # DuckDB returns sums of integers as decimals
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no NaN and no infinity
    is_json = value is None or isinstance(value, (bool, int, float, str))
    return value if is_json else str(value)


def text_value(value: Any) -> str:
    """Return a sample's value as one line of text.

    Control characters are escaped, because a terminal would execute their escape sequences.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"{len(value)} bytes"
    text = value if isinstance(value, str) else str(json_value(value))
    return escape_controls(text)
