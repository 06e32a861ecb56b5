"""Copies model versions, optionally with their ancestors and data, to another repository: `models push` and `pull`.

Each version becomes visible there atomically. A version keeps the id of the commit that first created it. Therefore
the target has it only once, even if it is copied twice, by any route. An interrupted transfer can be repeated: it
copies only the objects and versions that are missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Final

from datasvc.errors import ConfigError, NotFoundError
from datasvc.models.transfer.copy_in_order import (
    TransferReport,
    copy_in_order,
    name_at_target,
    open_both,
    read_parents,
    sort_topologically,
)
from datasvc.models.transfer.entries import TargetLogs
from datasvc.models.versions.signing import check_signed
from datasvc.models.versions.signing import trusted_keys as load_trusted_keys
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Entry, Kind, Repository, Resolved
from datasvc.repository.logs.references import check_name, refuse_text
from datasvc.shards.versions.dataset import find_renamed

_ADVICE: Final = "--rename-data {name}=NAME, data_names={{'{name}': 'NAME'}}"


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
    with_tags: bool = False,
    dry_run: bool = False,
    progress: Progress = NO_PROGRESS,
) -> TransferReport:
    """Copy model versions to another repository.

    The entry at the target gets a field `origin`: the repository where the version was first committed, and its name,
    commit and parents there. Its fields `parent`, `merged` and `data` refer to copies at the target; a parent without
    a copy is left out, and a data set without a copy keeps its name at the source. Artefacts are copied too, also
    those attached after an earlier transfer; one that was detached since is not detached at the target. Signatures do
    not cover artefacts, so they are left out if there are trusted keys.

    Args:
        source: repository to copy from, or its URL.
        target: repository to copy to, or its URL.
        refs: versions to copy: NAME, NAME@VERSION or NAME@TAG.
        name: name of the model at the target, by default the same; if it is given, all `refs` must be of one model.
        with_parents: whether to copy also all ancestors that are in the source.
        with_data: whether to copy also the data-set versions that the models consumed, with all shards. A data set
            that was renamed since is copied with its present name.
        data_names: names of data sets at the target, by name at the source; by default the same.
        trusted_keys: public keys, see `restore.read_version`. Each model version must be signed at the source by one
            of them, otherwise nothing is copied. The entry at the target differs, so it is not signed.
        with_tags: whether to copy also the tags of the copied model versions. A tag that the target has is not moved.
        dry_run: whether to write nothing, and return what would be copied.
        progress: counts the bytes of each object once the target has it, copied or not.

    Returns:
        The versions at the target, and the amount of data copied. Existing versions are not changed.

    Raises:
        NotFoundError: a version or one of its objects does not exist, or an object disappeared at the target.
        CorruptDataError: an entry, table or object is damaged at the source; its version is not committed.
        ConfigError: source and target are the same repository; a name is not valid; or the target has an unrelated
            data set of the same name.
        ConflictError: a tag points at another version of the target, or it has another artefact of the same name.
        ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`. Versions that were committed before
            stay; repeat the call to continue.
    """
    refuse_text(refs, "refs")
    source, target = open_both(source, target)
    requested = [source.resolve("models", ref) for ref in refs]
    renamed = {old: check_name(new, "data set") for old, new in (data_names or {}).items()}
    names: dict[tuple[Kind, str], str] = {("datasets", old): new for old, new in renamed.items()}
    logs = TargetLogs(source, target, {**names, **name_at_target(requested, name)}, advice=_ADVICE)
    versions = sort_topologically(read_parents(source, requested, logs.content, with_ancestors=with_parents))
    has_trusted_keys = _check_trust(logs, versions, trusted_keys)
    if with_data:
        data = _data_versions(logs, versions)
        _check_data_names(data, renamed)
        versions = [*data, *versions]
    kind: Kind | None = "models" if with_tags else None
    return copy_in_order(
        logs, versions, tagged_kind=kind, with_artefacts=not has_trusted_keys, dry_run=dry_run, progress=progress
    )


def _check_trust(logs: TargetLogs, versions: Iterable[Resolved], trusted_keys: Sequence[str | Path] | None) -> bool:
    """Return whether there are trusted keys; if so, check that one of them has signed each version."""
    keys = load_trusted_keys(trusted_keys)
    if not keys:  # No key is configured: all versions are trusted.
        return False
    for version in versions:
        # Check the content that is copied. A second read of the entry could return other content.
        check_signed(logs.source, version, Entry(version.version, logs.content(version)), keys)
    return True


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
