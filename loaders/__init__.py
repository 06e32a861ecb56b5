"""What plugs into a training job: batches of decoded samples in a reproducible, resumable order."""

from loaders.augment import IMAGENET_MEAN, IMAGENET_STD, AugmentConfig
from loaders.image import ImageLoader
from loaders.image_batch import ImageBatch
from loaders.mixture import Mixture
from loaders.shared import Share
from loaders.token_batch import TokenBatch
from loaders.tokens import TokenLoader

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "AugmentConfig",
    "ImageBatch",
    "ImageLoader",
    "Mixture",
    "Share",
    "TokenBatch",
    "TokenLoader",
]
