"""How many images per second one loader delivers to a device, and nothing is done with them.

    python -P tools/gpu_stages/loading_rate.py REPOSITORY [--cache FOLDER] [--decode auto] [--device cuda]

prints one JSON object. In a process of its own, since a decoder that fails on a GPU may end it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack

import datasvc
from datasvc.cache import Cache
from datasvc.loaders import DecodeConfig, ImageBatch, ImageLoader, PixelFormat
from datasvc.shards import Split
from gpu_stages.stage import synchronize

WARM_UP_STEPS = 8


def measure(split: Split, cache: Cache | None, settings: argparse.Namespace) -> dict[str, float | str]:
    """Return images per second of a training loader, and what decoded."""
    with ImageLoader(
        split,
        batch_size=settings.batch,
        training=True,
        cache=cache,
        size=settings.size,
        pixels=PixelFormat("float16", "NHWC"),
        device=settings.device,
        decode=DecodeConfig(settings.decode, num_threads=settings.threads),
    ) as loader:
        batches = endless(loader)
        for _ in range(WARM_UP_STEPS):
            next(batches)
        synchronize(settings.device)
        started, num_images = time.perf_counter(), 0
        while time.perf_counter() - started < settings.seconds:
            num_images += len(next(batches).images)
        synchronize(settings.device)  # what was handed over may still be on its way
        return {"images_per_s": num_images / (time.perf_counter() - started), "decode": loader.decode}


def endless(loader: ImageLoader) -> Iterator[ImageBatch]:
    """Yield batches over epochs."""
    while True:
        yield from loader


def main() -> None:
    """Measure one loader."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository")
    parser.add_argument("--cache")
    parser.add_argument("--decode", default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=4.0)
    settings = parser.parse_args()
    split = next(iter(datasvc.open(settings.repository).dataset("photos@1").values()))
    with ExitStack() as stack:
        cache = None if settings.cache is None else stack.enter_context(Cache(settings.cache))
        print(json.dumps(measure(split, cache, settings)))


if __name__ == "__main__":
    main()
