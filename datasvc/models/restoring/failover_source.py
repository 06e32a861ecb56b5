"""Failover between copies, for restores: each object is read from the first repository that has a good copy.

Each of the repositories is called a place here. `read_range` does not verify: the caller checks each chunk against
its digest. If this check fails, the caller uses `copies`, which hashes the whole object, in one place after another.
A copy that is missing, unreadable or corrupt is marked as bad: it is reported with the affected tensors, and is not
read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from datasvc.errors import ConfigError, CorruptDataError, DatasvcError, NotFoundError, UnavailableError
from datasvc.models.restoring.report import BadCopies
from datasvc.repository import Digest, Objects
from datasvc.repository.objects.objects import digest_of
from datasvc.repository.objects.presence import count_reads, stored_size

_Answer = TypeVar("_Answer")

# After these errors the next place is tried. A place that denies access raises ConfigError.
_PLACE_ERRORS = (NotFoundError, CorruptDataError, UnavailableError, ConfigError)


class FailoverSource:
    """The objects of several repositories as one `ChunkSource`; the first place with a good copy provides each.

    Args:
        places: objects of the repositories, nearest first; at least one.

    Attributes:
        bad: the bad copies, for the report of the restore.
        is_near: whether the first place is on this machine, see `NearSource`.
    """

    def __init__(self, places: Sequence[Objects]) -> None:
        assert places
        self.bad = BadCopies()
        self._places = tuple(places)
        self.is_near = places[0].is_near
        # Bad copies, which are not read again: the error by number of the place and digest.
        self._bad_places: dict[tuple[int, Digest], DatasvcError] = {}

    def location(self, digest: Digest) -> str:
        """Return all places where the object may be, for messages."""
        return " and ".join(place.location(digest) for place in self._places)

    def read(self, digest: Digest, max_bytes: int | None = None) -> bytes:
        """Return a whole object, verified; for `max_bytes` see `Objects.read`.

        Raises:
            CorruptDataError, NotFoundError, UnavailableError, ConfigError: no place provides the object; the message
                has the error of each.
        """
        return self._read_first(digest, lambda place: place.read(digest, max_bytes))

    def read_range(self, digest: Digest, offset: int, length: int) -> bytes:
        """See `ChunkSource`: unverified, from the first place that provides it and is not marked as bad."""
        return self._read_first(digest, lambda place: place.read_range(digest, offset, length))

    def read_into(self, digest: Digest, offset: int, out: memoryview) -> None:
        """See `NearSource`."""
        self._read_first(digest, lambda place: place.read_into(digest, offset, out))

    def copies(self, digest: Digest, offset: int, length: int) -> Iterator[bytes | memoryview]:
        """Yield the range from every copy whose whole object matches the digest; other copies are marked as bad."""
        corrupt: list[tuple[int, bytes]] = []  # number of the place, and content of its copy
        for number, place in enumerate(self._places):
            if (number, digest) in self._bad_places:
                continue
            try:
                content = _read_whole(place, digest)
            except _PLACE_ERRORS as error:
                self._mark_bad(number, digest, error)
                continue
            if digest_of(content) != digest:
                corrupt.append((number, content))
                continue
            self._mark_corrupt(digest, corrupt, content)
            yield memoryview(content)[offset : offset + length]
        # No good copy follows these corrupt ones, so it is unknown which of their bytes are wrong.
        self._mark_corrupt(digest, corrupt, None)

    def _mark_corrupt(self, digest: Digest, corrupt: list[tuple[int, bytes]], intact: bytes | None) -> None:
        """Mark corrupt copies as bad, and empty the list; `intact` is the content of a good copy, None if unknown."""
        # `copies` looks for a good copy before it calls this: a comparison with a good copy finds the wrong bytes.
        while corrupt:
            number, content = corrupt.pop()
            error = CorruptDataError(
                f"{self._places[number].location(digest)} is corrupt: it does not match its digest"
            )
            self._mark_bad(number, digest, error, content=content, intact=intact)

    def _mark_bad(
        self,
        number: int,
        digest: Digest,
        error: DatasvcError,
        *,
        content: bytes | None = None,
        intact: bytes | None = None,
    ) -> None:
        """Record a bad copy; it is not read again. For `content` and `intact` see `BadCopies.add`."""
        self._bad_places[number, digest] = error
        self.bad.add(digest, self._places[number].location(digest), str(error), content=content, intact=intact)

    def _read_first(self, digest: Digest, read: Callable[[Objects], _Answer]) -> _Answer:
        """Return the result of `read` at the first place where it succeeds; at failed places mark the copy as bad."""
        errors: list[DatasvcError] = []
        for number, place in enumerate(self._places):
            failure = self._bad_places.get((number, digest))
            if failure is None:
                try:
                    return read(place)
                except _PLACE_ERRORS as error:
                    failure = error
                    self._mark_bad(number, digest, error)
            errors.append(failure)
        raise join_errors(errors)


def join_errors(errors: Sequence[DatasvcError]) -> DatasvcError:
    """Return one error for the errors of several places, with all their messages.

    Its type is the first of CorruptDataError, UnavailableError and ConfigError that is among the errors. If none of
    them is, it is the type of the first error.
    """
    kinds = (CorruptDataError, UnavailableError, ConfigError)
    first = next((error for kind in kinds for error in errors if type(error) is kind), None)
    kind = type(first or errors[0])
    return kind("; ".join(dict.fromkeys(str(error) for error in errors)))


def _read_whole(place: Objects, digest: Digest) -> bytes:
    """Return the bytes of an object, even if they are wrong; read twice if the transfer may have damaged them."""
    for _ in range(count_reads(place, digest)):
        content = place.read_range(digest, 0, stored_size(place, digest))
        if digest_of(content) == digest:
            break
    return content
