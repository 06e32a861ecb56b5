"""Several copies of stored bytes, asked in turn: one that is missing, damaged or silent costs a look at the next.

What is read here is checked by whoever decodes it, against the digest of the piece. Only when that fails are whole
objects hashed, place by place, so that a bad copy is known for certain, reported with the tensors that it would have
spoilt, and left alone from then on.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from datasvc.errors import ConfigError, CorruptDataError, DatasvcError, NotFoundError, UnavailableError
from datasvc.models.restoring.report import BadCopies
from datasvc.repository import Digest, Objects
from datasvc.repository.objects.objects import digest_of

_Answer = TypeVar("_Answer")

# A place that refuses - by permissions, credentials - is no reason to leave the next one alone.
_BAD = (NotFoundError, CorruptDataError, UnavailableError, ConfigError)


class FailoverSource:
    """The objects of several repositories as one `ObjectSource`: the first that has a good copy gives it.

    Args:
        places: the nearest first; at least one.
        bad: learns what was found bad.
    """

    def __init__(self, places: Sequence[Objects], bad: BadCopies | None = None) -> None:
        assert places
        self.bad = bad or BadCopies()
        self._places = tuple(places)
        self._bad_places: dict[tuple[int, Digest], DatasvcError] = {}

    def location(self, digest: Digest) -> str:
        """Return all places where the object may lie, for messages."""
        return " and ".join(place.location(digest) for place in self._places)

    def read(self, digest: Digest, most_bytes: int | None = None) -> bytes:
        """Return a whole object, verified; `most_bytes` as of `Objects.read`.

        Raises:
            CorruptDataError, NotFoundError, UnavailableError, ConfigError: no place gave it; says what each did.
        """
        return self._first(digest, lambda place: place.read(digest, most_bytes))

    def read_range(self, digest: Digest, offset: int, length: int) -> bytes:
        """See `ObjectSource`: unverified, from the first place that gives it and is not known to be bad."""
        return self._first(digest, lambda place: place.read_range(digest, offset, length))

    @property
    def is_near(self) -> bool:
        """See `NearSource`: whether the first place is on this machine."""
        return self._places[0].is_near

    def read_into(self, digest: Digest, offset: int, out: memoryview) -> None:
        """See `NearSource`."""
        self._first(digest, lambda place: place.read_into(digest, offset, out))

    def copies(self, digest: Digest, offset: int, length: int) -> Iterator[bytes | memoryview]:
        """Yield the range of every copy whose whole object has the right digest, in turn; the others are noted."""
        failed: list[tuple[int, bytes]] = []
        for number, place in enumerate(self._places):
            if (number, digest) in self._bad_places:
                continue
            try:
                content = _read_whole(place, digest)
            except _BAD as error:
                self._condemn(number, digest, error)
                continue
            if digest_of(content) != digest:
                failed.append((number, content))
                continue
            self._condemn_all(digest, failed, content)
            yield memoryview(content)[offset : offset + length]
        self._condemn_all(digest, failed, None)

    def _condemn_all(self, digest: Digest, failed: list[tuple[int, bytes]], intact: bytes | None) -> None:
        while failed:
            number, content = failed.pop()
            error = CorruptDataError(
                f"{self._places[number].location(digest)} is corrupt: it does not hash to its name"
            )
            self._condemn(number, digest, error, content=content, intact=intact)

    def _condemn(
        self,
        number: int,
        digest: Digest,
        error: DatasvcError,
        *,
        content: bytes | None = None,
        intact: bytes | None = None,
    ) -> None:
        """Leave a copy alone from now on."""
        self._bad_places[number, digest] = error
        self.bad.add(digest, self._places[number].location(digest), str(error), content=content, intact=intact)

    def _first(self, digest: Digest, read: Callable[[Objects], _Answer]) -> _Answer:
        errors: list[DatasvcError] = []
        for number, place in enumerate(self._places):
            known = self._bad_places.get((number, digest))
            if known is None:
                try:
                    return read(place)
                except _BAD as error:
                    known = error
                    self._condemn(number, digest, error)
            errors.append(known)
        raise join_errors(errors)


class _Nowhere(io.BytesIO):
    """A file that keeps nothing."""

    def write(self, content: Any, /) -> int:
        """Take `content` in, and forget it."""
        return memoryview(content).nbytes


def find_damage(
    objects: Objects, digest: Digest, size_bytes: int | None = None, report: Callable[[int], None] | None = None
) -> DatasvcError | None:
    """Read all bytes of an object, with little memory however large it is, and return what is wrong with it.

    Args:
        objects: of a repository.
        digest: the object.
        size_bytes: what a table says of it, where one does.
        report: called with the bytes of each part as it is hashed.

    Returns:
        NotFoundError: it is not there. CorruptDataError: its bytes are not what its name says. UnavailableError: it
        cannot be read now. ConfigError: it may not be read. None: it is as it was written.
    """
    found: DatasvcError | None = None
    for _ in range(_tries(objects, digest)):
        try:
            stored_bytes = _size(objects, digest)
            objects.fetch(digest, stored_bytes, _Nowhere(), report=report)
        except CorruptDataError as error:
            found = error
        except (NotFoundError, UnavailableError, ConfigError) as error:
            return error
        else:
            if size_bytes in {None, stored_bytes}:
                return None
            location = objects.location(digest)
            return CorruptDataError(f"{location} has {stored_bytes} bytes, and a table says {size_bytes}")
    return found


def join_errors(errors: Sequence[DatasvcError]) -> DatasvcError:
    """Return one error for places that failed: damage counts most, then what may pass, a refusal, what is missing."""
    kinds = (CorruptDataError, UnavailableError, ConfigError)
    first = next((error for kind in kinds for error in errors if type(error) is kind), None)
    kind = type(first or errors[0])
    return kind("; ".join(dict.fromkeys(str(error) for error in errors)))


def _read_whole(place: Objects, digest: Digest) -> bytes:
    """Return the bytes of an object as they are: read twice where they are wrong and may be so by the way alone."""
    for _ in range(_tries(place, digest)):
        content = place.read_range(digest, 0, _size(place, digest))
        if digest_of(content) == digest:
            break
    return content


def _size(place: Objects, digest: Digest) -> int:
    size_bytes = place.size(digest)
    if size_bytes is None:
        raise NotFoundError(f"object {place.location(digest)} is missing")
    return size_bytes


def _tries(place: Objects, digest: Digest) -> int:
    """Return how often to read: a bit that flipped on the way does not do so twice, one on a disk does."""
    return 1 if place.local_path(digest) is not None else 2
