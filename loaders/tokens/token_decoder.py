"""The `BatchDecoder` of `TokenLoader`: copies blocks as int64, and computes labels and document ids."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from datasvc.errors import BadSampleError, ConfigError
from datasvc.keyed_random import Integers
from datasvc.loaders.core.batch import Batch
from datasvc.loaders.core.batches import SampleBatch, ShardPart
from datasvc.loaders.core.pinned import BufferRing
from datasvc.loaders.core.sample_keys import BatchPlaces
from datasvc.loaders.tokens.packed_blocks import LossMasks, copy_packs, ignore_masked
from datasvc.loaders.tokens.token_blocks import StoredBlocks, StoredLists, choose_format, find_stored_size
from datasvc.shards import Shard
from datasvc.shards.sources.text.tokens import DOCUMENT_STARTS, LENGTH, TOKENIZER
from datasvc.shown import Shown

Labels = Literal["across", "within"] | None
Documents = bool | Literal["cu_seqlens"]

# Number of batches whose memory is reused. If the caller keeps more batches, each further one gets new memory.
_NUM_REUSED: Final = 4


IGNORED: Final = -100
"""Label of a token without a next token; the default `ignore_index` of torch's cross entropy."""


A = TypeVar("A")


@dataclass(frozen=True)
class _TokenShard:
    """Properties of a shard that every batch with its samples needs. Computed once for a complete shard."""

    blocks: StoredBlocks
    has_all_blocks: bool  # True: no block is null. False: some are, or it is not known
    has_length: bool  # whether the shard has a column `length`


@dataclass(frozen=True)
class TokenConfig:
    """Settings of a token decoder.

    Attributes:
        column: name of the column of blocks.
        block_tokens: tokens of a block.
        dtype: dtype of a token if blocks are stored as blobs; None if they are stored as lists.
        tokenizer: digest of the tokenizer; None if the data set does not record it.
        lengths_are_needed: whether a shard without the column `length` is an error. Otherwise such a shard has no
            padding: every stored token is real.
        pad: token to write into padding. None keeps the stored values, and writes 0 after short lists.
        labels: "across": the label of a token is the next token; "within": only if that is in the same document;
            None: no labels.
        documents: whether to compute document ids, position ids and segments; "cu_seqlens": segments only.
        end: token that ends a document; None: use the column `document_starts`, or the samples of packs.
        packed: whether each block is a pack of samples, which are documents.
        loss_mask: column that says which tokens are labels; None: all.
    """

    column: str
    block_tokens: int
    dtype: str | None
    tokenizer: bytes | None
    lengths_are_needed: bool
    pad: int | None
    labels: Labels
    documents: Documents
    end: int | None
    packed: bool = False
    loss_mask: str | None = None

    @property
    def needs_segments(self) -> bool:
        """Whether the blocks must be divided into segments, each of one document."""
        return bool(self.documents) or self.labels == "within"


