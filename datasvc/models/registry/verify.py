"""Verify model versions: read every object once, and list the tensors that cannot be restored; repair bad objects.

`Survey` checks the metadata. Then each object that holds tensors is read and compared with its digest. The tensor
tables are read again only if an object is bad, to name its tensors, or with `deep`, to decode every tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import not_
from pathlib import Path
from typing import Final

from datasvc.errors import DatasvcError, NotFoundError
from datasvc.models.registry.survey import ModelProblem, Survey, kind_of
from datasvc.models.tensors.codec import Decoders
from datasvc.models.tensors.read import load_chunk
from datasvc.models.tensors.tensor_table import Chunk, TensorRecord
from datasvc.models.versions.signing import trusted_keys as load_keys
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest, Objects, Repository, Resolved
from datasvc.repository.logs.references import refuse_text
from datasvc.repository.objects.presence import find_damage
from datasvc.repository.repair import Repair, repair_objects
from datasvc.threads import run_in_threads

# Each read holds one part of an object in memory, or eight parts if the repository is remote.
_OBJECTS_AT_ONCE: Final = 4
_CHUNKS_AT_ONCE: Final = 8
# Not "contradictory": such an object matches its digest, so a copy has the same bytes. "not trusted" is for entries.
_REPAIRABLE: Final = ("missing", "changed", "unreadable")


@dataclass(frozen=True)
class ModelVerifyReport:
    """Result of `verify`: versions that were checked, the distinct objects that were read, and all problems found."""

    versions: tuple[str, ...]
    num_objects: int
    size_bytes: int
    problems: tuple[ModelProblem, ...]


def verify(
    repository: Repository,
    versions: str | Iterable[str | Resolved],
    *,
    deep: bool = False,
    trusted_keys: Sequence[str | Path] | None = None,
    progress: Progress = NO_PROGRESS,
) -> ModelVerifyReport:
    """Read every object of some model versions once and compare it with its digest.

    A problem does not end the check: all versions are checked. A version that is removed during the check is left out
    of the problems, because `gc` may delete its objects.

    Args:
        repository: repository of the versions.
        versions: reference of the version to check, or several, or the result of `every_version`.
        deep: also decode each tensor and compare it with its digest. This finds tensors that were stored wrongly.
        trusted_keys: files of public keys, see `restore`. If there are any, one must have signed each version.
        progress: counts the bytes that were read from objects and, with `deep`, decoded to tensors.

    Raises:
        ConfigError, NotFoundError: a reference does not resolve, a key cannot be read, or an object has a format that
            this version of datasvc does not support.
        UnavailableError: a remote store does not answer; the state of the data is unknown.
    """
    survey, resolved = Survey(repository, load_keys(trusted_keys)), resolve_versions(repository, versions)
    for version in resolved:
        survey.scan(version)
    all_bytes = sum(survey.objects.values()) + sum(survey.files.values())
    progress.begin(all_bytes + (survey.tensor_bytes if deep else 0))
    bad = _find_bad_objects(repository.objects, survey, survey.objects, progress)
    bad_files = _find_bad_objects(repository.objects, survey, survey.files, progress)
    tensor_problems = [
        ModelProblem(kind_of(error), "artefact", digest, str(error), survey.artefacts[digest])
        for digest, error in bad_files.items()
    ]
    if bad:
        tensor_problems += _name_damaged(repository.objects, survey, bad)
    if deep:
        tensor_problems += _find_wrong_tensors(repository.objects, survey, bad, progress)
    # Filter at the end, because a version can be removed at any time during the check; `gc` may delete its objects.
    problems = _of_living(repository, [*survey.problems, *tensor_problems])
    sizes = survey.objects | survey.documents | survey.files
    return ModelVerifyReport(tuple(map(str, resolved)), len(sizes), sum(sizes.values()), tuple(problems))


def resolve_versions(repository: Repository, refs: str | Iterable[str | Resolved]) -> list[Resolved]:
    """Return the distinct versions that one or several references name; for errors, see `Repository.resolve`."""
    all_refs = [refs] if isinstance(refs, str) else refs
    resolved = (ref if isinstance(ref, Resolved) else repository.resolve("models", ref) for ref in all_refs)
    return list(dict.fromkeys(resolved))


def every_version(repository: Repository, names: Sequence[str] = ()) -> list[Resolved]:
    """Return all versions of the models `names`, or of all models, without the removed ones.

    Raises:
        ConfigError, NotFoundError: a name is not valid, or there is no model of this name.
        CorruptDataError, UnavailableError: see `Repository.living`.
    """
    refuse_text(names, "names", "names")
    for name in names:
        repository.resolve("models", name, removed=True)
    return [
        Resolved("models", name, number)
        for name in names or repository.names("models")
        for number in repository.living("models", name)
    ]


def lost_versions(repository: Repository, names: Sequence[str] = ()) -> list[Resolved]:
    """Return the versions of the models `names`, or of all models, that were marked as lost; see `mark_lost`.

    They are removed, so `every_version` does not contain them. Errors are those of `every_version`.
    """
    refuse_text(names, "names", "names")
    return [
        Resolved("models", name, number)
        for name in names or repository.names("models")
        for number in sorted(repository.removals("models", name).lost())
    ]


def _of_living(repository: Repository, problems: Sequence[ModelProblem]) -> Iterator[ModelProblem]:
    """Yield the problems without removed versions; a problem that affects only removed versions is left out."""
    names = {version.rpartition("@")[0] for problem in problems for version in problem.hit}
    living = {f"{name}@{number}" for name in names for number in repository.living("models", name)}
    for problem in problems:
        hit = {version: tensors for version, tensors in problem.hit.items() if version in living}
        if hit or not problem.hit:
            yield replace(problem, hit=hit)


def _find_bad_objects(
    objects: Objects, survey: Survey, sizes: Mapping[Digest, int], progress: Progress
) -> dict[Digest, DatasvcError]:
    """Read all objects in `sizes`, which has their sizes in bytes; return the error of each bad one."""

    def check(digest: Digest) -> DatasvcError | None:
        error = find_damage(objects, digest, sizes[digest], progress)
        # Stop at once if the store does not answer: each further request would wait for its time-out too.
        if error is not None and type(error) not in survey.bad:
            raise error
        return error

    errors = run_in_threads(check, [(digest,) for digest in sizes], _OBJECTS_AT_ONCE)
    return {digest: error for digest, error in zip(sizes, errors, strict=True) if error is not None}


def _name_damaged(objects: Objects, survey: Survey, bad: Mapping[Digest, DatasvcError]) -> Iterator[ModelProblem]:
    """Yield a problem for each bad object, with the tensors that cannot be restored."""
    hit: dict[Digest, dict[str, tuple[str, ...]]] = {digest: {} for digest in bad}
    referenced: set[Digest] = set()
    # `bool` selects the chunks that have a bad object. Each of them is loaded, because several tensors may share an
    # object, and a tensor whose own bytes are intact must not be listed.
    for versions, loads in _try_to_load(objects, survey, bool, bad):
        for record, chunk, is_bad in loads:
            suspects = bad.keys() & {link.object for link in chunk.chain}
            referenced |= suspects
            for digest in suspects if is_bad else ():
                for version in versions:
                    names = hit[digest].get(version, ())
                    hit[digest][version] = names if record.name in names else (*names, record.name)
    for digest, error in bad.items():
        # If no table references a missing object any more, its version was removed during the check.
        if digest in referenced or not isinstance(error, NotFoundError):
            yield ModelProblem(kind_of(error), "tensors", digest, str(error), hit[digest])


def _find_wrong_tensors(
    objects: Objects, survey: Survey, bad: Mapping[Digest, DatasvcError], progress: Progress
) -> Iterator[ModelProblem]:
    """Yield a problem for each tensor that does not match its digest although all its objects are intact."""
    # `not_` selects the chunks whose objects are all good; `_name_damaged` has reported the others.
    for versions, loads in _try_to_load(objects, survey, not_, bad, progress):
        for record, chunk, is_bad in loads:
            if is_bad:
                detail = f"{record.name!r} at {chunk.start}: the stored bytes decode to a tensor with another digest"
                hit = dict.fromkeys(versions, (record.name,))
                yield ModelProblem("contradictory", "tensors", chunk.chain[-1].object, detail, hit)


def _try_to_load(
    objects: Objects,
    survey: Survey,
    choose: Callable[[Collection[Digest]], bool],
    bad: Mapping[Digest, DatasvcError],
    progress: Progress = NO_PROGRESS,
) -> Iterator[tuple[Sequence[str], list[tuple[TensorRecord, Chunk, bool]]]]:
    """Try to load chunks; yield for each table its versions, and for each of its chunks whether it is bad.

    `choose` gets the bad objects of a chunk and returns whether to load it. Chunks that are not loaded count as good.
    """
    verdicts: dict[Chunk, bool] = {}  # versions share most chunks: load each once
    decoders = Decoders()

    def is_bad(record: TensorRecord, chunk: Chunk) -> bool:
        try:
            if chunk not in verdicts and choose({link.object for link in chunk.chain if link.object in bad}):
                load_chunk(objects, record.dtype, chunk, name=record.name, decoders=decoders)
        except survey.bad:
            return True
        finally:
            progress.advance(record.chunk_bytes(chunk))
        # Loaded without an error or not loaded: use the verdict of an earlier load, or else count the chunk as good.
        return verdicts.get(chunk, False)

    for versions, records in survey.tables():
        pairs = [(record, chunk) for record in records for chunk in record.chunks]
        results = run_in_threads(is_bad, pairs, _CHUNKS_AT_ONCE)
        loads = [(record, chunk, verdict) for (record, chunk), verdict in zip(pairs, results, strict=True)]
        verdicts.update((chunk, verdict) for _, chunk, verdict in loads)
        yield versions, loads


@dataclass(frozen=True)
class RepairReport:
    """Result of `verify_and_repair`.

    Attributes:
        verified: report of the first pass, to which the problems of later passes were added.
        repairs: result for each object whose repair was tried.
        remaining: problems that could not be repaired.
    """

    verified: ModelVerifyReport
    repairs: tuple[Repair, ...]
    remaining: tuple[ModelProblem, ...]


def repair(
    repository: Repository,
    problems: Iterable[ModelProblem],
    copies: Sequence[Repository],
    progress: Progress = NO_PROGRESS,
) -> list[Repair]:
    """Replace missing, changed and unreadable objects by good copies. A failed repair does not stop the others.

    Args:
        repository: repository with the problems.
        problems: problems that `verify` returned for it.
        copies: other repositories, in the order in which they are tried.
        progress: counts the bytes of each part that was copied.

    Returns:
        One result per object.

    Raises:
        ConfigError: this repository is not writable.
    """
    digests = (problem.digest for problem in problems if problem.kind in _REPAIRABLE)
    return repair_objects(repository, (digest for digest in digests if digest is not None), copies, progress)


def verify_and_repair(
    repository: Repository,
    versions: str | Iterable[str | Resolved],
    copies: Sequence[Repository | str],
    *,
    deep: bool = False,
    trusted_keys: Sequence[str | Path] | None = None,
    progress: Progress = NO_PROGRESS,
) -> RepairReport:
    """Verify versions and repair bad objects, in passes, until a pass finds no further problem.

    Several passes are needed, because the objects of a bad tensor table are unknown until the table is repaired.

    Arguments and errors are those of `verify` and `repair`. `copies` are other repositories or their URLs; without
    any, nothing is repaired. `progress` begins once per pass.
    """
    refuse_text(copies, "copies", "repositories")
    by_name = {str(version): version for version in resolve_versions(repository, versions)}
    opened = [copy if isinstance(copy, Repository) else Repository.open(copy) for copy in copies]
    first_pass = verify(repository, by_name.values(), deep=deep, trusted_keys=trusted_keys, progress=progress)
    problems, remaining = list(first_pass.problems), list(first_pass.problems)
    repairs: dict[Digest, Repair] = {}  # by object
    while opened:
        # Try each object once: the same copies would fail again.
        untried = [problem for problem in remaining if problem.digest not in repairs]
        tried = repair(repository, untried, opened, progress)
        repairs.update((result.digest, result) for result in tried)
        good = {result.digest for result in tried if result.failure is None}
        repaired = [problem for problem in remaining if problem.digest in good and problem.kind in _REPAIRABLE]
        remaining = [problem for problem in remaining if problem not in repaired]
        # A bad object can hide problems of its versions. An object of tensors can do so only with `deep`, because
        # only then its tensors are decoded. Verify the versions (`hit`) of the repaired objects again.
        hit = {version for problem in repaired if deep or problem.role != "tensors" for version in problem.hit}
        if not hit:
            break
        again = [version for name, version in by_name.items() if name in hit]
        found = verify(repository, again, deep=deep, trusted_keys=trusted_keys, progress=progress).problems
        known = set(map(_identity, remaining))
        new = [problem for problem in found if _identity(problem) not in known]
        remaining += new
        problems += new
    return RepairReport(replace(first_pass, problems=tuple(problems)), tuple(repairs.values()), tuple(remaining))


def _identity(problem: ModelProblem) -> tuple[object, ...]:
    # Without `hit`: a later pass verifies fewer versions, so it lists fewer of them for the same problem.
    return problem.role, problem.kind, problem.digest, problem.detail
