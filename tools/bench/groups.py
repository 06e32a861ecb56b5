"""Padding of batches of images that keep their shape, and the time of the order, with groups."""

from __future__ import annotations

from typing import Final

import numpy as np

from datasvc.keyed_random import Integers
from datasvc.loaders.augment.fit import Fit
from datasvc.order import AccessOrder, OrderConfig
from datasvc.shards.format.view_table import Grouping
from datasvc.shards.packing.groups import Aspects, GroupedOrder, encode_aspects
from tools.bench.runner import Options, Report, bench, run_rounds, timed

FIT: Final = Fit(shorter=800, longer=1333)
# Widths and heights of photos as on Flickr, of which COCO is made, with their approximate percentage.
SHAPES: Final = (
    *((640, 480, 27), (480, 640, 8), (640, 427, 12), (640, 426, 8), (640, 425, 2), (640, 428, 2), (427, 640, 4)),
    *((426, 640, 2), (500, 375, 5), (375, 500, 2), (640, 640, 2), (640, 360, 2), (612, 612, 2), (500, 333, 3)),
)


def draw_shapes(num_samples: int, random: np.random.Generator) -> tuple[Integers, Integers]:
    """Return widths and heights: `SHAPES`, and for the rest photos whose longer side is 640 pixels."""
    widths, heights, percents = np.array(SHAPES).T
    chosen = random.choice(len(SHAPES) + 1, num_samples, p=np.append(percents, 100 - percents.sum()) / 100)
    ratios = np.exp(random.normal(0.2, 0.4, num_samples))
    others = (640 * np.minimum(ratios, 1)).astype(np.int64), (640 / np.maximum(ratios, 1)).astype(np.int64)
    return tuple(
        np.where(chosen < len(SHAPES), np.append(known, 0)[chosen], other)
        for known, other in zip((widths, heights), others, strict=True)
    )


class InMemory(Aspects):
    """Aspects of samples in shards of `counts` samples."""

    def __init__(self, group: int, counts: Integers, codes: Integers) -> None:
        self.group, self.span = group, Grouping(group, ()).span
        self._firsts, self._codes = np.cumsum(counts) - counts, codes

    def of(self, shards: Integers, rows: Integers) -> Integers:
        """See `Aspects`."""
        return self._codes[self._firsts[shards] + rows]


def padding(order: AccessOrder | Integers, counts: Integers, sizes: Integers, batch: int) -> float:
    """Return the percentage of padding of the batches of an order, for the output sizes of all samples."""
    firsts = np.cumsum(counts) - counts
    if isinstance(order, AccessOrder):
        shards, rows = order.locate(np.arange(len(sizes) // batch * batch))
        order = firsts[shards] + rows
    batches = sizes[order[: len(sizes) // batch * batch]].reshape(-1, batch, 2).astype(np.int64)
    return float(100 * (1 - batches.prod(axis=2).sum() / (batches.max(axis=1).prod(axis=1).sum() * batch)))


@bench(repeats=5, samples=118287, shards=300, large=1000000)
def groups(options: Options) -> Report:
    """Padding of batches of images that keep their shape, and what groups of a similar aspect cost.

    For as many images as COCO has, with shapes like its photos at `Fit(shorter=800, longer=1333)`, a new draw in each
    round: batches in the shuffled order, in two buckets (wide and tall, as torchvision and detectron2 make them), and
    in groups, of one rank and of 8. Then the seconds to locate an epoch of `large` samples, and its first 16,384,
    with groups of 32 and without.
    """
    counts = np.full(options.shards, options.samples // options.shards)
    shares: dict[str, list[float]] = {}
    for seed in range(options.repeats):
        widths, heights = draw_shapes(int(counts.sum()), np.random.default_rng(seed))
        sizes = FIT.sizes(widths, heights, np.array(FIT.shorter))
        plain, codes = AccessOrder(counts, OrderConfig(seed), 0), encode_aspects(widths, heights)
        shards, rows = plain.locate(np.arange(len(sizes)))
        numbers = (np.cumsum(counts) - counts)[shards] + rows
        for batch in (4, 8):
            orders = {
                "shuffled": numbers,
                "two buckets": numbers[np.argsort((widths > heights)[numbers], kind="stable")],
                "groups of a batch": GroupedOrder(plain, InMemory(batch, counts, codes)),
                "groups of 8 batches": GroupedOrder(plain, InMemory(8 * batch, counts, codes)),
            }
            for name, order in orders.items():
                shares.setdefault(f"{name}, batches of {batch}", []).append(padding(order, counts, sizes, batch))
    report = Report(f"Padding of batches of {int(counts.sum()):,} images with shapes like those of COCO")
    report.add_rows("% padding", shares)
    counts = np.full(1000, options.large // 1000)
    codes = np.random.default_rng(0).integers(100, 160, int(counts.sum()))

    def seconds(num: int, group: int | None) -> float:
        def run() -> None:
            order = AccessOrder(counts, OrderConfig(1), 0)
            grouped = order if group is None else GroupedOrder(order, InMemory(group, counts, codes))
            grouped.locate(np.arange(min(num, order.num_samples)))

        return timed(run)

    arms = {
        f"{name}, {kind}": lambda num=num, group=group: seconds(num, group)
        for name, num in (("an epoch", options.large), ("its first 16,384", 16_384))
        for kind, group in (("shuffled", None), ("groups of 32", 32))
    }
    seconds_of = run_rounds(arms, options.repeats, warm_up=True)
    report.add_rows("s", seconds_of)
    report.add_ratio("an epoch: groups / shuffled", *list(seconds_of.values())[1::-1])
    return report