class TokenDecoder:
    """A `BatchDecoder` of token blocks.

    Args:
        config: settings.
        batch_size: maximum number of samples in a batch.
        is_mixture: whether samples come from a mixture; then batches have `sources`.
        describe: function that returns the name of a sample from its batch and its index in the batch.
    """

    def __init__(
        self,
        config: TokenConfig,
        *,
        batch_size: int,
        is_mixture: bool = False,
        describe: Callable[[SampleBatch, int], str],
    ) -> None:
        self._config, self._describe = config, describe
        self._is_mixture = is_mixture
        shape = (batch_size, config.block_tokens)
        self._tokens, self._labels, self._positions = (
            BufferRing(shape, np.int64, keep=_NUM_REUSED) for _ in range(3)
        )
        self._shards: weakref.WeakKeyDictionary[Shard, _TokenShard] = weakref.WeakKeyDictionary()
        # Starts of documents. They are not in `_TokenShard`, because they are read only if they are needed.
        self._starts: weakref.WeakKeyDictionary[Shard, StoredLists] = weakref.WeakKeyDictionary()
        self._loss_masks = None if config.loss_mask is None else LossMasks(config.loss_mask)
        self._in_progress: deque[SampleBatch] = deque()

    def feed(self, batch: SampleBatch) -> None:
        """See `BatchDecoder`."""
        self._in_progress.append(batch)

    def take(self) -> TokenBatch[npt.NDArray[Any]]:
        """See `BatchDecoder`."""
        # All work is done here and not in threads, because it takes less time than a switch of threads.
        batch = self._in_progress.popleft()
        tokens, length = self._gather_packs(batch) if self._config.packed else self._gather(batch)
        config, count, block_tokens = self._config, len(tokens), tokens.shape[1]
        # What is not requested stays None.
        labels = documents = positions = segment_bounds = longest = segments = sizes = None
        if config.needs_segments:
            segments = find_segments(*self._document_starts(batch, tokens), length, block_tokens)
        if config.labels is not None:
            labels = self._labels.take()[:count]
            write_labels(tokens, length, labels, segments=segments if config.labels == "within" else None)
            ignore_masked(batch, labels, IGNORED)
            if self._loss_masks is not None:
                counted = self._loss_masks.read(batch, length, block_tokens)
                labels[:, :-1][~counted[:, 1:]] = IGNORED
        if config.documents:
            assert segments is not None
            segment_bounds = np.append(segments, tokens.size).astype(np.int32)
            sizes = segment_sizes(segments, tokens.size)
            longest = int(sizes.max(initial=0))
        if config.documents is True:
            assert segments is not None
            assert sizes is not None
            documents = number_documents(segments, sizes, length, block_tokens)
            positions = self._positions.take()[:count]
            number_positions(segments, sizes, positions)
        return TokenBatch(
            tokens=tokens,
            length=length,
            mask=batch.mask,
            epoch=batch.epoch,
            positions=batch.positions,
            labels=labels,
            document_ids=documents,
            position_ids=positions,
            cu_seqlens=segment_bounds,
            max_seqlen=longest,
            document_counts=self._count_documents(batch) if config.packed else None,
            sources=batch.sources if self._is_mixture else None,
        )

    def close(self) -> None:
        """See `BatchDecoder`."""
        self._in_progress.clear()

    def _gather(self, batch: SampleBatch) -> tuple[Integers, Integers]:
        """Return the blocks of a batch, `int64[n, block]`, and the number of real tokens of each, `int64[n]`."""
        config = self._config
        tokens = self._tokens.take()[: len(batch.positions)]
        length = np.empty(len(tokens), np.int64)
        length.fill(config.block_tokens)
        num_stored: Integers | None = None  # number of stored tokens of each block; None: all blocks are complete
        for part in batch.kept_parts:
            token_shard = self._open_shard(part)
            blocks = token_shard.blocks
            blocks.copy(part.rows, tokens, part.indices)
            if blocks.format.is_ragged:
                if num_stored is None:
                    num_stored = np.full(len(tokens), config.block_tokens, np.int64)
                length[part.indices] = num_stored[part.indices] = self._stored_lengths(batch, part, blocks)
            if token_shard.has_length or config.lengths_are_needed:
                length[part.indices] = self._column_lengths(batch, part, length)
            if blocks.format.may_be_negative:
                self._check_sign(batch, part, tokens, length)
        if batch.has_padding or batch.masked is not None:
            length[~batch.mask] = 0
        if batch.masked is not None:
            tokens[batch.masked] = 0  # nothing of a masked block reaches a model
        if config.pad is not None:
            _write_padding(tokens, length, config.pad)
        elif num_stored is not None:
            # Write zeros after the stored tokens of short blocks. Keep stored tokens, even those after `length`.
            _write_padding(tokens, num_stored, 0)
        return tokens, length

    def _gather_packs(self, batch: SampleBatch) -> tuple[Integers, Integers]:
        """Return the packs of a batch, `int64[n, block]`, and the number of tokens of each, `int64[n]`."""
        tokens = self._tokens.take()[: len(batch.positions)]
        length = np.zeros(len(tokens), np.int64)
        for part in batch.parts:
            assert part.pieces is not None
            blocks = self._open_shard(part).blocks
            copy_packs(blocks, part, part.pieces, tokens, length)
            if blocks.format.may_be_negative:
                self._check_sign(batch, part._replace(indices=np.unique(part.indices)), tokens, length)
        if batch.has_padding or batch.masked is not None:
            length[~batch.mask] = 0  # nothing of a masked pack reaches a model
        if self._config.pad:
            _write_padding(tokens, length, self._config.pad)
        else:
            tokens[length == 0] = 0  # the others have zeros after their tokens
        return tokens, length

    def _count_documents(self, batch: SampleBatch) -> Integers:
        indices = [np.empty(0, np.int64), *(part.indices for part in batch.parts)]
        return np.bincount(np.concatenate(indices), minlength=len(batch.positions))

    def _stored_lengths(self, batch: SampleBatch, part: ShardPart, blocks: StoredBlocks) -> Integers:
        """Return the number of stored tokens of each block of a part, from the size of the block in bytes."""
        dtype, limit = blocks.format.dtype, self._config.block_tokens
        lengths, remainders = np.divmod(blocks.sizes[part.rows], dtype.itemsize)
        problem = f"column {self._config.column!r} has more than {limit} tokens of {dtype}, or an incomplete one"
        self._raise_if_bad(batch, (remainders != 0) | (lengths > limit), problem, part)
        return lengths

    def _column_lengths(self, batch: SampleBatch, part: ShardPart, num_stored: Integers) -> Integers:
        """Return the column `length` of a part. `num_stored`: number of stored tokens of each block of the batch.

        Raises:
            BadSampleError: a value of the column is negative, or larger than the number of stored tokens.
            ConfigError: a sample lacks the value.
        """
        self._check_not_null(part, LENGTH)
        lengths: Integers = part.shard.values(LENGTH)[part.rows]
        is_outside = (lengths < 0) | (lengths > num_stored[part.indices])
        problem = f"column {LENGTH!r} is below 0, or larger than the number of tokens in the block"
        self._raise_if_bad(batch, np.asarray(is_outside), problem, part)
        return lengths

    def _check_sign(self, batch: SampleBatch, part: ShardPart, tokens: Integers, length: Integers) -> None:
        """Raise BadSampleError if a real token of a part is negative as int64."""
        negative = tokens[part.indices] < 0
        if negative.any():
            # Values after the end of a short block are arbitrary.
            is_real = np.arange(tokens.shape[1]) < length[part.indices, None]
            problem = f"column {self._config.column!r} has tokens that are negative, or over 2**63 - 1"
            is_bad: npt.NDArray[np.bool_] = np.asarray((negative & is_real).any(axis=1))
            self._raise_if_bad(batch, is_bad, problem, part)

    def _document_starts(self, batch: SampleBatch, tokens: Integers) -> tuple[Integers, npt.NDArray[Any]]:
        """Return, for each start of a document, the index of its block and its position in the block, `[n]` each.

        A start may be at the end of its block: then the next document begins in another block.
        """
        of_packs = [(part.indices, part.pieces.places) for part in batch.parts if part.pieces is not None]
        packs = np.concatenate([np.empty(0, np.int64), *(index for index, _ in of_packs)])
        places = np.concatenate([np.empty(0, np.int64), *(place for _, place in of_packs)])
        if self._config.packed and self._config.end is None:
            return packs, places
        if self._config.end is not None:
            # Search in the flat array: a search by blocks takes several times as long.
            at, ends = np.divmod(np.flatnonzero(tokens.reshape(-1) == self._config.end), tokens.shape[1])
            return np.concatenate([at, packs]), np.concatenate([ends + 1, places])
        part_blocks, part_starts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for part in batch.kept_parts:
            self._check_not_null(part, DOCUMENT_STARTS)
            indices_in_part, starts = self._starts_of(part.shard).gather(part.rows)
            part_blocks.append(part.indices[indices_in_part])
            part_starts.append(starts)
        blocks, starts = np.concatenate(part_blocks), np.concatenate(part_starts)
        if len(starts) and not 0 <= starts.min() <= starts.max() < tokens.shape[1]:
            is_bad = np.zeros(len(tokens), np.bool_)
            is_bad[blocks[(starts < 0) | (starts >= tokens.shape[1])]] = True
            self._raise_if_bad(batch, is_bad, f"column {DOCUMENT_STARTS!r} has positions outside of the block")
        return blocks, starts

    def _open_shard(self, part: ShardPart) -> _TokenShard:
        """Return the shard of a part. Raises ConfigError: a sample lacks its block, or the tokenizer differs."""
        shard, config = part.shard, self._config
        token_shard = self._shards.get(shard)
        if token_shard is None:
            self._check_not_null(part, config.column)
            self._check_tokenizer(shard)
            stored = find_stored_size(shard.schema, config.column) if config.packed else None
            format_ = choose_format(shard.schema, config.column, stored or config.block_tokens, config.dtype)
            blocks = StoredBlocks(shard.batches, format_)
            is_partial = shard.is_partial
            has_all_blocks = not is_partial and shard.is_valid(config.column, np.arange(shard.num_samples))
            token_shard = _TokenShard(blocks, has_all_blocks, LENGTH in shard.schema.names)
            if is_partial:
                return token_shard  # not cached: the shard gets more samples while it is fetched
            self._shards[shard] = token_shard
        if not token_shard.has_all_blocks:
            self._check_not_null(part, config.column)
        return token_shard

    def _starts_of(self, shard: Shard) -> StoredLists:
        """Return the starts of documents of all blocks of a shard."""
        starts = self._starts.get(shard)
        if starts is None:
            starts = StoredLists(shard.column(DOCUMENT_STARTS))
            if not shard.is_partial:  # a partial shard gets more samples while it is fetched
                self._starts[shard] = starts
        return starts

    def _check_tokenizer(self, shard: Shard) -> None:
        # Accept a shard or a data set without a digest: there is nothing to compare.
        expected, actual = self._config.tokenizer, (shard.schema.metadata or {}).get(TOKENIZER)
        if expected is not None and actual not in (None, expected):
            raise ConfigError(
                f"shard {shard.name} has tokens of tokenizer {actual.decode()[:12]}..., and the data set has tokens "
                f"of {expected.decode()[:12]}..., so equal numbers stand for different texts; ingest both with one "
                "tokenizer"
            )

    def _check_not_null(self, part: ShardPart, column: str) -> None:
        if not part.shard.is_valid(column, part.rows):
            raise ConfigError(
                f"column {column!r} is null for samples of shard {part.shard.name}: they were added without it; "
                "delete them"
            )

    def _raise_if_bad(
        self, batch: SampleBatch, is_bad: npt.NDArray[np.bool_], problem: str, part: ShardPart | None = None
    ) -> None:
        """Raise BadSampleError if there are bad samples. `is_bad` is for the samples of `part`, or of the batch."""
        if is_bad.any():
            indices = np.flatnonzero(is_bad) if part is None else part.indices[is_bad]
            names = "; ".join(self._describe(batch, index) for index in indices[:10].tolist())
            raise BadSampleError(
                f"{len(indices)} of {len(batch.positions)} samples of a batch are bad: {problem}: {names}; delete "
                "them, or ingest them again"
            )


