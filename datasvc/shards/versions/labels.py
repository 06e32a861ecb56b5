"""Pure: what labels mean when the class names of two splits meet.

A label is an index into its split's class names. Names that are there keep their index for ever, new ones follow, so
that a model trained on one version still says the right name on the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from datasvc.errors import ConfigError


def combine_classes(head: Sequence[str], new: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return the class names of both: those of `head`, then new ones.

    Args:
        head: class names, index by index.
        new: lists of class names that come together, such as those of several splits.

    Returns:
        The longest of `new` where it starts with `head` and covers the others; else `head`, then the names that it
        lacks, sorted.

    Raises:
        ConfigError: a list has a name twice.
    """
    lists = [tuple(names) for names in new]
    for names in (tuple(head), *lists):
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ConfigError(
                f"two classes have the name {twice[0]!r}: their labels could not be told apart; rename one"
            )
    longest = max([tuple(head), *lists], key=len)
    if all(longest[: len(names)] == names for names in (tuple(head), *lists)):
        return longest
    return (*head, *sorted({name for names in lists for name in names} - set(head)))


def plan_labels(names: Sequence[str], combined: Sequence[str]) -> dict[int, int]:
    """Return where each label of `names` goes in `combined`, which has all of them; {} where all stay."""
    if tuple(combined[: len(names)]) == tuple(names):
        return {}
    places = {name: place for place, name in enumerate(combined)}
    return {label: places[name] for label, name in enumerate(names)}


def map_labels(labels: pa.Array, mapping: Mapping[int, int]) -> pa.Array:
    """Return labels mapped to other indexes, of the same type; null and negative ones, which name no class, stay.

    Raises:
        ConfigError: a label has no place in the mapping.
    """
    valid = labels.is_valid().to_numpy(zero_copy_only=False)
    mapped = np.zeros(len(labels), np.int64)
    mapped[valid] = labels.drop_null().to_numpy(zero_copy_only=False)
    targets = np.array([mapping[label] for label in range(len(mapping))], np.int64)
    if (mapped >= len(targets)).any():
        raise ConfigError(f"label {mapped.max()} has no class name: the classes are numbered 0 to {len(targets) - 1}")
    named = valid & (mapped >= 0)
    mapped[named] = targets[mapped[named]]
    return pa.array(mapped, mask=~valid).cast(labels.type)


def check_unnamed(label_counts: Mapping[int, int], names: Sequence[str], what: str) -> None:
    """Raise ConfigError where labels without names would be read as class names that do not exist.

    Args:
        label_counts: of samples whose labels have no names.
        names: the class names that they are put together with.
        what: they belong to, for the message.
    """
    outside = sorted(label for label in label_counts if label >= len(names))
    if names and outside:
        raise ConfigError(
            f"{what} has labels without class names up to {outside[-1]}, and there are {len(names)} classes to put "
            "them together with; give it the names of its classes"
        )
