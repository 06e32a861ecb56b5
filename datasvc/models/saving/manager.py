"""A model that a run saves: in the background, by all its ranks together, as often as it may, to the last moment."""

from __future__ import annotations

import copy
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from datasvc.errors import ConfigError, DatasvcError, NotFoundError
from datasvc.models.restoring.checkpoint import Checkpoint, restore
from datasvc.models.saving.flat_state import FlatState, describe_mismatch, flatten_state
from datasvc.models.saving.preemption import Preemption
from datasvc.models.saving.queue import SaveHandle, Saver
from datasvc.models.saving.rank_channel import describe_error, open_channels, raise_on_all_ranks
from datasvc.models.saving.save_policy import Cadence, SaveCost, parse_duration, parse_pace
from datasvc.models.saving.shared_store import check_same_store
from datasvc.models.saving.staging_buffer import HostBuffer, HostCopies
from datasvc.models.saving.writer import VersionWriter
from datasvc.models.tensors.write import CODECS, Codec
from datasvc.models.versions.code_revision import capture_code
from datasvc.models.versions.commit import exact_version
from datasvc.models.versions.data_use import DataUse
from datasvc.models.versions.metadata import VersionMetadata, check_step
from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.references import check_name

logger = logging.getLogger(__name__)

_NUM_BUFFERS: Final = 2
FAILURES: Final = ("raise", "log")
TIMEOUT_S: Final = 600.0


