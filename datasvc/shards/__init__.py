"""Data sets: samples in Arrow shards, shard tables, and the versions that name them."""

from datasvc.shards.dataset import Dataset, OriginShards, ShardStore, Split, Wanted, open_dataset
from datasvc.shards.ingest import IngestReport, ingest
from datasvc.shards.reader import Shard
from datasvc.shards.schema import image_schema
from datasvc.shards.table import ShardTable
from datasvc.shards.writer import ShardStatistics, ShardWriter

__all__ = [
    "Dataset",
    "IngestReport",
    "OriginShards",
    "Shard",
    "ShardStatistics",
    "ShardStore",
    "ShardTable",
    "ShardWriter",
    "Split",
    "Wanted",
    "image_schema",
    "ingest",
    "open_dataset",
]
