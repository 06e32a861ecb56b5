"""Histograms of a data set and of the columns of its samples: a bar is a link that adds a condition to the filter.

They are counted from the shard table, or from a few shards, and once for all pages of a split.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa

from datasvc import drawing
from datasvc.drawing import HistogramBin, Markup, NamedBar
from datasvc.printable import count_text
from datasvc.shards.format.schema import KEY, LABEL, is_blob
from datasvc.shards.query.histogram import MAX_SHARDS, Histogram, is_countable
from datasvc.shards.versions.dataset import DatasetVersion, Split
from datasvc.threads import map_in_threads
from datasvc.ui.web.links import dataset_link, samples_link
from datasvc.ui.web.seen_faults import Failures
from datasvc.ui.web.site import Site

_JOINED: Final = re.compile(r"\((.*)\n\) and (.*)", re.DOTALL)
_AT_ONCE: Final = 2
# As wide as the narrowest column that fits a page of 1280 pixels twice. In a window of 400 pixels the text of such a
# chart has more than 10 pixels, and in the widest column it is as large as that of the page.
CHART_WIDTH: Final = 440
_MAX_COLUMNS: Final = 12
_MAX_BARS: Final = 12  # each is a link, which the keyboard passes on its way to the rows
_MAX_READ_SAMPLES: Final = 100_000
_MAX_READ_BYTES: Final = 64 << 20  # of shards without blobs: these are read almost whole
_MAX_TEXT_BYTES: Final = 1 << 10  # mean size of a sample; the values of longer texts hardly occur twice


class Selection:
    """The conditions that a page's filter consists of, and links that add or remove one.

    Args:
        where: the filter; None: none.
        address: returns the address of the page for a filter.
    """

    def __init__(self, where: str | None, address: Callable[[str | None], str]) -> None:
        self._active = _conditions(where)
        self._address = address

    def has(self, condition: str) -> bool:
        """Return whether the filter has a condition."""
        return condition in self._active

    def added(self, condition: str) -> str | None:
        """Return the filter with another condition."""
        return _join([*self._active, condition])

    def link(self, condition: str) -> str:
        """Return the address of the page with another condition; without it, if the filter has it already."""
        rest = [each for each in self._active if each != condition]
        return self._address(_join(rest) if self.has(condition) else self.added(condition))


def count_columns(
    site: Site,
    dataset: DatasetVersion,
    split: str,
    columns: Sequence[str],
    where: str | None,
    failures: Failures,
    **limits: int,
) -> dict[str, Histogram]:
    """Return the histograms of columns by name.

    Those that cannot be counted, for a mistyped condition or a corrupt shard, are left out and added to `failures`.

    Args:
        site: has the histograms of other pages.
        dataset: the version.
        split: name of the split.
        columns: columns or SQL expressions.
        where: condition that the counted samples satisfy; None: all samples.
        failures: gets the errors.
        limits: `bins` and `max_shards`, as in `histogram_of`.
    """

    def count(column: str) -> Histogram | None:
        with failures.noted():
            return site.splits.histogram(dataset, split, column, where, **limits)
        return None

    counted = map_in_threads(count, columns, _AT_ONCE)
    return {column: each for column, each in zip(columns, counted, strict=True) if each is not None}


def draw_histogram(counted: Histogram, ref: str, split: str) -> dict[str, Any]:
    """Return the picture and the table of a histogram, and what it counts in words.

    Its bars select what all histograms of the page count; a bar that is selected is marked, and its link ends the
    selection. The rows of the table lead to the samples.
    """
    selection = Selection(counted.where, lambda where: f"{dataset_link(ref, split=split, where=where)}#distributions")

    def samples(where: str) -> str:
        return samples_link(ref, split, where=selection.added(where))

    title = f"{counted.column}, {_read_text(counted)}"
    words = {"note": f"Number of samples, {_read_text(counted)}.", "constant": _constant(counted)}
    if counted.kind == "numbers":
        bins = [drawing.HistogramBin(bar.start or 0.0, bar.stop or 0.0, bar.count) for bar in counted.bins]
        links = [
            replace(part, href=selection.link(bar.where), is_selected=selection.has(bar.where))
            for part, bar in zip(bins, counted.bins, strict=True)
        ]
        rows = [replace(part, href=samples(bar.where)) for part, bar in zip(bins, counted.bins, strict=True)]
        unit = "bytes" if counted.is_size else ""
        return {
            **words,
            "picture": drawing.histogram(links, title=title, unit=unit, width=CHART_WIDTH, with_title=False),
            "table": drawing.histogram_table(rows, title=title, unit=unit),
        }
    bars = [
        drawing.NamedBar(bar.label, bar.count, selection.link(bar.where), selection.has(bar.where))
        for bar in counted.bins
    ]
    named = [drawing.NamedBar(bar.label, bar.count, samples(bar.where)) for bar in counted.bins]
    return {
        **words,
        "picture": drawing.bar_chart(bars, title=title, width=CHART_WIDTH, with_title=False),
        "table": drawing.bar_table(named, title=title),
    }


def _join(conditions: Sequence[str]) -> str | None:
    """Return a condition that all of `conditions` satisfy; None if there are none."""
    # The line break ends a comment at the end of a condition that a reader has written.
    return functools.reduce(lambda left, right: f"({left}\n) and {right}", conditions) if conditions else None


def _conditions(where: str | None) -> list[str]:
    """Return the conditions that `_join` has joined."""
    conditions: list[str] = []
    while where is not None and (joined := _JOINED.fullmatch(where)):
        where, last = joined.groups()
        conditions.insert(0, last)
    return conditions if where is None else [where, *conditions]


def _constant(counted: Histogram) -> str | None:
    """Return in words that all counted samples have one value; None if they do not: a picture shows more then."""
    filled = [bar for bar in counted.bins if bar.count]
    if counted.null or counted.other or len(filled) != 1 or counted.where is not None:
        return None
    if counted.kind != "numbers":
        value = filled[0].label
    elif counted.low is None or counted.low != counted.high:
        return None
    else:
        value = drawing.format_quantity(counted.low, "bytes" if counted.is_size else "")
    return f"{value} in {_read_text(counted)}"


def _read_text(counted: Histogram) -> str:
    """Return which samples were counted, such as "the samples of 20 of 4,000 shards"."""
    shards = count_text(counted.num_shards, "shard")
    is_all = counted.read_shards == counted.num_shards
    part = "all samples" if is_all else f"the samples of {counted.read_shards} of {shards}"
    return part if counted.where is None else f"{part} where {counted.where}"


# The heads are counted as the histograms of a data set's page are: from the shard table, or from a few shards. So
# they cost the same for any number of samples, and are counted once for all pages of a split.


@dataclass(frozen=True)
class SampleColumn:
    """A column of a table of samples.

    Attributes:
        name: its name.
        is_number: whether its values are numbers, aligned on the right.
        picture: the histogram in its head; None if it has none.
        note: what its values are, in words: their range, or the number of values that are not drawn.
        counted: which samples the histogram counts, in words; "" if it has none.
    """

    name: str
    is_number: bool
    picture: Markup | None = None
    note: str = ""
    counted: str = ""


def list_sample_columns(
    site: Site,
    dataset: DatasetVersion,
    split: Split,
    where: str | None,
    link: Callable[[str | None], str],
    failures: Failures,
) -> list[SampleColumn]:
    """Return the first 12 columns of a split except the key, with histograms of the samples that satisfy `where`.

    Args:
        site: counts the histograms.
        dataset: version of the split.
        split: the split.
        where: condition that the samples of the table satisfy; None: all samples.
        link: returns the address of the table for a condition; None for all samples.
        failures: gets the errors of histograms, which are then left out.
    """
    fields = [field for field in split.table.sample_schema if field.name != KEY][:_MAX_COLUMNS]
    counted = count_columns(
        site,
        dataset,
        split.name,
        [field.name for field in fields if _has_histogram(split, field)],
        where,
        failures,
        bins=_MAX_BARS,
        max_shards=_choose_num_shards(split),
    )
    selection = Selection(where, link)
    columns = [
        SampleColumn(field.name, _is_number(field.type) and not (field.name == LABEL and bool(split.classes)))
        for field in fields
    ]
    return [
        _with_head(column, counted[column.name], selection) if column.name in counted else column
        for column in columns
    ]


def describe_counted(columns: Sequence[SampleColumn]) -> str:
    """Return which samples the histograms of columns count, in words; "" if no column has one."""
    parts = list(dict.fromkeys(column.counted for column in columns if column.counted))
    if len(parts) < 2:
        return "".join(parts)
    names = (", ".join(column.name for column in columns if column.counted == part) for part in parts)
    return "; ".join(f"{part} for {name}" for part, name in zip(parts, names, strict=True))


def sample_cell(sample: Mapping[str, Any], column: str) -> Any:
    """Return a value of a sample's JSON values, as a table shows it: the class in place of its label."""
    return sample["class"] if column == LABEL and sample["class"] is not None else sample["values"].get(column)


