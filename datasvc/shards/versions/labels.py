"""Rules for labels when splits with different class names are combined, as pure functions.

Ingest, append and merge number labels by these rules; diff compares labels by them. A label is an index into the
class names of its split. An existing name keeps its index in every later version, and new names get the next ones.
So a model trained on one version predicts the right names on later ones.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.repository import Objects
from datasvc.shards.format.overlaid_shard import read_values
from datasvc.shards.format.schema import LABEL
from datasvc.shards.format.shard_table import ShardTable

CLASS: Final = "class"  # column of conditions and queries that has the class name of each label


def combine_classes(head: Sequence[str], new: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return the class names of existing and new data together.

    Args:
        head: class names of the existing data, by label.
        new: lists of class names to add, such as those of several splits.

    Returns:
        The longest list if all others are prefixes of it; otherwise `head`, followed by the other names, sorted.

    Raises:
        ConfigError: a list has a name twice; or two names differ only in their Unicode form, so that they look alike.
    """
    lists = [tuple(head), *map(tuple, new)]
    for names in lists:
        repeated = sorted(Counter(names) - Counter(set(names)))  # names that occur more than once
        if repeated:
            raise ConfigError(
                f"two classes have the name {repeated[0]!r}, so their labels cannot be distinguished; rename one"
            )
    check_unicode_forms(name for names in lists for name in names)
    longest = longest_list(lists)
    # A list that extends all others keeps its order, because shards store its labels; sorting would renumber them.
    if longest is not None:
        return longest
    all_names = {name for names in lists for name in names}
    return (*head, *sorted(all_names - set(head)))


def check_unicode_forms(names: Iterable[str]) -> None:
    """Raise ConfigError if two different names are equal in the normal form NFC.

    A Mac stores "é" in the name of a folder as two characters (NFD), other systems as one (NFC).
    """
    forms: dict[str, str] = {}
    for name in names:
        other = forms.setdefault(unicodedata.normalize("NFC", name), name)
        if other != name:
            raise ConfigError(
                f"the classes {other!a} and {name!a} are one name in two Unicode forms, which look alike; "
                "give one of them the form of the other, for instance with `convmv -f utf-8 -t utf-8 --nfc`"
            )


def longest_list(lists: Sequence[tuple[str, ...]]) -> tuple[str, ...] | None:
    """Return the longest of some lists of class names if all others are prefixes of it; None otherwise."""
    longest = max(lists, key=len, default=())
    return longest if all(longest[: len(names)] == names for names in lists) else None


def plan_labels(names: Sequence[str], combined: Sequence[str]) -> dict[int, int]:
    """Return the index in `combined` of each label of `names`; {} if no label changes.

    `combined` contains all `names`.
    """
    # If `combined` starts with `names`, no label changes, and no shard is stored again.
    if tuple(combined[: len(names)]) == tuple(names):
        return {}
    indexes = {name: index for index, name in enumerate(combined)}
    return {label: indexes[name] for label, name in enumerate(names)}


def map_labels(labels: pa.Array, mapping: Mapping[int, int]) -> pa.Array:
    """Return the labels changed by a result of `plan_labels`. Null and negative labels (no class) stay unchanged.

    Raises:
        ConfigError: a label is not in the mapping.
    """
    valid = labels.is_valid().to_numpy(zero_copy_only=False)
    # A null label has the value 0 here. The mask makes it null again in the result.
    values = np.zeros(len(labels), np.int64)
    values[valid] = labels.drop_null().to_numpy(zero_copy_only=False)
    targets = np.array([mapping[label] for label in range(len(mapping))], np.int64)
    if (values >= len(targets)).any():
        raise ConfigError(
            f"label {values.max()} has no class name: expected labels from 0 to {len(targets) - 1}; name all classes"
        )
    has_class = valid & (values >= 0)
    values[has_class] = targets[values[has_class]]
    return pa.array(values, mask=~valid).cast(labels.type)


def relabel_batch(batch: pa.RecordBatch, mapping: Mapping[int, int]) -> pa.RecordBatch:
    """Return the batch with its labels mapped by `map_labels`; the same batch if it has no labels."""
    number = batch.schema.get_field_index(LABEL)
    if number < 0:
        return batch
    return batch.set_column(number, batch.schema.field(number), map_labels(batch.column(number), mapping))


def check_unnamed(label_counts: Mapping[int, int], names: Sequence[str], what: str) -> None:
    """Raise ConfigError if labels without names are combined with too few class names, `names`, for them.

    `what` is the subject of the message, such as "the added data".
    """
    outside = sorted(label for label in label_counts if label >= len(names))
    # If there are no class names, labels are plain numbers, and any number is valid.
    if names and outside:
        raise ConfigError(
            f"{what} has labels without class names up to {outside[-1]}, but there are only {len(names)} class "
            "names; give a name to each of its classes"
        )


