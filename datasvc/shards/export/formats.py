"""The supported export formats by name, for `--format` and the worker processes of an export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from datasvc.errors import ConfigError
from datasvc.shards.export.export_format import ExportFormat
from datasvc.shards.export.folder import FolderExport
from datasvc.shards.export.lmdb_database import LmdbExport
from datasvc.shards.export.mds import MdsExport
from datasvc.shards.export.parquet import ParquetExport
from datasvc.shards.export.tfrecord import TfRecordExport
from datasvc.shards.export.webdataset import WebDatasetExport

FORMATS: Final[Mapping[str, ExportFormat]] = {
    export_format.name: export_format
    for export_format in (
        WebDatasetExport(),
        ParquetExport(),
        MdsExport(),
        LmdbExport(),
        FolderExport(),
        TfRecordExport(),
    )
}


def choose_format(name: str) -> ExportFormat:
    """Return the format called `name`. Raise ConfigError if there is none."""
    if name not in FORMATS:
        raise ConfigError(f"cannot export as {name!r}; expected one of {', '.join(FORMATS)}")
    return FORMATS[name]
