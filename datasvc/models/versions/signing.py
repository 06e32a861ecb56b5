"""Signatures of model versions: detached, Ed25519 (RFC 8032), by anybody who holds a key.

`models/NAME/signatures/00000003.<key id>.json` says that a key holder signed version 3 of NAME. What is signed is the
model's name, the version's number and all of its entry; the entry names everything else by digest, so one signature
covers every byte of the checkpoint and all that is said of it. Files are created only, one per version and key.

A signature says nothing of tags: who can write to the repository can still move a tag to another version that is
signed. Where that matters name the number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError
from datasvc.models.versions.signing_keys import PrivateKey, PublicKey
from datasvc.repository import Entry, Repository, Resolved
from datasvc.repository.logs.log import MAX_ENTRY_BYTES, decode_entry, encode_entry

SIGNATURE_FORMAT = 1
_ALGORITHM = "ed25519"
# Of another purpose nobody shall be able to use what was signed for this one.
_PURPOSE = b"datasvc model version 1"


@dataclass(frozen=True)
class Signature:
    """A signature that was found good, or was just made.

    Attributes:
        version: "digits-cnn@3".
        key_id: whose, see `PublicKey.id`.
        location: of the file that holds it.
    """

    version: str
    key_id: str
    location: str


def signed_message(version: Resolved, content: Mapping[str, Any]) -> bytes:
    """Return the bytes that a signature of a version covers.

    Purpose, name and number, a zero byte behind each, which none of them can hold; then the content of the entry,
    without its checksum, as JSON with sorted keys, no spaces and ASCII alone. The content is that which was read and
    is used, so there is no moment between the check and the use.
    """
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return b"\0".join((_PURPOSE, version.name.encode(), str(version.version).encode(), canonical.encode()))


def sign(repository: Repository, ref: str, key: PrivateKey) -> Signature:
    """Sign the version that `ref` means now, as it is stored now; signing it again changes nothing.

    Raises:
        ConfigError, NotFoundError, CorruptDataError, UnavailableError: as `Repository.resolve`, `Repository.entry`.
        ConflictError: another file stands where the signature belongs.
        UnknownOutcomeError: the store did not say whether it wrote.
    """
    version = repository.resolve("models", ref)
    message = signed_message(version, repository.entry(version).content)
    content = {
        "format": SIGNATURE_FORMAT,
        "algorithm": _ALGORITHM,
        "key": key.public.id,
        "model": version.name,
        "version": version.version,
        "signature": key.sign(message).hex(),
    }
    path = _path(version, key.public)
    location = repository.storage.location(path)
    try:
        repository.storage.create(path, encode_entry(content))
    except ConflictError as error:
        if _find(repository, version, key.public, message) is not None:
            raise ConflictError(f"{location} is no signature of {version} by this key; remove that file") from error
    return Signature(str(version), key.public.id, location)


def check_signed(repository: Repository, version: Resolved, entry: Entry, keys: Sequence[PublicKey]) -> Signature:
    """Return a signature by one of `keys` of `entry`, which is that of `version`.

    Raises:
        CorruptDataError: there is none that holds; says for each key what there is.
        UnavailableError: the store did not answer.
    """
    message = signed_message(version, entry.content)
    reasons = []
    for key in keys:
        reason = _find(repository, version, key, message)
        if reason is None:
            return Signature(str(version), key.id, repository.storage.location(_path(version, key)))
        reasons.append(f"{key.id} ({key.source}): {reason}")
    raise CorruptDataError(
        f"{version} is not trusted. By key {'; by key '.join(reasons) or '- none is trusted'}. Look at where it "
        f"comes from; who answers for it signs it: datasvc models sign {version} --key FILE"
    )


def _find(repository: Repository, version: Resolved, key: PublicKey, message: bytes) -> str | None:
    """Return why there is no good signature of `message` by `key`; None where there is one."""
    path = _path(version, key)
    location = repository.storage.location(path)
    try:
        return repository.storage.read_checked(
            path, lambda raw: _check(raw, location, key, message), most_bytes=MAX_ENTRY_BYTES
        )
    except NotFoundError:
        return "it was not signed"
    except (CorruptDataError, ConfigError) as error:
        return str(error)


def _check(raw: bytes, location: str, key: PublicKey, message: bytes) -> None:
    content = decode_entry(raw, location)
    try:
        algorithm, signature = content["algorithm"], bytes.fromhex(content["signature"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(f"{location} is no signature: {error!r}") from error
    if algorithm != _ALGORITHM or not key.verifies(signature, message):
        raise CorruptDataError(
            f"{location} does not sign what is stored: the version was changed, or belongs elsewhere"
        )


def _path(version: Resolved, key: PublicKey) -> str:
    return f"{version.kind}/{version.name}/signatures/{version.version:08d}.{key.id}.json"
