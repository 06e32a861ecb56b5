"""Values of a run's signal for the samples of a split: the access order says which sample had each position."""

from __future__ import annotations

from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.errors import ConfigError, NotFoundError
from datasvc.keyed_random import Integers
from datasvc.ledger.signals import Signal, read_signal
from datasvc.mix_order import MixOrder, own_order
from datasvc.models.provenance.consumed_ranges import ReadOrder, parse_use
from datasvc.models.provenance.key_lookup import mix_order
from datasvc.models.versions.data_use import DataUse
from datasvc.repository import Digest, Repository
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.dataset import Split

Reduce = Literal["last", "mean", "max"]
_REDUCES: Final = get_args(Reduce)


def signal_values(
    split: Split, run: str, name: str = "loss", *, reduce: Reduce = "last", repository: Repository | None = None
) -> npt.NDArray[np.float32]:
    """Return the signal that a run recorded for each sample of a split: `float32[len(split)]`.

    NaN stands for samples that were never recorded, or whose value was NaN; `signal_table` has only the latter. Of a
    mixture, the values are those of this split.

    Args:
        split: the split that the run read, or another version of the data set with the same shard table.
        run: reference to the run, `NAME/ID`.
        name: name of the signal.
        reduce: value of a sample that was served several times: that of the last time, the mean, or the largest.
        repository: repository of the run; None: that of the split.

    Raises:
        ConfigError: `reduce` is not valid, or see `read_signal`.
        NotFoundError: the run did not read this split; or see `read_signal`.
        CorruptDataError, UnavailableError: see `read_signal`.
    """
    _check_reduce(reduce)
    signal = read_signal(repository or split.repository, run, name)
    order = recorded_order(signal)
    if split.digest not in order.tables:
        raise NotFoundError(
            f"run {run} did not read {split.title}, but {' and '.join(signal.data)}: give the split or view that it "
            "read, or use signal_table, which has the values by key"
        )
    samples, values, _ = values_of_split(signal, order, split)
    return _reduce(samples, values, len(split), reduce)


def _check_reduce(reduce: str) -> None:
    if reduce not in _REDUCES:
        raise ConfigError(f"reduce is {reduce!r}; expected one of {', '.join(_REDUCES)}")


def _reduce(
    samples: Integers, values: npt.NDArray[np.float32], count: int, reduce: Reduce
) -> npt.NDArray[np.float32]:
    """Return one value for each of `count` samples from values in the order of training; NaN if there is none."""
    result = np.full(count, np.nan, np.float32)
    if reduce == "last":
        result[samples] = values  # later values replace earlier ones
    elif reduce == "max":
        np.fmax.at(result, samples, values)
    else:
        counts = np.bincount(samples, minlength=count)
        sums = np.bincount(samples, values.astype(np.float64), minlength=count)
        np.divide(sums, counts, out=result, where=counts > 0, casting="same_kind")
    return result


def recorded_order(signal: Signal) -> ReadOrder:
    """Return the order of the positions of a signal."""
    return parse_use(DataUse("", "", {**signal.order, "epoch": 0, "position": 0}))[0]


def recorded_splits(repository: Repository, signal: Signal) -> list[Split]:
    """Return the splits that a run read, in the order of `signal.data`; no table is read."""
    splits = []
    for digest, name in zip(recorded_order(signal).tables, signal.data, strict=True):
        version, _, split = name.partition("[")[0].rpartition("/")
        splits.append(Split(split, version, repository, digest))
    return splits


