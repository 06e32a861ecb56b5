"""Data loaders for training jobs: batches of decoded samples in a reproducible, resumable order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from datasvc.ledger.masked import Masked, MaskedRows
from datasvc.loaders.audio.audio_decoder import AudioBatch
from datasvc.loaders.audio.audio_loader import AudioLoader
from datasvc.loaders.audio.clips import AudioAugment
from datasvc.loaders.audio.mel import MelConfig
from datasvc.loaders.augment.augment import AugmentConfig
from datasvc.loaders.augment.fit import Fit
from datasvc.loaders.augment.objects import ObjectConfig
from datasvc.loaders.core.batch import Batch
from datasvc.loaders.core.loader import Loader
from datasvc.loaders.core.mixture import Mixture, MixtureStage
from datasvc.loaders.decode.backend import DecodeConfig
from datasvc.loaders.decode.pixels import IMAGENET_MEAN, IMAGENET_STD, PixelFormat
from datasvc.loaders.decode_sharing import DecodeGroup
from datasvc.loaders.images.image_batch import ImageBatch
from datasvc.loaders.images.image_loader import ImageLoader
from datasvc.loaders.ranks.data_ranks import DataRanks
from datasvc.loaders.tokens.token_decoder import TokenBatch
from datasvc.loaders.tokens.token_loader import TokenFormat, TokenLoader
from datasvc.loaders.video.clip_decoder import VideoBatch
from datasvc.loaders.video.video_loader import VideoLoader
from datasvc.order import OrderConfig

if TYPE_CHECKING:
    from datasvc.loaders.profiling.metrics import LoaderCollector, serve_loader_metrics

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "AudioAugment",
    "AudioBatch",
    "AudioLoader",
    "AugmentConfig",
    "Batch",
    "DataRanks",
    "DecodeConfig",
    "DecodeGroup",
    "Fit",
    "ImageBatch",
    "ImageLoader",
    "Loader",
    "LoaderCollector",
    "Masked",
    "MaskedRows",
    "MelConfig",
    "Mixture",
    "MixtureStage",
    "ObjectConfig",
    "OrderConfig",
    "PixelFormat",
    "TokenBatch",
    "TokenFormat",
    "TokenLoader",
    "VideoBatch",
    "VideoLoader",
    "serve_loader_metrics",
]


def __getattr__(name: str) -> Any:
    # Imported on use, because most programs do not need prometheus_client.
    if name in {"LoaderCollector", "serve_loader_metrics"}:
        from datasvc.loaders.profiling import metrics

        return getattr(metrics, name)
    raise AttributeError(f"module 'datasvc.loaders' has no attribute {name!r}")
