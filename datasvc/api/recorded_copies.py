"""Which recorded copies of data sets have given samples, decided by the shard tables of what was copied."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np

from datasvc.errors import NotFoundError
from datasvc.keyed_random import Integers
from datasvc.repository import Digest, Repository
from datasvc.repository.logs.copies import RecordedCopy, read_copy_log
from datasvc.repository.logs.redactions import Redactions, redaction_log
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.deletions import load_deletions


def read_copies(repository: Repository, name: str | None = None) -> list[RecordedCopy]:
    """Return the recorded copies of a data set, or of all, oldest first: exports, and transfers by push and pull.

    Raises:
        NotFoundError: there is no such data set, and no copy of one of this name.
        CorruptDataError, ConfigError, UnavailableError: see `read_copy_log`.
    """
    copies = read_copy_log(repository.storage)
    found = [each for each in copies if name is None or each.version.partition("@")[0] == name]
    if name is not None and not found and name not in repository.names("datasets"):
        raise NotFoundError(f"there is no data set {name!r}; give the name of a data set, without a version")
    return found


def find_copies(
    repository: Repository, rows: Mapping[Digest, Integers]
) -> tuple[tuple[RecordedCopy, int | None], ...]:
    """Return the recorded copies that have some samples, oldest first, with the number of these.

    Args:
        repository: the repository that was copied from.
        rows: the samples, purged ones too: `int64[n]`, distinct rows of shards, by their present digests.

    Returns:
        The copies. The number is None, for unknown, if the table of a copy or its deletions are lost.

    Raises:
        CorruptDataError, ConfigError, UnavailableError: the log, a table or its deletions cannot be read.
    """
    objects, log = repository.objects, redaction_log(repository.objects)
    known = log.read()

    @cache
    def redactions_until(head: int) -> Redactions:
        return known if head >= known.head else Redactions().extended(log.log.entries(range(1, head + 1)))

    @cache
    def count(digest: Digest, head: int, *, is_export: bool) -> int | None:
        try:
            stored = ShardTable.decode(objects.read(digest), objects.location(digest))
            # A transfer copies whole shards, also what the version has deleted of them.
            deletions = load_deletions(objects, stored) if is_export else None
        except NotFoundError:
            return None
        table, copied = stored.with_redactions(known), stored.with_redactions(redactions_until(head))
        num_samples = 0
        for number, info in enumerate(table.shards()):
            if info.digest in rows:
                chosen = np.setdiff1d(rows[info.digest], copied.redacted_rows(number))
                is_cut = deletions is not None and number in deletions.shards
                num_samples += len(chosen[~deletions.flags(number)[chosen]] if deletions and is_cut else chosen)
        return num_samples

    copies = read_copies(repository)
    # A later transfer of a table to the same repository has carried the redactions that were known then.
    heads: dict[tuple[tuple[str, str], Digest], int] = {}
    for copy in copies:
        for table in copy.tables.values() if not copy.is_export else ():
            heads[copy.place, table] = max(heads.get((copy.place, table), 0), copy.redactions)
    found: dict[tuple[str, tuple[str, str], str], tuple[RecordedCopy, int | None]] = {}
    for copy in copies:
        counts = [
            count(table, copy.redactions if copy.is_export else heads[copy.place, table], is_export=copy.is_export)
            for table in copy.tables.values()
        ]
        if any(number != 0 for number in counts):
            # Of a version that was transferred to one repository several times, only the last time.
            key = copy.version, copy.place, copy.created if copy.is_export else ""
            found[key] = copy, None if None in counts else sum(filter(None, counts))
    return tuple(found.values())
