"""URLs of stores: the file system that reads one, and the form of a URL that other processes get."""

from __future__ import annotations

import hmac
import os
import re
import secrets
from typing import TYPE_CHECKING, Any, Final

from blake3 import blake3

from datasvc.child_process import inherited_key
from datasvc.errors import ConfigError, UnavailableError
from datasvc.extras import how_to_install_driver
from datasvc.repository.store.redaction import redact_text, redact_url, safe_cause

if TYPE_CHECKING:
    import fsspec

# Start of a URL, or of a chain such as `zip://a::s3://b`.
_SCHEME: Final = re.compile(r"([A-Za-z][\w+.-]*)(?:::|://)")


def local_root(url: str) -> str | None:
    """Return the folder that a URL without a scheme names, as fsspec's driver does; None for any other URL."""
    if ":" in url or os.name != "posix":
        return None
    path = url if os.path.lexists(url) else os.path.expanduser(url)
    if not path.startswith("/"):
        path = f"{os.getcwd()}/{path.removeprefix('./')}" if path not in {"", "."} else os.getcwd()
    return path.rstrip("/") or "/"


def resolve_url(url: str, **options: Any) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of `url` and the path on it. A URL without a scheme is a local path.

    Args:
        url: local path or any fsspec URL.
        **options: options of the driver.

    Raises:
        ConfigError: the scheme is unknown, or its driver is not installed.
        UnavailableError: a driver that connects immediately gets no response.
    """
    import fsspec
    from fsspec.implementations.local import LocalFileSystem, make_path_posix

    existing, rest = split_existing(url)
    if existing:
        # Taken as written: fsspec would read `::` in a name as a chain of URLs, and `~` as the user's folder.
        path = existing + rest
        path = make_path_posix(f"./{path}" if path.startswith("~") else path)
        return LocalFileSystem(**options), path.rstrip("/") or "/"
    try:
        file_system, root = fsspec.core.url_to_fs(os.path.expanduser(url), **options)
    except OSError as error:
        raise UnavailableError(f"cannot reach {redact_url(url)!r}: {redact_text(str(error))}") from safe_cause(error)
    except ImportError as error:
        raise ConfigError(f"cannot use {redact_url(url)!r} ({error}): {how_to_install_driver(url)}") from error
    except ValueError as error:
        raise ConfigError(f"cannot use {redact_url(url)!r}: {redact_text(str(error))}") from safe_cause(error)
    return file_system, root.rstrip("/") or "/"


def split_existing(path: str) -> tuple[str, str]:
    """Return the longest start of a local path that exists, and the rest; "" and `path` for a URL.

    The signs of a pattern, such as `[` or `{`, are signs only in the rest.
    """
    scheme = _SCHEME.match(path)
    if scheme is not None:
        import fsspec

        if scheme[1] in fsspec.available_protocols():
            return "", path
    existing = os.path.expanduser(path) if not os.path.lexists(path) else path
    path = existing
    while existing and not os.path.lexists(existing):
        existing = existing.rstrip("/").rpartition("/")[0]
    return existing, path[len(existing) :]


def open_without_listings(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of `url`, which caches no listings if its driver has the option; see `resolve_url`.

    A cached listing lacks the entries that other processes have committed since, and drivers answer for single files
    from it. That `RemoteFiles` drops listings is not enough: until the request that follows, another thread may cache
    a listing that it requested before the commit.
    """
    try:
        return resolve_url(url, use_listings_cache=False)
    except TypeError:  # a driver of somebody else, without that option
        return resolve_url(url)


def url_to_pickle(url: str) -> tuple[str, bytes]:
    """Return a URL without its password, and the whole one encrypted, for `url_of_pickle`; b"" if it has none.

    A pickle may be stored or sent, so it must not have a password. The key is that of `multiprocessing`, which worker
    processes inherit and others do not have.
    """
    url_without_password = redact_url(url)
    if url_without_password == url:
        return url, b""
    nonce, content = secrets.token_bytes(32), url.encode()
    return url_without_password, nonce + _cipher(nonce, content) + _mac(nonce, content)


def url_of_pickle(url: str, encrypted: bytes) -> str:
    """Return the whole URL; in a process that does not have the key, the URL without a password."""
    nonce, content = encrypted[:32], _cipher(encrypted[:32], encrypted[32:-32])
    # Without the password, fsspec's configuration may have it; otherwise the store refuses access.
    return content.decode() if encrypted and hmac.compare_digest(_mac(nonce, content), encrypted[-32:]) else url


def _cipher(nonce: bytes, content: bytes) -> bytes:
    stream = blake3(nonce, key=inherited_key()).digest(len(content))
    return bytes(a ^ b for a, b in zip(content, stream, strict=True))


def _mac(nonce: bytes, content: bytes) -> bytes:
    return blake3(b"mac" + nonce + content, key=inherited_key()).digest()
