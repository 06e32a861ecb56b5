"""Who may talk to a node: everybody on this machine unless there is a token, nobody else without one."""

from __future__ import annotations

import hmac
import ipaddress
import os
import stat
from pathlib import Path
from typing import Final

from datasvc.errors import ConfigError

TOKEN_VARIABLE: Final = "DATASVC_TOKEN"  # noqa: S105 - the name of a variable
_MIN_TOKEN_LENGTH = 16
_SCHEME = "bearer"


def load_token(path: Path | None, from_environment: str | None) -> str | None:
    """Return the token that a file holds, or else the environment, or None.

    Args:
        path: a file that holds nothing else; white space around the token is not part of it.
        from_environment: value of `DATASVC_TOKEN`.

    Raises:
        ConfigError: the file cannot be read, or others can; the token is short, or has white space in it.
    """
    if path is None:
        return None if from_environment is None else _checked(from_environment.strip(), TOKEN_VARIABLE)
    try:
        with path.open(encoding="ascii") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(4096)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read a token from {path}: {error}") from error
    if mode & stat.S_IROTH:
        raise ConfigError(f"everybody on this machine can read the token in {path}: chmod 600 it and make a new one")
    return _checked(text.strip(), str(path))


def _checked(token: str, source: str) -> str:
    if len(token) < _MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the token of {source} is no secret: expected at least {_MIN_TOKEN_LENGTH} ASCII characters without "
            "spaces; `openssl rand -hex 32` makes one"
        )
    return token


def is_authorized(header: str | None, token: str | None) -> bool:
    """Return whether an `Authorization` header carries the token; the time it takes says nothing about the token."""
    if token is None:
        return True
    scheme, _, given = (header or "").partition(" ")
    # Compared in any case, so that a wrong scheme takes as long as a wrong token.
    matches = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token.encode())
    return matches and scheme.lower() == _SCHEME


def is_loopback(host: str) -> bool:
    """Return whether `host` can be reached from this machine only; a name other than "localhost" may be anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, token: str | None) -> None:
    """Raises ConfigError when other machines could reach a node that asks for no token."""
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"listening on {host!r} lets other machines in: give a token with --token-file or {TOKEN_VARIABLE}, or "
            "listen on 127.0.0.1"
        )
