"""The list of nodes: fixed, from a file that may change while a job runs, or from the addresses of a DNS name.

`Peers` gets the current nodes before each fetch. An invalid list at the start is an error. If the list becomes
invalid later, the last valid one stays in use: a typing error, or a failing name server, does not end a job.

Each node identifies itself in the list, because a node that requests an object from itself would deadlock.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from datasvc.errors import ConfigError, UnavailableError

_FILE_PREFIX = "file:"
_DNS_PREFIX = "dns:"


@dataclass(frozen=True)
class Nodes:
    """The nodes at one moment.

    Attributes:
        urls: base URLs such as "http://node1:8765", each once.
        local_url: URL of this node; None: this node is not in the list, so it reads from the others without serving.
    """

    urls: tuple[str, ...]
    local_url: str | None


class NodeMembership(Protocol):
    """A list of nodes that may change. Thread-safe; can be pickled."""

    def nodes(self) -> Nodes:
        """Return the current nodes."""


class FixedMembership:
    """A constant list of nodes, given by a user or gathered from the ranks of a job.

    Args:
        urls: base URLs.
        local_url: base URL of this node; None: the URL whose host is this machine.

    Raises:
        ConfigError: an entry is not a base URL, `local_url` is not in the list, or several hosts are this machine.
    """

    def __init__(self, urls: Iterable[str], *, local_url: str | None = None) -> None:
        self._nodes = _nodes_at_start(_parse_urls(urls), local_url)

    def nodes(self) -> Nodes:
        """Return the constant list."""
        return self._nodes


class FileMembership:
    """Nodes listed in a file, one base URL per line; empty lines and lines that start with "#" are ignored.

    The file is read again whenever it changes. Replace it by renaming a new file over it.

    Args:
        path: path of the file.
        local_url: see `FixedMembership`; while the job runs, the local node may be removed and added again.

    Raises:
        ConfigError: the file cannot be read, a line is not a base URL, there is no line, `local_url` is not listed,
            or several hosts are this machine.
    """

    def __init__(self, path: Path, *, local_url: str | None = None) -> None:
        self._path = path
        self._local_url = local_url
        # File identity and nodes are one pair, replaced as a whole: every thread sees nodes that match the identity.
        self._current = self._read(_nodes_at_start)

    def nodes(self) -> Nodes:
        """Return the nodes in the file, or the last valid list while the file is invalid or missing."""
        old_identity, old_nodes = self._current
        # Errors are ignored on purpose: the last valid list stays in use.
        with suppress(OSError, ConfigError):
            identity = _identity(self._path.stat())
            if identity != old_identity:
                # The identity is stored before the file is read, so that an invalid file is not read in every call.
                self._current = identity, old_nodes
                self._current = self._read(_nodes_while_running)
        return self._current[1]

    def _read(self, to_nodes: Callable[[tuple[str, ...], str | None], Nodes]) -> tuple[tuple[int, int, int], Nodes]:
        """Return the identity of the file, and its nodes."""
        try:
            with self._path.open(encoding="utf-8") as file:
                # Taken before the content is read, so that the next call notices a change during the read.
                identity = _identity(os.fstat(file.fileno()))
                lines = [line.strip() for line in file]
            urls = _parse_urls(line for line in lines if line and not line.startswith("#"))
            return identity, to_nodes(urls, self._local_url)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the list of nodes from {self._path}: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{self._path}: {error}") from error


class DnsMembership:
    """Nodes at the addresses of a DNS name, such as the name of a headless Kubernetes service.

    Args:
        host: DNS name.
        port: port on which all nodes listen.
        scheme: "http" or "https".
        local_url: see `FixedMembership`; a node that is not listed yet reads from the others without serving.
        interval_s: minimum time between two requests to the name server.
        resolve: returns the addresses of a name; raises OSError.
        clock: monotonic clock in seconds.

    Raises:
        ConfigError: `local_url` is not a base URL, or several addresses are this machine's and `local_url` is None.
        UnavailableError: the name cannot be resolved.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        scheme: str = "http",
        local_url: str | None = None,
        interval_s: float = 10,
        resolve: Callable[[str], Iterable[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = (host, port, scheme)
        self._local_url = local_url
        self._interval_s = interval_s
        self._resolve = resolve or addresses_of
        self._clock = clock
        self._resolving = threading.Lock()
        try:
            self._refresh()
        except OSError as error:
            raise UnavailableError(
                f"cannot resolve {host!r}: {error}; check the name, and that the service publishes the addresses of "
                "nodes that are not ready yet"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_resolving": None}  # locks cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _resolving=threading.Lock())

    def nodes(self) -> Nodes:
        """Return the nodes of the last answer; every `interval_s`, resolve the name again."""
        # A name server may take seconds: one thread waits for it, and the others use the current list.
        if self._clock() - self._resolved_s >= self._interval_s and self._resolving.acquire(blocking=False):
            try:
                # Errors are ignored on purpose: the last addresses stay in use.
                with suppress(OSError, ConfigError):
                    self._refresh()
            finally:
                self._resolving.release()
        return self._nodes

    def _refresh(self) -> None:
        host, port, scheme = self._address
        # Set before the name is resolved, so that there is one attempt per interval after a failure too.
        self._resolved_s = self._clock()
        urls = _parse_urls(f"{scheme}://{bracketed(address)}:{port}" for address in self._resolve(host))
        # At the start too, a node that is not listed is no error: its address may not be published yet.
        self._nodes = _nodes_while_running(urls, self._local_url)


def parse_membership(text: str, *, local_url: str | None = None) -> NodeMembership:
    """Return the list of nodes that a text describes.

    Args:
        text: "http://a:8765,http://b:8765", "file:/etc/datasvc/nodes", "dns:cache.example:8765" or, for nodes with
            TLS, "dns:https://cache.example:8765".
        local_url: base URL of this node; None: the listed URL with this machine's name or address.

    Raises:
        ConfigError: the text, or the list it refers to, is not valid.
        UnavailableError: a DNS name cannot be resolved.
    """
    if text.startswith(_FILE_PREFIX):
        return FileMembership(Path(text.removeprefix(_FILE_PREFIX)), local_url=local_url)
    if text.startswith(_DNS_PREFIX):
        address = text.removeprefix(_DNS_PREFIX)
        split = urlsplit(parse_node(address if "://" in address else f"http://{address}"))
        assert split.hostname is not None
        assert split.port is not None
        return DnsMembership(split.hostname, split.port, scheme=split.scheme, local_url=local_url)
    return FixedMembership((part.strip() for part in text.split(",")), local_url=local_url)


def parse_node(text: str) -> str:
    """Return a node's base URL in a canonical spelling, equal on all nodes. Raises ConfigError if it is not valid."""
    try:
        split = urlsplit(text)
        host, port = split.hostname, split.port
    except ValueError:
        host = port = None
    # A base URL has none of these parts. `isprintable` is for tabs and line breaks, which `urlsplit` removes.
    extra_parts = (split.path.rstrip("/"), split.query, split.fragment, split.username) if host else ()
    if not host or not port or split.scheme not in ("http", "https") or any(extra_parts) or not text.isprintable():
        raise ConfigError(f"{text!r} is not a valid node; expected http://HOST:PORT or https://HOST:PORT")
    return f"{split.scheme}://{bracketed(host)}:{port}"


def _parse_urls(texts: Iterable[str]) -> tuple[str, ...]:
    urls = tuple(dict.fromkeys(parse_node(text) for text in texts))
    if not urls:
        raise ConfigError("the list of nodes is empty; expected at least one http://HOST:PORT")
    return urls


def _nodes_at_start(urls: tuple[str, ...], local_url: str | None) -> Nodes:
    """Return the nodes. Raises ConfigError if `local_url` is not one of `urls`."""
    nodes = _nodes_while_running(urls, local_url)
    if local_url is not None and nodes.local_url is None:
        # Under another URL in the list, this node would request objects from itself, and deadlock.
        raise ConfigError(
            f"this node is {local_url!r}, which is not in the list of nodes: {', '.join(urls)}; use the "
            "same URL in both"
        )
    return nodes


def _nodes_while_running(urls: tuple[str, ...], local_url: str | None) -> Nodes:
    """Return the nodes. If `local_url` is not one of `urls`, this node only reads, see `Nodes.local_url`."""
    if local_url is None:
        return Nodes(urls, find_local_url(urls))
    local_url = parse_node(local_url)
    return Nodes(urls, local_url if local_url in urls else None)


def find_local_url(urls: Sequence[str]) -> str | None:
    """Return the URL in `urls` whose host is this machine, by name or address; None if there is none.

    Raises ConfigError if several hosts are this machine.
    """
    local_urls = [url for url in urls if _is_this_machine(urlsplit(url).hostname or "")]
    if len(local_urls) > 1:
        raise ConfigError(f"{', '.join(local_urls)} are all on this machine; give the URL of this node explicitly")
    return local_urls[0] if local_urls else None


def addresses_of(host: str) -> list[str]:
    """Return the addresses of a host name, or the address itself. Raises OSError if it cannot be resolved."""
    infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in infos})


def _is_this_machine(host: str) -> bool:
    try:
        addresses = addresses_of(host)
    except OSError:
        return False  # another node, whose address is not published yet
    return any(_is_local(address) for address in addresses)  # a name may have addresses of several interfaces


def _is_local(address: str) -> bool:
    """Return whether an interface of this machine has the address: a socket can be bound to local addresses only."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def bracketed(host: str) -> str:
    """Return a host in the form for URLs: an IPv6 address in brackets, a name or an IPv4 address unchanged."""
    return f"[{host}]" if ":" in host else host


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    # A new file that is renamed over the old one may have the same modification time, but has another inode.
    return status.st_mtime_ns, status.st_ino, status.st_size
