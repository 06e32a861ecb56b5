"""What a tar's header blocks say. Pure: blocks in, values out; `sources.tar` reads them.

Read are ustar and its older forms, pax headers and GNU's long names. Format: POSIX.1-2017, pax, "ustar Interchange
Format" and "pax Header Block"; GNU tar manual, "Basic Tar Format".
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

BLOCK_BYTES: Final = 512
PAX, PAX_GLOBAL, LONG_NAME, LONG_LINK = (b"x", b"X"), b"g", b"L", b"K"
FILE, FOLDER, SPARSE = (b"0", b"\0", b"7"), b"5", b"S"
WITHOUT_CONTENT: Final = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a named pipe",
}
_LARGEST_NUMBER: Final = (1 << 63) - 1


def padded(size_bytes: int) -> int:
    """Return what a content of `size_bytes` takes in a tar."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def terminated(field: bytes) -> bytes:
    """Return a field up to its first NUL."""
    return field.partition(b"\0")[0]


def kind_of(header: bytes) -> bytes:
    """Return the type flag."""
    return header[156:157]


def short_name(header: bytes) -> bytes:
    """Return the name that a header block itself holds."""
    name = terminated(header[:100])
    # GNU's own form keeps other things where ustar has the prefix.
    prefix = terminated(header[345:500]) if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def size_of(header: bytes) -> int:
    """Return the size of the content: octal digits, or binary where the first bit is set. Raises ValueError."""
    field = header[124:136]
    if field[0] & 0x80:
        # 0xff starts a negative number, which is too large like this.
        return _in_range(int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big"))
    return _in_range(_unsigned(field.strip(b" \0") or b"0", 8))


def pax_size(value: bytes) -> int:
    """Return the size that a pax header gives instead. Raises ValueError."""
    return _in_range(_unsigned(value, 10))


def pax_values(content: bytes) -> dict[bytes, bytes]:
    """Return a pax header's values: its entries are length, blank, name, "=", value, newline. Raises ValueError."""
    values, left = {}, content
    while left.strip(b"\0"):
        digits = left[:20].partition(b" ")[0]
        length = _unsigned(digits, 10)
        name, equals, value = left[len(digits) + 1 : length].partition(b"=")
        if not (equals and value.endswith(b"\n")) or length > len(left):
            raise ValueError(f"{left[:40]!r}")
        values[name] = value[:-1]
        left = left[length:]
    return values


def has_right_checksum(header: bytes) -> bool:
    """Return whether this is a header block, undamaged."""
    try:
        claimed = _unsigned(header[148:156].strip(b" \0"), 8)
    except ValueError:
        return False
    others = header[:148] + b" " * 8 + header[156:]  # its own bytes count as blanks
    total = sum(others)
    if claimed == total:
        return True
    return claimed == total - 256 * sum(byte > 127 for byte in others)  # old writers summed signed bytes


def problem_of_kind(kind: bytes, pax: Collection[bytes]) -> str | None:
    """Return why a member of this type flag and with these pax names is no plain file; None: it is one."""
    if kind == SPARSE or any(name.startswith(b"GNU.sparse.") for name in pax):
        return "is a sparse file; make the tar without --sparse"
    if kind in WITHOUT_CONTENT:
        return f"is {WITHOUT_CONTENT[kind]}; make the tar with --dereference --hard-dereference"
    return None if kind in FILE else f"is no regular file but of type {kind!r}"


def problem_of_name(name: bytes) -> str | None:
    """Return why a member must not be called so; None: it may."""
    try:
        name.decode()
    except UnicodeDecodeError:
        return "has a name that is not UTF-8"
    if name.startswith(b"/"):
        return "has an absolute name"
    return "has a name that climbs out of the tar" if b".." in name.split(b"/") else None


def _unsigned(digits: bytes, base: int) -> int:
    if not digits.isdigit():  # int() would take signs, blanks and underscores too
        raise ValueError(f"{digits[:40]!r} is no number")
    return int(digits, base)


def _in_range(number: int) -> int:
    if number > _LARGEST_NUMBER:
        raise ValueError(f"{number} is too large")
    return number
