"""Log of redactions: the shards, and objects of overlays, that replace others after samples were purged from these.

Shard tables are never rewritten, because their digests are the identity of orders, states and signatures. So readers
of a table look up its shards here (`ShardTable.read`), and never ask for a shard that was replaced. An old shard is
deleted after the entry exists: when a purge was killed, readers have either the old or the new shard.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final
from weakref import WeakKeyDictionary

from datasvc.errors import CorruptDataError
from datasvc.repository.logs.log import Entry, Log
from datasvc.repository.objects.objects import Digest, ObjectInfo, Objects, parse_digest
from datasvc.repository.store.storage import Storage

REDACTIONS: Final = "redactions"
REDACT: Final = "redact"
CERTIFICATE: Final = "certificate"


@dataclass(frozen=True)
class Redaction:
    """A shard that replaces another one.

    Attributes:
        old: digest of the replaced shard. That of `shard` if the shard was lost before, and only its index remained.
        old_index: digest of its sample index; None if it had none.
        shard: the new shard, with the same rows.
        index: digest of its sample index.
        payloads: payload digest, as hexadecimal digits, that each redacted row had, by row.
        hash_keys: whether keys were replaced by hashes.
        in_table: whether a shard table has it, and not the log, because a redacted shard was written again.
    """

    old: Digest
    old_index: Digest | None
    shard: ObjectInfo
    index: Digest
    payloads: Mapping[int, str]
    hash_keys: bool = False
    in_table: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the record in an entry."""
        return {
            "old": self.old,
            "old_index": self.old_index,
            "shard": self.shard.digest,
            "bytes": self.shard.size_bytes,
            "index": self.index,
            "hash_keys": self.hash_keys,
            "payloads": {str(row): payload for row, payload in sorted(self.payloads.items())},
        }

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Redaction:
        """Return the redaction of a record. Raises KeyError, TypeError, ValueError or CorruptDataError."""
        return Redaction(
            parse_digest(record["old"]),
            None if record["old_index"] is None else parse_digest(record["old_index"]),
            ObjectInfo(parse_digest(record["shard"]), int(record["bytes"])),
            parse_digest(record["index"]),
            {int(row): str(payload) for row, payload in record["payloads"].items()},
            bool(record["hash_keys"]),
        )


