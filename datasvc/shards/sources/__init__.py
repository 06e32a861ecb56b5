"""What can be ingested: one file per format."""

from datasvc.shards.sources.image_folder import ImageFile, ImageFolder

__all__ = ["ImageFile", "ImageFolder"]
