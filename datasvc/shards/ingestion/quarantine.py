"""Samples that were not ingested: when they forbid a commit, and the list of them that a version keeps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Final

from datasvc.errors import BadSampleError, NotFoundError
from datasvc.repository import Digest, Objects
from datasvc.repository.store.storage import redact_url
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.ingestion.duplicates import Repeat
from datasvc.shards.sources.common.source import BadSample, Source

_NAMED: Final = 10


def check_bad(
    bad: Sequence[BadSample],
    repeated: Sequence[BadSample],
    tables: Mapping[str, ShardTable],
    source: Source,
    *,
    fails: bool,
) -> None:
    """Raise where bad samples forbid a commit.

    Args:
        bad: what could not be used.
        repeated: what is in the tables and cannot stay there.
        tables: what was stored, by split.
        source: for the message.
        fails: any bad sample forbids it; otherwise only a split of which nothing is left.

    Raises:
        NotFoundError: there is no sample at all, not even a bad one.
        BadSampleError: names up to ten and counts all.
    """
    if not bad and not tables:
        raise NotFoundError(f"cannot ingest {redact_url(source.url)}: there is no sample in it")
    emptied = {sample.split for sample in bad} - set(tables)
    every = [*bad, *repeated]
    if not every or not (fails or emptied):
        return
    total = len(bad) + sum(table.num_samples for table in tables.values())
    named = [f"{sample.split}/{sample.key}: {sample.reason}" for sample in _ordered(every)]
    raise BadSampleError(
        f"{len(every)} of {total} samples of {redact_url(source.url)} are bad, nothing was committed: "
        f"{_first(named)}. "
        "Mend or remove them, or leave them out with --on-bad skip, which must leave some in each split"
    )


def check_duplicates(found: Mapping[str, Sequence[Repeat]], source: Source) -> None:
    """Raise BadSampleError where there are duplicates; `found` has them by split."""
    named = [
        f"{split}/{repeat.key} holds the same as {repeat.first_key}"
        for split, repeats in found.items()
        for repeat in repeats
    ]
    if named:
        raise BadSampleError(
            f"{len(named)} samples of {redact_url(source.url)} are duplicates, nothing was committed: "
            f"{_first(named)}. Remove them, or use --duplicates drop or keep"
        )


def store_quarantine(objects: Objects, bad: Sequence[BadSample]) -> Digest | None:
    """Store which samples were left out and why, one JSON object a line; returns the object, None without any."""
    if not bad:
        return None
    lines = [json.dumps(dataclasses.asdict(sample), ensure_ascii=False, sort_keys=True) for sample in _ordered(bad)]
    return objects.put("".join(f"{line}\n" for line in lines).encode()).digest


def _ordered(bad: Sequence[BadSample]) -> list[BadSample]:
    return sorted(bad, key=lambda sample: (sample.split, sample.key, sample.reason))


def _first(named: Sequence[str]) -> str:
    more = f"; and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return "; ".join(named[:_NAMED]) + more
