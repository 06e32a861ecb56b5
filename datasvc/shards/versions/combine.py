"""Combine splits for append and merge. Shards are shared, not copied, unless their labels or keys must change.

In all functions, `head` is the existing side, such as the newest version, and `new` is the side that is added to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, get_args

import numpy as np
import pyarrow as pa

from datasvc.errors import ConfigError, ConflictError
from datasvc.printable import count_text
from datasvc.repository import Digest, ObjectInfo, Objects
from datasvc.shards.format.digests import blob_views, digest_batch
from datasvc.shards.format.overlaid_shard import OverlaidShard, open_table_shard
from datasvc.shards.format.overlays import Overlays
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.schema import (
    BOX_CLASSES,
    IMAGE,
    KEY,
    LABEL,
    has_compression,
    is_blob,
    parse_box_classes,
    with_compression,
)
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.format.writer import ShardWriter
from datasvc.shards.sources.common.source import prefix_keys
from datasvc.shards.sources.text.tokens import TOKENIZER
from datasvc.shards.versions.deletions import Deletions, Flags, delete_samples, load_deletions, only_samples
from datasvc.shards.versions.keys import CommonKeys, find_common_keys, first_keys
from datasvc.shards.versions.labels import check_unnamed, combine_classes, longest_list, plan_labels, relabel_batch

OnCommon = Literal["fail", "drop", "keep", "replace"]
"""Rule for a key that both the existing and the added samples have.

