"""What others reach on the same photos: each that is installed, in a process of its own.

All crop at random, flip and normalise to float32; crops are as large as ours in the mean, since they are drawn by the
same rule. Raw: those that can yield the encoded images instead, in the same shuffled order.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from datasvc.loaders import IMAGENET_MEAN, IMAGENET_STD, AugmentConfig
from datasvc.loaders.augment.augment import plan_random_windows
from tools.bench.photos import write_tars

WARM_UP_STEPS = 4
PER_TAR = 500


class Augment:
    """Pillow's way to a training sample, for the peers that decode in Python.

    Args:
        size: side of the output in pixels.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, image: Image.Image) -> np.ndarray:
        """Return `float32[3, size, size]`."""
        position = np.random.randint(0, 1 << 40, 1)  # noqa: NPY002 - what workers seed
        width, height = (np.array([side]) for side in image.size)
        windows = plan_random_windows(width, height, position, seed=0, epoch=0, config=AugmentConfig())
        (top, left), (rows, columns) = windows.starts[0].tolist(), windows.shapes[0].tolist()
        box = (left, top, left + columns, top + rows)
        scaled = np.asarray(image.resize((self._size, self._size), Image.Resampling.BILINEAR, box=box), np.float32)
        scaled = scaled[:, ::-1] if windows.flips[0] else scaled
        normalised = (scaled / 255 - np.array(IMAGENET_MEAN, np.float32)) / np.array(IMAGENET_STD, np.float32)
        return np.ascontiguousarray(normalised.transpose(2, 0, 1), np.float32)

    def from_bytes(self, content: bytes) -> np.ndarray:
        """Return the same for an encoded image."""
        with Image.open(io.BytesIO(content)) as image:
            return self(image.convert("RGB"))


class PhotoFolder:
    """A map-style data set of files, as people write it.

    Args:
        photos: folder of class folders.
        size: side of the output in pixels.
        raw: whether to yield the encoded images.
    """

    def __init__(self, photos: Path, size: int, *, raw: bool) -> None:
        self._paths = sorted(photos.glob("*/*.jpg"))
        self._augment = Augment(size)
        self._raw = raw

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        path = self._paths[number]
        if self._raw:
            return path.read_bytes(), int(path.parent.name)
        with Image.open(path) as image:
            return self._augment(image.convert("RGB")), int(path.parent.name)


def run_torch_folder(photos: Path, settings: argparse.Namespace) -> Iterable[Any]:
    """Return the batches of torch's DataLoader on files, with Pillow in worker processes."""
    from torch.utils.data import DataLoader

    folder: Any = PhotoFolder(photos, settings.size, raw=settings.raw)
    return DataLoader(folder, batch_size=settings.batch, shuffle=True, num_workers=settings.threads, drop_last=True)


def run_webdataset(photos: Path, settings: argparse.Namespace) -> Iterable[Any]:
    """Return the batches of WebDataset on tars, with Pillow in worker processes."""
    import webdataset

    tars = [str(tar) for tar in _write_tars(photos)]
    samples = webdataset.WebDataset(tars, shardshuffle=len(tars), empty_check=False).shuffle(1000).to_tuple("jpg")
    if not settings.raw:
        samples = samples.map_tuple(Augment(settings.size).from_bytes)
    samples = samples.batched(settings.batch, partial=False)
    return webdataset.WebLoader(samples, batch_size=None, num_workers=min(settings.threads, len(tars)))


