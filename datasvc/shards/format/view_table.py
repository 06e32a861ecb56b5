"""What the table of a view has beside that of a version: its origin, and weights, packs or groups of its samples.

`EpochGrid` says how often an epoch serves each sample of a weighted split: a systematic grid over the table. An epoch
has N samples with the total weight W. Sample i has the weights from C_i to C_i + w_i of the cumulative
weight. The grid has the points v * W + o for v in range(N), with an offset o of the epoch. The sample is served once
for each point in [N * C_i, N * (C_i + w_i)): N * w_i / W times, rounded down or up, and never if its weight is 0.
Weights are integers, so all machines compute the same grid (systematic sampling: Madow, Ann. Math. Stat. 20, 1949).

The shards have the order of the table, so the sum of the weights of a shard says how many samples an epoch serves of
it. Within a shard, each epoch permutes the samples: otherwise the grid would prefer the classes of a source in which
classes take turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

import numpy as np

from datasvc.keyed_random import Integers, derive_keys, uniform
from datasvc.order import OrderConfig
from datasvc.repository import Digest
from datasvc.repository.objects.objects import parse_digest

GROUPS_PER_BLOCK: Final = 32
"""Groups whose samples are sorted together, see `packing.groups`."""
MAX_GROUP: Final = 1 << 20
_PURPOSE: Final = 4  # the order uses 1 to 3, see `datasvc.order`
_MAX_EXACT: Final = 1 << 62

Value = TypeVar("Value")


@dataclass(frozen=True)
class WeightPack:
    """The object with the weights or aspects of the samples, or the packs of the documents, of consecutive shards.

    Attributes:
        first_shard: number of its first shard; its last one is before the first shard of the next pack.
        digest: digest of the object.
    """

    first_shard: int
    digest: Digest


@dataclass(frozen=True)
class ViewOrigin:
    """Where the samples of a view come from; see `datasvc.shards.views`.

    Attributes:
        table: digest of the shard table of the split of a version.
        dataset: the version, such as "pets@3".
        split: name of the split.
        steps: how the samples were chosen, in order, such as "label != 'cat'" and "take(0.1, seed=0)".
    """

    table: Digest
    dataset: str
    split: str
    steps: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join(self.steps)

    @classmethod
    def from_dict(cls, origin: Mapping[str, Any]) -> ViewOrigin:
        """Return the origin from its JSON values. Raise KeyError, TypeError, ValueError: they are not valid."""
        dataset, split = (checked(origin[name], str) for name in ("dataset", "split"))
        steps = tuple(checked(step, str) for step in origin["steps"])
        return cls(parse_digest(origin["table"]), dataset, split, steps)


@dataclass(frozen=True)
class Packing:
    """Packs of the documents of a split: each is one token block, and one position of the access order.

    Attributes:
        rule: how documents were assigned to packs, such as "best-fit".
        block_tokens: maximum number of tokens of a pack.
        column: column of the tokens.
        documents: number of documents that are in packs.
        tokens: number of their tokens.
        cut: number of documents that are longer than a block, and in several packs.
        empty: number of documents that are in no pack, because they have no tokens.
        unlabelled: number of documents that are in no pack, because their loss mask counts no token.
        objects: the packs, as `packing.packs` stores them.
    """

    rule: str
    block_tokens: int
    column: str
    documents: int
    tokens: int
    cut: int
    empty: int
    unlabelled: int
    objects: tuple[WeightPack, ...]

    def padding(self, num_packs: int) -> float:
        """Return the part of all tokens of the blocks that is padding, in 0..1."""
        return 1 - self.tokens / (num_packs * self.block_tokens)

    def to_json(self) -> dict[str, Any]:
        """Return the packing as JSON values."""
        return {**asdict(self), "objects": [[each.first_shard, each.digest] for each in self.objects]}

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Packing:
        """Return the packing of JSON values. Raise KeyError, TypeError, ValueError: they are not valid."""
        names = ("block_tokens", "documents", "tokens", "cut", "empty", "unlabelled")
        numbers = {name: checked(fields[name], int) for name in names}
        objects = tuple(WeightPack(checked(first, int), parse_digest(digest)) for first, digest in fields["objects"])
        if min(numbers.values()) < 0 or not numbers["block_tokens"] or not objects or objects[0].first_shard != 0:
            raise ValueError(f"packing {fields!r}")
        return cls(
            rule=checked(fields["rule"], str), column=checked(fields["column"], str), objects=objects, **numbers
        )


@dataclass(frozen=True)
class Grouping:
    """Groups of images of a similar aspect, in which the access order serves the samples of a split.

    Attributes:
        group: number of positions of a group.
        objects: the aspects of the samples, as `packing.groups` stores them.
    """

    group: int
    objects: tuple[WeightPack, ...]

    @property
    def span(self) -> int:
        """Number of consecutive positions among which an order moves samples; at the end of an epoch up to twice."""
        return GROUPS_PER_BLOCK * self.group

    def to_json(self) -> dict[str, Any]:
        """Return the grouping as JSON values."""
        return {"group": self.group, "objects": [[each.first_shard, each.digest] for each in self.objects]}

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Grouping:
        """Return the grouping of JSON values. Raise KeyError, TypeError, ValueError: they are not valid."""
        objects = tuple(WeightPack(checked(first, int), parse_digest(digest)) for first, digest in fields["objects"])
        if not 1 <= checked(fields["group"], int) <= MAX_GROUP or not objects or objects[0].first_shard != 0:
            raise ValueError(f"grouping {fields!r}")
        return cls(fields["group"], objects)


@dataclass(frozen=True)
class EpochGrid:
    """The grid of one epoch.

    Attributes:
        num_samples: samples of the epoch, N.
        total: sum of all weights, W; positive.
        offset: the offset o, in range(total).
        key: key of the permutations within shards.
    """

    num_samples: int
    total: int
    offset: int
    key: np.uint64

    @classmethod
    def of_epoch(cls, num_samples: int, total: int, config: OrderConfig, epoch: int) -> EpochGrid:
        """Return the grid of an epoch of an access order; with sticky lanes, each epoch has that of epoch 0."""
        keys = derive_keys(config.seed, 0 if config.sticky else epoch, _PURPOSE, 2)
        return cls(num_samples, total, int(keys[0]) % total, keys[1])

    def copies(self, before: int, first: int, weights: Integers) -> Integers:
        """Return how often each sample of a shard is served: `int64[n]`.

        Args:
            before: sum of the weights of all earlier shards.
            first: number of the first sample of the shard in the split.
            weights: `int64[n]`, weights of its samples.
        """
        order = np.argsort(uniform(self.key, first + np.arange(len(weights)), 0), kind="stable")
        copies = np.empty(len(weights), np.int64)
        copies[order] = self.counts(before, weights[order])
        return copies

    def counts(self, before: int, weights: Integers) -> Integers:
        """Return the number of points in each of some consecutive ranges of the cumulative weight: `int64[n]`.

        Args:
            before: the cumulative weight at which the first range begins.
            weights: `int64[n]`, length of each range.
        """
        # Exact at any size: the large part is one Python integer, and the rest of a shard fits into 62 bits.
        _, remainder = divmod(self.num_samples * before - self.offset, self.total)
        sums = np.concatenate([[0], np.cumsum(weights)])
        if self.num_samples * int(sums[-1]) + self.total >= _MAX_EXACT:
            sums = sums.astype(object)
        points = -(-(remainder + self.num_samples * sums) // self.total)  # rounded up
        return np.asarray(np.diff(points), np.int64)


def checked(value: Any, expected: type[Value]) -> Value:
    """Return a value of the table's JSON metadata. Raise TypeError if it is not of the expected type."""
    if not isinstance(value, expected):
        raise TypeError(f"{str(value)[:80]!r} is not of type {expected.__name__}")
    return value
