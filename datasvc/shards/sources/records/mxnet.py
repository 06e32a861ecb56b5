"""Source of MXNet's RecordIO files (`.rec`), such as `im2rec` writes; MXNet is not needed.

A record of an image starts with a header: its number, and its label or labels. If one of the first records of the
source is such a record, the columns are `image` and `label`. Otherwise the column is `image` if one of the first
records is an image without a header, else `value`. Files are read in ranges, which need no index.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.errors import BadSampleError, ConfigError, NotFoundError
from datasvc.printable import count_text
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.format.schema import IMAGE, KEY, LABEL, image_field, is_list
from datasvc.shards.sources.common.columns import looks_like_image, to_batches
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.listing import SourceFile, list_files
from datasvc.shards.sources.common.options import SourceOptions, split_of_file
from datasvc.shards.sources.common.source import BadSample, FileSource, SourcePart
from datasvc.shards.sources.records.recordio import read_records

# Number of labels after the header (0: the header has the label), label, and low and high half of the image's number.
IMAGE_HEADER: Final = struct.Struct("<IfQQ")
_PART_BYTES: Final = 64 << 20
# The first records of each split determine the columns: at most this many records, and about this many bytes.
_FIRST_RECORDS: Final = 64
_FIRST_BYTES: Final = 16 << 20

_Content = tuple[str, bytes | BadSampleError]  # FILE#BYTE_OFFSET of a record, and its content or error


class ImageRecord(NamedTuple):
    """A record with the header of images: number, `float32[n]` labels, whether they are a list, encoded image."""

    id: int
    labels: npt.NDArray[np.float32]
    is_labelled_by_list: bool
    image: bytes


@dataclass(frozen=True, kw_only=True)
class MxnetSource(FileSource):
    """RecordIO files; parts are ranges of them.

    Attributes:
        has_ids: whether keys are the numbers in the headers, after the name of the file if a split has several. If
            numbers repeat, or records have none, keys are `FILE#BYTE_OFFSET`.
    """

    kind: ClassVar[str] = "mxnet"

    has_ids: bool

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> MxnetSource:
        """List the source; each split's first records determine the columns. For errors, see `FileSource.list`."""
        options = options or SourceOptions()
        listed = list_files(url)
        files = [file for file in listed if file.name.lower().endswith(".rec")]
        if not files:
            raise NotFoundError(
                f"cannot ingest {redact_url(url)}: none of its {count_text(len(listed), 'file')} has the name of a "
                "RecordIO file, such as train.rec; decompress such files first"
            )
        num_files = Counter(split_of_file(file.name, options) for file in files)
        parts = [part for file in files for part in _plan_parts(file, split_of_file(file.name, options), num_files)]
        first = _first_records(url, parts)
        schema = _schema_of(list(first.values()))
        # A number need not be unique among several files, because their names are parts of the keys.
        ids = [(name.rpartition("#")[0], image.id) for name, record in first.items() for image in _images([record])]
        ignored = listed.unused([*files, *(file for file in listed if file.name.lower().endswith(".idx"))])
        has_ids = len(set(ids)) == len(ids)
        return cls(url=url, schema=schema, parts=parts, ignored=ignored, has_ids=has_ids)

    def read(self, part: SourcePart) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield the samples of a range of a file; see `StreamedSource.read`."""
        to_sample = partial(self._sample, part.where["prefix"])
        return to_batches(self.schema, part, _read_parts(self.url, [part]), to_sample)

    def _sample(self, prefix: str, name: str, record: bytes) -> dict[str, Any]:
        """Return a sample by column. Raise BadSampleError if the record is not like the first ones."""
        if LABEL not in self.schema.names:
            return {KEY: name, self.schema.names[1]: record}
        parsed = parse_image_record(record)
        if not parsed.image:
            raise BadSampleError("it has labels but no image, as records about groups of images have")
        label: Any = parsed.labels
        label_type = self.schema.field(LABEL).type
        if not is_list(label_type):
            label = label.item() if len(label) == 1 else label.tolist()
            is_integer = pa.types.is_integer(label_type)
            if not isinstance(label, float) or (is_integer and not label.is_integer()):
                expected = "an integer" if is_integer else "a number"
                raise BadSampleError(f"its label is {label!r:.80}; expected {expected}, as in the first records")
            label = int(label) if is_integer else label
        return {KEY: f"{prefix}{parsed.id}" if self.has_ids else name, IMAGE: parsed.image, LABEL: label}


def parse_image_record(record: bytes) -> ImageRecord:
    """Parse a record with the header of images. Raise BadSampleError if it is too short."""
    if len(record) < IMAGE_HEADER.size:
        raise BadSampleError(f"it has {len(record)} bytes; the header of an image has {IMAGE_HEADER.size}")
    num_labels, label, low, high = IMAGE_HEADER.unpack_from(record)
    stop = IMAGE_HEADER.size + 4 * num_labels
    if stop > len(record):
        raise BadSampleError(f"its header declares {num_labels} labels, but it has {len(record)} bytes")
    labels = np.frombuffer(record, "<f4", num_labels, IMAGE_HEADER.size) if num_labels else np.array([label], "<f4")
    return ImageRecord(high << 64 | low, labels, num_labels > 0, record[stop:])


def _plan_parts(file: SourceFile, split: str, num_files: Counter[str]) -> Iterator[SourcePart]:
    """Yield the ranges of a file; a record belongs to the range in which it starts."""
    prefix = f"{file.name}#" if num_files[split] > 1 else ""
    for start in range(0, file.size_bytes, _PART_BYTES):
        stop = min(start + _PART_BYTES, file.size_bytes)
        name = file.name if stop - start == file.size_bytes else f"{file.name}#{start}"
        where = {"path": file.path, "name": file.name, "start": start, "stop": stop, "prefix": prefix}
        yield SourcePart(split, name, stop - start, stamp=file.stamp, where=where)


def _read_parts(url: str, parts: Iterable[SourcePart]) -> Generator[_Content, None, None]:
    """Yield the records of parts."""
    reader = FileReader(url)
    for where in (part.where for part in parts):
        path, start = where["path"], where["start"]
        with map_exceptions("read", reader.location(path)), reader.open(path, start=start) as stream:
            for offset, record in read_records(stream, start, where["stop"]):
                yield f"{where['name']}#{offset}", record


def _first_records(url: str, parts: Sequence[SourcePart]) -> dict[str, bytes]:
    """Return the first records of each split by FILE#BYTE_OFFSET. Raise ConfigError or NotFoundError without one."""
    records: dict[str, bytes] = {}
    problem = ""
    for split in dict.fromkeys(part.split for part in parts):
        size_bytes = 0
        # `closing`, because the loop may end before the last record, and the file must not stay open.
        with closing(_read_parts(url, (part for part in parts if part.split == split))) as contents:
            for name, record in islice(contents, _FIRST_RECORDS):
                if isinstance(record, BadSampleError):
                    problem = problem or f"{name}: {record}"
                    continue
                records[name] = record
                size_bytes += len(record)
                if size_bytes >= _FIRST_BYTES:
                    break
    if not records:
        error = ConfigError if problem else NotFoundError
        raise error(f"cannot ingest {redact_url(url)}: it has no record: {problem or 'the files are empty'}")
    return records


def _schema_of(records: Sequence[bytes]) -> pa.Schema:
    """Return the columns from the first records of the source."""
    key = pa.field(KEY, pa.string(), nullable=False)
    # One such record decides, because other content is very unlikely to have an image behind a valid header.
    if images := _images(records):
        label_type = pa.list_(pa.float32())
        if not any(image.is_labelled_by_list for image in images):
            labels = [image.labels.item() for image in images]
            is_class = all(label.is_integer() and abs(label) < 1 << 31 for label in labels)
            label_type = pa.int32() if is_class else pa.float32()
        return pa.schema([key, image_field(IMAGE), pa.field(LABEL, label_type, nullable=False)])
    if any(map(looks_like_image, records)):
        return pa.schema([key, image_field(IMAGE)])
    return pa.schema([key, pa.field("value", pa.large_binary(), nullable=False)])


def _images(records: Sequence[bytes]) -> list[ImageRecord]:
    """Return those records that have a header and an image."""
    images = []
    for record in records:
        with suppress(BadSampleError):
            images.append(parse_image_record(record))
    return [image for image in images if looks_like_image(image.image)]
