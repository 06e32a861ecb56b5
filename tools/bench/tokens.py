"""Token batches of `TokenLoader`, beside what copying them costs at least."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

import datasvc
from datasvc.cache import Cache
from datasvc.loaders import TokenFormat, TokenLoader
from datasvc.shards import Split
from tools.bench.runner import Options, Report, bench, run_rounds

ARRAYS, TENSORS, LABELS, DOCUMENTS = (
    "TokenLoader, arrays",
    "TokenLoader, tensors",
    "TokenLoader, arrays and labels",
    "TokenLoader, arrays, labels and documents",
)
MEMCPY, ASTYPE = "memcpy of int64", "astype from uint16"
WARM_UP_STEPS = 4
END = 0
VOCABULARY = 1000


class Epochs:
    """A staged data set, and what is timed on it.

    Args:
        split: the blocks.
        cache: where they are staged.
        blocks: the same, `uint16[blocks, block_tokens]`.
        batch_size: blocks of a batch.
    """

    def __init__(self, split: Split, cache: Cache, blocks: np.ndarray, batch_size: int) -> None:
        self._split, self._cache = split, cache
        self._narrow, self._wide = blocks, blocks.astype(np.int64)
        self._batch_size = batch_size

    def arms(self) -> dict[str, Callable[[], float]]:
        """Return what to time, in GB a second."""
        return {
            MEMCPY: lambda: self._rate(self._copy(self._wide)),
            ASTYPE: lambda: self._rate(self._copy(self._narrow)),
            ARRAYS: self._run_loader,
            TENSORS: lambda: self._run_loader(as_tensors=True),
            LABELS: lambda: self._run_loader(labels="across"),
            DOCUMENTS: lambda: self._run_loader(labels="within", documents=True, tokens=TokenFormat(end=END)),
        }

    def _run_loader(self, *, as_tensors: bool = False, **options: object) -> float:
        with TokenLoader(
            self._split, batch_size=self._batch_size, training=True, cache=self._cache, **options
        ) as loader:
            return self._rate(iter(loader) if as_tensors else loader.numpy())

    def _copy(self, blocks: np.ndarray) -> Iterator[object]:
        out = np.empty((self._batch_size, blocks.shape[1]), np.int64)
        for start in range(0, len(blocks) - self._batch_size + 1, self._batch_size):
            np.copyto(out, blocks[start : start + self._batch_size])
            yield out

    def _rate(self, batches: Iterator[object]) -> float:
        for _ in itertools.islice(batches, WARM_UP_STEPS):
            pass
        started = time.perf_counter()
        num_steps = sum(1 for _ in batches)
        seconds = time.perf_counter() - started
        return num_steps * self._batch_size * self._wide.shape[1] * self._wide.itemsize / seconds / 1e9


@bench(repeats=5, blocks=16384, block_tokens=2048, batch=64)
def tokens(options: Options) -> Report:
    """Token batches of `TokenLoader`, beside what copying them costs at least.

    Training on blocks of 2,048 tokens of uint16, in batches of 64, staged in a node's cache. In GB of int64 tokens
    handed over a second:

    - `TokenLoader`: order, cache, gathering and widening, to arrays or to tensors, alone or with labels and
      documents;
    - `memcpy`: the same number of blocks, held in memory as int64 and in order, each batch copied by `np.copyto` into
      one buffer;
    - `astype`: the same, but held as uint16, and made int64 by the copy.

    Ratios are of times: how many times as long as the copy the loader takes. Each round serves a whole epoch; the
    first batches are left out.
    """
    least = (WARM_UP_STEPS + 1) * options.batch
    if options.blocks < least:
        sys.exit(f"--blocks must be at least {least}, that is {WARM_UP_STEPS + 1} batches")
    shape = (options.blocks, options.block_tokens)
    blocks = np.random.default_rng(0).integers(0, VOCABULARY, shape, dtype=np.uint16)
    source = options.folder / "blocks"
    source.mkdir()
    np.save(source / "tokens.npy", blocks)
    repository = datasvc.open(str(options.folder / "repository"), create=True)
    repository.datasets.ingest(str(source), "tokens")
    split = next(iter(repository.dataset("tokens@1").values()))
    with Cache(options.folder / "cache", budget=4 * blocks.nbytes) as cache:
        cache.stage([split])
        rates = run_rounds(Epochs(split, cache, blocks, options.batch).arms(), options.repeats)
    report = Report(
        f"Batches of {options.batch} x {options.block_tokens} tokens from {options.blocks:,} blocks of uint16",
        note="Ratios are of times: loader / copy",
    )
    report.add_rows("GB/s of int64", rates)
    for copy in (MEMCPY, ASTYPE):
        for arm in (ARRAYS, TENSORS, LABELS, DOCUMENTS):
            report.add_ratio(f"{arm} / {copy}", rates[copy], rates[arm])
    return report
