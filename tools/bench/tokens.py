"""Token batches of `TokenLoader`, beside what copying them costs at least."""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import datasvc
from datasvc.cache import Cache
from datasvc.loaders import TokenFormat, TokenLoader
from datasvc.shards import Split
from datasvc.shards.packing.best_fit import pack_documents
from datasvc.trainer.recipes.models.document_attention import mask_documents, plan_documents
from datasvc.trainer.recipes.models.gpt import Attention, AttentionMask
from tools.bench.runner import Options, Report, bench, run_rounds, timed

ARRAYS, TENSORS, LABELS, DOCUMENTS = (
    "TokenLoader, arrays",
    "TokenLoader, tensors",
    "TokenLoader, arrays and labels",
    "TokenLoader, arrays, labels and documents",
)
PACKS, BOUNDS, UNPACKED = (
    "packs, labels and documents",
    "packs, labels and cu_seqlens",
    "a document a block, labels and documents",
)
MEMCPY, ASTYPE = "memcpy of int64", "astype from uint16"
WARM_UP_STEPS = 4
END = 0
VOCABULARY = 1000


def lognormal(random: np.random.Generator, count: int, block_tokens: int) -> np.ndarray:
    """Return lengths of documents with a median of a fifth of a block: `int64[count]`."""
    return random.lognormal(np.log(block_tokens / 5), 1, count).clip(1, block_tokens).astype(np.int64)


def bimodal(random: np.random.Generator, count: int, block_tokens: int) -> np.ndarray:
    """Return lengths: four of five are about an eighth of a block, and the others 0.7 of it: `int64[count]`."""
    short, long = (random.normal(mean, mean / 6, count) for mean in (block_tokens / 8, 0.7 * block_tokens))
    return np.where(random.random(count) < 0.8, short, long).clip(1, block_tokens).astype(np.int64)


def chat(random: np.random.Generator, count: int, block_tokens: int) -> np.ndarray:
    """Return lengths with a median of a fiftieth of a block: `int64[count]`."""
    return lognormal(random, count, block_tokens // 10)


class Epochs:
    """A staged data set, and what is timed on it.

    Args:
        split: the blocks.
        documents: documents, one a sample, of about as many tokens.
        cache: where they are staged.
        blocks: the same, `uint16[blocks, block_tokens]`.
        batch_size: blocks of a batch.
    """

    def __init__(self, split: Split, documents: Split, cache: Cache, blocks: np.ndarray, batch_size: int) -> None:
        self._split, self._documents, self._cache = split, documents, cache
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
            PACKS: lambda: self._run_documents(documents=True, pack="best-fit"),
            BOUNDS: lambda: self._run_documents(documents="cu_seqlens", pack="best-fit"),
            UNPACKED: lambda: self._run_documents(
                documents=True, tokens=TokenFormat(block_tokens=self._block, end=END)
            ),
        }

    def _run_documents(self, **options: object) -> float:
        if "pack" in options:
            options["block_tokens"] = self._block
        with TokenLoader(
            self._documents, batch_size=self._batch_size, training=True, cache=self._cache, labels="within", **options
        ) as loader:
            return self._rate(loader.numpy())

    @property
    def _block(self) -> int:
        return int(self._wide.shape[1])

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

    def _rate(self, batches: Iterator[Any]) -> float:
        for _ in itertools.islice(batches, WARM_UP_STEPS):
            pass
        # Of this thread, which does all the work: other programs of a busy machine do not count.
        started = time.thread_time()
        num_tokens = sum(
            self._batch_size * self._block if isinstance(each, np.ndarray) else int(each.length.sum())
            for each in batches
        )
        seconds = time.thread_time() - started
        return num_tokens * self._wide.itemsize / seconds / 1e9


