"""What the ranks of a job say to each other about a save: small messages over groups of their own, on the host.

Their own, so that they come in no other collective's way, whatever the back end of the default group. Messages are
JSON. A rank that dies, or is silent for too long, is an error on all others, never a hang.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

from datasvc import errors
from datasvc.errors import DatasvcError, UnavailableError

if TYPE_CHECKING:
    import torch

_SLOT_BYTES: Final = 1024
_LENGTH_BYTES: Final = 8


class RankChannel(Protocol):
    """A group of ranks. All of them call the same methods in the same order, from one thread at a time.

    Attributes:
        rank: of this process in the group.
        size: of the group.
    """

    rank: int
    size: int

    def exchange(self, message: Any) -> list[Any]:
        """Return every rank's message, JSON values, in rank order. Raises UnavailableError: a rank is lost."""

    def gather(self, message: bytes) -> list[bytes]:
        """Return every rank's message on rank 0, [] elsewhere. Raises UnavailableError: a rank is lost."""

    def largest(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the largest of each number, int64[n], over the ranks. Raises UnavailableError: a rank is lost."""

    def close(self) -> None:
        """Let go of the others."""


class SingleRank:
    """A group of one."""

    rank = 0
    size = 1

    def exchange(self, message: Any) -> list[Any]:
        """Return the message."""
        return [message]

    def gather(self, message: bytes) -> list[bytes]:
        """Return the message."""
        return [message]

    def largest(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the numbers."""
        return numbers

    def close(self) -> None:
        """Do nothing."""


class GroupChannel:
    """Ranks of torch.distributed.

    Args:
        group: over gloo, for nothing else.
        timeout_s: after which a silent rank counts as lost; for messages, the group has its own.
    """

    def __init__(self, group: torch.distributed.ProcessGroup, timeout_s: float) -> None:
        import torch.distributed as dist

        self._group: torch.distributed.ProcessGroup | None = group
        self._timeout_s = timeout_s
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def exchange(self, message: Any) -> list[Any]:
        """See `RankChannel`. One collective where all messages are short, two otherwise."""
        raw = json.dumps(message).encode()
        slots = self._all_gather(
            len(raw).to_bytes(_LENGTH_BYTES, "little") + raw[: _SLOT_BYTES - _LENGTH_BYTES], _SLOT_BYTES
        )
        lengths = [int.from_bytes(slot[:_LENGTH_BYTES], "little") for slot in slots]
        whole = [slot[_LENGTH_BYTES:] for slot in slots]
        if max(lengths) > _SLOT_BYTES - _LENGTH_BYTES:
            whole = self._all_gather(raw, max(lengths))
        return [json.loads(each[:length]) for each, length in zip(whole, lengths, strict=True)]

    def gather(self, message: bytes) -> list[bytes]:
        """See `RankChannel`."""
        import torch
        import torch.distributed as dist

        lengths = self.exchange(len(message))
        mine = _padded(message, max(lengths))
        everyone = [torch.empty_like(mine) for _ in lengths] if self.rank == 0 else None
        self._ask(lambda group: dist.gather(mine, everyone, group=group, group_dst=0))
        if everyone is None:
            return []
        return [each.numpy().tobytes()[:length] for each, length in zip(everyone, lengths, strict=True)]

    def largest(self, numbers: torch.Tensor) -> torch.Tensor:
        """See `RankChannel`."""
        import torch.distributed as dist

        found = numbers.clone()
        self._ask(lambda group: dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group))
        return found

    def close(self) -> None:
        """See `RankChannel`."""
        import torch.distributed as dist

        # The connections end with the last reference.
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            # Whoever destroyed the default group has destroyed this one too.
            with suppress(ValueError, RuntimeError, AssertionError):
                dist.destroy_process_group(group)

    def _all_gather(self, raw: bytes, width: int) -> list[bytes]:
        import torch
        import torch.distributed as dist

        mine = _padded(raw, width)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        self._ask(lambda group: dist.all_gather(everyone, mine, group=group))
        return [each.numpy().tobytes() for each in everyone]

    def _ask(self, question: Callable[[Any], Any]) -> None:
        if self._group is None:
            raise UnavailableError("this rank has lost the others, or closed the model: make a new one on every rank")
        try:
            question(self._group)
        except (RuntimeError, ValueError) as error:
            # What the others still send would be taken for the answer to something else.
            self.close()
            raise UnavailableError(
                f"rank {self.rank} has lost another of {self.size}, which died, or said nothing for "
                f"{self._timeout_s:g} s: {error}"
            ) from error


def open_channels(group: Any, timeout_s: float) -> tuple[RankChannel, RankChannel]:
    """Return two channels between the ranks of `group`: for the calling thread, and for the one that saves.

    Every rank of the group calls this, in the same order as whatever else makes groups.

    Args:
        group: of torch.distributed; None: its default group, and no other ranks where there is none.
        timeout_s: after which a silent rank counts as lost.

    Raises:
        UnavailableError: the ranks could not connect.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return SingleRank(), SingleRank()
    # Others than those of the group need not know.
    whose: dict[str, Any] = (
        {"ranks": dist.get_process_group_ranks(group), "use_local_synchronization": True} if group else {}
    )
    timeout = dt.timedelta(seconds=timeout_s)
    try:
        front, back = (dist.new_group(backend="gloo", timeout=timeout, **whose) for _ in range(2))
    except RuntimeError as error:
        raise UnavailableError(f"the ranks could not connect to save together: {error}") from error
    return GroupChannel(front, timeout_s), GroupChannel(back, timeout_s)


def describe_error(error: BaseException | None) -> Mapping[str, str] | None:
    """Return an error as a message."""
    return None if error is None else {"type": type(error).__name__, "message": str(error)}


def raise_on_all_ranks(told: Sequence[Mapping[str, str] | None], own: BaseException | None = None) -> None:
    """Raise the same error on all ranks, if one of them told of an error; that of the first of these.

    Args:
        told: what each rank's `describe_error` gave, the same on all ranks.
        own: this rank's.

    Raises:
        DatasvcError: of the type that it has on the rank where it arose, if that is one of ours.
    """
    failed = [(rank, error) for rank, error in enumerate(told) if error is not None]
    if not failed:
        return
    rank, error = failed[0]
    if len(told) == 1 and isinstance(own, DatasvcError):
        raise own
    kind = getattr(errors, error["type"], None)
    is_ours = isinstance(kind, type) and issubclass(kind, DatasvcError)
    message = error["message"] if is_ours else f"{error['type']}: {error['message']}"
    others = f" (and so {len(failed) - 1} other ranks, or for other reasons)" if len(failed) > 1 else ""
    where = "" if len(told) == 1 else f"rank {rank}: "
    raise (kind if is_ours and kind is not None else DatasvcError)(f"{where}{message}{others}") from own


def _padded(raw: bytes, width: int) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(raw.ljust(max(width, 1), b"\0")), dtype=torch.uint8)
