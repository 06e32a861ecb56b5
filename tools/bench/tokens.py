"""Token batches of `TokenLoader`, beside what copying them costs at least.

Training on blocks of 2,048 tokens of uint16, in batches of 64, staged in a node's cache. In GB of int64 tokens handed
over a second:

- `TokenLoader`: order, cache, gathering and widening, to arrays or to tensors, alone or with labels and documents;
- `memcpy`: the same number of blocks, held in memory as int64 and in order, each batch copied by `np.copyto` into one
  buffer;
- `astype`: likewise, but held as uint16, and made int64 by the copy.

Ratios are of times: how many times as long as the copy the loader takes. Each repeat serves a whole epoch; the first
batches are left out.

    python tools/bench/tokens.py [--repeats 5] [--blocks 16384] [--block-tokens 2048] [--batch 64] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from report import Report, alternate, make_parser

import datasvc
from datasvc.cache import Cache
from datasvc.loaders import TokenFormat, TokenLoader
from datasvc.shards import Split

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


class Bench:
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

    def contestants(self) -> dict[str, Callable[[], float]]:
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


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--blocks", type=int, default=16384)
    parser.add_argument("--block-tokens", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="to work in; default the folder for temporary files")
    arguments = parser.parse_args()
    least = (WARM_UP_STEPS + 1) * arguments.batch
    if arguments.blocks < least:
        parser.error(f"--blocks must be at least {least}, that is {WARM_UP_STEPS + 1} batches")
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="datasvc-bench-") as name:
        rates = _run(Path(name), arguments)
    report = Report(
        f"Batches of {arguments.batch} x {arguments.block_tokens} tokens from {arguments.blocks:,} blocks of uint16",
        note="Ratios are of times: loader / copy",
    )
    for contestant, values in rates.items():
        report.add_row(contestant, "GB/s of int64", values)
    for copy in (MEMCPY, ASTYPE):
        for contestant in (ARRAYS, TENSORS, LABELS, DOCUMENTS):
            report.add_ratio(f"{contestant} / {copy}", rates[copy], rates[contestant])
    report.show(as_json=arguments.as_json)


def _run(folder: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    shape = (arguments.blocks, arguments.block_tokens)
    blocks = np.random.default_rng(0).integers(0, VOCABULARY, shape, dtype=np.uint16)
    (folder / "blocks").mkdir()
    np.save(folder / "blocks" / "tokens.npy", blocks)
    repository = datasvc.open(str(folder / "repository"), create=True)
    repository.datasets.ingest(str(folder / "blocks"), "tokens")
    split = next(iter(repository.dataset("tokens@1").values()))
    with Cache(folder / "cache", budget=4 * blocks.nbytes) as cache:
        cache.stage([split])
        return alternate(Bench(split, cache, blocks, arguments.batch).contestants(), arguments.repeats)


if __name__ == "__main__":
    main()
