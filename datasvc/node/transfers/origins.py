"""The repositories that a node may read from, all below one cap of bytes a second.

A peer names the repository of an object that it wants; only what the node was started with is ever read, so nobody
can have a node fetch from an address of their choice.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from datasvc.errors import NotFoundError, UnavailableError
from datasvc.node.transfers.token_bucket import TokenBucket
from datasvc.repository import Repository, Storage
from datasvc.repository.store.cancellation import CancellationToken
from datasvc.repository.store.http_stream import Take
from datasvc.repository.store.storage import redact_url


class CappedStorage(Storage):
    """A storage whose reads wait for their turn in a bucket. It cannot be sent to another process.

    Args:
        url: as of `Storage`.
        bucket: shared by all that counts against the cap.
        closing: set when nobody wants the bytes any more: waiting reads then give up.
    """

    def __init__(self, url: str, bucket: TokenBucket, closing: threading.Event) -> None:
        super().__init__(url)
        self._bucket = bucket
        self._closing = closing

    def __reduce__(self) -> str:
        raise TypeError("a storage that is capped belongs to its process; send its URL instead")

    def read(self, path: str, most_bytes: int | None = None) -> bytes:
        """Return the whole content; its size is known afterwards, so the next read waits for it."""
        content = super().read(path, most_bytes)
        self._bucket.reserve(len(content))
        return content

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Return a range as `Storage` does, when its turn has come. Raises UnavailableError when closing, too."""
        self._wait_turn(path, length)
        return super().read_range(path, offset, length)

    def stream_range(self, path: str, offset: int, length: int, take: Take, interrupt: CancellationToken) -> None:
        """Hand on a range as `Storage` does, each piece when its turn has come: so the sender waits, too."""

        def take_in_turn(view: memoryview) -> None:
            self._wait_turn(path, len(view))
            take(view)

        super().stream_range(path, offset, length, take_in_turn, interrupt)

    def _wait_turn(self, path: str, num_bytes: int) -> None:
        if self._closing.wait(self._bucket.reserve(num_bytes)):
            raise UnavailableError(f"cannot read {self.location(path)}: this node is stopping")


class Origins:
    """The repositories of a node, open. Close it to stop reads that wait for their turn.

    Args:
        urls: of the repositories.
        rate_bytes_s: cap of what is read from all of them together; None for no cap.

    Raises:
        NotFoundError, ConfigError, UnavailableError: as `Repository.open`.
    """

    def __init__(self, urls: Sequence[str], *, rate_bytes_s: int | None = None) -> None:
        self._closing = threading.Event()
        bucket = None if rate_bytes_s is None else TokenBucket(rate_bytes_s)
        self._repositories: dict[str, Repository] = {}
        for url in urls:
            repository = Repository.open(url)
            if bucket is not None:
                repository = Repository(CappedStorage(url, bucket, self._closing))
            self._repositories[_spelling(url)] = self._repositories[_spelling(repository.url)] = repository

    def find(self, url: str | None) -> Repository:
        """Return the repository that a request names; None means the only one.

        Raises:
            NotFoundError: the node has no such repository, or several and `url` is None.
        """
        repository = self._only() if url is None else self._repositories.get(_spelling(url))
        if repository is None:
            wanted = "which repository?" if url is None else f"this node does not read from {redact_url(url)}"
            raise NotFoundError(f"{wanted} It reads from: {', '.join(self.urls()) or 'none'} (--repo)")
        return repository

    def urls(self) -> list[str]:
        """Return where the repositories are, without secrets."""
        return sorted({redact_url(repository.url) for repository in self._repositories.values()})

    def close(self) -> None:
        """Let reads that wait for their turn fail."""
        self._closing.set()

    def _only(self) -> Repository | None:
        different = {id(each): each for each in self._repositories.values()}
        return next(iter(different.values())) if len(different) == 1 else None


def _spelling(url: str) -> str:
    # Credentials are each node's own: they do not make another repository.
    return redact_url(url).rstrip("/")
