"""Deduplication index, for `chunk_writer`: finds an encoded chunk by the digest of its raw bytes.

A raw chunk is an object named by its own digest, so equal bytes are found without an index. Encoded bytes have
another digest: without an index, another model would store them again. The index has a pointer for each encoded chunk
that is not packed: a small file `tensors/3f/DIGEST.json`, named by the digest of the raw bytes, with the chain of the
chunk (see `tensor_table`). No restore needs a pointer: if a pointer is lost or damaged, a later save stores a second
copy. The objects in a pointer are checked before a tensor table names them again.

Limit: in a remote store the age of an object cannot be reset without writing it again (see `Objects.reuse`), so a
chain with an object older than a day is not reused. A later save of an equal chunk then stores it again. This takes
more space only if the first save stored a difference to an earlier chunk: the other encodings give equal objects.
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
_PATH: Final = re.compile(r"tensors/([0-9a-f]{2})/(\1[0-9a-f]{62})\.json")


def pointer_path(digest: Digest) -> str:
    """Return the path of a chunk's pointer below the root of the repository."""
    return f"{POINTERS}/{digest[:2]}/{digest}.json"


def pointed_digest(path: str) -> Digest | None:
    """Return the digest of the chunk whose pointer has this path, None if this is not a path of a pointer."""
    match = _PATH.fullmatch(path)
    return Digest(match[2]) if match else None


def write_pointer(objects: Objects, digest: Digest, chain: tuple[ChainLink, ...]) -> None:
    """Write the pointer of a chunk whose objects are stored. Raises UnavailableError: the store failed."""
    chunk = Chunk((), (), digest, chain).to_json()  # the position in a tensor, () here, is not part of a pointer
    content = encode_entry({"format": POINTER_FORMAT, "digest": digest, "chain": chunk["chain"]})
    # Not synced: a pointer that a power cut damages fails its checksum and is ignored.
    objects.storage.put_bytes(pointer_path(digest), content, synced=False)


def find_chain(objects: Objects, digest: Digest, chunk_bytes: int) -> tuple[ChainLink, ...] | None:
    """Return the chain of a stored chunk with this digest, None if there is none.

    All objects of the chain exist, and `gc` keeps them at least as long as new ones (see `Objects.reuse`).
    Raises UnavailableError: the store failed.
    """
    path = pointer_path(digest)
    try:
        pointer = decode_entry(objects.storage.read(path, MAX_ENTRY_BYTES), objects.storage.location(path))
        chunk = Chunk.from_json({"start": (), "shape": (), "digest": pointer["digest"], "chain": pointer["chain"]})
    except (NotFoundError, CorruptDataError, ConfigError, KeyError):
        return None
    if chunk.digest != digest:
        return None
    try:
        fault = fault_of_chain(chunk.chain, chunk_bytes)
    except TypeError:
        # A pointer is not trusted: a value in it may have a wrong type. Such a pointer is ignored.
        return None
    if fault or not all(objects.reuse(link.info) for link in chunk.chain):
        return None
    return chunk.chain
