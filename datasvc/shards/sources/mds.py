"""MosaicML Streaming's data sets (MDS, version 2), without their library.

A shard is the number of samples, an offset for each and for the end (uint32, little-endian), a JSON of the columns
that nobody needs, and the samples: sizes of the values that vary, then the values. Hashes that `hashlib` has (md5,
sha1, sha256, ...) are verified before a shard is read; MosaicML's xxhash ones (xxh64, ...) are not.
"""

from __future__ import annotations

import gzip
import hashlib
import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from typing import Any, BinaryIO, ClassVar, Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import zstandard

from datasvc.errors import BadSampleError, ConfigError, CorruptDataError, NotFoundError
from datasvc.repository.objects import Digest
from datasvc.repository.storage import redact_url, translated
from datasvc.shards.schema import KEY
from datasvc.shards.sources.columns import ColumnMap, SampleBatcher
from datasvc.shards.sources.files import FileReader, SourceFile, list_files
from datasvc.shards.sources.framing import read_up_to, skip
from datasvc.shards.sources.mds_encodings import MdsColumn
from datasvc.shards.sources.mds_index import INDEX_FILE, MdsShard, parse_index
from datasvc.shards.sources.options import SourceOptions
from datasvc.shards.sources.source import BadSample, Part, StreamedSource
from datasvc.shards.sources.splits import split_of
from datasvc.shards.sources.tensors import MAX_SAMPLE_BYTES, SHAPE

_COMPRESSIONS: Final = ("gz", "zstd")
_STEP_BYTES: Final = 4 << 20
_FIRST_SAMPLES: Final = 64


