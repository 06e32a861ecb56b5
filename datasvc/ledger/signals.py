"""Signals of a run: one number per sample and epoch, such as its loss, that the training gave for it.

Each rank keeps what it records in memory, and writes it at each save as one Parquet file of the repository, with the
columns `epoch`, `position` and `value` (2 bytes a sample). Positions are those of the access order, so the files of
any number of ranks and attempts together are the signal: `datasvc.models.provenance.signal_values` finds the samples.
"""

from __future__ import annotations

import io
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.keyed_random import Integers
from datasvc.mix_schedule import stem_of
from datasvc.order import LOADER_SETTINGS
from datasvc.repository import Repository
from datasvc.repository.logs.references import check_name
from datasvc.threads import map_in_threads

if TYPE_CHECKING:
    import torch

SIGNAL_FORMAT: Final = 1
SIGNALS: Final = "signals"
"""Folder of the signals of all runs in a repository: SIGNALS/NAME/ID/SIGNAL/*.parquet."""
_METADATA: Final = b"datasvc.signal"
_SCHEMA: Final = pa.schema([("epoch", pa.int32()), ("position", pa.int64()), ("value", pa.float16())])
_PARSE_ERRORS: Final = (pa.ArrowException, KeyError, TypeError, ValueError, RecursionError)
_READS_AT_ONCE: Final = 8
_NO_ORDER: Final = ("epoch", "position", *LOADER_SETTINGS)  # of the fields of a loader's state


class RecordedBatch(Protocol):
    """The attributes of a loader's batch that a signal needs: of n samples, of which padding has a mask of False."""

    epoch: int
    positions: Integers

    @property
    def mask(self) -> Any:
        """`bool[n]`, a tensor or an array."""


