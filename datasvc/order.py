"""Access order: a pure function from each position of an epoch to the sample that is served there.

The function `position -> (shard, row)` depends only on the data-set version, the seed and the epoch. It does not
depend on the world size, batch size, workers or nodes. So a run can resume from an epoch and a position, also with
another number of ranks. A cache computes all future accesses; provenance computes the samples of a model version.

The order of an epoch is computed as follows:

1. permute the shards and concatenate their samples;
2. split this sequence into `lanes` equal spans, the lanes. With `sticky`, steps 1 and 2 are the same in every epoch;
   then each epoch permutes the shards within each lane, where a shard that two lanes share counts as two;
3. permute the samples of each lane within consecutive blocks of `block` samples;
4. interleave the lanes: position p is sample p // lanes of lane p % lanes.

`shuffle="global"` is one lane and one block; `shuffle=None` is the identity. Memory is O(shards), never O(samples).

The functions at the end of this module divide an epoch into steps, and each step among the ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError, StateMismatchError
from datasvc.keyed_random import Integers, KeyedPermutation, derive_keys, uniform

Shuffle = Literal["global", "windowed"] | None
Tail = Literal["drop", "short", "pad"]

STATE_FORMAT: Final = 1
LOADER_SETTINGS: Final = frozenset({"decode", "decode_scale", "evaluation", "masked"})
"""Fields of a loader's state that are not part of the order; a state need not have them."""
_SHARDS, _SAMPLES, _STICKY = 1, 2, 3  # values of `purpose` for `derive_keys`
_CHUNK: Final = 8192  # number of positions per chunk: their temporary arrays fit into the processor's cache


@dataclass(frozen=True)
class OrderConfig:
    """Parameters of the access order; `lanes`, `block` and `sticky` are only for the shuffle "windowed".

    Attributes:
        seed: 0 <= seed < 2**64.
        shuffle: "global" (all samples are permuted), "windowed" (few shards are needed at a time) or None.
        lanes: number of equal spans of the data set that are read side by side.
        block: number of samples that are permuted together within a lane.
        sticky: whether each lane has the same samples in every epoch, so that each node reads its own part of them.

    Raises:
        ConfigError: a value is out of range, or does not apply to `shuffle`.
    """

    seed: int = 0
    shuffle: Shuffle = "global"
    lanes: int = 1
    block: int | None = None
    sticky: bool = False

    def __post_init__(self) -> None:
        if self.shuffle not in ("global", "windowed", None):
            raise ConfigError(f"shuffle is {self.shuffle!r}; expected 'global', 'windowed' or None")
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"seed is {self.seed}; expected 0 <= seed < 2**64")
        if self.shuffle == "windowed":
            if self.lanes < 1 or self.block is None or self.block < 1:
                raise ConfigError(
                    f"shuffle='windowed' needs lanes >= 1 and block >= 1, the samples that are permuted together; "
                    f"got lanes={self.lanes}, block={self.block}"
                )
        elif self.lanes != 1 or self.block is not None or self.sticky:
            raise ConfigError(
                f"lanes, block and sticky apply only to shuffle='windowed'; got lanes={self.lanes}, "
                f"block={self.block}, sticky={self.sticky} with shuffle={self.shuffle!r}"
            )


