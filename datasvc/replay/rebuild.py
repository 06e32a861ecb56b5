"""Rebuilds the loader of a run from a data use, at the batch of one step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.loaders import (
    AudioAugment,
    AudioLoader,
    AugmentConfig,
    DataRanks,
    DecodeConfig,
    ImageLoader,
    Loader,
    MelConfig,
    Mixture,
    PixelFormat,
    TokenFormat,
    TokenLoader,
    VideoLoader,
)
from datasvc.loaders.augment.fit import Fit, parse_size
from datasvc.loaders.augment.objects import parse_objects
from datasvc.loaders.core.batches import BatchPositions, Cursor, SampleBatches
from datasvc.loaders.core.mixture import MixtureStage, splits_of
from datasvc.loaders.core.sample_keys import SampleKeys
from datasvc.loaders.core.state import DECODE_SCALE
from datasvc.loaders.decode.choice.choose import find_missing
from datasvc.models.provenance.consumed_ranges import parse_use
from datasvc.models.versions.data_use import DataUse
from datasvc.order import LOADER_SETTINGS
from datasvc.replay.recorded_steps import RecordedStep, read_recorded_table
from datasvc.repository import Repository
from datasvc.shards import Split


def open_samples(repository: Repository, use: DataUse) -> Split | Mixture:
    """Return the split or mixture that a run read, also of versions that were removed since.

    Raises:
        NotFoundError: the repository does not have a shard table any more.
        ConfigError: the state of the data use is not valid.
    """
    order, _ = parse_use(use)
    splits = []
    for digest, name in zip(order.tables, order.names, strict=True):
        read_recorded_table(repository, digest, name)
        dataset, _, split = name.partition("[")[0].rpartition("/")  # a view has its expression in brackets
        splits.append(Split(split, dataset, repository, digest))
    if order.mix is None:
        return splits[0]
    mix = order.mix
    stages = [
        MixtureStage(stage.first * mix.block, dict(zip(splits, stage.weights, strict=True)), ramp=stage.is_ramp)
        for stage in mix.stages
    ]
    parts = list(zip(splits, mix.weights, strict=True))
    return Mixture(parts, epoch_samples=mix.epoch_samples, block=mix.block, stages=stages)


def open_loader(
    repository: Repository, step: RecordedStep, *, rank: int | None, transform: Callable[..., Any] | None = None
) -> Loader[Any]:
    """Return a loader whose next batch is that of the step.

    Args:
        repository: repository of the data.
        step: the step.
        rank: data rank whose part to read; None: the global batch.
        transform: the transform of the images, for a run that had one.

    Raises:
        ConfigError: the entry does not record the settings of the loader, the rank does not exist, or the run had a
            transform and `transform` is None.
        NotFoundError: see `open_samples`.
    """
    use = step.use
    if use.loader is None:
        raise ConfigError(
            f"{step.version} does not record how its loader made batches: it was saved by an earlier release or by "
            "a loop with a loader of torch; only the keys of the batch are known"
        )
    settings = dict(use.loader)
    order, _ = parse_use(use)
    num_ranks = count_ranks(step, rank)
    start, batch_size, ranks = step.start, step.global_batch // num_ranks, DataRanks(rank or 0, num_ranks)
    if step.batches is not None:
        if rank is None:
            raise ConfigError(
                f"step {step.step} was a step of a round with leases, in which the batches of the ranks are apart in "
                "the order: give the rank"
            )
        if not step.batches[rank]:
            raise ConfigError(f"rank {rank} made no step {step.step}: its run of the round had ended")
        start, batch_size, ranks = step.batches[rank].start, len(step.batches[rank]), DataRanks()
    common: dict[str, Any] = {
        "batch_size": batch_size,
        "training": True,
        "order": order.config,
        "ranks": ranks,
        "tail": step.tail,
        "masked": step.masked,
    }
    samples, kind = open_samples(repository, use), settings.pop("kind")
    if kind == "tokens":
        stored = TokenFormat(**settings.pop("tokens"))
        loader: Loader[Any] = TokenLoader(samples, **common, tokens=stored, **settings, prefetch=0)
    elif kind == "audio":
        mel, augment = settings.pop("mel"), settings.pop("augment")
        loader = AudioLoader(
            samples,
            **common,
            **settings,
            mel=None if mel is None else MelConfig(**mel),
            augment=AudioAugment(**augment),
            on_bad="mask",
            prefetch=0,
        )
    elif kind == "video":
        groups = _tuples(settings, "augment", "pixels")
        loader = VideoLoader(
            samples,
            **common,
            **{name: value for name, value in settings.items() if name not in groups},
            pixels=PixelFormat(**groups["pixels"]),
            augment=AugmentConfig(**groups["augment"]),
            on_bad="mask",
            prefetch=0,
        )
    elif kind == "images":
        loader = _open_images(samples, common, settings, transform=transform)
    else:
        raise ConfigError(f"{step.version} was trained with a loader of {kind!r}; upgrade datasvc to replay it")
    # The decode scale is in the state alone. Without it, as of earlier releases, the loader decodes at full size.
    left_out = LOADER_SETTINGS - {DECODE_SCALE}
    state = {name: value for name, value in use.state.items() if name not in left_out}
    loader.load_state_dict({**state, "epoch": step.epoch, "position": start})
    return loader


def _tuples(settings: Mapping[str, Any], *groups: str) -> dict[str, dict[str, Any]]:
    """Return groups of settings with tuples for the lists of JSON."""
    return {
        group: {key: tuple(value) if isinstance(value, list) else value for key, value in settings[group].items()}
        for group in groups
    }


def _open_images(
    samples: Split | Mixture,
    common: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    transform: Callable[..., Any] | None,
) -> ImageLoader:
    name = settings.get("transform")
    if name is not None and transform is None:
        raise ConfigError(f"the run changed images by its transform {name}; give it, as --transform MODULE:FUNCTION")
    groups = _tuples(settings, "augment", "pixels")
    annotated = {
        name: settings[name] for name in ("images", "masks", "boxes", "keypoints", "polygons") if name in settings
    }
    if "objects" in settings:
        annotated["objects"] = parse_objects(settings["objects"])
    # Pixels of a GPU differ by a few levels from those of the CPU, on which a replay runs.
    recorded = settings.get("decode")
    decoder: Any = recorded if recorded in {"cpu", "pillow"} and recorded not in find_missing() else "auto"
    size = parse_size(settings["size"])
    if isinstance(size, Fit):
        # The limit is that of a rank's batch, which was trained; this one may be the batch of all ranks.
        size = replace(size, max_bytes=sys.maxsize)
    return ImageLoader(
        samples,
        **common,
        size=size,
        pixels=PixelFormat(**groups["pixels"]),
        augment=AugmentConfig(**groups["augment"], transform=transform),
        columns=settings["columns"],
        **annotated,
        decode=DecodeConfig(decoder, prefetch=0, on_bad="mask"),
    )


def locate_batch(
    repository: Repository, step: RecordedStep, *, rank: int | None
) -> tuple[Integers, list[str], list[str], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return the positions, keys and splits of a batch without padding; and which are masked, and which purged.

    No sample is read, only indexes. Raises ConfigError: see `count_ranks`; NotFoundError: see `open_samples`.
    """
    samples, use = open_samples(repository, step.use), step.use
    order, _ = parse_use(use)
    num_ranks = count_ranks(step, rank)
    splits = splits_of(samples)

    def find(start: int, batch_size: int, rank: int = 0, world_size: int = 1) -> BatchPositions:
        batches = SampleBatches(
            samples,
            [split.origin for split in splits],
            order.config,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            tail=step.tail,
            blob=None,
            columns=(),
            masked=step.masked,
        )
        return batches.find_places(Cursor(step.epoch, start))

    if step.batches is None:
        places = find(step.start, step.global_batch // num_ranks, rank or 0, num_ranks)
    else:
        chosen = [each for each in (step.batches if rank is None else [step.batches[rank]]) if each]
        if not chosen:
            raise ConfigError(f"rank {rank} made no step {step.step}: its run of the round had ended")
        found = [find(each.start, len(each)) for each in chosen]
        places = BatchPositions(*map(np.concatenate, zip(*found, strict=True)))
    keys = SampleKeys(splits).read(places.sources, places.shards, places.rows)
    kept = np.flatnonzero(places.is_sample)
    sources, shards, rows = (values[kept].tolist() for values in (places.sources, places.shards, places.rows))
    tables, is_masked = [split.table for split in splits], places.is_masked[kept]
    purged = {
        (source, shard): set(tables[source].redacted_rows(shard).tolist())
        for source, shard in set(zip(sources, shards, strict=True))
    }
    is_purged = np.array(
        [row in purged[source, shard] for source, shard, row in zip(sources, shards, rows, strict=True)], np.bool_
    )
    return (
        places.positions[kept],
        [keys[index] for index in kept.tolist()],
        [order.names[source] for source in sources],
        # A loader that was opened after a purge masks what was purged.
        is_masked & ~is_purged,
        is_purged,
    )


def count_ranks(step: RecordedStep, rank: int | None) -> int:
    """Return the number of ranks among which to divide a batch. Raises ConfigError: there is no such rank."""
    if rank is None:
        return 1
    if step.ranks is None:
        raise ConfigError(f"{step.version} does not record its number of ranks; leave out the rank")
    if not 0 <= rank < step.ranks:
        raise ConfigError(f"rank is {rank}; step {step.step} had {step.ranks} data ranks, counted from 0")
    return step.ranks
