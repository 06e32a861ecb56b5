"""Validation of the sample batches of a streamed source: check images and labels; measure sizes and digests.

`build_streamed` stores only samples that `check_batch` accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from datasvc.errors import BadSampleError
from datasvc.keyed_random import Integers
from datasvc.shards.format.digests import DIGEST_BYTES, blob_views, digest_batch, value_offsets
from datasvc.shards.format.schema import HEIGHT, IMAGE, KEY, LABEL, WIDTH, is_gathered, is_image
from datasvc.shards.images.header import ImageHeader, check_and_reencode
from datasvc.shards.ingestion.build import IngestWork
from datasvc.shards.sources.common.source import BadSample

# Assumed size of a value whose type has no fixed width, or whose size cannot be computed.
_DEFAULT_VALUE_BYTES = 8


@dataclass(frozen=True)
class CheckedBatch:
    """The good samples of a batch of the source.

    Attributes:
        columns: all columns of the shards.
        kinds: image format of each sample's `image`; "" for a sample without one.
    """

    columns: pa.RecordBatch
    kinds: Sequence[str]

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return int(self.columns.num_rows)

    def take(self, rows: Integers) -> CheckedBatch:
        """Return the samples at `rows`, copied."""
        return CheckedBatch(self.columns.take(pa.array(rows)), [self.kinds[row] for row in rows.tolist()])

    @property
    def keys(self) -> pa.Array:
        """Key of each sample: `string[num_samples]`."""
        return self.columns.column(KEY)

    @cached_property
    def sizes_bytes(self) -> Integers:
        """Approximate size of each sample in bytes: `int64[num_samples]`."""
        return sum((value_bytes(column) for column in self.columns.columns), np.zeros(self.num_samples, np.int64))

    @cached_property
    def stops_bytes(self) -> Integers:
        """Cumulative sizes in bytes, up to the end of each sample: `int64[num_samples]`."""
        return np.cumsum(self.sizes_bytes)

    @cached_property
    def digests(self) -> tuple[pa.Array, pa.Array]:
        """Sample digests and payload digests, see `format/digests.py`: `fixed_size_binary(16)[num_samples]`."""
        samples, payloads = digest_batch(self.columns)
        return pa.array(samples, pa.binary(DIGEST_BYTES)), pa.array(payloads, pa.binary(DIGEST_BYTES))


def check_batch(work: IngestWork, batch: pa.RecordBatch, split: str, bad: list[BadSample]) -> CheckedBatch:
    """Return the good samples of a source's batch with the columns of the shards; add the others to `bad`.

    Images are checked, re-encoded if the options require it, and measured. Labels get their stored numbers.
    """
    reasons: dict[int, str] = {}
    columns = {name: batch.column(name) for name in batch.schema.names}
    kinds = [""] * batch.num_rows
    for field in batch.schema:
        if not is_image(field):
            continue
        headers, columns[field.name] = _check_images(work, batch.column(field.name), reasons, nullable=field.nullable)
        if field.name == IMAGE:
            # A null or bad image has the size 0.
            columns[WIDTH] = pa.array([header.width if header else 0 for header in headers], pa.int32())
            columns[HEIGHT] = pa.array([header.height if header else 0 for header in headers], pa.int32())
            kinds = [header.kind if header else "" for header in headers]
    # A column `label` of another type is treated as an ordinary column.
    if LABEL in columns and pa.types.is_integer(columns[LABEL].type):
        columns[LABEL] = _relabel(work, columns[LABEL], reasons)
    checked = pa.RecordBatch.from_arrays([columns[field.name] for field in work.schema], schema=work.schema)
    if reasons:  # otherwise the batch is used without a copy
        keys = batch.column(KEY)
        bad += [BadSample(split, keys[row].as_py(), reason) for row, reason in sorted(reasons.items())]
        good = [row for row in range(batch.num_rows) if row not in reasons]
        checked, kinds = checked.take(pa.array(good, pa.int64())), [kinds[row] for row in good]
    return CheckedBatch(checked, kinds)


def value_bytes(column: pa.Array) -> Integers:
    """Return the approximate size of each value of a column in bytes: `int64[n]`.

    The size depends on the value alone, except in fixed-size lists: one null makes all sizes of the column estimates.
    """
    data_type = column.type
    if is_gathered(data_type):
        return np.diff(value_offsets(column)).astype(np.int64)
    if pa.types.is_map(data_type) or pa.types.is_list(data_type) or pa.types.is_large_list(data_type):
        is_map = pa.types.is_map(data_type)
        items = value_bytes(column.keys) + value_bytes(column.items) if is_map else value_bytes(column.values)
        stops = np.concatenate([[0], np.cumsum(items)])
        return np.asarray(np.diff(stops[value_offsets(column)]), np.int64)
    if pa.types.is_fixed_size_list(data_type):
        # `flatten` leaves out the values of null lists, so its values cannot be assigned to rows: estimate the sizes.
        if column.null_count or not len(column) or not data_type.list_size:
            return np.full(len(column), data_type.list_size * _DEFAULT_VALUE_BYTES)
        return np.asarray(value_bytes(column.flatten()).reshape(len(column), -1).sum(axis=1), np.int64)
    if pa.types.is_struct(data_type):
        fields = [value_bytes(column.field(number)) for number in range(data_type.num_fields)]
        return sum(fields, np.zeros(len(column), np.int64))
    try:
        width_bytes = max(1, data_type.bit_width // 8)
    except ValueError:
        width_bytes = _DEFAULT_VALUE_BYTES
    return np.full(len(column), width_bytes, np.int64)


def _check_images(
    work: IngestWork, column: pa.Array, reasons: dict[int, str], *, nullable: bool
) -> tuple[list[ImageHeader | None], pa.Array]:
    """Return the image headers and the images to store; add to `reasons` why an image is bad, by row."""
    options = work.options
    headers: list[ImageHeader | None] = []
    reencoded: dict[int, bytes] = {}
    for row, view in enumerate(blob_views(column)):
        header = None
        try:
            if view is None and not nullable:
                raise BadSampleError("has no image")  # noqa: TRY301 - one place turns errors into reasons
            if view is not None:
                header, content = check_and_reencode(view, options.reencoding, decode=options.decode_check)
                if content is not None:
                    reencoded[row] = content
        except BadSampleError as error:
            reasons[row] = str(error)
        headers.append(header)
    if reencoded:
        column = pa.array([reencoded.get(row, column[row].as_py()) for row in range(len(column))], column.type)
    return headers, column


def _relabel(work: IngestWork, column: pa.Array, reasons: dict[int, str]) -> pa.Array:
    """Return the stored labels. Null and negative labels (no class, as in test sets) stay unchanged."""
    num_classes = len(work.source.classes)
    if not num_classes:
        return column
    labels = np.array(column.fill_null(-1).to_numpy(zero_copy_only=False), np.int64)
    for row in np.flatnonzero(labels >= num_classes).tolist():
        reasons.setdefault(row, f"its label {labels[row]} has no class: expected labels below {num_classes}")
        labels[row] = -1  # `work.labels` below has no such index; the caller leaves the sample out
    if work.labels is None:
        return column
    # A negative label selects a wrong stored label, which `where` then discards.
    stored = np.where(labels < 0, labels, np.asarray(work.labels, np.int64)[labels])
    return pa.array(stored, column.type, mask=~column.is_valid().to_numpy(zero_copy_only=False))
