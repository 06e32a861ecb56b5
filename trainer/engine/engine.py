"""The background thread: collects submissions, exchanges them with the other ranks, runs what is ready.

Invariant: a name that was accepted by ``submit`` gets its handle finished exactly once, whatever happens to
    this thread, the network or the other ranks.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch

from trainer.engine.execution import Executor
from trainer.engine.handles import Result, Submission
from trainer.engine.messages import CycleMessage, decode_message, encode_message
from trainer.engine.negotiation import Negotiation, Outcome, Ready, Refused
from trainer.engine.request_cache import RequestCache
from trainer.engine.requests import Request
from trainer.engine.settings import EngineSettings
from trainer.engine.stall import StallWatch
from trainer.engine.streams import EngineStreams
from trainer.engine.transport import Transport
from trainer.errors import HorovodInternalError

logger = logging.getLogger(__name__)

_LONGEST_IDLE_CYCLES = 5.0


class Engine:
    """Runs the operations of one rank from its construction until ``close``. Owns the transport.

    Args:
        transport: to the other ranks, all of which construct an engine.
        settings: the same on every rank.
        clock: seconds, for the stall warning.
    """

    def __init__(
        self, transport: Transport, settings: EngineSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._transport = transport
        self._settings = settings
        self._clock = clock
        self._negotiation = Negotiation(transport.size)
        self._cache = RequestCache(settings.cache_capacity)
        self._stall_watch = StallWatch(settings.stall_warning_s)
        self._streams = EngineStreams()
        self._executor = Executor(
            transport, fusion_bytes=settings.fusion_bytes, streams=self._streams, finish=self._succeed
        )
        self._changed = threading.Condition()
        self._queue: list[Submission] = []
        self._in_flight: dict[str, Submission] = {}
        self._is_leaving = False
        self._end_reason: str | None = None
        self._num_idle_cycles = 0
        self._activity = "start"
        # A daemon, because Python joins other threads before it runs the exit handler that closes the engine.
        self._thread = threading.Thread(target=self._run, name="trainer-engine", daemon=True)
        self._thread.start()

    def submit(self, submission: Submission) -> None:
        """Hands an operation over; its handle finishes later.

        Raises:
            ValueError: an operation of this name is still in flight on this rank.
            HorovodInternalError: the job has lost a rank, or this engine is closed.
        """
        name = submission.request.name
        with self._changed:
            if self._end_reason is not None:
                raise HorovodInternalError(f"'{name}' cannot run: {self._end_reason}")
            if name in self._in_flight:
                raise ValueError(
                    f"an operation named '{name}' is still in flight on this rank; "
                    "synchronize it first or give this one another name"
                )
            self._in_flight[name] = submission
            self._queue.append(submission)
            self._changed.notify()

    def close(self) -> None:
        """Tells the other ranks, stops the thread and lets go of the network. What is in flight fails."""
        with self._changed:
            self._is_leaving = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        try:
            reason = self._serve()
        except Exception as cause:
            # Only the words are kept: a traceback would keep the groups alive, and with them the connections
            # whose end tells the other ranks.
            logger.debug("the engine of rank %d fails", self._transport.rank, exc_info=True)
            reason = f"rank {self._transport.rank} lost the other ranks during {self._activity}: {cause}"
        try:
            self._transport.close()
        finally:
            self._end(reason)

    def _serve(self) -> str:
        while True:
            leaving_ranks = self._cycle()
            if leaving_ranks:
                return _describe_departure(leaving_ranks)

    def _cycle(self) -> list[int]:
        """Exchanges, negotiates and runs once; returns the ranks that leave after this cycle."""
        message = self._collect()
        self._activity = "the exchange of requests"
        messages = [decode_message(data) for data in self._transport.exchange(encode_message(message))]
        submitted = [[self._resolve(entry) for entry in message.entries] for message in messages]
        if any(submitted):
            self._settle(self._negotiation.advance(submitted))
        self._warn_of_stalls()
        return [rank for rank, message in enumerate(messages) if message.is_leaving]

    def _collect(self) -> CycleMessage:
        with self._changed:
            if not self._queue and not self._is_leaving:
                self._changed.wait(self._idle_wait_s())
            queue, self._queue = self._queue, []
            is_leaving = self._is_leaving
        self._num_idle_cycles = 0 if queue else self._num_idle_cycles + 1
        return CycleMessage(tuple(self._shorten(submission.request) for submission in queue), is_leaving)

    def _idle_wait_s(self) -> float | None:
        if self._transport.size == 1:
            return None
        # Doubles from half a cycle; the exponent is bounded because an idle hour has many cycles.
        return self._settings.cycle_time_s * min(_LONGEST_IDLE_CYCLES, 0.5 * 2.0 ** min(self._num_idle_cycles, 8))

    def _shorten(self, request: Request) -> Request | int:
        number = self._cache.find(request)
        return request if number is None else number

    def _resolve(self, entry: Request | int) -> Request:
        return self._cache.resolve(entry) if isinstance(entry, int) else entry

    def _settle(self, outcomes: Sequence[Outcome]) -> None:
        operations = []
        for outcome in outcomes:
            if isinstance(outcome, Refused):
                self._fail(self._in_flight[outcome.name], outcome.reason)
                continue
            self._remember(outcome)
            operations.append((outcome, self._in_flight[outcome.name]))
        self._activity = ", ".join(f"'{ready.name}'" for ready, _ in operations[:3])
        self._executor.run(operations)

    def _remember(self, ready: Ready) -> None:
        if all(request == ready.requests[0] for request in ready.requests):
            self._cache.remember(ready.requests[0])

    def _warn_of_stalls(self) -> None:
        for warning in self._stall_watch.check(self._clock(), self._negotiation.missing_ranks()):
            # One rank is enough: all of them know the same.
            if self._transport.rank == 0:
                logger.warning("%s", warning)

    def _succeed(self, submission: Submission, result: Result) -> None:
        # Forget the name first: whoever wakes up may submit it again at once.
        with self._changed:
            del self._in_flight[submission.request.name]
        device = submission.inputs[0].device if submission.inputs else torch.device("cpu")
        submission.handle.succeed(result, self._streams.record_end(device))

    def _fail(self, submission: Submission, reason: str) -> None:
        with self._changed:
            del self._in_flight[submission.request.name]
        submission.handle.fail(HorovodInternalError(reason))

    def _end(self, reason: str) -> None:
        with self._changed:
            self._end_reason = reason
            abandoned = list(self._in_flight.values())
        for submission in abandoned:
            self._fail(submission, f"'{submission.request.name}' did not complete: {reason}")


def _describe_departure(ranks: Sequence[int]) -> str:
    who = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
    return f"{who} left the job (shutdown() or end of the program)"
