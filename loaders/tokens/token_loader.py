"""`TokenLoader`: batches of token blocks in the access order. A resumed run serves each block once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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
from datasvc.loaders.core.array_loader import ArrayLoader
from datasvc.loaders.core.batches import BatchDecoder
from datasvc.loaders.core.mixture import Mixture, check_samples, weighted_splits
from datasvc.loaders.core.state import changed_fields
from datasvc.loaders.profiling.bottleneck import Resources
from datasvc.loaders.ranks.data_ranks import DataRanks
from datasvc.loaders.tokens.token_blocks import choose_format, find_stored_size
from datasvc.loaders.tokens.token_decoder import Documents, Labels, TokenBatch, TokenConfig, TokenDecoder
from datasvc.order import OrderConfig, Shuffle, Tail
from datasvc.shards import Split
from datasvc.shards.format.schema import has_integer_lists
from datasvc.shards.sources.text.tokens import DOCUMENT_STARTS, LENGTH, TOKENIZER, TOKENS

if TYPE_CHECKING:
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


class TokenLoader(ArrayLoader[TokenBatch[Any]]):
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
        documents: whether batches have the fields `document_ids`, `position_ids`, `cu_seqlens` and `max_seqlen`;
            "cu_seqlens": only the last two, which takes half of the time.
        pack: "best-fit": each sample is a document, and blocks are packs of documents; see `Split.packed`. A split
            that is packed already needs none of the arguments of packs.
        block_tokens: tokens of a pack; default: that of `tokens`.
        too_long: "cut" or "refuse": what to do with a document that is longer than a pack.
        lengths: function that returns how many tokens to use of each document; see `Split.packed`.
        loss_mask: column of lists with a Boolean or integer for each token: a token whose value is 0 is no label.

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
        documents: Documents = False,
        pack: Literal["best-fit"] | None = None,
        block_tokens: int | None = None,
        too_long: Literal["cut", "refuse"] = "cut",
        lengths: Callable[[pa.Table], Sequence[int] | npt.NDArray[Any]] | None = None,
        loss_mask: str | None = None,
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
        if pack is not None:
            size = token_format.block_tokens if block_tokens is None else block_tokens
            options = {"too_long": too_long, "lengths": lengths, "loss_mask": loss_mask}
            split = pack_split(split, pack, size, token_format, **options)
        elif block_tokens is not None or lengths is not None:
            raise ConfigError("block_tokens and lengths are for packs; give pack='best-fit' too, or leave them out")
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
            packed=splits[0].packs is not None,
            loss_mask=loss_mask,
        )
        _check_config(self._config, splits)
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
            **({} if self._config.loss_mask is None else {"loss_mask": self._config.loss_mask}),
        }

    @property
    def tokenizer(self) -> str | None:
        """Digest of the `tokenizer.json` that made the tokens; None if the data set does not record it."""
        return None if self._config.tokenizer is None else self._config.tokenizer.decode()

    def _make_decoder(self) -> BatchDecoder[TokenBatch[Any]]:
        return TokenDecoder(
            self._config,
            batch_size=self.batch_size,
            is_mixture=isinstance(self.split, Mixture),
            describe=self._batches.describe,
        )

    def _resources(self) -> Resources:
        return dataclasses.replace(super()._resources(), unit="blocks")


def common_block(splits: Sequence[Split], stored: TokenFormat) -> int:
    """Return the number of tokens of a block. Raises ConfigError: splits have different numbers."""
    split_of: dict[int, Split] = {}
    unpacked = [split for split in splits if split.packs is None]
    if 0 < len(unpacked) < len(splits):
        raise ConfigError(f"{unpacked[0]!r} is not packed, and other splits are; pack all of them, or none")
    for split in splits:
        packing, schema = split.table.packing, split.table.sample_schema
        if packing is not None:
            if stored.block_tokens not in (None, packing.block_tokens):
                raise ConfigError(
                    f"block_tokens is {stored.block_tokens}, and the packs of {split!r} have {packing.block_tokens}; "
                    "leave it out, or pack the documents for it"
                )
            if packing.column != stored.column:
                raise ConfigError(f"{split!r} has packs of {packing.column!r}; give tokens={packing.column!r}")
            choose_format(schema, stored.column, find_stored_size(schema, stored.column) or 1, stored.dtype)
            split_of.setdefault(packing.block_tokens, split)
            continue
        try:
            block_format = choose_format(schema, stored.column, stored.block_tokens, stored.dtype)
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
    if config.documents not in (True, False, "cu_seqlens"):
        raise ConfigError(f"documents is {config.documents!r}; expected True, False or 'cu_seqlens'")
    if config.packed and config.labels == "across":
        raise ConfigError("labels is 'across', and the documents of a pack do not belong together; give 'within'")
    if config.loss_mask is not None and config.labels is None:
        raise ConfigError(f"loss_mask is {config.loss_mask!r}, and there are no labels; give labels='within' too")
    for split in splits:
        schema = split.table.sample_schema
        if LENGTH in schema.names and not pa.types.is_integer(schema.field(LENGTH).type):
            raise ConfigError(f"column {LENGTH!r} of {split!r} is {schema.field(LENGTH).type}; expected integers")
        if config.loss_mask is not None and not has_integer_lists(schema, config.loss_mask, or_booleans=True):
            raise ConfigError(
                f"loss_mask is {config.loss_mask!r}; expected a column of {split!r} with a list of Booleans or "
                f"integers for each sample; the columns are {', '.join(schema.names)}"
            )
        # To divide blocks into segments, each of one document, the decoder needs the starts of documents.
        if (
            config.needs_segments
            and not config.packed
            and config.end is None
            and not has_integer_lists(schema, DOCUMENT_STARTS)
        ):
            raise ConfigError(
                f"{split!r} has no column {DOCUMENT_STARTS!r} with lists of integers, so the starts of documents are "
                "unknown; give tokens=TokenFormat(end=N), with the token that ends a document"
            )


def pack_split(
    split: Split | Mixture, pack: str, block_tokens: int | None, stored: TokenFormat, **options: Any
) -> Split:
    """Return the packed view of a split; for `options`, see `Split.packed`. Raises its errors."""
    if block_tokens is None:
        raise ConfigError(f"pack is {pack!r}; give block_tokens too, the maximum number of tokens of a pack")
    if isinstance(split, Mixture):
        raise ConfigError(
            "a mixture is not packed as a whole: documents of different splits share no pack; give a mixture of "
            f"packed splits, such as Mixture({{web.packed({block_tokens}): 0.7, books.packed({block_tokens}): 0.3}})"
        )
    return split.packed(block_tokens, rule=pack, column=stored.column, dtype=stored.dtype, **options)
