"""Recipes of attached shards: which parts of which file of a source a shard is built from, and how.

A recipe is complete: the source is not listed again, so a shard can be built when its file alone can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Final

import pyarrow as pa

from datasvc.errors import ConfigError, CorruptDataError, SourceChangedError
from datasvc.repository.objects.in_place import Recipe
from datasvc.repository.store.redaction import redact_url
from datasvc.shards.ingestion.plan import BuildOptions, IngestUnit
from datasvc.shards.sources.common.columns import ColumnMap, schema_of_text, schema_to_text
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.listing import stat_file
from datasvc.shards.sources.common.source import Source, SourcePart, StreamedSource
from datasvc.shards.sources.tabular.parquet import ParquetSource, Partitions
from datasvc.shards.sources.tar.webdataset import WebDatasetSource

RECIPE_FORMAT: Final = 1


@dataclass(frozen=True)
class ShardRecipe:
    """How an attached shard is built.

    Attributes:
        source: the source, with the parts of the shard.
        schema: columns of the shard.
        split: split of its samples; another one than that of the parts if these are held out.
        val_fraction, classes, labels: see `BuildOptions` and `IngestWork`.
        size_bytes: size of the shard.
        file_bytes, stamp: size of the file, and its modification time or entity tag, when it was attached.
        made_by: releases of datasvc and Arrow that built the shard.
    """

    source: WebDatasetSource | ParquetSource
    schema: pa.Schema
    split: str
    val_fraction: float
    classes: tuple[str, ...]
    labels: tuple[int, ...] | None
    size_bytes: int
    file_bytes: int
    stamp: str
    made_by: str

    @property
    def path(self) -> str:
        """Path of the file on the file system of the source."""
        return str(self.source.parts[0].where["path"])

    @classmethod
    def of_json(cls, recipe: Recipe) -> ShardRecipe:
        """Return the recipe that `make_recipe` described.

        Raises:
            CorruptDataError: it is not valid.
            ConfigError: it has a newer format than this datasvc reads.
        """
        try:
            if recipe["format"] > RECIPE_FORMAT:
                raise ConfigError(
                    f"the recipe of an attached shard has format {recipe['format']}; this datasvc reads up to "
                    f"{RECIPE_FORMAT}: upgrade datasvc"
                )
            return cls(
                _source_of(recipe["source"], [SourcePart(**part) for part in recipe["parts"]]),
                schema_of_text(recipe["schema"]),
                recipe["split"],
                recipe["val_fraction"],
                tuple(recipe["classes"]),
                None if recipe["labels"] is None else tuple(recipe["labels"]),
                *(recipe[name] for name in ("size_bytes", "file_bytes", "stamp", "made_by")),
            )
        except (pa.ArrowException, AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, ConfigError):
                raise
            raise CorruptDataError(
                f"the recipe of an attached shard is not valid: {error!r}; attach again"
            ) from error


def made_by() -> str:
    """Return the releases that decide the bytes of a shard."""
    release = "(unknown release)"
    with suppress(metadata.PackageNotFoundError):
        release = metadata.version("datasvc")
    return f"datasvc {release} with Arrow {pa.__version__}"


def make_recipe(
    source: Source,
    unit: IngestUnit,
    options: BuildOptions,
    *,
    schema: pa.Schema,
    split: str,
    classes: tuple[str, ...],
    labels: tuple[int, ...] | None,
    size_bytes: int,
) -> dict[str, Any]:
    """Return the recipe of the shard of `split` that a unit of an attached source gave, as JSON values.

    Raises:
        SourceChangedError: the file of the unit changed after it was listed.
        NotFoundError, UnavailableError: the file cannot be read.
    """
    reader, part = FileReader(source.url), unit.parts[0]
    file_bytes, stamp = stat_file(reader.file_system, part.where["path"], reader.location(part.where["path"]))
    if stamp != part.stamp:
        raise SourceChangedError(
            f"{reader.location(part.where['path'])} changed while it was attached, nothing was committed; run the "
            "same command again when no process writes to the source any more"
        )
    return {
        "format": RECIPE_FORMAT,
        "source": _describe(source),
        "parts": [asdict(part) for part in unit.parts],
        "schema": schema_to_text(schema),
        "split": split,
        "val_fraction": options.val_fraction,
        "classes": classes,
        "labels": labels,
        "size_bytes": size_bytes,
        "file_bytes": file_bytes,
        "stamp": stamp,
        "made_by": made_by(),
    }


def check_attachable(source: Source) -> None:
    """Raise ConfigError if the files of a source cannot stay in place."""
    if not isinstance(source, WebDatasetSource | ParquetSource):
        raise ConfigError(
            f"only WebDataset tars and Parquet files can be attached, and {redact_url(source.url)} is of format "
            f"{source.kind}: `datasvc ingest` copies it into the repository"
        )
    secret = [part.name for part in source.parts if redact_url(part.where["path"]) != part.where["path"]]
    # Outside a query, "?" is one of any characters: s3://bucket/train-00?.tar.
    url = source.url if "=" in source.url.partition("?")[2] else source.url.replace("?", "*")
    if secret or redact_url(url) != url:
        raise ConfigError(
            f"the URL {redact_url(source.url)} has credentials, which a repository does not store: give them by the "
            "environment, or ingest the source"
        )


def _describe(source: Source) -> dict[str, Any]:
    assert isinstance(source, StreamedSource)
    described = {
        "kind": source.kind,
        "url": source.url,
        "schema": schema_to_text(source.schema),
        "classes": source.classes,
        "key_prefix": source.key_prefix,
    }
    if isinstance(source, WebDatasetSource):
        return {**described, "columns": source.columns}
    assert isinstance(source, ParquetSource)
    return {**described, "columns": source.columns.to_json(), "partitions": source.partitions.to_json()}


def _source_of(described: Mapping[str, Any], parts: list[SourcePart]) -> WebDatasetSource | ParquetSource:
    """Return the source that `_describe` described, with some of its parts; for errors, see `ShardRecipe.of_json`."""
    common: dict[str, Any] = {
        "url": described["url"],
        "schema": schema_of_text(described["schema"]),
        "classes": tuple(described["classes"]),
        "parts": parts,
    }
    source: WebDatasetSource | ParquetSource
    if described["kind"] == WebDatasetSource.kind:
        source = WebDatasetSource(**common, columns=described["columns"])
    else:
        columns, partitions = ColumnMap.of_json(described["columns"]), Partitions.of_json(described["partitions"])
        source = ParquetSource(**common, columns=columns, partitions=partitions)
    return source.with_key_prefix(described["key_prefix"]) if described["key_prefix"] else source
