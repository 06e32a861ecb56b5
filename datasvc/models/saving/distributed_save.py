"""The steps of a save by all ranks: each rank stores its part, rank 0 commits, and all ranks get the same outcome.

`writer.VersionWriter` calls the steps in the order `agree_on_tensors`, `store_part`, `gather_parts`, `join_parts`,
`share_outcome`. The part of a rank is the chunks that it stores; `RankWrites` describes it. A block that several
ranks hold is saved as the first of them has it. So another rank stores chunks of it only if its bytes are the same on
all of these ranks. Each rank also stores the state that it alone has, such as its random state.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from datasvc.errors import ConfigError, UnavailableError, UnknownOutcomeError
from datasvc.models.saving.flat_state import RANK_STATE, FlatState
from datasvc.models.saving.rank_channel import RankChannel, describe_error, raise_on_all_ranks
from datasvc.models.saving.shared_plan import BlockId, merge_skeletons, partition_writes
from datasvc.models.tensors.chunks import Shape
from datasvc.models.tensors.container_types import typed_as, untyped
from datasvc.models.tensors.dtypes import bytes_of, dtype_name
from datasvc.models.tensors.tensor_table import Chunk, TensorRecord, join_chunks
from datasvc.models.tensors.write import Codec, StoredState, TensorBlock, store_chunks, whole_blocks
from datasvc.repository import Objects, Resolved
from datasvc.repository.objects.objects import digest_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# A fingerprint is the first bits of a digest. `_find_differing` needs it and its negative as int64.
_FINGERPRINT_BITS: Final = 62
_NO_FINGERPRINT: Final = -(1 << _FINGERPRINT_BITS)


@dataclass(frozen=True)
class RankWrites:
    """Description of the part that a rank has stored; the rank sends it to rank 0.

    Attributes:
        chunks: stored chunks with the names of their tensors.
        rank_tensors: dtype and shape of each tensor that only this rank has, by name.
        rank_skeleton: skeleton of the state that only this rank has; None: it has none.
        new_bytes: bytes that were not in the repository before.
        num_nonfinite: number of NaN and infinite elements by tensor.
        skeleton: skeleton of the shared state, if it has keys that those of lower ranks may lack; else None.
    """

    chunks: Sequence[tuple[str, Chunk]]
    rank_tensors: Mapping[str, tuple[str, Shape]]
    rank_skeleton: Any
    new_bytes: int
    num_nonfinite: Mapping[str, int]
    skeleton: Any = None

    def encode(self) -> bytes:
        """Return the message for rank 0."""
        chunks = [[name, chunk.to_json()] for name, chunk in self.chunks]
        return json.dumps(
            [
                chunks,
                self.rank_tensors,
                self.rank_skeleton,
                self.new_bytes,
                dict(self.num_nonfinite),
                self.skeleton,
            ]
        ).encode()

    @classmethod
    def decode(cls, raw: bytes) -> RankWrites:
        """Return the content of an `encode` result."""
        rows, rank_tensors, rank_skeleton, new_bytes, num_nonfinite, skeleton = json.loads(raw)
        chunks = [(name, Chunk.from_json(chunk)) for name, chunk in rows]
        dtypes_and_shapes = {name: (dtype, tuple(shape)) for name, (dtype, shape) in rank_tensors.items()}
        return cls(chunks, dtypes_and_shapes, rank_skeleton, new_bytes, num_nonfinite, skeleton)


def agree_on_tensors(
    channel: RankChannel, step: int, state: FlatState, error: Exception | None
) -> frozenset[BlockId]:
    """Check that all ranks can store the same step; return the blocks whose bytes differ between their ranks.

    Every rank calls this before it stores anything. The first of its ranks alone stores a returned block. The plan of
    `state` must be that of all ranks; `CheckpointManager.save` has checked this. If this rank cannot store the state,
    `error` is the reason; all ranks then raise it.

    Raises:
        ConfigError: the ranks are at different steps.
        DatasvcError: a rank cannot store its state.
        UnavailableError: a rank is lost.
    """
    fingerprints: Mapping[BlockId, int | None] = {}
    try:
        if channel.size > 1 and error is None:
            # Blocks are sorted, because the collective compares fingerprints by position.
            fingerprints = {
                block.id: _fingerprint(state.block(block.name, block.box).tensor)
                if channel.rank in block.ranks
                else None
                for block in state.planned(channel.size).blocks
                if len(block.ranks) > 1  # what only one rank holds cannot differ
            }
    except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all
        error = failure
    # A rank with an error also sends its message: otherwise the other ranks would wait for it.
    answers = channel.exchange([describe_error(error), step])
    raise_on_all_ranks([answer[0] for answer in answers], error)
    if len({answer[1] for answer in answers}) > 1:
        raise ConfigError(f"the ranks write different steps; by rank: {[answer[1] for answer in answers]}")
    return _find_differing(channel, fingerprints)


def gather_parts(channel: RankChannel, part: RankWrites | None, error: Exception | None) -> list[RankWrites]:
    """Return the parts that all ranks have stored, in the order of ranks, on rank 0; return [] on other ranks.

    Every rank calls this after `store_part`. If this rank could not store its part, `part` is None, and `error` is
    the reason, which all ranks then raise.

    Raises:
        DatasvcError: a rank could not store its part.
        UnavailableError: a rank is lost.
    """
    # Raise if a rank has not stored its part: an entry must never name objects that are missing.
    raise_on_all_ranks(channel.exchange(describe_error(error)), error)
    assert part is not None
    return [RankWrites.decode(raw) for raw in channel.gather(part.encode())]


def share_outcome(channel: RankChannel, version: Resolved | None, error: BaseException | None) -> Resolved:
    """Return the version that rank 0 committed, or raise its error, on all ranks.

    Rank 0 passes the `version` or the `error` of its commit; other ranks pass None for both.

    Raises:
        UnknownOutcomeError: a rank or the store was lost during the commit; the version may exist.
        DatasvcError: any other error of rank 0; nothing was committed.
    """
    outcome = {
        "error": describe_error(error),
        "version": None if version is None else [version.name, version.version],
    }
    try:
        answers = channel.exchange(outcome)
    except UnavailableError as lost:
        if version is not None:
            # This is rank 0, and the version is committed: the loss of another rank afterwards does not change it.
            return version
        if channel.rank == 0:
            # Nothing was committed, because only this rank commits. Raise the error of its commit.
            assert error is not None
            raise error from lost
        raise UnknownOutcomeError(
            f"this rank cannot tell whether the save was committed: {lost}; look at the log of the model"
        ) from lost
    raise_on_all_ranks([answer["error"] for answer in answers], error)
    name, number = answers[0]["version"]
    return Resolved("models", name, number)


def _find_differing(channel: RankChannel, fingerprints: Mapping[BlockId, int | None]) -> frozenset[BlockId]:
    """Return the blocks whose bytes differ between ranks, such as the statistics of a batch normalisation.

    `fingerprints` has this rank's value for each block, None for a block that it does not hold. The order of blocks
    is the same on all ranks.
    """
    import torch

    if channel.size == 1 or not fingerprints:
        return frozenset()
    # One collective gives the maximum and the minimum, -max(-x). Both are equal if all ranks have the same x. A rank
    # without the block sends a value below every x and -x.
    values = torch.tensor(
        [_NO_FINGERPRINT if x is None else x for x in fingerprints.values()], dtype=torch.int64, device="cpu"
    )
    negatives = torch.tensor(
        [_NO_FINGERPRINT if x is None else -x for x in fingerprints.values()], dtype=torch.int64, device="cpu"
    )
    reduced = channel.all_reduce_max(torch.cat([values, negatives]))
    largest, smallest = reduced[: len(values)], -reduced[len(values) :]
    is_different = largest != smallest
    return frozenset(block for block, differs in zip(fingerprints, is_different.tolist(), strict=True) if differs)


def _fingerprint(tensor: torch.Tensor) -> int:
    """Return the first `_FINGERPRINT_BITS` bits of the digest of a tensor's bytes."""
    return int(digest_of(bytes_of(tensor).data), 16) >> (256 - _FINGERPRINT_BITS)


