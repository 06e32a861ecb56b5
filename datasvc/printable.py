"""Values for people and programs: printable lines without escape sequences, numbers with their nouns, JSON values."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Mapping
from decimal import Decimal
from typing import Any


def escape_controls(text: str) -> str:
    r"""Return `text` with each character that is not printable, such as a line break, escaped as in `\n`."""
    return text if text.isprintable() else "".join(map(_escape, text))


def _escape(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def count_text(count: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun: `1 shard`, `2 shards`. The plural `many` is by default `one` with an "s"."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def json_value(value: Any) -> Any:
    """Return a value, such as a sample's or a fact of a run, as a JSON value; bytes become `{"bytes": length}`."""
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
    """Return a value, such as a sample's or a fact of a run, as one line of text.

    Control characters are escaped, because a terminal would execute escape sequences in the text.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"{len(value)} bytes"
    plain = json_value(value)
    # JSON and not Python's notation: people who do not write Python read it, and programs parse it.
    return escape_controls(plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False))


def escape_unencodable() -> None:
    """Let standard output and error escape what their encoding does not have, instead of raising an error.

    A terminal or container may take ASCII only, and names of files may hold bytes that are not UTF-8.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
