"""Size, ingest and reading of short texts in compressed columns, beside the same columns as they are."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import datasvc
from datasvc.shards import Shard
from tools.bench.runner import Options, Report, bench, run_rounds, timed

NUM_WORDS = 5000
ARMS = {"verbatim": "none", "compressed": "auto"}


def make_captions(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield samples with a caption of 40 to 200 bytes, a score and a label.

    The words are made of random syllables, and frequent by Zipf's law. They have no grammar, by which real captions
    compress better.
    """
    rng = np.random.default_rng(seed)
    syllables = [a + b for a in "bcdfghklmnprst" for b in "aeiou"]
    words = ["".join(rng.choice(syllables, rng.integers(1, 4))) for _ in range(NUM_WORDS)]
    frequencies = 1 / np.arange(1, NUM_WORDS + 1)
    ends = np.cumsum(frequencies / frequencies.sum())
    for number in range(count):
        drawn = np.searchsorted(ends, rng.random(60) * ends[-1])
        text = " ".join(words[word] for word in drawn)[: rng.integers(40, 201)]
        yield {"key": f"images/{number:08}.jpg", "caption": text, "score": float(rng.random()), "label": number % 100}


@bench(repeats=7, samples=300_000, rows=2000)
def columns(options: Options) -> Report:
    """Ingest, size and reading of generated captions on one core, with `--compress-columns auto` and without.

    A whole column is opened, read and copied, in MB of texts and offsets a second. Samples are read one by one in
    random order from an open shard, whose batches are decoded by the first of them.
    """
    every_core = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(every_core)})
    pa.set_cpu_count(1)
    samples = list(make_captions(options.samples))
    rows = np.random.default_rng(1)

    def run(arm: str) -> dict[str, float]:
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        repo = datasvc.open(str(folder), create=True)
        found = {"ingest": timed(lambda: repo.datasets.ingest(iter(samples), "texts", compress_columns=ARMS[arm]))}
        split = repo.datasets.open("texts")["train"]
        found["bytes"] = split.table.size_bytes
        paths = [split.repository.objects.local_path(shard.digest) for shard in split.table.shards()]
        shards = [Shard.map(path) for path in paths]
        found["texts"] = sum(shard.column("caption").nbytes for shard in shards)
        found["column"] = timed(
            lambda: [pa.concat_arrays(Shard.map(path).column("caption").chunks) for path in paths]
        )
        wanted = rows.integers(0, shards[0].num_samples, options.rows).tolist()
        found["samples"] = timed(lambda: [shards[0].sample(row) for row in wanted])
        shutil.rmtree(folder)
        return found

    rounds = run_rounds({arm: partial(run, arm) for arm in ARMS}, options.repeats, warm_up=True)
    os.sched_setaffinity(0, every_core)
    report = Report(
        f"{options.samples:,} captions of 40 to 200 bytes, on one core",
        "Ratios are verbatim / compressed of bytes, else compressed / verbatim of seconds.",
    )
    for arm, found in rounds.items():
        report.add_row(f"shards, {arm}", "MB", [each["bytes"] / 1e6 for each in found])
        report.add_row(f"ingest, {arm}", "s", [each["ingest"] for each in found])
        report.add_row(f"column, {arm}", "MB/s", [each["texts"] / 1e6 / each["column"] for each in found])
        report.add_row(f"samples, {arm}", "us", [1e6 * each["samples"] / options.rows for each in found])
    verbatim, compressed = (rounds[arm] for arm in ARMS)
    report.add_ratio("bytes", *([each["bytes"] for each in arm] for arm in (verbatim, compressed)))
    for name in ("ingest", "column", "samples"):
        report.add_ratio(name, *([each[name] for each in arm] for arm in (compressed, verbatim)))
    return report
