"""The steps of a save by all ranks: each rank stores its part, rank 0 commits, and all ranks get the same outcome.

`writer.VersionWriter` calls the steps in the order `agree_on_tensors`, `store_part`, `gather_parts`, `join_parts`,
`share_outcome`. The part of a rank is the chunks that it stores; `RankWrites` describes it. The shared state is saved
as rank 0 has it. So another rank stores chunks of a shared tensor only if its bytes are the same on all ranks. Each
rank also stores the state that it alone has, such as its random state.
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
from datasvc.models.saving.partition import partition_writes
from datasvc.models.saving.rank_channel import RankChannel, describe_error, raise_on_all_ranks
from datasvc.models.tensors.chunks import Shape, slices
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


@dataclass(frozen=True)
class RankWrites:
    """Description of the part that a rank has stored; the rank sends it to rank 0.

    Attributes:
        chunks: stored chunks with the names of their tensors.
        rank_tensors: dtype and shape of each tensor that only this rank has, by name.
        rank_skeleton: skeleton of the state that only this rank has; None: it has none.
        new_bytes: bytes that were not in the repository before.
        num_nonfinite: number of NaN and infinite elements by tensor.
    """

    chunks: Sequence[tuple[str, Chunk]]
    rank_tensors: Mapping[str, tuple[str, Shape]]
    rank_skeleton: Any
    new_bytes: int
    num_nonfinite: Mapping[str, int]

    def encode(self) -> bytes:
        """Return the message for rank 0."""
        chunks = [[name, chunk.to_json()] for name, chunk in self.chunks]
        return json.dumps(
            [chunks, self.rank_tensors, self.rank_skeleton, self.new_bytes, dict(self.num_nonfinite)]
        ).encode()

    @classmethod
    def decode(cls, raw: bytes) -> RankWrites:
        """Return the content of an `encode` result."""
        rows, rank_tensors, rank_skeleton, new_bytes, num_nonfinite = json.loads(raw)
        chunks = [(name, Chunk.from_json(chunk)) for name, chunk in rows]
        dtypes_and_shapes = {name: (dtype, tuple(shape)) for name, (dtype, shape) in rank_tensors.items()}
        return cls(chunks, dtypes_and_shapes, rank_skeleton, new_bytes, num_nonfinite)


def agree_on_tensors(channel: RankChannel, step: int, state: FlatState, error: Exception | None) -> frozenset[str]:
    """Check that all ranks can store the same step; return the shared tensors whose bytes differ between ranks.

    Every rank calls this before it stores anything. Rank 0 alone stores the returned tensors. The shared tensors of
    `state` must have the same names, dtypes and shapes on all ranks; `CheckpointManager.save` has checked this. If
    this rank cannot store the state, `error` is the reason; all ranks then raise it.

    Raises:
        ConfigError: the ranks are at different steps.
        DatasvcError: a rank cannot store its state.
        UnavailableError: a rank is lost.
    """
    fingerprints: Mapping[str, int] = {}
    try:
        if channel.size > 1 and error is None:
            # Sort by name, because the collective compares fingerprints by position. With one rank, nothing differs.
            fingerprints = {name: _fingerprint(tensor) for name, tensor in sorted(state.tensors.items())}
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


def _find_differing(channel: RankChannel, fingerprints: Mapping[str, int]) -> frozenset[str]:
    """Return the tensors whose bytes differ between ranks, such as the statistics of a batch normalisation.

    `fingerprints` has this rank's value for each tensor, in an order that is the same on all ranks.
    """
    import torch

    if channel.size == 1:
        return frozenset()
    # One collective gives the maximum and the minimum, -max(-x). Both are equal if all ranks have the same x.
    values = torch.tensor(list(fingerprints.values()), dtype=torch.int64)
    reduced = channel.all_reduce_max(torch.cat([values, -values]))
    largest, smallest = reduced[: len(values)], -reduced[len(values) :]
    is_different = largest != smallest
    return frozenset(name for name, differs in zip(fingerprints, is_different.tolist(), strict=True) if differs)


def _fingerprint(tensor: torch.Tensor) -> int:
    """Return the first `_FINGERPRINT_BITS` bits of the digest of a tensor's bytes."""
    return int(digest_of(bytes_of(tensor).data), 16) >> (256 - _FINGERPRINT_BITS)


def store_part(
    channel: RankChannel,
    objects: Objects,
    state: FlatState,
    rank0_only: frozenset[str],
    *,
    base: Sequence[TensorRecord],
    base_tensors: Mapping[str, torch.Tensor],
    codec: Codec,
) -> RankWrites:
    """Store this rank's part: its chunks of the shared tensors, and all tensors that only this rank has.

    `rank0_only` is the result of `agree_on_tensors`. `base` has the tensors of an earlier version, to which
    differences are stored; `base_tensors` are in memory and may equal them. For `codec` and the errors see
    `store_chunks`.
    """
    if rank0_only and channel.rank == 0:
        logger.info(
            "%d tensors differ between the ranks, such as %r: rank 0's are saved", len(rank0_only), min(rank0_only)
        )
    shared, rank_tensors = _describe(state.tensors), _describe(state.rank_tensors)
    # All ranks compute the same plan. A box is the start and the shape of a chunk.
    assigned = partition_writes(shared, channel.size, rank0_only=rank0_only)[channel.rank]
    blocks = [TensorBlock(name, box[0], state.tensors[name][slices(box)]) for name, box in assigned]
    blocks += whole_blocks(state.rank_tensors)
    stored = store_chunks(objects, blocks, base=base, base_tensors=whole_blocks(base_tensors), codec=codec)
    return RankWrites(stored.chunks, rank_tensors, state.rank_skeleton, stored.new_bytes, stored.num_nonfinite)


def _describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, Shape]]:
    """Return the dtype and the shape of each tensor."""
    return {name: (dtype_name(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}


def join_parts(state: FlatState, parts: Sequence[RankWrites]) -> StoredState:
    """Return the whole stored state from the parts of all ranks; rank 0 calls this before the commit.

    `state` is rank 0's state, and `parts` is the result of `gather_parts`. Raises ConfigError: two tensors have the
    same name.
    """
    described = _describe(state.tensors)
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
    skeleton = dict(state.skeleton)
    if any(part.rank_skeleton is not None for part in parts):
        skeleton[RANK_STATE] = [part.rank_skeleton for part in parts]
    return StoredState(
        [join_chunks(name, *described[name], stored) for name, stored in sorted(chunks.items())],
        skeleton,
        sum(part.new_bytes for part in parts),
        num_nonfinite,
    )