@dataclass(frozen=True)
class Redactions:
    """The redactions of a repository at one time.

    Attributes:
        by_overlay: newest object in place of each replaced one with values beside shards, by its digest.
        overlaid: payload digests that purged samples had by such values, by the newest shard and row.
        by_shard: redaction of each replaced shard, by its digest; of those made one after the other, the newest shard
            with the payloads of all.
        redacted: the same redactions by the digests of the new shards.
        retired: digests of all shards, sample indexes, objects of overlays and certificates that were replaced; no
            reader needs them.
        deleted: digests of objects without a version that purges have deleted because they had the bytes.
        certificates: entries of the certificates of all purges by digest, oldest first.
        head: number of the newest entry of the log; 0 for none.
    """

    by_shard: Mapping[Digest, Redaction] = field(default_factory=dict)
    redacted: Mapping[Digest, Redaction] = field(default_factory=dict)
    retired: frozenset[Digest] = frozenset()
    deleted: frozenset[Digest] = frozenset()
    certificates: Mapping[Digest, Mapping[str, Any]] = field(default_factory=dict)
    head: int = 0
    by_overlay: Mapping[Digest, ObjectInfo] = field(default_factory=dict)
    overlaid: Mapping[Digest, Mapping[int, frozenset[str]]] = field(default_factory=dict)

    def extended(self, entries: Iterable[Entry]) -> Redactions:
        """Return these redactions and those of later entries. Raises CorruptDataError: an entry is not valid."""
        by_shard, certificates = dict(self.by_shard), dict(self.certificates)
        retired, deleted, head = set(self.retired), set(self.deleted), self.head
        by_overlay, added_payloads = dict(self.by_overlay), [self.overlaid]
        for entry in entries:
            head = entry.number
            try:
                if entry.content["kind"] == CERTIFICATE:
                    new, replaced = parse_digest(entry.content["certificate"]), entry.content.get("replaces")
                    if replaced is None:
                        certificates[new] = entry.content
                    certificates = {new if each == replaced else each: certificates[each] for each in certificates}
                    retired.update({parse_digest(replaced)} if replaced else ())
                    deleted.update(map(parse_digest, entry.content.get("deleted", ())))
                    continue
                for record in entry.content["shards"]:
                    added = Redaction.from_json(record)
                    # Of a shard that was lost, each purge replaces only the index: `old` stays.
                    before = by_shard.get(added.old, added)
                    joined = {**added.payloads, **before.payloads}
                    by_shard[added.old] = replace(added, old_index=before.old_index, payloads=joined)
                    replaced = {added.old, added.old_index} - {added.shard.digest, added.index, None}
                    retired.update(digest for digest in replaced if digest is not None)
                replaced_by = {
                    parse_digest(old): ObjectInfo(parse_digest(new), int(size_bytes))
                    for old, new, size_bytes in entry.content.get("overlays", ())
                }
                retired.update(replaced_by)
                by_overlay |= replaced_by
                by_overlay = {old: replaced_by.get(new.digest, new) for old, new in by_overlay.items()}
                added_payloads.append(
                    {
                        parse_digest(shard): {int(row): frozenset(map(str, found)) for row, found in rows.items()}
                        for shard, rows in entry.content.get("overlaid", {}).items()
                    }
                )
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CorruptDataError(
                    f"entry {entry.number} of the log {REDACTIONS} is not valid: {error!r}; restore it from a copy"
                ) from error
        newest = {old: _follow(by_shard, old) for old in by_shard}
        payloads: dict[Digest, dict[int, str]] = {}
        for old, redaction in by_shard.items():
            payloads.setdefault(newest[old].shard.digest, {}).update(redaction.payloads)
        complete = {
            old: replace(
                newest[old],
                old=old,
                old_index=each.old_index,
                # Shards that differed only in purged samples have one new shard: its own payloads come last.
                payloads={**payloads[newest[old].shard.digest], **each.payloads},
            )
            for old, each in by_shard.items()
        }
        redacted = {each.shard.digest: each for each in complete.values()}
        overlaid: dict[Digest, dict[int, frozenset[str]]] = {}
        for shard, rows in (each for part in added_payloads for each in part.items()):
            present = overlaid.setdefault(newest[shard].shard.digest if shard in newest else shard, {})
            present.update({row: present.get(row, frozenset()) | found for row, found in rows.items()})
        return Redactions(
            complete, redacted, frozenset(retired), frozenset(deleted), certificates, head, by_overlay, overlaid
        )


def _follow(by_shard: Mapping[Digest, Redaction], old: Digest) -> Redaction:
    """Return the last of the redactions that were made one after the other, beginning with the shard `old`."""
    redaction, seen = by_shard[old], {old}
    while redaction.shard.digest in by_shard and redaction.shard.digest not in seen:
        seen.add(redaction.shard.digest)
        redaction = by_shard[redaction.shard.digest]
    return redaction


class RedactionLog:
    """The log of redactions of one repository. Safe for several threads.

    Attributes:
        log: its entries.
        known: the redactions that this process has read.
    """

    def __init__(self, storage: Storage) -> None:
        self.log = Log(storage, REDACTIONS)
        self.known = Redactions()
        self._lock = threading.Lock()

    def read(self) -> Redactions:
        """Return all present redactions; only new entries are read.

        Raises:
            CorruptDataError, ConfigError: an entry is damaged, or has a later format. Without it, a reader would ask
                for shards that were deleted, so it is not left out.
            UnavailableError: the store does not respond.
        """
        with self._lock:
            numbers = self.log.numbers_after(self.known.head)
            if numbers:
                self.known = self.known.extended(self.log.entries(numbers))
            return self.known


_logs: WeakKeyDictionary[Objects, RedactionLog] = WeakKeyDictionary()
_logs_lock = threading.Lock()


def redaction_log(objects: Objects) -> RedactionLog:
    """Return the log of redactions of the repository that has these objects; one for all its readers."""
    with _logs_lock:
        if objects not in _logs:
            _logs[objects] = RedactionLog(objects.storage)
        return _logs[objects]
