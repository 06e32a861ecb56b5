"""A small detector on generated scenes: boxes through crops and flips, SyncBatchNorm, and the AP of COCO.

datasvc-run -np 2 python examples/detection.py ./repo

It is FCOS (Tian et al. 2019) with one level of features: each cell of a grid predicts the classes of the box around
it, and the distances to the sides of that box. Cells near the centre of a box are its positives.
"""

import argparse
import contextlib
import io
import itertools
import sys

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

import datasvc
import datasvc.trainer as hvd
from datasvc.loaders import AugmentConfig, DataRanks, ImageLoader, ObjectConfig

SIZE, STRIDE, CLASSES = 64, 4, 3
COLOURS = ((220, 60, 60), (60, 220, 60), (60, 60, 220))


def make_scenes(count: int) -> list[dict]:
    """Return scenes of one to three rectangles on noise: image, boxes in pixels, and the class of each box."""
    scenes = []
    for number in range(count):
        random = np.random.default_rng(number)
        pixels = random.integers(0, 60, (SIZE, SIZE, 3), np.uint8)
        boxes, labels = [], []
        for corner in random.permutation([(0, 0), (32, 0), (0, 32)])[: random.integers(1, 4)]:
            left, top = corner + random.integers(0, 8, 2)
            width, height = random.integers(12, 25, 2)
            label = int(random.integers(CLASSES))
            pixels[top : top + height, left : left + width] = COLOURS[label]
            boxes.append([float(left), float(top), float(left + width), float(top + height)])
            labels.append(label)
        encoded = io.BytesIO()
        Image.fromarray(pixels).save(encoded, "png")
        scenes.append({"key": f"{number:03d}", "image": encoded.getvalue(), "boxes": boxes, "box_labels": labels})
    return scenes


class Detector(nn.Module):
    """Convolutions to a grid of `SIZE / STRIDE` cells, with class logits and distances to the sides in each cell."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = [3, width, width, width, width, width]
        for number, (inputs, outputs) in enumerate(itertools.pairwise(channels)):
            stride = 2 if number < 2 else 1
            layers += [nn.Conv2d(inputs, outputs, 5, stride, 2, bias=False), hvd.SyncBatchNorm(outputs), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Conv2d(width, CLASSES + 4, 3, padding=1)
        nn.init.constant_(self.head.bias[:CLASSES], -3.0)  # few cells are positive (Lin et al. 2017)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits `[batch, cells, CLASSES]`, and boxes `[batch, cells, 4]` in pixels."""
        grid = self.head(self.body(images)).flatten(2).transpose(1, 2)
        sides = functional.softplus(grid[..., CLASSES:]) * STRIDE * 2
        points = cell_centres()
        return grid[..., :CLASSES], torch.cat([points - sides[..., :2], points + sides[..., 2:]], dim=-1)