class SignalSource(Protocol):
    """The attributes of a loader that a signal needs; the loaders of datasvc have them."""

    signals: SignalWriter | None
    split: Any

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader, which has its data and its order."""


class SignalWriter:
    """Records one signal of one rank: `loader.record(batch, losses)` passes the values of a batch to it.

    What is recorded is written by `flush`, which the `use` of a `ConsumptionTracker` calls, so that each save is
    preceded by the values up to its position, and by the `close` of the loader.

    Args:
        repository: repository of the run.
        run: reference to the run, such as "pets-cnn/20261123-221830-3fa9c1"; the `ref` of its log.
        loader: loader of the training data; one writer per loader.
        name: name of the signal.

    Raises:
        ConfigError: `run` or `name` is not valid, or the loader has a writer.
    """

    name: str

    def __init__(self, repository: Repository, run: str, loader: SignalSource, *, name: str = "loss") -> None:
        if loader.signals is not None:
            raise ConfigError(f"this loader records {loader.signals.name!r} already; a loader records one signal")
        self.name = name
        self._storage = repository.storage
        self._folder = _folder_of(run, name)
        self._loader = loader
        self._file = secrets.token_hex(6)  # no other process writes files of this name
        self._num_files = 0
        self._started = time.time()
        self._pending: list[tuple[int, Integers, torch.Tensor | npt.NDArray[Any], Any]] = []  # the last is the mask
        loader.signals = self

    def record(self, batch: RecordedBatch, values: torch.Tensor | npt.NDArray[Any]) -> None:
        """Keep the values of a batch in memory; those of padding and of masked samples are left out.

        Args:
            batch: batch of the loader.
            values: `[n]`, one number per sample of the batch. They are kept in 16 bits (IEEE half precision): 3 to 4
                significant digits; a value above 65,504 becomes infinite.

        Raises:
            ConfigError: `values` does not have one number per sample.
        """
        if tuple(values.shape) != (len(batch.positions),):
            raise ConfigError(
                f"the values have the shape {list(values.shape)}; expected [{len(batch.positions)}], one number per "
                "sample of the batch (a loss with reduction='none')"
            )
        if isinstance(values, np.ndarray):
            with np.errstate(over="ignore"):  # documented
                kept: Any = values.astype(np.float16)
        else:
            kept = values.detach().half()
        # Copied from the device by `flush`: a copy here would wait until the device has done the step.
        mask = batch.mask.copy() if isinstance(batch.mask, np.ndarray) else batch.mask.clone()
        self._pending.append((batch.epoch, np.asarray(batch.positions), kept, mask))

    def flush(self) -> None:
        """Write what was recorded since the last call. Raises UnavailableError: the store does not take the file."""
        if not self._pending:
            return
        batch_epochs, batch_positions, batch_values, batch_masks = zip(*self._pending, strict=True)
        is_kept = np.concatenate([_to_array(mask) for mask in batch_masks])
        epochs = np.repeat(batch_epochs, [len(positions) for positions in batch_positions])[is_kept]
        positions = np.concatenate(batch_positions)[is_kept]
        values = np.concatenate([_to_array(values) for values in batch_values])[is_kept]
        state = self._loader.state_dict()
        order = {name: value for name, value in state.items() if name not in _NO_ORDER}
        splits = getattr(self._loader.split, "splits", None) or [self._loader.split]
        data = [split.title for split in splits]
        described = {
            "format": SIGNAL_FORMAT, "name": self.name, "data": data, "order": order, "started": self._started,
        }  # fmt: skip
        metadata = {_METADATA: json.dumps(described, sort_keys=True).encode()}
        table = pa.table([epochs, positions, values], schema=_SCHEMA.with_metadata(metadata))
        content = io.BytesIO()
        # The positions of a rank have a constant stride, so their differences take next to nothing.
        encodings = {"epoch": "DELTA_BINARY_PACKED", "position": "DELTA_BINARY_PACKED"}
        pq.write_table(table, content, compression="zstd", use_dictionary=False, column_encoding=encodings)
        self._storage.create(f"{self._folder}/{self._file}.{self._num_files:06d}.parquet", content.getvalue())
        self._num_files += 1
        self._pending.clear()


class Signal(NamedTuple):
    """A recorded signal: `[n]` each, by epoch and position, every position once.

    Attributes:
        epochs: `int64[n]`, ascending.
        positions: `int64[n]`, position in the epoch, ascending within each epoch.
        values: `float16[n]`.
        order: what the loader's state says of the data and of the order of the positions.
        data: names of the splits that were read, such as "pets@3/train"; of a view, with what it selects.
    """

    epochs: Integers
    positions: Integers
    values: npt.NDArray[np.float16]
    order: Mapping[str, Any]
    data: tuple[str, ...]


def list_signals(repository: Repository, run: str) -> list[str]:
    """Return the names of the signals of a run, `NAME/ID`. Raises ConfigError, UnavailableError."""
    return repository.storage.list(_folder_of(run))


def _folder_of(run: str, signal: str | None = None) -> str:
    """Return the folder of a run's signals, or of one of them. Raises ConfigError: a name is not valid."""
    name, slash, run_id = run.partition("/")
    check_name(name, "run")
    if not slash:
        raise ConfigError(f"{run!r} names no single run; expected the ref of its log, such as {run}/ID")
    check_name(run_id, "run")
    return f"{SIGNALS}/{run}" if signal is None else f"{SIGNALS}/{run}/{check_name(signal, 'signal')}"


def read_signal(repository: Repository, run: str, name: str = "loss") -> Signal:
    """Return a signal of a run. Of a position that several attempts recorded, the newest attempt counts.

    Args:
        repository: repository of the run.
        run: reference to the run, `NAME/ID`.
        name: name of the signal.

    Raises:
        NotFoundError: the run has no such signal; the message has those that it has.
        ConfigError: the attempts of the run read different data or in another order, or a file has a later format.
        CorruptDataError, UnavailableError: a file cannot be read.
    """
    paths = _list_files(repository, run, name)
    return _join(run, name, map_in_threads(lambda path: _read(repository, path), paths, _READS_AT_ONCE))


