"""Source of TFRecord files of `tf.Example` messages, plain, gzip or zlib, without TensorFlow.

The frame of a message is its length, a checksum of the length, and a checksum of its bytes (masked CRC32C). Both are
verified. A message with a bad checksum is one bad sample. After a bad length the next message cannot be located, so
the rest of the file is one bad sample.
"""

from __future__ import annotations

import gzip
import io
import re
import struct
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, BinaryIO, ClassVar, Final, cast

import pyarrow as pa

from datasvc.errors import BadSampleError, ConfigError, NotFoundError
from datasvc.repository.objects.objects import Digest
from datasvc.repository.store.retries import map_exceptions
from datasvc.repository.store.storage import redact_url
from datasvc.shards.format.schema import KEY
from datasvc.shards.sources.common.columns import SampleBatcher
from datasvc.shards.sources.common.files import FileReader, SourceFile, list_files
from datasvc.shards.sources.common.length_framing import read_up_to, skip
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import BadSample, SourcePart, StreamedSource
from datasvc.shards.sources.common.splits import split_of
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
_MASK: Final = 0xA282EAD8
# Bounds of the samples of each split that determine the columns.
_FIRST_SAMPLES: Final = 64
_FIRST_BYTES: Final = 16 << 20
_GZIP_OR_ZLIB: Final = 32 + zlib.MAX_WBITS  # zlib's own header detection
_STEP_BYTES: Final = 1 << 18