@dataclass(frozen=True)
class OrderState:
    """State of a loader: all positions of the epoch before `position` are served.

    Attributes:
        version: digest of the shard table; it identifies samples and shards.
        epoch: epoch, counted from 0.
        position: next position, 0 <= position <= samples of the epoch.
        config: parameters of the order.
    """

    version: str
    epoch: int
    position: int
    config: OrderConfig

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        state = dataclasses.asdict(self)
        config = state.pop("config")
        return {"format": STATE_FORMAT, **state, **config}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> OrderState:
        """Return the state from the result of `to_dict`.

        Raises:
            ConfigError: the state has another format, or a field is missing, invalid or unknown.
        """
        fields = {name: value for name, value in state.items() if name not in LOADER_SETTINGS}
        stored_format = fields.pop("format", None)
        if stored_format != STATE_FORMAT:
            raise ConfigError(
                f"this loader state has format {stored_format}; this datasvc reads format {STATE_FORMAT}"
            )
        try:
            cursor = {name: fields.pop(name) for name in ("version", "epoch", "position")}
            restored = cls(**cursor, config=OrderConfig(**fields))
            numbers = (restored.epoch, restored.position, restored.config.seed, restored.config.lanes)
            # Compare the type, because a boolean is an instance of int.
            if not isinstance(restored.version, str) or any(type(each) is not int or each < 0 for each in numbers):
                raise TypeError(f"version must be text, epoch, position, seed and lanes integers >= 0: {cursor}")  # noqa: TRY301
        except (KeyError, TypeError) as error:
            raise ConfigError(f"this is not a loader state: {error}; found the fields {sorted(state)}") from error
        return restored

    def check_matches(
        self,
        version: str,
        config: OrderConfig,
        num_samples: int,
        *,
        name_table: Callable[[str], str] = "the samples of shard table {:.12}...".format,
    ) -> None:
        """Raise StateMismatchError if the state is of another version or order, or its position is out of range.

        Args:
            version: digest of the shard table of the loader.
            config: order of the loader.
            num_samples: samples of the epoch.
            name_table: returns the name of the version with a shard table, for the message.
        """
        if self.version != version:
            raise StateMismatchError(
                f"the state belongs to {name_table(self.version)}, this loader reads {name_table(version)}; open the "
                "version that the state was saved with; to train on with other data, do not load the loader's state"
            )
        if self.config != config:
            raise StateMismatchError(
                f"the state was saved with {self.config}, this loader has {config}; use the saved parameters"
            )
        if not 0 <= self.position <= num_samples:
            raise StateMismatchError(
                f"the state's position {self.position} is outside 0..{num_samples}; restore another state"
            )


@dataclass(frozen=True)
class ShardWindows:
    """Ranges of positions that may need each shard, in the order of first use.

    A shard inside one lane has one range. A shard that the boundaries of lanes cut has one range per part.

    Attributes:
        shards: `int64[n]`, shard numbers.
        first: `int64[n]`, first position of the range, ascending.
        stop: `int64[n]`, first position after the range.
    """

    shards: Integers
    first: Integers
    stop: Integers


NEVER: Final = 1 << 62
"""Value of `NextUse.next_use` if there is no next use."""


@dataclass(frozen=True)
class NextUse:
    """Next use of a shard by a job, measured on the job's clock.

    Attributes:
        now: the job's clock: bytes that the order has served since the start of epoch 0.
        next_use: value of the clock when the job needs the shard next, or NEVER.
    """

    now: int
    next_use: int


