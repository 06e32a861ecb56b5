"""Fill one incoming file with an object: from the first source that can, verified, the next one continuing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from datasvc.cache.fetch.partial_file import GrowingFile, Report
from datasvc.cache.sources.origin_source import Kind, ObjectSource
from datasvc.cache.sources.received_parts import ReceivedParts
from datasvc.errors import CorruptDataError, DatasvcError
from datasvc.repository import Digest, ObjectInfo


@dataclass(frozen=True)
class FetchReport:
    """How an object came.

    Attributes:
        bytes_by_kind: bytes that arrived from each kind of source, those of wrong objects too.
        num_corrupt: how often what had arrived was not the object.
        kind: what the object came from, mostly; None where an earlier fetch had brought all of it.
        content: digest of its bytes.
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
    report: Report | None = None,
    *,
    is_named_by_content: bool = True,
) -> FetchReport:
    """Fill a file with an object, verified.

    A source that fails is followed by the next, which continues. One whose bytes are wrong is marked, and all starts
    over with the next; the origin is tried a second time, as a bit that flipped on the way does not do so twice. What
    an earlier process left is continued, and blamed on nobody.

    Args:
        info: the object.
        descriptor: the incoming file, open for reading and writing, locked by the caller.
        parts: which of its parts are there.
        sources: whom to ask, in this order; at least one.
        report: called with each piece that arrives, from any thread but by one at a time.
        is_named_by_content: whether its name is the digest of its bytes; otherwise these cannot be verified.

    Returns:
        How it came. The file then holds the object, not synced.

    Raises:
        CorruptDataError, NotFoundError, ConfigError, UnavailableError: no source could give it; the message says why
            for each. The kind is that of the origin's failure where it was asked. What has arrived stays in the file
            and in `parts`.
        OSError: the file cannot be written.
    """
    file = GrowingFile(info.size_bytes, descriptor, parts, report)
    return _Transfer(info, file, sources, is_named_by_content=is_named_by_content).run()


class _Transfer:
    """Which source is next, and what to think of those before."""

    def __init__(
        self, info: ObjectInfo, file: GrowingFile, sources: Sequence[ObjectSource], *, is_named_by_content: bool
    ) -> None:
        assert sources
        self._info = info
        self._waiting = deque(sources)
        self._file = file
        self._is_named_by_content = is_named_by_content
        self._failures: list[tuple[ObjectSource, DatasvcError]] = []
        self._num_corrupt = 0
        self._tried_again: set[ObjectSource] = set()

    def run(self) -> FetchReport:
        while not self._is_there():
            if not self._waiting:
                raise self._failure()
            source = self._waiting.popleft()
            try:
                self._file.take_from(source, self._info)
            except CorruptDataError as error:
                self._num_corrupt += 1
                self._give_up(source, error)
            except DatasvcError as error:
                self._failures.append((source, error))
        givers = self._file.givers
        kind = max(givers, key=givers.__getitem__).kind if givers else None
        return FetchReport(self._file.bytes_by_kind, self._num_corrupt, kind, self._file.digest())

    def _is_there(self) -> bool:
        """Return whether the file holds the object; if it holds something else it is emptied."""
        if not self._file.is_complete:
            return False
        found = self._file.digest()
        givers = self._file.givers
        if found == self._info.digest or not self._is_named_by_content:
            for source in givers:
                source.judge(intact=True)
            return True
        self._num_corrupt += 1
        if not self._info.size_bytes:
            raise CorruptDataError(
                f"object {self._info.digest[:12]}... cannot be empty: no bytes hash to {found[:12]}..."
            )
        if self._file.is_continued:
            # Whoever completed it need not have done the harm. Those who stopped half-way have had their turn.
            failed = {source for source, _ in self._failures}
            self._waiting.extendleft(source for source in reversed(givers) if source not in failed)
        else:
            for source in givers:
                source.judge(intact=False)
                self._give_up(source, CorruptDataError(f"{source.name} sent bytes that hash to {found[:12]}..."))
        self._file.start_over()
        return False

    def _give_up(self, source: ObjectSource, error: CorruptDataError) -> None:
        self._failures.append((source, error))
        if source.kind == "origin" and source not in self._tried_again:
            self._tried_again.add(source)
            self._waiting.append(source)

    def _failure(self) -> DatasvcError:
        of_origin = [error for source, error in self._failures if source.kind == "origin"]
        last = of_origin[-1] if of_origin else self._failures[-1][1]
        reasons = "; ".join(dict.fromkeys(str(error) for _, error in self._failures))
        return type(last)(
            f"cannot fetch object {self._info.digest[:12]}... of {self._info.size_bytes} bytes: {reasons}"
        )
