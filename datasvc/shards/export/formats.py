"""Which formats there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from datasvc.errors import ConfigError
from datasvc.shards.export.export_format import ExportFormat
from datasvc.shards.export.folder import Folder
from datasvc.shards.export.lmdb_database import LmdbExport
from datasvc.shards.export.mds import Mds
from datasvc.shards.export.parquet import ParquetExport
from datasvc.shards.export.tfrecord import TfRecord
from datasvc.shards.export.webdataset import WebDatasetExport

FORMATS: Final[Mapping[str, ExportFormat]] = {
    each.name: each for each in (WebDatasetExport(), ParquetExport(), Mds(), LmdbExport(), Folder(), TfRecord())
}


def choose_format(name: str) -> ExportFormat:
    """Return the format of that name. Raises ConfigError."""
    if name not in FORMATS:
        raise ConfigError(f"cannot export as {name!r}; formats: {', '.join(FORMATS)}")
    return FORMATS[name]
