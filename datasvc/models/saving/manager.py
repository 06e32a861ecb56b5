"""`CheckpointManager`: saves and restores the checkpoints of one model during a run.

A training loop calls `should_save` after each step, and `save` if it returns True. The calling thread copies the
state to host memory. A second thread, the save thread of `SaveQueue`, writes the copy while the training continues.
All ranks save together, and get the same version or the same error.
"""

from __future__ import annotations

import copy
import logging
import signal
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar, overload

from datasvc.cache import Cache
from datasvc.cache.peers.peers import Peers
from datasvc.errors import ConfigError, DatasvcError
from datasvc.models.restoring.restore import Checkpoint, restore
from datasvc.models.saving.flat_state import FlatState, flatten_state
from datasvc.models.saving.preemption import Preemption
from datasvc.models.saving.queue import OVERLAPS, SaveQueue
from datasvc.models.saving.rank_channel import describe_error, open_channels, raise_on_all_ranks
from datasvc.models.saving.recorded_data import RecordedData
from datasvc.models.saving.save_policy import SaveCost, SaveScheduler, parse_duration, parse_policy
from datasvc.models.saving.save_task import SaveHandle, SaveTask
from datasvc.models.saving.shared_plan import HeldTensor, SharedPlan, outline, plan_shared
from datasvc.models.saving.shared_store import check_same_store
from datasvc.models.saving.staging_buffer import HostBuffer, HostCopies
from datasvc.models.saving.writer import VersionWriter
from datasvc.models.tensors.write import CODECS, Codec
from datasvc.models.versions.code_revision import capture_code
from datasvc.models.versions.commit import exact_version
from datasvc.models.versions.data_use import DataUse
from datasvc.models.versions.entry_fields import read_step
from datasvc.models.versions.execution import Execution
from datasvc.models.versions.metadata import VersionMetadata, check_step
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.references import check_name, parse_reference
from datasvc.repository.objects.objects import digest_of

logger = logging.getLogger(__name__)

_Default = TypeVar("_Default")
_NO_DEFAULT: Final[Any] = object()

# One buffer is written to the store while the training fills the other.
_NUM_BUFFERS: Final = 2
FAILURES: Final = ("raise", "log")
TIMEOUT_S: Final = 600.0  # default of `CheckpointManager(timeout_s=)`


