"""What others reach on the same photos: each that is installed, in a process of its own.

    python tools/bench/loader_peers.py NAME PHOTOS [--batch 64] [--threads 2] [--size 224]

prints images per second of one epoch without its first batches. All crop at random, flip and normalise to float32;
crops are as large as ours in the mean, since they are drawn by the same rule.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import itertools
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from report import ROOT

from datasvc.loaders import IMAGENET_MEAN, IMAGENET_STD, AugmentConfig
from datasvc.loaders.augment.augment import plan_random_windows

WARM_UP_STEPS = 4
PER_TAR = 500
SIZE_ARGUMENTS = ("batch", "size", "threads")


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


class PhotoFolder:
    """A map-style data set of files, as people write it.

    Args:
        photos: folder of class folders.
        size: side of the output in pixels.
    """

    def __init__(self, photos: Path, size: int) -> None:
        self._paths = sorted(photos.glob("*/*.jpg"))
        self._augment = Augment(size)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        path = self._paths[number]
        with Image.open(path) as image:
            return self._augment(image.convert("RGB")), int(path.parent.name)


def run_torch_folder(photos: Path, settings: argparse.Namespace) -> Iterable[Any]:
    """Return the batches of torch's DataLoader on files, with Pillow in worker processes."""
    from torch.utils.data import DataLoader

    folder: Any = PhotoFolder(photos, settings.size)
    return DataLoader(folder, batch_size=settings.batch, shuffle=True, num_workers=settings.threads, drop_last=True)


def run_webdataset(photos: Path, settings: argparse.Namespace) -> Iterable[Any]:
    """Return the batches of WebDataset on tars, with Pillow in worker processes."""
    import webdataset

    tars = [str(tar) for tar in _write_tars(photos)]
    samples = (
        webdataset.WebDataset(tars, shardshuffle=len(tars), empty_check=False)
        .shuffle(1000)
        .to_tuple("jpg")
        .map_tuple(lambda content: Image.open(io.BytesIO(content)).convert("RGB"))
        .map_tuple(Augment(settings.size))
        .batched(settings.batch, partial=False)
    )
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


Peer = Callable[[Path, argparse.Namespace], Iterable[Any]]
PEERS: dict[str, tuple[str, Peer]] = {
    "torch_folder": ("torch", run_torch_folder),
    "webdataset": ("webdataset", run_webdataset),
    "dali_file_reader": ("nvidia.dali", run_dali_file_reader),
}


def installed_peers() -> list[str]:
    """Return the peers whose package is installed."""
    return [name for name, (package, _) in PEERS.items() if importlib.util.find_spec(package) is not None]


def run_peer(name: str, photos: Path, settings: argparse.Namespace) -> float:
    """Return images per second of a peer, run in a process of its own."""
    sizes = [f"--{size}={getattr(settings, size)}" for size in SIZE_ARGUMENTS]
    words = [sys.executable, __file__, name, str(photos), *sizes]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def _write_tars(photos: Path) -> list[Path]:
    """Pack the photos beside their folder, once; returns the tars."""
    folder = photos.parent / "peer-tars"
    if not folder.exists():
        folder.mkdir()
        paths = np.random.default_rng(0).permutation(np.array(sorted(photos.glob("*/*.jpg"))))
        for number, start in enumerate(range(0, len(paths), PER_TAR)):
            with tarfile.open(folder / f"{number:06d}.tar", "w") as packed:
                for path in paths[start : start + PER_TAR]:
                    packed.add(path, f"{path.stem}.jpg")
    return sorted(folder.glob("*.tar"))


def main() -> None:
    """Run one peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("photos", type=Path)
    for name, default in zip(SIZE_ARGUMENTS, (64, 224, 2), strict=True):
        parser.add_argument(f"--{name}", type=int, default=default)
    settings = parser.parse_args()
    batches = iter(PEERS[settings.name][1](settings.photos, settings))
    for _ in itertools.islice(batches, WARM_UP_STEPS):
        pass
    started = time.perf_counter()
    num_steps = sum(1 for _ in batches)
    print(num_steps * settings.batch / (time.perf_counter() - started))


if __name__ == "__main__":
    main()
