"""Source of MosaicML Streaming data sets (MDS, version 2), read without that library; `shard` defines the format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa

from datasvc.errors import BadSampleError, ConfigError, CorruptDataError, NotFoundError
from datasvc.repository.objects.objects import Digest
from datasvc.repository.store.storage import redact_url
from datasvc.shards.format.schema import KEY
from datasvc.shards.sources.common.columns import ColumnMap, SampleBatcher
from datasvc.shards.sources.common.files import FileReader, SourceFile, list_files
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import BadSample, SourcePart, StreamedSource
from datasvc.shards.sources.common.splits import split_of
from datasvc.shards.sources.common.tensors import SHAPE
from datasvc.shards.sources.mds.encodings import MdsColumn
from datasvc.shards.sources.mds.index import INDEX_FILE, MdsShard, parse_index
from datasvc.shards.sources.mds.shard import COMPRESSIONS, check_hashes, decode_sample, read_samples

# Samples of a shard that are tried until one can be read, which fixes the types that the index leaves open.
_FIRST_SAMPLES: Final = 64


@dataclass(frozen=True)
class MdsSource(StreamedSource):
    """A listed MDS data set: a folder with an index, or with a folder and an index for each split.

    Attributes:
        url: URL of the folder.
        schema: `key` (SHARD#ROW unless a column holds it), and the columns.
        parts: one for each shard.
        columns: columns of the shards, in the order of their values.
        names: names in the schema by decoded names, without the column of the keys.
        key: decoded name of the column that holds the keys; None: keys are made of shard and row.
    """

    kind: ClassVar[str] = "mds"

    url: str
    schema: pa.Schema
    parts: list[SourcePart]
    columns: tuple[MdsColumn, ...]
    names: dict[str, str]
    key: str | None
    classes: tuple[str, ...] = ()
    ignored: Counter[str] = field(default_factory=Counter)

    @property
    def keys_are_places(self) -> bool:
        """Whether keys are made of shard and row: true unless a column holds them."""
        return self.key is None

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> MdsSource:
        """List the source.

        Raises:
            NotFoundError: there is no index, a shard that it lists is missing, or there are no samples.
            ConfigError: a column holds pickles, an encoding or compression is unknown, or shards differ in columns.
            CorruptDataError: the index is not JSON, or none of the first samples can be read.
            UnavailableError: the store does not respond.
        """
        options = options or SourceOptions()
        root = url.rstrip("/").removesuffix(f"/{INDEX_FILE}")
        files = {file.name: file for file in list_files(root)}
        reader = FileReader(root)
        shards = _list_shards(reader, files, root)
        columns = {shard.columns for _, shard in shards}
        # All samples of a source have the same columns.
        if len(columns) > 1:
            raise ConfigError(
                f"cannot ingest {redact_url(url)}: its shards have different columns; ingest them as separate "
                "data sets"
            )
        parts = [_part(folder, shard, files, options.split, root) for folder, shard in shards]
        if not sum(part.num_samples or 0 for part in parts):
            raise NotFoundError(f"cannot ingest {redact_url(url)}: its index lists no samples")
        (common_columns,) = columns
        schema, names, key = _choose_columns(
            common_columns, _first_sample(reader, parts, common_columns), options.key
        )
        return cls(root, schema, parts, common_columns, names, key)

    def fingerprint(self) -> Digest:
        """Return a digest of the listing and of the mapping of columns."""
        columns = [[asdict(column) for column in self.columns], self.names, self.key]
        return self._digest([[asdict(part) for part in self.parts], columns])

    def read(self, part: SourcePart) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield the samples of one shard; see `StreamedSource.read`."""
        reader = FileReader(self.url)
        # Before the samples: a shard with a wrong hash gives none at all.
        problem = check_hashes(reader, part)
        if problem:
            yield BadSample(part.split, part.name, problem)
            return
        batcher = SampleBatcher(self.schema, part.split)
        for name, content in read_samples(reader, part):
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


def _list_shards(reader: FileReader, files: dict[str, SourceFile], url: str) -> list[tuple[str, MdsShard]]:
    """Return folder and description of each shard; an index at the top includes all folders below."""
    indexes = (
        [INDEX_FILE] if INDEX_FILE in files else sorted(name for name in files if name.endswith(f"/{INDEX_FILE}"))
    )
    if not indexes:
        raise NotFoundError(f"cannot ingest {redact_url(url)}: it has no {INDEX_FILE}")
    shards = []
    for name in indexes:
        path = files[name].path
        shards += [
            (name[: -len(INDEX_FILE)], shard) for shard in parse_index(reader.read(path), reader.location(path))
        ]
    if not shards:
        raise NotFoundError(f"cannot ingest {redact_url(url)}: its index lists no shards")
    return shards


def _part(folder: str, shard: MdsShard, files: dict[str, SourceFile], split: str | None, url: str) -> SourcePart:
    # The uncompressed file is preferred; a data set may hold only one of the two.
    chosen = next((file for file in (shard.raw, shard.compressed) if file and folder + file.name in files), None)
    if chosen is None:
        raise NotFoundError(
            f"cannot ingest {redact_url(url)}: its index lists {folder}{shard.raw.name}, which is missing; copy the "
            "whole folder"
        )
    if chosen.compression not in (None, *COMPRESSIONS):
        raise ConfigError(
            f"{folder}{chosen.name} is compressed by {chosen.compression!r}; datasvc reads "
            f"{' and '.join(COMPRESSIONS)}: decompress it in its folder, or write it again"
        )
    file = files[folder + chosen.name]
    where = {"path": file.path, "raw_bytes": shard.raw.size_bytes, **asdict(chosen)}
    name = folder + shard.raw.name
    return SourcePart((split or split_of(name)).lower(), name, file.size_bytes, shard.num_samples, file.stamp, where)


def _first_sample(reader: FileReader, parts: list[SourcePart], columns: tuple[MdsColumn, ...]) -> dict[str, Any]:
    for column in columns:
        column.fields({column.name: np.empty(0)})  # refuses pickles before anything is read
    problem: Exception | str = "all shards are empty"
    for part in parts:
        for number, (_, content) in enumerate(read_samples(reader, part)):
            try:
                if isinstance(content, BadSampleError):
                    raise content
                return decode_sample(content, columns)
            except BadSampleError as error:
                problem = error
            if number >= _FIRST_SAMPLES:
                break
    raise CorruptDataError(
        f"none of the first samples of {reader.location(parts[0].where['path'])} can be read: {problem}; restore "
        "another copy"
    )


def _choose_columns(
    columns: tuple[MdsColumn, ...], first: dict[str, Any], key: str | None
) -> tuple[pa.Schema, dict[str, str], str | None]:
    """Return the schema, its names by decoded names, and the decoded name of the key column."""
    fields = [field for column in columns for field in column.fields(first)]
    names = [field.name for field in fields]
    if len(set(names)) < len(names):
        raise ConfigError(f"two columns would have the same name: {sorted(names)}; rename one of them")
    images = {column.name for column in columns if column.is_image}
    arrays = [
        # The magic bytes of a JPEG: the index declares these columns as images, whatever the first value is.
        pa.array([b"\xff\xd8\xff" if field.name in images else first[field.name]], field.type)
        for field in fields
    ]
    chosen = ColumnMap(pa.schema(fields), pa.table(dict(zip(names, arrays, strict=True))), key=key)
    kept = [field for field in fields if field.name != chosen.key]
    schema = pa.schema(
        [chosen.schema.field(0)]
        + [
            final.with_metadata(raw.metadata) if SHAPE in (raw.metadata or {}) else final
            for raw, final in zip(kept, list(chosen.schema)[1:], strict=True)
        ]
    )
    finals = {raw.name: final for raw, final in zip(kept, schema.names[1:], strict=True)}
    return schema, finals, chosen.key
