"""Steps of ResNet-50 and AlexNet on 224 pixels in bf16, fed with a batch that stays, by ours, and by torch's folder.

All train the same model on a GPU. "Synthetic" costs nothing to load and is the most that a loader can let it reach;
"ours" is `ImageLoader` from a node's cache, `decode="auto"`; "torch's folder" is a `DataLoader` over the files with
Pillow in as many worker processes as there are processors, pinned and uploaded without a wait, as its users write it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from datasvc.cache import Cache
from datasvc.loaders import ImageLoader, PixelFormat
from datasvc.threads import count_processors
from datasvc.trainer.recipes.models import build_model
from gpu_stages.loading_rate import endless
from gpu_stages.photo_data import NUM_PHOTOS, make_photos
from gpu_stages.stage import Stage, synchronize
from tools.bench.loader_peers import PhotoFolder
from tools.bench.runner import run_rounds

MODELS = ("resnet50", "alexnet")
SYNTHETIC, OURS, FOLDER = "synthetic", "ours", "torch's folder"
CLASSES = 1000
REPEATS = 3
WARM_UP_STEPS = 8

Batches = Iterator[tuple[Tensor, Tensor]]


def run(stage: Stage) -> None:
    """Time the steps of both models on all three, in turn."""
    batch, size = stage.choose((256, 224), (2, 32))
    with stage.timed("photos"):
        photos, split = make_photos(stage.kept, num_images=stage.choose(*NUM_PHOTOS))
        cache = Cache(stage.folder / "cache", budget=2 * split.table.size_bytes)
        cache.stage([split])
    pixels = PixelFormat("bfloat16", "NHWC")
    # fmt: off
    with cache, ImageLoader(
        split, batch_size=batch, training=True, cache=cache, size=size, pixels=pixels, device=stage.device
    ) as loader:
        # fmt: on
        torch_batches = folder_batches(photos, batch=batch, size=size, device=stage.device)
        with closing(torch_batches):
            feeds = {
                SYNTHETIC: synthetic_batches(batch, size, stage.device),
                OURS: own_batches(loader, stage.device),
                FOLDER: torch_batches,
            }
            for name in stage.choose(MODELS, ("small-cnn",)):
                with stage.timed(name):
                    time_model(stage, name, feeds, batch=batch)
    stage.need_gpu("a step of a small model was taken with each of the three on the CPU; no speed was measured")


def time_model(stage: Stage, name: str, feeds: dict[str, Batches], *, batch: int) -> None:
    """Add images per second of a model, and what share of the synthetic speed each loader lets it reach."""
    step = make_step(name, stage.device)
    num_steps, warm_up = stage.choose((40, WARM_UP_STEPS), (1, 0))

    def measure(batches: Batches) -> Callable[[], float]:
        def rate() -> float:
            # What was prefetched while the others ran is used up first.
            for _ in range(warm_up):
                step(*next(batches))
            synchronize(stage.device)
            started = time.perf_counter()
            for _ in range(num_steps):
                step(*next(batches))
            synchronize(stage.device)
            return num_steps * batch / (time.perf_counter() - started)

        return rate

    contestants = {feed: measure(batches) for feed, batches in feeds.items()}
    rates = stage.once(name, lambda: run_rounds(contestants, stage.choose(REPEATS, 1)))
    if stage.has_gpu:
        for feed, values in rates.items():
            stage.report.add_row(f"{name}, {feed}", "images/s", values)
        for above, below in ((OURS, SYNTHETIC), (FOLDER, SYNTHETIC), (OURS, FOLDER)):
            stage.report.add_ratio(f"{name}: {above} / {below}", rates[above], rates[below])


def make_step(name: str, device: str) -> Callable[[Tensor, Tensor], None]:
    """Return what takes a training step: bf16, channels-last, SGD with momentum."""
    model = build_model(name, CLASSES).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=device == "cuda" or None)

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return step


def synthetic_batches(batch: int, size: int, device: str) -> Batches:
    """Yield one batch again and again."""
    images = torch.randn(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (batch,), device=device)
    while True:
        yield images, labels


def own_batches(loader: ImageLoader, device: str) -> Batches:
    """Yield the loader's batches over epochs, as views of channels-last images."""
    for each in endless(loader):
        assert each.labels is not None
        yield each.images.permute(0, 3, 1, 2), each.labels.to(device, non_blocking=True)


def folder_batches(photos: Path, *, batch: int, size: int, device: str) -> Batches:
    """Yield the batches of torch's `DataLoader` on files; its workers live until this is closed."""
    has_gpu = device == "cuda"
    loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(
        PhotoFolder(photos, size, raw=False),
        batch_size=batch,
        shuffle=True,
        drop_last=True,
        num_workers=count_processors() if has_gpu else 0,
        pin_memory=has_gpu,
        persistent_workers=has_gpu,
        # A process that uses a GPU must not fork.
        multiprocessing_context="spawn" if has_gpu else None,
    )
    while True:
        for images, labels in loader:
            on_device = images.to(device, non_blocking=True, memory_format=torch.channels_last)
            yield on_device, labels.to(device, non_blocking=True)
