"""Reference-counted batch slots in shared memory; memory that a consumer holds is never overwritten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from datasvc.loaders.core.split_reader import Cursor
from datasvc.loaders.decode_sharing.memory import SharedBuffer, Span


@dataclass
class BatchSlot:
    """A decoded batch in shared memory.

    Attributes:
        number: unique number of the batch in this server.
        cursor: start of the batch's step.
        memory: the memory that holds the batch.
        spans: offset and length in bytes of each part of the batch in `memory`.
        holders: number of references that each consumer holds.
        is_kept: whether the batch is still in the window, so that consumers may request it.
    """

    number: int
    cursor: Cursor
    memory: SharedBuffer
    spans: Sequence[Span]
    holders: Counter[Hashable] = field(default_factory=Counter)
    is_kept: bool = True


class Slots:
    """All batches in memory, and spare memory for the next ones.

    A batch stays in memory while it is in the window or a consumer holds a reference to it.

    Args:
        num_spare: maximum number of spare buffers.
    """

    def __init__(self, num_spare: int) -> None:
        self._num_spare = num_spare
        self._spare: list[SharedBuffer] = []
        self._slots: dict[int, BatchSlot] = {}
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._slots) + len(self._spare)

    def take_spare(self) -> SharedBuffer | None:
        """Return an unused buffer, None if there is none."""
        return self._spare.pop() if self._spare else None

    def recycle(self, memory: SharedBuffer | None) -> None:
        """Keep a buffer for a later batch, or close it if there are enough spare ones."""
        if memory is None:
            return
        if len(self._spare) < self._num_spare:
            self._spare.append(memory)
        else:
            memory.close()

    def add(self, cursor: Cursor, memory: SharedBuffer, spans: Sequence[Span]) -> BatchSlot:
        """Return a new slot for the batch in `memory`."""
        self._num_made += 1
        slot = self._slots[self._num_made] = BatchSlot(self._num_made, cursor, memory, spans)
        return slot

    def drop(self, slot: BatchSlot) -> None:
        """Remove a batch from the window; its memory stays while consumers hold references."""
        slot.is_kept = False
        self._recycle_if_unused(slot)

    def release(self, number: int, consumer: Hashable) -> None:
        """Remove one reference of a consumer; do nothing if it has none."""
        slot = self._slots.get(number)
        if slot is not None and slot.holders[consumer] > 0:
            slot.holders[consumer] -= 1
            self._recycle_if_unused(slot)

    def release_all(self, consumer: Hashable) -> None:
        """Remove all references of a consumer."""
        for slot in list(self._slots.values()):
            del slot.holders[consumer]
            self._recycle_if_unused(slot)

    def _recycle_if_unused(self, slot: BatchSlot) -> None:
        if not slot.is_kept and not slot.holders.total():
            del self._slots[slot.number]
            self.recycle(slot.memory)
