"""The `Range` header of HTTP (RFC 9110, section 14), as far as a server of whole objects needs it."""

from __future__ import annotations

import re

_SINGLE = re.compile(r"bytes[ \t]*=[ \t]*(\d*)-(\d*)[ \t]*", re.IGNORECASE | re.ASCII)
# Longer numbers name no byte of any object, and int() of megabytes of digits would take its time.
_MAX_DIGITS = 19


class UnsatisfiableRangeError(ValueError):
    """The range lies behind the end: answer 416."""


def parse_range(header: str | None, size_bytes: int) -> tuple[int, int] | None:
    """Return the half-open `(start, stop)` that a `Range` header asks for of `size_bytes` bytes.

    Returns:
        None where the whole object is to be sent: no header, or one that a server has to ignore, such as another
        unit, several ranges or nonsense.

    Raises:
        UnsatisfiableRangeError: a range that holds no byte of the object.
    """
    match = _SINGLE.fullmatch(header or "")
    if match is None or not any(match.groups()):
        return None
    first, last = match.groups()
    if max(len(first), len(last)) > _MAX_DIGITS:
        return None
    if not first:
        start, stop = max(0, size_bytes - int(last)), size_bytes
    else:
        start, stop = int(first), min(size_bytes, int(last) + 1) if last else size_bytes
        if last and int(last) < int(first):
            return None
    if start >= size_bytes or start >= stop:
        raise UnsatisfiableRangeError(f"{header!r} holds no byte of {size_bytes}")
    return start, stop
