"""Exchanges small JSON messages between the ranks of a save, over gloo groups that only the saves use.

Separate groups keep the messages apart from the collectives of the training. gloo works on the host, whatever back
end the default group has. If a rank dies or does not answer within the timeout, all other ranks raise an error and do
not hang.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from datasvc import errors
from datasvc.errors import DatasvcError, UnavailableError
from datasvc.printable import count_text
from datasvc.threads import count_launched

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_SLOT_BYTES: Final = 1024  # bytes that each rank sends in the first collective of an exchange: length and content
_LENGTH_BYTES: Final = 8


class LostRankError(UnavailableError):
    """Another rank of a save died or does not answer. An elastic job continues without it."""


class RankChannel:
    """Communication between the ranks of a group. This class is for a single rank, `GroupChannel` for several.

    All ranks call the same methods in the same order, from one thread at a time.

    Attributes:
        rank: rank of this process in the group.
        size: number of ranks in the group.
    """

    rank: int = 0
    size: int = 1

    def exchange(self, message: Any) -> list[Any]:
        """Return the JSON messages of all ranks, in rank order. Raises UnavailableError: a rank is lost."""
        return [message]

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks on rank 0, [] elsewhere. Raises UnavailableError: a rank is lost."""
        return [message]

    def all_reduce_max(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum, int64[n], over the ranks. Raises UnavailableError: a rank is lost."""
        return numbers

    def swap(self, sent: tuple[int, bytes] | None, received: tuple[int, int] | None) -> bytes:
        """Send bytes to one rank and receive bytes from another at the same time; return those, b"" without any.

        Args:
            sent: rank that calls `swap` to receive from this one, and the bytes for it; None: nothing is sent.
            received: rank that sends, and the number of bytes that it sends; None: nothing is received.

        Raises:
            UnavailableError: a rank is lost.
        """
        raise NotImplementedError("a single rank has no other rank to send to")

    def close(self) -> None:
        """Close the connections to the other ranks."""


class GroupChannel(RankChannel):
    """Channel over a torch.distributed group.

    Args:
        group: gloo group that is used for nothing else.
        timeout_s: timeout of the group in seconds; used only in error messages.
    """

    def __init__(self, group: torch.distributed.ProcessGroup, timeout_s: float) -> None:
        import torch.distributed as dist

        self._group: torch.distributed.ProcessGroup | None = group
        self._timeout_s = timeout_s
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def exchange(self, message: Any) -> list[Any]:
        """Return the JSON messages of all ranks, in rank order, by one collective, or two if a message is long."""
        # A slot holds the length and the beginning of a message. If a message does not fit into its slot, a second
        # collective sends all messages in full.
        raw = json.dumps(message).encode()
        own_slot = len(raw).to_bytes(_LENGTH_BYTES, "little") + raw[: _SLOT_BYTES - _LENGTH_BYTES]
        slots = self._all_gather(own_slot, _SLOT_BYTES)
        lengths = [int.from_bytes(slot[:_LENGTH_BYTES], "little") for slot in slots]
        contents = [slot[_LENGTH_BYTES:] for slot in slots]
        if max(lengths) > _SLOT_BYTES - _LENGTH_BYTES:
            contents = self._all_gather(raw, max(lengths))
        return [json.loads(content[:length]) for content, length in zip(contents, lengths, strict=True)]

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks on rank 0, [] elsewhere. For the transfer, pad them to equal length."""
        import torch
        import torch.distributed as dist

        lengths = self.exchange(len(message))
        sent = _padded(message, max(lengths))
        received = [torch.empty_like(sent) for _ in lengths] if self.rank == 0 else None
        self._run_collective(lambda group: dist.gather(sent, received, group=group, group_dst=0))
        if received is None:
            return []
        return [tensor.numpy().tobytes()[:length] for tensor, length in zip(received, lengths, strict=True)]

    def all_reduce_max(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum, int64[n], over the ranks, as a new tensor."""
        import torch.distributed as dist

        largest = numbers.clone()
        self._run_collective(lambda group: dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group))
        return largest

    def swap(self, sent: tuple[int, bytes] | None, received: tuple[int, int] | None) -> bytes:
        """See `RankChannel.swap`."""
        import torch
        import torch.distributed as dist

        buffer = None if received is None else torch.empty(max(received[1], 1), dtype=torch.uint8, device="cpu")

        def run(group: Any) -> None:
            # Post the receive first: both directions then use the connection at the same time.
            waiting = []
            if buffer is not None and received is not None:
                waiting.append(dist.irecv(buffer, group=group, group_src=received[0]))
            if sent is not None:
                waiting.append(dist.isend(_padded(sent[1], 1), group=group, group_dst=sent[0]))
            for work in waiting:
                assert work is not None
                work.wait()

        self._run_collective(run)
        return b"" if buffer is None or received is None else buffer.numpy().tobytes()[: received[1]]

    def close(self) -> None:
        """Close the connections to the other ranks. Later messages raise UnavailableError."""
        import torch.distributed as dist

        # The connections are closed when the last reference to the group is deleted.
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            # The call fails if the default group was destroyed first, because this group was then destroyed with it.
            with suppress(ValueError, RuntimeError, AssertionError):
                dist.destroy_process_group(group)

    def _all_gather(self, raw: bytes, width: int) -> list[bytes]:
        """Return `raw` of every rank, in rank order, each padded with zeros to `width` bytes."""
        import torch
        import torch.distributed as dist

        sent = _padded(raw, width)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        self._run_collective(lambda group: dist.all_gather(received, sent, group=group))
        return [tensor.numpy().tobytes() for tensor in received]

    def _run_collective(self, collective: Callable[[Any], Any]) -> None:
        if self._group is None:
            raise LostRankError(
                "the connection to the other ranks is lost or closed: make a new CheckpointManager on every rank"
            )
        try:
            collective(self._group)
        except (RuntimeError, ValueError) as error:
            # Close the channel: a message that arrives late would be taken for an answer to the next collective.
            self.close()
            raise LostRankError(
                f"rank {self.rank} lost the connection to another of {count_text(self.size, 'rank')}, which "
                "died or did not answer "
                f"within {self._timeout_s:g} s: {error}"
            ) from error


def open_channels(group: Any, timeout_s: float, number: int = 2) -> list[RankChannel]:
    """Return channels between the ranks of `group`, such as for the calling thread and for the save thread.

    Every rank of the group must call this, in the same order relative to other calls that make groups.

    Args:
        group: torch.distributed group; None: the default group, or a single rank if there is none, with a warning if
            a launcher has started several processes.
        timeout_s: seconds without an answer after which a rank counts as lost.
        number: number of channels.

    Raises:
        UnavailableError: the ranks could not connect.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        name, size = count_launched()
        if size > 1:
            # No error: in many such programs rank 0 alone makes a manager.
            logger.warning(
                "the environment has %s=%d, but torch.distributed has no process group, so this process saves alone: "
                "if each rank has a manager, each saves versions of its own; call datasvc.trainer.init() or "
                "torch.distributed.init_process_group() before, or make a manager on one rank only",
                name,
                size,
            )
        return [RankChannel() for _ in range(number)]
    if dist.get_world_size(group) == 1:
        return [RankChannel() for _ in range(number)]
    group_settings: dict[str, Any] = {}
    if group:
        # With local synchronization, ranks outside of the group need not take part.
        group_settings = {"ranks": dist.get_process_group_ranks(group), "use_local_synchronization": True}
    timeout = dt.timedelta(seconds=timeout_s)
    try:
        groups = [dist.new_group(backend="gloo", timeout=timeout, **group_settings) for _ in range(number)]
    except RuntimeError as error:
        raise LostRankError(f"the ranks could not connect for saving: {error}") from error
    return [GroupChannel(opened, timeout_s) for opened in groups]


def describe_error(error: BaseException | None) -> Mapping[str, str] | None:
    """Return an error as a JSON message for `raise_on_all_ranks`, None if there is no error."""
    return None if error is None else {"type": type(error).__name__, "message": str(error)}


def raise_on_all_ranks(
    errors_by_rank: Sequence[Mapping[str, str] | None], own_error: BaseException | None = None
) -> None:
    """Raise the error of the first rank that failed, the same on all ranks; return if no rank failed.

    Args:
        errors_by_rank: result of `describe_error` of each rank, the same on all ranks.
        own_error: error of this rank, if any; the raised error has it as its cause.

    Raises:
        DatasvcError: a rank failed. If the rank's error is one of `datasvc.errors`, the raised error has its class.
    """
    failed = [(rank, error) for rank, error in enumerate(errors_by_rank) if error is not None]
    if not failed:
        return
    rank, error = failed[0]
    if len(errors_by_rank) == 1 and isinstance(own_error, DatasvcError):
        # The message of a single rank needs no rank number.
        raise own_error
    error_class: type[DatasvcError] = DatasvcError
    message = f"{error['type']}: {error['message']}"
    # Use our own error classes only: a message from another rank must not make this rank create any other class.
    named_class = getattr(errors, error["type"], None)
    if isinstance(named_class, type) and issubclass(named_class, DatasvcError):
        error_class, message = named_class, error["message"]
    others = f" ({count_text(len(failed) - 1, 'other rank')} failed too)" if len(failed) > 1 else ""
    prefix = "" if len(errors_by_rank) == 1 else f"rank {rank}: "
    raise error_class(f"{prefix}{message}{others}") from own_error


def _padded(raw: bytes, width: int) -> torch.Tensor:
    """Return `raw` padded with zeros, as uint8[width]; at least one byte, because torch accepts no empty buffer."""
    import torch

    return torch.frombuffer(bytearray(raw.ljust(max(width, 1), b"\0")), dtype=torch.uint8)
