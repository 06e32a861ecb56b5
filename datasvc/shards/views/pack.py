"""Packed views: the documents of a split in packs, which are computed once and stored; see `Split.packed`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3

from datasvc.errors import BadSampleError, ConfigError
from datasvc.keyed_random import Integers
from datasvc.printable import count_text
from datasvc.shards.format.reader import Shard
from datasvc.shards.format.schema import has_integer_lists, is_blob
from datasvc.shards.format.shard_stores import open_listed_shard
from datasvc.shards.format.view_table import Packing
from datasvc.shards.packing.best_fit import pack_documents
from datasvc.shards.packing.pack_objects import PackWriter
from datasvc.shards.packing.packs import encode_packs
from datasvc.shards.sources.text.tokens import DOCUMENT_STARTS, LENGTH
from datasvc.shards.versions.dataset import Split
from datasvc.shards.views.derive import put_view
from datasvc.shards.views.named import find_stored, save_view
from datasvc.threads import map_in_threads

RULES: Final = ("best-fit",)
_SHARDS_AT_ONCE: Final = 4
_MAX_BLOCK_TOKENS: Final = (1 << 31) - 1

Lengths = Callable[[pa.Table], Sequence[int] | npt.NDArray[Any]]


@dataclass(frozen=True)
class _Rule:
    """How documents are packed; for the fields, see `Split.packed`."""

    rule: str
    block_tokens: int
    column: str
    dtype: str | None
    too_long: str
    loss_mask: str | None

    def __str__(self) -> str:
        options = [f"block_tokens={self.block_tokens}"]
        options += [f"column={self.column}"] if self.column != "tokens" else []
        options += ["too_long=refuse"] if self.too_long != "cut" else []
        options += [f"loss_mask={self.loss_mask}"] if self.loss_mask is not None else []
        return f"packed({self.rule}, {', '.join(options)})"


class _Documents(NamedTuple):
    """The documents of a shard: their tokens to pack, `int64[live]`, and how many have tokens but no label."""

    lengths: Integers
    unlabelled: int


def packed(
    split: Split,
    block_tokens: int,
    rule: str,
    column: str,
    dtype: str | None,
    *,
    too_long: str,
    loss_mask: str | None,
    lengths: Lengths | None,
) -> Split:
    """Return the packed view of a split; see `Split.packed`."""
    chosen = _Rule(rule, block_tokens, column, dtype, too_long, loss_mask)
    _check(split, chosen)
    # A function has no identity that a later process could compare, so its packs are stored without a name.
    key = None if lengths is not None else _key(split, chosen)
    view = None if key is None else find_stored(split, key)
    if view is None:
        view = _build(split, chosen, lengths)
        if key is not None:
            save_view(split.repository, key, view, message=f"packs of {split.title}")
    _warn(view)
    return view


def _key(split: Split, rule: _Rule) -> str:
    identity = json.dumps([split.digest, *vars(rule).values()], default=str)
    return f"packed-{blake3(identity.encode()).hexdigest()[:24]}"


def _build(split: Split, rule: _Rule, lengths: Lengths | None) -> Split:
    """Compute and store the packs of a split."""
    table, objects = split.table, split.repository.objects
    documents = map_in_threads(
        lambda number: _read_documents(split, number, rule, lengths), range(table.num_shards), _SHARDS_AT_ONCE
    )
    longer = sum(int((shard.lengths > rule.block_tokens).sum()) for shard in documents)
    if longer and rule.too_long == "refuse":
        raise ConfigError(
            f"{count_text(longer, 'document')} of {split.title} have more than {rule.block_tokens} tokens, up to "
            f"{max(int(shard.lengths.max(initial=0)) for shard in documents)}; give larger blocks, or too_long='cut'"
        )
    writer = PackWriter(objects, "packs")
    num_packs = []
    for shard in documents:
        packs = pack_documents(shard.lengths, rule.block_tokens)
        num_packs.append(len(packs.counts))
        writer.add(encode_packs(packs))
    if not sum(num_packs):
        raise ConfigError(f"no document of {split.title} has tokens to train on, so there is nothing to pack")
    with_tokens = sum(int((shard.lengths > 0).sum()) for shard in documents)
    unlabelled = sum(shard.unlabelled for shard in documents)
    packing = Packing(
        rule.rule,
        rule.block_tokens,
        rule.column,
        documents=with_tokens,
        tokens=sum(int(shard.lengths.sum()) for shard in documents),
        cut=longer,
        empty=len(split) - with_tokens - unlabelled,
        unlabelled=unlabelled,
        objects=writer.finish(),
    )
    step = str(rule) if lengths is None else f"{str(rule)[:-1]}, lengths={lengths.__qualname__})"
    return put_view(split, replace(table.with_column("packs", num_packs), packing=packing), step)


def _read_documents(split: Split, number: int, rule: _Rule, lengths: Lengths | None) -> _Documents:
    """Return the documents of one shard. Raise the errors of `packed`."""
    table = split.table
    shard = open_listed_shard(split.origin, split.repository.objects, table, number)
    live = split.stored_rows(number, np.arange(int(table.samples_per_shard[number])))
    stored = _stored_tokens(shard, rule)[live]
    stored[np.isin(live, shard.redacted)] = 0
    used = stored
    if LENGTH in shard.schema.names and pa.types.is_integer(shard.schema.field(LENGTH).type):
        used = np.minimum(stored, pc.fill_null(shard.column(LENGTH), 0).to_numpy()[live])
    if lengths is not None:
        names = [field.name for field in shard.schema if not is_blob(field.type)]
        samples = pa.table({name: shard.column(name).take(pa.array(live)) for name in names})
        used = _check_lengths(lengths(samples), used, f"shard {number} of {split.title}")
    unlabelled = 0
    if rule.loss_mask is not None:
        if rule.loss_mask not in shard.schema.names:
            raise _no_loss_mask(rule.loss_mask, shard.name)
        has_label = _has_label(shard.column(rule.loss_mask), live, stored, used, f"shard {number} of {split.title}")
        unlabelled = int(((used > 0) & ~has_label).sum())
        used = np.where(has_label, used, 0)
    split.origin.release_shard(table.shard(number))
    return _Documents(used, unlabelled)


def _no_loss_mask(column: str, shard: str) -> BadSampleError:
    return BadSampleError(
        f"shard {shard} has no column {column!r}, so none of its tokens has a label: append samples with loss masks, "
        "or leave out the loss mask"
    )


def _stored_tokens(shard: Shard, rule: _Rule) -> Integers:
    """Return the number of tokens of each sample of a shard, `int64[stored]`; 0 for null."""
    if rule.column not in shard.schema.names:
        return np.zeros(shard.num_samples, np.int64)
    column = shard.column(rule.column)
    if not is_blob(column.type):
        return np.array(pc.fill_null(pc.list_value_length(column), 0).to_numpy(), np.int64)
    sizes = np.array(pc.fill_null(pc.binary_length(column), 0).to_numpy(), np.int64)
    counts, remainders = np.divmod(sizes, np.dtype(rule.dtype).itemsize)
    if remainders.any():
        raise BadSampleError(
            f"{count_text(int((remainders != 0).sum()), 'blob')} of {rule.column!r} in shard {shard.name} have an "
            f"incomplete token of {rule.dtype}; give the dtype of the tokens, or ingest them again"
        )
    return counts


def _check_lengths(given: Any, most: Integers, where: str) -> Integers:
    values = np.asarray(given)
    if values.shape != most.shape or values.dtype.kind not in "iu" or (values < 0).any() or (values > most).any():
        raise BadSampleError(
            f"lengths returned {values.dtype} of shape {list(values.shape)} for {where}; expected an integer for "
            f"each of the {count_text(len(most), 'sample')}, from 0 to its number of tokens"
        )
    return values.astype(np.int64)


def _has_label(
    column: pa.ChunkedArray, live: Integers, stored: Integers, used: Integers, where: str
) -> npt.NDArray[np.bool_]:
    """Return which documents have a token after their first one that the loss counts: `bool[live]`."""
    sizes = np.array(pc.fill_null(pc.list_value_length(column), 0).to_numpy(), np.int64)
    starts = (np.cumsum(sizes) - sizes)[live]
    wrong = (sizes[live] != stored) & (stored > 0)
    if wrong.any():
        raise BadSampleError(
            f"the loss mask of {count_text(int(wrong.sum()), 'document')} in {where} has another number of values "
            f"than there are tokens, such as {sizes[live][wrong][0]} for {stored[wrong][0]}; ingest them again"
        )
    # A shard may have 100 million tokens: one byte for each. One more, so that `stops` are indices.
    counted = np.append(pc.list_flatten(column).cast(pa.bool_()).fill_null(False).to_numpy(), False)
    # The first token is no label: nothing comes before it.
    stops = starts + used
    bounds = np.stack([np.minimum(starts + 1, stops), stops], axis=1).reshape(-1)
    return np.logical_or.reduceat(counted, bounds)[::2] & (used > 1) if len(used) else used > 1


def _check(split: Split, rule: _Rule) -> None:
    """Raise ConfigError if a split cannot be packed by a rule."""
    if rule.rule not in RULES:
        raise ConfigError(f"pack is {rule.rule!r}; expected {' or '.join(map(repr, RULES))}")
    if type(rule.block_tokens) is not int or not 1 <= rule.block_tokens <= _MAX_BLOCK_TOKENS:
        raise ConfigError(f"block_tokens is {rule.block_tokens!r}; expected an integer from 1 to {_MAX_BLOCK_TOKENS}")
    if rule.too_long not in ("cut", "refuse"):
        raise ConfigError(f"too_long is {rule.too_long!r}; expected 'cut' or 'refuse'")
    if split.weights is not None or split.packs is not None or split.table.grouping is not None:
        state = "packed already" if split.packs is not None else "weighted or grouped"
        raise ConfigError(f"{split.title} is {state}; expected a split or a view without weights, packs and groups")
    schema = split.table.sample_schema
    if DOCUMENT_STARTS in schema.names:
        raise ConfigError(f"{split.title} has blocks of several documents; expected samples of one document each")
    kind = schema.field(rule.column).type if rule.column in schema.names else None
    if kind is None or not (has_integer_lists(schema, rule.column) or is_blob(kind)):
        found = "does not exist" if kind is None else f"is {kind}"
        raise ConfigError(
            f"the column {rule.column!r} of {split.title} {found}; expected lists of integers, or blobs. The columns "
            f"are {', '.join(schema.names)}"
        )
    if rule.loss_mask is not None and not has_integer_lists(schema, rule.loss_mask, or_booleans=True):
        raise ConfigError(f"loss_mask is {rule.loss_mask!r}; expected a column of lists of Booleans or integers")
    if is_blob(kind):
        with suppress(TypeError):
            if np.dtype(rule.dtype).kind in "iu":  # that of None is a float
                return
        raise ConfigError(f"{rule.column!r} contains blobs and dtype is {rule.dtype!r}; give one such as 'uint16'")


def _warn(view: Split) -> None:
    """Warn about documents that are in no pack."""
    packing = view.table.packing
    assert packing is not None
    counts = {"without tokens": packing.empty, "whose loss mask counts no token": packing.unlabelled}
    problems = [f"{count_text(count, 'document')} {why}" for why, count in counts.items() if count]
    if problems:
        warnings.warn(f"{view.title} leaves out {' and '.join(problems)}", RuntimeWarning, stacklevel=4)
