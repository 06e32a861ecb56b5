"""Fill one incoming file with a verified object: each source continues where the previous one failed.

`Fetcher.fetch` calls `transfer`, and chooses the sources, which are peers and the origin, and their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from datasvc.cache.fetch.partial_file import PartialFile
from datasvc.cache.sources.origin_source import Kind, ObjectSource
from datasvc.cache.sources.range_requests import ReceivedParts
from datasvc.errors import CorruptDataError, DatasvcError
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest, ObjectInfo


@dataclass(frozen=True)
class FetchReport:
    """Result of a transfer.

    Attributes:
        bytes_by_kind: bytes received by kind of source, wrong bytes included.
        num_corrupt: number of times that wrong bytes were received.
        kind: kind of the source that sent most bytes; None: an earlier fetch had received all of them.
        content: digest of the bytes. It differs from the name of the object only if this is a remote file.
    """

    bytes_by_kind: Mapping[Kind, int]
    num_corrupt: int
    kind: Kind | None
    content: Digest


def transfer(
    info: ObjectInfo,
    descriptor: int,
    parts: ReceivedParts,
    sources: Sequence[ObjectSource],
    progress: Progress = NO_PROGRESS,
    *,
    is_named_by_content: bool = True,
) -> FetchReport:
    """Fill a file with an object, and verify it.

    When a source fails, the next one continues the transfer. When the complete bytes are wrong, the error is recorded
    for each source that sent some of them, and the transfer restarts with the next source. The origin gets a second
    try, because a bit error in transfer is not likely to repeat. Bytes that an earlier process received are kept.
    If such bytes are part of a wrong file, no error is recorded, because the sender of the wrong bytes is unknown.

    Args:
        info: the object.
        descriptor: the incoming file, open for reading and writing, locked by the caller.
        parts: parts of the object that are in the file.
        sources: at least one source, in the order in which to use them.
        progress: counts the bytes of each buffer that arrives, by kind of source.
        is_named_by_content: whether the object's name is the digest of its bytes; if not, they cannot be verified.

    Returns:
        A report of the transfer. The file contains the object, and is not synced to disk.

    Raises:
        CorruptDataError, NotFoundError, ConfigError, UnavailableError: no source could send the object; the message
            has the reason of each. The class is that of the origin's failure if the origin was used. The received
            bytes stay in the file and in `parts`.
        OSError: the file cannot be written.
    """
    file = PartialFile(info.size_bytes, descriptor, parts, progress)
    return _Transfer(info, file, sources, is_named_by_content=is_named_by_content).run()


class _Transfer:
    """The sources of one transfer: those to try, and the failures of the others."""

    def __init__(
        self, info: ObjectInfo, file: PartialFile, sources: Sequence[ObjectSource], *, is_named_by_content: bool
    ) -> None:
        assert sources
        self._info = info
        self._untried = deque(sources)
        self._file = file
        self._is_named_by_content = is_named_by_content
        self._failures: list[tuple[ObjectSource, DatasvcError]] = []
        self._num_corrupt = 0
        self._tried_again: set[ObjectSource] = set()

    def run(self) -> FetchReport:
        while not self._has_object():
            if not self._untried:
                raise self._failure()
            source = self._untried.popleft()
            try:
                self._file.fill_from(source, self._info)
            except CorruptDataError as error:
                self._num_corrupt += 1
                self._record_corrupt(source, error)
            except DatasvcError as error:
                # The next source continues from the bytes that have arrived.
                self._failures.append((source, error))
        largest = self._file.bytes_by_source.most_common(1)
        kind = largest[0][0].kind if largest else None
        return FetchReport(self._file.bytes_by_kind, self._num_corrupt, kind, self._file.digest())

    def _has_object(self) -> bool:
        """Return whether the file contains the object. If all bytes are there but wrong, discard them."""
        if not self._file.is_complete:
            return False
        digest = self._file.digest()
        bytes_by_source = self._file.bytes_by_source
        if digest == self._info.digest or not self._is_named_by_content:
            for source in bytes_by_source:
                source.record_integrity(intact=True)
            return True
        self._num_corrupt += 1
        # An empty file is complete after every `reset`, so the loop of `run` would never end.
        if not self._info.size_bytes:
            raise CorruptDataError(
                f"object {self._info.digest[:12]}... cannot be empty: zero bytes have the digest {digest[:12]}...; "
                "the shard table or index that names this object is wrong"
            )
        if self._file.has_earlier_bytes:
            # The wrong bytes may be those of the earlier process, so the sources that this process has read get a
            # second try, in their old order. Sources that have failed get none, because the transfer must end.
            failed = {source for source, _ in self._failures}
            self._untried.extendleft(source for source in reversed(bytes_by_source) if source not in failed)
        else:
            for source in bytes_by_source:
                source.record_integrity(intact=False)
                self._record_corrupt(
                    source, CorruptDataError(f"{source.name} sent bytes with the digest {digest[:12]}...")
                )
        self._file.reset()
        return False

    def _record_corrupt(self, source: ObjectSource, error: CorruptDataError) -> None:
        self._failures.append((source, error))
        # A bit error in transfer is not likely to repeat, so the origin is tried again. It is tried only once more,
        # because bytes that are wrong in the store stay wrong.
        if source.kind == "origin" and source not in self._tried_again:
            self._tried_again.add(source)
            self._untried.append(source)

    def _failure(self) -> DatasvcError:
        # Use the exception class of the origin's failure: only the origin shows if the object is missing or damaged.
        origin_errors = [error for source, error in self._failures if source.kind == "origin"]
        last = origin_errors[-1] if origin_errors else self._failures[-1][1]
        reasons = "; ".join(dict.fromkeys(str(error) for _, error in self._failures))
        return type(last)(
            f"cannot fetch object {self._info.digest[:12]}... of {self._info.size_bytes} bytes: {reasons}"
        )
