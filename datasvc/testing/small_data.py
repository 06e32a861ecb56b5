"""Small images and data sets for tests, which take milliseconds to create."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from datasvc.repository import Repository
from datasvc.shards.ingestion.ingest import ingest
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.versions.dataset import DatasetVersion, open_dataset

if TYPE_CHECKING:
    from datasvc.api import DataRepository


def encode_jpeg(width: int = 40, height: int = 30, seed: int = 0, **options: Any) -> bytes:
    """Return a JPEG of 16 blocks of colour; equal arguments and releases of Pillow give equal bytes.

    `width` and `height` are in pixels. The seed selects the colours. `options` are those of Pillow's JPEG writer,
    such as `quality=90`.
    """
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(blocks).resize((width, height), Image.Resampling.BICUBIC).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def small_dataset(
    repository: DataRepository | Repository | str,
    name: str = "small",
    *,
    samples: int = 100,
    image_size: int = 32,
    classes: int = 4,
    splits: Mapping[str, int] | None = None,
    shard_bytes: int = 16 << 10,
) -> DatasetVersion:
    """Ingest JPEG images with labels as the next version of a data set, and open it.

    Args:
        repository: repository, or a URL; if there is no repository at the URL, it is created.
        name: name of the data set.
        samples: number of samples of the split "train".
        image_size: width and height of the images in pixels.
        classes: number of classes; consecutive samples have consecutive classes.
        splits: number of samples of each split, instead of `samples`.
        shard_bytes: size of a full shard; the default is so small that a data set has several.

    Raises:
        DatasvcError: see `shards.ingest`.
    """
    if isinstance(repository, str):
        repository = Repository.create(repository)
    elif not isinstance(repository, Repository):
        repository = repository.repository
    with tempfile.TemporaryDirectory(prefix="datasvc-testing-") as folder:
        split_of_sample = [split for split, count in (splits or {"train": samples}).items() for _ in range(count)]
        # The numbers are distinct over all splits, because an ingest refuses keys and images that are in two splits.
        for number, split in enumerate(split_of_sample):
            path = Path(folder, split, f"class{number % classes}", f"{number:06d}.jpg")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode_jpeg(image_size, image_size, seed=number))
        report = ingest(
            repository, folder, name, source_options=SourceOptions(format="image-folder"), shard_bytes=shard_bytes
        )
    return open_dataset(repository, str(report.version))
