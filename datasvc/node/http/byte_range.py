"""Parse the HTTP `Range` header (RFC 9110, section 14) for responses with one range."""

from __future__ import annotations

import re

_SINGLE = re.compile(r"bytes[ \t]*=[ \t]*(\d*)-(\d*)[ \t]*", re.IGNORECASE | re.ASCII)
# A longer number is beyond any object, and int() of megabytes of digits is slow.
_MAX_DIGITS = 19


class UnsatisfiableRangeError(ValueError):
    """The range is beyond the end of the object; the response is 416."""


def parse_range(header: str | None, size_bytes: int) -> tuple[int, int] | None:
    """Return the half-open `(start, stop)` of a `Range` header for an object of `size_bytes` bytes.

    Returns:
        None for a response with the whole object: there is no header, or one that a server must ignore (another
        unit, several ranges, invalid syntax).

    Raises:
        UnsatisfiableRangeError: no byte of the object is in the range.
    """
    match = _SINGLE.fullmatch(header or "")
    if match is None or not any(match.groups()):
        return None
    first, last = match.groups()
    if max(len(first), len(last)) > _MAX_DIGITS:
        return None
    # A suffix range: the last bytes of the object.
    if not first:
        start, stop = max(0, size_bytes - int(last)), size_bytes
    else:
        start, stop = int(first), min(size_bytes, int(last) + 1) if last else size_bytes
        if last and int(last) < int(first):
            return None
    if start >= size_bytes or start >= stop:
        raise UnsatisfiableRangeError(f"the range {header!r} has no byte of an object of {size_bytes} bytes")
    return start, stop
