"""What plugs into a training job: batches of decoded samples in a reproducible, resumable order."""

from loaders.augment import IMAGENET_MEAN, IMAGENET_STD
from loaders.image import ImageLoader
from loaders.image_decoder import ImageBatch

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "ImageBatch", "ImageLoader"]
