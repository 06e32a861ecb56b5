"""What a rank sends in each cycle, and what it learns from what all ranks sent. Does no input or output.

A cycle has two parts. In the first, each rank sends one bit for each request of the request cache: whether it has
submitted this request. The ranks need only the AND of these bits, and that of their complements, which have one
length however many ranks there are. Training steps repeat their requests, so this is all that most cycles need. The
second part takes place only if a rank asks for it: every rank sends messages to all, which grow with the number of
ranks. A rank asks if it has a request that is not in the cache, and if one of its requests has waited for many
cycles, because bits do not say for which ranks it waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from datasvc.trainer.engine.negotiation.negotiation import Negotiation, Outcome, Refused
from datasvc.trainer.engine.negotiation.requests import CollectiveKind, Key, Request, RequestCache

# After this number of cycles a request that others lack is sent to all, so that all know which ranks are missing.
_MAX_CYCLES_AS_BIT: Final = 32
# These kinds change the joined ranks or the process sets. They are rare, and always sent in messages.
_WITH_EFFECT: Final = (CollectiveKind.JOIN, CollectiveKind.ADD_PROCESS_SET, CollectiveKind.REMOVE_PROCESS_SET)


class Agreement:
    """The requests of one rank that have no outcome yet, with the negotiation and the cache that all ranks share.

    In each cycle: `submit`, `encode_bits`, `apply_bits`; if that says so, also `take_entries` and `apply_entries`.
    """

    def __init__(self, rank: int, num_ranks: int, cache_capacity: int) -> None:
        self.negotiation = Negotiation(num_ranks)
        self._rank = rank
        self._cache = RequestCache(cache_capacity)
        self._waiting: dict[Key, Request] = {}  # requests of this rank without an outcome
        self._unsent: dict[Key, int] = {}  # those that no message has had, and the cycle of their submission
        self._cycle = 0
        self._own_bits = 0  # the bits of `_waiting` in this cycle
        self._has_awaited_bit = False  # whether another rank has submitted a request that this rank has not

    def submit(self, requests: Sequence[Request]) -> None:
        """Begin a cycle with the new requests of this rank."""
        self._cycle += 1
        for request in requests:
            self._waiting[request.key] = request
            self._unsent[request.key] = self._cycle

    def encode_bits(self, *, needs_messages: bool, is_detailed: bool = False) -> bytes:
        """Return what the first part of the cycle combines; all ranks return equally many bytes.

        Args:
            needs_messages: whether this rank asks for the second part for a reason of its own.
            is_detailed: ask for it, and set no bits, so that this rank sees which rank submits what, and when.
        """
        oldest = next(iter(self._unsent.values()), self._cycle)
        needs_messages |= is_detailed or self._cycle - oldest >= _MAX_CYCLES_AS_BIT
        self._own_bits = 0
        for key, request in self._waiting.items():
            number = self._find_bit(request)
            if number is not None:
                self._own_bits |= 1 << number
            elif key in self._unsent:
                needs_messages = True
        submitted = 0 if is_detailed else self._own_bits
        num_bits = len(self._cache)
        complement = ~submitted & ((1 << num_bits) - 1)
        fields = (submitted | self._foreign_bits()) << 1 | complement << num_bits + 1 | (not needs_messages)
        return fields.to_bytes(2 * num_bits // 8 + 1, "little")

    def apply_bits(self, combined: bytes) -> tuple[list[Outcome], bool]:
        """Return the outcomes that the AND of the bits of all ranks gives, and whether a second part follows."""
        fields, num_bits = int.from_bytes(combined, "little"), len(self._cache)
        mask = (1 << num_bits) - 1
        by_all, by_none = fields >> 1 & mask, fields >> num_bits + 1 & mask
        awaited = mask & ~by_all & ~by_none & ~self._foreign_bits()
        self._has_awaited_bit = bool(awaited & ~self._own_bits)
        outcomes: list[Outcome] = [
            self.negotiation.complete(self._cache.resolve(number)) for number in _numbers_of(by_all)
        ]
        self._conclude(outcomes)
        return outcomes, not fields & 1

    def take_entries(self) -> tuple[Request | int, ...]:
        """Return the requests for this rank's message; each as its number if the cache has it."""
        requests = [self._waiting[key] for key in self._unsent]
        self._unsent.clear()
        numbers = [self._cache.find(request) for request in requests]
        return tuple(request if number is None else number for request, number in zip(requests, numbers, strict=True))

    def apply_entries(self, entries: Sequence[Sequence[Request | int]]) -> tuple[list[list[Request]], list[Outcome]]:
        """Return the requests of the messages, which are listed by rank, and the outcomes that they lead to."""
        submitted = [
            [self._cache.resolve(entry) if isinstance(entry, int) else entry for entry in of_rank]
            for of_rank in entries
        ]
        outcomes = self.negotiation.advance(submitted)
        self._conclude(outcomes)
        return submitted, outcomes

    def waiting(self) -> tuple[bool, bool]:
        """Return whether this rank waits for others, and whether others wait for it, as far as it is known here."""
        awaits_others, is_awaited = self.negotiation.waiting(self._rank)
        return awaits_others or bool(self._waiting), is_awaited or self._has_awaited_bit

    def _conclude(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            # A rank that had joined has no request for this operation; one of the same name belongs to a later one.
            if self._rank in outcome.requests:
                del self._waiting[outcome.key]
                self._unsent.pop(outcome.key, None)
            # Store only a request that is equal on all ranks. In an allgather, for example, the rows may differ.
            if (
                not isinstance(outcome, Refused)
                and outcome.request.kind not in _WITH_EFFECT
                and all(request == outcome.request for request in outcome.requests.values())
            ):
                self._cache.remember(outcome.request)

    def _find_bit(self, request: Request) -> int | None:
        """Return the number of the bit that stands for a request; None if it must be sent in a message."""
        # While some ranks have joined, an operation does not wait for them, and their bits stay unset.
        if self.negotiation.has_joined_ranks or request.process_set not in self.negotiation.process_sets:
            return None
        # If another rank has sent a different request of this key, the ranks must compare them.
        seen = self.negotiation.pending.get(request.key, {})
        return None if any(other != request for other in seen.values()) else self._cache.find(request)

    def _foreign_bits(self) -> int:
        """Return the bits of the requests for which this rank is not needed: those of sets without it."""
        bits = 0
        for process_set, ranks in self.negotiation.process_sets.items():
            if self._rank not in ranks:
                bits |= self._cache.bits_of_set(process_set)
        return bits


def _numbers_of(bits: int) -> list[int]:
    """Return the positions of the bits that are set, in increasing order."""
    return [number for number in range(bits.bit_length()) if bits >> number & 1]