def with_class(schema: pa.Schema, classes: Sequence[str]) -> pa.Schema:
    """Return a schema with the column `class` for SQL; unchanged without class names, or with such a column."""
    names = {name.lower() for name in schema.names}  # SQL ignores case
    is_named = bool(classes) and LABEL in schema.names and pa.types.is_integer(schema.field(LABEL).type)
    return schema.append(pa.field(CLASS, pa.string())) if is_named and CLASS not in names else schema


def class_of_labels(labels: pa.Array, names: pa.Array) -> pa.Array:
    """Return the class names of labels: `string[n]`, null for a null label or one without a name."""
    is_named = pc.and_(pc.greater_equal(labels, 0), pc.less(labels, len(names)))
    return names.take(pc.if_else(is_named, labels, pa.scalar(None, labels.type)))


def label_text(label: Any, classes: Sequence[str]) -> str:
    """Return the class of a label, or the label as text; "" without a class."""
    if label is None or (isinstance(label, int) and label < 0):
        return ""
    # A column `label` may also hold text or lists, which Python samples and `as_text` keep as they are.
    return classes[label] if isinstance(label, int) and label < len(classes) else str(label)


def sort_pairs(counts: Mapping[tuple[str, str], int]) -> list[tuple[str, str, int]]:
    """Return pairs of labels with the number of their samples, the most frequent first."""
    return [(*pair, count) for pair, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]


def labels_at(objects: Objects, table: ShardTable, shards: Integers, rows: Integers) -> list[str]:
    """Return the classes of samples, or their labels as text, "" for none; for errors, see `read_values`.

    Args:
        objects: objects of the repository.
        table: shard table of the split.
        shards: `int64[n]`, number of the shard of each sample.
        rows: `int64[n]`, row of each sample in the shard's file.
    """
    texts = [""] * len(rows)
    for shard in np.unique(shards).tolist() if LABEL in table.sample_schema.names else ():
        at = np.flatnonzero(shards == shard)
        labels = read_values(objects, table, shard, [LABEL]).column(0).take(pa.array(rows[at])).to_pylist()
        for number, label in zip(at.tolist(), labels, strict=True):
            texts[number] = label_text(label, table.classes)
    return texts


def name_tables(tables: Mapping[str, ShardTable], names: Sequence[str]) -> dict[str, ShardTable]:
    """Return the splits that have labels, with class names; label i belongs to the class `names[i]`.

    Raises:
        ConfigError: no split has labels; a label has no name in `names`; a name is empty or occurs twice; or the
            classes already have names and `names` does not start with them.
    """
    if "" in names or not names:
        raise ConfigError("expected one name per class, none of them empty; give one name per line, label 0 first")
    combine_classes(names, [])  # only for its check that no name occurs twice
    labelled = {split: table for split, table in tables.items() if LABEL in table.sample_schema.names}
    if not labelled:
        raise ConfigError("no split has the column 'label', so there are no classes to name")
    for split, table in labelled.items():
        # Names may be added to a list, but the index of an existing name never changes.
        if tuple(names[: len(table.classes)]) != table.classes:
            raise ConfigError(
                f"the classes of split {split!r} already have names ({', '.join(table.classes[:3])}, ...), which "
                "cannot change because models trained on older versions use them: start the list with these names"
            )
        check_unnamed(table.label_counts, names, f"split {split!r}")  # `names` must cover every label
    return {split: replace(table, classes=tuple(names)) for split, table in labelled.items()}


def class_spread(counts: Sequence[Mapping[int, int]]) -> float | None:
    """Return how much the classes differ between shards: Cramér's V of a chi-square test, corrected for its bias.

    0: the shards are alike, up to chance; 1: a class is in one shard only, or a shard has one class only. The
    correction is that of Bergsma, "A bias-correction for Cramér's V and Tschuprow's T", 2013.

    Args:
        counts: number of samples by label, of each shard.

    Returns:
        A number from 0 to 1; None if there are fewer than two shards with labels or fewer than two classes.
    """
    shards = [shard for shard in counts if shard]
    numbers = np.repeat(np.arange(len(shards)), [len(shard) for shard in shards])
    items = (number for shard in shards for item in shard.items() for number in item)
    labels, found = np.fromiter(items, np.int64, 2 * len(numbers)).reshape(-1, 2).T
    classes = np.unique(labels, return_inverse=True)[1]
    by_shard, by_class = (np.bincount(each, found) for each in (numbers, classes))
    num_shards, num_classes, total = len(by_shard), len(by_class), found.sum()
    if min(num_shards, num_classes) < 2:
        return None
    squares = (found / by_shard[numbers] * found / by_class[classes]).sum() - 1  # chi-square by the number of samples
    by_chance = (num_shards - 1) * (num_classes - 1) / (total - 1)
    sides = [size - (size - 1) ** 2 / (total - 1) for size in (num_shards, num_classes)]
    return round(float(np.sqrt(max(0.0, squares - by_chance) / (min(sides) - 1))), 4) if min(sides) > 1 else None
