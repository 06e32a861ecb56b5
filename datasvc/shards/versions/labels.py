"""Rules for labels when splits with different class names are combined; pure functions.

A label is an index into the class names of its split. An existing name keeps its index in every later version, and
new names get the next ones, so that a model trained on one version predicts the right names on later ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from datasvc.errors import ConfigError


def combine_classes(head: Sequence[str], new: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return the class names of both sides: those of `head`, then the new ones.

    Args:
        head: class names by label.
        new: lists of class names to add, such as those of several splits.

    Returns:
        The longest of all lists if every other list is a prefix of it; otherwise `head`, then the names that it does
        not have, sorted.

    Raises:
        ConfigError: a list has a name twice.
    """
    lists = [tuple(names) for names in new]
    for names in (tuple(head), *lists):
        duplicates = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if duplicates:
            raise ConfigError(
                f"two classes have the name {duplicates[0]!r}, so their labels cannot be distinguished; rename one"
            )
    # A list that extends all others keeps its order, as its labels are stored that way; sorting would change them.
    longest = max([tuple(head), *lists], key=len)
    if all(longest[: len(names)] == names for names in (tuple(head), *lists)):
        return longest
    return (*head, *sorted({name for names in lists for name in names} - set(head)))


def plan_labels(names: Sequence[str], combined: Sequence[str]) -> dict[int, int]:
    """Return the index in `combined` of each label of `names`; {} if no label changes. `combined` has all `names`."""
    # Equal lists, or names were only appended: no label changes, so no shard is rewritten.
    if tuple(combined[: len(names)]) == tuple(names):
        return {}
    indexes = {name: index for index, name in enumerate(combined)}
    return {label: indexes[name] for label, name in enumerate(names)}


def map_labels(labels: pa.Array, mapping: Mapping[int, int]) -> pa.Array:
    """Return labels mapped to other indexes, of the same type. Null and negative labels, which have no class, stay.

    Raises:
        ConfigError: a label is not in the mapping.
    """
    valid = labels.is_valid().to_numpy(zero_copy_only=False)
    mapped = np.zeros(len(labels), np.int64)
    mapped[valid] = labels.drop_null().to_numpy(zero_copy_only=False)
    targets = np.array([mapping[label] for label in range(len(mapping))], np.int64)
    if (mapped >= len(targets)).any():
        raise ConfigError(
            f"label {mapped.max()} has no class name: expected labels from 0 to {len(targets) - 1}; name all classes"
        )
    has_class = valid & (mapped >= 0)
    mapped[has_class] = targets[mapped[has_class]]
    return pa.array(mapped, mask=~valid).cast(labels.type)


def check_unnamed(label_counts: Mapping[int, int], names: Sequence[str], what: str) -> None:
    """Raise ConfigError if labels without names exceed the class names that they are combined with.

    Args:
        label_counts: number of samples by label, of samples whose labels have no names.
        names: the class names that the labels are combined with.
        what: subject of the message, such as "the added data".
    """
    outside = sorted(label for label in label_counts if label >= len(names))
    if names and outside:
        raise ConfigError(
            f"{what} has labels without class names up to {outside[-1]}, but there are only {len(names)} class "
            "names; give a name to each of its classes"
        )
