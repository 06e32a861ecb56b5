"""Numbers for requests that all ranks have agreed on before.

Replicated: every rank calls `remember` with the same requests in the same order, so a number means the same
request on every rank. A training step repeats its requests, and then costs a few bytes to negotiate.
"""

from __future__ import annotations

from collections import OrderedDict

from datasvc.trainer.engine.negotiation.requests import Key, Request


class RequestCache:
    """The `capacity` most recently agreed requests, one per set and name; the least recently agreed makes room."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._numbers: OrderedDict[Key, int] = OrderedDict()
        self._requests: list[Request] = []

    def find(self, request: Request) -> int | None:
        """The number of exactly this request, or None."""
        number = self._numbers.get(request.key)
        return number if number is not None and self._requests[number] == request else None

    def resolve(self, number: int) -> Request:
        """The request that this number means."""
        return self._requests[number]

    def remember(self, request: Request) -> None:
        """Gives the request a number, or keeps the one that its name has."""
        key = request.key
        if self._capacity == 0:
            return
        if key in self._numbers:
            self._requests[self._numbers[key]] = request
        elif len(self._requests) < self._capacity:
            self._numbers[key] = len(self._requests)
            self._requests.append(request)
        else:
            _, number = self._numbers.popitem(last=False)
            self._numbers[key] = number
            self._requests[number] = request
        self._numbers.move_to_end(key)
