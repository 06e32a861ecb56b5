"""Purge: remove the bytes of samples from all versions that have them, and prove it.

The samples are found in the shards of all versions, and redacted (`purged_rows`). Then the sample indexes of all data
sets and every object that no version references are searched for their payload digests. The certificate has the
result; it is an object, and an entry of the log of redactions. A purge that was interrupted goes on when it is called
again: redacted samples keep their keys and the log their digests, and a journal keeps what a condition selected.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args

import numpy as np

from datasvc.api.certificates import read_certificates
from datasvc.api.purge_proof import Proof, search_objects
from datasvc.api.recorded_copies import find_copies
from datasvc.cache.cache import Cache
from datasvc.errors import ConfigError, ConflictError, NotFoundError
from datasvc.models.provenance.find_consumers import find_consumers
from datasvc.printable import count_text
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest, Repository, Resolved
from datasvc.repository.logs.copies import RecordedCopy, user_and_host
from datasvc.repository.logs.journal import Journal
from datasvc.repository.logs.redactions import CERTIFICATE, redaction_log
from datasvc.repository.logs.references import refuse_text
from datasvc.repository.objects.objects import digest_of
from datasvc.repository.store.redaction import redact_url
from datasvc.shards.history.purged_overlays import EmptiedOverlays, empty_overlays
from datasvc.shards.history.purged_rows import (
    StoredShard,
    delete_objects,
    delete_retired,
    find_rows,
    identifying,
    read_all_tables,
    redact,
    rows_by_shard,
)
from datasvc.shards.versions.dataset import choose_split, open_dataset
from datasvc.shards.versions.delete import Condition
from datasvc.shards.versions.deletions import count_live
from datasvc.shards.versions.keys import SplitKeys, first_keys
from datasvc.shards.versions.redact import hashed_key
from datasvc.shards.versions.samples import image_columns

Missing = Literal["fail", "ok"]
_Keys = dict[tuple[str, str], set[str]]
_Result = TypeVar("_Result")
_MAX_ROUNDS: Final = 32
_CERTIFICATE_FORMAT: Final = 1


@dataclass(frozen=True)
class PurgeReport:
    """Result of `purge`, or with `dry_run` what it would do.

    Attributes:
        dataset: the version in which a condition was evaluated.
        keys: keys of the samples, or what replaced them, sorted.
        missing: requested keys that no version has.
        payloads: their payload digests as hexadecimal digits, sorted.
        num_shards: number of shards to redact.
        num_overlays: number of objects with values of the samples beside shards, to redact too.
        size_bytes: bytes of these shards and objects, which are read and written again.
        num_redacted: number of stored samples that an earlier or interrupted purge has redacted already.
        versions: number of live samples that each version loses or has lost, by name and number.
        models: model versions that were trained on the samples, with the number of samples.
        copies: other samples with the same bytes: data set, split and key; without `copies` they keep the bytes.
        origins: repositories from which versions with the samples were copied; the samples are still there.
        destinations: recorded exports and transfers that were made with the samples, and the number of these, see
            `find_copies`. Nothing is known of what became of them.
        proof: what was searched afterwards; None in a dry run.
        held: by cache, shards that are in use; they are deleted when their users end.
        thumbnails: number of thumbnails of purged samples that the cache of the pages on this machine had.
        certificate: digest of the certificate; None if nothing was purged.
        dry_run: whether nothing was changed.
    """

    dataset: Resolved
    keys: tuple[str, ...]
    missing: tuple[str, ...]
    payloads: tuple[str, ...]
    num_shards: int
    size_bytes: int
    num_redacted: int
    versions: Mapping[str, int]
    models: Mapping[str, int]
    copies: tuple[tuple[str, str, str], ...]
    origins: tuple[str, ...]
    destinations: tuple[tuple[RecordedCopy, int | None], ...] = ()
    proof: Proof | None = None
    held: Mapping[str, Sequence[Digest]] = field(default_factory=dict)
    thumbnails: int = 0
    certificate: Digest | None = None
    dry_run: bool = False
    num_overlays: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether no object of the repository has the bytes of the samples any more."""
        return self.proof is not None and not (self.copies or self.proof.unfinished or self.proof.unreadable)


