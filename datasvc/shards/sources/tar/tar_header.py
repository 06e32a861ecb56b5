"""Parses the header blocks of tars for `tar`; pure functions of bytes.

The supported formats are ustar and its older forms, pax headers and GNU's long names. They are specified in
POSIX.1-2017, pax, "ustar Interchange Format" and "pax Header Block", and in the GNU tar manual, "Basic Tar Format".
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

BLOCK_BYTES: Final = 512
# Type flags of extensions, which describe the next member: pax headers, and GNU's long names and link targets.
PAX, PAX_GLOBAL, LONG_NAME, LONG_LINK = (b"x", b"X"), b"g", b"L", b"K"
# Type flags of members: regular files (7 means that the blocks are contiguous), and others.
FILE, FOLDER, SPARSE = (b"0", b"\0", b"7"), b"5", b"S"
WITHOUT_CONTENT: Final = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a named pipe",
}
_MAX_NUMBER: Final = (1 << 43) - 1  # 8 TiB: file systems cannot seek to offsets near 2 ** 63


def padded(size_bytes: int) -> int:
    """Return the bytes that a content of `size_bytes` takes in a tar: the next multiple of the block size."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def terminated(field: bytes) -> bytes:
    """Return the bytes of a field before its first NUL."""
    return field.partition(b"\0")[0]


def kind_of(header: bytes) -> bytes:
    """Return the type flag."""
    return header[156:157]


def short_name(header: bytes) -> bytes:
    """Return the name that is stored in the header block itself."""
    name = terminated(header[:100])
    # GNU's own format has other fields at the position of the ustar prefix.
    prefix = terminated(header[345:500]) if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def size_of(header: bytes) -> int:
    """Return the size of the content: octal digits, or binary if the first bit is set.

    Raise ValueError if the field holds no size of at most `_MAX_NUMBER`.
    """
    field = header[124:136]
    if field[0] & 0x80:
        # A first byte of 0xff starts a negative number. Without its sign bit, it is out of range and refused.
        return _in_range(int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big"))
    return _in_range(_unsigned(field.strip(b" \0") or b"0", 8))


def pax_size(value: bytes) -> int:
    """Return the size in a pax header, which overrides that of the header block. Raise ValueError like `size_of`."""
    return _in_range(_unsigned(value, 10))


def pax_values(content: bytes) -> dict[bytes, bytes]:
    """Return the values of a pax header by name. Raise ValueError if an entry is malformed.

    An entry is its length in decimal digits, a blank, the name, "=", the value and a newline.
    """
    values, entries = {}, content
    while entries.strip(b"\0"):
        digits = entries[:20].partition(b" ")[0]
        length = _unsigned(digits, 10)
        name, equals, value = entries[len(digits) + 1 : length].partition(b"=")
        if not (equals and value.endswith(b"\n")) or length > len(entries):
            raise ValueError(f"{entries[:40]!r} is not a pax entry")
        values[name] = value[:-1]
        entries = entries[length:]
    return values


def has_right_checksum(header: bytes) -> bool:
    """Return whether `header` is a header block with a correct checksum."""
    try:
        stored = _unsigned(header[148:156].strip(b" \0"), 8)
    except ValueError:
        return False
    summed = header[:148] + b" " * 8 + header[156:]  # the bytes of the checksum itself count as blanks
    total = sum(summed)
    if stored == total:
        return True
    return stored == total - 256 * sum(byte > 127 for byte in summed)  # old writers summed signed bytes


def problem_of_kind(kind: bytes, pax: Collection[bytes]) -> str | None:
    """Return why a member of this type flag, with these pax names, is not a regular file; None if it is one."""
    if kind == SPARSE or any(name.startswith(b"GNU.sparse.") for name in pax):
        return "is a sparse file; write the tar without --sparse"
    if kind in WITHOUT_CONTENT:
        return f"is {WITHOUT_CONTENT[kind]}; write the tar with --dereference --hard-dereference"
    return None if kind in FILE else f"is not a regular file but of type {kind!r}"


def problem_of_name(name: bytes) -> str | None:
    """Return why a member name is refused; None if it is valid."""
    try:
        name.decode()
    except UnicodeDecodeError:
        return "has a name that is not UTF-8"
    if name.startswith(b"/"):
        return "has an absolute name"
    return "has a name with '..', which leads out of the tar" if b".." in name.split(b"/") else None


def _unsigned(digits: bytes, base: int) -> int:
    if not digits.isdigit():  # int() would also accept signs, blanks and underscores
        raise ValueError(f"{digits[:40]!r} is not a number")
    return int(digits, base)


def _in_range(number: int) -> int:
    if number > _MAX_NUMBER:
        raise ValueError(f"{number} is too large; expected at most {_MAX_NUMBER}")
    return number
