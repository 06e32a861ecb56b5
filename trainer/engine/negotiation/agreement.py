"""What a rank sends in each cycle, and the outcomes that follow from what all ranks sent. Does no input or output.

A cycle has two parts. In the first, each rank sends one bit for each request of the request cache: whether it has
submitted this request. The ranks need only the AND of these bits, and that of their complements, which have one
length however many ranks there are. Training steps repeat their requests, so most cycles need nothing else. The
second part takes place if one of the ranks asks for it: every rank sends a message to all, and receives as many as
there are ranks. A rank asks if it has a request that is not in the cache, and if one of its requests waits for long,
because the AND does not contain which ranks are missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from datasvc.trainer.engine.negotiation.negotiation import Negotiation, Outcome, Refused
from datasvc.trainer.engine.negotiation.requests import CollectiveKind, Key, Request, RequestCache

# These kinds change the joined ranks or the process sets. They are rare, and always sent in messages.
_WITH_EFFECT: Final = (CollectiveKind.JOIN, CollectiveKind.ADD_PROCESS_SET, CollectiveKind.REMOVE_PROCESS_SET)


class Agreement:
    """The requests of one rank that have no outcome yet, with the negotiation and the cache that all ranks share.

    In each cycle: `submit`, `encode_bits`, `apply_bits`; if the last returns that a second part follows, also
    `take_entries` and `apply_entries`.
    """

    def __init__(self, rank: int, num_ranks: int, cache_capacity: int) -> None:
        self.negotiation = Negotiation(num_ranks)
        self._rank = rank
        self._cache = RequestCache(cache_capacity)
        self._waiting: dict[Key, Request] = {}  # requests of this rank without an outcome
        self._unsent: dict[Key, float] = {}  # those in no message, and their times, oldest first
        self._lacks_bits = False  # whether an unsent request has no bit
        self._own_bits = 0  # the bits of `_waiting`
        self._has_awaited_bit = False  # whether another rank has submitted a request that this rank has not

    def submit(self, requests: Sequence[Request], now_s: float) -> None:
        """Begin a cycle with the new requests of this rank."""
        for request in requests:
            self._waiting[request.key] = request
            self._unsent[request.key] = now_s
            number = self._find_bit(request)
            if number is None:
                self._lacks_bits = True
            else:
                self._own_bits |= 1 << number

    @property
    def unsent_since_s(self) -> float | None:
        """When the oldest request was submitted that only its bit stands for so far; None if there is none."""
        return next(iter(self._unsent.values()), None)

    def encode_bits(self, *, needs_messages: bool, sends_every_request: bool = False) -> bytes:
        """Return the data of this rank for the first part of the cycle; their length is equal on all ranks.

        Args:
            needs_messages: ask for the second part.
            sends_every_request: ask for it, and set no bits, so that the requests of all ranks are in messages.
        """
        needs_messages |= sends_every_request or self._lacks_bits
        submitted = 0 if sends_every_request else self._own_bits
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
        self._own_bits &= ~by_all
        outcomes: list[Outcome] = [
            self.negotiation.complete(self._cache.resolve(number)) for number in _numbers_of(by_all)
        ]
        self._conclude(outcomes)
        return outcomes, not fields & 1

    def take_entries(self) -> tuple[Request | int, ...]:
        """Return the requests for the message of this rank; each as its number if the cache has it."""
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
        # Messages may have changed the cache, the joined ranks and the sets. All requests were in messages now.
        numbers = [self._find_bit(request) for request in self._waiting.values()]
        self._own_bits = sum(1 << number for number in numbers if number is not None)
        self._lacks_bits = self._has_awaited_bit = False
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


def _numbers_of(bits: int) -> Iterator[int]:
    """Yield the positions of the bits that are set, in increasing order."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
