"""Copies model versions, optionally with their ancestors and data, to another repository: `models push` and `pull`.

Each version becomes visible there atomically. A version keeps the id of the commit that first created it. Therefore
the target has it only once, even if it is copied twice, by any route. An interrupted transfer can be repeated: it
copies only the objects and versions that are missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from datasvc.errors import ConfigError, NotFoundError
from datasvc.models.transfer.copying import copy_missing
from datasvc.models.transfer.entries import TargetLogs
from datasvc.models.transfer.intent_journal import declare_intent
from datasvc.models.transfer.reachable import reachable_objects
from datasvc.models.transfer.topological_order import read_parents, sort_topologically
from datasvc.models.versions.signing import check_signed
from datasvc.models.versions.signing_keys import trusted_keys as load_trusted_keys
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Entry, Kind, ObjectInfo, Repository, Resolved
from datasvc.repository.logs.references import check_name, refuse_text
from datasvc.repository.objects.presence import check_present
from datasvc.repository.store.redaction import redact_url
from datasvc.shards.versions.dataset import find_renamed


@dataclass(frozen=True)
class Transferred:
    """A version of the source and its copy at the target; `is_new`: whether this transfer created the copy."""

    source: Resolved
    target: Resolved
    is_new: bool


@dataclass(frozen=True)
class TransferReport:
    """Result of a transfer.

    Attributes:
        versions: all versions in commit order: data sets first, parents before their children.
        num_objects: number of objects that were missing at the target.
        bytes: size of these objects.
    """

    versions: tuple[Transferred, ...]
    num_objects: int
    bytes: int


def transfer(
    source: Repository | str,
    target: Repository | str,
    refs: Sequence[str],
    *,
    name: str | None = None,
    with_parents: bool = False,
    with_data: bool = False,
    data_names: Mapping[str, str] | None = None,
    trusted_keys: Sequence[str | Path] | None = None,
    progress: Progress = NO_PROGRESS,
) -> TransferReport:
    """Copy model versions to another repository.

    The entry at the target gets a field `origin`: the repository where the version was first committed, and its name,
    commit and parents there. In the fields `parent`, `merged` and `data`, references to versions of the source are
    replaced by references to their copies at the target. A parent without a copy is left out, and a data set without
    a copy keeps its name at the source.

    Args:
        source: repository to copy from, or its URL.
        target: repository to copy to, or its URL.
        refs: versions to copy: NAME, NAME@VERSION or NAME@TAG.
        name: name of the model at the target, by default the same; if it is given, all `refs` must be of one model.
        with_parents: whether to copy also all ancestors that are in the source.
        with_data: whether to copy also the data-set versions that the models consumed, with all shards. A data set
            that was renamed since is copied with its present name.
        data_names: names of data sets at the target, by name at the source; by default the same.
        trusted_keys: public keys, see `stored_version.read_version`. Each model version must be signed at the source
            by one of them, otherwise nothing is copied. The entry at the target differs, so it is not signed.
        progress: counts the bytes of each object once the target has it, copied or not.

    Returns:
        The versions at the target, and the amount of data copied. Existing versions are not changed.

    Raises:
        NotFoundError: a version or one of its objects does not exist, or an object disappeared at the target.
        CorruptDataError: an entry, table or object is damaged at the source; its version is not committed.
        ConfigError: source and target are the same repository; a name is not valid; or the target has an unrelated
            data set of the same name (give the copy another name in `data_names`).
        ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`. Versions that were committed before
            stay; repeat the call to continue.
    """
    refuse_text(refs, "refs")
    source = source if isinstance(source, Repository) else Repository.open(source)
    target = target if isinstance(target, Repository) else Repository.open(target)
    if source.url == target.url:
        raise ConfigError(f"{redact_url(source.url)} is both source and target; give two different repositories")
    requested = [source.resolve("models", ref) for ref in refs]
    renamed: dict[str, str] = {old: check_name(new, "data set") for old, new in (data_names or {}).items()}
    names: dict[tuple[Kind, str], str] = {("datasets", old): new for old, new in renamed.items()}
    logs = TargetLogs(source, target, {**names, **_new_names(requested, name)})
    versions = sort_topologically(read_parents(source, requested, logs.content, with_ancestors=with_parents))
    _check_trust(logs, versions, trusted_keys)
    if with_data:
        data = _data_versions(logs, versions)
        _check_data_names(data, renamed)
        versions = [*data, *versions]
    existing = {version: logs.find(version) for version in versions}
    objects = {
        version: reachable_objects(source, version, logs.content(version))
        for version in versions
        if not existing[version]
    }
    # Check for unrelated data sets before the first byte is copied; `commit` checks again.
    for version in objects:
        logs.check_related(version)
    distinct_objects = {info for infos in objects.values() for info in infos}
    progress.begin(sum(info.size_bytes for info in distinct_objects))
    done: list[Transferred] = []
    copied, seen = list[ObjectInfo](), set[ObjectInfo]()
    with declare_intent(target, objects) as renew:
        for version in versions:
            committed, is_new = existing[version], False
            if committed is None:
                # Versions share objects: copy each only once.
                new = [info for info in objects[version] if info not in seen]
                copied += copy_missing(
                    source.objects, target.objects, new, progress, reachable=logs.reachable, renew=renew
                )
                seen.update(new)
                # An object may have been deleted at the target since it was copied.
                check_present(target.objects, (info.digest for info in objects[version]), str(version))
                # Commit point of this version: only now does the target have all objects that its entry names.
                committed, is_new = logs.commit(version)
            done.append(Transferred(version, committed, is_new))
    return TransferReport(tuple(done), len(copied), sum(info.size_bytes for info in copied))


def _check_trust(logs: TargetLogs, versions: Iterable[Resolved], trusted_keys: Sequence[str | Path] | None) -> None:
    keys = load_trusted_keys(trusted_keys)
    if not keys:  # No key is configured: all versions are trusted.
        return
    for version in versions:
        # Check the content that is copied. A second read of the entry could return other content.
        check_signed(logs.source, version, Entry(version.version, logs.content(version)), keys)


def _data_versions(logs: TargetLogs, versions: Iterable[Resolved]) -> list[Resolved]:
    """Return the data-set versions that model versions consumed, by name and number."""
    datasets = [use["dataset"] for version in versions for use in logs.content(version).get("data", [])]
    # The data use of a mixture lists the versions of all its splits, separated by commas.
    refs = {ref for dataset in datasets for ref in dataset.split(", ")}
    consumed = {_find_data_version(logs, ref) for ref in refs}
    return sorted(consumed, key=attrgetter("name", "version"))


def _find_data_version(logs: TargetLogs, ref: str) -> Resolved:
    """Return the data-set version to copy for a reference of a model, under its present name.

    Raises NotFoundError: the version does not exist, or was removed and not renamed.
    """
    try:
        return logs.source.resolve("datasets", ref)
    except NotFoundError as error:
        version = logs.source.resolve("datasets", ref, removed=True)
        if logs.find(version):
            return version  # copied before the data set was renamed or the version was removed
        renamed = find_renamed(logs.source, version)
        if renamed is None:
            raise NotFoundError(
                f"{error}; without --with-data (with_data=False), the model is copied alone"
            ) from error
        return renamed


def _check_data_names(data: Sequence[Resolved], renamed: Mapping[str, str]) -> None:
    source_names = {version.name for version in data}
    if unknown := sorted(renamed.keys() - source_names):
        raise ConfigError(
            f"cannot rename the data set {unknown[0]!r}: it is not copied; the data sets to copy are: "
            f"{', '.join(sorted(source_names)) or 'none'}"
        )
    target_names = Counter(renamed.get(name, name) for name in source_names)
    if duplicates := [name for name, count in target_names.items() if count > 1]:
        raise ConfigError(f"two data sets would get the name {duplicates[0]!r}; give each a name of its own")


def _new_names(requested: Sequence[Resolved], name: str | None) -> dict[tuple[Kind, str], str]:
    """Return the name at the target of the only requested model, by its kind and name; {} if `name` is None."""
    if name is None:
        return {}
    names = {version.name for version in requested}
    if len(names) != 1:
        raise ConfigError(
            f"{len(names)} models cannot all get the name {check_name(name, 'model')!r}: "
            f"{', '.join(sorted(names))}; copy them one by one"
        )
    return {("models", names.pop()): check_name(name, "model")}