def purge(
    repository: Repository,
    ref: str,
    *,
    keys: Iterable[str] | None = None,
    where: str | None = None,
    split: str | None = None,
    missing: Missing = "fail",
    copies: bool = False,
    hash_keys: bool = False,
    caches: Sequence[str | Path] = (),
    by: str | None = None,
    message: str = "",
    dry_run: bool = True,
    progress: Progress = NO_PROGRESS,
) -> PurgeReport:
    """Remove the bytes of samples from every version of a data set, and from all that share its shards.

    Versions keep their numbers, digests, order and number of samples. A purged sample has empty values and its key;
    loaders mask it. Old shards are deleted at once, without a grace period. Copies of the repository are not changed.

    Args:
        repository: the repository that stores the data set.
        ref: the data set, or the version in which `where` is evaluated.
        keys: keys of the samples; all samples that have one of them in any version are purged. Give this or `where`.
        where: SQL expression over the columns, see `Condition`; samples of other versions with the same keys in the
            same split are purged too.
        split: only samples of this split; None: all splits.
        missing: if a key is in no version: "fail", or "ok" to purge the others.
        copies: also purge samples of all data sets with the same bytes under other keys.
        hash_keys: replace the keys of the samples by hashes, in the data and in the certificate.
        caches: folders of caches of this node from which the old shards are evicted.
        by: who purges, for the certificate; None: user and host.
        message: reason, stored in the certificate.
        dry_run: change nothing, and report what a purge would do.
        progress: counts the bytes of the shards that are redacted.

    Raises:
        ConfigError: both or neither of `keys` and `where` are given; or see `Condition`.
        NotFoundError: there is no such version or split; or keys are in no version, and nothing was changed.
        CorruptDataError: an entry, a table, an index or a shard cannot be read: what it has is unknown.
        ConflictError: other purges, or writers, have changed the repository in every round; call it again.
        UnknownOutcomeError, UnavailableError: see `Log.append`; call it again to go on.
    """
    _check_arguments(keys, where, missing)
    requested = set(keys or ())
    dataset = repository.resolve("datasets", ref)
    journal = repository.journal(digest_of(b"purge"), digest_of(json.dumps([dataset.name, where, split]).encode()))

    def plan() -> tuple[_Purge, PurgeReport]:
        selected = _select(repository, dataset, requested, where, split, journal, dry_run=dry_run)
        run = _Purge(repository, dataset, selected, copies=copies, hash_keys=hash_keys)
        return run, run.plan(missing)

    run, report = _until_stable(repository, plan)
    if dry_run:
        return report
    if report.keys:
        report = run.execute(report, message, progress)
        assert report.proof is not None
        held = {str(folder): _evict(folder, repository, report.proof.deleted) for folder in caches}
        report = run.certify(replace(report, held=held), by=by, message=message)
    if where is not None:
        journal.remove()  # it has keys of the samples
    return replace(report, dry_run=False)


def _check_arguments(keys: Iterable[str] | None, where: str | None, missing: Missing) -> None:
    if missing not in get_args(Missing):
        raise ConfigError(f"missing is {missing!r}; expected one of {', '.join(get_args(Missing))}")
    if (keys is None) == (where is None):
        raise ConfigError("expected either keys or a condition that selects the samples to purge, not both")
    refuse_text(keys, "keys", "keys")


def _until_stable(repository: Repository, call: Callable[[], _Result]) -> _Result:
    """Call again while other purges delete what is read, and so read what replaced it."""
    while True:
        head = redaction_log(repository.objects).read().head
        try:
            return call()
        except NotFoundError:
            if redaction_log(repository.objects).read().head == head:
                raise