def _with_head(column: SampleColumn, counted: Histogram, selection: Selection) -> SampleColumn:
    is_exact = counted.read_shards == counted.num_shards
    part = (
        "all samples"
        if is_exact
        else f"the samples of {counted.read_shards} of {count_text(counted.num_shards, 'shard')}"
    )
    if not counted.bins:
        return replace(column, note="no values", counted=part)
    if counted.kind == "numbers":
        low, high = (drawing.format_quantity(end) for end in (counted.low, counted.high))
        bins = [
            HistogramBin(
                bar.start or 0.0, bar.stop or 0.0, bar.count, selection.link(bar.where), selection.has(bar.where)
            )
            for bar in counted.bins
        ]
        picture, note = drawing.number_head(bins, title=column.name), low if low == high else f"{low} to {high}"
    else:
        picture, note = _draw_values(counted, selection)
    return replace(column, picture=picture, note=note, counted=part)


def _draw_values(counted: Histogram, selection: Selection) -> tuple[Markup, str]:
    """Return the picture of the most frequent values, and how many samples have others."""
    bars = sorted((bar for bar in counted.bins if bar.count), key=lambda bar: -bar.count)
    shown = [NamedBar(bar.label, bar.count, selection.link(bar.where), selection.has(bar.where)) for bar in bars]
    picture, num_drawn = drawing.value_head(shown, title=counted.column)
    others = counted.other + sum(bar.count for bar in bars[num_drawn:])
    return picture, f"{others:,} with others" if others else ""