def read_last_epoch(repository: Repository, run: str, name: str = "loss", *, max_values: int | None = None) -> Signal:
    """Return what the newest attempt of a run recorded in its last epoch, and earlier attempts in the same.

    The files of each writer are read from its newest one back to the first with values of an earlier epoch.

    Args:
        repository: repository of the run.
        run: reference to the run, `NAME/ID`.
        name: name of the signal.
        max_values: greatest number of values; None: no limit.

    Raises:
        ConfigError: there are more than `max_values`; or see `read_signal`, with its other errors.
    """
    writers: dict[str, list[str]] = {}
    for path in _list_files(repository, run, name):
        writers.setdefault(path.rsplit(".", 2)[0], []).append(path)
    newest = map_in_threads(lambda paths: _read(repository, paths[-1]), list(writers.values()), _READS_AT_ONCE)
    with_values = [(float(described["started"]), table) for table, described in newest if table.num_rows]
    if not with_values:
        raise NotFoundError(f"run {run} has recorded no value of {name!r}: all its samples were masked")
    epoch = pc.max(max(with_values, key=itemgetter(0))[1].column("epoch")).as_py()
    parts: list[tuple[pa.Table, dict[str, Any]]] = []
    for paths, last in zip(writers.values(), newest, strict=True):
        for path in reversed(paths):
            table, described = last if path == paths[-1] else _read(repository, path)
            parts.append((table.filter(pc.equal(table.column("epoch"), epoch)), described))
            if max_values is not None and sum(part.num_rows for part, _ in parts) > max_values:
                raise ConfigError(f"epoch {epoch} of {name!r} of run {run} has more than {max_values:,} values")
            if table.num_rows and pc.min(table.column("epoch")).as_py() < epoch:
                break  # the files before it have earlier epochs
    return _join(run, name, parts)


def _list_files(repository: Repository, run: str, name: str) -> list[str]:
    """Return the paths of the files of a signal, those of a writer by age. For errors, see `read_signal`."""
    folder = _folder_of(run, name)
    paths = [f"{folder}/{file}" for file in sorted(repository.storage.list(folder)) if file.endswith(".parquet")]
    if not paths:
        found = ", ".join(list_signals(repository, run)) or "none: train with --signals loss"
        raise NotFoundError(f"run {run} has no signal {name!r}; it has {found}")
    return paths


def _read(repository: Repository, path: str) -> tuple[pa.Table, dict[str, Any]]:
    return _decode(repository.storage.read(path), repository.storage.location(path))


def _join(run: str, name: str, parts: Sequence[tuple[pa.Table, dict[str, Any]]]) -> Signal:
    """Return the signal that files are parts of. Raises ConfigError, see `read_signal`."""
    tables, described = zip(*parts, strict=True)
    newest = max(described, key=lambda each: float(each["started"]))
    order = newest["order"]
    if any(stem_of(each["order"]) != stem_of(order) for each in described):
        raise ConfigError(f"the attempts of run {run} read different data or orders, so {name!r} is no single signal")
    ages = np.repeat([each["started"] for each in described], [table.num_rows for table in tables])
    # A resume may change the later weights of a mixture. What earlier attempts recorded from there on is of samples
    # that the newest order has at other positions.
    is_newest = np.repeat([each["order"] == order for each in described], [table.num_rows for table in tables])
    table = pa.concat_tables(tables)
    epochs, positions, values = (table.column(column).to_numpy() for column in _SCHEMA.names)
    by_age = np.lexsort((ages, positions, epochs))
    by_age = by_age[is_newest[by_age] | (np.cumsum(is_newest[by_age]) == 0)]
    epochs, positions, values = epochs[by_age].astype(np.int64), positions[by_age], values[by_age]
    is_last = np.append((np.diff(epochs) != 0) | (np.diff(positions) != 0), [True] * (len(epochs) > 0))
    return Signal(epochs[is_last], positions[is_last], values[is_last], order, tuple(newest["data"]))


def _decode(content: bytes, location: str) -> tuple[pa.Table, dict[str, Any]]:
    """Return the values of a file and its description."""
    try:
        table = pq.read_table(io.BytesIO(content))
        described = json.loads(table.schema.metadata[_METADATA])
        is_later = int(described["format"]) > SIGNAL_FORMAT
        if not is_later:
            float(described["started"])
            list(map(str, described["data"]))
            return table.select(_SCHEMA.names).cast(_SCHEMA).replace_schema_metadata(None), described
    except _PARSE_ERRORS as error:
        raise CorruptDataError(f"{location} is no file of a signal: {error!r}; delete it or restore it") from error
    raise ConfigError(f"{location} has format {described['format']}; this datasvc reads {SIGNAL_FORMAT}: upgrade it")


def _to_array(values: torch.Tensor | npt.NDArray[Any]) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = values if isinstance(values, np.ndarray) else values.cpu().numpy()
    return array
