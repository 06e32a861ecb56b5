"""Source of TFRecord files of `tf.Example` messages, uncompressed, gzip or zlib; TensorFlow is not needed.

A file has, for each message: its length, a checksum of the length, its bytes, and a checksum of the bytes. Both
checksums (masked CRC32C) are verified. If that of the bytes is wrong, the message is one bad sample. If that of the
length is wrong, the next message cannot be located, so the rest of the file is one bad sample.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, ClassVar, Final, cast

import pyarrow as pa

from datasvc.errors import BadSampleError, ConfigError, NotFoundError
from datasvc.printable import count_text
from datasvc.repository.objects.objects import Digest
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.format.schema import KEY
from datasvc.shards.sources.common.columns import to_batches
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.listing import list_files
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import BadSample, FileSource, SourcePart, file_part
from datasvc.shards.sources.common.streams import COMPRESSIONS, DECOMPRESSION_ERRORS, decompress, read_up_to, skip
from datasvc.shards.sources.common.tensors import MAX_SAMPLE_BYTES
from datasvc.shards.sources.records.tf_example import (
    Feature,
    FeatureColumn,
    SequenceExampleError,
    choose_columns,
    parse_example,
)

# name.tfrecord, name.tfrecords.gz, name.tfrecord-00000-of-00010, train-00000-of-01024
_NAME: Final = re.compile(
    r".*(\.tfrecords?|\.tfrecords?-\d+-of-\d+|[^.]-\d{5}-of-\d{5})(\.gz|\.gzip|\.zlib)?", re.IGNORECASE
)
# Length and its checksum; the message and its checksum follow.
_HEADER: Final = struct.Struct("<QI")
_CRC: Final = struct.Struct("<I")
# TFRecord rotates each CRC32C and adds this constant.
_MASK: Final = 0xA282EAD8
# The first samples of each split determine the columns: at most this many samples, and about this many bytes.
_FIRST_SAMPLES: Final = 64
_FIRST_BYTES: Final = 16 << 20


@dataclass(frozen=True, kw_only=True)
class TfRecordSource(FileSource):
    """A source of TFRecord files, each of which is a part. The key is `FILE#ROW` unless a feature holds it.

    Attributes:
        features: column of each feature.
    """

    kind: ClassVar[str] = "tfrecord"

    features: dict[str, FeatureColumn]

    @property
    def keys_are_places(self) -> bool:
        """Whether keys are made of file and row: true unless a feature holds the keys."""
        return all(column.column is not None for column in self.features.values())

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> TfRecordSource:
        """List the source; each split's first samples determine the columns. For errors, see `FileSource.list`."""
        options = options or SourceOptions()
        reader = FileReader(url)
        listed = list_files(url)
        # If the URL is that of a file, any name is accepted.
        files = [file for file in listed if _NAME.fullmatch(file.name) or file.path == reader.root]
        if not files:
            raise NotFoundError(
                f"cannot ingest {redact_url(url)}: none of its {count_text(len(listed), 'file')} has the name of a "
                "TFRecord, such as train.tfrecord or train-00000-of-00010"
            )
        parts = [file_part(file, options) for file in files]
        features, schema = choose_columns(_first_examples(reader, parts, url), options.key)
        ignored = listed.unused(files)
        return cls(url=url, schema=schema, parts=parts, ignored=ignored, features=features)

    def fingerprint(self) -> Digest:
        """Return a digest of the listing and of the columns of the features."""
        return self._digest([[asdict(part) for part in self.parts], sorted(map(str, self.features.items()))])

    def read(self, part: SourcePart) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield the samples of one file; see `StreamedSource.read`."""
        return to_batches(self.schema, part, _read_messages(FileReader(self.url), part), self._sample)

    def _sample(self, name: str, message: bytes) -> dict[str, Any]:
        """Return a sample by column; its key is `name` unless a feature holds it. Raise BadSampleError."""
        example = parse_example(message)
        unknown = sorted(example.keys() - self.features.keys())
        if unknown:
            raise BadSampleError(f"it has features that the first samples do not have: {unknown[:10]}")
        sample: dict[str, Any] = {KEY: name}
        for feature, column in self.features.items():
            value = column.value(feature, example.get(feature))
            if column.column is not None:
                sample[column.column] = value
            elif value is None:
                raise BadSampleError(f"it lacks the feature {feature!r}, which holds its key")
            else:
                sample[KEY] = str(value)
        return sample


def masked_crc(content: bytes) -> int:
    """Return the checksum of `content` as TFRecord stores it."""
    import google_crc32c  # here, so that other formats work where it is not installed

    crc = int(google_crc32c.value(content))
    return (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF


def _first_examples(reader: FileReader, parts: list[SourcePart], url: str) -> list[dict[str, Feature]]:
    """Return the first samples of each split. They come from its first file that has a readable sample."""
    examples: list[dict[str, Feature]] = []
    problem = ""
    for split in dict.fromkeys(part.split for part in parts):
        for part in parts:
            if part.split == split:
                part_examples, part_problem = _parse_first(reader, part)
                examples += part_examples
                problem = part_problem or problem
                if part_examples:
                    break
    if not examples:
        error = ConfigError if problem else NotFoundError
        reason = problem or "they are empty"
        raise error(
            f"cannot ingest {redact_url(url)}: no tf.Example in its {count_text(len(parts), 'file')}: {reason}"
        )
    return examples


def _parse_first(reader: FileReader, part: SourcePart) -> tuple[list[dict[str, Feature]], str]:
    """Return the first samples of a file, and the problem of the last unreadable one of them; "" without one."""
    examples, problem, size_bytes = [], "", 0
    # `closing`, because the loop may end before the last message, and the file must not stay open.
    with closing(_read_messages(reader, part)) as messages:
        for name, message in itertools.islice(messages, _FIRST_SAMPLES):
            try:
                if isinstance(message, BadSampleError):
                    raise message
                examples.append(parse_example(message))
                size_bytes += len(message)
            # Before BadSampleError, its base class. The listing fails, because no message of this kind can be
            # converted to columns.
            except SequenceExampleError as error:
                raise ConfigError(f"{name}: {error}") from error
            except BadSampleError as error:
                problem = f"{name}: {error}"
            if size_bytes > _FIRST_BYTES:
                break
    return examples, problem


def _read_messages(reader: FileReader, part: SourcePart) -> Generator[tuple[str, bytes | BadSampleError], None, None]:
    """Yield the name of each message of a file, with its content or the error of reading it."""
    path = part.where["path"]
    with map_exceptions("read", reader.location(path)), _open(reader, path) as stream:
        for row in itertools.count():
            name = f"{part.name}#{row}"
            try:
                header = read_up_to(stream, _HEADER.size)
                if not header:
                    return
                length = _check_header(header)
                yield name, _read_message(stream, length)
            except (_FramingLostError, *DECOMPRESSION_ERRORS) as error:
                yield name, BadSampleError(f"the rest of the file cannot be read: {error}")
                return


class _FramingLostError(Exception):
    """The start of the next message is unknown, so no further message of the file can be read."""


def _check_header(header: bytes) -> int:
    """Return the length of the message that follows a header. Raise _FramingLostError if the checksum is wrong."""
    if len(header) < _HEADER.size:
        raise _FramingLostError("it is truncated")
    length, crc = _HEADER.unpack(header)
    if masked_crc(header[:8]) != crc:
        raise _FramingLostError("the checksum of a length does not match")
    return int(length)


def _read_message(stream: BinaryIO, length: int) -> bytes | BadSampleError:
    """Return a message; an error if only this one is unreadable. Raise _FramingLostError if the file ends in it."""
    if length > MAX_SAMPLE_BYTES:
        # The length has the right checksum, so the next message can be located.
        if skip(stream, length + _CRC.size) < length + _CRC.size:
            raise _FramingLostError(f"it is truncated in a message of {length} bytes")
        return BadSampleError(f"it has {length} bytes; expected at most {MAX_SAMPLE_BYTES}")
    content = read_up_to(stream, length + _CRC.size)
    if len(content) < length + _CRC.size:
        raise _FramingLostError(f"it is truncated in a message of {length} bytes")
    message = content[:length]
    if masked_crc(message) != _CRC.unpack(content[length:])[0]:
        return BadSampleError("its checksum does not match")
    return message


def _open(reader: FileReader, path: str) -> BinaryIO:
    """Open a file, decompressed if its first bytes are those of gzip or zlib."""
    stream = reader.open(path)
    if path.lower().endswith(tuple(COMPRESSIONS)):
        return stream  # the reader has decompressed it, because of this extension
    # TensorFlow gives compressed files any name, so the first bytes decide. A plain file may start with the same
    # bytes, but then the checksum of its first length matches.
    head = cast("Any", stream).peek(_HEADER.size)[: _HEADER.size]
    is_plain = len(head) == _HEADER.size and masked_crc(head[:8]) == _HEADER.unpack(head)[1]
    return stream if is_plain or head[:1] not in (b"\x1f", b"\x78") else decompress(stream, "gzip")
