"""Data sets: samples in Arrow shards, the tables that list the shards, versions, and the ingestion of sources."""

from datasvc.shards.format.reader import Shard
from datasvc.shards.format.schema import image_schema
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.format.writer import ShardStatistics, ShardWriter
from datasvc.shards.ingestion.ingest import IngestReport, ingest
from datasvc.shards.sources import SourceOptions
from datasvc.shards.versions.dataset import (
    DatasetVersion,
    OriginShards,
    ShardRequest,
    ShardStore,
    Split,
    open_dataset,
)

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
