"""Histograms of a split: of a column, or of any SQL expression; numbers in bins, other values by frequency.

`confusion` counts the pairs of two columns, such as labels before and after a correction, or of two annotators.

Class counts come from the shard table: they are exact and cost nothing. For all else, a bounded number of shards is
read, and the result says how many these are. Ingest distributes samples over shards at random, so some shards
represent a split well; of data that were appended, each part has its share of them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datasvc.errors import ConfigError, NotFoundError
from datasvc.printable import json_value
from datasvc.repository import Repository
from datasvc.shards.format.overlaid_shard import read_values
from datasvc.shards.format.schema import HEIGHT, IMAGE, KEY, LABEL, WIDTH, is_blob, is_text, measured_columns
from datasvc.shards.query.query import choose_shards, open_query, open_sizes, quote_name, quote_text
from datasvc.shards.query.sample_page import default_split
from datasvc.shards.query.sample_reader import NumberedSamples
from datasvc.shards.versions.dataset import Split, open_dataset
from datasvc.shards.versions.describe import count_classes
from datasvc.shards.versions.labels import label_text, sort_pairs
from datasvc.sql_sandbox import confined

MAX_SHARDS: Final = 10  # that a histogram reads
MAX_BINS: Final = 1000
_STEPS: Final = (1, 2, 5)  # bins have one of these widths, times a power of ten
_MAX_EXACT: Final = 1 << 53  # a float has every whole number up to it
# Any other name may be a keyword of SQL, or one of a function such as `user`: it is quoted.
_UNQUOTED: Final = frozenset({LABEL, WIDTH, HEIGHT})


@dataclass(frozen=True)
class Bin:
    """One bar of a histogram.

    Attributes:
        label: text of the bar.
        count: number of samples.
        where: condition that selects these samples, for `read_page`, `datasvc samples` and `datasvc delete`.
        start: first value of the bin; None for a bar of one value that is not a number.
        stop: first value after the bin; None as `start`.
    """

    label: str
    count: int
    where: str
    start: float | None = None
    stop: float | None = None


@dataclass(frozen=True)
class Histogram:
    """Distribution of a column or an expression in a split.

    Attributes:
        version: the version, such as "pets@1".
        split: name of the split.
        column: the column, or the SQL expression.
        where: condition that the counted samples satisfy; None: all samples.
        kind: "numbers" for bins of numbers, "values" for the most frequent values.
        is_size: whether the numbers are sizes of blobs in bytes.
        bins: bars: of numbers in ascending order; of values by label, or the most frequent first.
        other: number of samples with other values than those of `bins`.
        null: number of samples without a value, and with NaN.
        low: smallest number; None for values.
        high: largest number; None for values.
        num_samples: number of samples that were counted.
        read_shards: number of shards that were read; all shards if the counts are exact.
        num_shards: number of shards of the split.
    """

    version: str
    split: str
    column: str
    where: str | None
    kind: str
    is_size: bool
    bins: Sequence[Bin]
    other: int
    null: int
    low: float | None
    high: float | None
    num_samples: int
    read_shards: int
    num_shards: int

    def to_json(self) -> dict[str, Any]:
        """Return the histogram as JSON values, as `datasvc histogram --json` prints them."""
        facts = {name: json_value(value) for name, value in vars(self).items() if name != "bins"}
        return facts | {"bins": [{name: json_value(value) for name, value in vars(bar).items()} for bar in self.bins]}


def histogram(
    repository: Repository,
    ref: str,
    column: str,
    split: str | None = None,
    *,
    bins: int = 30,
    where: str | None = None,
    max_shards: int | None = MAX_SHARDS,
) -> Histogram:
    """Return the distribution of a column of a version.

    Args:
        repository: the repository that stores the version.
        ref: the version.
        column: column of numbers, texts or Booleans, or a SQL expression of them, such as `width / height`. `label`
            counts classes, and the name of a column of blobs their sizes in bytes.
        split: name of the split; None: "train", or the first one if there is no such split.
        bins: maximum number of bars, 1 to 1,000. Bins of numbers have round bounds, so there may be fewer.
        where: SQL condition that the samples must satisfy; None: all samples.
        max_shards: number of shards to read at most, evenly spaced; None: all.

    Raises:
        ConfigError: `bins` or `max_shards` is out of range, DuckDB rejects the SQL, or the values are of a type that
            cannot be counted; the message has the reason.
        NotFoundError, CorruptDataError, UnavailableError: the version or a shard cannot be read.
    """
    chosen = default_split(open_dataset(repository, ref), split)
    return histogram_of(chosen, column, bins=bins, where=where, max_shards=max_shards)


def histogram_of(
    split: Split, column: str, *, bins: int = 30, where: str | None = None, max_shards: int | None = MAX_SHARDS
) -> Histogram:
    """Return the distribution of a column of a split; for arguments and errors, see `histogram`."""
    if not 1 <= bins <= MAX_BINS or (max_shards is not None and max_shards < 1):
        raise ConfigError(f"bins is {bins}, max_shards is {max_shards}; expected 1 to {MAX_BINS}, and 1 or more")
    table = split.table
    facts: dict[str, Any] = {"version": split.dataset, "split": split.name, "column": column, "where": where}
    facts |= {"num_shards": table.num_shards, "is_size": _is_blob(split, column)}
    if column == LABEL and where is None and table.label_counts:
        counted = {"num_samples": table.num_samples, "null": table.num_samples - sum(table.label_counts.values())}
        return _of_classes(split, table.label_counts, bins, facts | counted | {"read_shards": table.num_shards})
    shards = choose_shards(table.num_shards, max_shards).tolist()
    # Values of a column need no SQL of the user.
    is_own = where is None and column in (*split.table.sample_schema.names, f"{WIDTH} / {HEIGHT}")
    read = _read_values if is_own else partial(confined, _read_values)
    values = read(split, column, where, shards)
    facts |= {"num_samples": len(values), "read_shards": len(shards)}
    if column == LABEL and table.label_counts:
        counted = pc.value_counts(values.drop_null()).to_pylist()
        counts = {int(item["values"]): int(item["counts"]) for item in counted}
        return _of_classes(split, counts, bins, {**facts, "null": values.null_count})
    operand = quoted(column, split.table.sample_schema.names)
    expression = f"octet_length({operand})" if _is_blob(split, column) else operand
    if pa.types.is_integer(values.type) or pa.types.is_floating(values.type) or pa.types.is_decimal(values.type):
        return _of_numbers(values, expression, bins, facts)
    return _of_values(values, expression, bins, facts)


def list_columns(split: Split) -> list[str]:
    """Return the columns and expressions that describe a split: classes, sizes of blobs and images, values."""
    schema = split.table.sample_schema
    names = [field.name for field in schema if field.name != KEY and is_countable(field.type)]
    measured = {WIDTH, HEIGHT} & {*measured_columns(schema)}
    aspect = [f"{WIDTH} / {HEIGHT}"] if measured and measured <= set(names) else []
    return sorted([*names, *aspect], key=lambda name: (name != LABEL, name != IMAGE))


def is_countable(data_type: pa.DataType) -> bool:
    """Return whether a column of this type has a histogram: numbers, Booleans, texts, dates and times, blobs."""
    types = pa.types
    if types.is_dictionary(data_type):
        return is_countable(data_type.value_type)
    checks = (
        *(types.is_null, types.is_boolean, types.is_integer, types.is_floating, types.is_decimal),
        *(types.is_string, types.is_large_string, types.is_date, types.is_time, types.is_timestamp, is_blob),
    )
    return any(check(data_type) for check in checks)


def quoted(text: str, columns: Collection[str]) -> str:
    """Return a column or an expression as an operand: `width`, `"order"`, `(width / height)`."""
    if text not in columns:
        # A comment would hide the bracket, so the bracket gets a line of its own.
        return f"({text}\n)" if "--" in text else f"({text})"
    return text if text in _UNQUOTED else quote_name(text)


def plan_edges(low: float, high: float, bins: int, *, is_whole: bool) -> list[float]:
    """Return at most `bins + 1` round, equally spaced edges: the first is at most `low`, the last is above `high`.

    With `is_whole`, for whole numbers, the edges are whole numbers too.
    """
    width = (high - low) / bins or (1.0 if is_whole else abs(low) / 10 or 1.0)
    exponent = math.floor(math.log10(width))
    for power in itertools.count(exponent):
        for step in _STEPS:
            # A division by a power of ten is exact where a product with its inverse is not: 3 / 10, and not 3 * 0.1.
            width = step * 10.0**power if power >= 0 else step / 10.0**-power
            width = max(width, 1.0) if is_whole else width
            first, last = math.floor(low / width), math.floor(high / width) + 1
            if last - first <= bins:
                return [float(f"{number * width:.12g}") for number in range(first, last + 1)]
    raise AssertionError("unreachable: bins become wider without end")


def _read_values(split: Split, column: str, where: str | None, shards: Sequence[int]) -> pa.Array:
    """Return the values of the live samples of some shards that satisfy a condition."""
    if _is_blob(split, column):
        return _read_sizes(split, column, where, shards)
    names = split.table.sample_schema.names
    with open_query(split, shards) as samples:
        samples.where(where)
        operand = quoted(column, names)
        samples.apply(column, lambda: samples.relation.project(f"{operand} AS v"))
        values = samples.fetch(column, lambda relation: relation.to_arrow_table().column("v"))
    return values.combine_chunks() if values.num_chunks != 1 else values.chunk(0)


def _read_sizes(split: Split, column: str, where: str | None, shards: Sequence[int]) -> pa.Array:
    """Return the sizes of blobs without reading them, as DuckDB would do."""
    sizes = _sizes_of_shards(split, column, shards)
    if where is None:
        return sizes
    with open_query(split, shards) as samples:
        samples.where(where)
        numbers = samples.fetch(where, lambda relation: relation.project(samples.number).fetchnumpy())[samples.number]
    counts = split.table.samples_per_shard
    # Numbers count the samples of all shards, but `sizes` has only those of `shards`.
    all_numbers = [np.arange(counts[shard]) + counts[:shard].sum() for shard in shards]
    chosen = np.isin(np.concatenate([np.empty(0, np.int64), *all_numbers]), np.asarray(numbers, np.int64))
    return sizes.filter(pa.array(chosen))


def _sizes_of_shards(split: Split, column: str, shards: Sequence[int]) -> pa.Array:
    """Return the sizes of the blobs of all live samples of some shards."""
    if not split.repository.storage.is_local:
        # A remote file would be read with its blobs; a sample index is small.
        reader = NumberedSamples(split)
        return pa.concat_arrays([pa.nulls(0, pa.int64()), *(reader.blob_sizes(shard, column) for shard in shards)])
    with open_sizes(split, shards) as samples:
        values = samples.scanner([column]).to_reader().read_all().column(column)
    return pa.concat_arrays([pa.nulls(0, pa.int64()), *values.chunks])


def _of_classes(split: Split, counts: Mapping[int, int], bins: int, facts: Mapping[str, Any]) -> Histogram:
    """Return the histogram of the number of samples by label."""
    unnamed = sorted(label for label in counts if not 0 <= label < len(split.classes))
    names = count_classes(counts, split.classes).items()
    bars = [
        Bin(name, count, f"{LABEL} = {label}")
        for label, (name, count) in zip([*range(len(split.classes)), *unnamed], names, strict=bool(counts))
    ]
    # In the order of labels if all are shown: then a class has the same place on every page.
    shown = bars if len(bars) <= bins else sorted(bars, key=lambda bar: -bar.count)[:bins]
    other = sum(counts.values()) - sum(bar.count for bar in shown)
    return Histogram(**{"kind": "values", "null": 0, "low": None, "high": None, **facts}, bins=shown, other=other)


def _of_numbers(values: pa.Array, expression: str, bins: int, facts: Mapping[str, Any]) -> Histogram:
    is_whole = pa.types.is_integer(values.type)
    numbers = values.drop_null().cast(pa.float64(), safe=False).to_numpy()
    null = values.null_count + int(np.isnan(numbers).sum())
    finite = numbers[np.isfinite(numbers)]
    other = len(numbers) - len(finite) - (null - values.null_count)  # infinite
    if not len(finite):
        return Histogram(**facts, kind="numbers", bins=[], other=other, null=null, low=None, high=None)
    low, high = float(finite.min()), float(finite.max())
    edges = plan_edges(low, high, bins, is_whole=is_whole)
    counts = np.bincount(np.searchsorted(edges, finite, side="right") - 1, minlength=len(edges) - 1)
    bars = [
        Bin(
            label=_range_text(start, stop, is_whole=is_whole),
            count=count,
            where=f"{expression} >= {_text(start)} and {expression} < {_text(stop)}",
            start=start,
            stop=stop,
        )
        for start, stop, count in zip(edges, edges[1:], counts.tolist(), strict=False)
    ]
    return Histogram(**facts, kind="numbers", bins=bars, other=other, null=null, low=low, high=high)


def _of_values(values: pa.Array, expression: str, bins: int, facts: Mapping[str, Any]) -> Histogram:
    """Return the most frequent values; of equally frequent ones, the first in alphabetical order."""
    try:
        texts = values.cast(pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        column = facts["column"]
        raise ConfigError(
            f"{column!r} has values of type {values.type}, which cannot be written as text ({error}); expected "
            "numbers, Booleans, texts, dates or times: convert it, for instance with hex() or epoch()"
        ) from error
    counted = [(item["values"], item["counts"]) for item in pc.value_counts(texts.drop_null()).to_pylist()]
    shown = sorted(counted, key=lambda item: (-item[1], item[0]))[:bins]
    # A value of another type, such as a date, is compared as DuckDB writes it.
    operand = expression if is_text(values.type) else f"cast({expression} as varchar)"
    bars = [Bin(text, count, f"{operand} = {quote_text(text)}") for text, count in shown]
    other = len(texts) - texts.null_count - sum(count for _, count in shown)
    return Histogram(**facts, kind="values", bins=bars, other=other, null=texts.null_count, low=None, high=None)


def _is_blob(split: Split, column: str) -> bool:
    schema = split.table.sample_schema
    return column in schema.names and is_blob(schema.field(column).type)


def _range_text(start: float, stop: float, *, is_whole: bool) -> str:
    return _text(start) if is_whole and stop - start == 1 else f"{_text(start)} to {_text(stop)}"


def _text(number: float) -> str:
    return str(int(number)) if number.is_integer() and abs(number) < _MAX_EXACT else repr(number)


def confusion(repository: Repository, ref: str, a: str, b: str) -> dict[str, list[tuple[str, str, int]]]:
    """Return how often each value of a column meets each value of another, by split: two labels, and the samples.

    Labels of a column of integers are shown by class name if the split has class names. The pairs are sorted by
    their number, the most frequent first.

    Raises:
        NotFoundError: there is no such version, or no split has both columns.
        CorruptDataError, UnavailableError: see `read_values`.
    """
    result: dict[str, list[tuple[str, str, int]]] = {}
    objects = repository.objects
    for name, split in open_dataset(repository, ref).items():
        if not {a, b} <= {*split.table.sample_schema.names}:
            continue
        counts: Counter[tuple[str, str]] = Counter()
        live = split.table.samples_per_shard
        for shard in range(split.table.num_shards):
            rows = pa.array(split.stored_rows(shard, np.arange(live[shard])))
            values = read_values(objects, split.table, shard, [a, b]).take(rows)
            texts = ([label_text(each, split.classes) for each in column.to_pylist()] for column in values.columns)
            counts.update(zip(*texts, strict=True))
        result[name] = sort_pairs(counts)
    if not result:
        raise NotFoundError(f"no split of {ref} has both columns {a!r} and {b!r}")
    return result
