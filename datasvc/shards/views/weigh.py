"""Weights of views: from a column, an array, or by class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from datasvc.errors import ConfigError
from datasvc.printable import count_text
from datasvc.shards.format.schema import LABEL
from datasvc.shards.versions.dataset import Split
from datasvc.shards.versions.keys import first_keys
from datasvc.shards.versions.weights import MAX_WEIGHT
from datasvc.shards.views.derive import NUMBER, ViewBuilder, read_groups, value_of

Floats = npt.NDArray[np.float64]


def weighted(
    split: Split, column: str | None, weights: Sequence[float] | npt.NDArray[Any] | Mapping[str | int, float] | None
) -> Split:
    """Return a weighted view; see `Split.weighted`."""
    if (column is None) == (weights is None):
        raise ConfigError("give the weights either as a column or as weights, not both or neither")
    if column is not None:
        return _weigh(split, column, f"weighted({column})", lambda group: _numbers(group.column("value0"), column))
    if isinstance(weights, Mapping):
        by_label = _by_label(split, weights)
        listed = ", ".join(f"{name}: {weight:g}" for name, weight in zip(weights, by_label.values(), strict=True))
        return _weigh(split, LABEL, f"weighted({listed})", lambda group: _look_up(group.column("value0"), by_label))
    array = _floats(weights)
    if array.shape != (len(split),):
        raise ConfigError(
            f"the weights have the shape {array.shape}; {split.title} has {count_text(len(split), 'sample')}"
        )
    return _weigh(split, None, "weighted(array)", lambda group: array[group.column(NUMBER).to_numpy()])


def balanced(split: Split, column: str, strength: float) -> Split:
    """Return a view whose classes are served more evenly; see `Split.balanced`."""
    if not 0 <= strength <= 1:
        raise ConfigError(f"the strength is {strength}; expected 0 (as it is) to 1 (equal shares)")
    counts: Counter[Any] = Counter()
    for group in read_groups(split, [value_of(split, column)], text=column):
        counted = pc.value_counts(group.column("value0")).to_pylist()
        counts.update({each["values"]: each["counts"] for each in counted})
    if None in counts:
        raise ConfigError(
            f"{count_text(counts[None], 'sample')} of {split.title} have no value in {column!r}, so they are in no "
            "class; leave them out first, with where()"
        )
    weights = {value: float(count) ** -strength for value, count in counts.items()}
    step = f"balanced({column}, {strength:g})"
    return _weigh(split, column, step, lambda group: _look_up(group.column("value0"), weights))


def _weigh(split: Split, column: str | None, step: str, weights_of: Callable[[pa.Table], Floats]) -> Split:
    """Return the view with the weights that a function gives for groups of samples with the value of a column."""
    if split.table.weights:
        raise ConfigError(f"{split.title} has weights already; weigh the view that it was made from")
    expressions = [] if column is None else [value_of(split, column)]
    largest, is_whole = 0.0, True
    # Two passes: the scale of all weights depends on the largest.
    for group in read_groups(split, expressions, text=step):
        weights = weights_of(group)
        is_wrong = ~(np.isfinite(weights) & (weights >= 0))
        if is_wrong.any():
            first = int(np.flatnonzero(is_wrong)[0])
            raise ConfigError(
                f"{step}: sample {group.column(NUMBER)[first].as_py()} of {split.title} has the weight "
                f"{weights[first]}; expected finite numbers of at least 0"
            )
        largest = max(largest, float(weights.max(initial=0)))
        is_whole = is_whole and bool((weights == np.floor(weights)).all())
    if largest == 0:
        raise ConfigError(f"{step}: all weights of {split.title} are 0, so no sample would be served")
    builder = ViewBuilder(split, step)
    for group in read_groups(split, expressions, text=step):
        weights = weights_of(group)
        # The quotient comes first: a factor for weights such as 1e-304 would be infinite.
        scaled = weights if is_whole and largest <= MAX_WEIGHT else weights / largest * MAX_WEIGHT
        # A small weight is not 0: only a weight of 0 leaves a sample out.
        stored = np.where(weights > 0, np.maximum(1, np.rint(scaled)), 0).astype(np.int64)
        builder.add(group.filter(pa.array(stored > 0)), stored[stored > 0])
    return builder.finish()


def _floats(weights: Any) -> Floats:
    try:
        return np.asarray(weights, np.float64)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of torch with a gradient
        raise ConfigError(f"the weights are not all numbers: {error}") from error


def _numbers(values: pa.ChunkedArray, column: str) -> Floats:
    """Return a column of numbers; NaN for a null."""
    kind = values.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise ConfigError(f"the column {column!r} is {kind}, and weights are numbers")
    return np.asarray(values.cast(pa.float64(), safe=False).fill_null(np.nan).to_numpy(), np.float64)


def _by_label(split: Split, weights: Mapping[str | int, float]) -> dict[Any, float]:
    """Return weights by label, from weights by label or by name of the class."""
    by_label: dict[Any, float] = {}
    for name, weight in zip(weights, _floats(list(weights.values())).tolist(), strict=True):
        known = (
            split.classes if isinstance(name, str) else range(len(split.classes)) if split.classes else [int(name)]
        )
        if name not in known:
            listed = first_keys(list(split.classes)) or "none with names"
            raise ConfigError(f"{split.title} has no class {name!r}; its classes are {listed}")
        label = split.classes.index(name) if isinstance(name, str) else name
        if label in by_label:
            raise ConfigError(f"the class {name!r} has two weights, by its name and by its label; give one")
        by_label[label] = weight
    missing = sorted(label for label in split.table.label_counts if label not in by_label)
    if missing:
        named = [split.classes[label] if 0 <= label < len(split.classes) else label for label in missing]
        raise ConfigError(
            f"the classes {', '.join(map(str, named[:10]))} of {split.title} have no weight; give 0 to leave one out"
        )
    return by_label


def _look_up(values: pa.ChunkedArray, weights: Mapping[Any, float]) -> Floats:
    """Return the weight of each value; NaN for a value without one."""
    encoded = pc.dictionary_encode(values, null_encoding="encode").combine_chunks()
    of_distinct = np.array([weights.get(value, np.nan) for value in encoded.dictionary.to_pylist()], np.float64)
    looked_up: Floats = of_distinct[encoded.indices.to_numpy()] if len(encoded) else np.empty(0)
    return looked_up
