"""One save by all ranks of a job: each stores its share, rank 0 commits, and all hear how it ended.

The checkpoint is rank 0's state: the others store only pieces of tensors that hold the same bytes there, so that it
is never a mix of several. What each rank has of its own, its random state for one, is stored beside it.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from datasvc.errors import ConfigError, UnavailableError, UnknownOutcomeError
from datasvc.models.saving.flat_state import RANK_STATE, FlatState
from datasvc.models.saving.partition import partition_writes
from datasvc.models.saving.rank_channel import RankChannel, describe_error, raise_on_all_ranks
from datasvc.models.tensors.chunks import Shape, slices
from datasvc.models.tensors.dtypes import bytes_of, dtype_name
from datasvc.models.tensors.tensor_table import ChainLink, Chunk, TensorRecord, join_pieces
from datasvc.models.tensors.write import Codec, TensorPiece, store_pieces
from datasvc.models.versions.commit import StoredState
from datasvc.repository import Digest, Objects, Resolved
from datasvc.repository.objects.objects import digest_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_DIGEST_BITS: Final = 62


@dataclass(frozen=True)
class _RankWrites:
    """What one rank has stored, as it goes to rank 0."""

    pieces: Sequence[tuple[str, Chunk]]
    own: Mapping[str, tuple[str, Shape]]
    own_skeleton: Any
    new_bytes: int
    num_nonfinite: Mapping[str, int]

    def encode(self) -> bytes:
        rows = [
            [name, piece.start, piece.shape, piece.digest, [list(vars(link).values()) for link in piece.chain]]
            for name, piece in self.pieces
        ]
        return json.dumps([rows, self.own, self.own_skeleton, self.new_bytes, dict(self.num_nonfinite)]).encode()

    @classmethod
    def decode(cls, raw: bytes) -> _RankWrites:
        rows, own, own_skeleton, new_bytes, num_nonfinite = json.loads(raw)
        pieces = [
            (name, Chunk(tuple(start), tuple(shape), Digest(digest), tuple(ChainLink(*link) for link in chain)))
            for name, start, shape, digest, chain in rows
        ]
        described = {name: (dtype, tuple(shape)) for name, (dtype, shape) in own.items()}
        return cls(pieces, described, own_skeleton, new_bytes, num_nonfinite)


def save_distributed(
    channel: RankChannel,
    objects: Objects,
    prepare: Callable[[], FlatState],
    commit: Callable[[StoredState], Resolved],
    *,
    step: int,
    base: Callable[[], Sequence[TensorRecord]],
    held: Mapping[str, torch.Tensor],
    codec: Codec,
) -> Resolved:
    """Store and commit a state; every rank calls this, and gets the same version or the same error.

    Args:
        channel: between the ranks.
        objects: where to.
        prepare: returns what this rank has to save; tensors of the common state have the same names, dtypes and
            shapes on all ranks.
        commit: called on rank 0, once everything is stored.
        step: of the state.
        base: records of the version before.
        held: tensors that may be those of the base, see `store_tensors`.
        codec: see `store_tensors`.

    Raises:
        ConfigError: the ranks are at different steps; nothing is visible.
        DatasvcError: a rank failed; nothing is visible.
        UnavailableError: a rank was lost before the commit; nothing is visible.
        UnknownOutcomeError: one was lost while rank 0 committed.
    """
    share, error, content = None, None, None
    fingerprints: Mapping[str, int] = {}
    try:
        content = prepare()
        if channel.size > 1:
            fingerprints = {name: _fingerprint(tensor) for name, tensor in sorted(content.tensors.items())}
    except Exception as failure:  # noqa: BLE001 - told to all ranks, and raised on all
        error = failure
    answers = channel.exchange([describe_error(error), step])
    raise_on_all_ranks([answer[0] for answer in answers], error)
    if len({answer[1] for answer in answers}) > 1:
        raise ConfigError(f"the ranks write different steps; by rank: {[answer[1] for answer in answers]}")
    assert content is not None
    of_first = _find_unlike(channel, fingerprints)
    try:
        share = _store_share(channel, objects, content, of_first, base=base(), held=held, codec=codec).encode()
    except Exception as failure:  # noqa: BLE001 - likewise
        error = failure
    raise_on_all_ranks(channel.exchange(describe_error(error)), error)
    assert share is not None
    shares = channel.gather(share)
    version = None
    if channel.rank == 0:
        try:
            version = commit(_join(content, [_RankWrites.decode(raw) for raw in shares]))
        except Exception as failure:  # noqa: BLE001 - likewise
            error = failure
    return _hear_of_commit(channel, version, error)


def _hear_of_commit(channel: RankChannel, version: Resolved | None, error: BaseException | None) -> Resolved:
    told = {"error": describe_error(error), "version": None if version is None else [version.name, version.version]}
    try:
        answers = channel.exchange(told)
    except UnavailableError as lost:
        if version is not None:
            return version  # it is committed, whoever died since
        if channel.rank == 0:
            assert error is not None
            raise error from lost
        raise UnknownOutcomeError(f"whether the save was committed is not known here: {lost}; read the log") from lost
    raise_on_all_ranks([answer["error"] for answer in answers], error)
    name, number = answers[0]["version"]
    return Resolved("models", name, number)


def _find_unlike(channel: RankChannel, fingerprints: Mapping[str, int]) -> frozenset[str]:
    """Return the tensors that are not the same bytes on all ranks, as those of a batch normalisation are not.

    Args:
        channel: between the ranks.
        fingerprints: of this rank's, by names in an order that is the same on all ranks.
    """
    import torch

    if channel.size == 1:
        return frozenset()
    # The largest of x and of -x are opposites where all ranks have the same x.
    own = torch.tensor(list(fingerprints.values()), dtype=torch.int64)
    found = channel.largest(torch.cat([own, -own]))
    unlike = found[: len(own)] != -found[len(own) :]
    return frozenset(name for name, differs in zip(fingerprints, unlike.tolist(), strict=True) if differs)


def _fingerprint(tensor: torch.Tensor) -> int:
    return int(digest_of(bytes_of(tensor).data), 16) >> (256 - _DIGEST_BITS)


def _store_share(
    channel: RankChannel,
    objects: Objects,
    content: FlatState,
    of_first: frozenset[str],
    *,
    base: Sequence[TensorRecord],
    held: Mapping[str, torch.Tensor],
    codec: Codec,
) -> _RankWrites:
    if of_first and channel.rank == 0:
        logger.info(
            "%d tensors differ between the ranks, such as %r: rank 0's are saved", len(of_first), min(of_first)
        )
    described = {name: (dtype_name(tensor), tuple(tensor.shape)) for name, tensor in content.tensors.items()}
    pieces = [
        TensorPiece(share.name, share.box[0], content.tensors[share.name][slices(share.box)])
        for share in partition_writes(described, channel.size, of_first=of_first)
        if share.rank == channel.rank
    ]
    own = {name: (dtype_name(tensor), tuple(tensor.shape)) for name, tensor in content.own_tensors.items()}
    pieces += [_whole(name, tensor) for name, tensor in content.own_tensors.items()]
    before = [_whole(name, tensor) for name, tensor in held.items()]
    stored = store_pieces(objects, pieces, base=base, held=before, codec=codec)
    return _RankWrites(stored.pieces, own, content.own_skeleton, stored.new_bytes, stored.num_nonfinite)


def _whole(name: str, tensor: torch.Tensor) -> TensorPiece:
    return TensorPiece(name, (0,) * tensor.dim(), tensor)


def _join(content: FlatState, shares: Sequence[_RankWrites]) -> StoredState:
    """Return what all ranks have stored as one."""
    described = {name: (dtype_name(tensor), tuple(tensor.shape)) for name, tensor in content.tensors.items()}
    for share in shares:
        for name, form in share.own.items():
            if name in described:
                raise ConfigError(f"two tensors of the state are called {name!r}; rename one of its keys")
            described[name] = form
    pieces: dict[str, list[Chunk]] = {name: [] for name in described}
    num_nonfinite: Counter[str] = Counter()
    for share in shares:
        for name, piece in share.pieces:
            pieces[name].append(piece)
        num_nonfinite.update(share.num_nonfinite)
    skeleton = dict(content.skeleton)
    if any(share.own_skeleton is not None for share in shares):
        skeleton[RANK_STATE] = [share.own_skeleton for share in shares]
    return StoredState(
        [join_pieces(name, *described[name], found) for name, found in sorted(pieces.items())],
        skeleton,
        sum(share.new_bytes for share in shares),
        num_nonfinite,
    )
