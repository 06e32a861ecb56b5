"""Number of samples that a mixture serves of each data set before any block, with weights that may change.

A schedule is a series of pieces, each of whole blocks. In a piece, the weights are constant, or they change linearly
from block to block (a ramp). The cumulative share of a data set is the sum of its shares in all blocks so far, which
has a closed form. It is a fraction; `served_before` rounds it to whole samples. All numbers are exact Python
integers, so every machine gets the same result, and the first n blocks do not depend on what is planned after them.

Error of the rounding: after any number of blocks, the number of samples served differs from the cumulative share by
less than one. There is one exception, which needs at least four data sets. A data set whose weight becomes 0 keeps
its error, because it serves no further samples. If several of them keep errors of one sample or more in total, the
data sets that go on cannot make up for it with errors below one. Then they share it equally, so that each of them
differs from its share by less than one plus its part.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, chain, pairwise
from operator import gt
from typing import Any, Final, NamedTuple

from datasvc.errors import ConfigError

_NEAR: Final = 6  # blocks by which the estimate of `block_of` may be wrong in a piece of constant weights


class MixStage(NamedTuple):
    """Weights of a mixture from some block on.

    Attributes:
        first: number of the first block with these weights.
        weights: weight of each data set, an integer >= 0.
        is_ramp: whether the weights of the stage before change linearly to these ones, from its first block on. A
            data set whose weight is 0 at one end of a ramp has one sample in a block there, so that every block has
            at least one sample of it.
    """

    first: int
    weights: tuple[int, ...]
    is_ramp: bool = False


class MixPiece(NamedTuple):
    """Blocks whose weights are constant, or change linearly.

    Attributes:
        first: number of the first block.
        blocks: number of blocks; None: without end.
        start, stop: weights at both ends; equal if they are constant.
    """

    first: int
    blocks: int | None
    start: tuple[int, ...]
    stop: tuple[int, ...]


def split_stages(stages: Sequence[MixStage]) -> list[MixPiece]:
    """Return the pieces of a schedule; its first stage begins at block 0."""
    pieces = []
    for number, stage in enumerate(stages):
        following = stages[number + 1] if number + 1 < len(stages) else None
        blocks = following.first - stage.first if following else None
        stop = following.weights if following and following.is_ramp else stage.weights
        pieces.append(MixPiece(stage.first, blocks, stage.weights, stop))
    return pieces


class _PieceCounts(NamedTuple):
    """Samples of each data set that are served in the first n blocks of a piece, as coefficients of n and n * n.

    Edge j is `(constant[j] + linear[j] * n + square[j] * n * n) / denominator`, the cumulative share of the data sets
    before number j in the piece. Data set i serves the difference of edges i + 1 and i, each rounded down.
    """

    piece: MixPiece
    served: list[int]  # samples served before the piece
    constant: list[int]
    linear: list[int]
    square: list[int]
    denominator: int

    def edge(self, number: int, blocks: int) -> int:
        square = self.linear[number] + self.square[number] * blocks
        return (self.constant[number] + square * blocks) // self.denominator

    def after(self, source: int, blocks: int) -> int:
        """Return the samples of a data set that are served before block number `blocks` of the piece."""
        # Before the first block, the number is that of the piece before.
        return self.served[source] + (self.edge(source + 1, blocks) - self.edge(source, blocks) if blocks else 0)


class MixSchedule:
    """Samples that a mixture serves of each data set before any block.

    Args:
        stages: the first one begins at block 0 and is no ramp; the others begin at later blocks, ascending.
        block: number of positions of a block.

    Raises:
        ConfigError: in some block, a data set with a weight has a share below one sample.
    """

    def __init__(self, stages: Sequence[MixStage], block: int) -> None:
        self._counts: list[_PieceCounts] = []
        self._firsts: list[int] = []
        self._most = [0] * len(stages[0].weights)
        served, shares = [0] * len(self._most), [Fraction(0)] * len(self._most)
        for piece in split_stages(stages):
            shares = self._add(piece, block, served, shares)
            if piece.blocks is not None:
                served = self.served_before(piece.first + piece.blocks)

    def served_before(self, block: int) -> list[int]:
        """Return the number of samples of each data set that are served before a block."""
        counts = self._counts[bisect_right(self._firsts, block) - 1]
        blocks = block - counts.piece.first
        if not blocks:
            return counts.served
        edges = [counts.edge(number, blocks) for number in range(len(counts.constant))]
        return [before + stop - start for before, (start, stop) in zip(counts.served, pairwise(edges), strict=True)]

    def most_in_block(self) -> list[int]:
        """Return an upper bound of the samples of each data set in a block; 0 if it is never served."""
        return self._most

    def block_of(self, source: int, ordinal: int) -> int:
        """Return the block that contains a sample of a data set's stream, which the mixture serves at some time."""
        # A piece without samples of the data set begins with the same number as the next piece: take the last one.
        counts = self._counts[bisect_right(self._counts, ordinal, key=lambda each: each.served[source]) - 1]
        low, high = 0, counts.piece.blocks
        if high is None or counts.piece.start == counts.piece.stop:
            # With constant weights, the number of samples is that of a line, up to a few: search next to it.
            linear = counts.linear[source + 1] - counts.linear[source]
            near = (ordinal - counts.served[source]) * counts.denominator // linear
            low, high = max(0, near - _NEAR), near + _NEAR
        within = bisect_right(range(low, high), ordinal, key=lambda number: counts.after(source, number + 1))
        return counts.piece.first + low + within

    def _add(self, piece: MixPiece, block: int, served: list[int], shares: list[Fraction]) -> list[Fraction]:
        """Add a piece, before which `served` and `shares` hold, and return the cumulative shares after it."""
        linear, square, total = _piece_shares(piece, block)
        last = 0 if piece.blocks is None else piece.blocks - 1
        # The shares of a ramp are smallest and largest in its first and in its last block.
        ends = [[first + change * (2 * number + 1) for first, change in zip(linear, square, strict=True)]
                for number in (0, last)]  # fmt: skip
        if any(0 < share < total for share in chain(*ends)):
            raise ConfigError(
                f"a weight of stages gives less than one sample in a block of {block}; give a larger block, or the "
                "weight 0"
            )
        # What is owed to each data set that goes on; without rounding, it would be 0.
        owed = [
            share - count if each else Fraction(0) for share, count, each in zip(shares, served, linear, strict=True)
        ]
        left = sum(owed, Fraction(0))  # the opposite is left over, for good or for a while, at data sets of weight 0
        # The first edge makes the last edge whole, so that blocks are full: its fraction is that of -`left`.
        part, first_edge = Fraction(0), max(-left, Fraction(0))
        if abs(left) >= 1:
            part, first_edge = left / sum(map(bool, linear)), Fraction(0)
        owed = [each - part if goes_on else each for each, goes_on in zip(owed, linear, strict=True)]
        constant = list(accumulate(owed, initial=first_edge))
        denominator = math.lcm(total, *(each.denominator for each in constant))
        scale = denominator // total
        counts = _PieceCounts(
            piece,
            served,
            [int(each * denominator) for each in constant],
            [scale * each for each in accumulate(linear, initial=0)],
            [scale * each for each in accumulate(square, initial=0)],
            denominator,
        )
        # A block has less than its share, two roundings and what is owed.
        slack = 1 + max(1, math.ceil(max(map(abs, owed))))
        most = [max(pair) // total + slack if any(pair) else 0 for pair in zip(*ends, strict=True)]
        self._most = list(map(max, self._most, most))
        self._counts.append(counts)
        self._firsts.append(piece.first)
        if any(map(gt, served, self.served_before(piece.first + 1))):
            raise ConfigError(
                f"a data set has too few samples in a block of {block} to round its share after a change; give a "
                "larger block"
            )
        return [
            share + Fraction((first + change * (last + 1)) * (last + 1), total)
            for share, first, change in zip(shares, linear, square, strict=True)
        ]


def _piece_shares(piece: MixPiece, block: int) -> tuple[list[int], list[int], int]:
    """Return the shares in the first n blocks of a piece: coefficients of n and n * n, and their denominator."""
    if piece.start == piece.stop or piece.blocks is None:
        return [block * weight for weight in piece.start], [0] * len(piece.start), sum(piece.start)
    # Block number n has the weights of the middle of this block: start + (stop - start) * (2 * n + 1) / (2 * blocks).
    # The sum of 2 * n + 1 over the first n blocks is n * n. Both ends need one total.
    total = math.lcm(sum(piece.start), sum(piece.stop))
    ends = [[weight * total // sum(weights) for weight in weights] for weights in (piece.start, piece.stop)]
    start, stop = (_raise_zeros(here, there, total, block) for here, there in (ends, ends[::-1]))
    linear = [2 * piece.blocks * block * weight for weight in start]
    square = [block * (there - here) for here, there in zip(start, stop, strict=True)]
    return linear, square, 2 * piece.blocks * total * block


def _raise_zeros(here: Sequence[int], there: Sequence[int], total: int, block: int) -> list[int]:
    """Return the weights of one end of a ramp in units of 1 / (`total` * `block`).

    A data set that has a weight only at the other end gets one sample in a block. The others give up theirs for it.
    """
    num_raised = sum(1 for weight, other in zip(here, there, strict=True) if other and not weight)
    return [
        weight * (block - num_raised) if weight else total * bool(other)
        for weight, other in zip(here, there, strict=True)
    ]


# Entries of versions, states of loaders and ledgers have a mixture as JSON values, see `Mixture.describe`.


def read_stages(mixture: Mapping[str, Any]) -> list[MixStage]:
    """Return the stages of a mixture from its JSON values.

    Raises:
        KeyError, TypeError, ValueError: the values are not valid.
    """
    weights = tuple(map(int, mixture["weights"]))
    stages = [MixStage(0, weights)]
    for stage in mixture.get("stages", ()):
        first, rest = divmod(int(stage["start"]), int(mixture["block"]))
        stages.append(MixStage(first, tuple(map(int, stage["weights"])), bool(stage["ramp"])))
        if rest or first <= stages[-2].first:
            raise ValueError(f"a stage starts at {stage['start']}, which is no later block")
    for stage in stages:
        if len(stage.weights) != len(weights) or min(stage.weights, default=-1) < 0 or not any(stage.weights):
            raise ValueError(f"weights {stage.weights}")
    return stages


def past_of(mixture: Mapping[str, Any], num_blocks: int) -> list[tuple[int, int | None, list[tuple[str, int, int]]]]:
    """Return what determines the first blocks of a mixture, from its JSON values; equal values mean equal blocks.

    Returns:
        For each piece that begins in these blocks: its first block, the number of its blocks if it is a ramp, and the
        data sets that it serves, in their order: digest of the shard table, and the weights at both ends.
    """
    digests = [str(split["version"]) for split in mixture["splits"]]
    return [
        (
            piece.first,
            piece.blocks if piece.start != piece.stop else None,
            [each for each in zip(digests, piece.start, piece.stop, strict=True) if any(each[1:])],
        )
        for piece in split_stages(read_stages(mixture))
        if piece.first < num_blocks
    ]


def stem_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a loader's state without later stages of its mixture, and without data sets that it does not begin with.

    Stages may be changed while a run goes on, so all states of a run have one stem.
    """
    mixture = state.get("mixture")
    if not isinstance(mixture, Mapping):
        return dict(state)
    try:
        pairs = [pair for pair in zip(mixture["splits"], mixture["weights"], strict=True) if pair[1]]
    except (KeyError, TypeError, ValueError):
        return dict(state)  # not valid: the reader of the whole state says so
    stem = {name: value for name, value in mixture.items() if name != "stages"}
    stem |= {"splits": [split for split, _ in pairs], "weights": [weight for _, weight in pairs]}
    return {**state, "mixture_format": 1, "mixture": stem}