def values_of_split(
    signal: Signal, order: ReadOrder, split: Split
) -> tuple[Integers, npt.NDArray[np.float32], Integers]:
    """Return the sample of each recorded value, as in `split[number]`, the value, and its index in the signal.

    They are in training order.
    """
    starts = np.concatenate([[0], np.cumsum(split.table.samples_per_shard)])
    samples, indices = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    source = order.tables.index(split.digest)
    mixed = None if order.mix is None else mix_order(order, [_num_positions(split, each) for each in order.tables])
    config = order.config if mixed is None else own_order(order.config, split.digest)
    for epoch in np.unique(signal.epochs).tolist():
        chosen = np.arange(*np.searchsorted(signal.epochs, [epoch, epoch + 1]).tolist())
        parts = [(epoch, signal.positions[chosen], chosen)]
        if mixed is not None:
            parts = _of_source(mixed, source, epoch, signal.positions[chosen], chosen)
        for own_epoch, own_positions, own_indices in parts:
            # Each document of a pack has the value of its pack.
            at, shards, rows = split.access_order(config, own_epoch).samples_at(own_positions)
            samples.append(starts[shards] + rows)
            indices.append(own_indices[at])
    found = np.concatenate(indices)
    return np.concatenate(samples), signal.values[found].astype(np.float32), found


def _of_source(
    mixed: MixOrder, source: int, epoch: int, positions: Integers, indices: Integers
) -> list[tuple[int, Integers, Integers]]:
    """Return own epochs, positions in them, and indices, of what one split served at positions of a mixture."""
    served = mixed.locate(epoch, positions)
    is_own = served.sources == source
    own_epochs, own_positions, own_indices = served.epochs[is_own], served.positions[is_own], indices[is_own]
    return [
        (own_epoch, own_positions[own_epochs == own_epoch], own_indices[own_epochs == own_epoch])
        for own_epoch in np.unique(own_epochs).tolist()
    ]


def _num_positions(split: Split, digest: Digest) -> int:
    if digest == split.digest:
        return split.num_positions
    objects = split.repository.objects
    return ShardTable.read(objects, digest).num_positions


def signal_table(
    repository: Repository, run: str, dataset: str, name: str = "loss", *, reduce: Reduce = "last"
) -> pa.Table:
    """Return the signal of a run by key, as a source of `columns.add` and `columns.set`.

    Args:
        repository: repository of the run and of the data.
        run: reference to the run, `NAME/ID`.
        dataset: name of a data set that the run read.
        name: name of the signal, and of the column of the result.
        reduce: see `signal_values`.

    Returns:
        Columns `key` and `name` (float32), of the samples that were recorded. A key is there once for each split
        name, also if a mixture read several views or versions of the split.

    Raises:
        ConfigError, NotFoundError, CorruptDataError, UnavailableError: see `signal_values`.
    """
    _check_reduce(reduce)
    signal = read_signal(repository, run, name)
    order = recorded_order(signal)
    by_split: dict[str, list[tuple[pa.ChunkedArray, Integers, npt.NDArray[np.float32], Integers]]] = {}
    for split in recorded_splits(repository, signal):
        if split.dataset.partition("@")[0] == dataset:
            part = (split.to_arrow(["key"]).column("key"), *values_of_split(signal, order, split))
            by_split.setdefault(split.name, []).append(part)
    if not by_split:
        raise NotFoundError(f"run {run} did not read {dataset}: its data was {' and '.join(signal.data)}")
    tables = []
    for parts in by_split.values():
        # The number of each key, taken for each value in place of the key: a run of many epochs would take gigabytes.
        # A key may be in several views: its values are those of all of them, in training order.
        encoded = pa.chunked_array([chunk for keys, *_ in parts for chunk in keys.chunks]).dictionary_encode()
        numbers = np.concatenate([chunk.indices.to_numpy() for chunk in encoded.chunks])
        starts = np.cumsum([0, *(len(keys) for keys, *_ in parts)]).tolist()
        taken = [numbers[start + samples] for start, (_, samples, *_) in zip(starts, parts, strict=False)]
        in_order = np.argsort(np.concatenate([indices for *_, indices in parts]))
        values = np.concatenate([values for *_, values, _ in parts])[in_order]
        recorded, dictionary = np.concatenate(taken)[in_order], encoded.chunk(0).dictionary
        reduced = _reduce(recorded, values, len(dictionary), reduce)
        is_recorded = np.bincount(recorded, minlength=len(dictionary)) > 0
        tables.append(pa.table({"key": dictionary.filter(pa.array(is_recorded)), name: reduced[is_recorded]}))
    return pa.concat_tables(tables)
