"""The window of decoded steps: decides which step is decoded next and which consumers get it. Pure state, no I/O.

Steps are numbered along the run. The window holds consecutive steps. It moves forward with the fastest consumer and
never waits for the slowest; the next request of a consumer that has fallen out of it is refused. The window moves
back only for a consumer that is a little behind, and only as far as the group's `patience` allows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Literal

AHEAD: Final = 2
"""Number of batches that are decoded beyond the fastest consumer's last request."""

# One step of patience returns per 8 decoded steps, so slow consumers cost the others an eighth of their time at most.
_STEPS_PER_PATIENCE: Final = 8

RequestStatus = Literal["ready", "pending", "restarted", "refused"]


@dataclass(frozen=True)
class StepAnswer:
    """The answer to a request for a step.

    Attributes:
        status: "ready": the step is in the window; "pending": it will be; "restarted": it will be, as step 0 of a new
            window, because no other consumer used the old one; "refused": it will not be in the window.
        behind: steps from the requested one to the fastest consumer's; 0 if the consumer is not behind.
    """

    status: RequestStatus
    behind: int = 0


class Window:
    """The steps that are decoded or next to be decoded, and the consumers that follow them.

    The window holds the steps from `_tail` up to `_head`, excluded; `_head` is decoded next.

    Args:
        num_slots: maximum number of decoded steps.
        patience: maximum number of steps that the others wait for consumers that are behind; see `DecodeGroup`.
    """

    def __init__(self, num_slots: int, patience: int) -> None:
        self._num_slots = num_slots
        self._patience = self._patience_left = patience
        self._tail = self._head = 0
        self._furthest = 0
        self._progress = 0
        self._last_requests: dict[Hashable, int] = {}  # step of each follower's last request
        self._num_missed: Counter[Hashable] = Counter()  # refused requests of other consumers since that request
        self._waiting: defaultdict[int, list[Hashable]] = defaultdict(list)

    def __contains__(self, step: int) -> bool:
        return self._tail <= step < self._head

    @property
    def followers(self) -> set[Hashable]:
        """Consumers whose last request was not refused."""
        return set(self._last_requests)

    def request(self, consumer: Hashable, step: int | None) -> StepAnswer:
        """Answer a consumer's request for a step; None stands for a step that the window's run never reaches.

        After the status "restarted", the requested step has number 0, and all pending requests are cancelled.
        """
        others = [other for other in self._last_requests if other != consumer and not self._is_idle(other)]
        if self._last_requests and step is not None:
            if step in self:
                return self._accept(consumer, step, StepAnswer("ready"))
            if self._head <= step <= max(self._head, self._frontier + 1) + self._num_slots:
                return self._enqueue(consumer, step)
        if not others:
            # No active consumer needs the present window, so it may move anywhere.
            self.restart()
            return self._enqueue(consumer, 0, "restarted")
        behind = 0 if step is None else max(0, self._frontier - step)
        if step is not None and step < self._tail and behind <= self._patience_left:
            # Move back: the steps up to the fastest consumer are decoded a second time, which costs patience.
            self._patience_left -= behind
            self._head = self._tail = step
            return self._enqueue(consumer, step, behind=behind)
        self.cancel(consumer)
        self._last_requests.pop(consumer, None)
        self._num_missed.update(others)
        return StepAnswer("refused", behind)

    def next_step(self) -> int | None:
        """Return the step to decode now; None while enough steps are decoded."""
        return self._head if self._last_requests and self._head <= self._frontier + AHEAD else None

    def mark_decoded(self) -> list[Hashable]:
        """Record that `next_step` is decoded; return the consumers that wait for it. May drop the oldest step."""
        step, self._head = self._head, self._head + 1
        self._tail = max(self._tail, self._head - self._num_slots)
        if self._head > self._furthest:
            self._furthest = self._head
            self._progress += 1
            if self._progress % _STEPS_PER_PATIENCE == 0:
                self._patience_left = min(self._patience, self._patience_left + 1)
        return self._waiting.pop(step, [])

    def cancel(self, consumer: Hashable) -> None:
        """Cancel a consumer's pending requests."""
        for step in list(self._waiting):
            self._waiting[step] = [other for other in self._waiting[step] if other != consumer]
            if not self._waiting[step]:
                del self._waiting[step]

    def remove(self, consumer: Hashable) -> None:
        """Remove a consumer."""
        self.cancel(consumer)
        self._last_requests.pop(consumer, None)
        self._num_missed.pop(consumer, None)

    def restart(self) -> None:
        """Empty the window and cancel all requests; the next request places it."""
        self._tail = self._head = self._furthest = 0
        self._last_requests.clear()
        self._num_missed.clear()
        self._waiting.clear()

    @property
    def _frontier(self) -> int:
        return max([*self._last_requests.values(), *self._waiting])

    def _is_idle(self, consumer: Hashable) -> bool:
        """Return whether a consumer sent no request while others were refused; the window may move without it."""
        is_waiting = any(consumer in waiting for waiting in self._waiting.values())
        return not is_waiting and self._num_missed[consumer] >= self._num_slots

    def _enqueue(
        self, consumer: Hashable, step: int, status: RequestStatus = "pending", behind: int = 0
    ) -> StepAnswer:
        self._waiting[step].append(consumer)
        return self._accept(consumer, step, StepAnswer(status, behind))

    def _accept(self, consumer: Hashable, step: int, answer: StepAnswer) -> StepAnswer:
        self._last_requests[consumer] = step
        self._num_missed[consumer] = 0
        return answer
