"""Histograms of pages: their bars are links that add a condition to the filter of the page."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from datasvc import drawing
from datasvc.printable import count_text
from datasvc.shards.query.histogram import Histogram
from datasvc.shards.versions.dataset import DatasetVersion
from datasvc.threads import map_in_threads
from datasvc.ui.web.links import dataset_link, samples_link
from datasvc.ui.web.seen_faults import Failures
from datasvc.ui.web.site import Site

_JOINED: Final = re.compile(r"\((.*)\n\) and (.*)", re.DOTALL)
_AT_ONCE: Final = 2


# As wide as the narrowest column that fits a page of 1280 pixels twice. In a window of 400 pixels the text of such a
# chart has more than 10 pixels, and in the widest column it is as large as that of the page.
CHART_WIDTH: Final = 440


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
