"""Is everything that model versions name there, and as it was written? If not, which tensors of which versions?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import not_
from typing import Final

from datasvc.errors import DatasvcError, NotFoundError
from datasvc.models.registry.survey import ModelProblem, Survey, kind_of
from datasvc.models.restoring.failover_source import find_damage
from datasvc.models.tensors.codec import Decoders
from datasvc.models.tensors.read import load_chunk
from datasvc.models.tensors.tensor_table import Chunk, TensorRecord
from datasvc.models.tensors.threads import run_in_threads
from datasvc.models.versions.signing_keys import PublicKey
from datasvc.repository import Digest, Objects, Repository, Resolved

# Each holds a part of an object in memory, eight parts where the repository is remote.
_OBJECTS_AT_ONCE: Final = 4
_CHUNKS_AT_ONCE: Final = 8


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
    problems: tuple[ModelProblem, ...]


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
        begin: called once, with the bytes of all objects that hold tensors; `deep` with those of all tensors more.
        report: called with the bytes of each part read of them, or decoded, from several threads.

    Versions that are removed meanwhile are no problem, though some of their objects be gone.

    Raises:
        ConfigError: something has a later format.
        UnavailableError: a remote store did not answer, which says nothing about the data.
    """
    survey, looked = Survey(repository, trusted), []
    for version in versions:
        survey.look_at(version)
        looked.append(str(version))
    if begin is not None:
        begin(sum(survey.objects.values()) + (survey.tensor_bytes if deep else 0))
    bad = _find_bad_objects(repository.objects, survey, report)
    of_tensors: list[ModelProblem] = []
    if bad:
        of_tensors += _describe(repository.objects, survey, bad)
    if deep:
        of_tensors += _find_wrong_tensors(repository.objects, survey, bad, report)
    problems = _of_living(repository, [*survey.problems, *of_tensors])
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


def _of_living(repository: Repository, problems: Sequence[ModelProblem]) -> Iterator[ModelProblem]:
    """Yield problems but for those of versions that were removed since: `gc` may have taken their objects."""
    names = {version.rpartition("@")[0] for problem in problems for version in problem.hit}
    living = {f"{name}@{number}" for name in names for number in repository.living("models", name)}
    for problem in problems:
        hit = {version: tensors for version, tensors in problem.hit.items() if version in living}
        if hit or not problem.hit:
            yield replace(problem, hit=hit)


def _find_bad_objects(
    objects: Objects, survey: Survey, report: Callable[[int], None] | None
) -> dict[Digest, DatasvcError]:
    """Read objects and return what is wrong with the bad ones."""

    def look(digest: Digest) -> DatasvcError | None:
        error = find_damage(objects, digest, survey.objects[digest], report)
        # A store that does not answer ends this now, not after every other object was asked for.
        if error is not None and type(error) not in survey.bad:
            raise error
        return error

    found = run_in_threads(look, [(digest,) for digest in survey.objects], _OBJECTS_AT_ONCE)
    return {digest: error for digest, error in zip(survey.objects, found, strict=True) if error is not None}


def _describe(objects: Objects, survey: Survey, bad: Mapping[Digest, DatasvcError]) -> Iterator[ModelProblem]:
    """Yield a problem for each bad object with the tensors that cannot be restored: not all that share a pack."""
    hit: dict[Digest, dict[str, tuple[str, ...]]] = {digest: {} for digest in bad}
    named: set[Digest] = set()
    for versions, places in _unloadable(objects, survey, bool, bad):
        for record, chunk, is_bad in places:
            suspects = bad.keys() & {link.object for link in chunk.chain}
            named |= suspects
            for digest in suspects if is_bad else ():
                for version in versions:
                    names = hit[digest].get(version, ())
                    hit[digest][version] = names if record.name in names else (*names, record.name)
    for digest, error in bad.items():
        # One that no table names any more went with a version that was removed meanwhile.
        if digest in named or not isinstance(error, NotFoundError):
            yield ModelProblem(kind_of(error), "tensors", digest, str(error), hit[digest])


def _find_wrong_tensors(
    objects: Objects, survey: Survey, bad: Mapping[Digest, DatasvcError], report: Callable[[int], None] | None
) -> Iterator[ModelProblem]:
    """Yield a problem for each tensor that is not what its digest says though all its objects are good."""
    for versions, places in _unloadable(objects, survey, not_, bad, report):
        for record, chunk, is_bad in places:
            if is_bad:
                detail = f"{record.name!r} at {chunk.start}: what is stored for it decodes to something else"
                hit = dict.fromkeys(versions, (record.name,))
                yield ModelProblem("contradictory", "tensors", chunk.chain[-1].object, detail, hit)


def _unloadable(
    objects: Objects,
    survey: Survey,
    choose: Callable[[Collection[Digest]], bool],
    bad: Mapping[Digest, DatasvcError],
    report: Callable[[int], None] | None = None,
) -> Iterator[tuple[Sequence[str], list[tuple[TensorRecord, Chunk, bool]]]]:
    """Yield for each table its versions, and the chosen chunks with whether they can not be restored.

    Args:
        objects: of the repository.
        survey: knows the tables.
        choose: of the objects of a chunk that are bad, whether to try it.
        bad: objects.
        report: called with the bytes of every chunk, tried or not.
    """
    verdicts: dict[Chunk, bool] = {}  # versions share most chunks
    decoders = Decoders()

    def is_bad(record: TensorRecord, chunk: Chunk) -> bool:
        try:
            if chunk not in verdicts and choose({link.object for link in chunk.chain if link.object in bad}):
                load_chunk(objects, record.dtype, chunk, name=record.name, decoders=decoders)
        except survey.bad:
            return True
        finally:
            if report is not None:
                report(record.chunk_bytes(chunk))
        return verdicts.get(chunk, False)

    for versions, records in survey.tables():
        places = [(record, chunk) for record in records for chunk in record.chunks]
        found = run_in_threads(is_bad, places, _CHUNKS_AT_ONCE)
        verdicts.update((chunk, verdict) for (_, chunk), verdict in zip(places, found, strict=True))
        yield versions, [(record, chunk, verdict) for (record, chunk), verdict in zip(places, found, strict=True)]
