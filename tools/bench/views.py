"""The cost of views: locating a batch with a filter or weights, and opening a view of a huge split."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np

import datasvc
from datasvc.loaders.core.batches import Cursor, SampleBatches
from datasvc.order import OrderConfig
from datasvc.repository import Repository
from datasvc.shards import Split
from datasvc.shards.versions.deletions import Deletions
from tools.bench import fresh
from tools.bench.large_versions import SAMPLES_PER_SHARD, make_table
from tools.bench.runner import Options, Report, bench, call_apart, column, run_rounds

BASELINE = "no view"
FEWER = "fewer samples"
ZERO_SHARE = 0.3


@bench(repeats=7, samples=128_000, shards=200, batch=1024)
def views(options: Options) -> Report:
    """Seconds per batch of an epoch, read but not decoded: without a view, with a filter, and with weights.

    The samples have 64 bytes and a label, so that little hides the cost of the order. The filter leaves out 30 % of
    all samples; the weights are random integers of 20 bits, 30 % of them 0. Ratios are of times; the aim is 1.3.

    A block of a windowed shuffle has samples of more shards if each has fewer. `fewer samples` is a data set of its
    own with the samples of the filter in as many shards: what a view costs beyond this.
    """
    splits = make_splits(options)
    kinds = {
        "global": OrderConfig(seed=1),
        "windowed": OrderConfig(seed=1, shuffle="windowed", lanes=8, block=8192),
    }
    arms = {
        f"{kind}: {name}": partial(per_batch, split, config, options.batch)
        for kind, config in kinds.items()
        for name, split in splits.items()
    }
    seconds = run_rounds(arms, options.repeats, warm_up=True)
    report = Report(f"Batches of {options.batch} of {options.samples:,} samples in {options.shards:,} shards")
    for name, values in seconds.items():
        report.add_row(name, "us per batch", [1e6 * value for value in values])
        kind, _, arm = name.partition(": ")
        for base in (BASELINE, FEWER) if arm not in (BASELINE, FEWER) else ():
            report.add_ratio(f"{name} / {base}", values, seconds[f"{kind}: {base}"])
    return report


@bench(repeats=3, shards=2_000_000)
def open_view(options: Options) -> Report:
    """Opening a view of a version of 1.2 billion samples that leaves out half of them: seconds and memory.

    Each round is a fresh process, which opens the view by the digest of its table, makes the order of an epoch, and
    finds the stored rows of 1,024 samples; memory is its peak resident set. `processor` is the processor time of all
    after the imports, for which other processes do not count. The shards are generated, see `open_version`. The aims
    are 5 s and 1 GB.
    """
    url = str(options.folder / "repo")
    repository = Repository.create(url)
    table = make_table(options.shards, np.full(options.shards, SAMPLES_PER_SHARD))
    bits = np.random.default_rng(0).bytes(SAMPLES_PER_SHARD // 8)  # of all shards: half of the samples
    deletions = Deletions.of_bitmaps(
        np.arange(options.shards), np.full(options.shards, SAMPLES_PER_SHARD), [bits] * options.shards
    )
    num_deleted = int(np.unpackbits(np.frombuffer(bits, np.uint8)).sum())
    digest = repository.objects.put(deletions.encode()).digest
    view = replace(table.with_column("deleted", np.full(options.shards, num_deleted)), deletions=digest)
    stored = repository.objects.put(view.encode()).digest
    found = run_rounds({"open": partial(call_apart, fresh.open_view, url, stored)}, options.repeats)["open"]
    report = Report(f"Opening a view of {found[0]['samples']:,} samples in {options.shards:,} shards")
    for name, unit in (("import", "s"), ("open", "s"), ("locate", "s"), ("processor", "s"), ("peak_gb", "GB")):
        report.add_row(name, unit, column(found, name))
    return report


def make_splits(options: Options) -> dict[str, Split]:
    """Return a split, and views of it."""
    data = datasvc.open(str(options.folder / "repo"), create=True)

    def ingest(name: str, count: int) -> Split:
        samples = ({"key": f"{number}", "blob": b"x" * 64, "label": number % 100} for number in range(count))
        data.datasets.ingest(samples, name, shard_bytes=64 * count // options.shards, workers=1)
        return data.dataset(f"{name}@1")["train"]

    split = ingest("views", options.samples)
    generator = np.random.default_rng(0)
    weights = generator.integers(1, 1 << 20, len(split)) * (generator.random(len(split)) > ZERO_SHARE)
    return {
        BASELINE: split,
        FEWER: ingest("fewer", round((1 - ZERO_SHARE) * options.samples)),
        "filter": split.take(1 - ZERO_SHARE),
        "weights": split.weighted(weights=weights),
    }


def per_batch(split: Split, config: OrderConfig, batch: int) -> float:
    """Return the seconds of the processor per batch of an epoch: other processes do not count."""
    options = {"batch_size": batch, "rank": 0, "world_size": 1, "blob": "blob", "columns": ("label",)}
    batches = SampleBatches(split, split.origin, config, tail="drop", **options)
    number = len(split) // batch
    began_s = time.process_time()
    for each in islice(batches.stream(Cursor(0, 0)), number):
        batches.retire(each)
    seconds = (time.process_time() - began_s) / number
    batches.close()
    return seconds
