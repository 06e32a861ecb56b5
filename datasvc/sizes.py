"""Parsing and formatting of sizes in bytes, such as "64MiB"."""

from __future__ import annotations

import re
from typing import Final

from datasvc.errors import ConfigError

_UNITS: Final = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY_UNITS: Final = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the number of bytes of "64MiB", "1.5GB" or "1000".

    Raises:
        ConfigError: `text` is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ConfigError(f"{text!r} is not a valid size; write for example 50GB, 512MiB or a number of bytes")
    unit = (match[2] or "").lower()
    return int(float(match[1]) * (_UNITS | _BINARY_UNITS)[unit])


def format_size(size_bytes: float) -> str:
    """Return a number of bytes as text, such as "1.50 GB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= size:
            return f"{size_bytes / size:.2f} {unit}"
    return f"{size_bytes:.0f} bytes"