def store_part(
    channel: RankChannel,
    objects: Objects,
    state: FlatState,
    differing: frozenset[BlockId],
    *,
    base: Sequence[TensorRecord],
    base_chunks: Sequence[TensorBlock],
    codec: Codec,
) -> RankWrites:
    """Store this rank's part: its chunks of the shared tensors, and all tensors that only this rank has.

    `differing` is the result of `agree_on_tensors`. `base` has the tensors of an earlier version, to which
    differences are stored; `base_chunks` are in memory and may equal its chunks. For `codec` and the errors see
    `store_chunks`.
    """
    if differing and channel.rank == 0:
        logger.info(
            "%d tensors differ between the ranks, such as %r: those of the first rank that has them are saved",
            len(differing),
            min(differing).name,
        )
    plan = state.planned(channel.size)
    # All ranks compute the same plan. A box is the start and the shape of a chunk.
    assigned = partition_writes(plan, channel.size, first_only=differing)[channel.rank]
    blocks = [state.block(name, box) for name, box in assigned]
    blocks += whole_blocks(state.rank_tensors)
    stored = store_chunks(objects, blocks, base=base, base_tensors=base_chunks, codec=codec)
    return RankWrites(
        stored.chunks,
        {name: (dtype_name(tensor), tuple(tensor.shape)) for name, tensor in state.rank_tensors.items()},
        state.rank_skeleton,
        stored.new_bytes,
        stored.num_nonfinite,
        state.skeleton if channel.rank in plan.skeleton_ranks else None,
    )


def join_parts(state: FlatState, parts: Sequence[RankWrites]) -> StoredState:
    """Return the whole stored state from the parts of all ranks; rank 0 calls this before the commit.

    `state` is rank 0's state, and `parts` is the result of `gather_parts`. Raises ConfigError: two tensors have the
    same name.
    """
    described = dict(state.planned(len(parts)).tensors)
    for part in parts:
        for name, dtype_and_shape in part.rank_tensors.items():
            if name in described:
                raise ConfigError(f"two tensors of the state are called {name!r}; rename one of the keys")
            described[name] = dtype_and_shape
    chunks: dict[str, list[Chunk]] = {name: [] for name in described}
    num_nonfinite: Counter[str] = Counter()
    for part in parts:
        for name, chunk in part.chunks:
            chunks[name].append(chunk)
        num_nonfinite.update(part.num_nonfinite)
    skeleton: Any = state.skeleton
    for part in parts:
        if part.skeleton is not None:
            skeleton = merge_skeletons(skeleton, part.skeleton)
    if any(part.rank_skeleton is not None for part in parts):
        rank_skeletons = [part.rank_skeleton for part in parts]
        skeleton = typed_as(skeleton, {**untyped(skeleton), RANK_STATE: rank_skeletons})
    return StoredState(
        [join_chunks(name, *described[name], stored) for name, stored in sorted(chunks.items())],
        skeleton,
        sum(part.new_bytes for part in parts),
        num_nonfinite,
    )
