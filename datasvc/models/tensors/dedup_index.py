"""Deduplication index, for `chunk_writer`: finds an encoded chunk by the digest of its raw bytes.

A raw chunk is an object named by its own digest, so equal bytes are found without an index. Encoded bytes have
another digest: without an index, another model would store them again. A pointer is a small file
`tensors/3f/DIGEST.json` with the chain of the chunk (see `tensor_table`). No read depends on a pointer: if it is lost
or damaged, a second copy is stored. Every object that it names is checked before a table names it again.

Limit: in a remote store the age of an object cannot be reset without writing it again (see `Objects.reuse`), so a
chain with an object older than a day is not reused. If another model has the bytes of a chunk that was stored as a
difference, the chunk is then stored again, in full. Raw chunks and planes take no more space, because storing them
again gives the same object.
"""

from __future__ import annotations

import re
from typing import Final

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.models.tensors.tensor_table import ChainLink, Chunk, fault_of_chain
from datasvc.repository import Digest, Objects
from datasvc.repository.logs.log import MAX_ENTRY_BYTES, decode_entry, encode_entry

POINTERS: Final = "tensors"
POINTER_FORMAT: Final = 1
_PATH = re.compile(r"tensors/([0-9a-f]{2})/(\1[0-9a-f]{62})\.json")


def pointer_path(digest: Digest) -> str:
    """Return the path of a chunk's pointer below the root of the repository."""
    return f"{POINTERS}/{digest[:2]}/{digest}.json"


def pointed_digest(path: str) -> Digest | None:
    """Return the digest of the chunk that has its pointer at this path, None if this is not a path of a pointer."""
    match = _PATH.fullmatch(path)
    return Digest(match[2]) if match else None


def write_pointer(objects: Objects, digest: Digest, chain: tuple[ChainLink, ...]) -> None:
    """Write the pointer of a chunk whose objects are stored. Raises UnavailableError."""
    chunk = Chunk((), (), digest, chain).to_json()
    content = encode_entry({"format": POINTER_FORMAT, "digest": digest, "chain": chunk["chain"]})
    # Not synced: a pointer that a power cut damages fails its checksum and is ignored.
    objects.storage.put_bytes(pointer_path(digest), content, synced=False)


def find_chain(objects: Objects, digest: Digest, chunk_bytes: int) -> tuple[ChainLink, ...] | None:
    """Return a chain that decodes to this digest and has all its objects; else None. Raises UnavailableError."""
    path = pointer_path(digest)
    try:
        pointer = decode_entry(objects.storage.read(path, MAX_ENTRY_BYTES), objects.storage.location(path))
        chunk = Chunk.from_json({"start": (), "shape": (), "digest": pointer["digest"], "chain": pointer["chain"]})
    except (NotFoundError, CorruptDataError, ConfigError, KeyError):
        return None
    try:
        wrong = chunk.digest != digest or fault_of_chain(chunk.chain, chunk_bytes)
    # A pointer is not trusted: a value of another type counts as no pointer.
    except TypeError:
        return None
    if wrong or not all(objects.reuse(link.info) for link in chunk.chain):
        return None
    return chunk.chain
