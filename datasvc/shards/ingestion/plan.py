"""Plan of an ingest: assign samples to shards and to units of work, from the source's listing and the options.

All functions are pure. So the same source and options give the same shards, byte for byte, with any number of workers
on any machine, and after any number of interruptions. A *unit* is the work of one worker at a time.

- Listed source (one image per file): every shard is a unit. One permutation of all files assigns them to shards.
- Streamed source (read in parts, such as tars): a unit is a group of parts that are read concurrently. A permutation
  assigns parts to units, and the samples of a unit are permuted within each of its shards. So a shard has samples
  from several parts of the source, while a worker never holds more than a shard or two in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from blake3 import blake3

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers, KeyedPermutation, derive_keys
from datasvc.shards.images.header import Reencoding
from datasvc.shards.sources.common.options import DEFAULT_SPLIT, HELD_OUT_SPLIT
from datasvc.shards.sources.common.source import ListedFile, ListedSource, Source, SourcePart, StreamedSource

SHARD_BYTES: Final = 64 << 20
PARTS_AT_ONCE: Final = 8
# Purposes for `derive_keys`: permutations of files, of samples in a shard, of parts. Access orders use lower numbers.
_FILES, _IN_SHARD, _PARTS = 16, 17, 18
# A streamed unit has several shards, because its last shard is not full: larger units give fewer small shards.
_SHARDS_PER_UNIT = 4
# A split of few parts is divided into up to this many units, so that several workers can build it.
_UNITS_PER_SPLIT = 8


@dataclass(frozen=True)
class BuildOptions:
    """The settings that, together with the source, determine the bytes of every shard; see `IngestSettings`.

    Raises:
        ConfigError: a value is out of range.
    """

    shard_bytes: int = SHARD_BYTES
    decode_check: bool = False
    reencoding: Reencoding = field(default_factory=Reencoding)
    keep_order: bool = False
    seed: int = 0
    val_fraction: float = 0.0
    limit: int | None = None
    in_place: bool = False
    compress_columns: str = "none"

    @property
    def full_bytes(self) -> int:
        """Size of a full shard; of an attached source without a limit, because a unit is one shard of each split."""
        return 1 << 62 if self.in_place else self.shard_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the settings by name, those of `reencoding` among them, for the log entry."""
        options = self.to_nested_dict()
        return {**options, **options.pop("reencoding")}

    def to_nested_dict(self) -> dict[str, Any]:
        """Return the settings by name, without those that are off and that earlier releases lack."""
        options = dataclasses.asdict(self)
        if not self.in_place:
            del options["in_place"]
        if self.compress_columns == "none":
            del options["compress_columns"]
        return options

    def __post_init__(self) -> None:
        if self.shard_bytes < 1:
            raise ConfigError(f"shard_bytes is {self.shard_bytes}; expected at least 1")
        if not 0 <= self.val_fraction < 1:
            raise ConfigError(f"val_fraction is {self.val_fraction}; expected 0 <= val_fraction < 1")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit is {self.limit}; expected at least 1 sample")
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"seed is {self.seed}; expected 0 <= seed < 2**64")


