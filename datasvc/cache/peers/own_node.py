"""Which of the nodes this machine is: one that did not know would ask itself for what it owns, and wait."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from datasvc.errors import ConfigError


def find_own(urls: Sequence[str]) -> str | None:
    """Return the one of `urls` whose host is this machine, by name or address; None where there is none.

    Raises ConfigError where several are.
    """
    found = [url for url in urls if _is_this_machine(urlsplit(url).hostname or "")]
    if len(found) > 1:
        raise ConfigError(f"{', '.join(found)} are all on this machine: say which of them this node is")
    return found[0] if found else None


def _is_this_machine(host: str) -> bool:
    try:
        addresses = addresses_of(host)
    except OSError:
        return False  # a node that has no address yet is another one
    return any(_is_local(address) for address in addresses)


def addresses_of(host: str) -> list[str]:
    """Return the addresses of a name, or the address itself. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


def _is_local(address: str) -> bool:
    """Return whether an interface of this machine has the address: only then can a socket be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
