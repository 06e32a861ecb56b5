"""Chooses the samples of views: by a condition, as a random part, or as parts of whole groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3

from datasvc.errors import ConfigError
from datasvc.printable import count_text
from datasvc.shards.format.schema import KEY
from datasvc.shards.versions.dataset import Split
from datasvc.shards.versions.delete import parse_condition
from datasvc.shards.views.derive import ViewBuilder, check_boolean, read_groups, value_of

_HASHES: Final = 1 << 64


def where(split: Split, condition: str) -> Split:
    """Return the samples that satisfy a condition; see `Split.where`."""
    parsed = parse_condition(condition, split.table.sample_schema, split.classes, f"{split.dataset}/{split.name}")
    check_boolean(split, parsed.sql, condition)
    builder = ViewBuilder(split, parsed.canonical)
    for group in read_groups(split, where=parsed.sql, text=condition):
        builder.add(group)
    return builder.finish()


def take(split: Split, fraction: float, *, seed: int = 0) -> Split:
    """Return about a fraction of the samples; see `Split.take`."""
    _check_fractions([fraction])
    return _divide(split, [fraction], [f"take({fraction:g}, seed={seed})"], by=None, seed=seed)[0]


def divide(split: Split, fractions: Sequence[float], *, by: str | None, seed: int) -> tuple[Split, ...]:
    """Return disjoint parts of a split; see `Split.split`."""
    _check_fractions(fractions)
    listed = ", ".join(f"{fraction:g}" for fraction in fractions)
    options = f"seed={seed}" if by is None else f"by={by}, seed={seed}"
    steps = [f"split({listed}, {options})[{number}]" for number in range(len(fractions))]
    return tuple(_divide(split, fractions, steps, by=by, seed=seed))


def _divide(
    split: Split, fractions: Sequence[float], steps: Sequence[str], *, by: str | None, seed: int
) -> list[Split]:
    stops = np.minimum(np.cumsum(fractions), 1.0)
    builders = [ViewBuilder(split, step) for step in steps]
    column = KEY if by is None else by
    for group in read_groups(split, [value_of(split, column)], text=column):
        # The part of a value depends on the value and the seed only: it is the same in every version.
        part = np.searchsorted(stops, _hashes(group.column("value0"), seed, split, column), side="right")
        for number, builder in enumerate(builders):
            builder.add(group.filter(pa.array(part == number)))
    return [builder.finish() for builder in builders]


def _hashes(values: pa.ChunkedArray, seed: int, split: Split, column: str) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each value, equal for equal values: `float64[n]`."""
    if values.null_count:
        raise ConfigError(
            f"{count_text(values.null_count, 'sample')} of {split.title} have no value in {column!r}, by which they "
            f"are divided; leave them out first: .where('\"{column}\" is not null')"
        )
    encoded = pc.dictionary_encode(values).combine_chunks()
    distinct, indices = encoded.dictionary, encoded.indices.to_numpy()
    texts = distinct.cast(pa.large_string()).to_pylist()
    # A part of a part needs other numbers: those of the first division are all below, or all above, its bounds.
    steps = split.table.view.steps if split.table.view is not None else ()
    num_divided = sum(step.startswith(("take(", "split(")) for step in steps)
    salt = f"{seed}.{num_divided}" if num_divided else f"{seed}"
    hashes = [int.from_bytes(blake3(f"{salt}:{text}".encode()).digest(8), "big") / _HASHES for text in texts]
    # Rounding must not give 1.0, which no part has.
    below = np.minimum(np.array(hashes, np.float64), np.nextafter(1.0, 0.0))
    hashed: npt.NDArray[np.float64] = below[indices]
    return hashed


def _check_fractions(fractions: Sequence[float]) -> None:
    # Sums such as 0.7 + 0.2 + 0.1 are not exactly 1.
    if not fractions or not all(0 < fraction <= 1 for fraction in fractions) or sum(fractions) > 1 + 1e-9:
        raise ConfigError(f"the fractions are {list(fractions)}; expected fractions above 0 with a sum of at most 1")
