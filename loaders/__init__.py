"""Data loaders for training jobs: batches of decoded samples in a reproducible, resumable order."""

from datasvc.loaders.augment.augment import IMAGENET_MEAN, IMAGENET_STD, AugmentConfig
from datasvc.loaders.core.mixture import Mixture
from datasvc.loaders.decode_sharing import DecodeGroup
from datasvc.loaders.images.image_batch import ImageBatch
from datasvc.loaders.images.image_loader import ImageLoader
from datasvc.loaders.tokens.token_batch import TokenBatch
from datasvc.loaders.tokens.token_loader import TokenLoader

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "AugmentConfig",
    "DecodeGroup",
    "ImageBatch",
    "ImageLoader",
    "Mixture",
    "TokenBatch",
    "TokenLoader",
]
