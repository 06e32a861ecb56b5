"""Is everything that model versions name there, and as it was written? If not, which tensors of which versions?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from datasvc.errors import CorruptDataError, DatasvcError, NotFoundError, UnavailableError
from datasvc.models.load import load_piece
from datasvc.models.records import Piece, TensorRecord
from datasvc.models.signing_keys import PublicKey
from datasvc.models.sources import find_damage
from datasvc.models.survey import Problem, Survey, kind_of
from datasvc.repository import Digest, Objects, Repository, Resolved

# Each holds a part of an object in memory, eight parts where the repository is remote.
_OBJECTS_AT_ONCE: Final = 4


@dataclass(frozen=True)
class ModelVerifyReport:
    """What `verify` found.

    Attributes:
        versions: that were looked at.
        num_objects: objects read, each once.
        size_bytes: of them.
        problems: none when all is well.
    """

    versions: tuple[str, ...]
    num_objects: int
    size_bytes: int
    problems: tuple[Problem, ...]


def verify(
    repository: Repository,
    versions: Iterable[Resolved],
    *,
    deep: bool = False,
    trusted: Sequence[PublicKey] = (),
    begin: Callable[[int], None] | None = None,
    report: Callable[[int], None] | None = None,
) -> ModelVerifyReport:
    """Read every byte that model versions name, each object once. All are looked at, whatever is found.

    Args:
        repository: where they are.
        versions: which; see `every_version`.
        deep: decode every tensor as well and compare it with its digest: finds what was written wrong, not only what
            changed since.
        trusted: keys by one of which every version must be signed, if there are any.
        begin: called once, with the bytes of all objects that hold tensors.
        report: called with the bytes of each part read of them, from several threads.

    Raises:
        ConfigError: something has a later format.
        UnavailableError: the store did not answer, which says nothing about the data.
    """
    survey, looked = Survey(repository, trusted), []
    for version in versions:
        survey.look_at(version)
        looked.append(str(version))
    if begin is not None:
        begin(sum(survey.objects.values()))
    bad = _find_bad_objects(repository.objects, survey.objects, report)
    problems = survey.problems
    if bad:
        problems += _describe(repository.objects, survey, bad)
    if deep:
        problems += _find_wrong_tensors(repository.objects, survey, bad)
    sizes = survey.objects | survey.documents
    return ModelVerifyReport(tuple(looked), len(sizes), sum(sizes.values()), tuple(problems))


def every_version(repository: Repository, names: Sequence[str] = ()) -> list[Resolved]:
    """Return all versions that were not removed, of some models or of all.

    Raises:
        ConfigError, NotFoundError: there is no model of such a name.
        CorruptDataError, UnavailableError: see `Repository.living`.
    """
    for name in names:
        repository.resolve("models", name, removed=True)
    return [
        Resolved("models", name, number)
        for name in names or repository.names("models")
        for number in repository.living("models", name)
    ]


def _find_bad_objects(
    objects: Objects, sizes: Mapping[Digest, int], report: Callable[[int], None] | None
) -> dict[Digest, DatasvcError]:
    """Read objects and return what is wrong with the bad ones."""

    def look(digest: Digest) -> DatasvcError | None:
        error = find_damage(objects, digest, sizes[digest], report)
        if isinstance(error, UnavailableError):
            raise error
        return error

    pool = ThreadPoolExecutor(_OBJECTS_AT_ONCE, thread_name_prefix="datasvc-verify")
    try:
        found = dict(zip(sizes, pool.map(look, sizes), strict=True))
    finally:
        # A store that does not answer ends this now, not after every other object was asked for.
        pool.shutdown(cancel_futures=True)
    return {digest: error for digest, error in found.items() if error is not None}


def _describe(objects: Objects, survey: Survey, bad: Mapping[Digest, DatasvcError]) -> Iterator[Problem]:
    """Yield a problem for each bad object with the tensors that cannot be restored: not all that share a pack."""
    hit: dict[Digest, dict[str, tuple[str, ...]]] = {digest: {} for digest in bad}
    verdicts: dict[Piece, bool] = {}
    for versions, record in survey.records():
        for digest in dict.fromkeys(_bad_links(objects, record, bad, verdicts)):
            for version in versions:
                hit[digest][version] = (*hit[digest].get(version, ()), record.name)
    for digest, error in bad.items():
        yield Problem(kind_of(error), "tensors", digest, str(error), hit[digest])


def _bad_links(
    objects: Objects, record: TensorRecord, bad: Mapping[Digest, DatasvcError], verdicts: dict[Piece, bool]
) -> Iterator[Digest]:
    for piece in record.pieces:
        suspects = [link.object for link in piece.chain if link.object in bad]
        if suspects and not _loads(objects, record, piece, verdicts):
            yield from suspects


def _find_wrong_tensors(objects: Objects, survey: Survey, bad: Mapping[Digest, DatasvcError]) -> Iterator[Problem]:
    """Yield a problem for each tensor that is not what its digest says though all its objects are good."""
    verdicts: dict[Piece, bool] = {}
    for versions, record in survey.records():
        for piece in record.pieces:
            is_good = all(link.object not in bad for link in piece.chain)
            if is_good and not _loads(objects, record, piece, verdicts):
                detail = f"{record.name!r} at {piece.start}: what is stored for it decodes to something else"
                hit = dict.fromkeys(versions, (record.name,))
                yield Problem("contradictory", "tensors", piece.chain[-1].object, detail, hit)


def _loads(objects: Objects, record: TensorRecord, piece: Piece, verdicts: dict[Piece, bool]) -> bool:
    """Return whether a piece can be restored; versions that share it are told from memory."""
    if piece not in verdicts:
        try:
            load_piece(objects, record.dtype, piece, name=record.name)
        except (CorruptDataError, NotFoundError):
            verdicts[piece] = False
        else:
            verdicts[piece] = True
    return verdicts[piece]
