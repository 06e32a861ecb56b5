"""Sizes in bytes: parse and format them, and divide values into groups of limited size."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from datasvc.errors import ConfigError

_Value = TypeVar("_Value")
_UNITS: Final = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY_UNITS: Final = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_MAX_DIGITS: Final = 24
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)  # groups: the number, and the unit without B


def parse_size(text: str) -> int:
    """Return the number of bytes of "64MiB", "1.5GB" or "1000". Raise ConfigError if `text` is not a size."""
    match = _SIZE.fullmatch(text.strip())
    if not match or len(match[1]) > _MAX_DIGITS:
        raise ConfigError(f"{text[:80]!r} is not a valid size; write for example 50GB, 512MiB or a number of bytes")
    unit = (match[2] or "").lower()
    return int(float(match[1]) * (_UNITS | _BINARY_UNITS)[unit])


def format_size(size_bytes: float) -> str:
    """Return a number of bytes as text, such as "1.50 GB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= size:
            return f"{size_bytes / size:.2f} {unit}"
    return f"{size_bytes:.0f} bytes"


def group_by_size(
    values: Iterable[_Value], size_of: Callable[[_Value], int], max_bytes: int
) -> Iterator[list[_Value]]:
    """Divide values into consecutive groups of at most `max_bytes`. A value above this size is alone in its group."""
    group: list[_Value] = []
    group_bytes = 0
    for value in values:
        size_bytes = size_of(value)
        if group and group_bytes + size_bytes > max_bytes:
            yield group
            group, group_bytes = [], 0
        group.append(value)
        group_bytes += size_bytes
        # Yield a large value before the iterator creates the next value: both may not fit into memory.
        if group_bytes > max_bytes:
            yield group
            group, group_bytes = [], 0
    if group:
        yield group
