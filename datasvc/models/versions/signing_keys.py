"""Ed25519 keys in PEM files, for `signing`; `openssl genpkey -algorithm ed25519` writes such files too.

This module needs the package `cryptography`. It is optional, so it is imported only in functions that use a key.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from datasvc import durable
from datasvc.errors import ConfigError
from datasvc.extras import how_to_install
from datasvc.repository.objects.objects import digest_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

TRUSTED_KEYS_VARIABLE: Final = "DATASVC_TRUSTED_KEYS"
PUBLIC_SUFFIX: Final = ".pub"
_ID_DIGITS = 16
_MAX_BYTES = 1 << 20  # of a key file, which has some hundred bytes per key
_PUBLIC_PEM = re.compile(rb"-----BEGIN PUBLIC KEY-----[^-]*-----END PUBLIC KEY-----")


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
