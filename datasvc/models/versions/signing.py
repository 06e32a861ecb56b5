"""Signs model versions and checks the signatures: detached Ed25519 (RFC 8032), one file per version and key.

`models/NAME/signatures/00000003.<key id>.json` holds a signature of version 3 of NAME. It covers the model's name,
the version's number and the complete entry. The entry names everything else by digest, so that one signature covers
every byte of the checkpoint and its metadata. Signature files are created and never changed.

A signature does not cover tags: anybody who can write to the repository can move a tag to another signed version. To
exclude this risk, refer to the version by its number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError
from datasvc.models.versions.signing_keys import PrivateKey, PublicKey
from datasvc.repository import Entry, Repository, Resolved
from datasvc.repository.logs.log import MAX_ENTRY_BYTES, decode_entry, encode_entry

SIGNATURE_FORMAT = 1
_ALGORITHM = "ed25519"
# First part of every signed message, so that a signature is not valid for a message of another purpose.
_PURPOSE = b"datasvc model version 1"


@dataclass(frozen=True)
class Signature:
    """A valid signature of a version; `key_id` is `PublicKey.id`, `location` the location of the signature file."""

    version: str
    key_id: str
    location: str


def signed_message(version: Resolved, content: Mapping[str, Any]) -> bytes:
    """Return the bytes that a signature of a version covers.

    These are purpose, name and number, each followed by a zero byte, which none of them can contain; then `content`
    as JSON with sorted keys, no spaces and ASCII only. `content` is the content of the entry without its checksum. A
    caller that checks a signature passes the content that it then uses: a second read could return other content.
    """
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return b"\0".join((_PURPOSE, version.name.encode(), str(version.version).encode(), canonical.encode()))


def sign(repository: Repository, ref: str, key: PrivateKey) -> Signature:
    """Sign the version that `ref` resolves to; signing it again has no effect.

    Raises:
        ConfigError, NotFoundError, CorruptDataError, UnavailableError: see `Repository.resolve`, `Repository.entry`.
        ConflictError: another file exists at the path of the signature.
        UnknownOutcomeError: the store did not report whether it wrote the file.
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
        # The file exists. If it is a valid signature by this key, there is nothing to do.
        if _find_fault(repository, version, key.public, message) is not None:
            raise ConflictError(
                f"{location} exists and is not a signature of {version} by this key; remove that file"
            ) from error
    return Signature(str(version), key.public.id, location)


def check_signed(repository: Repository, version: Resolved, entry: Entry, keys: Sequence[PublicKey]) -> Signature:
    """Return a valid signature of `entry`, the entry of `version`, by one of `keys`.

    Raises:
        CorruptDataError: no key has a valid signature; the message has the reason for each key.
        UnavailableError: the store does not respond.
    """
    message = signed_message(version, entry.content)
    reasons = []
    for key in keys:
        fault = _find_fault(repository, version, key, message)
        if fault is None:
            return Signature(str(version), key.id, repository.storage.location(_path(version, key)))
        reasons.append(f"{key.id} ({key.source}): {fault}")
    raise CorruptDataError(
        f"{version} is not trusted. By key {'; by key '.join(reasons) or '- none is trusted'}. Check where it "
        f"comes from; a trusted key holder can sign it: datasvc models sign {version} --key FILE"
    )


def list_signers(repository: Repository, version: Resolved) -> list[str]:
    """Return the ids of the keys that have a signature file for a version; the signatures are not checked.

    Raises UnavailableError: the store does not respond.
    """
    prefix = f"{version.version:08d}."
    files = repository.storage.list(f"{version.kind}/{version.name}/signatures")
    return sorted(
        name.removeprefix(prefix).removesuffix(".json")
        for name in files
        if name.startswith(prefix) and name.endswith(".json")
    )


def signers(repository: Repository, ref: str) -> list[str]:
    """Return the ids of the keys that have a signature file for the version `ref`; see `list_signers`."""
    return list_signers(repository, repository.resolve("models", ref, removed=True))


def _find_fault(repository: Repository, version: Resolved, key: PublicKey, message: bytes) -> str | None:
    """Return the reason why there is no valid signature of `message` by `key`; None if the signature is valid."""
    try:
        return repository.storage.read_checked(
            _path(version, key), partial(_check_file, key=key, message=message), max_bytes=MAX_ENTRY_BYTES
        )
    except NotFoundError:
        return "it was not signed"
    except (CorruptDataError, ConfigError) as error:
        return str(error)


def _check_file(raw: bytes, location: str, key: PublicKey, message: bytes) -> None:
    """Raise CorruptDataError or ConfigError unless `raw` is a signature file with a valid signature of `message`."""
    content = decode_entry(raw, location)
    try:
        algorithm, signature = content["algorithm"], bytes.fromhex(content["signature"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(f"{location} is not a valid signature file: {error!r}") from error
    if algorithm != _ALGORITHM or not key.verifies(signature, message):
        raise CorruptDataError(
            f"{location} does not match the stored entry: the entry was changed, or the signature is of another "
            "version"
        )


def _path(version: Resolved, key: PublicKey) -> str:
    return f"{version.kind}/{version.name}/signatures/{version.version:08d}.{key.id}.json"
