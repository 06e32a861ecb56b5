"""Data sets: samples in Arrow shards, the tables that list the shards, versions, and the ingestion of sources."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from datasvc.repository.objects.in_place import Recipe, set_builder

if TYPE_CHECKING:
    from datasvc.repository import Digest, Objects
    from datasvc.shards.format.reader import Shard
    from datasvc.shards.format.schema import image_schema
    from datasvc.shards.format.shard_stores import OriginShards, ShardRequest, ShardStore
    from datasvc.shards.format.shard_table import ShardTable
    from datasvc.shards.format.writer import ShardStatistics, ShardWriter
    from datasvc.shards.ingestion.ingest import IngestReport, ingest
    from datasvc.shards.sources import SourceOptions
    from datasvc.shards.versions.dataset import DatasetVersion, Split, open_dataset

# Modules of names, which are imported on first use: a list of data sets needs no Arrow, and a reader no ingest.
_LAZY: Final = {
    "Shard": "format.reader",
    "image_schema": "format.schema",
    "ShardTable": "format.shard_table",
    **dict.fromkeys(("OriginShards", "ShardRequest", "ShardStore"), "format.shard_stores"),
    **dict.fromkeys(("ShardStatistics", "ShardWriter"), "format.writer"),
    **dict.fromkeys(("IngestReport", "ingest"), "ingestion.ingest"),
    "SourceOptions": "sources",
    **dict.fromkeys(("DatasetVersion", "Split", "open_dataset"), "versions.dataset"),
}


def _build_attached(objects: Objects, digest: Digest, recipes: Sequence[Recipe], file: BinaryIO | None) -> None:
    from datasvc.shards.ingestion.attach import build_shard  # here, because most processes build no attached shard

    build_shard(objects, digest, recipes, file)


set_builder(_build_attached)

__all__ = [
    "DatasetVersion",
    "IngestReport",
    "OriginShards",
    "Shard",
    "ShardRequest",
    "ShardStatistics",
    "ShardStore",
    "ShardTable",
    "ShardWriter",
    "SourceOptions",
    "Split",
    "image_schema",
    "ingest",
    "open_dataset",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
