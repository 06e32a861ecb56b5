"""What is checked of samples that come in batches, and what is measured: images, labels, sizes, digests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.errors import BadSampleError
from datasvc.keyed_random import Integers
from datasvc.shards.format.digests import DIGEST_BYTES, blob_views, digest_batch
from datasvc.shards.format.schema import HEIGHT, IMAGE, KEY, LABEL, WIDTH, is_image
from datasvc.shards.images.header import ImageHeader, read_header, reencode
from datasvc.shards.ingestion.build import IngestWork
from datasvc.shards.sources.common.source import BadSample

_UNKNOWN_BYTES = 8


@dataclass(frozen=True)
class CheckedBatch:
    """Good samples of a part.

    Attributes:
        columns: all columns of the shards.
        kinds: encoding of each sample's `image`, "" without one.
    """

    columns: pa.RecordBatch
    kinds: Sequence[str]

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return int(self.columns.num_rows)

    def take(self, rows: Integers) -> CheckedBatch:
        """Return some of the samples, copied."""
        return CheckedBatch(self.columns.take(pa.array(rows)), [self.kinds[row] for row in rows.tolist()])

    @property
    def keys(self) -> pa.Array:
        """Key of each sample: `string[num_samples]`."""
        return self.columns.column(KEY)

    @cached_property
    def sizes_bytes(self) -> Integers:
        """About the bytes of each sample: `int64[num_samples]`."""
        return sum((value_bytes(column) for column in self.columns.columns), np.zeros(self.num_samples, np.int64))

    @cached_property
    def stops_bytes(self) -> Integers:
        """Bytes up to the end of each sample: `int64[num_samples]`."""
        return np.cumsum(self.sizes_bytes)

    @cached_property
    def digests(self) -> tuple[pa.Array, pa.Array]:
        """Sample and payload digest of each sample, see `digests`: `fixed_size_binary(16)[num_samples]`."""
        samples, payloads = digest_batch(self.columns)
        return pa.array(samples, pa.binary(DIGEST_BYTES)), pa.array(payloads, pa.binary(DIGEST_BYTES))


def check_batch(work: IngestWork, batch: pa.RecordBatch, split: str, bad: list[BadSample]) -> CheckedBatch:
    """Return the good samples of a source's batch with the columns of the shards; adds the others to `bad`.

    Images are checked, made smaller where that was asked, and measured; labels get their stored numbers.
    """
    reasons: dict[int, str] = {}
    columns = {name: batch.column(name) for name in batch.schema.names}
    kinds = [""] * batch.num_rows
    for field in batch.schema:
        if not is_image(field):
            continue
        headers, columns[field.name] = _check_images(work, batch.column(field.name), reasons, nullable=field.nullable)
        if field.name == IMAGE:
            sizes = [(header.width, header.height) if header else (0, 0) for header in headers]
            columns[WIDTH], columns[HEIGHT] = (pa.array(side, pa.int32()) for side in zip(*sizes, strict=True))
            kinds = [header.kind if header else "" for header in headers]
    if LABEL in columns and pa.types.is_integer(columns[LABEL].type):
        columns[LABEL] = _relabel(work, columns[LABEL], reasons)
    kept = pa.RecordBatch.from_arrays([columns[field.name] for field in work.schema], schema=work.schema)
    if reasons:
        keys = batch.column(KEY)
        bad += [BadSample(split, keys[row].as_py(), reason) for row, reason in sorted(reasons.items())]
        good = [row for row in range(batch.num_rows) if row not in reasons]
        kept, kinds = kept.take(pa.array(good, pa.int64())), [kinds[row] for row in good]
    return CheckedBatch(kept, kinds)


def value_bytes(column: pa.Array) -> Integers:
    """Return about how many bytes each value of a column takes: `int64[n]`; a function of the values alone."""
    kind = column.type
    if _has_offsets(kind):
        width = np.int64 if pa.types.is_large_binary(kind) or pa.types.is_large_string(kind) else np.int32
        return np.diff(_offsets(column, width)).astype(np.int64)
    if pa.types.is_map(kind):
        offsets = _offsets(column, np.int32).astype(np.int64)
        inner = np.concatenate([[0], np.cumsum(value_bytes(column.keys) + value_bytes(column.items))])
        return np.asarray(inner[offsets[1:]] - inner[offsets[:-1]], np.int64)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        width = np.int64 if pa.types.is_large_list(kind) else np.int32
        offsets = _offsets(column, width).astype(np.int64)
        inner = np.concatenate([[0], np.cumsum(value_bytes(column.values))])
        return np.asarray(inner[offsets[1:]] - inner[offsets[:-1]], np.int64)
    if pa.types.is_fixed_size_list(kind):
        return (
            np.asarray(value_bytes(column.flatten()).reshape(len(column), -1).sum(axis=1), np.int64)
            if _is_full(column)
            else np.full(len(column), kind.list_size * _UNKNOWN_BYTES)
        )
    if pa.types.is_struct(kind):
        fields = [value_bytes(column.field(number)) for number in range(kind.num_fields)]
        return sum(fields, np.zeros(len(column), np.int64))
    try:
        width_bytes = max(1, kind.bit_width // 8)
    except ValueError:
        width_bytes = _UNKNOWN_BYTES
    return np.full(len(column), width_bytes, np.int64)


def _is_full(column: pa.Array) -> bool:
    return bool(column.null_count == 0 and len(column) and column.type.list_size)


def _has_offsets(kind: pa.DataType) -> bool:
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(check(kind) for check in checks)


def _offsets(column: pa.Array, width: Any) -> npt.NDArray[Any]:
    if not len(column):
        return np.zeros(1, width)
    return np.frombuffer(column.buffers()[1], width)[column.offset : column.offset + len(column) + 1]


def _check_images(
    work: IngestWork, column: pa.Array, reasons: dict[int, str], *, nullable: bool
) -> tuple[list[ImageHeader | None], pa.Array]:
    """Return the headers and the images to store; says in `reasons` which are bad."""
    options = work.options
    headers: list[ImageHeader | None] = []
    smaller: dict[int, bytes] = {}
    for row, view in enumerate(blob_views(column)):
        header = None
        try:
            if view is None and not nullable:
                raise BadSampleError("has no image")  # noqa: TRY301 - one place turns errors into reasons
            if view is not None:
                content = reencode(view, options.reencoding) if options.reencoding.is_asked else None
                if content is not None:
                    smaller[row] = content
                header = read_header(content or view, decode=options.decode_check)
        except BadSampleError as error:
            reasons[row] = str(error)
        headers.append(header)
    if smaller:
        column = pa.array([smaller.get(row, column[row].as_py()) for row in range(len(column))], column.type)
    return headers, column


def _relabel(work: IngestWork, column: pa.Array, reasons: dict[int, str]) -> pa.Array:
    """Return the stored labels. Null and negative ones, as test sets have them, name no class and stay."""
    num_classes = len(work.source.classes)
    if not num_classes:
        return column
    labels = np.array(column.fill_null(-1).to_numpy(zero_copy_only=False), np.int64)
    for row in np.flatnonzero(labels >= num_classes).tolist():
        reasons.setdefault(row, f"its label {labels[row]} is none of the {num_classes} classes")
        labels[row] = -1
    if work.labels is None:
        return column
    stored = np.where(labels < 0, labels, np.asarray(work.labels, np.int64)[labels])
    return pa.array(stored, column.type, mask=~column.is_valid().to_numpy(zero_copy_only=False))
