"""The engine of a rank: a background thread that runs operations when all ranks have submitted them.

The thread works in cycles. In each cycle it collects this rank's new submissions, finds with the other ranks which
operations all have submitted, and runs those. `job.runtime` owns the engine. Invariant: the
handle of each submission that `submit` accepts is finished exactly once, even if this thread, the network or another
rank fails.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from datasvc.trainer.engine.execution.execution import Executor
from datasvc.trainer.engine.execution.handles import Completions, Result, Submission
from datasvc.trainer.engine.execution.movements import EngineStreams, FusionBuffers
from datasvc.trainer.engine.execution.timeline import Timeline, profiled
from datasvc.trainer.engine.execution.transport import Transport
from datasvc.trainer.engine.negotiation.agreement import Agreement
from datasvc.trainer.engine.negotiation.negotiation import (
    JOIN,
    Outcome,
    Refused,
    StalledOperation,
    StallWatch,
    name_ranks,
)
from datasvc.trainer.engine.negotiation.requests import (
    CollectiveKind,
    CycleMessage,
    Key,
    decode_message,
    encode_message,
)
from datasvc.trainer.engine.tuning import Tuner
from datasvc.trainer.env.environment import EngineSettings
from datasvc.trainer.errors import HorovodInternalError

logger = logging.getLogger(__name__)

# Maximum pause of an idle rank between two exchanges, in cycles.
_MAX_IDLE_CYCLES = 5.0
_MAX_UNNEEDED_CYCLES = 50.0  # the same, while no operation can run without a submission of this rank
# Then a request that others lack is sent in a message, so that every rank has the names of the missing ranks.
_MAX_WAIT_AS_BIT_S = 0.2


class Engine:
    """The engine of one rank. It runs from its construction until `close`, and owns the transport.

    Every rank constructs an engine with the same settings. `clock`, in seconds, is for the stall warning.
    """

    def __init__(
        self, transport: Transport, settings: EngineSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        """The initial settings; autotune may change the values in use."""
        self.on_stall: Callable[[StalledOperation], None] | None = None
        """Called by the engine's thread on rank 0 with each operation that it warns of; it must not fail or wait."""
        self.is_homogeneous = transport.is_homogeneous
        self._transport = transport
        self._cycle_time_s = settings.cycle_time_s
        self._clock = clock
        self._agreement = Agreement(transport.rank, transport.size, settings.cache_capacity)
        self.process_sets: Mapping[int, tuple[int, ...]] = dict(self._agreement.negotiation.process_sets)
        """Global ranks of each process set that every rank has added, by the number of the set."""
        self._stall_watch = StallWatch(settings.stall_warning_s, settings.stall_shutdown_s)
        self._timeline = Timeline()
        self._tuner = (
            Tuner(settings, has_node_groups=transport.has_node_groups)
            if settings.autotune and transport.rank == 0
            else None
        )
        self._changed = threading.Condition()
        self._queue: list[Submission] = []  # submissions for the next cycle
        self._in_flight: dict[Key, Submission] = {}  # submissions that are not finished
        self._is_leaving = False  # whether `close` was called
        self._stall_failure = ""  # rank 0 sends it to all ranks in the next cycle; empty for none
        self._end_reason: str | None = None  # why `submit` raises; None while the engine runs
        self._num_idle_cycles = 0  # consecutive cycles without a submission of this rank
        self._activity = "start"  # what the thread does, for the message of a failure
        self._reduction_failure: str | None = None  # set by the thread of `Completions`
        self._cuda_device: torch.device | None = None  # device of the last submission on a GPU
        self._buffers = FusionBuffers()
        self._streams = EngineStreams()
        self._completions = Completions(self._record_failure)
        self._executor = Executor(
            transport,
            streams=self._streams,
            completions=self._completions,
            buffers=self._buffers,
            finish=self._succeed,
            cuda_device=self._choose_cuda_device,
        )
        self._executor.set_reduction(
            fusion_bytes=settings.fusion_bytes, is_hierarchical=bool(settings.hierarchical_allreduce)
        )
        # A daemon thread: Python waits for all others before it runs the exit handler that closes the engine.
        self._thread = threading.Thread(target=self._run, name="trainer-engine", daemon=True)
        self._thread.start()

    def submit(self, submission: Submission) -> None:
        """Submit an operation; its handle finishes later.

        Raises:
            ValueError: an operation of this name is still in flight on this rank.
            HorovodInternalError: the job has lost a rank, or this engine is closed.
        """
        key = submission.request.key
        with self._changed:
            if self._end_reason is not None:
                raise HorovodInternalError(f"{key.describe()} cannot run: {self._end_reason}")
            if key in self._in_flight:
                raise ValueError(
                    f"an operation named {key.describe()} is still in flight on this rank; "
                    "synchronize it first or give this one another name"
                )
            self._in_flight[key] = submission
            self._queue.append(submission)
            # A rank that has joined (it has no more data) submits nothing. The executor then makes neutral tensors in
            # place of its submissions, on this device.
            if submission.inputs and submission.inputs[0].is_cuda:
                self._cuda_device = submission.inputs[0].device
            self._changed.notify()

    def check(self) -> None:
        """Return at once if operations can be submitted.

        Raises:
            HorovodInternalError: the job has lost a rank, or this engine is closed.
        """
        if self._end_reason is not None:
            raise HorovodInternalError(self._end_reason)

    def write_timeline(self, timeline: Timeline) -> None:
        """Record later operations in `timeline`, and close the previous timeline."""
        previous, self._timeline = self._timeline, timeline
        self._executor.set_timeline(timeline)
        previous.close()

    def close(self) -> None:
        """Leave the job: notify the other ranks, end the thread, close the transport. Operations in flight fail."""
        with self._changed:
            self._is_leaving = True
            self._changed.notify()
        # The thread sends one more message, which says that this rank leaves.
        self._thread.join()
        self._timeline.close()

    def _run(self) -> None:
        """Serve until the engine ends, and fail the operations that are left; the function of the thread."""
        torch.set_grad_enabled(False)  # a setting per thread; nothing here is differentiated
        try:
            reason = self._serve()
        except Exception as cause:
            # Keep only the text, because a traceback would keep the process groups and their connections alive. The
            # other ranks detect the failure only when these connections close.
            logger.debug("the engine of rank %d fails", self._transport.rank, exc_info=True)
            reason = f"rank {self._transport.rank} failed during {self._activity}: {cause}"
        # After `drain` no thread uses the tensors. `drain` always returns: all ranks have begun the collectives in
        # flight, so these complete, or fail when the connections of a dead rank break.
        self._completions.drain()
        self._completions.close()
        self._buffers.clear()
        try:
            self._transport.close()
        finally:
            self._end(reason)

    def _serve(self) -> str:
        """Run cycles until the job ends for this engine, and return the reason."""
        while True:
            messages = self._cycle()
            # Failures come first: a rank that leaves in the same cycle may leave because of the failure.
            failures = [message.failure for message in messages if message.failure]
            if failures:
                return failures[0]
            leaving_ranks = [rank for rank, message in enumerate(messages) if message.is_leaving]
            if leaving_ranks:
                return f"{name_ranks(leaving_ranks)} left the job (shutdown() or end of the program)"

    def _cycle(self) -> list[CycleMessage]:
        """Return the messages of all ranks; none if bits were enough."""
        message = self._collect()
        self._activity = "the exchange of requests"
        messages = []
        with profiled("negotiate"):
            bits = self._agreement.encode_bits(
                needs_messages=message != CycleMessage() or self._has_waited_as_bit(),
                sends_every_request=self._timeline.is_recording,
            )
            outcomes, needs_messages = self._agreement.apply_bits(self._transport.combine(bits))
            if needs_messages:
                message = dataclasses.replace(message, entries=self._agreement.take_entries())
                messages = [decode_message(data) for data in self._transport.exchange(encode_message(message))]
        self._raise_failure()
        if any(message.entries for message in messages):
            self._timeline.cycle()
            submitted, by_messages = self._agreement.apply_entries([message.entries for message in messages])
            for rank, requests in enumerate(submitted):
                for request in requests:
                    self._timeline.submitted(request.key, request.kind.value.upper(), rank)
            outcomes += by_messages
        if outcomes:
            self._stall_watch.restart(JOIN)  # a join that waits for ranks that make progress is no stall
            self._process_outcomes(outcomes)
        tuning = messages[0].tuning if messages else None
        if tuning is not None:
            # All ranks adopt the values in the same cycle, because different fusion sizes lead to different buffers.
            self._cycle_time_s = tuning.cycle_time_s
            self._executor.set_reduction(fusion_bytes=tuning.fusion_bytes, is_hierarchical=tuning.is_hierarchical)
        self._watch_stalls()
        return messages

    def _collect(self) -> CycleMessage:
        """Wait for submissions, at most for the pause of an idle rank, and return a message without requests."""
        with self._changed:
            if not self._queue and not self._is_leaving and self._reduction_failure is None:
                self._changed.wait(self._idle_wait_s())
            # This rank takes part in the exchange even without submissions, because an exchange needs all ranks.
            queue, self._queue = self._queue, []
            is_leaving = self._is_leaving
        self._num_idle_cycles = 0 if queue else self._num_idle_cycles + 1
        self._agreement.submit([submission.request for submission in queue], self._clock())
        tuning = self._tuner.propose() if self._tuner is not None else None
        return CycleMessage((), is_leaving, self._stall_failure, tuning)

    def _idle_wait_s(self) -> float | None:
        """Return the maximum pause before the next exchange, if this rank submits nothing; None for no maximum."""
        if self._transport.size == 1:
            return None  # only a submission or `close` can end the pause
        awaits_others, is_awaited = self._agreement.waiting()
        if awaits_others and not is_awaited:
            # Only other ranks have yet to submit. When they do, a pause of this rank would delay the operation.
            return 0.0
        if not awaits_others and len(self.process_sets) == 1:
            # Every operation needs all ranks, so it cannot run before this rank submits it. That ends the pause.
            return self._cycle_time_s * _MAX_UNNEEDED_CYCLES
        # The pause begins with half a cycle and doubles. The exponent is limited, so that the power cannot overflow.
        return self._cycle_time_s * min(_MAX_IDLE_CYCLES, 0.5 * 2.0 ** min(self._num_idle_cycles, 8))

    def _has_waited_as_bit(self) -> bool:
        since_s = self._agreement.unsent_since_s
        return since_s is not None and self._clock() - since_s >= _MAX_WAIT_AS_BIT_S

    def _process_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        """Run the operations that are ready, and fail this rank's submissions to refused operations."""
        operations = []
        for outcome in outcomes:
            self._timeline.agreed(outcome.key)
            # A rank that had joined has no submission for this operation. If `_in_flight` has one of the same name,
            # that belongs to a later operation.
            submission = self._in_flight.get(outcome.key) if self._transport.rank in outcome.requests else None
            if isinstance(outcome, Refused):
                if submission is not None:
                    self._fail(submission, outcome.reason)
                continue
            if self._transport.rank in outcome.members:
                operations.append((outcome, submission))
        self._activity = ", ".join(f"'{ready.key.name}'" for ready, _ in operations[:3])
        self._executor.run(operations)
        if self._tuner is not None:
            self._tuner.observe([ready.request for ready, _ in operations])

    def _watch_stalls(self) -> None:
        """Warn of operations that wait too long for some ranks, and end the job if the wait exceeds its limit."""
        stalled, failure = self._stall_watch.check(self._clock(), self._agreement.negotiation.missing_ranks())
        # One rank warns for all, because all ranks have the same state of the negotiation.
        if self._transport.rank == 0:
            for operation in stalled:
                logger.warning("%s", operation.describe())
                if (on_stall := self.on_stall) is not None:
                    on_stall(operation)
            self._stall_failure = failure

    def _succeed(self, submission: Submission, result: Result | OverflowError) -> None:
        """Finish a submission with its result, or with the error that it has none on any rank."""
        key, kind = submission.request.key, submission.request.kind
        # Remove the name first: the waiting thread may submit it again as soon as it has the result. If this rank has
        # joined, `submission` is the executor's substitute, which is not in `_in_flight`.
        with self._changed:
            if self._in_flight.get(key) is submission:
                del self._in_flight[key]
        if kind in (CollectiveKind.ADD_PROCESS_SET, CollectiveKind.REMOVE_PROCESS_SET):
            self.process_sets = dict(self._agreement.negotiation.process_sets)
        if isinstance(result, OverflowError):
            submission.handle.fail(result)
            return
        # A barrier, for example, has no tensors.
        device = submission.inputs[0].device if submission.inputs else torch.device("cpu")
        submission.handle.succeed(result, self._streams.record_end(device))

    def _fail(self, submission: Submission, reason: str) -> None:
        with self._changed:
            del self._in_flight[submission.request.key]
        submission.handle.fail(HorovodInternalError(reason))

    def _record_failure(self, failure: str) -> None:
        """Record the failure of a reduction in flight; the engine's thread then ends the job."""
        self._buffers.fail(failure)
        with self._changed:
            self._reduction_failure = failure
            self._changed.notify()

    def _raise_failure(self) -> None:
        if self._reduction_failure is not None:
            self._activity = "a reduction"
            raise RuntimeError(self._reduction_failure)

    def _choose_cuda_device(self) -> torch.device:
        """Return the CUDA device of the last submission, because torch's current device may differ in this thread."""
        return self._cuda_device or torch.device("cuda", torch.cuda.current_device())

    def _end(self, reason: str) -> None:
        """Refuse later submissions, and fail those in flight."""
        with self._changed:
            # Set under the lock: from here on `submit` raises, so that no submission is added after the copy below.
            self._end_reason = reason
            abandoned = list(self._in_flight.values())
        for submission in abandoned:
            self._fail(submission, f"{submission.request.key.describe()} did not complete: {reason}")
