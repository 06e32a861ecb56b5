"""One sample with all its columns, where it is stored, and its duplicates in the same version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datasvc.repository import Repository
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.schema import KEY
from datasvc.shards.query.sample_page import default_split, find_key, summary_to_json
from datasvc.shards.query.sample_reader import NumberedSamples, SamplePlace, SampleSummary
from datasvc.shards.query.split_query import choose_shards
from datasvc.shards.versions.dataset import DatasetVersion, open_dataset
from datasvc.threads import map_in_threads

_READS_AT_ONCE: Final = 8
MAX_DUPLICATES: Final = 100  # that are listed


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
        samples = [sample._asdict() for sample in self.samples]
        return {"samples": samples, "searched_shards": self.searched_shards, "num_shards": self.num_shards}


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
        place = {
            "shard": self.place.shard,
            "shard_digest": self.place.shard_digest,
            "row": self.place.row,
            "sample_digest": self.place.sample_digest,
            "payload_digest": self.place.payload_digest,
        }
        names = {"version": self.version, "split": self.split}
        return names | summary_to_json(self.sample) | {"place": place, "duplicates": self.duplicates.to_json()}


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
            return _in_shard(in_split, shard, payload)

        found += [sample for samples in map_in_threads(search, shards, _READS_AT_ONCE) for sample in samples]
    others = [sample for sample in found if (sample.split, sample.number) != (reader.split.name, number)]
    return Duplicates(others[:MAX_DUPLICATES], searched, num_shards)


def _in_shard(reader: NumberedSamples, shard: int, payload: pa.Scalar) -> list[SampleRef]:
    """Return the live samples of a shard with this payload digest."""
    objects, digest = reader.split.repository.objects, reader.split.table.index(shard)
    assert digest is not None, "only shards with an index are searched"
    index = SampleIndex.decode(objects.read(digest), objects.location(digest)).table
    rows = np.flatnonzero(pc.equal(index.column("payload"), payload).to_numpy())
    live = reader.live_numbers(shard, rows) if len(rows) else {}
    return [SampleRef(reader.split.name, number, index.column(KEY)[row].as_py()) for row, number in live.items()]
