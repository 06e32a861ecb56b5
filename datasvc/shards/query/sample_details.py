"""One sample, its place and its duplicates; and shards and samples by the beginning of a digest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datasvc.repository import Digest, Repository
from datasvc.shards.format.digests import DIGEST_BYTES
from datasvc.shards.format.overlaid_shard import read_index
from datasvc.shards.format.schema import KEY
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.query.query import choose_shards
from datasvc.shards.query.sample_page import default_split, find_key, summary_to_json
from datasvc.shards.query.sample_reader import NumberedSamples, SamplePlace, SampleSummary
from datasvc.shards.versions.dataset import DatasetVersion, open_dataset
from datasvc.threads import map_in_threads

_READS_AT_ONCE: Final = 8
MAX_DUPLICATES: Final = 100  # that are listed


MIN_DIGITS: Final = 6
"""Fewer digits would match many digests by chance."""
MAX_SAMPLE_DIGITS: Final = 2 * DIGEST_BYTES
_PREFIX: Final = re.compile(f"[0-9a-f]{{{MIN_DIGITS},64}}")


class SampleRef(NamedTuple):
    """Names a sample of a version: its split, number and key."""

    split: str
    number: int
    key: str


@dataclass(frozen=True)
class Duplicates:
    """Other samples of a version with the same blobs (of samples without blobs: with the same values).

    Attributes:
        samples: at most `MAX_DUPLICATES` of them, by split and number.
        searched_shards: number of shards that were searched, of all splits.
        num_shards: number of shards of all splits.
    """

    samples: Sequence[SampleRef]
    searched_shards: int
    num_shards: int

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return vars(self) | {"samples": [sample._asdict() for sample in self.samples]}


@dataclass(frozen=True)
class SampleDetails:
    """One sample of a version.

    Attributes:
        version: the version, such as "pets@1".
        split: name of its split.
        sample: its values, and the sizes of its blobs.
        place: where it is stored, and its digests.
        duplicates: other samples with the same content.
    """

    version: str
    split: str
    sample: SampleSummary
    place: SamplePlace
    duplicates: Duplicates

    def to_json(self) -> dict[str, Any]:
        """Return the sample as JSON values, as `datasvc sample --json` prints them."""
        names = {"version": self.version, "split": self.split}
        stored = {"place": dict(vars(self.place)), "duplicates": self.duplicates.to_json()}
        return names | summary_to_json(self.sample) | stored


def read_sample(
    repository: Repository, ref: str, key: str, split: str | None = None, *, max_shards: int | None = None
) -> SampleDetails:
    """Return the sample with a key, and its duplicates in all splits of the version.

    Args:
        repository: the repository that stores the version.
        ref: the version.
        key: key of the sample.
        split: name of its split; None: "train", or the first one if there is no such split.
        max_shards: number of shards of each split to search for duplicates at most, evenly spaced; None: all.

    Raises:
        NotFoundError: there is no such version, split or key.
        CorruptDataError, UnavailableError: a shard or a sample index cannot be read.
    """
    dataset = open_dataset(repository, ref)
    reader = NumberedSamples(default_split(dataset, split))
    return details_of(dataset, reader, find_key(reader, key), max_shards=max_shards)


def details_of(
    dataset: DatasetVersion, reader: NumberedSamples, number: int, *, max_shards: int | None = None
) -> SampleDetails:
    """Return the sample of this number in the split that `reader` reads, see `read_sample`."""
    place = reader.place(number)
    return SampleDetails(
        version=str(dataset.resolved),
        split=reader.split.name,
        sample=reader.summaries([number])[0],
        place=place,
        duplicates=_find_duplicates(dataset, reader, number, place, max_shards),
    )


def _find_duplicates(
    dataset: DatasetVersion, reader: NumberedSamples, number: int, place: SamplePlace, max_shards: int | None
) -> Duplicates:
    """Return the live samples of all splits with the payload digest of a sample, except the sample itself."""
    num_shards = sum(split.table.num_shards for split in dataset.values())
    if not place.payload_digest:
        return Duplicates([], 0, num_shards)
    payload = pa.scalar(bytes.fromhex(place.payload_digest), pa.binary(16))
    found: list[SampleRef] = []
    searched = 0
    for name, split in dataset.items():
        in_split = reader if name == reader.split.name else NumberedSamples(split)
        # Shards without an index have no digests.
        indexed = np.flatnonzero(split.table.rows.column("index").is_valid().to_numpy())
        shards = indexed[choose_shards(len(indexed), max_shards)].tolist()
        searched += len(shards)

        def search(shard: int, in_split: NumberedSamples = in_split) -> list[SampleRef]:
            index = _read_index(in_split, shard)
            rows = np.flatnonzero(pc.equal(index.column("payload"), payload).to_numpy())
            live = in_split.live_numbers(shard, rows) if len(rows) else {}
            keys = index.column(KEY)
            return [SampleRef(in_split.split.name, number, keys[row].as_py()) for row, number in live.items()]

        found += [sample for samples in map_in_threads(search, shards, _READS_AT_ONCE) for sample in samples]
    others = [sample for sample in found if (sample.split, sample.number) != (reader.split.name, number)]
    return Duplicates(others[:MAX_DUPLICATES], searched, num_shards)


@dataclass(frozen=True)
class ShardMatch:
    """An object of a shard table.

    Attributes:
        digest: its digest.
        kind: "shard", "sample index" or "deletions".
        shard: number of the shard that it belongs to; None for the deletions of all shards.
    """

    digest: Digest
    kind: str
    shard: int | None


@dataclass(frozen=True)
class SampleMatch:
    """A live sample.

    Attributes:
        digest: its digest, 32 hexadecimal digits.
        kind: "sample", or "payload" for the digest of its blobs.
        number: its number in the split.
        key: its key.
    """

    digest: str
    kind: str
    number: int
    key: str


def is_digest_prefix(text: str) -> bool:
    """Return whether a text may be the beginning of a digest: 6 to 64 hexadecimal digits."""
    return _PREFIX.fullmatch(text) is not None


def find_shards(table: ShardTable, prefix: str) -> list[ShardMatch]:
    """Return the objects of a shard table whose digests begin with `prefix`, see `is_digest_prefix`."""
    found = [
        ShardMatch(Digest(digest), kind, row)
        for kind, column in (("shard", "digest"), ("sample index", "index"))
        for row, digest in _find_rows(table.rows.column(column), prefix)
    ]
    if table.deletions is not None and table.deletions.startswith(prefix):
        found.append(ShardMatch(table.deletions, "deletions", None))
    return found


def find_samples(reader: NumberedSamples, prefix: str) -> list[SampleMatch]:
    """Return the live samples whose digest, or whose payload's digest, begins with `prefix`.

    Reads the sample index of each shard. Shards of old versions have none; their samples are not found.

    Raises:
        NotFoundError, CorruptDataError, UnavailableError: a sample index cannot be read.
    """
    if len(prefix) > MAX_SAMPLE_DIGITS:
        return []
    shards = [shard for shard in range(reader.split.table.num_shards) if reader.split.table.index(shard) is not None]
    found = map_in_threads(lambda shard: _find_in_shard(reader, shard, prefix), shards, _READS_AT_ONCE)
    return [match for matches in found for match in matches]


def _find_in_shard(reader: NumberedSamples, shard: int, prefix: str) -> list[SampleMatch]:
    index = _read_index(reader, shard)
    # Without blobs, both digests may be equal: such a sample is found once.
    found: dict[tuple[int, str], str] = {}
    for kind in ("sample", "payload"):
        for row, digest in _find_rows(index.column(kind), prefix):
            found.setdefault((row, digest), kind)
    live = reader.live_numbers(shard, np.unique([row for row, _ in found])) if found else {}
    keys = index.column(KEY)
    return [
        SampleMatch(digest, kind, live[row], keys[row].as_py())
        for (row, digest), kind in found.items()
        if row in live
    ]


def _read_index(reader: NumberedSamples, shard: int) -> pa.Table:
    index = read_index(reader.split.repository.objects, reader.split.table, shard)
    assert index is not None, "only shards with an index are searched"
    return index.table


def _find_rows(digests: pa.ChunkedArray, prefix: str) -> list[tuple[int, str]]:
    """Return row and hexadecimal digits of the digests that begin with `prefix`."""
    # Whole bytes are compared first: few rows are left for the digit that an odd number of them has.
    whole = bytes.fromhex(prefix[: len(prefix) // 2 * 2])
    begins = pc.fill_null(pc.starts_with(digests.cast(pa.binary()), whole), fill_value=False)
    # Not by `pc.indices_nonzero`: that of pyarrow 21 and 22 ends the process for an empty column.
    rows = np.flatnonzero(begins.to_numpy()).tolist()
    values = [(row, digests[row].as_py().hex()) for row in rows]
    return [(row, value) for row, value in values if value.startswith(prefix)]
