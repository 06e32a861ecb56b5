"""Pointers: where the bytes of a piece lie that is not stored raw, found by the digest of its raw bytes.

A raw piece is an object of its own digest, so whoever has equal bytes finds it. An encoded one is not: another model
would store it again. So a small file `tensors/3f/DIGEST.json` says what chain it has. It is a hint and never more:
nothing is read through it, a lost or damaged one costs a second copy, and every object that it names is looked at
before a table names it again.

The limit: in a remote store an object that is older than a day cannot be made young without writing it again (see
`Objects.reuse`), so a chain that has one is not named again. A piece that was stored as a difference is then stored
once more, in full, where another model has its bytes; raw pieces and planes get the object that they had.
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
    """Return where the pointer of a piece lies below the repository's root."""
    return f"{POINTERS}/{digest[:2]}/{digest}.json"


def pointed_digest(path: str) -> Digest | None:
    """Return the digest of the piece whose pointer lies at `path`, None where that is no pointer's."""
    match = _PATH.fullmatch(path)
    return Digest(match[2]) if match else None


def write_pointer(objects: Objects, digest: Digest, chain: tuple[ChainLink, ...]) -> None:
    """Let others find the chain of a piece whose objects are stored. Raises UnavailableError."""
    piece = Chunk((), (), digest, chain).to_json()
    content = encode_entry({"format": POINTER_FORMAT, "digest": digest, "chain": piece["chain"]})
    # Not synced: what a power cut leaves of it fails its checksum, and nobody needs it.
    objects.storage.put_bytes(pointer_path(digest), content, synced=False)


def find_chain(objects: Objects, digest: Digest, piece_bytes: int) -> tuple[ChainLink, ...] | None:
    """Return the chain of a stored piece of that digest, its objects being there; None where none is known.

    Raises UnavailableError.
    """
    path = pointer_path(digest)
    try:
        found = decode_entry(objects.storage.read(path, MAX_ENTRY_BYTES), objects.storage.location(path))
        piece = Chunk.from_json({"start": (), "shape": (), "digest": found["digest"], "chain": found["chain"]})
    except (NotFoundError, CorruptDataError, ConfigError, KeyError):
        return None
    try:
        wrong = piece.digest != digest or fault_of_chain(piece.chain, piece_bytes)
    except TypeError:
        return None
    if wrong or not all(objects.reuse(link.info) for link in piece.chain):
        return None
    return piece.chain
