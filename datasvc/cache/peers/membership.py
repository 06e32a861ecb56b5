"""Who the nodes are: a fixed list, a file that may change while a job runs, or a DNS name with many addresses.

A list that is wrong at the start is an error. One that becomes wrong later is counted, and the last good one stays:
a job outlives a slip of the pen and a name server's bad minute.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from datasvc.cache.peers.own_node import addresses_of, find_own
from datasvc.errors import ConfigError, UnavailableError

_FILE_PREFIX = "file:"
_DNS_PREFIX = "dns:"


@dataclass(frozen=True)
class Nodes:
    """The nodes at one moment.

    Attributes:
        urls: base URLs such as "http://node1:8765", each once.
        own: which of them this machine is; None when it is none of them and only asks.
    """

    urls: tuple[str, ...]
    own: str | None


class NodeMembership(Protocol):
    """Says who the nodes are. Safe for threads; travels to other processes."""

    @property
    def num_failures(self) -> int:
        """How often the list could not be read since the start, so that the last good one was used."""

    def nodes(self) -> Nodes:
        """Return the nodes as they are now."""


class FixedMembership:
    """Nodes that stay as they are: written down by a user, or gathered from the ranks of a job.

    Args:
        urls: base URLs.
        own: this node's; None looks for the one whose host is this machine.

    Raises:
        ConfigError: an entry is no base URL, or `own` is not in the list or not to be told.
    """

    num_failures = 0

    def __init__(self, urls: Iterable[str], *, own: str | None = None) -> None:
        self._nodes = _nodes_at_start(_parse_urls(urls), own)

    def nodes(self) -> Nodes:
        """See `NodeMembership`."""
        return self._nodes


class FileMembership:
    """Nodes named by a file, one base URL a line; lines that are empty or start with "#" say nothing.

    The file is read again whenever it changes. Replace it by renaming a new one over it.

    Args:
        path: the file.
        own: as of `FixedMembership`; it may leave the list, and come back, while running.

    Raises:
        ConfigError: the file cannot be read, a line is no base URL, there is none, or `own` is not among them.
    """

    def __init__(self, path: Path, *, own: str | None = None) -> None:
        self._path = path
        self._own = own
        self._lock = threading.Lock()
        self.num_failures = 0
        self._nodes = self._read(_nodes_at_start)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def nodes(self) -> Nodes:
        """See `NodeMembership`."""
        with self._lock:
            try:
                if _identity(self._path.stat()) != self._seen:
                    self._nodes = self._read(_nodes_while_running)
            except (OSError, ConfigError):
                self.num_failures += 1
            return self._nodes

    def _read(self, to_nodes: Callable[[tuple[str, ...], str | None], Nodes]) -> Nodes:
        try:
            with self._path.open(encoding="utf-8") as file:
                # Before the content: what changes from here on is seen at the next look.
                self._seen = _identity(os.fstat(file.fileno()))
                lines = [line.strip() for line in file]
            return to_nodes(_parse_urls(line for line in lines if line and not line.startswith("#")), self._own)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the nodes from {self._path}: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{self._path}: {error}") from error


class DnsMembership:
    """Nodes are the addresses that a DNS name has, such as that of a headless Kubernetes service.

    Args:
        host: the name.
        port: on which all of them listen.
        scheme: "http" or "https".
        own: as of `FixedMembership`; a node that is not listed yet only asks until it is.
        interval_s: how long an answer is used before the name is resolved again.
        resolve: returns the addresses of a name; raises OSError.
        clock: seconds that never run backwards.

    Raises:
        UnavailableError: the name cannot be resolved.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        scheme: str = "http",
        own: str | None = None,
        interval_s: float = 10,
        resolve: Callable[[str], Iterable[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._where = (host, port, scheme)
        self._own = own
        self._interval_s = interval_s
        self._resolve = resolve or addresses_of
        self._clock = clock
        self._resolving = threading.Lock()
        self.num_failures = 0
        try:
            self._refresh()
        except OSError as error:
            raise UnavailableError(
                f"cannot resolve {host!r}: {error}; check the name, and that the service lists nodes not ready yet"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_resolving": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _resolving=threading.Lock())

    def nodes(self) -> Nodes:
        """See `NodeMembership`."""
        # A name server may take seconds: one thread waits for it, the others use what is known.
        if self._clock() - self._resolved_s >= self._interval_s and self._resolving.acquire(blocking=False):
            try:
                self._refresh()
            except (OSError, ConfigError):
                self.num_failures += 1
            finally:
                self._resolving.release()
        return self._nodes

    def _refresh(self) -> None:
        host, port, scheme = self._where
        self._resolved_s = self._clock()
        urls = _parse_urls(f"{scheme}://{_bracketed(address)}:{port}" for address in self._resolve(host))
        self._nodes = _nodes_while_running(urls, self._own)


def parse_membership(text: str, *, own: str | None = None) -> NodeMembership:
    """Return who the nodes are, from its text form.

    Args:
        text: "http://a:8765,http://b:8765", "file:/etc/datasvc/nodes", "dns:cache.example:8765" or, for nodes that
            speak TLS, "dns:https://cache.example:8765".
        own: this node's base URL; None finds it where the list has one with this machine's name or address.

    Raises:
        ConfigError: the text, or what it names, is wrong.
        UnavailableError: a DNS name cannot be resolved.
    """
    if text.startswith(_FILE_PREFIX):
        return FileMembership(Path(text.removeprefix(_FILE_PREFIX)), own=own)
    if text.startswith(_DNS_PREFIX):
        where = text.removeprefix(_DNS_PREFIX)
        split = urlsplit(parse_node(where if "://" in where else f"http://{where}"))
        assert split.hostname is not None
        assert split.port is not None
        return DnsMembership(split.hostname, split.port, scheme=split.scheme, own=own)
    return FixedMembership((part.strip() for part in text.split(",")), own=own)


def parse_node(text: str) -> str:
    """Return a node's base URL in the one spelling that all nodes use for it. Raises ConfigError."""
    try:
        split = urlsplit(text)
        host, port = split.hostname, split.port
    except ValueError:
        host = port = None
    rest = (split.path.rstrip("/"), split.query, split.fragment, split.username) if host else ()
    if not host or not port or split.scheme not in ("http", "https") or any(rest) or not text.isprintable():
        raise ConfigError(f"{text!r} is no node; expected http://HOST:PORT or https://HOST:PORT")
    return f"{split.scheme}://{_bracketed(host)}:{port}"


def _parse_urls(texts: Iterable[str]) -> tuple[str, ...]:
    urls = tuple(dict.fromkeys(parse_node(text) for text in texts))
    if not urls:
        raise ConfigError("the list of nodes is empty; expected at least one http://HOST:PORT")
    return urls


def _nodes_at_start(urls: tuple[str, ...], own: str | None) -> Nodes:
    nodes = _nodes_while_running(urls, own)
    if own is not None and nodes.own is None:
        # Spelled otherwise it would ask itself for what it owns, and wait for itself.
        raise ConfigError(f"this node is {own!r}, but the nodes are {', '.join(urls)}: spell it as it is there")
    return nodes


def _nodes_while_running(urls: tuple[str, ...], own: str | None) -> Nodes:
    if own is None:
        return Nodes(urls, find_own(urls))
    own = parse_node(own)
    return Nodes(urls, own if own in urls else None)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_mtime_ns, status.st_ino, status.st_size
