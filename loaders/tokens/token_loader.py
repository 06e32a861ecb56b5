"""`TokenLoader`: batches of token blocks in the access order. A resumed run serves each block once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.cache import Cache
from datasvc.errors import ConfigError
from datasvc.ledger.masked import Masked
from datasvc.loaders.core.arguments import check_sizes
from datasvc.loaders.core.batches import BatchDecoder
from datasvc.loaders.core.loader import Loader
from datasvc.loaders.core.mixture import Mixture, check_samples, weighted_splits
from datasvc.loaders.core.pinned import warn_without_gpu
from datasvc.loaders.core.state import changed_fields
from datasvc.loaders.profiling.bottleneck import Resources
from datasvc.loaders.ranks.data_ranks import DataRanks
from datasvc.loaders.tokens.token_blocks import choose_format
from datasvc.loaders.tokens.token_decoder import Labels, TokenBatch, TokenConfig, TokenDecoder, to_torch
from datasvc.order import OrderConfig, Shuffle, Tail
from datasvc.shards import Split
from datasvc.shards.sources.text.tokens import DOCUMENT_STARTS, LENGTH, TOKENIZER, TOKENS

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class TokenFormat:
    """How a data set stores blocks of tokens.

    Attributes:
        column: name of the column of blocks.
        block_tokens: number of tokens of a block, at least 1. It is needed for blobs and for lists of variable size.
        dtype: dtype of a token in blobs, such as "uint16"; the bytes are little-endian.
        pad: token to write into padding, at least 0. With None, stored padding stays as it is, and a block that is
            stored with fewer tokens is filled with 0.
        end: token that ends a document, at least 0. Without a column `document_starts`, the loader needs it for
            `documents=True` and for `labels="within"`.

    Raises:
        ConfigError: a value is out of range.
    """

    column: str = TOKENS
    block_tokens: int | None = None
    dtype: str | None = None
    pad: int | None = None
    end: int | None = None

    def __post_init__(self) -> None:
        check_sizes(block_tokens=self.block_tokens)
        max_token = np.iinfo(np.int64).max
        for option, value in (("pad", self.pad), ("end", self.end)):
            if value is not None and not 0 <= value <= max_token:
                raise ConfigError(f"{option} is {value}; expected a token from 0 to {max_token}")


class TokenLoader(Loader[TokenBatch[Any]]):
    """Batches of a split's token blocks: `for tokens, labels in loader` runs to the end of the epoch.

    Order, state, ranks, cache and tail work as in `ImageLoader`. A state records the batches that were handed over.
    It can be loaded with another world size or batch size, and continues with exactly the samples not yet served.

    Args:
        split: a split of a data-set version, or a mixture of several. Blocks are lists of integers, of fixed or
            variable size, or blobs of integers.
        batch_size, training, cache, seed, shuffle, order, ranks, tail, prefetch, ledger, masked: see `Loader`.
        tokens: how the data set stores blocks, or only the name of the column of blocks.
        labels: "across": the label of a token is the next token, also across the end of a document; "within": only if
            the next token is of the same document; None: no labels.
        documents: whether batches have the fields `document_ids`, `position_ids`, `cu_seqlens` and `max_seqlen`.

    Raises:
        ConfigError: an argument is out of range; the column of tokens is missing; a batch is larger than the epoch
            with `tail="drop"`.
        CacheFullError: the cache's budget cannot hold the shards that the order needs at once.
    """

    def __init__(
        self,
        split: Split | Mixture,
        *,
        batch_size: int,
        training: bool,
        cache: Cache | str | Path | None = None,
        tokens: TokenFormat | str = TOKENS,
        labels: Labels = None,
        documents: bool = False,
        seed: int | None = None,
        shuffle: Shuffle | Literal["auto"] = "auto",
        order: OrderConfig | None = None,
        ranks: DataRanks | DeviceMesh | None = None,
        tail: Tail | None = None,
        prefetch: int = 2,
        ledger: Path | str | None = None,
        masked: Masked | None = None,
    ) -> None:
        check_samples(split)
        token_format = TokenFormat(tokens) if isinstance(tokens, str) else tokens
        splits = weighted_splits(split)
        self._format = token_format
        self._config = TokenConfig(
            column=token_format.column,
            block_tokens=common_block(splits, token_format),
            dtype=token_format.dtype,
            tokenizer=_common_tokenizer(splits),
            # One setting serves all splits, so the column is used only if every split has it.
            lengths_are_needed=all(LENGTH in part.table.sample_schema.names for part in splits),
            pad=token_format.pad,
            labels=labels,
            documents=documents,
            end=token_format.end,
        )
        _check_config(self._config, splits)
        self._convert: Callable[[TokenBatch[npt.NDArray[Any]]], TokenBatch[Any]] = to_torch
        super().__init__(
            split,
            blob=None,
            columns=(),
            batch_size=batch_size,
            training=training,
            cache=cache,
            seed=seed,
            shuffle=shuffle,
            order=order,
            ranks=ranks,
            tail=tail,
            prefetch=prefetch,
            ledger=ledger,
            masked=masked,
        )

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self._config.block_tokens

    @property
    def settings(self) -> dict[str, Any]:
        """See `Loader.settings`."""
        return {
            "kind": "tokens",
            "tokens": changed_fields(self._format),
            "labels": self._config.labels,
            "documents": self._config.documents,
        }

    @property
    def tokenizer(self) -> str | None:
        """Digest of the `tokenizer.json` that made the tokens; None if the data set does not record it."""
        return None if self._config.tokenizer is None else self._config.tokenizer.decode()

    def __iter__(self) -> Iterator[TokenBatch[torch.Tensor]]:
        """Yield the remaining batches of the epoch as tensors on the CPU. For details see `Loader.__iter__`."""
        return super().__iter__()

    def numpy(self) -> Iterator[TokenBatch[npt.NDArray[Any]]]:
        """Yield the remaining batches of the epoch as NumPy arrays, without importing torch."""
        return self._serve(lambda batch: batch)

    def pin(self) -> Iterator[TokenBatch[torch.Tensor]]:
        """Yield the remaining batches of the epoch in page-locked memory, see `ImageLoader.pin`."""
        warn_without_gpu()
        return self._serve(lambda batch: to_torch(batch).pin_memory())

    def _serve(self, convert: Callable[[TokenBatch[npt.NDArray[Any]]], TokenBatch[Any]]) -> Iterator[TokenBatch[Any]]:
        """Yield the remaining batches of the epoch, each converted by `convert`."""
        batches = super().__iter__()
        while True:
            # Set `self._convert`, which `_deliver` calls, for this batch only: all iterators of this loader share it,
            # and the caller may alternate between `numpy()` and `pin()`.
            self._convert = convert
            try:
                batch = next(batches, None)
            finally:
                self._convert = to_torch
            if batch is None:
                return
            yield batch

    def _make_decoder(self) -> BatchDecoder[TokenBatch[Any]]:
        return TokenDecoder(
            self._config,
            batch_size=self.batch_size,
            is_mixture=isinstance(self.split, Mixture),
            describe=self._batches.describe,
        )

    def _resources(self) -> Resources:
        return dataclasses.replace(super()._resources(), unit="blocks")

    def _deliver(self, decoded: TokenBatch[Any]) -> TokenBatch[Any]:
        return self._convert(decoded)


def common_block(splits: Sequence[Split], stored: TokenFormat) -> int:
    """Return the number of tokens of a block. Raises ConfigError: splits have different numbers."""
    split_of: dict[int, Split] = {}
    for split in splits:
        try:
            block_format = choose_format(split.table.sample_schema, stored.column, stored.block_tokens, stored.dtype)
        except ConfigError as error:
            raise ConfigError(f"{split!r}: {error}") from error
        split_of.setdefault(block_format.block_tokens, split)
    if len(split_of) > 1:
        sizes = ", ".join(f"{size} tokens in {split!r}" for size, split in split_of.items())
        raise ConfigError(f"blocks differ in size: {sizes}; ingest them with one --block-tokens")
    return next(iter(split_of))


def _common_tokenizer(splits: Sequence[Split]) -> bytes | None:
    """Return the digest of the tokenizer; None if no split has one. Raises ConfigError: splits differ."""
    split_of: dict[bytes, Split] = {}
    for split in splits:
        digest = (split.table.sample_schema.metadata or {}).get(TOKENIZER)
        if digest is not None:
            split_of.setdefault(digest, split)
    if len(split_of) > 1:
        # Equal tokens of two tokenizers stand for different texts.
        digests = ", ".join(f"{digest.decode()[:12]}... in {split!r}" for digest, split in split_of.items())
        raise ConfigError(f"tokens of different tokenizers do not mix: {digests}; ingest them with one --tokenizer")
    return next(iter(split_of), None)


def _check_config(config: TokenConfig, splits: Sequence[Split]) -> None:
    """Raise ConfigError if a setting is out of range or needs a column that a split lacks."""
    if config.labels not in ("across", "within", None):
        raise ConfigError(f"labels is {config.labels!r}; expected 'across', 'within' or None")
    for split in splits:
        schema = split.table.sample_schema
        if LENGTH in schema.names and not pa.types.is_integer(schema.field(LENGTH).type):
            raise ConfigError(f"column {LENGTH!r} of {split!r} is {schema.field(LENGTH).type}; expected integers")
        # To divide blocks into segments, each of one document, the decoder needs the starts of documents.
        if config.needs_segments and config.end is None and not _has_document_starts(schema):
            raise ConfigError(
                f"{split!r} has no column {DOCUMENT_STARTS!r} with lists of integers, so the starts of documents are "
                "unknown; give tokens=TokenFormat(end=N), with the token that ends a document"
            )


def _has_document_starts(schema: pa.Schema) -> bool:
    if DOCUMENT_STARTS not in schema.names:
        return False
    kind = schema.field(DOCUMENT_STARTS).type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(is_list and pa.types.is_integer(kind.value_type))
