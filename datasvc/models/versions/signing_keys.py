"""Ed25519 keys in PEM files, as `openssl genpkey -algorithm ed25519` writes them too.

Needs the package `cryptography`, which is imported only where a key is used.
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
_MAX_BYTES = 1 << 20
_PUBLIC_PEM = re.compile(rb"-----BEGIN PUBLIC KEY-----[^-]*-----END PUBLIC KEY-----")


@dataclass(frozen=True)
class PublicKey:
    """A key that signatures are checked with.

    Attributes:
        id: 16 hex digits of the BLAKE3 of the key's 32 bytes: names it in files and messages, proves nothing.
        source: the file that it comes from.
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
    """A key that signs.

    Attributes:
        public: its other half.
    """

    public: PublicKey
    _key: Ed25519PrivateKey = field(repr=False, compare=False)

    def sign(self, message: bytes) -> bytes:
        """Return the 64 bytes of a signature of `message` (RFC 8032)."""
        return self._key.sign(message)


def make_key(path: Path) -> PublicKey:
    """Write a new private key to `path`, readable by its owner alone, and the public one to `path`.pub.

    Raises:
        ConfigError: one of the files exists, and nothing is overwritten; or it cannot be written.
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
            public_path.unlink()  # it belongs to no key
            raise
    except FileExistsError as error:
        raise ConfigError(f"{path} or {public_path} exists already; keys are never overwritten") from error
    except OSError as error:
        raise ConfigError(f"cannot write the key {path}: {error}") from error
    return _public_key(key.public_key(), public_path)


def load_private_key(path: Path) -> PrivateKey:
    """Return the private key in a PEM file.

    Raises:
        ConfigError: the file cannot be read, or others than its owner can read or write it; or it holds no Ed25519
            key that needs no password.
    """
    _need_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            key = load_pem_private_key(file.read(_MAX_BYTES), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"cannot read a private key from {path}: {error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"others than its owner can use the private key {path}: chmod 600 it, or make a new one if they did"
        )
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} holds a key of another kind; expected Ed25519: `datasvc models keygen` makes one")
    return PrivateKey(_public_key(key.public_key(), path), key)


def load_public_keys(paths: Iterable[Path]) -> tuple[PublicKey, ...]:
    """Return all public keys in PEM files, each of which holds one or more.

    Raises:
        ConfigError: a file cannot be read, or has no public key, or one that is not Ed25519.
    """
    return tuple(key for path in paths for key in _load_public(path))


def trusted_keys(paths: Sequence[str | Path] | None = None) -> tuple[PublicKey, ...]:
    """Return the keys that versions must be signed with; () where none is configured.

    Args:
        paths: files of public keys; None: those that `DATASVC_TRUSTED_KEYS` names, separated as PATH is.

    Raises:
        ConfigError: as `load_public_keys`; or the variable is set and names none: then keys were meant.
    """
    if paths is None:
        configured = os.environ.get(TRUSTED_KEYS_VARIABLE)
        paths = [part for part in (configured or "").split(os.pathsep) if part]
        if configured is not None and not paths:
            raise ConfigError(
                f"{TRUSTED_KEYS_VARIABLE} names no file: give files of public keys, or unset it to trust all"
            )
    return load_public_keys(Path(path).expanduser() for path in paths)


def _load_public(path: Path) -> list[PublicKey]:
    _need_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        with path.open("rb") as file:
            found = [load_pem_public_key(each) for each in _PUBLIC_PEM.findall(file.read(_MAX_BYTES))]
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"cannot read public keys from {path}: {error}") from error
    keys = [_public_key(key, path) for key in found if isinstance(key, Ed25519PublicKey)]
    # A key that is left out silently would refuse what its owner signed, and nobody would know why.
    if not keys or len(keys) < len(found):
        raise ConfigError(f"{path} has to hold Ed25519 public keys in PEM form and no others")
    return keys


def _public_key(key: Ed25519PublicKey, source: Path) -> PublicKey:
    return PublicKey(digest_of(key.public_bytes_raw())[:_ID_DIGITS], source, key)


def _create_secret(path: Path, content: bytes) -> None:
    """Create a file that its owner alone can read from its first instant on. Raises OSError."""
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
    try:
        import cryptography  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise ConfigError(f"signatures need the package cryptography: {how_to_install('sign')}") from error