def _write_padding(tokens: Integers, length: Integers, pad: int) -> None:
    """Write `pad` to each block after its first `length` tokens."""
    short = np.flatnonzero(length < tokens.shape[1])
    for index, size in zip(short.tolist(), length[short].tolist(), strict=True):
        tokens[index, size:] = pad


# The tokens of a batch are treated as one flat array, block after block, and divided into segments. A segment is the
# part of a document that is in one block, or the padding of a block.


def find_segments(rows: Integers, starts: npt.NDArray[Any], length: Integers, block: int) -> Integers:
    """Return the starts of segments in the flat array of tokens, ascending, `int64[segments]`.

    Args:
        rows: `int64[n]`, for each start of a document, the index of its block; in any order.
        starts: `[n]`, position of each start in its block. Positions after the real tokens of the block are ignored.
        length: `int64[blocks]`, number of real tokens of each block.
        block: tokens of a block.
    """
    # Every block begins a segment, and so does its padding.
    block_starts = np.arange(len(length)) * block
    padding_starts = (block_starts + length)[length < block]
    is_real = starts < length[rows]
    document_starts = block_starts[rows[is_real]] + starts[is_real]
    found = np.concatenate([block_starts, document_starts, padding_starts])
    found.sort()  # with this and the next lines, a sixth of the time of `np.unique`
    # Remove equal starts: a document may start at the beginning of its block.
    is_first = np.ones(len(found), np.bool_)
    np.not_equal(found[1:], found[:-1], out=is_first[1:])
    return found[is_first]