@dataclass(frozen=True)
class TfRecordSource(StreamedSource):
    """Listed TFRecord files.

    Attributes:
        url: URL of the source.
        schema: `key` (FILE#ROW unless a feature holds it), and a column for each feature of the first samples.
        parts: one for each file.
        features: column of each feature.
    """

    kind: ClassVar[str] = "tfrecord"

    url: str
    schema: pa.Schema
    parts: list[SourcePart]
    features: dict[str, FeatureColumn]
    classes: tuple[str, ...] = ()
    ignored: Counter[str] = field(default_factory=Counter)

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> TfRecordSource:
        """List the source; the first samples of each split determine the columns.

        Raises:
            NotFoundError: no file has the name of a TFRecord, or all are empty.
            ConfigError: the files hold no `tf.Example`; or see `tf_example.choose_columns`.
            UnavailableError: the store does not respond.
        """
        options = options or SourceOptions()
        reader = FileReader(url)
        listed = list_files(url)
        files = [file for file in listed if _NAME.fullmatch(file.name) or file.path == reader.root]
        if not files:
            raise NotFoundError(
                f"cannot ingest {redact_url(url)}: none of its {len(listed)} files has the name of a TFRecord, "
                "such as train.tfrecord or train-00000-of-00010"
            )
        ignored = Counter(file.extension or "(none)" for file in set(listed) - set(files))
        parts = [_part(file, (options.split or split_of(file.name)).lower()) for file in files]
        features, schema = choose_columns(_first_examples(reader, parts, url), options.key)
        return cls(url, schema, parts, features, ignored=ignored)

    def fingerprint(self) -> Digest:
        """Return a digest of the listing and of the columns of the features."""
        return self._digest([[asdict(part) for part in self.parts], sorted(map(str, self.features.items()))])

    def read(self, part: SourcePart) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield the samples of one file; see `StreamedSource.read`."""
        batcher = SampleBatcher(self.schema, part.split)
        for name, message in _read_messages(FileReader(self.url), part):
            try:
                if isinstance(message, BadSampleError):
                    raise message
                sample = self._sample(name, parse_example(message))
            except BadSampleError as error:
                yield BadSample(part.split, name, str(error))
            else:
                yield from batcher.add(sample)
        yield from batcher.flush()

    def _sample(self, name: str, example: dict[str, Feature]) -> dict[str, Any]:
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


def _part(file: SourceFile, split: str) -> SourcePart:
    return SourcePart(split, file.name, file.size_bytes, None, file.stamp, {"path": file.path})


def _first_examples(reader: FileReader, parts: list[SourcePart], url: str) -> list[dict[str, Feature]]:
    """Return the first samples of each split, from the first of its files that has any."""
    examples: list[dict[str, Feature]] = []
    problem = "they are empty"
    for split in dict.fromkeys(part.split for part in parts):
        examples_of_split: list[dict[str, Feature]] = []
        for part in parts:
            if part.split != split or examples_of_split:
                continue
            examples_of_split, problem_of_part = _parse_first(reader, part)
            problem = problem_of_part or problem
            examples += examples_of_split
    if not examples:
        error = NotFoundError if problem == "they are empty" else ConfigError
        raise error(f"cannot ingest {redact_url(url)}: no tf.Example in its {len(parts)} files: {problem}")
    return examples


def _parse_first(reader: FileReader, part: SourcePart) -> tuple[list[dict[str, Feature]], str]:
    """Return the first samples of a file, and the last problem with one that does not parse."""
    examples, problem, size_bytes = [], "", 0
    messages = _read_messages(reader, part)
    for name, message in islice(messages, _FIRST_SAMPLES):
        try:
            if isinstance(message, BadSampleError):
                raise message
            examples.append(parse_example(message))
            size_bytes += len(message)
        except SequenceExampleError as error:
            raise ConfigError(f"{name}: {error}") from error
        except BadSampleError as error:
            problem = f"{name}: {error}"
        if size_bytes > _FIRST_BYTES:
            break
    messages.close()
    return examples, problem


def _read_messages(reader: FileReader, part: SourcePart) -> Generator[tuple[str, bytes | BadSampleError], None, None]:
    """Yield name and content of each message of a file, or the problem with it."""
    path = part.where["path"]
    with map_exceptions("read", reader.location(path)), _open(reader, path) as stream:
        row = 0
        while True:
            name = f"{part.name}#{row}"
            try:
                header = read_up_to(stream, _HEADER.size)
                if not header:
                    return
                length = _check_header(header)
                yield name, _read_message(stream, length)
            except (_FramingLostError, EOFError, zlib.error, gzip.BadGzipFile) as error:
                yield name, BadSampleError(f"the rest of the file cannot be read: {error}")
                return
            row += 1


class _FramingLostError(Exception):
    """The start of the next message is unknown."""


def _check_header(header: bytes) -> int:
    if len(header) < _HEADER.size:
        raise _FramingLostError("it is truncated")
    length, crc = _HEADER.unpack(header)
    if masked_crc(header[:8]) != crc:
        raise _FramingLostError("the checksum of a length does not match")
    return int(length)


def _read_message(stream: BinaryIO, length: int) -> bytes | BadSampleError:
    if length > MAX_SAMPLE_BYTES:
        # The length has passed its checksum, so the next message is found after it.
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
    """Open a file; decompress it if it does not start with a length and its checksum."""
    if path.lower().endswith(".gz"):
        return reader.open(path)  # decompresses it by its name
    head = reader.read_range(path, 0, _HEADER.size)
    is_plain = len(head) == _HEADER.size and masked_crc(head[:8]) == _HEADER.unpack(head)[1]
    if is_plain or head[:1] not in (b"\x1f", b"\x78"):
        return reader.open(path)
    return cast("BinaryIO", io.BufferedReader(_Inflated(reader.open(path)), _STEP_BYTES))


class _Inflated(io.RawIOBase):
    """A stream that TensorFlow compressed with "GZIP" or "ZLIB", whatever the name of the file."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._inflater = zlib.decompressobj(_GZIP_OR_ZLIB)
        self._compressed = b""

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        buffer = memoryview(target).cast("B")
        while True:
            if self._inflater.eof:  # a gzip file may have several members
                self._compressed = self._inflater.unused_data or self._stream.read(_STEP_BYTES)
                if not self._compressed:
                    return 0
                self._inflater = zlib.decompressobj(_GZIP_OR_ZLIB)
            self._compressed = self._compressed or self._stream.read(_STEP_BYTES)
            if not self._compressed:
                raise EOFError("the compressed stream is truncated")
            piece = self._inflater.decompress(self._compressed, len(buffer))
            self._compressed = self._inflater.unconsumed_tail
            if piece:
                buffer[: len(piece)] = piece
                return len(piece)

    def close(self) -> None:
        self._stream.close()
        super().close()
