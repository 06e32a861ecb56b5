"""Source of numpy arrays: `.npy` files and `.npz` archives with the samples along the first axis.

The arrays of one split in one folder, or in one archive, are its columns, and have the same length. If an array's
name contains a split name, the array belongs to that split, and the rest of the name is the name of its column:
`train_x.npy`, or `train_x` in an archive, is column `x` of split `train`. A value that is itself an array is stored
as a tensor (see `common.tensors`).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any, BinaryIO, ClassVar, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.printable import count_text
from datasvc.repository.objects.objects import Digest
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.format.schema import KEY, LABEL
from datasvc.shards.sources.arrays.npy import NpyArray, check_member, open_array, read_npy_header, read_npz_headers
from datasvc.shards.sources.common.columns import bisect_errors
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.listing import SourceFile, list_files
from datasvc.shards.sources.common.options import SPLIT_NAMES, SourceOptions, split_of_file
from datasvc.shards.sources.common.source import BATCH_BYTES, BATCH_SAMPLES, BadSample, FileSource, SourcePart
from datasvc.shards.sources.common.streams import read_up_to
from datasvc.shards.sources.common.tensors import tensor_array, tensor_field

_LABELS: Final = frozenset({"y", "label", "labels", "target", "targets"})
_UNNAMED: Final = "data"  # column of an array whose name is only a split name
_PART_BYTES: Final = 64 << 20  # approximate size of a part
# Maximum bytes of a key `FILE#ROW` in an Arrow array, apart from FILE: `#`, the row, and Arrow's offset of the key.
_KEY_BYTES: Final = 32


@dataclass(frozen=True)
class _Table:
    """The arrays of one split in one folder or archive, by column; `name` is FILE in the keys `FILE#ROW`."""

    split: str
    name: str
    stamp: str
    arrays: dict[str, NpyArray]

    @property
    def num_samples(self) -> int:
        return next(iter(self.arrays.values())).num_samples


@dataclass(frozen=True, kw_only=True)
class NumpySource(FileSource):
    """A source of numpy files. A part is a range of samples, or all samples of a split in an archive.

    Attributes:
        columns: names of the arrays that become columns, in the order of the schema.
        key: name of the array that holds the keys; None: the key of a sample is `FILE#ROW`.
    """

    kind: ClassVar[str] = "numpy"

    columns: tuple[str, ...]
    key: str | None

    @property
    def keys_are_places(self) -> bool:
        """Whether keys are made of file and row: true unless an array holds the keys."""
        return self.key is None

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> NumpySource:
        """List the source from its array headers. For errors, see `FileSource.list`."""
        options = options or SourceOptions()
        reader = FileReader(url)
        listed = list_files(url)
        files = [file for file in listed if file.extension in (".npy", ".npz")]
        tables = [table for table in _tables(reader, files, options) if table.num_samples]
        if not tables:
            raise NotFoundError(
                f"cannot ingest {redact_url(url)}: no samples in its {len(files)} .npy and .npz files"
            )
        names = list(tables[0].arrays)
        key = _choose_key(tables[0], options.key)
        columns = tuple(name for name in names if name != key)
        schema = _schema(tables[0], columns)
        # All samples of a source must have the same columns.
        for table in tables:
            if list(table.arrays) != names or not _schema(table, columns).equals(schema, check_metadata=True):
                raise ConfigError(
                    f"cannot ingest {redact_url(url)}: {table.name} has the columns {_described(table)}, but "
                    f"{tables[0].name} has {_described(tables[0])}; ingest them as separate data sets"
                )
        parts = [part for table in tables for part in _parts(table)]
        ignored = listed.unused(files)
        return cls(url=url, schema=schema, parts=parts, ignored=ignored, columns=columns, key=key)

    def fingerprint(self) -> Digest:
        """Return a digest of the listing and the name of the array that holds the keys."""
        return self._digest([self.key, [asdict(part) for part in self.parts]])

    def read(self, part: SourcePart) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield the samples of a range; see `StreamedSource.read`."""
        reader = FileReader(self.url)
        # JSON has no tuples, so `where` may have a shape as a list.
        arrays = {
            name: NpyArray(**{**fields, "shape": tuple(fields["shape"])})
            for name, fields in part.where["arrays"].items()
        }
        start, stop = part.where["start"], part.where["start"] + (part.num_samples or 0)
        sample_bytes = sum(array.sample_bytes for array in arrays.values()) + len(part.where["file"]) + _KEY_BYTES
        batch_samples = max(1, min(BATCH_SAMPLES, BATCH_BYTES // sample_bytes))
        first = start  # first sample of the batch that is being read, for the report of an error
        try:
            for array in arrays.values():
                # The checksum of an array in an archive is at its end: verify it before the first sample is used.
                check_member(reader, array)
            with ExitStack() as stack, map_exceptions("read", part.name):
                # Local files are read, not mapped: pages of a mapped file would count towards the worker's memory.
                streams = {
                    name: stack.enter_context(open_array(reader, array, start, stop))
                    for name, array in arrays.items()
                }
                for first in range(start, stop, batch_samples):
                    count = min(batch_samples, stop - first)
                    values = {name: _read_values(streams[name], array, count) for name, array in arrays.items()}
                    yield from self._batches(part, first, values)
        except CorruptDataError as error:
            reason = f"{count_text(stop - first, 'sample')} cannot be read: {error}"
            yield BadSample(part.split, f"{part.where['file']}#{first}", reason)

    def _batches(
        self, part: SourcePart, first: int, values: dict[str, npt.NDArray[Any]]
    ) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield samples as batches, and each sample that does not fit the columns as a bad sample."""
        num_samples = len(next(iter(values.values())))
        file_keys = [f"{part.where['file']}#{row}" for row in range(first, first + num_samples)]

        def convert(start: int, stop: int) -> pa.RecordBatch:
            keys = file_keys if self.key is None else list(map(str, values[self.key].reshape(-1).tolist()))
            columns = [pa.array(keys[start:stop], pa.string())]
            for name, column_field in zip(self.columns, list(self.schema)[1:], strict=True):
                columns.append(_column(column_field, values[name][start:stop]))
            return pa.RecordBatch.from_arrays(columns, schema=self.schema)

        for number, batch in bisect_errors(num_samples, convert, (ValueError, pa.ArrowException)):
            if isinstance(batch, Exception):
                yield BadSample(part.split, file_keys[number], f"does not fit the columns: {batch}")
            else:
                yield batch


def _tables(reader: FileReader, files: Sequence[SourceFile], options: SourceOptions) -> Sequence[_Table]:
    """Read the headers of `files`, and group their arrays into tables. Raise ConfigError or CorruptDataError."""
    # For each archive or folder and each split: the file, column name and header of each array.
    groups: dict[tuple[str, str], list[tuple[SourceFile, str, NpyArray]]] = {}
    for file in files:
        base, extension = os.path.splitext(file.name)
        if extension.lower() == ".npz":
            for name, array in read_npz_headers(reader, file).items():
                # A split name in the name of the array takes precedence over one in the name of the archive.
                split = split_of_file(name if _split_words(name) else file.name, options)
                groups.setdefault((file.name, split), []).append((file, _column_name(name), array))
        else:
            group = (os.path.dirname(file.name), split_of_file(file.name, options))
            name = _column_name(os.path.basename(base))
            groups.setdefault(group, []).append((file, name, read_npy_header(reader, file)))
    return [_table(split, listed) for (_, split), listed in groups.items()]


def _table(split: str, listed: Sequence[tuple[SourceFile, str, NpyArray]]) -> _Table:
    """Return the table of arrays (file, column name, header). Raise ConfigError if they do not match."""
    names = [name for _, name, _ in listed]
    duplicates = sorted(name for name, count in Counter(names).items() if count > 1)
    if duplicates:
        raise ConfigError(
            f"two arrays would be the columns {duplicates} of split {split!r}, such as in {listed[0][0].name}; "
            "rename one of them"
        )
    lengths = {name: array.num_samples for _, name, array in listed}
    if len(set(lengths.values())) > 1:
        raise ConfigError(
            f"the arrays of split {split!r} in the folder of {listed[0][0].name} differ in length: {lengths}; "
            "expected the same number of samples along the first axis"
        )
    # An archive is listed once for each of its arrays: use its stamp only once.
    stamps = dict.fromkeys(f"{file.name} {file.size_bytes} {file.stamp}" for file, _, _ in listed)
    arrays = {name: array for _, name, array in sorted(listed, key=itemgetter(1))}
    return _Table(split, listed[0][0].name, "\n".join(stamps), arrays)


def _split_words(name: str) -> list[str]:
    """Return the words of an array's name that are split names, in lower case."""
    return [word for word in re.split(r"[-_.]", name.lower()) if word in SPLIT_NAMES]


def _column_name(name: str) -> str:
    """Return an array's name without its split name: "x" for "train_x"."""
    words = _split_words(name)
    if not words:
        return name
    kept = [word for word in re.split(r"[-_.]", name) if word.lower() != words[0]]
    return "_".join(kept) or _UNNAMED


def _parts(table: _Table) -> Iterator[SourcePart]:
    """Divide the samples of a table into parts of about `_PART_BYTES`."""
    sample_bytes = sum(array.sample_bytes for array in table.arrays.values())
    is_archive = any(array.member is not None for array in table.arrays.values())
    # A member of an archive is compressed and can be read only from its start, so it is not divided.
    part_samples = table.num_samples if is_archive else max(1, _PART_BYTES // sample_bytes)
    arrays = {name: asdict(array) for name, array in table.arrays.items()}
    for start in range(0, table.num_samples, part_samples):
        count = min(part_samples, table.num_samples - start)
        where = {"arrays": arrays, "start": start, "file": table.name}
        name = f"{table.split}/{table.name}@{start}"
        yield SourcePart(table.split, name, count * sample_bytes, count, table.stamp, where)


def _choose_key(table: _Table, key: str | None) -> str | None:
    """Return the name of the array that holds the keys: `key`, or one named "key"; None if no array does."""
    if key is None:
        key = KEY if KEY in table.arrays else None
    elif key not in table.arrays:
        raise ConfigError(f"the key array {key!r} does not exist; found {_described(table)}")
    if key is not None:
        array = table.arrays[key]
        if len(array.shape) != 1 or np.dtype(array.dtype).kind not in "Uiu":
            raise ConfigError(
                f"array {key!r} cannot hold keys: it is {_described(table)[key]}; expected text or integers"
            )
    return key


def _schema(table: _Table, columns: Sequence[str]) -> pa.Schema:
    """Return the schema of the samples: the key, then a field for each of `columns`, in the same order."""
    candidates = []  # arrays of a usual name with a single integer per sample
    for name in columns:
        array, dtype = table.arrays[name], np.dtype(table.arrays[name].dtype)
        if name.lower() in _LABELS and array.sample_bytes == dtype.itemsize and dtype.kind in "iu":
            candidates.append(name)
    # The first candidate becomes the column "label". But an array of this name keeps it: no other is the label then.
    label = next((name for name in candidates if name == LABEL or LABEL not in columns), None)
    fields = [pa.field(KEY, pa.string(), nullable=False)]
    for name in columns:
        is_label = name == label
        fields.append(pa.field(LABEL, pa.int32(), nullable=False) if is_label else _field(name, table.arrays[name]))
    return pa.schema(fields)


def _field(name: str, array: NpyArray) -> pa.Field:
    dtype = np.dtype(array.dtype)
    if dtype.kind in "US":
        return pa.field(name, pa.string() if dtype.kind == "U" else pa.large_binary(), nullable=False)
    return tensor_field(name, dtype, array.shape[1:])


def _described(table: _Table) -> dict[str, str]:
    """Return the type and shape of each array, for messages."""
    return {name: f"{np.dtype(array.dtype)}{list(array.shape)}" for name, array in table.arrays.items()}


def _read_values(stream: BinaryIO, array: NpyArray, count: int) -> npt.NDArray[Any]:
    """Read the next `count` samples of an array. Raise CorruptDataError if there are fewer."""
    content = read_up_to(stream, count * array.sample_bytes)
    if len(content) < count * array.sample_bytes:
        raise CorruptDataError(f"{os.path.basename(array.path)} is truncated")
    return np.frombuffer(content, array.dtype).reshape(count, *array.shape[1:])


def _column(column_field: pa.Field, values: npt.NDArray[Any]) -> pa.Array:
    """Return an array's values as a column. Raise ArrowException or ValueError if a value does not fit the field."""
    if values.dtype.kind in "US":
        return pa.array(values.reshape(-1).tolist(), column_field.type)
    # Labels are stored as int32. `pa.array` needs native byte order; `cast` raises an error if a label does not fit.
    if column_field.type == pa.int32():
        return pa.array(values.reshape(-1).astype(values.dtype.newbyteorder("="))).cast(column_field.type)
    return tensor_array(column_field, values)