def number_documents(segments: Integers, sizes: Integers, length: Integers, block: int) -> npt.NDArray[np.int32]:
    """Return each token's document number, `int32[blocks, block]`, from 0 in each block; -1 for padding."""
    row, start = np.divmod(segments, block)  # the block of each segment, and the segment's start in it
    # Index of each segment, minus that of the first segment of its block.
    numbers = np.arange(len(segments)) - np.searchsorted(row, np.arange(len(length)))[row]
    # A segment that starts after the real tokens of its block is padding.
    numbers[start >= length[row]] = -1
    return np.repeat(numbers.astype(np.int32), sizes).reshape(len(length), block)


def number_positions(segments: Integers, sizes: Integers, out: Integers) -> None:
    """Write the position of each token in its segment to `out`, `int64[blocks, block]`, from 0."""
    # int32 takes half of the memory, and `cu_seqlens` has the same range.
    positions = np.repeat(segments.astype(np.int32), sizes)
    np.subtract(_ramp(out.size), positions, out=positions)
    out.reshape(-1)[:] = positions


@functools.lru_cache(maxsize=4)
def _ramp(size: int) -> npt.NDArray[np.int32]:
    """Return `arange(size)`, cached because allocating memory takes several times as long as filling it.

    Callers share the array and must not change it.
    """
    return np.arange(size, dtype=np.int32)