@bench(repeats=5, blocks=16384, block_tokens=2048, batch=64)
def tokens(options: Options) -> Report:
    """Token batches of `TokenLoader`, beside what copying them costs at least.

    Training on blocks of 2,048 tokens of uint16, in batches of 64, staged in a node's cache. In GB of int64 tokens
    handed over a second:

    - `TokenLoader`: order, cache, gathering and widening, to arrays or to tensors, alone or with labels and
      documents;
    - `memcpy`: the same number of blocks, held in memory as int64 and in order, each batch copied by `np.copyto` into
      one buffer;
    - `astype`: the same, but held as uint16, and made int64 by the copy;
    - packs: `TokenLoader(pack="best-fit")` of as many tokens in documents of lognormal lengths, in GB of tokens that
      are no padding; and the same documents without packs, each in a block of its own.

    Packing itself is measured too: padding of lognormal and bimodal lengths, and documents per second of one core.

    Ratios are of processor times: how many times as long as the copy the loader takes. Each round serves a whole
    epoch; the first batches are left out.
    """
    least = (WARM_UP_STEPS + 1) * options.batch
    if options.blocks < least:
        sys.exit(f"--blocks must be at least {least}, that is {WARM_UP_STEPS + 1} batches")
    shape = (options.blocks, options.block_tokens)
    blocks = np.random.default_rng(0).integers(0, VOCABULARY, shape, dtype=np.uint16)
    source = options.folder / "blocks"
    source.mkdir()
    np.save(source / "tokens.npy", blocks)
    random = np.random.default_rng(1)
    lengths = lognormal(random, 3 * options.blocks, options.block_tokens)
    ends = np.cumsum(lengths)
    tokens_of_documents = pa.ListArray.from_arrays(
        pa.array(np.concatenate([[0], ends]), pa.int32()),
        pa.array(random.integers(1, VOCABULARY, ends[-1], dtype=np.uint16)),
    )
    (options.folder / "documents").mkdir()
    pq.write_table(pa.table({"tokens": tokens_of_documents}), options.folder / "documents" / "documents.parquet")
    repository = datasvc.open(str(options.folder / "repository"), create=True)
    repository.datasets.ingest(str(source), "tokens")
    repository.datasets.ingest(str(options.folder / "documents"), "documents")
    split, documents = (next(iter(repository.dataset(name).values())) for name in ("tokens@1", "documents@1"))
    with Cache(options.folder / "cache", budget=12 * blocks.nbytes) as cache:
        cache.stage([split, documents])
        rates = run_rounds(Epochs(split, documents, cache, blocks, options.batch).arms(), options.repeats)
    report = Report(
        f"Batches of {options.batch} x {options.block_tokens} tokens from {options.blocks:,} blocks of uint16",
        note="Ratios are of times: loader / copy",
    )
    report.add_rows("GB/s of int64", rates)
    for copy in (MEMCPY, ASTYPE):
        for arm in (ARRAYS, TENSORS, LABELS, DOCUMENTS, PACKS, BOUNDS):
            report.add_ratio(f"{arm} / {copy}", rates[copy], rates[arm])
    report.add_ratio(f"{UNPACKED} / {PACKS}", rates[PACKS], rates[UNPACKED])
    for draw in (lognormal, bimodal):
        drawn = draw(random, 100_000, options.block_tokens)
        padding, speeds = [], []
        for _ in range(options.repeats):
            started = time.perf_counter()
            num_packs = len(pack_documents(drawn, options.block_tokens).counts)
            speeds.append(len(drawn) / (time.perf_counter() - started) / 1e6)
            padding.append(100 * (1 - drawn.sum() / (num_packs * options.block_tokens)))
        report.add_rows("% padding", {f"packs of {draw.__name__} lengths": padding})
        report.add_rows("million documents/s", {f"packing {draw.__name__} lengths": speeds})
    return report


@bench(repeats=5, blocks=4, block_tokens=2048, heads=6, width=384)
def attention(options: Options) -> Report:
    """Attention of our GPT in the documents of packs, beside the same with a dense mask.

    Forward and backward of one layer without its projections, in float32. Packs are drawn from those of 20,000
    documents of lognormal, bimodal and short lengths. Each turn plans its batch; a model does so once for all layers.
    """
    torch.manual_seed(0)
    layer = Attention(options.width, options.heads, 0.0)
    layer.project = layer.out = torch.nn.Identity()
    heads = torch.randn(options.blocks, options.block_tokens, 3 * options.width, requires_grad=True)

    def step(make: Callable[[torch.Tensor], AttentionMask], ids: torch.Tensor) -> float:
        return timed(lambda: layer(heads, make(ids)).sum().backward())

    report = Report(f"Attention of {options.blocks} packs of {options.block_tokens} tokens")
    for draw in (lognormal, bimodal, chat):
        random = np.random.default_rng(0)
        packed = pack_documents(draw(random, 20_000, options.block_tokens), options.block_tokens)
        ids = np.full((options.blocks, options.block_tokens), -1, np.int32)
        stops = np.cumsum(packed.counts)
        for row, pack in zip(ids, random.choice(len(stops), options.blocks, replace=False).tolist(), strict=True):
            sizes = packed.sizes[stops[pack] - packed.counts[pack] : stops[pack]]
            row[: sizes.sum()] = np.repeat(np.arange(len(sizes)), sizes)
        documents = torch.from_numpy(ids)
        arms = {"a dense mask": mask_documents, "documents": plan_documents}
        found = run_rounds(
            {name: functools.partial(step, make, documents) for name, make in arms.items()},
            options.repeats,
            warm_up=True,
        )
        report.add_rows(
            "ms", {f"{name}, {draw.__name__}": values for name, values in found.items()}, lambda each: each * 1e3
        )
        report.add_ratio(f"a dense mask / documents, {draw.__name__}", found["a dense mask"], found["documents"])
    return report
