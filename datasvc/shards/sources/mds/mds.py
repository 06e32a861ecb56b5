"""Source of MosaicML Streaming data sets (MDS, version 2), read without the library of MosaicML.

`shard.py` describes the format. A *decoded name* is the name of a value that `decode_sample` returns: the name of a
column, or NAME.shape for the shape of the array if the shapes in the column vary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa

from datasvc.errors import BadSampleError, ConfigError, CorruptDataError, NotFoundError
from datasvc.repository.objects.objects import Digest
from datasvc.repository.store.redaction import redact_url
from datasvc.shards.format.schema import KEY
from datasvc.shards.sources.common.columns import ColumnMap, to_batches
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.listing import SourceFile, list_files
from datasvc.shards.sources.common.options import SourceOptions, split_of_file
from datasvc.shards.sources.common.source import BadSample, FileSource, SourcePart
from datasvc.shards.sources.common.tensors import SHAPE
from datasvc.shards.sources.mds.encodings import MdsColumn
from datasvc.shards.sources.mds.shard import (
    COMPRESSIONS,
    INDEX_FILE,
    MdsShard,
    check_hashes,
    decode_sample,
    parse_index,
    read_samples,
)

# The index lacks some types: the first readable sample gives them. About this many samples are tried per shard.
_MAX_TRIED_SAMPLES: Final = 64


@dataclass(frozen=True, kw_only=True)
class MdsSource(FileSource):
    """A source of an MDS data set: a folder with an index, or with one folder per split, each with an index.

    Each shard is a part. The key of a sample is `SHARD#ROW` unless a column holds the keys.

    Attributes:
        columns: columns of the shards, in the order in which a sample stores their values.
        names: name in the schema for each decoded name, except that of the keys.
        key: decoded name of the column that holds the keys; None: keys are made of shard and row.
    """

    kind: ClassVar[str] = "mds"

    columns: tuple[MdsColumn, ...]
    names: dict[str, str]
    key: str | None

    @property
    def keys_are_places(self) -> bool:
        """Whether a key is the place of its sample, SHARD#ROW: true unless a column holds the keys."""
        return self.key is None

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> MdsSource:
        """List the source from its index. For errors, see `FileSource.list`.

        NotFoundError also means that a shard of the index is missing. ConfigError also means that a column holds
        pickles or has an unknown encoding.
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
        parts = [_part(folder, shard, files, options, root) for folder, shard in shards]
        if not sum(part.num_samples or 0 for part in parts):
            raise NotFoundError(f"cannot ingest {redact_url(url)}: its index lists no samples")
        (common_columns,) = columns
        first = _first_sample(reader, parts, common_columns)
        schema, names, key = _choose_columns(common_columns, first, options.key)
        return cls(url=root, schema=schema, parts=parts, columns=common_columns, names=names, key=key)

    def fingerprint(self) -> Digest:
        """Return a digest of the listing and of the mapping of columns."""
        columns = [[asdict(column) for column in self.columns], self.names, self.key]
        return self._digest([[asdict(part) for part in self.parts], columns])

    def read(self, part: SourcePart) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield the samples of one shard; see `StreamedSource.read`."""
        reader = FileReader(self.url)
        # Hashes are verified before any sample is read, so that a shard with a wrong hash gives no sample.
        problem = check_hashes(reader, part)
        if problem:
            yield BadSample(part.split, part.name, problem)
            return
        yield from to_batches(self.schema, part, read_samples(reader, part), self._sample)

    def _sample(self, name: str, content: bytes) -> dict[str, Any]:
        """Return the sample `name` by the names in the schema. For errors, see `decode_sample`."""
        decoded = decode_sample(content, self.columns)
        key = name if self.key is None else str(decoded[self.key])
        values = {schema_name: decoded[decoded_name] for decoded_name, schema_name in self.names.items()}
        return {KEY: key, **values}


def _list_shards(reader: FileReader, files: dict[str, SourceFile], url: str) -> list[tuple[str, MdsShard]]:
    """Return, for each shard, the folder of its index ("" or "a/b/") and its description."""
    # An index at the top also lists the shards of the folders below.
    below = sorted(name for name in files if name.endswith(f"/{INDEX_FILE}"))
    indexes = [INDEX_FILE] if INDEX_FILE in files else below
    if not indexes:
        raise NotFoundError(f"cannot ingest {redact_url(url)}: it has no {INDEX_FILE}")
    shards = []
    for name in indexes:
        path = files[name].path
        listed = parse_index(reader.read(path), reader.location(path))
        shards += [(name.removesuffix(INDEX_FILE), shard) for shard in listed]
    if not shards:
        raise NotFoundError(f"cannot ingest {redact_url(url)}: its index lists no shards")
    return shards


def _part(folder: str, shard: MdsShard, files: dict[str, SourceFile], options: SourceOptions, url: str) -> SourcePart:
    """Return the part for a shard. Its `where` has the path of the file to read, and the fields of its `MdsFile`."""
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
    listed = files[folder + chosen.name]
    where = {"path": listed.path, "raw_bytes": shard.raw.size_bytes, **asdict(chosen)}
    name = folder + shard.raw.name
    return SourcePart(split_of_file(name, options), name, listed.size_bytes, shard.num_samples, listed.stamp, where)


def _first_sample(reader: FileReader, parts: list[SourcePart], columns: tuple[MdsColumn, ...]) -> dict[str, Any]:
    """Return the first readable sample, by decoded name. Raise CorruptDataError if there is none."""
    # `fields` refuses pickles and unknown encodings. Call it before a sample is read, with an empty array as value.
    for column in columns:
        column.fields({column.name: np.empty(0)})
    problem: Exception | str = "all shards are empty"
    for part in parts:
        for number, (_, content) in enumerate(read_samples(reader, part)):
            try:
                if isinstance(content, BadSampleError):
                    raise content  # handled below, like an error of `decode_sample`
                return decode_sample(content, columns)
            except BadSampleError as error:
                problem = error
            if number >= _MAX_TRIED_SAMPLES:
                break
    raise CorruptDataError(
        f"none of the first samples of the shards from {reader.location(parts[0].where['path'])} on can be read: "
        f"{problem}; restore another copy"
    )


def _choose_columns(
    columns: tuple[MdsColumn, ...], first: dict[str, Any], key: str | None
) -> tuple[pa.Schema, dict[str, str], str | None]:
    """Return the schema, the schema's name for each decoded name, and the decoded name of the key column."""
    fields = [field for column in columns for field in column.fields(first)]
    names = [field.name for field in fields]
    if len(set(names)) < len(names):
        raise ConfigError(f"two columns would have the same name: {sorted(names)}; rename one of them")
    images = {column.name for column in columns if column.is_image}
    arrays = [
        # The index declares which columns are images. These magic bytes of JPEG make `ColumnMap` detect them,
        # whatever the first sample holds.
        pa.array([b"\xff\xd8\xff" if field.name in images else first[field.name]], field.type)
        for field in fields
    ]
    column_map = ColumnMap(pa.schema(fields), pa.table(dict(zip(names, arrays, strict=True))), key=key)
    value_fields = [field for field in fields if field.name != column_map.key]
    key_field, *final_fields = column_map.schema
    # `ColumnMap` drops the metadata of each field, which holds the shape of a tensor.
    final_fields = [
        final.with_metadata(raw.metadata) if SHAPE in (raw.metadata or {}) else final
        for raw, final in zip(value_fields, final_fields, strict=True)
    ]
    final_names = {raw.name: final.name for raw, final in zip(value_fields, final_fields, strict=True)}
    return pa.schema([key_field, *final_fields]), final_names, column_map.key