class CheckpointManager:
    """Saves and restores the versions of one model. `repo.models.manager(name)` returns a manager.

    Use it as a context manager, or call `close`. In a job of several ranks, every rank makes a manager and calls the
    same methods in the same order, `close` included.

    Args:
        repository: repository that stores the checkpoints.
        name: name of the model; the first save creates the model.
        codec: "none", "planes" or "delta", see `store_tensors`.
        every: interval between saves, for `should_save`: a number of steps, or a duration such as "10min". None: as
            often as `max_stall` allows; if `max_stall` is None too, no save becomes due.
        max_stall: largest share of the training time that saves may take, "3%" or 0.03; the next save is delayed
            until the earlier ones take no more than this share. None: no limit.
        overlap: what `save` does while earlier saves are unfinished: "queue" waits if there are two of them, "refuse"
            raises BusyError if there is one.
        failures: what `save` does with an unreported error of an earlier save: "raise" raises it, "log" logs it and
            continues. After a stop signal `save` always logs it. `wait` and `close` always raise it.
        grace: time that the run has to end after SIGTERM or Ctrl-C, such as "30s". The signal then does not end the
            process at once: the next `should_save` sets `stop_signal`. None: signal handlers are unchanged.
        group: torch.distributed group of the ranks that save together; None: the default group. Without a default
            group, this process saves alone.
        timeout_s: seconds that a rank waits for an answer of the other ranks before it abandons a save.
        cache: this node's cache, or its folder, for restores; see `restore.restore`.
        peers: other nodes to fetch from; only if `cache` is a folder.
        fallback: other repositories, or their URLs, that may have copies of objects; tried in this order.
        trusted_keys: files of public keys; a restored version must be signed by one of them. See `restore.restore`.

    Attributes:
        name: name of the model.
        stop_signal: number of the signal for which all ranks have agreed to end the run; None: continue.

    Raises:
        ConfigError: a setting is invalid; `grace` is set outside of the main thread; the ranks do not store to the
            same repository (raised on all ranks); or the store is not writable, see `Storage.check_writable`.
        UnavailableError: the ranks cannot connect, or the store does not answer.
    """

    def __init__(
        self,
        repository: Repository,
        name: str,
        *,
        codec: Codec = "delta",
        every: int | str | None = None,
        max_stall: float | str | None = None,
        overlap: str = "queue",
        failures: str = "raise",
        grace: str | None = None,
        group: Any = None,
        timeout_s: float = TIMEOUT_S,
        cache: Cache | str | Path | None = None,
        peers: Peers | None = None,
        fallback: Sequence[Repository | str] | Repository | str = (),
        trusted_keys: Sequence[str | Path] | None = None,
    ) -> None:
        self.name = check_name(name, "model")
        settings = (("codec", codec, CODECS), ("failures", failures, FAILURES), ("overlap", overlap, OVERLAPS))
        for setting, value, allowed in settings:
            if value not in allowed:
                raise ConfigError(f"{setting} is {value!r}; expected one of {', '.join(allowed)}")
        self._failures = failures
        self._repository = repository
        self._restore = partial(
            restore, repository, cache=cache, peers=peers, fallback=fallback, trusted_keys=trusted_keys
        )
        self._policy = parse_policy(every, max_stall)
        self._is_closed = False
        self._scheduler = SaveScheduler(self._policy)
        grace_s = None if grace is None else parse_duration(grace)
        # Open two channels, because the calling thread and the save thread run collectives at the same time.
        self._main_channel, self._save_channel = open_channels(group, timeout_s)
        try:
            check_same_store(self._main_channel, repository.storage)
        except BaseException:
            self._main_channel.close()
            self._save_channel.close()
            raise
        if self._main_channel.rank == 0:
            # Record the code revision now: the files may be edited before the first save is committed.
            capture_code()
        self._preemption = None if grace_s is None else Preemption(grace_s)
        self._writer = VersionWriter(repository, name, codec, self._save_channel)
        self._queue = SaveQueue(self._writer.write, limit=_NUM_BUFFERS, overlap=overlap)
        self._buffers = deque(HostBuffer() for _ in range(_NUM_BUFFERS))
        # Saves whose device copies are not yet counted in the cost, oldest first.
        self._copying: deque[SaveHandle] = deque()
        # Digests of what the ranks held when the plan of their sharded or different tensors was made, and the plan.
        self._planned: tuple[list[Any], SharedPlan] | None = None
        self._recorded_data = RecordedData()
        self._next_check = 0  # step at which the ranks next exchange messages in `should_save`
        self.stop_signal: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except DatasvcError as close_error:
            if error is None:
                raise
            logger.error("%s", close_error)  # noqa: TRY400 - the exception of the `with` block propagates

    def __repr__(self) -> str:
        return f"CheckpointManager({self.name!r}, rank {self._main_channel.rank} of {self._main_channel.size})"

    @property
    def version(self) -> Resolved | None:
        """Newest version that this manager committed or restored; None: none yet."""
        return self._writer.newest

    @property
    def cost(self) -> SaveCost:
        """Training time of this rank that saves have taken so far, as measured by `should_save` and `save`."""
        return self._scheduler.cost

    def should_save(self, step: int) -> bool:
        """Return whether to save now, the same on all ranks. Every rank calls this after each step.

        Also True after SIGTERM or Ctrl-C, if `grace` is set: `stop_signal` is then set, and the run must end.

        Raises:
            ConfigError: the ranks are at different steps.
            UnavailableError: a rank is lost.
        """
        self._count_device_copies()
        is_saving = self._queue.is_busy
        self._scheduler.end_step(is_saving=is_saving)
        # Rank 0 has computed `_next_check` for all ranks, so all of them skip the same exchanges.
        if self._main_channel.size > 1 and step < self._next_check:
            return False
        decision = self._scheduler.decide(step, is_saving=is_saving)
        signal_number = None if self._preemption is None else self._preemption.received
        answers: list[Any] = [[step, decision.is_due, decision.next_step, signal_number]]  # of each rank
        # Without a clock and signals, the decision depends only on the step number, so the ranks need no exchange.
        if self._policy.needs_clock or self._preemption is not None:
            answers = self._main_channel.exchange(answers[0])
        steps = [answer[0] for answer in answers]
        if len(set(steps)) > 1:
            raise ConfigError(f"the ranks called should_save() after different steps; by rank: {steps}")
        # Clocks differ between ranks, so all ranks use the decision of rank 0.
        _, is_due, self._next_check, _ = answers[0]
        # A signal that one rank has received stops all ranks.
        signals = [answer[3] for answer in answers if answer[3] is not None]
        self.stop_signal = signals[0] if signals else None
        return bool(is_due or signals)

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        rank_state: Mapping[str, Any] | None = None,
        data: Sequence[DataUse] | None = None,
        config: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        parent: str | None = None,
        message: str = "",
        execution: Execution | None = None,
        run: str | None = None,
        wait: bool = False,
    ) -> SaveHandle:
        """Copy a state to host memory and return; the write continues in the background. Every rank calls this.

        Later changes of the state do not affect the saved version. Of all arguments but `rank_state`, the values of
        rank 0 are saved.

        Args:
            state: state that all ranks share, a tree as for `models.save`.
            step: number of optimizer steps that produced this state.
            rank_state: state of this rank alone, such as its random state; restored as `state["rank_state"][rank]`.
            data: data consumed so far. None: what the loaders of `datasvc.loaders.torch` have handed over since this
                manager was made or restored a version.
            config: effective configuration of the run, JSON values.
            metrics: metric values by name.
            parent: version that this one continues; default: the newest that this manager committed or restored.
            message: free text for readers of the log.
            execution: how the ranks of the run compute its steps; None: not recorded.
            run: run whose log describes the training, `RunLog.ref`; None: none.
            wait: whether to return only after the commit.

        Returns:
            A handle; its `result()` waits for the version.

        Raises:
            ConfigError: a value cannot be stored (the message names it), the ranks have different tensors, or the
                manager is closed.
            NotFoundError: `parent` does not exist in its model.
            BusyError: an earlier save is running, and `overlap` is "refuse".
            DatasvcError: an earlier save failed and its error was not reported yet; see `failures`.
            UnavailableError: a rank is lost.
        """
        if self._is_closed:
            raise ConfigError(f"the manager of model {self.name!r} is closed; open it again to save")
        began_s = time.perf_counter()
        error: Exception | None = None
        metadata, flat_state = None, None
        reported: list[int] = []  # numbers of the earlier saves whose errors this call reports
        try:
            step = check_step(step)
            self._queue.check(step)
            reported, error = self._take_failure()
            if error is None:
                # Resolve a tag now: it may point at another version by the time this save is committed.
                parent = None if parent is None else exact_version(self._repository, parent)
                metadata = copy.deepcopy(
                    VersionMetadata(
                        step,
                        self._recorded_data.uses() if data is None else data,
                        config,
                        metrics,
                        parent,
                        message=message,
                        execution=execution,
                        run=run,
                    )
                )
                flat_state = flatten_state(state, rank_state, self._main_channel.rank)
        except Exception as failure:  # noqa: BLE001 - `_agree` raises it, on all ranks
            error = failure
        flat_state = self._agree(step, flat_state, reported, error)
        assert metadata is not None
        self._count_device_copies()
        try:
            handle = self._submit(metadata, flat_state, began_s)
            if wait:
                handle.result()
        finally:
            # If this save is done already, its device copies ended during this call. The time of the call, which is
            # recorded below, then includes them: do not count them twice.
            if self._copying and self._copying[-1].done():
                self._copying.clear()
            self._scheduler.record_stall(time.perf_counter() - began_s)
        return handle

    @overload
    def restore(
        self,
        ref: str | None = None,
        *,
        only: Collection[str] = (),
        exclude: Collection[str] = (),
        rename: Mapping[str, str] | None = None,
        into: Mapping[str, Any] | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> Checkpoint: ...

    @overload
    def restore(
        self,
        ref: str | None = None,
        *,
        default: _Default,
        only: Collection[str] = (),
        exclude: Collection[str] = (),
        rename: Mapping[str, str] | None = None,
        into: Mapping[str, Any] | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> Checkpoint | _Default: ...

    def restore(
        self,
        ref: str | None = None,
        *,
        default: Any = _NO_DEFAULT,
        only: Collection[str] = (),
        exclude: Collection[str] = (),
        rename: Mapping[str, str] | None = None,
        into: Mapping[str, Any] | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> Any:
        """Return a verified checkpoint, the same on every rank. Its version becomes the parent of the next save.

        Every rank calls this. It waits for running saves first: their parent is still the version from before the
        restore. For errors see `models.restore`.

        Args:
            ref: a version or tag of any model; None: the newest version of this model.
            default: value to return on all ranks if the model has no version at all. If only the version of `ref` is
                missing, NotFoundError is raised even with a default.
            only: see `models.restore`.
            exclude: see `models.restore`.
            rename: see `models.restore`.
            into: see `models.restore`; each rank passes the state that it holds, as for `save`.
            progress: see `models.restore`.
        """
        self._queue.finish()
        error: Exception | None = None
        version, checkpoint = None, None
        try:
            if self._main_channel.rank == 0:
                # Rank 0 resolves the reference for all ranks, because a tag may be moved between two look-ups.
                name = parse_reference(ref or self.name, "model").name
                if default is _NO_DEFAULT or self._repository.newest("models", name) is not None:
                    version = str(self._repository.resolve("models", ref or self.name))
        except Exception as failure:
            if self._main_channel.size == 1:
                raise  # with its original type and traceback
            error = failure
        answers = self._main_channel.exchange([describe_error(error), version])
        raise_on_all_ranks([answer[0] for answer in answers], error)
        resolved = answers[0][1]
        if resolved is None:
            return default
        try:
            checkpoint = self._restore(
                resolved, only=only, exclude=exclude, rename=rename, into=into, progress=progress
            )
        except Exception as failure:
            if self._main_channel.size == 1:
                raise
            error = failure
        raise_on_all_ranks(self._main_channel.exchange(describe_error(error)), error)
        assert checkpoint is not None
        self._writer.newest = checkpoint.version
        self._recorded_data = RecordedData(read_step(checkpoint.entry, checkpoint.version))
        return checkpoint

    def newest_step(self) -> int | None:
        """Return the step of the newest version in the repository, None if the model has no version.

        Not a collective: a single rank may call this.

        Raises:
            CorruptDataError, UnavailableError: see `Log.read`.
        """
        newest = self._repository.newest("models", self.name)
        return None if newest is None else read_step(self._repository.entry(newest).content, newest)

    def wait(self) -> None:
        """Wait for all saves. Raises DatasvcError: a save failed and its error was not reported yet."""
        self._queue.wait()

    def close(self) -> None:
        """Wait for all saves, then release signal handlers, memory and connections to the other ranks.

        After a stop signal the wait ends with the grace period. A signal that `should_save` has not reported is
        raised again, so that the handler that was installed before this manager receives it.

        Raises:
            DatasvcError: a save failed and its error was not reported yet.
            UnavailableError: a save has not ended within the grace period; it continues until the process exits.
        """
        preemption = self._preemption
        try:
            self._queue.wait(None if preemption is None or preemption.received is None else preemption.remaining_s)
        finally:
            # A save that continues still needs the channels and the buffers.
            if not self._queue.is_busy:
                self._release()

    def _release(self) -> None:
        self._is_closed = True
        self._main_channel.close()
        self._save_channel.close()
        self._writer.release_copies()
        for buffer in self._buffers:
            buffer.release()
        if self._preemption is not None:
            self._preemption.close()
            received, self._preemption = self._preemption.received, None
            # `should_save` has not reported this signal, so the run has not acted on it.
            if received is not None and self.stop_signal is None:
                signal.raise_signal(received)

    def _agree(
        self, step: int, flat_state: FlatState | None, reported: list[int], error: Exception | None
    ) -> FlatState:
        """Check that no rank has an error, and that all ranks save the same step; return the state with its plan.

        `reported`: numbers of the earlier saves whose errors this rank reports in this call. For errors see `save`.
        """
        channel = self._main_channel
        if channel.size == 1:
            if error is not None:
                raise error
            assert flat_state is not None
            if not flat_state.parts:
                return flat_state
        # What a rank holds is a long text, so send its digest; send the text only if the ranks hold different things.
        digests = [] if flat_state is None else [digest_of(text.encode()) for text in flat_state.descriptions]
        # A rank with an error takes part too: otherwise the other ranks would wait for it.
        answers = channel.exchange([describe_error(error), None if error else step, digests, reported])
        # A save fails on all ranks. If one rank reports the error, the others must not report it again.
        self._queue.mark_reported({number for answer in answers for number in answer[3]})
        raise_on_all_ranks([answer[0] for answer in answers], error)
        if len({answer[1] for answer in answers}) > 1:
            raise ConfigError(f"the ranks save different steps; by rank: {[answer[1] for answer in answers]}")
        assert flat_state is not None
        digests_by_rank = [answer[2] for answer in answers]
        if not flat_state.parts and all(digests == digests_by_rank[0] for digests in digests_by_rank):
            return flat_state
        # Sharded tensors, or ranks with different tensors. Both stay the same during a run, and so does the plan.
        if self._planned is None or self._planned[0] != digests_by_rank:
            described = channel.exchange([flat_state.held, outline(flat_state.skeleton)])
            held = [
                {name: HeldTensor.from_json(tensor) for name, tensor in tensors.items()} for tensors, _ in described
            ]
            self._planned = digests_by_rank, plan_shared(held, [skeleton for _, skeleton in described])
        return replace(flat_state, plan=self._planned[1])

    def _submit(self, metadata: VersionMetadata, flat_state: FlatState, began_s: float) -> SaveHandle:
        """Copy the state, and queue the write. If the copy fails or is interrupted, queue a save that fails."""
        handle = SaveHandle(metadata.step)
        buffer, next_buffer = self._buffers
        copies: HostCopies | Exception
        try:
            # After this wait, fewer saves are unfinished than there are buffers. The buffers are used in turn, so no
            # save uses `buffer`.
            self._queue.wait_for_slot()
            self._buffers.rotate()
            try:
                copies = buffer.copy(flat_state.all_tensors)
            except Exception as failure:  # noqa: BLE001 - the save thread raises it, on all ranks
                copies = failure
        except BaseException as failure:
            # For example Ctrl-C. The other ranks queue this save, and would wait for this rank. So `finally` queues
            # it too, as a save that fails on all ranks. On this rank, this exception already reports the failure.
            copies = DatasvcError(f"the save of step {metadata.step} was interrupted: {failure!r}")
            handle.mark_reported()
            raise
        finally:
            handle.stall_s = time.perf_counter() - began_s
            self._copying.append(handle)
            self._queue.submit(SaveTask(handle, metadata, flat_state, copies, buffer, next_buffer, began_s))
        return handle

    def _count_device_copies(self) -> None:
        """Add the device copies that have ended since the last call to the cost of saving."""
        while self._copying and (self._copying[0].device_s is not None or self._copying[0].done()):
            self._scheduler.record_device_copy(self._copying.popleft().device_s or 0.0)

    def _take_failure(self) -> tuple[list[int], DatasvcError | None]:
        """Report the errors of earlier saves: log each, or return the first, which the caller raises.

        Returns:
            The numbers of the saves whose errors are reported, and the error to raise; None: there is none to raise.
        """
        reported = []
        while (failure := self._queue.take_unreported_failure()) is not None:
            number, error = failure
            reported.append(number)
            if self._failures == "raise" and self.stop_signal is None:
                return reported, error
            logger.error("%s", error)
        return reported, None
