"""What can be ingested: one file per format."""

from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import (
    BadSample,
    ImageFile,
    ListedSource,
    Source,
    SourcePart,
    StreamedSource,
)
from datasvc.shards.sources.images.image_folder import ImageFolder

__all__ = [
    "BadSample",
    "ImageFile",
    "ImageFolder",
    "ListedSource",
    "Source",
    "SourceOptions",
    "SourcePart",
    "StreamedSource",
]
