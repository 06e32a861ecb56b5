"""Readers of the formats that `datasvc ingest` accepts: one sub-package per family of formats.

`choose.py` selects the source of an ingest. `common/` has what all sources share.
"""

from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import (
    BadSample,
    ListedFile,
    ListedSource,
    Source,
    SourcePart,
    StreamedSource,
)
from datasvc.shards.sources.images.image_folder import ImageFolderSource

__all__ = [
    "BadSample",
    "ImageFolderSource",
    "ListedFile",
    "ListedSource",
    "Source",
    "SourceOptions",
    "SourcePart",
    "StreamedSource",
]
