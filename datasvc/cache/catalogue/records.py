"""How the catalogue writes what it knows of an object: a few bytes, because there may be millions."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple, TypeVar

from datasvc.keyed_random import Integers
from datasvc.repository import Digest

RESERVED: Final = 0
"""Its bytes arrive, or are verified again."""
RESIDENT: Final = 1
"""There, and verified since the machine started."""
UNVERIFIED: Final = 2
"""There, found by a scan; verified when it is wanted."""

_HEAD: Final = struct.Struct("<BQQ")
_ORDER: Final = struct.Struct(">Q")
_FREED: Final = struct.Struct("<Q")
_BLOCK: Final = 4096
Size = TypeVar("Size", int, Integers)


class ObjectRecord(NamedTuple):
    """What the catalogue knows of one object.

    Attributes:
        state: RESERVED, RESIDENT or UNVERIFIED.
        size_bytes: of its content.
        next_use: on the clock of its owner, see `eviction`.
        owner: the job (lease) that fetches it, or released it last.
        tenant: whose budget it uses: of the job that brought it here.
    """

    state: int
    size_bytes: int
    next_use: int
    owner: str
    tenant: str

    def encode(self) -> bytes:
        """Return the record as bytes."""
        return _HEAD.pack(self.state, self.size_bytes, self.next_use) + f"{self.owner}\0{self.tenant}".encode()

    @classmethod
    def decode(cls, content: bytes) -> ObjectRecord:
        """Return what `encode` gave. Raises ValueError: it is none."""
        if len(content) < _HEAD.size:
            raise ValueError(f"a record of {len(content)} bytes")
        owner, tenant = content[_HEAD.size :].decode().split("\0")
        state, size_bytes, next_use = _HEAD.unpack_from(content)
        return cls(state, size_bytes, next_use, owner, tenant)

    @staticmethod
    def state_of(content: bytes | memoryview) -> int:
        """Return only the state of what `encode` gave. Raises ValueError: it is none."""
        if len(content) < _HEAD.size:
            raise ValueError(f"a record of {len(content)} bytes")
        state: int = _HEAD.unpack_from(content)[0]
        return state

    @property
    def used_bytes(self) -> int:
        """What it takes of the disk."""
        return footprint(self.size_bytes)


def footprint(size_bytes: Size) -> Size:
    """Return what a file of that size takes of a disk: whole blocks. Sizes may be `int64[n]`."""
    return -(-size_bytes // _BLOCK) * _BLOCK


def order_key(owner: str, next_use: int, digest: Digest) -> bytes:
    """Return the key that sorts an owner's objects by next use."""
    return owner.encode() + b"\0" + _ORDER.pack(next_use) + bytes.fromhex(digest)


def parse_order_key(key: bytes) -> tuple[str, int, Digest]:
    """Return owner, next use and object of a key that `order_key` gave."""
    return key[:-41].decode(), _ORDER.unpack_from(key, len(key) - 40)[0], Digest(key[-32:].hex())


def order_value(record: ObjectRecord) -> bytes:
    """Return what the order keeps of a record: enough to choose it as a victim."""
    return _FREED.pack(record.used_bytes) + record.tenant.encode()


def parse_order_value(value: bytes) -> tuple[int, str]:
    """Return bytes and tenant of what `order_value` gave."""
    return _FREED.unpack_from(value)[0], value[_FREED.size :].decode()