def segment_sizes(segments: Integers, num_tokens: int) -> Integers:
    """Return the number of tokens of each segment, `int64[segments]`."""
    return np.diff(segments, append=num_tokens)


def write_labels(tokens: Integers, length: Integers, out: Integers, *, segments: Integers | None) -> None:
    """Write the label of each token to `out`: the token after it, or IGNORED if it has no label.

    Args:
        tokens: `int64[blocks, block]`.
        length: `int64[blocks]`, number of real tokens of each block.
        out: `int64[blocks, block]`.
        segments: result of `find_segments`, for labels within documents: the last token of each segment has no label.
            None, for labels across documents: only the last real token of each block has no label.
    """
    block = tokens.shape[1]
    # One copy of all blocks takes half of the time of a copy of each; the last column is not the next token.
    out.reshape(-1)[:-1] = tokens.reshape(-1)[1:]
    out[:, -1] = IGNORED
    short = np.flatnonzero(length < block)
    # The last real token and the padding after it have no label.
    for index, size in zip(short.tolist(), length[short].tolist(), strict=True):
        out[index, max(size - 1, 0) :] = IGNORED
    if segments is not None:
        # The last token of each segment. The last segment of all ends with a block, and has its IGNORED already.
        out.reshape(-1)[segments[1:] - 1] = IGNORED


@dataclass(frozen=True, repr=False)
class TokenBatch(Shown, Batch[A]):
    """One rank's part of a global batch. It unpacks as `(tokens, labels)`.

    Arrays are NumPy arrays, or tensors on the CPU. The loader does not reuse their memory while a reference to it
    exists. Attributes that were not requested are None.

    Attributes:
        tokens: `int64[n, block]`.
        length: `int64[n]`, number of real tokens of each block. Padding tokens follow them. 0 for samples whose mask
            is False.
        mask: `bool[n]`, False for padding samples of the last batch, and for masked samples, see `Masked`.
        epoch: epoch of the batch, counted from 0.
        positions: `int64[n]`, positions of the samples in the epoch.
        labels: `int64[n, block]`, the token that follows each token; -100 if there is none.
        document_ids: `int32[n, block]`, number of each token's document, from 0 in each block; -1 for padding.
        position_ids: `int64[n, block]`, position of each token in the part of its document that is in the block.
        cu_seqlens: `int32[segments + 1]`, starts of the segments in `tokens.reshape(-1)`, followed by the size of
            that array. A segment is a document's part of a block, or a block's padding. Attention kernels for
            variable lengths take this array.
        max_seqlen: number of tokens of the longest segment.
        document_counts: `int64[n]`, for packs: number of documents of each block, also masked ones. `keys` and
            `sample` count documents, block after block.
        sources: `int64[n]`, for a mixture: index of each sample's split in `mixture.splits` and `mixture.names`; None
            for a single split.
        places: where the samples are stored, for `keys`; set by the loader.
    """

    tokens: A
    length: A
    mask: A
    epoch: int
    positions: Integers
    labels: A | None = None
    document_ids: A | None = None
    position_ids: A | None = None
    cu_seqlens: A | None = None
    max_seqlen: int | None = None
    document_counts: A | None = None
    sources: A | None = None
    places: BatchPlaces | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def _pair(self) -> tuple[A, A | None]:
        return self.tokens, self.labels