class CheckpointManager:
    """A model of a repository, open for saving. Made by `datasvc.open(url).model(name)`; a context that closes it.

    In a job of several ranks every rank makes one and calls the same methods in the same order, `close` included.

    Args:
        repository: where to.
        name: of the model, made when new.
        codec: "none", "planes" or "delta", see `store_tensors`.
        every: what `should_save` goes by: a number of steps, or a duration, "10min"; None: see `max_stall`.
        max_stall: share of the training's time that saves may take, "3%" or 0.03: they are spaced out until it is
            kept. Without `every`, `should_save` says yes as often as that allows. None: any share.
        overlap: what a save does while others are under way: "queue" waits for room once two are, "refuse" raises.
        failures: what a save does where an earlier one failed and nobody was told: "raise" that, or "log" it and go
            on, as it does in any case once the run is to end. `wait` and `close` raise it.
        grace: takes SIGTERM and Ctrl-C, and is the time in which the run may end after one, "30s"; see `stop_signal`.
            None: signals do what they did.
        group: of torch.distributed, whose ranks save together; None: all of them, where it is set up.
        timeout_s: how long a rank may be silent before the others give up a save.
        restoring: reads a checkpoint by its reference, with the options of `CheckpointManager.restore`; the default
            reads from the repository only.

    Attributes:
        name: of the model.
        stop_signal: number of the signal that all ranks have agreed to end for; None: go on.

    Raises:
        ConfigError: a setting means nothing; or a `grace` outside the main thread; or the ranks do not store to one
            place, which all of them learn here; or the store cannot be written, see `Storage.check_writable`.
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
        restoring: Callable[..., Checkpoint] | None = None,
    ) -> None:
        self.name = check_name(name, "model")
        if codec not in CODECS:
            raise ConfigError(f"there is no codec {codec!r}; there are {', '.join(CODECS)}")
        if failures not in FAILURES:
            raise ConfigError(f"failures is {failures!r}; expected one of {', '.join(FAILURES)}")
        self._failures = failures
        self._repository = repository
        self._restore = restoring or partial(restore, repository)
        self._pace = parse_pace(every, max_stall)
        self._is_closed = False
        self._cadence = Cadence(self._pace)
        self._saver = Saver(limit=_NUM_BUFFERS, overlap=overlap)
        grace_s = None if grace is None else parse_duration(grace)
        self._front, self._back = open_channels(group, timeout_s)
        try:
            check_same_store(self._front, repository.storage)
        except BaseException:
            self._front.close()
            self._back.close()
            raise
        if self._front.rank == 0:
            capture_code()  # what runs, not what lies there when the first save is committed
        self._preemption = None if grace_s is None else Preemption(grace_s)
        self._writer = VersionWriter(repository, name, codec, self._back)
        self._buffers = deque(HostBuffer() for _ in range(_NUM_BUFFERS))
        self._device_stalls_s: deque[float] = deque()
        self._next_look = 0
        self.stop_signal: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except DatasvcError as own:
            if error is None:
                raise
            logger.error("%s", own)  # noqa: TRY400 - what was raised first goes on

    def __repr__(self) -> str:
        return f"Model({self.name!r}, rank {self._front.rank} of {self._front.size})"

    @property
    def version(self) -> Resolved | None:
        """Newest version that this object committed or restored; None: none yet."""
        return self._writer.newest

    @property
    def cost(self) -> SaveCost:
        """What saves have cost this rank's training so far, as `should_save` and `save` saw it."""
        return self._cadence.cost

    def should_save(self, step: int) -> bool:
        """Return whether to save now, the same on all ranks. Every rank calls this after each step.

        Also when the run is to end: `stop_signal` says so from then on.

        Raises:
            ConfigError: ranks are at different steps.
            UnavailableError: a rank is lost.
        """
        self._count_device_copies()
        is_saving = self._saver.is_busy
        self._cadence.ended_step(is_saving=is_saving)
        if self._front.size > 1 and step < self._next_look:
            return False
        look = self._cadence.look(step, is_saving=is_saving)
        received = None if self._preemption is None else self._preemption.received
        answers: list[Any] = [[step, look.is_due, look.next_step, received]]
        # By steps alone all ranks come to the same without a word.
        if self._pace.needs_clock or self._preemption is not None:
            answers = self._front.exchange(answers[0])
        steps = [answer[0] for answer in answers]
        if len(set(steps)) > 1:
            raise ConfigError(f"the ranks asked whether to save after different steps; by rank: {steps}")
        _, is_due, self._next_look, _ = answers[0]
        signals = [answer[3] for answer in answers if answer[3] is not None]
        self.stop_signal = signals[0] if signals else None
        return bool(is_due or signals)

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        rank_state: Mapping[str, Any] | None = None,
        data: Sequence[DataUse] = (),
        config: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        parent: str | None = None,
        message: str = "",
        wait: bool = False,
    ) -> SaveHandle:
        """Copy a state to the host, and return; the rest happens in the background. Every rank calls this.

        Nothing that changes afterwards reaches what is saved.

        Args:
            state: what all ranks have alike: a tree as `models.save` takes it. Where tensors differ all the same, and
                in all that is no tensor, rank 0's counts.
            step: optimizer steps behind this state.
            rank_state: what is this rank's own, such as its random state; comes back as `state["rank_state"][rank]`.
            data: what was consumed so far; rank 0's counts, as of all that follows.
            config: effective configuration of the run, JSON values.
            metrics: numbers by name.
            parent: version that this one continues, default the newest that this object committed or restored.
            message: for people.
            wait: return once it is committed.

        Returns:
            The handle; its `result()` waits for the version.

        Raises:
            ConfigError: a value cannot be stored, or ranks have different tensors; names it. Or this is closed.
            NotFoundError: `parent` is no version of its model.
            BusyError: an earlier save goes on, and overlap is refused.
            DatasvcError: an earlier save failed, and nobody was told; see `failures`.
            UnavailableError: a rank is lost.
        """
        if self._is_closed:
            raise ConfigError(f"model {self.name!r} is closed; open it again to save")
        began_s = time.perf_counter()
        about, content = self._agree(
            lambda: copy.deepcopy(
                # What a tag means now: it may have moved by the time this is committed.
                VersionMetadata(step, data, config, metrics, exact_version(self._repository, parent), message=message)
            ),
            lambda: flatten_state(state, rank_state, self._front.rank),
            step=step,
        )
        handle = SaveHandle(about.step)
        self._count_device_copies()
        try:
            self._submit(handle, about, content, began_s)
            if wait:
                handle.result()
        finally:
            # What the call took, not what the handle says: a save may have been waited for, or no thread was left.
            if handle.done():
                self._device_stalls_s.clear()  # devices copied while the training was stopped anyway
            self._cadence.stalled(time.perf_counter() - began_s)
        return handle

    def restore(self, ref: str | None = None, **how: Any) -> Checkpoint:
        """Return a checkpoint, every byte verified, the same on every rank; what is saved next continues it.

        Saves that are under way are waited for: they continue what was there when they were asked for.

        Args:
            ref: a version or tag of any model, "digits-cnn@3"; None: the newest of this one.
            **how: options of the restore beside those that the model was opened with, such as `report`, which is told
                of progress; see `restore.restore`.

        Raises:
            ConfigError, NotFoundError, UnavailableError: see `Repository.resolve`.
            CorruptDataError: an entry, the state or a tensor was changed; names it.
        """
        self._saver.finish()
        error: Exception | None = None
        version, checkpoint = None, None
        try:
            if self._front.rank == 0:
                version = str(self._repository.resolve("models", ref or self.name))
        except Exception as failure:
            if self._front.size == 1:
                raise
            error = failure
        answers = self._front.exchange([describe_error(error), version])
        raise_on_all_ranks([answer[0] for answer in answers], error)
        try:
            checkpoint = self._restore(answers[0][1], **how)
        except Exception as failure:
            if self._front.size == 1:
                raise
            error = failure
        raise_on_all_ranks(self._front.exchange(describe_error(error)), error)
        assert checkpoint is not None
        self._writer.newest = checkpoint.version
        return checkpoint

    def newest_step(self) -> int | None:
        """Return the step of the newest version in the repository, None where there is none. One rank may ask alone.

        Raises:
            CorruptDataError, UnavailableError: see `Log.read`.
        """
        try:
            newest = self._repository.resolve("models", self.name)
        except NotFoundError:
            return None
        return int(self._repository.entry(newest).content["step"])

    def wait(self) -> None:
        """Wait for all saves. Raises DatasvcError: one failed, and nobody was told."""
        self._saver.wait()

    def close(self) -> None:
        """Wait for all saves; let go of signals, memory and the other ranks. After a signal, within the grace.

        A signal that no `should_save` has told of does then what it would have done.

        Raises:
            DatasvcError: a save failed, and nobody was told.
            UnavailableError: a save has not ended within the grace; it goes on until the process ends.
        """
        is_ending = self._preemption is not None and self._preemption.received is not None
        try:
            self._saver.wait(self._preemption.left_s if is_ending and self._preemption is not None else None)
        finally:
            if not self._saver.is_busy:
                self._let_go()

    def _let_go(self) -> None:
        self._is_closed = True
        self._front.close()
        self._back.close()
        self._writer.forget_copies()
        for buffer in self._buffers:
            buffer.release()
        if self._preemption is not None:
            self._preemption.close()
            received, self._preemption = self._preemption.received, None
            if received is not None and self.stop_signal is None:
                signal.raise_signal(received)

    def _agree(
        self, describe: Callable[[], VersionMetadata], take: Callable[[], FlatState], *, step: int
    ) -> tuple[VersionMetadata, FlatState]:
        """Return what is to be saved, once it is certain that all ranks save, and the same. Raises as `save`."""
        error, about, content = None, None, None
        told: list[int] = []
        try:
            step = check_step(step)
            self._saver.check(step)
            self._tell(told)
            about, content = describe(), take()
        except Exception as failure:
            if self._front.size == 1:
                raise
            error = failure
        if self._front.size > 1:
            digest = None if content is None else content.form_digest
            answers = self._front.exchange([describe_error(error), None if error else step, digest, told])
            self._saver.mark_told({number for answer in answers for number in answer[3]})
            raise_on_all_ranks([answer[0] for answer in answers], error)
            if len({answer[1] for answer in answers}) > 1:
                raise ConfigError(f"the ranks save different steps; by rank: {[answer[1] for answer in answers]}")
            assert content is not None
            if len({answer[2] for answer in answers}) > 1:
                raise ConfigError(describe_mismatch(self._front.exchange(content.form)))
        assert about is not None
        assert content is not None
        return about, content

    def _submit(self, handle: SaveHandle, about: VersionMetadata, content: FlatState, began_s: float) -> None:
        """Copy, and leave the rest to the thread that saves; a save that is interrupted fails there."""
        try:
            self._saver.wait_for_room()
            copied = self._copy(content)
        except BaseException as failure:
            # The others are saving by now: their threads hear from this rank's that it does not.
            copied = _failing(DatasvcError(f"the save of step {about.step} was interrupted: {failure!r}"))
            handle.mark_told()
            raise
        finally:
            handle.stall_s = time.perf_counter() - began_s
            self._saver.submit(
                handle,
                lambda: self._writer.write(content, copied, about, handle, self._device_stalls_s.append, began_s),
            )

    def _count_device_copies(self) -> None:
        while self._device_stalls_s:
            self._cadence.spent(self._device_stalls_s.popleft())

    def _tell(self, told: list[int]) -> None:
        """Raise why an earlier save failed, or log it where the run goes on; adds to `told` which saves these are."""
        while (failure := self._saver.take_failure()) is not None:
            number, error = failure
            told.append(number)
            if self._failures == "raise" and self.stop_signal is None:
                raise error
            logger.error("%s", error)

    def _copy(self, content: FlatState) -> Callable[[], HostCopies]:
        """Copy the tensors; returns what gives the copies, or raises in the background, where all ranks hear it."""
        buffer, other = self._buffers
        self._buffers.rotate()
        try:
            copies = buffer.copy(content.all_tensors)
        except Exception as failure:  # noqa: BLE001 - raised by the one that is returned
            return _failing(failure)

        def give() -> HostCopies:
            # The next save is stopped for less if it finds memory that was touched; without, it says what is missing.
            with suppress(ConfigError):
                other.reserve_like(buffer)
            return copies

        return give


def _failing(error: Exception) -> Callable[[], HostCopies]:
    def fail() -> HostCopies:
        raise error

    return fail
