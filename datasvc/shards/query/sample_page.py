"""Pages of samples: by number, or those that satisfy a SQL condition, or sorted; and the sample of a key.

A page never reads more than `max_shards` shards, so its cost does not grow with the split. The result says how many
shards were searched, and where to continue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from datasvc.errors import ConfigError, NotFoundError
from datasvc.printable import json_value
from datasvc.repository import Repository
from datasvc.shards.format.schema import KEY
from datasvc.shards.query.query import choose_shards, open_query
from datasvc.shards.query.sample_reader import NumberedSamples, SampleSummary
from datasvc.shards.versions.dataset import DatasetVersion, Split, open_dataset
from datasvc.sql_sandbox import confined

PAGE_SAMPLES: Final = 100
MAX_SHARDS: Final = 64  # that one page searches
_USUAL_SPLIT: Final = "train"


@dataclass(frozen=True)
class SamplePage:
    """Some samples of a split.

    Attributes:
        version: the version, such as "pets@1".
        split: name of the split.
        where: condition that the samples satisfy; None: all samples.
        order: SQL terms by which the samples are sorted; None: by number.
        start: as requested, see `read_page`.
        samples: the samples.
        num_samples: number of live samples of the split, whatever the condition.
        searched_shards: number of shards that were searched; for a page by number, all shards.
        num_shards: number of shards of the split.
        next_start: `start` of the next page; None if there is none.
    """

    version: str
    split: str
    where: str | None
    order: str | None
    start: int
    samples: Sequence[SampleSummary]
    num_samples: int
    searched_shards: int
    num_shards: int
    next_start: int | None

    def to_json(self) -> dict[str, Any]:
        """Return the page as JSON values, as `datasvc samples --json` prints them."""
        return vars(self) | {"samples": [summary_to_json(sample) for sample in self.samples]}


def summary_to_json(sample: SampleSummary) -> dict[str, Any]:
    """Return a sample as JSON values; a blob is `{"bytes": size}`."""
    values = {name: json_value(value) for name, value in sample.values.items()}
    blobs = {name: {"bytes": size} for name, size in sample.blob_bytes.items()}
    return {"number": sample.number, "key": sample.key, "class": sample.class_name, "values": values | blobs}


def read_page(
    repository: Repository,
    ref: str,
    split: str | None = None,
    *,
    where: str | None = None,
    order: str | None = None,
    start: int = 0,
    count: int = PAGE_SAMPLES,
    max_shards: int | None = MAX_SHARDS,
) -> SamplePage:
    """Return a page of a version's samples, without their blobs.

    Args:
        repository: the repository that stores the version.
        ref: the version.
        split: name of the split; None: "train", or the first one if there is no such split.
        where: SQL condition in DuckDB's dialect, such as `class = 'cat' and width < 100`.
        order: SQL terms to sort by, such as `width desc`. If the split has more shards than `max_shards`, only the
            samples of `max_shards` shards, evenly spaced, are sorted.
        start: number of the first sample to consider; with `order`, number of samples of the sorted result to skip.
        count: maximum number of samples, at least 1.
        max_shards: with `where` or `order`, number of shards to search at most; None: no limit.

    Raises:
        ConfigError: `start` or `count` is out of range, or DuckDB rejects the SQL; the message has its reason.
        NotFoundError, CorruptDataError, UnavailableError: the version or a shard cannot be read.
    """
    reader = NumberedSamples(default_split(open_dataset(repository, ref), split))
    return page_of(reader, where=where, order=order, start=start, count=count, max_shards=max_shards)


def page_of(
    reader: NumberedSamples,
    *,
    where: str | None = None,
    order: str | None = None,
    start: int = 0,
    count: int = PAGE_SAMPLES,
    max_shards: int | None = MAX_SHARDS,
) -> SamplePage:
    """Return a page of the samples that `reader` reads; for arguments and errors, see `read_page`."""
    if start < 0 or count < 1 or (max_shards is not None and max_shards < 1):
        raise ConfigError(
            f"start is {start}, count is {count}, max_shards is {max_shards}; expected 0 or more for start, and 1 or "
            "more for the others"
        )
    split, num_shards = reader.split, reader.split.table.num_shards
    searched = num_shards
    if where is None and order is None:
        numbers = list(range(min(start, len(split)), min(start + count, len(split))))
        next_start = start + count if start + count < len(split) else None
    elif order is None:
        assert where is not None
        numbers, next_start, searched = _find_from(reader, where, start, count, max_shards)
    else:
        shards = choose_shards(num_shards, max_shards)
        searched = len(shards)
        numbers = confined(_find, split, shards.tolist(), where, order, start, count + 1)
        next_start = start + count if len(numbers) > count else None
    return SamplePage(
        version=split.dataset,
        split=split.name,
        where=where,
        order=order,
        start=start,
        samples=reader.summaries(numbers[:count]),
        num_samples=len(split),
        searched_shards=searched,
        num_shards=num_shards,
        next_start=next_start,
    )


def no_page(reader: NumberedSamples, *, where: str | None = None, order: str | None = None) -> SamplePage:
    """Return a page without samples, for a condition that cannot be evaluated or a key that is not there."""
    split = reader.split
    num_shards = split.table.num_shards
    return SamplePage(split.dataset, split.name, where, order, 0, (), len(split), 0, num_shards, None)


def find_numbers(split: Split, where: str, count: int) -> list[int]:
    """Return the numbers of the first samples of a split that satisfy a condition; for errors, see `read_page`."""
    return _find(split, range(split.table.num_shards), where, None, 0, count)


def find_key(reader: NumberedSamples, key: str) -> int:
    """Return the number of the sample with a key; for errors, see `search_key`.

    Raises NotFoundError if the split has no such key.
    """
    number = search_key(reader, key)
    if number is None:
        split = reader.split
        raise NotFoundError(
            f"{split.dataset}/{split.name} has no sample with the key {key!r}; keys are compared exactly"
        )
    return number


def search_key(reader: NumberedSamples, key: str) -> int | None:
    """Return the number of the sample with a key; None if the split has no such key.

    Reads the keys of one shard after the other until it is found.

    Raises:
        NotFoundError, CorruptDataError, UnavailableError: a shard cannot be read.
    """
    split = reader.split
    with open_query(split, range(split.table.num_shards)) as samples:
        samples.equals(KEY, key)
        columns = samples.relation.limit(1).project(samples.number)
        found = samples.fetch(key, lambda _: columns.fetchnumpy())[samples.number]
    return int(found[0]) if len(found) else None


def default_split(dataset: DatasetVersion, split: str | None) -> Split:
    """Return the named split; for None, "train" or the first one. Raise NotFoundError if there is none."""
    if split is None and len(dataset) and _USUAL_SPLIT not in dataset:
        split = next(iter(dataset))
    return dataset[split or _USUAL_SPLIT]


def _find_from(
    reader: NumberedSamples, where: str, start: int, count: int, max_shards: int | None
) -> tuple[list[int], int | None, int]:
    """Return the first samples from `start` on that satisfy a condition, `next_start`, and the shards searched."""
    first, num_shards = reader.shard_of(start), reader.split.table.num_shards
    stop = num_shards if max_shards is None else min(first + max_shards, num_shards)
    shards = range(first, stop)
    numbers = confined(_find, reader.split, shards, where, None, start, count + 1)
    if len(numbers) > count:
        return numbers, numbers[count], len(shards)
    return numbers, reader.first_number(stop) if stop < num_shards else None, len(shards)


def _find(
    split: Split, shards: Sequence[int], where: str | None, order: str | None, start: int, count: int
) -> list[int]:
    """Return the numbers of samples of some shards; `start` is as in `read_page`."""
    with open_query(split, shards) as samples:
        samples.where(where)
        if order is None:
            # DuckDB keeps the order of the samples, and ends the scan when it has enough of them.
            samples.where(f"{samples.number} >= {start}" if start else None)
        else:
            samples.order(order)
        offset = start if order is not None else 0
        columns = samples.relation.limit(count, offset).project(samples.number)
        found = samples.fetch(where or order or "", lambda _: columns.fetchnumpy())
    return [int(number) for number in found[samples.number]]