@dataclass(frozen=True)
class MdsDataset(StreamedSource):
    """An MDS data set: a folder with an index, or with split folders that have one each.

    Attributes:
        url: where it lies.
        schema: `key` (SHARD#ROW unless a column holds it), and the columns.
        parts: one for each shard.
        columns: of the shards, in the order of their values.
        names: of the schema's columns, by the name that they decode to; that of the keys is absent.
        key: what the keys decode to, None: they are made.
    """

    kind: ClassVar[str] = "mds"

    url: str
    schema: pa.Schema
    parts: list[Part]
    columns: tuple[MdsColumn, ...]
    names: dict[str, str]
    key: str | None
    classes: tuple[str, ...] = ()
    ignored: Counter[str] = field(default_factory=Counter)

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> MdsDataset:
        """List the source.

        Raises:
            NotFoundError: there is no index, a shard that it names is missing, or there is no sample.
            ConfigError: a column holds pickles, an encoding or a compression is unknown, shards differ in columns.
            CorruptDataError: the index is no JSON, or no first sample can be read.
            UnavailableError: the store does not answer.
        """
        options = options or SourceOptions()
        root = url.rstrip("/").removesuffix(f"/{INDEX_FILE}")
        files = {file.name: file for file in list_files(root)}
        reader = FileReader(root)
        shards = _list_shards(reader, files, root)
        columns = {shard.columns for _, shard in shards}
        if len(columns) > 1:
            raise ConfigError(f"cannot ingest {redact_url(url)}: its shards have different columns")
        parts = [_part(folder, shard, files, options.split, root) for folder, shard in shards]
        if not sum(part.num_samples or 0 for part in parts):
            raise NotFoundError(f"cannot ingest {redact_url(url)}: its index names no samples")
        (only,) = columns
        schema, names, key = _choose_columns(only, _first_sample(reader, parts, only), options.key)
        return cls(root, schema, parts, only, names, key)

    def fingerprint(self) -> Digest:
        """Return a digest of the listing and of what the columns become."""
        columns = [[asdict(column) for column in self.columns], self.names, self.key]
        return self._digest([[asdict(part) for part in self.parts], columns])

    def read(self, part: Part) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield the samples of one shard; see `StreamedSource.read`."""
        reader = FileReader(self.url)
        problem = _check_hashes(reader, part)
        if problem:
            yield BadSample(part.split, part.name, problem)
            return
        batcher = SampleBatcher(self.schema, part.split)
        for name, content in _read_samples(reader, part):
            try:
                if isinstance(content, BadSampleError):
                    raise content
                sample = self._sample(name, decode_sample(content, self.columns))
            except BadSampleError as error:
                yield BadSample(part.split, name, str(error))
            else:
                yield from batcher.add(sample)
        yield from batcher.flush()

    def _sample(self, name: str, decoded: dict[str, Any]) -> dict[str, Any]:
        key = name if self.key is None else str(decoded[self.key])
        return {KEY: key, **{final: decoded[raw] for raw, final in self.names.items()}}


def decode_sample(content: bytes, columns: tuple[MdsColumn, ...]) -> dict[str, Any]:
    """Return the values of one sample, by the names that its columns decode to.

    Raises:
        BadSampleError: its sizes do not add up, or a value is not of its encoding.
    """
    num_varying = sum(column.size_bytes is None for column in columns)
    start = 4 * num_varying
    if start > len(content):
        raise BadSampleError(f"it has {len(content)} bytes, too few for {num_varying} sizes")
    varying = iter(np.frombuffer(content[:start], "<u4").tolist())
    sizes = [next(varying) if column.size_bytes is None else column.size_bytes for column in columns]
    offsets = list(accumulate(sizes, initial=start))
    if offsets[-1] != len(content):
        raise BadSampleError(f"its values take {offsets[-1] - start} bytes; it has {len(content) - start} for them")
    decoded: dict[str, Any] = {}
    for column, (begin, stop) in zip(columns, pairwise(offsets), strict=True):
        decoded.update(column.decode(memoryview(content)[begin:stop]))
    return decoded


def _list_shards(reader: FileReader, files: dict[str, SourceFile], url: str) -> list[tuple[str, MdsShard]]:
    """Return folder and description of each shard; an index at the top speaks for all below."""
    indexes = (
        [INDEX_FILE] if INDEX_FILE in files else sorted(name for name in files if name.endswith(f"/{INDEX_FILE}"))
    )
    if not indexes:
        raise NotFoundError(f"cannot ingest {redact_url(url)}: there is no {INDEX_FILE} in it")
    shards = []
    for name in indexes:
        path = files[name].path
        shards += [
            (name[: -len(INDEX_FILE)], shard) for shard in parse_index(reader.read(path), reader.location(path))
        ]
    if not shards:
        raise NotFoundError(f"cannot ingest {redact_url(url)}: its index names no shards")
    return shards


def _part(folder: str, shard: MdsShard, files: dict[str, SourceFile], split: str | None, url: str) -> Part:
    chosen = next((each for each in (shard.raw, shard.compressed) if each and folder + each.name in files), None)
    if chosen is None:
        raise NotFoundError(
            f"cannot ingest {redact_url(url)}: its index names {folder}{shard.raw.name}, which is gone"
        )
    if chosen.compression not in (None, *_COMPRESSIONS):
        raise ConfigError(
            f"{folder}{chosen.name} is compressed by {chosen.compression!r}; datasvc reads "
            f"{' and '.join(_COMPRESSIONS)}: decompress it beside the index, or write it again"
        )
    file = files[folder + chosen.name]
    where = {"path": file.path, "raw_bytes": shard.raw.size_bytes, **asdict(chosen)}
    name = folder + shard.raw.name
    return Part((split or split_of(name)).lower(), name, file.size_bytes, shard.num_samples, file.stamp, where)


def _first_sample(reader: FileReader, parts: list[Part], columns: tuple[MdsColumn, ...]) -> dict[str, Any]:
    for column in columns:
        column.fields({column.name: np.empty(0)})  # refuses pickles before anything is read
    problem: Exception | str = "all shards are empty"
    for part in parts:
        for number, (_, content) in enumerate(_read_samples(reader, part)):
            try:
                if isinstance(content, BadSampleError):
                    raise content
                return decode_sample(content, columns)
            except BadSampleError as error:
                problem = error
            if number >= _FIRST_SAMPLES:
                break
    raise CorruptDataError(f"no sample of {reader.location(parts[0].where['path'])} can be read: {problem}")


def _choose_columns(
    columns: tuple[MdsColumn, ...], first: dict[str, Any], key: str | None
) -> tuple[pa.Schema, dict[str, str], str | None]:
    """Return the schema, its names by the ones that columns decode to, and what holds the keys."""
    fields = [each for column in columns for each in column.fields(first)]
    names = [each.name for each in fields]
    if len(set(names)) < len(names):
        raise ConfigError(f"two columns would have one name: {sorted(names)}; rename one of them")
    images = {column.name for column in columns if column.is_image}
    arrays = [
        # The index says that these are images, whatever the first one looks like.
        pa.array([b"\xff\xd8\xff" if each.name in images else first[each.name]], each.type)
        for each in fields
    ]
    chosen = ColumnMap(pa.schema(fields), pa.table(dict(zip(names, arrays, strict=True))), key=key)
    kept = [each for each in fields if each.name != chosen.key]
    schema = pa.schema(
        [chosen.schema.field(0)]
        + [
            final.with_metadata(raw.metadata) if SHAPE in (raw.metadata or {}) else final
            for raw, final in zip(kept, list(chosen.schema)[1:], strict=True)
        ]
    )
    finals = {raw.name: final for raw, final in zip(kept, schema.names[1:], strict=True)}
    return schema, finals, chosen.key


def _check_hashes(reader: FileReader, part: Part) -> str:
    """Return what differs from the index's hashes, "" where nothing does."""
    expected = {name: value for name, value in part.where["hashes"].items() if name in hashlib.algorithms_available}
    hashes = {name: hashlib.new(name) for name in expected if not name.startswith("shake")}
    if not hashes:
        return ""
    offset = 0
    while content := reader.read_range(part.where["path"], offset, _STEP_BYTES):
        for each in hashes.values():
            each.update(content)
        offset += len(content)
    for name, each in hashes.items():
        if each.hexdigest() != expected[name]:
            return f"its {name} is {each.hexdigest()}; the index says {expected[name]}: none of its samples is used"
    return ""