@dataclass(frozen=True)
class IngestUnit:
    """The work of one worker at a time.

    Attributes:
        number: its position in the plan, which determines the order of shards in the table.
        split: split of its samples.
        files: of a listed source, the samples of one shard in order.
        parts: of a streamed source, the parts in the order in which they are opened.
    """

    number: int
    split: str
    files: tuple[ListedFile, ...] = ()
    parts: tuple[SourcePart, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Approximate number of bytes to read."""
        return sum(file.size_bytes for file in self.files) + sum(part.size_bytes for part in self.parts)


def plan_units(source: Source, options: BuildOptions) -> list[IngestUnit]:
    """Return all units of an ingest in the order of their numbers.

    Raises:
        ConfigError: samples are to be held out, but the source already has "val" or has no "train".
    """
    shard_bytes, seed, keep_order = options.shard_bytes, options.seed, options.keep_order
    # The first samples of a source are known only if its parts are read in order, so one unit has all parts.
    together = options.limit is not None
    planned: list[IngestUnit] = []
    if isinstance(source, ListedSource):
        splits = {split: files[: options.limit] for split, files in source.splits.items()}
        splits = hold_out(splits, options.val_fraction) if options.val_fraction else splits
        for split, files in splits.items():
            for shard in plan_shards(files, shard_bytes, seed, keep_order=keep_order):
                planned.append(IngestUnit(len(planned), split, files=tuple(shard)))
        return planned
    assert isinstance(source, StreamedSource)
    if options.val_fraction:
        _check_held_out({part.split for part in source.parts})
    for split in dict.fromkeys(part.split for part in source.parts):
        parts = [part for part in source.parts if part.split == split]
        unit_bytes = shard_bytes * _SHARDS_PER_UNIT
        if options.in_place:
            planned += [
                IngestUnit(len(planned) + number, split, parts=tuple(group))
                for number, group in enumerate(group_by_file(parts, shard_bytes))
            ]
            continue
        for group in group_parts(parts, unit_bytes, seed, keep_order=keep_order, together=together):
            planned.append(IngestUnit(len(planned), split, parts=tuple(group)))
    return planned


def plan_shards(
    files: Sequence[ListedFile], shard_bytes: int, seed: int, *, keep_order: bool = False
) -> list[list[ListedFile]]:
    """Assign files to shards: permute them by `seed` unless `keep_order` is set, then cut at `shard_bytes`."""
    shards: list[list[ListedFile]] = []
    free_bytes = 0
    order = range(len(files)) if keep_order else _permuted(len(files), seed, _FILES).tolist()
    for number in order:
        if free_bytes <= 0:
            shards.append([])
            free_bytes = shard_bytes
        shards[-1].append(files[number])
        free_bytes -= files[number].size_bytes
    return shards


def group_parts(
    parts: Sequence[SourcePart], unit_bytes: int, seed: int, *, keep_order: bool, together: bool
) -> list[list[SourcePart]]:
    """Assign the parts of one split to units: permute them by `seed` unless `keep_order` is set, then group them.

    A unit has at least `unit_bytes`, except for the last one. With `together`, one unit has all parts in their order.
    """
    order = range(len(parts)) if keep_order or together else _permuted(len(parts), seed, _PARTS).tolist()
    # A unit with `PARTS_AT_ONCE` parts mixes samples best. If parts are few, units are smaller, for more workers.
    even_share = -(-len(parts) // _UNITS_PER_SPLIT)  # rounded up
    min_parts = len(parts) if together else max(1, min(PARTS_AT_ONCE, even_share))
    groups: list[list[SourcePart]] = []
    size_bytes = 0
    for number in order:
        # A unit ends when it is large enough and has enough parts to mix.
        if not groups or (not together and size_bytes >= unit_bytes and len(groups[-1]) >= min_parts):
            groups.append([])
            size_bytes = 0
        groups[-1].append(parts[number])
        size_bytes += parts[number].size_bytes
    return groups


def group_by_file(parts: Sequence[SourcePart], unit_bytes: int) -> list[list[SourcePart]]:
    """Return the parts in their order, divided into groups of one file each, of about `unit_bytes` or one part."""
    groups: list[list[SourcePart]] = []
    path, size_bytes = None, 0
    for part in parts:
        if part.where["path"] != path or size_bytes + part.size_bytes > unit_bytes:
            groups.append([])
            path, size_bytes = part.where["path"], 0
        groups[-1].append(part)
        size_bytes += part.size_bytes
    return groups


def permute_in_shard(count: int, seed: int, unit: int, ordinal: int) -> Integers:
    """Return the order of the samples within one shard of a streamed unit: `int64[count]`."""
    keys = derive_keys(seed, unit, _IN_SHARD, KeyedPermutation.num_keys)
    return KeyedPermutation(count, keys).permute(np.arange(count), np.full(count, ordinal))


def is_held_out(key: str, fraction: float) -> bool:
    """Return whether a sample is held out. This depends on its key alone, so a sample never changes its split."""
    return int.from_bytes(blake3(key.encode("utf-8", "surrogateescape")).digest(8), "big") < fraction * 2.0**64


def hold_out(splits: Mapping[str, list[ListedFile]], fraction: float) -> dict[str, list[ListedFile]]:
    """Return the splits with a fraction of "train" moved to "val", without empty splits.

    Raise ConfigError if the splits already have "val", or have no "train".
    """
    _check_held_out(set(splits))
    train: list[ListedFile] = []
    val: list[ListedFile] = []
    for file in splits[DEFAULT_SPLIT]:
        (val if is_held_out(file.key, fraction) else train).append(file)
    divided = {**splits, DEFAULT_SPLIT: train, HELD_OUT_SPLIT: val}
    return {name: files for name, files in divided.items() if files}


def relabel_unit(unit: IngestUnit, labels: Sequence[int]) -> IngestUnit:
    """Return a unit with the label of each file mapped to its stored label."""
    files = [file if file.label is None else file._replace(label=labels[file.label]) for file in unit.files]
    return replace(unit, files=tuple(files))


def _permuted(count: int, seed: int, purpose: int) -> Integers:
    """Return the numbers below `count` in a random order, which `seed` and `purpose` determine: `int64[count]`."""
    keys = derive_keys(seed, 0, purpose, KeyedPermutation.num_keys)
    return KeyedPermutation(count, keys).permute(np.arange(count))


def _check_held_out(splits: set[str]) -> None:
    """Raise ConfigError unless a fraction of "train" can become "val"."""
    if HELD_OUT_SPLIT in splits or DEFAULT_SPLIT not in splits:
        raise ConfigError(
            f"cannot hold out a fraction of {DEFAULT_SPLIT!r} as {HELD_OUT_SPLIT!r}: the source has the splits "
            f"{sorted(splits)}; leave out --val-fraction, or put all samples into one split with --split "
            f"{DEFAULT_SPLIT}"
        )