def _select(
    repository: Repository,
    dataset: Resolved,
    keys: set[str],
    where: str | None,
    split: str | None,
    journal: Journal,
    *,
    dry_run: bool,
) -> _Keys:
    """Return the selected keys, by data set and split; the split "" stands for all. For errors, see `purge`.

    A redacted sample no longer satisfies a condition. So the journal keeps the keys until the purge has ended, and an
    interrupted purge goes on with them. A dry run only reads the journal.
    """
    splits = choose_split(open_dataset(repository, str(dataset)), split)
    if where is None:
        return {(dataset.name, split or ""): keys}
    selected: _Keys = {}
    for each in splits:
        live = SplitKeys(repository.objects, each.table)
        condition = Condition(where, each.table.sample_schema, each.classes)
        found = selected.setdefault((dataset.name, each.name), set())
        for shard, rows in condition.find(repository.objects, each.table):
            stored = live.read(shard)
            found.update(np.array(stored.keys.to_pylist(), object)[np.isin(stored.rows, rows)])
    if not dry_run:
        journal.begin()
    for name, in_split, earlier in journal.read_all().get("selected", {}).get("selected", ()):
        selected.setdefault((name, in_split), set()).update(earlier)
    if not dry_run:
        record = [[*name, sorted(found)] for name, found in sorted(selected.items())]
        # Before any sample is redacted: a power cut must not lose what the condition does not find again.
        journal.write("selected", {"selected": record}, synced=True)
    return selected