def _read_samples(reader: FileReader, part: Part) -> Iterator[tuple[str, bytes | BadSampleError]]:
    """Yield name and content of each sample of a shard, or what is wrong with it."""
    path, num_samples, row = part.where["path"], part.num_samples or 0, 0
    with translated("read", reader.location(path)), _open(reader, path, part.where["compression"]) as stream:
        try:
            offsets = _read_offsets(stream, num_samples, part.where["raw_bytes"])
            for row, size_bytes in enumerate(np.diff(offsets).tolist()):
                yield f"{part.name}#{row}", _read_sample(stream, size_bytes)
            row = num_samples
            _check_end(stream, part.where["raw_bytes"])
        except (_LostError, EOFError, gzip.BadGzipFile, zstandard.ZstdError) as error:
            message = f"the rest of the shard ({num_samples - row} samples) cannot be read: {error}"
            yield f"{part.name}#{row}" if row else part.name, BadSampleError(message)


class _LostError(Exception):
    """The rest of a shard cannot be read."""


def _read_offsets(stream: BinaryIO, num_samples: int, raw_bytes: int) -> npt.NDArray[np.int64]:
    """Return where each sample starts and the last one ends: `int64[num_samples + 1]`; the first one is next."""
    head = read_up_to(stream, 4)
    found = int.from_bytes(head, "little")
    if len(head) < 4 or found != num_samples:
        raise _LostError(f"it says that it has {found} samples, the index {num_samples}")
    table = read_up_to(stream, 4 * (num_samples + 1))
    if len(table) < 4 * (num_samples + 1):
        raise _LostError("it is cut off in its header")
    offsets = np.frombuffer(table, "<u4").astype(np.int64)
    header_bytes = 4 + len(table)
    if offsets[0] < header_bytes or np.any(np.diff(offsets) < 0) or offsets[-1] != raw_bytes:
        raise _LostError(
            f"its samples lie between {offsets[0]} and {offsets[-1]}; expected from {header_bytes} or later, in "
            f"order, to {raw_bytes} as the index says"
        )
    if skip(stream, int(offsets[0]) - header_bytes) < offsets[0] - header_bytes:
        raise _LostError("it is cut off in its header")
    return offsets


def _check_end(stream: BinaryIO, raw_bytes: int) -> None:
    if stream.read(1):
        raise _LostError(f"it goes on behind the {raw_bytes} bytes that the index says")


def _read_sample(stream: BinaryIO, size_bytes: int) -> bytes | BadSampleError:
    if size_bytes > MAX_SAMPLE_BYTES:
        skip(stream, size_bytes)
        return BadSampleError(f"it has {size_bytes} bytes; expected at most {MAX_SAMPLE_BYTES}")
    content = read_up_to(stream, size_bytes)
    if len(content) < size_bytes:
        raise _LostError("it is cut off")
    return content


def _open(reader: FileReader, path: str, compression: str | None) -> BinaryIO:
    stream = reader.open(path)  # which decompresses .gz and .zst
    if compression == "zstd" and not path.endswith(".zst"):
        decompressed = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
        return cast("BinaryIO", io.BufferedReader(decompressed, 1 << 17))
    if compression == "gz" and not path.endswith(".gz"):
        return cast("BinaryIO", gzip.GzipFile(fileobj=stream, mode="rb"))
    return stream
