"""Bad samples of an ingest: checks whether they prevent the commit, and stores their list with the version."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Final

from datasvc.errors import BadSampleError, NotFoundError
from datasvc.printable import count_text
from datasvc.repository import Digest, Objects
from datasvc.repository.store.redaction import redact_url
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.ingestion.duplicates import DuplicateSample
from datasvc.shards.sources.common.source import BadSample, Source

_MAX_LISTED: Final = 10  # number of bad samples that a message names


def check_bad(
    bad: Sequence[BadSample],
    repeated: Sequence[BadSample],
    tables: Mapping[str, ShardTable],
    source: Source,
    *,
    fails: bool,
) -> None:
    """Raise if bad samples prevent the commit.

    Args:
        bad: samples that could not be stored.
        repeated: samples that were stored, but have the key of another sample.
        tables: shard tables of the stored samples by split.
        source: the source, for messages.
        fails: whether any bad sample prevents the commit. If False, only a split without any good sample does.

    Raises:
        NotFoundError: the source has no samples, not even bad ones.
        BadSampleError: bad samples prevent the commit; the message has their number and lists up to ten of them.
    """
    if not bad and not tables:
        raise NotFoundError(f"cannot ingest {redact_url(source.url)}: it contains no samples")
    # A split without any good sample would silently disappear from the version.
    without_good = {sample.split for sample in bad} - set(tables)
    all_bad = [*bad, *repeated]
    if not all_bad or not (fails or without_good):
        return
    are = "is" if len(all_bad) == 1 else "are"
    total = len(bad) + sum(table.num_samples for table in tables.values())  # the tables count `repeated` too
    listed = [f"{sample.split}/{sample.key}: {sample.reason}" for sample in _ordered(all_bad)]
    raise BadSampleError(
        f"{len(all_bad)} of {count_text(total, 'sample')} of {redact_url(source.url)} {are} bad, nothing was "
        "committed: "
        f"{_join_first(listed)}. Repair or remove them, or leave them out with --on-bad skip, which needs a good "
        "sample in each split"
    )


def check_duplicates(duplicates: Mapping[str, Sequence[DuplicateSample]], source: Source) -> None:
    """Raise BadSampleError if `duplicates`, the lists of samples with equal content by split, are not all empty."""
    listed = [
        f"{split}/{sample.key} has the same content as {sample.first_key}"
        for split, samples in duplicates.items()
        for sample in samples
    ]
    if listed:
        are = "is a duplicate" if len(listed) == 1 else "are duplicates"
        raise BadSampleError(
            f"{count_text(len(listed), 'sample')} of {redact_url(source.url)} {are}, nothing was committed: "
            f"{_join_first(listed)}. Remove them, or use --duplicates drop or keep"
        )


def store_quarantine(objects: Objects, bad: Sequence[BadSample]) -> Digest | None:
    """Store the list of the bad samples, one JSON object per line. Return its digest; None without bad samples."""
    if not bad:
        return None
    # Sort, so that the object does not depend on the order in which workers finish.
    lines = [json.dumps(dataclasses.asdict(sample), ensure_ascii=False, sort_keys=True) for sample in _ordered(bad)]
    return objects.put("".join(f"{line}\n" for line in lines).encode()).digest


def _ordered(bad: Sequence[BadSample]) -> list[BadSample]:
    return sorted(bad, key=lambda sample: (sample.split, sample.key, sample.reason))


def _join_first(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - _MAX_LISTED} more" if len(texts) > _MAX_LISTED else ""
    return "; ".join(texts[:_MAX_LISTED]) + more
