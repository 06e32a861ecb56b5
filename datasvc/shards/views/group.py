"""Views grouped by aspect, which are computed once and stored; see `Split.grouped_by_aspect`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from datasvc.errors import ConfigError
from datasvc.shards.format.schema import HEIGHT, WIDTH, measured_among
from datasvc.shards.format.view_table import MAX_GROUP, Grouping
from datasvc.shards.packing.groups import encode_aspects
from datasvc.shards.packing.pack_objects import PackWriter
from datasvc.shards.versions.dataset import Split
from datasvc.shards.views.derive import NUMBER, put_view, read_groups, value_of
from datasvc.shards.views.named import find_stored, save_view


def grouped_by_aspect(split: Split, group: int) -> Split:
    """Return the view of a split that is grouped by aspect; see `Split.grouped_by_aspect`."""
    if type(group) is not int or not 1 <= group <= MAX_GROUP:
        raise ConfigError(f"group is {group!r}; expected an integer from 1 to {MAX_GROUP}")
    if split.packs is not None or split.table.grouping is not None:
        state = "packed" if split.packs is not None else "grouped already"
        raise ConfigError(f"{split.title} is {state}; expected a split or a view without packs and groups")
    if WIDTH not in measured_among(schema := split.table.sample_schema, schema.names):
        raise ConfigError(
            f"{split.title} has no widths and heights, which an ingest measures for the column 'image'; ingest the "
            "images as this column"
        )
    key = f"grouped-{group}-{split.digest[:24]}"
    view = find_stored(split, key)
    if view is None:
        view = _build(split, group)
        save_view(split.repository, key, view, message=f"groups of {split.title}")
    return view


def _build(split: Split, group: int) -> Split:
    table, objects = split.table, split.repository.objects
    codes = encode_aspects(*np.zeros((2, len(split)), np.int64))  # also of purged samples, whose sizes are not known
    for part in read_groups(split, [value_of(split, WIDTH), value_of(split, HEIGHT)], text="grouped_by_aspect"):
        sizes = (part.column(name).fill_null(0).to_numpy().astype(np.int64) for name in ("value0", "value1"))
        codes[part.column(NUMBER).to_numpy()] = encode_aspects(*sizes)
    writer = PackWriter(objects, "aspects")
    for of_shard in np.split(codes, np.cumsum(table.samples_per_shard)[:-1]):
        writer.add(of_shard)
    grouped = replace(table, grouping=Grouping(group, writer.finish()))
    return put_view(split, grouped, f"grouped_by_aspect({group})")
