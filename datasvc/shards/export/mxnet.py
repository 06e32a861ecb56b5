"""Export format of MXNet: RecordIO with the header of images, an index and a list, as `im2rec` writes them.

The number of an image is its key if all keys of the split are numbers, else its place in the split. The list has the
number, label and key of each image.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datasvc.errors import ConfigError
from datasvc.shards.export.destination import Destination, percent_encoded, safe_part
from datasvc.shards.export.export_format import (
    ExportFormat,
    ExportUnit,
    WrittenFiles,
    check_images,
    given_columns,
    refused_column,
    refused_null,
)
from datasvc.shards.format.schema import IMAGE, KEY, LABEL, is_list
from datasvc.shards.sources.records.mxnet import IMAGE_HEADER
from datasvc.shards.sources.records.recordio import MAX_RECORD_BYTES, frame
from datasvc.shards.versions.dataset import Split
from datasvc.shards.versions.keys import SplitKeys

_SUPPORTED_BY: Final = "parquet, mds, tfrecord"
_ID: Final = r"\A(0|[1-9][0-9]{0,18})\z"  # a number below 2 ** 64, without zeros in front
_UNSAFE: Final = re.compile(r"[\x00-\x1f\x7f%]")  # would end a line or field of the list, or look percent-encoded


class MxnetExport(ExportFormat):
    """Writes each split as `SPLIT.rec`, `SPLIT.idx` and `SPLIT.lst`; see the module docstring."""

    name: ClassVar[str] = "mxnet"
    # MXNet and DALI read one file with one index.
    is_one_per_split: ClassVar[bool] = True

    def check(self, split: Split) -> None:
        """Raise ConfigError for columns other than images and labels that float32 can hold."""
        check_images(self.name, split)
        for column in given_columns(split.table.sample_schema):
            if column.name != IMAGE and not _is_label(column):
                raise refused_column(self.name, column, _SUPPORTED_BY)

    def write(self, unit: ExportUnit, destination: Destination) -> WrittenFiles:
        """Write the files of a split. For errors, see `ExportFormat.write`."""
        name = safe_part(unit.split.name)
        has_ids = _are_keys_ids(unit.split)
        offset = list_bytes = index_bytes = 0
        with (
            destination.writing(f"{name}.rec") as file,
            destination.writing(f"{name}.idx") as index,
            destination.writing(f"{name}.lst") as listing,
        ):
            for number, sample in enumerate(unit.samples()):
                image_id = int(sample[KEY]) if has_ids else number
                labels = _labels(sample)
                record = _record(sample, image_id, labels)
                key = _UNSAFE.sub(percent_encoded, sample[KEY])
                index_bytes += index.write(f"{image_id}\t{offset}\n".encode())
                list_bytes += listing.write("\t".join([*map(str, (image_id, *labels)), f"{key}\n"]).encode())
                offset += file.write(record)
        return WrittenFiles(unit.num_samples, 3, offset + index_bytes + list_bytes)


def _is_label(column: pa.Field) -> bool:
    """Return whether a column holds labels, of which float32 can hold the floats exactly."""
    inner = column.type.value_type if is_list(column.type) else column.type
    is_number = pa.types.is_integer(inner) or pa.types.is_float32(inner) or pa.types.is_float16(inner)
    return bool(column.name == LABEL and is_number)


def _are_keys_ids(split: Split) -> bool:
    """Return whether all keys of a split are numbers that a header can hold."""
    shards = SplitKeys(split.repository.objects, split.table)
    return all(pc.all(pc.match_substring_regex(shard.keys, _ID)).as_py() is not False for shard in shards)


def _labels(sample: dict[str, Any]) -> list[Any]:
    """Return the labels of a sample, 0 without a label. Raise ConfigError if they are null, none or not exact."""
    value = sample.get(LABEL, 0)
    labels = value if isinstance(value, list) else [value]
    if None in labels:
        raise refused_null("mxnet", LABEL, sample[KEY], _SUPPORTED_BY)
    # Floats are exact, see `_is_label`.
    is_exact = not labels or not isinstance(labels[0], int) or np.array(labels, "<f4").tolist() == labels
    if not labels or not is_exact:
        raise ConfigError(
            f"mxnet cannot hold the label {value} of sample {sample[KEY]!r}: a record has at least one label, and "
            f"labels are float32; formats that can: {_SUPPORTED_BY}"
        )
    return labels


def _record(sample: dict[str, Any], image_id: int, labels: list[Any]) -> bytes:
    """Return a sample as it is stored in a file. Raise ConfigError for a null image, or if it is too large."""
    if sample[IMAGE] is None:
        raise refused_null("mxnet", IMAGE, sample[KEY], _SUPPORTED_BY)
    is_listed = isinstance(sample.get(LABEL), list)
    head = IMAGE_HEADER.pack(len(labels) if is_listed else 0, 0 if is_listed else labels[0], image_id, 0)
    record = b"".join([head, np.array(labels, "<f4").tobytes() if is_listed else b"", sample[IMAGE]])
    if len(record) > MAX_RECORD_BYTES:
        raise ConfigError(f"sample {sample[KEY]!r} has {len(record)} bytes; mxnet records have less than 512 MiB")
    return frame(record)
