"""Binary encoding of the catalogue's records and index keys. It is compact: there may be millions of records."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple, TypeVar

from datasvc.keyed_random import Integers
from datasvc.repository import Digest

RESERVED: Final = 0
"""State of an object that is being fetched, or verified again."""
RESIDENT: Final = 1
"""State of an object that was verified since the machine started."""
UNVERIFIED: Final = 2
"""State of an object that a scan found: it is verified before its first use."""

_HEAD: Final = struct.Struct("<BQQ")  # state, size, next use
_NEXT_USE: Final = struct.Struct(">Q")  # big-endian: LMDB sorts keys by their bytes
_USED_BYTES: Final = struct.Struct("<Q")
_BLOCK: Final = 4096  # bytes; the block size of most local file systems
Size = TypeVar("Size", int, Integers)


class ObjectRecord(NamedTuple):
    """The record of one object.

    Attributes:
        state: RESERVED, RESIDENT or UNVERIFIED.
        size_bytes: size of the content.
        next_use: when the job `job_id` needs the object next, on the job's clock, in bytes. `eviction.UNKNOWN` or
            more means unknown or NEVER; 0 while RESERVED.
        job_id: job that fetches the object, or job of the recorded next use.
        tenant: tenant whose quota is charged: the tenant that fetched the object, or, after a scan, the tenant that
            is recorded in the file's attributes.
    """

    state: int
    size_bytes: int
    next_use: int
    job_id: str
    tenant: str

    def encode(self) -> bytes:
        """Return the record as bytes."""
        return _HEAD.pack(self.state, self.size_bytes, self.next_use) + f"{self.job_id}\0{self.tenant}".encode()

    @classmethod
    def decode(cls, content: bytes) -> ObjectRecord:
        """Return the record that `encode` wrote. Raises ValueError if `content` is not a record."""
        state, size_bytes, next_use = _parse_head(content)
        job_id, tenant = content[_HEAD.size :].decode().split("\0")
        return cls(state, size_bytes, next_use, job_id, tenant)

    @staticmethod
    def state_of(content: bytes | memoryview) -> int:
        """Return only the state of an encoded record. Raises ValueError if `content` is not a record."""
        return _parse_head(content)[0]

    @property
    def used_bytes(self) -> int:
        """Disk space of the object."""
        return footprint(self.size_bytes)


def _parse_head(content: bytes | memoryview) -> tuple[int, int, int]:
    """Return state, size and next use of an encoded record. Raises ValueError if `content` is too short."""
    if len(content) < _HEAD.size:
        raise ValueError(f"a catalogue record has {len(content)} bytes; expected at least {_HEAD.size}")
    state, size_bytes, next_use = _HEAD.unpack_from(content)
    return state, size_bytes, next_use


def footprint(size_bytes: Size) -> Size:
    """Return the disk space of a file of `size_bytes`, in whole blocks of 4 KiB. For `int64[n]`: of each file."""
    return -(-size_bytes // _BLOCK) * _BLOCK


def eviction_key(job_id: str, next_use: int, digest: Digest) -> bytes:
    """Return the key in the table `order`, which sorts the objects of a job by next use."""
    return job_id.encode() + b"\0" + _NEXT_USE.pack(next_use) + bytes.fromhex(digest)


def parse_eviction_key(key: bytes) -> tuple[str, int, Digest]:
    """Return the job id, next use and digest of a key that `eviction_key` returned."""
    # Parsed from the end: a digest of 32 bytes, a next use of 8, and the zero byte after the job id.
    return key[:-41].decode(), _NEXT_USE.unpack_from(key, len(key) - 40)[0], Digest(key[-32:].hex())


def eviction_value(record: ObjectRecord) -> bytes:
    """Return the value of an eviction key: all that the choice of victims needs, so it reads no other table."""
    return _USED_BYTES.pack(record.used_bytes) + record.tenant.encode()


def parse_eviction_value(value: bytes) -> tuple[int, str]:
    """Return the disk space and the tenant of a value that `eviction_value` returned."""
    return _USED_BYTES.unpack_from(value)[0], value[_USED_BYTES.size :].decode()