class AccessOrder:
    """Access order of one epoch.

    Args:
        samples_per_shard: number of samples of each shard, in the order of the shard table; zeros are allowed.
        config: parameters of the order.
        epoch: epoch, counted from 0.

    Raises:
        ConfigError: `epoch` is negative.
    """

    def __init__(self, samples_per_shard: Sequence[int] | Integers, config: OrderConfig, epoch: int) -> None:
        self.config = config
        self.epoch = epoch
        self._counts = np.asarray(samples_per_shard, np.int64)
        self._bases = np.concatenate([[0], np.cumsum(self._counts)])  # index of each shard's first sample
        self.num_samples = int(self._bases[-1])
        self._lanes = config.lanes
        # The first `num_long` lanes have one sample more than the others.
        short_size, num_long = divmod(self.num_samples, self._lanes)
        self._lane_sizes = short_size + (np.arange(self._lanes) < num_long).astype(np.int64)
        self._lane_starts = np.concatenate([[0], np.cumsum(self._lane_sizes)])
        # Without a shuffle, a block is one sample, so that the permutation within blocks is the identity.
        self._block = config.block or (max(self.num_samples, 1) if config.shuffle else 1)
        keys = derive_keys(config.seed, epoch, _SAMPLES, KeyedPermutation.num_keys)
        # The last block of a lane may be smaller than the others. Lanes have two sizes, so blocks have up to three.
        block_sizes = {self._block, *(size % self._block for size in (short_size, short_size + 1))}
        self._permutations = {size: KeyedPermutation(size, keys) for size in block_sizes}
        self._compute_segments()

    def locate(self, positions: Integers | Sequence[int]) -> tuple[Integers, Integers]:
        """Return the sample at each position.

        Args:
            positions: `int64[n]` in range(num_samples), in any order.

        Returns:
            Shards, and rows in these shards, `int64[n]` each.

        Raises:
            IndexError: a position is out of range.
        """
        checked = np.asarray(positions, np.int64)
        if checked.size and (checked.min() < 0 or checked.max() >= self.num_samples):
            raise IndexError(f"a position is outside 0..{self.num_samples - 1}")
        shards, rows = np.empty_like(checked), np.empty_like(checked)
        # Use chunks, so that all temporary arrays stay in the processor's cache: this doubles the speed.
        for start in range(0, len(checked), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            shards[chunk], rows[chunk] = self._locate_chunk(checked[chunk])
        return shards, rows

    def _locate_chunk(self, positions: Integers) -> tuple[Integers, Integers]:
        """Return shards and rows, as `locate`, of at most `_CHUNK` positions."""
        if self._lanes == 1:  # all positions are in lane 0: save a division for every position
            lane, index = np.broadcast_to(np.int64(0), len(positions)), positions
        else:
            index, lane = np.divmod(positions, self._lanes)
        # `ordinal` is the index of each sample in the sequence before step 3 of the module's docstring.
        ordinal = self._lane_starts[lane] + self._permute_in_blocks(lane, index, forward=True)
        segment = self._segment_search.find(ordinal)
        return self._segment_shards[segment], self._segment_rows[segment] + ordinal - self._segment_starts[segment]

    def positions_of(self, shards: Integers | Sequence[int], rows: Integers | Sequence[int]) -> Integers:
        """Return the position at which each sample is served: `int64[n]`; the inverse of `locate`.

        Raises:
            IndexError: a shard does not exist, or does not have the row.
        """
        shard_of, row_of = np.asarray(shards, np.int64), np.asarray(rows, np.int64)
        if ((shard_of < 0) | (shard_of >= len(self._counts))).any():
            raise IndexError(f"a shard is outside 0..{len(self._counts) - 1}")
        if ((row_of < 0) | (row_of >= self._counts[shard_of])).any():
            raise IndexError("a row is outside its shard")
        sample_number: Integers = self._bases[shard_of] + row_of
        # Invert the steps of `_locate_chunk`, in reverse order.
        segments, search = self._segments_by_sample
        segment = segments[search.find(sample_number)]
        ordinal = self._segment_starts[segment] + row_of - self._segment_rows[segment]
        lane = np.searchsorted(self._lane_starts, ordinal, side="right") - 1
        index = self._permute_in_blocks(lane, ordinal - self._lane_starts[lane], forward=False)
        positions: Integers = index * self._lanes + lane
        return positions

    def copies_of(self, shards: Integers, rows: Integers) -> tuple[Integers, Integers]:
        """Return all positions of some samples.

        Returns:
            The index in `shards` of the sample that each position serves, and the positions, `int64[n]` each. Without
            weights, each sample has one position.
        """
        return np.arange(len(shards)), self.positions_of(shards, rows)

    def samples_at(self, positions: Integers) -> tuple[Integers, Integers, Integers]:
        """Return all samples at some positions, by ascending index of the position.

        Returns:
            The index in `positions` of the position that serves each sample, its shard and its row: `int64[n]` each.
            A position serves one sample, and with packs several.
        """
        return np.arange(len(positions)), *self.locate(positions)

    @cached_property
    def windows(self) -> ShardWindows:
        """Positions that may need each shard; prefetch and eviction use them."""
        # A sample may be anywhere in its block, so a part of a segment is needed from the start of its first block to
        # the end of its last one. Index i of lane k is position i * lanes + k.
        cuts, lengths, segment, lane = self._cut_at_lanes(self._segment_starts)
        first_block = (cuts - self._lane_starts[lane]) // self._block
        last_block = (cuts + lengths - 1 - self._lane_starts[lane]) // self._block
        last_index = np.minimum((last_block + 1) * self._block, self._lane_sizes[lane]) - 1
        first = first_block * self._block * self._lanes + lane
        stop = last_index * self._lanes + lane + 1
        by_first = np.argsort(first, kind="stable")
        return ShardWindows(self._segment_shards[segment][by_first], first[by_first], stop[by_first])

    def _compute_segments(self) -> None:
        """Compute the sequence of samples before block permutation, as segments: runs of rows of one shard."""
        nonempty = np.flatnonzero(self._counts)
        shards = nonempty[self._permuted_shards(len(nonempty))]
        lengths = self._counts[shards]
        starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
        rows = np.zeros_like(starts)
        if self.config.sticky:
            shards, rows, lengths = self._permute_within_lanes(shards, starts)
            starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
        self._segment_shards, self._segment_rows, self._segment_starts = shards, rows, starts
        self._segment_search = SpanSearch(starts, self.num_samples)

    def _permuted_shards(self, count: int) -> Integers:
        """Return the indices of `count` shards in the order of step 1."""
        if self.config.shuffle is None:
            return np.arange(count)
        # With sticky lanes, use the keys of epoch 0, so that each lane has the same samples in every epoch.
        epoch, purpose = (0, _STICKY) if self.config.sticky else (self.epoch, _SHARDS)
        keys = derive_keys(self.config.seed, epoch, purpose, KeyedPermutation.num_keys)
        return KeyedPermutation(count, keys).permute(np.arange(count))

    def _permute_within_lanes(self, shards: Integers, starts: Integers) -> tuple[Integers, Integers, Integers]:
        """Cut shards at the boundaries of lanes, and permute the parts of each lane.

        Returns:
            Shard, first row and number of rows of each part.
        """
        cuts, lengths, segment, lane = self._cut_at_lanes(starts)
        key = derive_keys(self.config.seed, self.epoch, _SHARDS, 1)[0]
        # Sort by lane, then by a random number of the part.
        by_lane = np.lexsort((uniform(key, np.arange(len(cuts)), 0), lane))
        rows = cuts - starts[segment]
        return shards[segment][by_lane], rows[by_lane], lengths[by_lane]

    def _cut_at_lanes(self, starts: Integers) -> tuple[Integers, Integers, Integers, Integers]:
        """Cut segments at the boundaries of lanes; return start, length, segment and lane of each part."""
        cuts = _merge(starts, self._lane_starts[:-1][self._lane_sizes > 0])
        segment, lane = (np.searchsorted(each, cuts, side="right") - 1 for each in (starts, self._lane_starts))
        return cuts, np.diff(np.append(cuts, self.num_samples)), segment, lane

    @cached_property
    def _segments_by_sample(self) -> tuple[Integers, SpanSearch]:
        """Segments sorted by the number of their first sample in the data set, and an index of these numbers."""
        first_sample = self._bases[self._segment_shards] + self._segment_rows
        order = np.argsort(first_sample)
        return order, SpanSearch(first_sample[order], self.num_samples)

    def _permute_in_blocks(self, lane: Integers, index: Integers, *, forward: bool) -> Integers:
        """Permute each index of a lane inside its block; with `forward=False`, invert this."""
        if self.config.shuffle is None:
            return index
        if self._lanes == 1 and self._block >= self.num_samples:  # a single block: the fast case of "global"
            single_block = self._permutations[min(self._block, max(self.num_samples, 1))]
            return single_block.permute(index) if forward else single_block.invert(index)
        block, within = np.divmod(index, self._block)
        block_sizes = np.minimum(self._lane_sizes[lane] - block * self._block, self._block)
        tweaks = block * self._lanes + lane  # a distinct number for each block of the epoch
        result = np.empty_like(index)
        for size, permutation in self._permutations.items():
            chosen = block_sizes == size
            if chosen.all():
                chosen = slice(None)  # a view, which is faster than a selection by mask
            elif not chosen.any():
                continue
            map_values = permutation.permute if forward else permutation.invert
            result[chosen] = map_values(within[chosen], tweaks[chosen])
        return block * self._block + result


class SpanSearch:
    """Index of consecutive spans that cover range(stop). It is ten times faster than a binary search per point.

    `starts`, `int64[n]`, has the first point of each span, ascending; `starts[0]` must be 0.
    """

    def __init__(self, starts: Integers, stop: int) -> None:
        self._starts = starts
        self._stops = np.append(starts[1:], stop)
        # Divide the points into buckets of 2**shift points, with about four buckets per span. The span of a point is
        # nearly always the first span of its bucket, or one of the next two.
        self._shift = max(0, (stop // max(4 * len(starts), 1)).bit_length() - 1)
        # Count the spans that start at or before each bucket's start. This takes one pass over spans and one over
        # buckets; a binary search per bucket would dominate the time to create an order of millions of shards.
        first_buckets = -(-starts >> self._shift)  # rounded up: the first bucket at or after each span's start
        self._first_of_bucket = np.cumsum(np.bincount(first_buckets, minlength=(stop >> self._shift) + 2)) - 1

    def find(self, points: Integers) -> Integers:
        """Return the index of the span that contains each point: `int64[n]`, for points in range(stop)."""
        spans: Integers = self._first_of_bucket[points >> self._shift]
        # Advance each point that is after its span to the next span, twice.
        for _ in range(2):
            spans += self._stops[spans] <= points
        remaining = np.flatnonzero(self._stops[spans] <= points)
        if remaining.size:  # only if a bucket has many short spans: search for these points
            spans[remaining] = np.searchsorted(self._starts, points[remaining], side="right") - 1
        return spans


def _merge(many: Integers, few: Integers) -> Integers:
    """Return the union of two ascending arrays. Unlike `np.union1d`, it does not sort everything again."""
    indices = np.searchsorted(many, few)
    is_duplicate = many[np.minimum(indices, len(many) - 1)] == few if len(many) else np.zeros(len(few), np.bool_)
    return np.insert(many, indices[~is_duplicate], few[~is_duplicate])


@dataclass(frozen=True)
class Step:
    """Positions [start, stop) of one global batch in an epoch of `num_samples` samples.

    With tail="pad", positions from `num_samples` on are padding.
    """

    start: int
    stop: int
    num_samples: int

    @property
    def position(self) -> int:
        """Position in the epoch before this step."""
        return self.start

    @property
    def next_position(self) -> int:
        """Position in the epoch after this step."""
        return min(self.stop, self.num_samples)


def plan_step(position: int, num_samples: int, global_batch: int, tail: Tail) -> Step | None:
    """Return the next global batch from `position`, or None at the end of the epoch of `num_samples` samples.

    `global_batch` is the number of samples of one step over all ranks. `tail` says what happens to a last batch with
    fewer samples: "drop" it, serve it "short", or "pad" it with masked samples.
    """
    remaining = num_samples - position
    if remaining < global_batch and (remaining <= 0 or tail == "drop"):
        return None
    stop = position + global_batch
    return Step(position, min(stop, num_samples) if tail == "short" else stop, num_samples)


def count_steps(position: int, num_samples: int, global_batch: int, tail: Tail) -> int:
    """Return how many steps `plan_step` plans from `position` to the end of the epoch."""
    num_full, remainder = divmod(num_samples - position, global_batch)
    return num_full + (1 if remainder and tail != "drop" else 0)


def lanes_of_rank(size: int, *, rank: int, world_size: int, lanes: int) -> range | None:
    """Return the lanes that a rank reads in steps of `size` positions; None if it may read all lanes.

    `slice_step` states when a rank reads only some lanes.
    """
    if lanes > 1 and lanes % world_size == 0 and size % lanes == 0:
        lanes_per_rank = lanes // world_size
        return range(rank * lanes_per_rank, (rank + 1) * lanes_per_rank)
    return None


def slice_step(step: Step, *, rank: int, world_size: int, lanes: int = 1) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """Return the part of a global batch that one data rank serves. The parts of all ranks together are the batch.

    If `world_size` divides `lanes`, and `lanes` divides the batch, each rank serves whole lanes, so that its node
    needs only the shards of these lanes. Otherwise, ranks serve consecutive parts whose sizes differ by at most one.

    Returns:
        Positions, `int64[n]`, in range(num_samples), and a mask, `bool[n]`, which is False for padding. Padding
        repeats positions from the start of the epoch.

    Raises:
        ConfigError: `rank` is not in range(world_size).
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank is {rank}; expected 0 <= rank < world_size = {world_size}")
    size = step.stop - step.start
    rank_lanes = lanes_of_rank(size, rank=rank, world_size=world_size, lanes=lanes)
    if rank_lanes is not None:
        batch = np.arange(step.start, step.stop)  # position p is in lane p % lanes
        positions = batch[(batch % lanes >= rank_lanes.start) & (batch % lanes < rank_lanes.stop)]
    else:
        first, stop = size * rank // world_size, size * (rank + 1) // world_size
        positions = np.arange(step.start + first, step.start + stop)
    mask = positions < step.num_samples
    return np.where(mask, positions, positions % max(step.num_samples, 1)), mask


def parse_tail(tail: str) -> Tail:
    """Return `tail` if it is valid, otherwise raise ConfigError."""
    if tail not in get_args(Tail):
        raise ConfigError(f"tail is {tail!r}; expected 'drop', 'short' or 'pad'")
    return cast("Tail", tail)