def _has_histogram(split: Split, field: pa.Field) -> bool:
    """Return whether a column has a histogram: not blobs, documents, and values that are not counted."""
    if is_blob(field.type) or not is_countable(field.type):
        return False  # the sizes of blobs take the most memory to count; the page of the data set has them
    is_text = pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
    sample_bytes = _mean(split.table.size_bytes, int(split.table.stored_per_shard.sum()))
    return not is_text or _has_blobs(split) or sample_bytes <= _MAX_TEXT_BYTES


def _choose_num_shards(split: Split) -> int:
    """Return how many shards are read for a histogram: 10, or fewer large ones."""
    most = _MAX_READ_SAMPLES / _mean(int(split.table.stored_per_shard.sum()), split.table.num_shards)
    if not _has_blobs(split):  # of a shard with blobs, only the small columns are read
        most = min(most, _MAX_READ_BYTES / _mean(split.table.size_bytes, split.table.num_shards))
    return max(1, min(MAX_SHARDS, int(most)))


def _mean(total: int, count: int) -> float:
    return max(total / max(count, 1), 1.0)


def _has_blobs(split: Split) -> bool:
    return any(is_blob(field.type) for field in split.table.sample_schema)


def _is_number(data_type: pa.DataType) -> bool:
    checks: Sequence[Callable[[pa.DataType], bool]] = (
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_decimal,
        is_blob,
    )
    return any(check(data_type) for check in checks)
