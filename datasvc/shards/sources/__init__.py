"""What can be ingested: one file per format."""

from datasvc.shards.sources.image_folder import ImageFolder, ImageFile

__all__ = ["ImageFile", "ImageFolder"]
