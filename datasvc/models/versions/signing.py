"""Signs model versions and checks the signatures: detached Ed25519 (RFC 8032), one file per version and key.

`models/NAME/signatures/00000003.<key id>.json` holds a signature of version 3 of NAME. It covers the model's name,
the version's number and the complete entry. The entry names everything else by digest, so that one signature covers
every byte of the checkpoint and its metadata. Signature files are created and never changed.

A signature does not cover tags: anybody who can write to the repository can move a tag to another signed version. To
exclude this risk, refer to the version by its number.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from datasvc import durable
from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError
from datasvc.extras import how_to_install
from datasvc.repository import Entry, Repository, Resolved
from datasvc.repository.logs.log import MAX_ENTRY_BYTES, decode_entry, encode_entry
from datasvc.repository.objects.objects import digest_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey


SIGNATURE_FORMAT = 1
_ALGORITHM = "ed25519"
# First part of every signed message, so that a signature is not valid for a message of another purpose.
_PURPOSE = b"datasvc model version 1"


TRUSTED_KEYS_VARIABLE: Final = "DATASVC_TRUSTED_KEYS"
PUBLIC_SUFFIX: Final = ".pub"
_ID_DIGITS = 16
_MAX_BYTES = 1 << 20  # of a key file, which has some hundred bytes per key
_PUBLIC_PEM = re.compile(rb"-----BEGIN PUBLIC KEY-----[^-]*-----END PUBLIC KEY-----")


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


# This module needs the package `cryptography`. It is optional, so it is imported only in functions that use a key.


@dataclass(frozen=True)
class PublicKey:
    """A key that verifies signatures.

    Attributes:
        id: first 16 hex digits of the BLAKE3 digest of the key's 32 bytes. It names the key in files and messages; it
            is not used for verification.
        source: file of the key.
    """

    id: str
    source: Path
    _key: Ed25519PublicKey = field(repr=False, compare=False)

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Return whether the holder of the private key signed `message`."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class PrivateKey:
    """A key that signs; `public` is the public key that belongs to it."""

    public: PublicKey
    _key: Ed25519PrivateKey = field(repr=False, compare=False)

    def sign(self, message: bytes) -> bytes:
        """Return the 64 bytes of a signature of `message` (RFC 8032)."""
        return self._key.sign(message)


def make_key(path: Path) -> PublicKey:
    """Write a new private key to `path`, readable by its owner only, and its public key to `path`.pub.

    Raises:
        ConfigError: one of the files exists and would be overwritten, or a file cannot be written.
    """
    _need_cryptography()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    public_path = path.with_name(path.name + PUBLIC_SUFFIX)
    try:
        durable.create_file(public_path, public)
        try:
            _create_secret(path, private)
        except BaseException:
            # Without its private key, the public key is of no use.
            public_path.unlink()
            raise
    except FileExistsError as error:
        raise ConfigError(
            f"{path} or {public_path} exists already; keys are never overwritten: choose another path"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot write the key {path}: {error}") from error
    return _public_key(key.public_key(), public_path)


def load_private_key(path: Path) -> PrivateKey:
    """Return the private key in a PEM file.

    Raises:
        ConfigError: the file cannot be read, is accessible to other users than its owner, or does not hold an
            Ed25519 key without a password.
    """
    _need_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        with path.open("rb") as file:
            # Read the mode of the open file, not of the path: another file may have been moved to the path.
            mode = os.fstat(file.fileno()).st_mode
            key = load_pem_private_key(file.read(_MAX_BYTES), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"cannot read a private key from {path}: {error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"other users than its owner can access the private key {path}: run chmod 600 on it, or make a new "
            "key if they may have read it"
        )
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} does not hold an Ed25519 key; `datasvc models keygen` makes one")
    return PrivateKey(_public_key(key.public_key(), path), key)


def load_public_keys(paths: Iterable[Path]) -> tuple[PublicKey, ...]:
    """Return all public keys in PEM files; a file may have several.

    Raises:
        ConfigError: a file cannot be read, has no public key, or has a key that is not Ed25519.
    """
    return tuple(key for path in paths for key in _load_public(path))


def trusted_keys(paths: Sequence[str | Path] | None = None) -> tuple[PublicKey, ...]:
    """Return the trusted keys; () if none is configured. A version is trusted if one of these keys has signed it.

    Args:
        paths: files of public keys; None: the files that `DATASVC_TRUSTED_KEYS` names, separated as in PATH.

    Raises:
        ConfigError: see `load_public_keys`; or the variable is set but names no file. This is treated as a mistake:
            otherwise an empty variable would turn the check off.
    """
    if paths is None:
        configured = os.environ.get(TRUSTED_KEYS_VARIABLE)
        if configured is None:
            return ()
        paths = [part for part in configured.split(os.pathsep) if part]
        if not paths:
            raise ConfigError(
                f"{TRUSTED_KEYS_VARIABLE} names no file: set it to files of public keys, or unset it to trust all"
            )
    return load_public_keys(Path(path).expanduser() for path in paths)


def _load_public(path: Path) -> list[PublicKey]:
    """Return the public keys in one PEM file; for errors, see `load_public_keys`."""
    _need_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        with path.open("rb") as file:
            loaded = [load_pem_public_key(pem) for pem in _PUBLIC_PEM.findall(file.read(_MAX_BYTES))]
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"cannot read public keys from {path}: {error}") from error
    keys = [_public_key(key, path) for key in loaded if isinstance(key, Ed25519PublicKey)]
    # Do not skip keys of other types: versions that they have signed would be refused without a visible reason.
    if not keys or len(keys) < len(loaded):
        raise ConfigError(f"{path} must contain Ed25519 public keys in PEM form and no other keys")
    return keys


def _public_key(key: Ed25519PublicKey, source: Path) -> PublicKey:
    return PublicKey(digest_of(key.public_bytes_raw())[:_ID_DIGITS], source, key)


def _create_secret(path: Path, content: bytes) -> None:
    """Create a file that only its owner can read, from the moment of its creation. Raises OSError."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise
    durable.fsync_folder(path.parent)


def _need_cryptography() -> None:
    """Raise ConfigError, with the command that installs it, if the package `cryptography` is not installed."""
    try:
        import cryptography  # noqa: F401 - imported only to find out whether it is installed
    except ImportError as error:
        raise ConfigError(f"signatures need the package cryptography: {how_to_install('sign')}") from error
