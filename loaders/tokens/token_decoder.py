"""From sample batches to token batches: blocks are gathered and widened, and what else was asked for is made."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from datasvc.errors import BadSampleError, ConfigError
from datasvc.keyed_random import Integers
from datasvc.loaders.core.batches import SampleBatch, ShardPart
from datasvc.loaders.core.buffer_ring import BufferRing
from datasvc.loaders.tokens.token_batch import TokenBatch
from datasvc.loaders.tokens.token_blocks import StoredBlocks, StoredLists, choose_format
from datasvc.loaders.tokens.token_documents import (
    find_segments,
    number_documents,
    number_positions,
    segment_sizes,
    write_labels,
)
from datasvc.shards import Shard
from datasvc.shards.format.partial_reader import PartialShard
from datasvc.shards.sources.text.tokens import DOCUMENT_STARTS, LENGTH, TOKENIZER

Labels = Literal["across", "within"] | None

# Batches that a caller may hold before memory is no longer used again.
_KEEP: Final = 4


@dataclass(frozen=True)
class _TokenShard:
    """What is asked of a shard for every batch.

    Attributes:
        blocks: of it.
        is_whole: no sample lacks its block.
        has_length: samples have a `length`.
    """

    blocks: StoredBlocks
    is_whole: bool
    has_length: bool


@dataclass(frozen=True)
class TokenConfig:
    """What is made of a batch.

    Attributes:
        column: that holds the blocks.
        block_tokens: tokens of a block.
        dtype: of a token in blobs; None where lists hold them.
        tokenizer: digest of what made the tokens; None where the data set does not say.
        lengths_are_needed: a block whose shard has no `length` lacks it; otherwise it is whole.
        pad: token that takes the place of padding; None leaves what is stored, and 0 behind shorter lists.
        labels: of the next tokens, "across" documents or "within" them.
        documents: whether documents are told apart.
        end: token that ends a document; None where `document_starts` says.
    """

    column: str
    block_tokens: int
    dtype: str | None
    tokenizer: bytes | None
    lengths_are_needed: bool
    pad: int | None
    labels: Labels
    documents: bool
    end: int | None

    @property
    def needs_segments(self) -> bool:
        """Whether it matters where documents begin."""
        return self.documents or self.labels == "within"


class TokenDecoder:
    """A `Decoder` of token blocks, which works when it is asked: what it does costs less than handing it over.

    Args:
        config: what is made.
        batch_size: most samples of a batch.
        is_mixture: batches say which split each sample is of.
        describe: names a sample of a batch, by its index there.
        finish: makes what is handed over of a batch of arrays, when it is taken.
    """

    def __init__(
        self,
        config: TokenConfig,
        *,
        batch_size: int,
        is_mixture: bool = False,
        describe: Callable[[SampleBatch, int], str],
        finish: Callable[[TokenBatch[npt.NDArray[Any]]], TokenBatch[Any]],
    ) -> None:
        self._config, self._describe, self._finish = config, describe, finish
        self._is_mixture = is_mixture
        shape = (batch_size, config.block_tokens)
        self._tokens, self._labels, self._positions = (BufferRing(shape, np.int64, keep=_KEEP) for _ in range(3))
        self._documents = BufferRing(shape, np.int32, keep=_KEEP)
        self._known: weakref.WeakKeyDictionary[Shard, _TokenShard] = weakref.WeakKeyDictionary()
        self._starts: weakref.WeakKeyDictionary[Shard, StoredLists] = weakref.WeakKeyDictionary()
        self._in_progress: deque[SampleBatch] = deque()

    def feed(self, batch: SampleBatch) -> None:
        """See `Decoder`."""
        self._in_progress.append(batch)

    def take(self) -> TokenBatch[Any]:
        """See `Decoder`."""
        batch = self._in_progress.popleft()
        tokens, length = self._gather(batch)
        config, count, block = self._config, len(tokens), tokens.shape[1]
        labels = documents = positions = bounds = longest = segments = None
        if config.needs_segments:
            segments = find_segments(*self._document_starts(batch, tokens), length, block)
        if config.labels is not None:
            labels = self._labels.take()[:count]
            write_labels(tokens, length, labels, segments=segments if config.labels == "within" else None)
        if config.documents:
            assert segments is not None
            documents, positions = self._documents.take()[:count], self._positions.take()[:count]
            number_documents(segments, length, block, documents)
            number_positions(segments, positions)
            bounds = np.append(segments, tokens.size).astype(np.int32)
            longest = int(segment_sizes(segments, tokens.size).max(initial=0))
        made: TokenBatch[npt.NDArray[Any]] = TokenBatch(
            tokens,
            length,
            batch.mask,
            batch.epoch,
            batch.positions,
            labels,
            documents,
            positions,
            bounds,
            longest,
            batch.sources if self._is_mixture else None,
        )
        return self._finish(made)

    def close(self) -> None:
        """See `Decoder`."""
        self._in_progress.clear()

    def _gather(self, batch: SampleBatch) -> tuple[Integers, Integers]:
        """Return the blocks of a batch, and how many of each one's tokens are real."""
        config = self._config
        tokens = self._tokens.take()[: len(batch.positions)]
        length = np.empty(len(tokens), np.int64)
        length.fill(config.block_tokens)
        ragged: npt.NDArray[np.bool_] | None = None
        for part in batch.parts:
            known = self._know(part)
            blocks = known.blocks
            blocks.copy(part.rows, tokens, part.indices)
            if blocks.format.is_ragged:
                ragged = np.zeros(len(tokens), np.bool_) if ragged is None else ragged
                ragged[part.indices] = True
                length[part.indices] = self._lengths(batch, part, blocks)
            if known.has_length or config.lengths_are_needed:
                length[part.indices] = self._given_lengths(batch, part, length)
            if blocks.format.may_be_negative:
                self._check_sign(batch, part, tokens, length)
        if batch.pads:
            length[~batch.mask] = 0
        if config.pad is not None:
            _write_padding(tokens, length, config.pad)
        elif ragged is not None:
            # What a whole block has behind its tokens stays, whatever lies beside it in the batch.
            _write_padding(tokens, np.where(ragged, length, config.block_tokens), 0)
        return tokens, length

    def _lengths(self, batch: SampleBatch, part: ShardPart, blocks: StoredBlocks) -> Integers:
        dtype, block = blocks.format.dtype, self._config.block_tokens
        lengths, rest = np.divmod(blocks.sizes[part.rows], dtype.itemsize)
        what = f"holds in {self._config.column!r} more than {block} tokens of {dtype}, or a part of one"
        self._refuse(batch, (rest != 0) | (lengths > block), what, part)
        return lengths

    def _given_lengths(self, batch: SampleBatch, part: ShardPart, length: Integers) -> Integers:
        self._check_there(part, LENGTH)
        given: Integers = part.shard.values(LENGTH)[part.rows]
        outside = (given < 0) | (given > length[part.indices])
        self._refuse(batch, np.asarray(outside), f"has a {LENGTH!r} outside of what its block has", part)
        return given

    def _check_sign(self, batch: SampleBatch, part: ShardPart, tokens: Integers, length: Integers) -> None:
        negative = tokens[part.indices] < 0
        if negative.any():
            # What lies behind the end of a short block is none of its tokens.
            real = np.arange(tokens.shape[1]) < length[part.indices, None]
            what = f"has tokens in {self._config.column!r} that are negative, or over 2**63 - 1"
            bad: npt.NDArray[np.bool_] = np.asarray((negative & real).any(axis=1))
            self._refuse(batch, bad, what, part)

    def _document_starts(self, batch: SampleBatch, tokens: Integers) -> tuple[Integers, npt.NDArray[Any]]:
        """Return the blocks in which documents start, and where: `[n]` both."""
        if self._config.end is not None:
            # As one line: several times as fast as by rows.
            rows, ends = np.divmod(np.flatnonzero(tokens.reshape(-1) == self._config.end), tokens.shape[1])
            return rows, ends + 1
        rows_of, starts_of = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for part in batch.parts:
            self._check_there(part, DOCUMENT_STARTS)
            rows, starts = self._starts_of(part.shard).gather(part.rows)
            rows_of.append(part.indices[rows])
            starts_of.append(starts)
        found, starts = np.concatenate(rows_of), np.concatenate(starts_of)
        if len(starts) and not 0 <= starts.min() <= starts.max() < tokens.shape[1]:
            bad = np.zeros(len(tokens), np.bool_)
            bad[found[(starts < 0) | (starts >= tokens.shape[1])]] = True
            self._refuse(batch, bad, f"has {DOCUMENT_STARTS!r} outside of its block")
        return found, starts

    def _know(self, part: ShardPart) -> _TokenShard:
        """Return what is known of the shard of a part, none of whose samples lacks its block."""
        shard, config = part.shard, self._config
        known = self._known.get(shard)
        if known is None:
            self._check_there(part, config.column)
            self._check_tokenizer(shard)
            format_ = choose_format(shard.schema, config.column, config.block_tokens, config.dtype)
            blocks = StoredBlocks(shard.batches, format_)
            if isinstance(shard, PartialShard):  # it still grows
                return _TokenShard(blocks, is_whole=False, has_length=LENGTH in shard.schema.names)
            is_whole = shard.is_valid(config.column, np.arange(shard.num_samples))
            known = self._known[shard] = _TokenShard(blocks, is_whole, LENGTH in shard.schema.names)
        if not known.is_whole:
            self._check_there(part, config.column)
        return known

    def _starts_of(self, shard: Shard) -> StoredLists:
        starts = self._starts.get(shard)
        if starts is None:
            starts = StoredLists(shard.column(DOCUMENT_STARTS))
            if not isinstance(shard, PartialShard):
                self._starts[shard] = starts
        return starts

    def _check_tokenizer(self, shard: Shard) -> None:
        wanted, found = self._config.tokenizer, (shard.schema.metadata or {}).get(TOKENIZER)
        if wanted is not None and found not in (None, wanted):
            raise ConfigError(
                f"shard {shard.name} has tokens of tokenizer {found.decode()[:12]}..., the data set those of "
                f"{wanted.decode()[:12]}...: their numbers mean different texts; ingest both with one tokenizer"
            )

    def _check_there(self, part: ShardPart, column: str) -> None:
        if not part.shard.is_valid(column, part.rows):
            raise ConfigError(
                f"column {column!r} is null for samples of shard {part.shard.name}: they were added without it; "
                "delete them"
            )

    def _refuse(
        self, batch: SampleBatch, bad: npt.NDArray[np.bool_], what: str, part: ShardPart | None = None
    ) -> None:
        """Raise BadSampleError, naming the samples of a batch, or of a part of it, that are bad; if any is."""
        if bad.any():
            indices = np.flatnonzero(bad) if part is None else part.indices[bad]
            names = "; ".join(self._describe(batch, index) for index in indices[:10].tolist())
            raise BadSampleError(f"{len(indices)} of {len(batch.positions)} samples of a batch: {what}: {names}")


def _write_padding(tokens: Integers, length: Integers, pad: int) -> None:
    short = np.flatnonzero(length < tokens.shape[1])
    if len(short):
        tokens[short] = np.where(np.arange(tokens.shape[1]) < length[short, None], tokens[short], pad)
