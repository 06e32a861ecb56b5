"""Each option of a loader and of the optimizer is a flag of the training program, or is excluded for a reason."""

import dataclasses
import inspect
import re

import pytest
import torch

import datasvc.trainer as hvd
from datasvc import loaders
from datasvc.cache import Cache
from datasvc.loaders import (
    AudioAugment,
    AudioLoader,
    AugmentConfig,
    DataRanks,
    DecodeConfig,
    DecodeGroup,
    ImageLoader,
    MelConfig,
    Mixture,
    OrderConfig,
    PixelFormat,
    TokenFormat,
    TokenLoader,
)
from datasvc.trainer.recipes.optimizers import foreach_optimizer
from datasvc.trainer.recipes.optimizers.foreach_optimizer import LAMB, LARS, ForeachOptimizer, RMSpropSGD
from datasvc.trainer.recipes.settings.config import setting_types

# The settings by which a run sets an option of the library.
SETTINGS = {
    ImageLoader: {
        "split": "data",
        "batch_size": "batch_size",
        "cache": "cache",
        "size": "size",
        "seed": "seed",
        "shuffle": "shuffle",
        "order": "lanes",
        "pixels": "mean",
        "augment": "scale",
        "device": "device",
        "decode": "decode",
        "ledger": "ledger",
        "masked": "skip",
        "decode_group": "decode_group",
    },
    TokenLoader: {
        "split": "data",
        "batch_size": "batch_size",
        "cache": "cache",
        "tokens": "token_column",
        "documents": "documents",
        "seed": "seed",
        "shuffle": "shuffle",
        "order": "lanes",
        "prefetch": "prefetch",
        "ledger": "ledger",
        "masked": "skip",
        **{name: name for name in ("pack", "block_tokens", "too_long", "loss_mask")},
    },
    AudioLoader: {
        "split": "data",
        "batch_size": "batch_size",
        "cache": "cache",
        "seconds": "clip_seconds",
        "rate": "sample_rate",
        "mel": "mels",
        "augment": "gain_db",
        "on_bad": "on_bad",
        "num_threads": "decode_threads",
        "seed": "seed",
        "shuffle": "shuffle",
        "order": "lanes",
        "prefetch": "prefetch",
        "ledger": "ledger",
        "masked": "skip",
    },
    MelConfig: {"num_mels": "mels"},
    AudioAugment: {name: name for name in ("gain_db", "time_masks", "freq_masks")},
    Mixture: {"parts": "data", "epoch_samples": "epoch_samples", "block": "mixture_block", "stages": "stages"},
    Cache: {"folder": "cache", "budget": "cache_budget", "tenant": "tenant", "peers": "peers"},
    OrderConfig: {name: name for name in ("seed", "shuffle", "lanes", "block", "sticky")},
    AugmentConfig: {
        **{name: name for name in ("scale", "ratio", "flip", "resize", "evaluation", "transform")},
        **dict.fromkeys(("brightness", "contrast", "saturation", "hue"), "jitter"),
    },
    DecodeConfig: {
        "backend": "decode",
        "num_threads": "decode_threads",
        "prefetch": "prefetch",
        "on_bad": "on_bad",
        "servers": "decode_servers",
        "decode_scale": "decode_scale",
    },
    DecodeGroup: {"name": "decode_group", "lag": "decode_lag"},
    PixelFormat: {"layout": "channels_last", "mean": "mean", "std": "std"},
    TokenFormat: {
        "column": "token_column",
        "block_tokens": "block_tokens",
        "dtype": "token_dtype",
        "pad": "pad_token",
        "end": "end_token",
    },
    DataRanks: {},
    hvd.Compression.topk: {"ratio": "compression", "warmup_steps": "compression"},
    hvd.Compression.dgc: {"ratio": "compression", "warmup_steps": "compression", "momentum": "momentum"},
    hvd.Compression.quantized: {"codec": "compression", "levels": "compression"},
    hvd.Compression.powersgd: {"rank": "compression", "start_iteration": "compression"},
    LARS: {
        **{name: name for name in ("momentum", "weight_decay", "trust_coefficient", "nesterov")},
        "lr": "learning_rate",
    },
    LAMB: {**{name: name for name in ("betas", "weight_decay")}, "lr": "learning_rate"},
    RMSpropSGD: {
        **{name: name for name in ("rmsprop_rate", "momentum", "weight_decay")},
        "lr": "learning_rate",
    },
    hvd.DistributedOptimizer: {
        "optimizer": "optimizer",
        "compression": "compression",
        "backward_passes_per_step": "micro_batch",
        "op": "op",
        "bucket_bytes": "bucket",
    },
}
# Options without a flag, and why.
_RANKS = "the launcher gives each process its rank"
_TASK = "the task knows whether it trains or evaluates"
_PARAMETERS = "those of the model"
_EPS = "it only avoids a division by zero"
EXCLUDED = {
    ImageLoader: {
        "training": _TASK,
        "tail": "training drops the last samples of an epoch, so that all batches have one size; evaluation pads",
        "ranks": _RANKS,
        "columns": "the loss is a function of image and label",
        **dict.fromkeys(
            ("images", "masks", "boxes", "keypoints", "polygons", "objects"),
            "the program classifies images; examples/detection.py trains on boxes",
        ),
    },
    TokenLoader: {
        "training": _TASK,
        "tail": "training drops the last samples of an epoch, so that all batches have one size; evaluation pads",
        "ranks": _RANKS,
        "lengths": "a function: pack by it in Python, and give the digest of the view, --data NAME[DIGEST]",
        "labels": "always the next token; --documents chooses whether it may be of the next document",
    },
    AudioLoader: {
        "training": _TASK,
        "tail": "training drops the last samples of an epoch, so that all batches have one size; evaluation pads",
        "ranks": _RANKS,
        "features": "the task classifies mel spectrograms",
        "channels": "the model takes one",
        "columns": "the loss is a function of spectrogram and label",
    },
    MelConfig: {
        "window": "25 ms at any --sample-rate",
        "hop": "10 ms at any --sample-rate",
        **dict.fromkeys(("low_hz", "high_hz"), "all frequencies of --sample-rate"),
        "scale": "the model learns from either",
        "log": "the model takes logarithms",
    },
    AudioAugment: dict.fromkeys(
        ("time_mask", "freq_mask"), "--time-masks and --freq-masks change how much is masked"
    ),
    AugmentConfig: dict.fromkeys(
        ("mosaic", "mosaic_epochs"), "the program classifies images; a mosaic is for objects and masks"
    ),
    DataRanks: {"rank": _RANKS, "world_size": _RANKS},
    DecodeGroup: {
        "patience": "its default delays a job by an eighth at most",
        "when_behind": "a job that is behind decodes alone, which changes no result; an error would end the run",
        "silent_s": "only for jobs that are stopped by hand",
    },
    PixelFormat: {"output": "models take float32; --precision computes in 16 bits"},
    hvd.Compression.dgc: {"clip_norm": "--clip-norm limits the gradient that is applied"},
    hvd.Compression.quantized: {"seed": "each rank and each step has random numbers of its own with any seed"},
    hvd.Compression.powersgd: {
        "min_compression_rate": "below its default a matrix is hardly smaller than its two factors",
        "seed": "the same on all ranks; the basis is replaced after the first step",
    },
    LARS: {"params": _PARAMETERS},
    LAMB: {"params": _PARAMETERS, "eps": _EPS},
    RMSpropSGD: {"params": _PARAMETERS, "eps": _EPS, "decay": "Akiba et al. 2017 give one value"},
    hvd.DistributedOptimizer: {
        "named_parameters": "the names of the model's parameters",
        "num_groups": "deprecated",
        "groups": "--bucket divides gradients by size, which needs no knowledge of the model",
        "gradient_predivide_factor": "with Average only; the program sums gradients that the ranks have divided",
        "sparse_as_dense": "the models of the program have dense gradients",
        "process_set": "all ranks of the job train one model",
    },
}


