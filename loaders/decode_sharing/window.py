"""What is decoded next, and who gets it: the state of a share as numbers alone.

Steps are counted along the path of the run. A window of consecutive ones is kept; it moves on with the fastest of
those that follow, and never waits for the slowest: whoever falls out of it is told when it asks next. The window goes
back only for those who are behind by little, and only as often as `patience` allows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Literal

AHEAD: Final = 2
"""Batches that are decoded beyond what the fastest asked for."""

_STEPS_PER_REGAINED: Final = 8  # so those who are behind cost the others an eighth of their time at most

Verdict = Literal["ready", "promised", "moved", "refused"]


@dataclass(frozen=True)
class StepAnswer:
    """What becomes of a question.

    Attributes:
        verdict: "ready": it is in the window; "promised": it will be; "moved": likewise, but the window had nobody to
            stay for and begins anew there, as step 0; "refused": it will not be.
        behind: batches between what was asked for and the fastest; 0 where the asker is no slower.
    """

    verdict: Verdict
    behind: int = 0


class Window:
    """The steps that are decoded or about to be, and the consumers that follow.

    Args:
        num_slots: steps that are kept.
        patience: steps that the others wait, at most, for those behind; see `Share`.
    """

    def __init__(self, num_slots: int, patience: int) -> None:
        self._num_slots = num_slots
        self._patience = self._credit = patience
        self._tail = self._head = 0
        self._furthest = 0
        self._progress = 0
        self._last: dict[Hashable, int] = {}  # what each follower asked for last
        self._passed_over: Counter[Hashable] = Counter()  # how often others asked in vain since
        self._waiting: defaultdict[int, list[Hashable]] = defaultdict(list)

    def __contains__(self, step: int) -> bool:
        return self._tail <= step < self._head

    @property
    def followers(self) -> set[Hashable]:
        """Those whose last question was not refused."""
        return set(self._last)

    def ask(self, consumer: Hashable, step: int | None) -> StepAnswer:
        """Answer a consumer that wants a step; None where its path never meets the window's.

        After "moved" steps are counted from the one that was asked for, which is 0; what was promised before is not
        kept.
        """
        others = [other for other in self._last if other != consumer and not self._is_idle(other)]
        if self._last and step is not None:
            if step in self:
                return self._accept(consumer, step, StepAnswer("ready"))
            if self._head <= step <= max(self._head, self._frontier + 1) + self._num_slots:
                return self._promise(consumer, step)
        if not others:
            self._move()
            return self._promise(consumer, 0, "moved")
        behind = 0 if step is None else max(0, self._frontier - step)
        if step is not None and step < self._tail and behind <= self._credit:
            self._credit -= behind
            self._head = self._tail = step
            return self._promise(consumer, step, behind=behind)
        self.forget(consumer)
        self._last.pop(consumer, None)
        self._passed_over.update(others)
        return StepAnswer("refused", behind)

    def next_step(self) -> int | None:
        """Return the step to decode now; None while nobody needs more."""
        return self._head if self._last and self._head <= self._frontier + AHEAD else None

    def decoded(self) -> list[Hashable]:
        """Say that `next_step` is decoded, in the place of the one `num_slots` before; returns who waits for it."""
        step, self._head = self._head, self._head + 1
        self._tail = max(self._tail, self._head - self._num_slots)
        if self._head > self._furthest:
            self._furthest = self._head
            self._progress += 1
            if self._progress % _STEPS_PER_REGAINED == 0:
                self._credit = min(self._patience, self._credit + 1)
        return self._waiting.pop(step, [])

    def forget(self, consumer: Hashable) -> None:
        """Drop what a consumer waits for."""
        for step in list(self._waiting):
            self._waiting[step] = [other for other in self._waiting[step] if other != consumer]
            if not self._waiting[step]:
                del self._waiting[step]

    def leave(self, consumer: Hashable) -> None:
        """Drop a consumer."""
        self.forget(consumer)
        self._last.pop(consumer, None)
        self._passed_over.pop(consumer, None)

    def give_up(self) -> None:
        """Begin anew with the next question: what was to come does not."""
        self._move()

    @property
    def _frontier(self) -> int:
        return max([*self._last.values(), *self._waiting])

    def _is_idle(self, consumer: Hashable) -> bool:
        """Whether it stopped asking while others would have gone on: nobody waits for it any more."""
        waits = any(consumer in waiting for waiting in self._waiting.values())
        return not waits and self._passed_over[consumer] >= self._num_slots

    def _promise(self, consumer: Hashable, step: int, verdict: Verdict = "promised", behind: int = 0) -> StepAnswer:
        self._waiting[step].append(consumer)
        return self._accept(consumer, step, StepAnswer(verdict, behind))

    def _accept(self, consumer: Hashable, step: int, answer: StepAnswer) -> StepAnswer:
        self._last[consumer] = step
        self._passed_over[consumer] = 0
        return answer

    def _move(self) -> None:
        self._tail = self._head = self._furthest = 0
        self._last.clear()
        self._passed_over.clear()
        self._waiting.clear()
