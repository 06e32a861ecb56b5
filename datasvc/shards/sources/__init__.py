"""What can be ingested: one file per format."""

from datasvc.shards.sources.image_folder import ImageFolder
from datasvc.shards.sources.options import SourceOptions
from datasvc.shards.sources.source import BadSample, ImageFile, ListedSource, Part, Source, StreamedSource

__all__ = [
    "BadSample",
    "ImageFile",
    "ImageFolder",
    "ListedSource",
    "Part",
    "Source",
    "SourceOptions",
    "StreamedSource",
]