def options_of(owner):
    if dataclasses.is_dataclass(owner):
        return {field.name for field in dataclasses.fields(owner)}
    return set(inspect.signature(owner).parameters)


@pytest.mark.parametrize("owner", SETTINGS, ids=lambda owner: owner.__name__)
def test_each_option_of_the_library_is_a_setting_or_is_excluded_for_a_reason(owner):
    set_by, excluded = SETTINGS[owner], EXCLUDED.get(owner, {})
    assert options_of(owner) == set_by.keys() | excluded.keys()
    assert not set_by.keys() & excluded.keys()
    assert set(set_by.values()) <= setting_types().keys()
    assert all(excluded.values())


# Public classes of the loaders that have no settings, and why.
WITHOUT_SETTINGS = {
    "AudioBatch": "what a loader serves",
    "VideoBatch": "what a loader serves",
    "VideoLoader": "the program has no task for videos",
    "ObjectConfig": "the program classifies images; examples/detection.py trains on boxes",
    "Fit": "the program classifies images of one size; detection has images that keep their shape",
    "Batch": "what a loader serves",
    "ImageBatch": "what a loader serves",
    "TokenBatch": "what a loader serves",
    "Loader": "the base class of the loaders",
    "MixtureStage": "a stage of `stages`, which is a text",
    "Masked": "made of the steps of --skip",
    "MaskedRows": "a part of `Masked`",
    "LoaderCollector": "what Prometheus reads; `metrics_port` serves it",
}


def test_each_public_class_of_the_loaders_has_settings_or_a_reason_to_have_none():
    classes = {name for name in loaders.__all__ if isinstance(getattr(loaders, name), type)}
    with_settings = {owner.__name__ for owner in SETTINGS if getattr(loaders, owner.__name__, None) is owner}
    assert classes == with_settings | WITHOUT_SETTINGS.keys()
    assert not with_settings & WITHOUT_SETTINGS.keys()


def test_each_compression_and_each_optimizer_of_the_library_is_a_choice():
    names = {name for name in vars(hvd.Compression) if not name.startswith("_")}
    metavar = setting_types()["compression"].metavar
    assert names == set(re.findall(r"[a-z]+\d*", metavar))
    own = {
        owner.__name__.lower().replace("rmspropsgd", "rmsprop-sgd")
        for owner in vars(foreach_optimizer).values()
        if isinstance(owner, type) and issubclass(owner, torch.optim.Optimizer) and owner is not ForeachOptimizer
    }
    assert own == set(setting_types()["optimizer"].choices) - {"sgd", "adamw"}
