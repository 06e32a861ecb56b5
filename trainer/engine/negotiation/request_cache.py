"""Cache of the requests on which all ranks have agreed: a cached request is sent as a number.

Invariant: every rank calls `remember` with the same requests in the same order, so a number stands for the same
request on every rank. A cycle resolves all its numbers before it remembers requests, so no number in a message is
reused before it is resolved. Training steps repeat their requests, so most negotiations need a few bytes only.
"""

from __future__ import annotations

from collections import OrderedDict

from datasvc.trainer.engine.negotiation.requests import Key, Request


class RequestCache:
    """A cache of the `capacity` most recently agreed requests, one for each process set and name.

    With a capacity of 0 it stores nothing, so every request is sent in full.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._numbers: OrderedDict[Key, int] = OrderedDict()  # least recently agreed key first
        self._requests: list[Request] = []

    def find(self, request: Request) -> int | None:
        """Return the number of this request; None if no request or a different one is stored under its key."""
        number = self._numbers.get(request.key)
        return number if number is not None and self._requests[number] == request else None

    def resolve(self, number: int) -> Request:
        """Return the request with a number."""
        return self._requests[number]

    def remember(self, request: Request) -> None:
        """Store a request. In a full cache, a new key gets the number of the least recently agreed key."""
        key = request.key
        if self._capacity == 0:
            return
        if key in self._numbers:
            # A changed request, such as one with another shape, replaces the request with the same key.
            self._requests[self._numbers[key]] = request
        elif len(self._requests) < self._capacity:
            self._numbers[key] = len(self._requests)
            self._requests.append(request)
        else:
            # Reuse the number of that key, so that numbers stay below the capacity.
            _, number = self._numbers.popitem(last=False)
            self._numbers[key] = number
            self._requests[number] = request
        self._numbers.move_to_end(key)
