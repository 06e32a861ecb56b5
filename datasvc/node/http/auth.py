"""Authentication of a node by bearer tokens, its own and those of tenants.

A node without a token must not be reachable from other machines.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from datasvc.cache.peers.peer_source import TOKEN_VARIABLE
from datasvc.errors import ConfigError

_MIN_TOKEN_CHARS = 16
_MAX_FILE_CHARS = 4096  # of a file with a token: more than any token has
_MAX_TENANTS_CHARS = 1 << 20
_SCHEME = "bearer"


def load_token(path: Path | None, from_environment: str | None) -> str | None:
    """Return the token in a file, else the one in the environment, else None.

    Args:
        path: file that holds only the token; surrounding white space is ignored.
        from_environment: value of `DATASVC_TOKEN`.

    Raises:
        ConfigError: the file cannot be read, is too large, or is readable by all users; the token is too short or
            has spaces.
    """
    if path is None:
        return None if from_environment is None else valid_token(from_environment.strip(), TOKEN_VARIABLE)
    return valid_token(read_secret(path, _MAX_FILE_CHARS, "a token").strip(), str(path))


def read_secret(path: Path, max_chars: int, what: str) -> str:
    """Return the text of a file that other users must not read.

    Args:
        path: the file.
        max_chars: largest number of its characters.
        what: what it has, for messages.

    Raises:
        ConfigError: the file cannot be read, is too large, or is readable by all users.
    """
    try:
        with path.open(encoding="ascii") as file:
            # Use the mode of the open file, because the path may name another file by now.
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(max_chars + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {what} from {path}: {error}; expected an ASCII file with {what}") from error
    if mode & stat.S_IROTH:
        raise ConfigError(f"all users of this machine can read {what} in {path}; run chmod 600 and make new tokens")
    if len(text) > max_chars:
        raise ConfigError(f"{path} has more than {max_chars} characters; expected a file with only {what}")
    return text


def valid_token(token: str, source: str) -> str:
    """Return the token if it is valid; `source` is its file or variable, for the message."""
    if len(token) < _MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the token from {source} is not valid: expected at least {_MIN_TOKEN_CHARS} ASCII characters without "
            "spaces; `openssl rand -hex 32` makes one"
        )
    return token


@dataclass(frozen=True)
class Tenant:
    """One tenant.

    Attributes:
        name: whose quota is charged for what the tenant fetches, see `datasvc cache quota`.
        token: bearer token of its requests.
        repositories: URLs of the repositories that it may read; each is one of the node's.
    """

    name: str
    token: str = field(repr=False)
    repositories: tuple[str, ...]


def load_tenants(path: Path) -> tuple[Tenant, ...]:
    """Return the tenants of a JSON file: `{"NAME": {"token": "...", "repositories": ["URL"]}}`.

    Raises:
        ConfigError: the file cannot be read, is readable by all users, or is not valid; two tenants have one token.
    """
    text = read_secret(path, _MAX_TENANTS_CHARS, "tenants with tokens")
    try:
        content = json.loads(text)
        tenants = tuple(_read_tenants(content, path))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f'{path} is not a file of tenants: {error!r}; expected {{"NAME": {{"token": "...", "repositories": '
            '["URL"]}}'
        ) from error
    if len({tenant.token for tenant in tenants}) < len(tenants):
        raise ConfigError(f"two tenants in {path} have the same token; give each its own")
    return tenants


def _read_tenants(content: Mapping[str, Any], path: Path) -> Iterator[Tenant]:
    for name, facts in content.items():
        if unknown := sorted(facts.keys() - {"token", "repositories"}):
            raise ConfigError(f"tenant {name!r} in {path} has unknown fields: {', '.join(unknown)}")
        urls = facts["repositories"]
        if not isinstance(urls, list) or not urls or not all(isinstance(url, str) for url in urls):
            raise ConfigError(f"tenant {name!r} in {path} has no list of repositories that it may read")
        yield Tenant(name, valid_token(str(facts["token"]), f"tenant {name!r} in {path}"), tuple(urls))


def is_authorized(header: str | None, token: str | None) -> bool:
    """Return whether an `Authorization` header has the token, or no token is required.

    The comparison takes constant time, so that its duration does not reveal parts of the token.
    """
    if token is None:
        return True
    scheme, _, credentials = (header or "").partition(" ")
    # Compare the tokens before the scheme, so that a wrong scheme takes as long as a wrong token. aiohttp decodes
    # headers with "surrogateescape", so they may contain characters that only this option can encode.
    matches = hmac.compare_digest(credentials.strip().encode("utf-8", "surrogateescape"), token.encode())
    return matches and scheme.lower() == _SCHEME


def is_loopback(host: str) -> bool:
    """Return whether `host` is "localhost" or a loopback address. Other names count as reachable from elsewhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_own_host(header: str, own_hosts: Collection[str]) -> bool:
    """Return whether the `Host` header of a request is a loopback name or address, or is one of `own_hosts`."""
    if not set(header).isdisjoint("@/?#\\"):
        return False  # a user name or a path, which `urlsplit` would leave out
    try:
        host = urlsplit(f"//{header}").hostname  # without the port
    except ValueError:
        return False
    return host is not None and (is_loopback(host) or host in own_hosts)


def check_exposure(host: str, token: str | None, *, how: str = f"--token-file or {TOKEN_VARIABLE}") -> None:
    """Raise ConfigError if other machines could reach a server that requires no token; `how` sets one."""
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"listening on {host!r} gives other machines access: set a token with {how}, or listen on 127.0.0.1"
        )