class _Purge:
    """One purge: which samples are found now, and what was done."""

    def __init__(
        self, repository: Repository, dataset: Resolved, selected: _Keys, *, copies: bool, hash_keys: bool
    ) -> None:
        self._repository = repository
        self._dataset = dataset
        self._selected = selected
        # Samples of an earlier purge may have hashed keys already.
        self._names = {name: {*keys, *map(hashed_key, keys)} for name, keys in selected.items()}
        self._copies = copies
        self._hash_keys = hash_keys
        self._clear_keys = {key for keys in selected.values() for key in keys}  # which certificates may have

    def find(self, payloads: frozenset[str] = frozenset()) -> tuple[list[StoredShard], list[StoredShard]]:
        """Return the shards with the samples, and those with copies of their bytes or of the given payloads."""
        objects, log = self._repository.objects, redaction_log(self._repository.objects)
        head, newest = -1, log.read().head
        # A purge that runs at the same time may delete shards before they are searched: search again after it.
        while head != newest:
            head = newest
            self._tables = read_all_tables(self._repository)
            tables = self._tables.values()
            own = [each for each in tables if any(version.name == self._dataset.name for version, _ in each.splits)]
            found = find_rows(objects, own, keys=self._names)
            self._overlaid = self._find_overlaid(found)
            self.payloads = payloads | identifying(
                payload
                for shard in found
                for row in (*shard.rows, *shard.redacted)
                for payload in (
                    row.payload,
                    *self._overlaid.payloads.get(shard.info.digest, {}).get(row.row, ()),
                    *log.known.overlaid.get(shard.info.digest, {}).get(row.row, ()),
                )
            )
            with_copies = find_rows(objects, tables, keys=self._names, payloads=self.payloads)
            if self._copies:
                self._overlaid = self._find_overlaid(with_copies)
            newest = log.read().head
        rows = {(shard.info.digest, row.row) for shard in found for row in shard.rows}
        others = [
            replace(shard, rows=left, redacted=())
            for shard in (() if self._copies else with_copies)
            if (left := tuple(row for row in shard.rows if (shard.info.digest, row.row) not in rows))
        ]
        found = with_copies if self._copies else found
        return [shard.to_hash() for shard in found] if self._hash_keys else found, others

    def _find_overlaid(self, found: Sequence[StoredShard]) -> EmptiedOverlays:
        rows = rows_by_shard(found)
        tables = [stored.table for stored in self._tables.values()]
        return empty_overlays(self._repository.objects, tables, rows, dry_run=True)

    def plan(self, missing: Missing) -> PurgeReport:
        """Find the samples, and report what a purge does. Raises NotFoundError: a key is in no version."""
        found, others = self.find()
        stored = {row.key for shard in found for row in (*shard.rows, *shard.redacted)}
        self._clear_keys |= stored
        requested = set[str]().union(*self._selected.values())
        absent = sorted(key for key in requested if key not in stored and hashed_key(key) not in stored)
        if absent and missing == "fail":
            raise NotFoundError(
                f"{count_text(len(absent), 'key is', 'keys are')} in no version of {self._dataset.name}: "
                f"{first_keys(absent)}; nothing was purged. --missing ok purges the others"
            )
        changed = [shard for shard in found if shard.rows]
        rows = rows_by_shard(found)
        versions: Counter[Resolved] = Counter()
        for table in self._tables.values():
            num_live = count_live(self._repository.objects, table.table, rows)
            versions.update({version: num_live for version, _ in table.splits} if num_live else {})
        return PurgeReport(
            self._dataset,
            tuple(sorted(map(hashed_key, stored) if self._hash_keys else stored)),
            tuple(absent),
            tuple(sorted(self.payloads)),
            len(changed),
            sum(info.size_bytes for info in (*(shard.info for shard in changed), *self._overlaid.objects)),
            sum(len(shard.redacted) for shard in found),
            {str(version): versions[version] for version in sorted(versions, key=attrgetter("name", "version"))},
            self._trained(stored, {version.name for version in versions}),
            _places(others),
            self._origins(versions),
            find_copies(self._repository, rows) if rows else (),
            dry_run=True,
            num_overlays=len(self._overlaid.objects),
        )

    def _trained(self, keys: Collection[str], names: Collection[str]) -> dict[str, int]:
        """Return the model versions that consumed samples with these keys in data sets `names`, and how many."""
        if not keys or not self._repository.names("models"):
            return {}
        found: dict[str, int] = {}
        for name in sorted(names):
            report = find_consumers(self._repository, keys=sorted(keys), data=name)
            for version in report.versions:
                if version.num_samples:
                    found[version.name] = max(found.get(version.name, 0), version.num_samples)
        return found

    def _origins(self, versions: Iterable[Resolved]) -> tuple[str, ...]:
        origins = [self._repository.entry(version).content.get("origin") for version in versions]
        copied = [origin for origin in origins if isinstance(origin, Mapping)]
        return tuple(sorted({f"{origin.get('version')} of {origin.get('repository')}" for origin in copied}))

    def execute(self, report: PurgeReport, message: str, progress: Progress) -> PurgeReport:
        """Redact until no version has a sample, even one committed during the purge; then search all objects."""
        progress.begin(report.size_bytes)
        payloads = frozenset(report.payloads)
        for _ in range(_MAX_ROUNDS):
            found, others = self.find(payloads)
            payloads = self.payloads
            if self._overlaid.objects or any(shard.rows for shard in found):
                tables = [stored.table for stored in self._tables.values()]
                redact(
                    self._repository,
                    found,
                    tables,
                    hash_keys=self._hash_keys,
                    message=message,
                    progress=progress,
                )
                continue
            delete_retired(self._repository)
            # A version that was committed after `find` is found by the next round.
            before = self._tables.keys()
            rows = rows_by_shard(found)
            proof = search_objects(self._repository, self._tables, payloads, rows)
            if read_all_tables(self._repository).keys() <= before:
                num_thumbnails, places = self._remove_thumbnails(), _places(others)
                # Again: a copy that ran when the samples were found may have ended since.
                made = find_copies(self._repository, rows)
                report = replace(report, payloads=tuple(sorted(payloads)), copies=places, proof=proof)
                return replace(report, thumbnails=num_thumbnails, destinations=made)
        raise ConflictError(
            f"other writers changed the repository in each of {_MAX_ROUNDS} rounds; what was found until now is "
            "purged: call purge again"
        )

    def _remove_thumbnails(self) -> int:
        from datasvc.shards.images.thumbnail_cache import remove_purged

        schemas = (stored.table.sample_schema for stored in self._tables.values())
        return remove_purged(self._repository, {column for schema in schemas for column in image_columns(schema)})

    def certify(self, report: PurgeReport, *, by: str | None, message: str) -> PurgeReport:
        """Store the certificate as an object, and the entry that names it. Hash the keys in all if that is asked."""
        facts = to_json(report)
        del facts["certificate"], facts["dry_run"]
        if self._hash_keys:
            facts["missing"] = sorted(map(hashed_key, report.missing))
            facts["copies"] = [[*place, hashed_key(key)] for *place, key in report.copies]
            facts["destinations"] = _without_conditions(facts["destinations"])
        certificate = {
            "format": _CERTIFICATE_FORMAT,
            "repository": redact_url(self._repository.url),
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "by": by or user_and_host(),
            "message": message,
            **facts,
        }
        digest = self._append_certificate(certificate)
        if self._hash_keys:
            _until_stable(self._repository, self._hash_certificates)
        delete_retired(self._repository)
        return replace(report, certificate=digest)

    def _hash_certificates(self) -> None:
        """Hash the keys in all certificates. Raises NotFoundError: another purge replaced one at the same time."""
        for earlier in read_certificates(self._repository):
            replaced = earlier.pop("certificate")
            changed = _with_hashed_keys(earlier, self._clear_keys)
            if changed != earlier:
                self._append_certificate(changed, replaces=replaced)

    def _append_certificate(self, certificate: Mapping[str, Any], *, replaces: Digest | None = None) -> Digest:
        content = json.dumps(certificate, indent=2, sort_keys=True, ensure_ascii=False).encode()
        digest = self._repository.objects.put(content).digest
        entry = {
            "kind": CERTIFICATE,
            "certificate": digest,
            "dataset": certificate["dataset"].rpartition("@")[0],
            "samples": len(certificate["keys"]),
            "complete": certificate["complete"],
            # Caches evict them: no version has them, so the log has no shard that replaces them.
            "deleted": [] if replaces else certificate["proof"]["deleted"],
        }
        entry |= {"replaces": replaces} if replaces else {}
        redactions = redaction_log(self._repository.objects)

        def build(_head: int) -> dict[str, Any]:
            # If another entry is appended after this check, the log calls it again.
            if replaces and replaces not in (present := redactions.read().certificates):
                delete_objects(self._repository, {digest} - present.keys())  # it has keys that the other has hashed
                raise NotFoundError(f"another purge has replaced the certificate {replaces}: read it again")
            return entry

        redactions.log.append(build)
        return digest


