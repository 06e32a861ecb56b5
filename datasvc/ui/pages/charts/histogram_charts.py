"""Histograms of a data set's page: their bars are links that add a condition to the filter of the page."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from datasvc import drawing
from datasvc.printable import count_text
from datasvc.shards.query.histogram import Histogram
from datasvc.ui.web.links import dataset_link, samples_link

_JOINED: Final = re.compile(r"\((.*)\n\) and (.*)", re.DOTALL)


def draw_histogram(counted: Histogram, ref: str, split: str) -> dict[str, Any]:
    """Return the picture and the table of a histogram.

    Its bars select what all histograms of the page count; a bar that is selected is marked, and its link ends the
    selection. The rows of the table lead to the samples.
    """
    active = _conditions(counted.where)

    def selection(where: str) -> str:
        rest = [condition for condition in active if condition != where]
        joined = _join(rest if where in active else [*active, where])
        return f"{dataset_link(ref, split=split, where=joined)}#distributions"

    def samples(where: str) -> str:
        return samples_link(ref, split, where=_join([*active, where]))

    title = f"{counted.column}, {_read_text(counted)}"
    if counted.kind == "numbers":
        bins = [drawing.HistogramBin(bar.start or 0.0, bar.stop or 0.0, bar.count) for bar in counted.bins]
        links = [
            replace(part, href=selection(bar.where), is_selected=bar.where in active)
            for part, bar in zip(bins, counted.bins, strict=True)
        ]
        rows = [replace(part, href=samples(bar.where)) for part, bar in zip(bins, counted.bins, strict=True)]
        unit = "bytes" if counted.is_size else ""
        return {
            "picture": drawing.histogram(links, title=title, unit=unit),
            "table": drawing.histogram_table(rows, title=title, unit=unit),
        }
    bars = [drawing.NamedBar(bar.label, bar.count, selection(bar.where), bar.where in active) for bar in counted.bins]
    named = [drawing.NamedBar(bar.label, bar.count, samples(bar.where)) for bar in counted.bins]
    return {
        "picture": drawing.bar_chart(bars, title=title),
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


def _read_text(counted: Histogram) -> str:
    """Return how many samples were counted, such as "500,000 samples from 20 of 4,000 shards"."""
    shards = count_text(counted.num_shards, "shard")
    part = "all samples" if counted.read_shards == counted.num_shards else f"{counted.read_shards} of {shards}"
    return part if counted.where is None else f"{part} where {counted.where}"
