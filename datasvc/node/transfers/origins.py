"""The repositories that a node may read. Their reads share one limit of bytes per second.

A request names the repository of its object. Only the repositories of the node's settings are read, so a client
cannot make a node fetch from any other address.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from datasvc.errors import NotFoundError, UnavailableError
from datasvc.repository import Repository, Storage
from datasvc.repository.store.obstore_loop import CancellationToken
from datasvc.repository.store.ranges import Take
from datasvc.repository.store.redaction import redact_url


class RateLimitedStorage(Storage):
    """A storage whose reads are limited by a token bucket. It cannot be pickled.

    Args:
        url: see `Storage`.
        bucket: bucket shared by all reads under the same limit.
        closing: event that makes waiting reads fail.
    """

    def __init__(self, url: str, bucket: TokenBucket, closing: threading.Event) -> None:
        super().__init__(url)
        self._bucket = bucket
        self._closing = closing

    def __reduce__(self) -> str:
        raise TypeError("a rate-limited storage belongs to its process; send its URL instead")

    def read(self, path: str, max_bytes: int | None = None) -> bytes:
        """Return the whole content. Its size is known only afterwards, so the next read waits instead."""
        content = super().read(path, max_bytes)
        if max_bytes is None:  # otherwise `read_start` has counted it
            self._bucket.reserve(len(content))
        return content

    def read_start(self, path: str, length: int) -> bytes:
        """Return the first bytes. Their number is known only afterwards, so the next read waits instead."""
        content = super().read_start(path, length)
        self._bucket.reserve(len(content))
        return content

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Like `Storage.read_range`, but wait for the rate limit first. Also raise UnavailableError when closing."""
        self._wait_turn(path, length)
        return super().read_range(path, offset, length)

    def stream_range(self, path: str, offset: int, length: int, take: Take, interrupt: CancellationToken) -> None:
        """Like `Storage.stream_range`, but wait for the rate limit before each piece, which slows down the sender."""

        def take_after_wait(view: memoryview) -> None:
            self._wait_turn(path, len(view))
            take(view)

        super().stream_range(path, offset, length, take_after_wait, interrupt)

    def _wait_turn(self, path: str, num_bytes: int) -> None:
        if self._closing.wait(self._bucket.reserve(num_bytes)):
            raise UnavailableError(f"cannot read {self.location(path)}: this node is stopping; try another node")


class Origins:
    """The open repositories of a node.

    Args:
        urls: URLs of the repositories.
        rate_bytes_s: limit for reading from all of them together; None: no limit.

    Raises:
        NotFoundError, ConfigError, UnavailableError: see `Repository.open`.
    """

    def __init__(self, urls: Sequence[str], *, rate_bytes_s: int | None = None) -> None:
        self._closing = threading.Event()
        bucket = None if rate_bytes_s is None else TokenBucket(rate_bytes_s)
        self._repositories: dict[str, Repository] = {}
        # Open all of them now: a wrong URL must fail the start of the node, not a later request.
        for url in urls:
            repository = Repository.open(url)
            if bucket is not None:
                repository = Repository(RateLimitedStorage(url, bucket, self._closing))
            # A request may name the repository by the URL of the settings, which may be a relative path, or by
            # `Repository.url`, which is absolute.
            self._repositories[_normalized(url)] = self._repositories[_normalized(repository.url)] = repository

    def find(self, url: str | None) -> Repository:
        """Return the repository that a request names; without a URL, the only one.

        Raises:
            NotFoundError: the node does not read this repository; or it reads several and `url` is None.
        """
        repository = self._only() if url is None else self._repositories.get(_normalized(url))
        if repository is None:
            problem = (
                "the request names no repository" if url is None else f"this node does not read {redact_url(url)}"
            )
            raise NotFoundError(f"{problem}; it reads: {', '.join(self.urls()) or 'none'} (--repo)")
        return repository

    def urls(self) -> list[str]:
        """Return the URLs of the repositories without credentials."""
        return sorted({redact_url(repository.url) for repository in self._repositories.values()})

    def only(self, urls: Sequence[str]) -> Origins:
        """Return origins with some of these repositories. Raise NotFoundError: one of `urls` is none of them."""
        chosen = Origins([])
        for url in urls:
            repository = self.find(url)
            chosen._repositories |= {_normalized(url): repository, _normalized(repository.url): repository}
        return chosen

    def close(self) -> None:
        """Make reads that wait for the rate limit fail."""
        self._closing.set()

    def _only(self) -> Repository | None:
        """Return the repository of a node that reads only one; None if it reads none or several."""
        # A repository may be in the dict under two URLs.
        distinct = {id(repository): repository for repository in self._repositories.values()}
        return next(iter(distinct.values())) if len(distinct) == 1 else None


def _normalized(url: str) -> str:
    # Without credentials, because each node may have different ones for the same repository.
    return redact_url(url).rstrip("/")


# It only computes how long to wait; its callers wait. Therefore threads and coroutines can use the same class.


class TokenBucket:
    """Limits bytes to a rate: in any period, at most `rate_bytes_s` per second, plus the bytes of 0.1 s (the burst).

    After a pause, the burst passes without a wait. A reservation may be larger than the burst, and then waits longer.
    Callers are served in the order of their calls. Thread-safe.

    Args:
        rate_bytes_s: bytes per second, above zero.
        clock: returns monotonic seconds.
    """

    def __init__(self, rate_bytes_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        assert rate_bytes_s > 0, rate_bytes_s
        self._rate = rate_bytes_s
        self._burst = rate_bytes_s / 10
        self._clock = clock
        self._balance = self._burst  # bytes that may pass now; negative after a reservation that must wait
        self._updated = clock()
        self._lock = threading.Lock()

    def reserve(self, num_bytes: int) -> float:
        """Reserve `num_bytes`; return the seconds to wait before all of them may be transferred."""
        with self._lock:
            now = self._clock()
            self._balance = min(self._burst, self._balance + (now - self._updated) * self._rate)
            self._updated = now
            # The balance may become negative: later callers then wait longer, so the order of calls is kept.
            self._balance -= num_bytes
            return max(0.0, -self._balance / self._rate)