def _with_hashed_keys(certificate: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Return a certificate with hashes in place of some keys."""

    def hashed(key: str) -> str:
        return hashed_key(key) if key in keys else key

    lists: dict[str, list[Any]] = {name: sorted(map(hashed, certificate[name])) for name in ("keys", "missing")}
    lists["copies"] = [[*place, hashed(key)] for *place, key in certificate["copies"]]
    if "destinations" in certificate:  # earlier releases recorded no copies
        lists["destinations"] = _without_conditions(certificate["destinations"])
    return {**certificate, **lists}


def _without_conditions(destinations: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return recorded copies without the conditions of views, which may name keys; the tables still identify them."""
    return [{**each, "version": each["version"].partition("[")[0]} for each in destinations]


def _places(shards: Iterable[StoredShard]) -> tuple[tuple[str, str, str], ...]:
    """Return data set, split and key of the samples that were found and are not redacted, sorted."""
    found = {
        (version.name, split, row.key) for shard in shards for version, split in shard.splits for row in shard.rows
    }
    return tuple(sorted(found))


def _evict(folder: str | Path, repository: Repository, deleted: Iterable[Digest]) -> list[Digest]:
    redaction_log(repository.objects).read()
    with Cache(folder) as cache:
        return cache.evict_retired(repository, deleted)


def to_json(report: PurgeReport) -> dict[str, Any]:
    """Return the facts of a purge as JSON values: those of its certificate."""
    facts = {name: getattr(report, name) for name in report.__dataclass_fields__}
    proof = None if report.proof is None else asdict(report.proof)
    facts |= {"dataset": str(report.dataset), "proof": proof, "complete": report.is_complete}
    facts["destinations"] = [{**copy.to_json(), "purged": number} for copy, number in report.destinations]
    values: dict[str, Any] = json.loads(json.dumps(facts))
    return values