- fail: raise ConflictError.
- drop: keep one of two equal samples; raise ConflictError if the two differ.
- keep: keep the existing sample.
- replace: take the new sample instead of the existing one.
"""

_WAYS_OUT: Final = (
    "which of two samples with the same key is kept by --on-common (on_common=), or give one side other keys by "
    "--key-prefix (key_prefix=)"
)
# Columns that the added data must have if the data set has them.
_REQUIRED_IF_PRESENT = (KEY, IMAGE, LABEL)


def append_splits(
    objects: Objects,
    head: Mapping[str, ShardTable],
    new: Mapping[str, ShardTable],
    *,
    on_common: OnCommon = "fail",
) -> dict[str, ShardTable]:
    """Return the splits of `head` with those of `new` appended, and the splits that only one side has.

    A class name gets the same index in all splits of the result, unless the splits of `head` number their classes
    differently: then each of them keeps its numbers.

    Raises:
        ConfigError: only one of `head` and a split that it lacks has labels; or see `append_table`.
        ConflictError, CorruptDataError, NotFoundError, UnavailableError: see `append_table`.
    """
    _check_labelled(head, new)
    # None if the splits of `head` number their classes differently.
    classes = longest_list([table.classes for table in head.values()])
    if classes is not None:
        classes = combine_classes(classes, [table.classes for table in new.values()])
    result = dict(head)
    for split, table in new.items():
        if split in head:
            result[split] = append_table(objects, head[split], table, classes=classes, on_common=on_common)
        elif classes and table.classes:
            # A split that only `new` has: its labels must mean the same as in the other splits.
            labels = plan_labels(table.classes, classes)
            result[split] = replace(relabel_shards(objects, table, labels), classes=tuple(classes))
        else:
            result[split] = table
    return result


def _check_labelled(head: Mapping[str, ShardTable], new: Mapping[str, ShardTable]) -> None:
    """Raise ConfigError if only one of `head` and a split that it lacks has labels."""
    is_labelled = any(LABEL in table.sample_schema.names for table in head.values())
    for split, table in new.items():
        # An empty data set accepts any columns. For a split that both sides have, `combine_schemas` compares them.
        if split in head or not head or (LABEL in table.sample_schema.names) == is_labelled:
            continue
        if is_labelled:
            raise ConfigError(
                f"the new split {split!r} has no column {LABEL!r}, but the data set has labels: give its samples "
                "labels, for instance by one folder per class, or ingest it as a separate data set"
            )
        raise ConfigError(
            f"the new split {split!r} has a column {LABEL!r}, but the data set has no labels: ingest it as a "
            "separate data set, or ingest the whole data set again with labels"
        )


def keep_splits(
    objects: Objects,
    head: Mapping[str, ShardTable],
    new: Mapping[str, ShardTable],
    *,
    on_common: OnCommon = "fail",
    keys_are_places: bool = False,
) -> dict[str, ShardTable]:
    """Return `new` without the keys that `head` has in another split, so that a key stays in its split.

    `on_common` applies to these keys in the same way as to keys that both sides have in one split. With "replace",
    the new sample moves to the split of `head` that has the key. If `keys_are_places`, this holds only for keys of
    equal samples: `train/cat/1.jpg` and `val/cat/1.jpg` are usually two pictures. Raise what `append_table` raises.
    """
    result = dict(new)
    pairs = [(split, other) for split in new for other in head if other != split]
    for split, other in pairs:
        common = find_common_keys(objects, head[other], result[split])
        if keys_are_places and len(common):
            common = common.take(np.flatnonzero(common.equal))
        if not len(common):
            continue
        _check_common(common, on_common, f" (in {other!r} of the data set, in {split!r} of the added data)")
        rows = common.b.by_shard()  # in `find_common_keys`, `a` is the first table and `b` the second
        if on_common == "replace":
            moved = only_samples(objects, result[split], rows)
            # If `new` has the key in `other` too, that sample is kept instead of the moved one.
            present = result.get(other)
            result[other] = moved if present is None else append_table(objects, present, moved, on_common="keep")
        result[split] = delete_samples(objects, result[split], rows)
    # A new split that has lost all its samples is left out.
    return {split: table for split, table in result.items() if table.num_samples or split in head}


def append_table(
    objects: Objects,
    head: ShardTable,
    new: ShardTable,
    *,
    classes: Sequence[str] | None = None,
    on_common: OnCommon = "fail",
) -> ShardTable:
    """Return one split with the samples of `head` followed by those of `new`. Only changed objects are stored.

    Args:
        objects: objects of the repository that stores both.
        head: the existing split. In a column that only one side has, the samples of the other side become null.
        new: the added split; its labels are renumbered to the class names of the result.
        classes: class names of the result, which start with those of `head`; None for `combine_classes` of both.
        on_common: rule for keys that both sides have.

    Raises:
        ConfigError: a column has two types; `new` lacks a column that `head` requires; labels without
            names are too large for the class names of the other side.
        ConflictError: both sides have a key, and `on_common` does not resolve it (the message lists up to ten).
        CorruptDataError, NotFoundError, UnavailableError: a shard or its sample index cannot be read.
    """
    if on_common not in get_args(OnCommon):
        raise ConfigError(f"on_common is {on_common!r}; expected one of {', '.join(get_args(OnCommon))}")
    schema = combine_schemas(head.sample_schema, new.sample_schema)
    class_names = combine_classes(head.classes, [new.classes]) if classes is None else tuple(classes)
    if not (head.classes or new.classes):
        class_names = ()  # class names of other splits do not apply to labels that have no names
    assert class_names[: len(head.classes)] == head.classes, (class_names, head.classes)
    for table, what in ((head, "the data set"), (new, "the added data")):
        if not table.classes:
            check_unnamed(table.label_counts, class_names, what)
    if new.classes:
        new = relabel_shards(objects, new, plan_labels(new.classes, class_names))
    head, new = _resolve_common(objects, head, new, on_common)
    return _concatenate(objects, replace(head, sample_schema=schema, classes=class_names), new)


def combine_schemas(head: pa.Schema, new: pa.Schema) -> pa.Schema:
    """Return the columns of both sides, those of `head` first; a column that one side lacks becomes nullable.

    Raises:
        ConfigError: a column has two types; `new` lacks `key`, `image` or `label`, which `head` has; `new` has
            labels, but `head` has none; the tokens of both sides were made by different tokenizers; or the boxes of
            both sides have different classes.
    """
    tokenizers = [(schema.metadata or {}).get(TOKENIZER) for schema in (head, new)]
    if None not in tokenizers and tokenizers[0] != tokenizers[1]:
        digests = [(tokenizer or b"").decode() for tokenizer in tokenizers]
        raise ConfigError(
            f"the data set's tokens were made by the tokenizer {digests[0][:12]}..., those of the added "
            f"data by {digests[1][:12]}...; ingest it with the same --tokenizer"
        )
    classes = [(schema.metadata or {}).get(BOX_CLASSES) for schema in (head, new)]
    if None not in classes and classes[0] != classes[1]:
        # Labels of boxes are numbers in lists, which are not renumbered as the column `label` is.
        names = [list(parse_box_classes(each)) for each in classes]
        raise ConfigError(
            f"the boxes of the data set have the classes {names[0]}, those of the added data {names[1]}; ingest it "
            "with the same list of classes, or as a separate data set"
        )
    missing = [name for name in _REQUIRED_IF_PRESENT if name in head.names and name not in new.names]
    if missing:
        raise ConfigError(
            f"the added data has no column {missing[0]!r}, which every sample of the data set has: add it, or ingest "
            "the data as a separate data set"
        )
    # A split without any column accepts labels.
    if LABEL in new.names and LABEL not in head.names and len(head.names):
        raise ConfigError(
            f"the added data has a column {LABEL!r}, but the data set has no labels: ingest it as a separate data "
            "set, or ingest the whole data set again with labels"
        )
    fields = []
    only_new = [name for name in new.names if name not in head.names]
    for name in (*head.names, *only_new):
        sides = [schema.field(name) for schema in (head, new) if name in schema.names]
        if len(sides) == 2 and not sides[0].type.equals(sides[1].type):
            raise ConfigError(
                f"column {name!r} is {sides[0].type} in the data set and {sides[1].type} in the added data; convert "
                f"the added data to {sides[0].type}"
            )
        nullable = len(sides) == 1 or any(side.nullable for side in sides)
        fields.append(sides[0].with_nullable(nullable))
    box_classes = classes[0] or classes[1]
    added = {BOX_CLASSES: box_classes} if box_classes else {}
    combined = pa.schema(fields, metadata={**(head.metadata or {}), **added} or None)
    return with_compression(combined, compressed=True) if has_compression(new) else combined


def relabel_shards(objects: Objects, table: ShardTable, labels: Mapping[int, int]) -> ShardTable:
    """Return the split with its labels renumbered by `labels` ({}: no label changes). Class names are not changed.

    Shards whose labels stay the same are shared. The others are stored again, with their sample indexes.

    Raises:
        ConfigError: a sample has a label that is not in `labels`.
        CorruptDataError, NotFoundError, UnavailableError: a shard cannot be read.
    """
    if not labels or LABEL not in table.sample_schema.names:
        return table

    def relabel(batch: pa.RecordBatch) -> pa.RecordBatch:
        if LABEL not in batch.schema.names:
            return batch
        relabelled = relabel_batch(batch, labels)
        return batch if relabelled.column(LABEL).equals(batch.column(LABEL)) else relabelled

    counts: Counter[int] = Counter()
    for label, count in table.label_counts.items():
        counts[labels.get(label, label)] += count
    return replace(_rewrite_shards(objects, table, relabel), label_counts=dict(sorted(counts.items())))


def prefix_shards(objects: Objects, table: ShardTable, prefix: str) -> ShardTable:
    """Return the split with `prefix` before each key; its shards are stored again, with their sample indexes.

    Raises:
        CorruptDataError, NotFoundError, UnavailableError: a shard cannot be read.
    """
    return _rewrite_shards(objects, table, lambda batch: prefix_keys(batch, prefix)) if prefix else table


def _rewrite_shards(
    objects: Objects, table: ShardTable, change: Callable[[pa.RecordBatch], pa.RecordBatch]
) -> ShardTable:
    """Return the split with `change` applied to its batches; `change` returns a batch itself if it stays the same."""
    written = [_rewrite_shard(objects, table, number, change) for number in range(table.num_shards)]
    changed = table.with_column("digest", [bytes.fromhex(info.digest) for info, _ in written])
    changed = changed.with_column("bytes", [info.size_bytes for info, _ in written])
    # Shards with an overlay were all written again, with its values.
    changed = changed.with_overlays(np.full(table.num_shards, -1), Overlays())
    redacted = {
        info.digest: each if info == old else replace(each, shard=info, index=index or each.index, in_table=True)
        for (info, index), old in zip(written, table.shards(), strict=True)
        if (each := table.redacted.get(old.digest)) is not None
    }
    changed = replace(changed, redacted=redacted)
    return changed.with_column("index", [bytes.fromhex(index) if index else None for _, index in written])


def _rewrite_shard(
    objects: Objects, table: ShardTable, number: int, change: Callable[[pa.RecordBatch], pa.RecordBatch]
) -> tuple[ObjectInfo, Digest | None]:
    """Return the shard and its sample index (None: it has none); if no batch changes, those that are stored."""
    info = table.shard(number)
    shard = open_table_shard(objects, table, number)
    shard.check_texts()
    stored = list(shard.batches)
    batches = [change(batch) for batch in stored]
    if not isinstance(shard, OverlaidShard) and all(new is old for new, old in zip(batches, stored, strict=True)):
        return info, table.index(number)
    return write_shard(objects, shard.schema, batches)


def fold_overlays(objects: Objects, table: ShardTable) -> ShardTable:
    """Return the split with the values of its overlays in shards, of which those with an overlay are stored again.

    Raises:
        CorruptDataError, NotFoundError, UnavailableError: a shard or an overlay cannot be read.
    """
    return _rewrite_shards(objects, table, lambda batch: batch)


def write_shard(objects: Objects, schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> tuple[ObjectInfo, Digest]:
    """Store `batches` as a shard with a sample index; return the object of the shard and the digest of the index."""
    blobs = [field.name for field in schema if is_blob(field.type)]
    keys: list[str] = []
    sample_digests: list[bytes] = []
    payload_digests: list[bytes] = []
    with objects.writing() as sink, ShardWriter(sink, schema) as writer:
        for batch in batches:
            views: dict[str, Any] = {name: blob_views(batch.column(name)) for name in blobs}
            # `as_one` keeps the division of the shard into batches.
            writer.append_columns(views, batch.drop_columns(blobs), as_one=True)
            digests = digest_batch(batch)
            keys += batch.column(KEY).to_pylist()
            sample_digests += digests[0]
            payload_digests += digests[1]
    index = SampleIndex.build(keys, sample_digests, payload_digests, writer.layout)
    return sink.info, objects.put(index.encode()).digest


def _resolve_common(
    objects: Objects, head: ShardTable, new: ShardTable, on_common: OnCommon
) -> tuple[ShardTable, ShardTable]:
    """Return both sides after each common key was deleted from one side, according to `on_common`."""
    common = find_common_keys(objects, head, new)
    if not len(common):
        return head, new
    _check_common(common, on_common)
    if on_common == "replace":
        # The side that loses the keys gets deletion bitmaps; no shard is stored again.
        return delete_samples(objects, head, common.a.by_shard()), new
    return head, delete_samples(objects, new, common.b.by_shard())


def _check_common(common: CommonKeys, on_common: OnCommon, where: str = "") -> None:
    """Raise ConflictError if `on_common` does not resolve the common keys."""
    if on_common == "fail":
        raise ConflictError(
            f"{count_text(len(common), 'key is', 'keys are')} on both sides{where}: {first_keys(common.keys)}; "
            f"choose {_WAYS_OUT}"
        )
    if on_common == "drop" and not common.equal.all():
        unequal = common.keys.filter(pa.array(~common.equal))
        raise ConflictError(
            f"{count_text(len(unequal), 'key is', 'keys are')} on both sides with different samples{where}: "
            f"{first_keys(unequal)}; choose "
            f"{_WAYS_OUT}"
        )


def _concatenate(objects: Objects, head: ShardTable, new: ShardTable) -> ShardTable:
    """Return the shards of `head`, then those of `new`, with the deletions of both."""
    flags: dict[int, Flags] = {}
    # The shards of `new` are numbered after those of `head`.
    for first_number, table in ((0, head), (head.num_shards, new)):
        deletions = load_deletions(objects, table)
        flags |= {first_number + shard: deletions.flags(shard) for shard in deletions.shards.tolist()}
    # The overlays of `new` are counted after those of `head`.
    added = new.overlay_numbers
    numbers = np.concatenate([head.overlay_numbers, np.where(added < 0, -1, added + head.overlays.num_shards)])
    plain = [table.with_overlays(table.overlay_numbers, Overlays()) for table in (head, new)]
    joined = replace(
        head,
        # The metadata describes the old tables; `ShardTable.encode` writes that of the result.
        rows=pa.concat_tables([table.rows.replace_schema_metadata() for table in plain]),
        label_counts=_sum_counts(head, new, "label_counts", LABEL),
        image_kinds=_sum_counts(head, new, "image_kinds", IMAGE),
        deletions=objects.put(Deletions.build(flags).encode()).digest if flags else None,
        redacted={**head.redacted, **new.redacted},
    )
    return joined.with_overlays(numbers, Overlays((*head.overlays.groups, *new.overlays.groups)))


def _sum_counts(head: ShardTable, new: ShardTable, counts: str, column: str) -> dict[Any, int]:
    """Return the sums of a count, such as "label_counts"; {} if one side has the column but no counts of it."""
    for table in (head, new):
        # A sum over some of the samples would be mistaken for the count of all.
        if column in table.sample_schema.names and table.num_samples and not getattr(table, counts):
            return {}
    total = Counter(getattr(head, counts)) + Counter(getattr(new, counts))
    return dict(sorted(total.items()))
