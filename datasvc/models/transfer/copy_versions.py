"""Model versions, with what they came from, in another repository. Each is visible there whole, or not at all.

A version keeps the identity of the commit that made it, wherever it goes: moved twice, by whatever way, it is one
version still. So work that was interrupted is done again by the same call, and only what is missing moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from datasvc.errors import ConfigError
from datasvc.models.transfer.copying import Copied, copy_missing
from datasvc.models.transfer.entries import TargetLogs
from datasvc.models.transfer.intent_journal import promised
from datasvc.models.transfer.reachable import named_objects
from datasvc.models.transfer.topological_order import order_by_descent, read_parents
from datasvc.models.versions.signing import check_signed
from datasvc.models.versions.signing_keys import trusted_keys as load_trusted_keys
from datasvc.repository import Entry, Kind, ObjectInfo, Repository, Resolved
from datasvc.repository.logs.references import check_name
from datasvc.repository.objects.presence import check_present
from datasvc.repository.store.storage import redact_url


@dataclass(frozen=True)
class Transferred:
    """A version that both repositories have.

    Attributes:
        source: its name here.
        target: its name there.
        is_new: whether it was not there before.
    """

    source: Resolved
    target: Resolved
    is_new: bool


@dataclass(frozen=True)
class TransferReport:
    """What a transfer did.

    Attributes:
        versions: in the order of their commits: data sets and parents before what came from them.
        num_objects: that were missing at the target.
        bytes: of these.
    """

    versions: tuple[Transferred, ...]
    num_objects: int
    bytes: int


def transfer(
    source: Repository,
    target: Repository,
    refs: Sequence[str],
    *,
    name: str | None = None,
    with_parents: bool = False,
    with_data: bool = False,
    data_names: Mapping[str, str] | None = None,
    trusted_keys: Sequence[str | Path] | None = None,
    begin: Callable[[int], None] | None = None,
    report: Callable[[int], None] | None = None,
) -> TransferReport:
    """Let another repository have model versions too.

    A version's entry there has a field `origin`: the first repository, its version and commit there, and its parents.
    `parent`, `merged` and the data's versions are those of the target where it has them; else there is no parent, and
    the data keep the names that they have at the source.

    Args:
        source: where they are.
        target: where they shall be.
        refs: NAME, NAME@VERSION or NAME@TAG.
        name: what the model is called at the target, default as here; then all `refs` must be of one model.
        with_parents: all versions, too, that they were made from and that are here.
        with_data: the data-set versions, too, that they consumed, with all shards.
        data_names: what data sets are called at the target, by their names here; default as here.
        trusted_keys: as of `stored_version.read_version`: nothing moves if a model is not signed at the source by one
            of them. The target's entry is another one, and not signed.
        begin: called once with the bytes of all objects, those that will not have to move included.
        report: called with bytes of objects that are at the target, from any thread.

    Returns:
        The versions there, and what moved. Those that were there already are left alone.

    Raises:
        NotFoundError: a version or an object of it is not there; or one is not there any more at the target.
        CorruptDataError: an entry, table or object was changed at the source; its version is not committed.
        ConfigError: both are one repository, or a bad name; or the target has an unrelated data set of the name of
            one that would move, see `data_names`: nothing is ever appended to that.
        ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`. Versions that were committed before
            stay; the same call goes on.
    """
    if source.url == target.url:
        raise ConfigError(f"{redact_url(source.url)} is source and target at once")
    asked = [source.resolve("models", ref) for ref in refs]
    renamed: dict[str, str] = {old: check_name(new, "data set") for old, new in (data_names or {}).items()}
    names: dict[tuple[Kind, str], str] = {("datasets", old): new for old, new in renamed.items()}
    logs = TargetLogs(source, target, {**names, **_new_names(asked, name)})
    versions = order_by_descent(read_parents(source, asked, logs.content, with_ancestors=with_parents))
    _check_trust(logs, versions, trusted_keys)
    if with_data:
        data = _data_versions(logs, versions)
        _check_data_names(data, renamed)
        versions = [*data, *versions]
    there = {version: logs.find(version) for version in versions}
    objects = {
        version: named_objects(source, version, logs.content(version)) for version in versions if not there[version]
    }
    for version in objects:
        logs.check_related(version)
    if begin is not None:
        begin(sum(info.size_bytes for info in {info for named in objects.values() for info in named}))
    done: list[Transferred] = []
    moved, known = Copied(0, 0), set[ObjectInfo]()
    with promised(target, objects) as keep:
        for version in versions:
            found, is_new = there[version], False
            if found is None:
                wanted = [info for info in objects[version] if info not in known]
                moved += copy_missing(source.objects, target.objects, wanted, report, named=logs.named, keep=keep)
                known.update(wanted)
                check_present(target.objects, (info.digest for info in objects[version]), str(version))
                # The commit point of this version: everything that it names is there.
                found, is_new = logs.commit(version)
            done.append(Transferred(version, found, is_new))
    return TransferReport(tuple(done), moved.num_objects, moved.bytes)


def _check_trust(logs: TargetLogs, versions: Iterable[Resolved], trusted_keys: Sequence[str | Path] | None) -> None:
    keys = load_trusted_keys(trusted_keys)
    for version in versions if keys else ():
        # The very content that moves: read again it could be another one.
        check_signed(logs.source, version, Entry(version.version, logs.content(version)), keys)


def _data_versions(logs: TargetLogs, versions: Iterable[Resolved]) -> list[Resolved]:
    uses = [use["dataset"] for version in versions for use in logs.content(version).get("data", [])]
    named = {ref for use in uses for ref in use.split(", ")}  # a mixture names the versions of all its splits
    found = {logs.source.resolve("datasets", ref) for ref in named}
    return sorted(found, key=lambda each: (each.name, each.version))


def _check_data_names(data: Sequence[Resolved], renamed: Mapping[str, str]) -> None:
    moving = {version.name for version in data}
    if unknown := sorted(renamed.keys() - moving):
        raise ConfigError(
            f"{unknown[0]!r} is no data set that moves; there are: {', '.join(sorted(moving)) or 'none'}"
        )
    called = Counter(renamed.get(name, name) for name in moving)
    if twice := [name for name, count in called.items() if count > 1]:
        raise ConfigError(f"two data sets cannot become one data set {twice[0]!r}; give each a name of its own")


def _new_names(asked: Sequence[Resolved], name: str | None) -> dict[tuple[Kind, str], str]:
    if name is None:
        return {}
    names = {version.name for version in asked}
    if len(names) != 1:
        raise ConfigError(
            f"{len(names)} models cannot all be {check_name(name, 'model')!r}: {', '.join(sorted(names))}"
        )
    return {("models", names.pop()): check_name(name, "model")}