def cell_centres() -> torch.Tensor:
    """Return the centres of the cells in pixels, `[cells, 2]`, x first."""
    steps = (torch.arange(SIZE // STRIDE) + 0.5) * STRIDE
    rows, columns = torch.meshgrid(steps, steps, indexing="ij")
    return torch.stack([columns.flatten(), rows.flatten()], dim=1)


def assign(target: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the number of the box of each cell, -1 for none; the smaller box if there are several."""
    boxes, points = target["boxes"], cell_centres()
    if not len(boxes):
        return torch.full((len(points),), -1)
    centres, sides = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    is_near = ((points[:, None] - centres).abs() <= 1.5 * STRIDE).all(dim=2)
    is_inside = ((points[:, None] > boxes[:, :2]) & (points[:, None] < boxes[:, 2:])).all(dim=2)
    areas = torch.where(is_near & is_inside, sides.prod(dim=1), torch.inf)
    smallest, numbers = areas.min(dim=1)
    return torch.where(smallest.isfinite(), numbers, -1)


def overlap(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the intersection over union of boxes, by the rules of broadcasting."""
    sides = (torch.minimum(first[..., 2:], second[..., 2:]) - torch.maximum(first[..., :2], second[..., :2])).clamp(0)
    common = sides.prod(dim=-1)
    areas = [(boxes[..., 2:] - boxes[..., :2]).prod(dim=-1) for boxes in (first, second)]
    return common / (areas[0] + areas[1] - common)


def loss_of(logits: torch.Tensor, boxes: torch.Tensor, targets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Return the focal loss of the classes plus the loss of overlaps, per positive cell."""
    wanted, found, given = torch.zeros_like(logits), [], []
    for index, target in enumerate(targets):
        numbers = assign(target)
        cells = torch.nonzero(numbers >= 0).flatten()
        wanted[index, cells, target["labels"][numbers[cells]]] = 1
        found.append(boxes[index, cells])
        given.append(target["boxes"][numbers[cells]])
    shares = logits.sigmoid()
    focus = 0.25 * wanted * (1 - shares) ** 2 + 0.75 * (1 - wanted) * shares**2
    classes = (focus * functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")).sum()
    return (classes + (1 - overlap(torch.cat(found), torch.cat(given))).sum()) / max(1, sum(map(len, found)))


def detect(logits: torch.Tensor, boxes: torch.Tensor) -> list[tuple[float, int, list[float]]]:
    """Return score, class and box of the detections of one image, without those that overlap a better one."""
    scores, labels = logits.sigmoid().max(dim=1)
    kept: list[tuple[float, int, list[float]]] = []
    for cell in scores.argsort(descending=True)[:100].tolist():
        label = int(labels[cell])
        if all(each[1] != label or overlap(torch.tensor(each[2]), boxes[cell]) < 0.5 for each in kept):
            kept.append((float(scores[cell]), label, boxes[cell].tolist()))
    return kept


@torch.no_grad()
def average_precision(model: Detector, loader: ImageLoader) -> float:
    """Return AP at an overlap of 0.5 by pycocotools."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    model.eval()
    truth, found, images = [], [], []
    for batch in loader:
        for index, (target, logits, boxes) in enumerate(zip(batch.targets, *model(batch.images), strict=True)):
            if not batch.mask[index]:
                continue  # padding
            images.append({"id": len(images) + 1})
            for (left, top, right, bottom), label in zip(
                target["boxes"].tolist(), target["labels"].tolist(), strict=True
            ):
                box = {"bbox": [left, top, right - left, bottom - top], "area": (right - left) * (bottom - top)}
                truth.append(
                    {"id": len(truth) + 1, "image_id": len(images), "category_id": label + 1, "iscrowd": 0, **box}
                )
            for score, label, (left, top, right, bottom) in detect(logits, boxes):
                box = {"bbox": [left, top, right - left, bottom - top], "score": score}
                found.append({"image_id": len(images), "category_id": label + 1, **box})
    model.train()
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {
            "info": {},
            "images": images,
            "annotations": truth,
            "categories": [{"id": number + 1} for number in range(CLASSES)],
        }
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(found), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[1])


def main() -> None:
    """Train, and print the AP of the training scenes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("repo", help="folder of the repository, which is made if it does not exist")
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--scenes", type=int, default=32)
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if hvd.rank() == 0:
        repo = datasvc.open(args.repo, create=True)
        repo.datasets.ingest(make_scenes(args.scenes), "scenes")
    hvd.barrier()
    split = datasvc.open(args.repo).dataset("scenes@1")["train"]
    model = Detector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    options = {"size": SIZE, "boxes": "boxes"}
    augment = AugmentConfig(scale=(0.6, 1.0), ratio=(0.9, 1.1), evaluation="whole")
    objects = ObjectConfig(min_visible=0.3)
    with ImageLoader(
        split, batch_size=4, training=True, seed=1, augment=augment, objects=objects, **options
    ) as loader:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
        for _ in range(args.epochs):
            for batch in loader:
                optimizer.zero_grad()
                loss = loss_of(*model(batch.images), batch.targets)
                loss.backward()
                optimizer.step()
                schedule.step()
    if hvd.rank() == 0:
        with ImageLoader(
            split, batch_size=16, training=False, augment=augment, ranks=DataRanks(), **options
        ) as loader:
            print(f"AP50 {average_precision(model, loader):.3f} on {hvd.size()} ranks, last loss {loss.item():.3f}")
    hvd.shutdown()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
