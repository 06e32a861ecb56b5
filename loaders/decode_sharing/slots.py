"""Which memory holds which batch, and who has it in use: what somebody holds is never written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from datasvc.loaders.core.split_reader import Cursor
from datasvc.loaders.decode_sharing.memory import SharedBuffer, Span


@dataclass
class BatchSlot:
    """A decoded batch.

    Attributes:
        number: unlike that of every other batch of this server.
        cursor: start of its step.
        memory: where it lies.
        spans: where its parts lie there.
        holders: how often each consumer was given it.
        is_kept: others may still ask for it.
    """

    number: int
    cursor: Cursor
    memory: SharedBuffer
    spans: Sequence[Span]
    holders: Counter[Hashable] = field(default_factory=Counter)
    is_kept: bool = True


class Slots:
    """The batches in memory, those that are kept and those that somebody holds, and spare memory.

    Args:
        num_spare: pieces of memory that wait to be used again, at most.
    """

    def __init__(self, num_spare: int) -> None:
        self._num_spare = num_spare
        self._spare: list[SharedBuffer] = []
        self._slots: dict[int, BatchSlot] = {}
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._slots) + len(self._spare)

    def take_spare(self) -> SharedBuffer | None:
        """Return memory that nobody uses; None where there is none."""
        return self._spare.pop() if self._spare else None

    def give_back(self, memory: SharedBuffer | None) -> None:
        """Keep memory for the next batch, or let go of it where there is enough."""
        if memory is None:
            return
        if len(self._spare) < self._num_spare:
            self._spare.append(memory)
        else:
            memory.close()

    def add(self, cursor: Cursor, memory: SharedBuffer, spans: Sequence[Span]) -> BatchSlot:
        """Return a new slot with a batch."""
        self._num_made += 1
        slot = self._slots[self._num_made] = BatchSlot(self._num_made, cursor, memory, spans)
        return slot

    def drop(self, slot: BatchSlot) -> None:
        """Say that nobody will ask for it any more; whoever holds it goes on holding it."""
        slot.is_kept = False
        self._reuse(slot)

    def release(self, number: int, consumer: Hashable) -> None:
        """Give up one hold of a consumer. Does nothing where it has none."""
        slot = self._slots.get(number)
        if slot is not None and slot.holders[consumer] > 0:
            slot.holders[consumer] -= 1
            self._reuse(slot)

    def leave(self, consumer: Hashable) -> None:
        """Give up all holds of a consumer."""
        for slot in list(self._slots.values()):
            del slot.holders[consumer]
            self._reuse(slot)

    def _reuse(self, slot: BatchSlot) -> None:
        if not slot.is_kept and not slot.holders.total():
            del self._slots[slot.number]
            self.give_back(slot.memory)