def run_dali_file_reader(photos: Path, settings: argparse.Namespace) -> Iterable[Any]:
    """Return the batches of DALI's reader of files, decoded and scaled by DALI."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    @pipeline_def(batch_size=settings.batch, num_threads=settings.threads, device_id=None)
    def graph() -> tuple[Any, Any]:
        encoded, labels = fn.readers.file(file_root=str(photos), random_shuffle=True, name="photos")
        decoded = fn.decoders.image_random_crop(
            encoded, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3], output_type=types.RGB
        )
        scaled = fn.resize(decoded, size=[settings.size, settings.size], antialias=True)
        normalised = fn.crop_mirror_normalize(
            scaled,
            mirror=fn.random.coin_flip(),
            dtype=types.FLOAT,
            mean=[255 * value for value in IMAGENET_MEAN],
            std=[255 * value for value in IMAGENET_STD],
            output_layout="CHW",
        )
        return normalised, labels

    names = ["images", "labels"]
    return DALIGenericIterator([graph()], names, reader_name="photos", last_batch_policy=LastBatchPolicy.DROP)


def run_streaming(photos: Path, settings: argparse.Namespace) -> Iterable[Any]:
    """Return the batches of MosaicML Streaming on MDS shards, with Pillow in worker processes."""
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    augment = Augment(settings.size)

    class Photos(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> Any:
            sample = super().__getitem__(at)
            return (sample["image"] if settings.raw else augment.from_bytes(sample["image"])), sample["label"]

    data = Photos(local=str(_write_mds(photos)), shuffle=True, batch_size=settings.batch)
    return DataLoader(data, batch_size=settings.batch, num_workers=settings.threads, drop_last=True)


def run_litdata(photos: Path, settings: argparse.Namespace) -> Iterable[Any]:
    """Return the batches of LitData on its chunks, with Pillow in worker processes."""
    from litdata import StreamingDataLoader, StreamingDataset

    transform = None if settings.raw else partial(_augment_sample, augment=Augment(settings.size))
    data = StreamingDataset(str(_write_chunks(photos)), shuffle=True, drop_last=True, transform=transform)
    return StreamingDataLoader(data, batch_size=settings.batch, num_workers=settings.threads, drop_last=True)


class Peer(NamedTuple):
    """A peer: the packages that it imports, what makes its batches, and whether it can yield encoded images."""

    packages: tuple[str, ...]
    run: Callable[[Path, argparse.Namespace], Iterable[Any]]
    is_raw: bool = True


PEERS = {
    "torch_folder": Peer(("torch",), run_torch_folder),
    "webdataset": Peer(("webdataset",), run_webdataset),
    "streaming": Peer(("streaming", "transformers", "torchvision"), run_streaming),
    "litdata": Peer(("litdata",), run_litdata),
    "dali_file_reader": Peer(("nvidia.dali",), run_dali_file_reader, is_raw=False),
}


def installed_peers() -> list[str]:
    """Return the peers whose packages are installed."""
    return [name for name, peer in PEERS.items() if all(map(importlib.util.find_spec, peer.packages))]


def _write_tars(photos: Path) -> list[Path]:
    """Pack the photos beside their folder, once; returns the tars."""
    folder = photos.parent / "peer-tars"
    if not folder.exists():
        write_tars(_shuffled(photos), folder, PER_TAR)
    return sorted(folder.glob("*.tar"))


def _write_mds(photos: Path) -> Path:
    """Write the photos as MDS shards beside their folder, once; returns the folder."""
    from streaming import MDSWriter

    folder = photos.parent / "peer-mds"
    if not folder.exists():
        with MDSWriter(out=str(folder), columns={"image": "bytes", "label": "int"}) as writer:
            for path in _shuffled(photos):
                writer.write(_read(path))
    return folder


def _write_chunks(photos: Path) -> Path:
    """Write the photos as chunks of LitData beside their folder, once; returns the folder."""
    from litdata import optimize

    folder = photos.parent / "peer-litdata"
    if not folder.exists():
        os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = str(photos.parent / "peer-litdata-work")
        with redirect_stdout(sys.stderr):
            optimize(
                _read,
                inputs=[*map(str, _shuffled(photos))],
                output_dir=str(folder),
                chunk_bytes="64MB",
                num_workers=1,
            )
    return folder


def _augment_sample(sample: dict[str, Any], *, augment: Augment) -> tuple[Any, int]:
    return augment.from_bytes(sample["image"]), sample["label"]


def _shuffled(photos: Path) -> list[Path]:
    paths = sorted(photos.glob("*/*.jpg"))
    return [paths[number] for number in np.random.default_rng(0).permutation(len(paths))]


def _read(path: Path | str) -> dict[str, Any]:
    return {"image": Path(path).read_bytes(), "label": int(Path(path).parent.name)}


def rate_peer(name: str, photos: str, sizes: dict[str, int], raw: bool) -> float:
    """Return images per second of a peer, of one epoch without its first batches; `raw`: encoded.

    `sizes` are batch, size and threads. Call it in a process of its own.
    """
    batches = iter(PEERS[name].run(Path(photos), argparse.Namespace(**sizes, raw=raw)))
    with redirect_stdout(sys.stderr):
        for _ in itertools.islice(batches, WARM_UP_STEPS):
            pass
        started = time.perf_counter()
        num_steps = sum(1 for _ in batches)
    return num_steps * sizes["batch"] / (time.perf_counter() - started)
