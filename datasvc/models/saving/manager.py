"""`CheckpointManager`: saves and restores the checkpoints of one model during a run.

The calling thread copies the state to host memory. The save thread of `SaveQueue` writes the copy while the training
continues; with `local`, a third thread writes it to the disks of the nodes (`nodes.local_tier`).
"""

from __future__ import annotations

import copy
import logging
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, TypeVar, overload

from datasvc.cache import Cache
from datasvc.cache.peers.peers import Peers
from datasvc.errors import ConfigError, DatasvcError, UnavailableError
from datasvc.models.local.local_saves import LocalSaves, SaveTo, check_local, check_target
from datasvc.models.local.restore_choice import NodeBranch, RepositoryHead
from datasvc.models.restoring.restore import Checkpoint, IntoState, restore
from datasvc.models.saving.flat_state import FlatState, flatten_state
from datasvc.models.saving.nodes.local_restore import LocalRestore
from datasvc.models.saving.nodes.local_tier import LocalTier
from datasvc.models.saving.nodes.promotion import promote_newest
from datasvc.models.saving.preemption import Preemption
from datasvc.models.saving.queue import OVERLAPS, SaveHandle, SaveQueue
from datasvc.models.saving.rank_channel import describe_error, open_channels, raise_on_all_ranks
from datasvc.models.saving.save_agreement import DueSaves, SaveAgreement, look_up
from datasvc.models.saving.save_policy import SaveCost, SaveScheduler, parse_duration, parse_policy
from datasvc.models.saving.shared_store import check_same_store
from datasvc.models.saving.writer import NUM_BUFFERS, RepositorySaves, VersionWriter
from datasvc.models.tensors.write import CODECS, Codec
from datasvc.models.versions.architecture import Architecture
from datasvc.models.versions.code_revision import capture_code
from datasvc.models.versions.commit import exact_version
from datasvc.models.versions.data_use import DataUse, RecordedData
from datasvc.models.versions.entry_fields import read_step
from datasvc.models.versions.metadata import Execution, VersionMetadata, check_step
from datasvc.models.versions.signing import trusted_keys as load_trusted_keys
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.references import check_name, parse_reference

logger = logging.getLogger(__name__)

_Default = TypeVar("_Default")
_NO_DEFAULT: Final[Any] = object()

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
        cache: for restores, as `peers`, `fallback` and `trusted_keys`; see `restore.restore`.
        peers: see `restore.restore`.
        fallback: see `restore.restore`.
        trusted_keys: see `restore.restore`.
        local: folder on a disk of each node, or `LocalSaves`: each save writes a version there too, and `restore`
            without a reference takes the newest one, if the repository has none with more steps. A failed save there
            is logged; `close` raises an error if the last one failed. One job at a time uses a folder for a model.
        every_local: number of steps between two saves to the nodes, for `should_save`; only with `local`. Without
            `every` and `max_stall`, such a save is one to the repository too whenever none is being written there.

    Attributes:
        name: name of the model.

    Raises:
        ConfigError: a setting is invalid; `grace` is set outside of the main thread; the ranks do not store to the
            same repository (raised on all ranks); or the store is not writable, see `Storage.check_writable`.
        BusyError: another job uses the folder of `local` on a node.
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
        local: LocalSaves | str | Path | None = None,
        every_local: int | None = None,
    ) -> None:
        self.name = check_name(name, "model")
        settings = (("codec", codec, CODECS), ("failures", failures, FAILURES), ("overlap", overlap, OVERLAPS))
        for setting, value, allowed in settings:
            if value not in allowed:
                raise ConfigError(f"{setting} is {value!r}; expected one of {', '.join(allowed)}")
        check_local(local, every_local, is_trusted_only=local is not None and bool(load_trusted_keys(trusted_keys)))
        self._repository, self._failures = repository, failures
        self._restore = partial(
            restore, repository, cache=cache, peers=peers, fallback=fallback, trusted_keys=trusted_keys
        )
        policy = parse_policy(every, max_stall)
        self._is_closed = False
        self._scheduler = SaveScheduler(policy)
        grace_s = None if grace is None else parse_duration(grace)
        with ExitStack() as opened:  # closed if this manager cannot be made
            # One channel for each thread that runs collectives: the calling thread, and those of the saves.
            channels = open_channels(group, timeout_s, 2 if local is None else 3)
            for channel in channels:
                opened.callback(channel.close)
            self._main_channel, self._save_channel = channels[:2]
            is_store_checked = check_same_store(self._main_channel, repository.storage, is_needed=local is None)
            self._local: LocalTier | None = None
            if local is not None:
                saves = local if isinstance(local, LocalSaves) else LocalSaves(local)
                self._local = LocalTier(saves, name, channels[2], every=every_local)
                opened.callback(self._local.close)
            self._look_up = partial(look_up, self._main_channel, repository, name)
            if self._main_channel.rank == 0:
                # Now, because files may be edited before the first commit.
                capture_code()
            self._preemption = None if grace_s is None else Preemption(grace_s)
            opened.pop_all()
        self._due = DueSaves(self._main_channel, self._scheduler, self._preemption, needs_clock=policy.needs_clock)
        self._pushes_when_idle = every_local is not None and every is None and max_stall is None
        self._writer = VersionWriter(repository, name, codec, self._save_channel, is_store_checked=is_store_checked)
        self._queue = SaveQueue(self._writer.write, limit=NUM_BUFFERS, overlap=overlap)
        self._saves = RepositorySaves(self._writer, self._queue, self._scheduler, self._local)
        self._agreement = SaveAgreement(self._main_channel, self._queue.mark_reported)
        self._recorded_data = RecordedData()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            # After an error, ranks may have ended, so what needs all of them is left out.
            self._close(promotes=error is None)
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
    def has_nodes(self) -> bool:
        """Whether `local` is set."""
        return self._local is not None

    @property
    def stop_signal(self) -> int | None:
        """Number of the signal for which all ranks have agreed to end the run; None: continue."""
        return self._due.stop_signal

    @property
    def cost(self) -> SaveCost:
        """Training time of this rank that saves have taken so far, as measured by `should_save` and `save`."""
        return self._scheduler.cost

    def should_save(self, step: int, *, since: int | None = None) -> SaveTo:
        """Return where to save now, the same on all ranks; false: nowhere. Every rank calls this once after a step.

        A second call with a step, or one with an earlier step, counts as a run that has gone back: it is due again.

        With `local`, pass the result on: `if to := manager.should_save(step): manager.save(state, step=step, to=to)`.
        After SIGTERM or Ctrl-C, if `grace` is set, the result is `SaveTo.REPOSITORY`: `stop_signal` is then set, and
        the run must end.

        Args:
            step: number of optimizer steps of the run.
            since: number of them before the first call, in a run that does not call this after each step; default:
                one less than `step`. A save that was due in the skipped steps is due now.

        Raises:
            ConfigError: the ranks are at different steps.
            UnavailableError: a rank is lost.
        """
        is_local_due = self._local is not None and self._local.is_due(step, since=since)
        self._saves.count_device_copies()
        if_idle = is_local_due and self._pushes_when_idle
        if self._due.decide(step, is_saving=self._queue.is_busy, if_idle=if_idle, since=since):
            return SaveTo.REPOSITORY
        return SaveTo.NODES if is_local_due else SaveTo.NOWHERE

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
        architecture: Architecture | None = None,
        to: SaveTo | str = SaveTo.REPOSITORY,
        wait: bool = False,
    ) -> SaveHandle:
        """Copy a state to host memory and return; the write continues in the background. Every rank calls this.

        Of all arguments but `rank_state`, the values of rank 0 are saved.

        Args:
            state: state that all ranks share, a tree as for `models.save`.
            step: number of optimizer steps that produced this state.
            rank_state: state of this rank alone, such as its random state; restored as `state["rank_state"][rank]`.
            data: data consumed so far. None: what the loaders of `datasvc.loaders.torch` have handed over since this
                manager was made or restored a version.
            config: effective configuration of the run; see `versions.metadata.json_form` for what is stored of it.
            metrics: metric values by name.
            parent: version that this one continues; default: the newest that this manager committed or restored.
            message: free text for readers of the log.
            execution: how the ranks of the run compute its steps.
            run: run whose log describes the training, `RunLog.ref`.
            architecture: counts of modules and operators, from `describe_architecture`.
            to: the result of `should_save`, or "repository" or "nodes". With `local`, a save to the repository is
                written to the nodes too.
            wait: whether to return only after the commit.

        Returns:
            A handle; its `result()` waits for the version. With `to="nodes"` it is a `LocalVersion`.

        Raises:
            ConfigError: a value cannot be stored, the ranks have different tensors, or the manager is closed.
            NotFoundError: `parent` does not exist in its model.
            BusyError: an earlier save is running, and `overlap` is "refuse".
            DatasvcError: an earlier save failed and its error was not reported yet; see `failures`.
            UnavailableError: a rank is lost.
        """
        if self._is_closed:
            raise ConfigError(f"the manager of model {self.name!r} is closed; open it again to save")
        if self._local is not None and self._local.branch is None:
            # Nothing was restored: what other jobs have left on the nodes is not continued.
            self._local.begin_branch(self._look_up(None, has_default=True).head)
        began_s = time.perf_counter()
        described = {
            "data": data, "config": config, "metrics": metrics, "parent": parent, "message": message,
            "execution": execution, "run": run, "architecture": architecture,
        }  # fmt: skip
        metadata, flat_state = self._agree_on_save(state, rank_state, step, to, described)
        if to == SaveTo.REPOSITORY:
            return self._saves.save(metadata, flat_state, began_s, wait=wait)
        assert self._local is not None
        handle = self._local.submit(self._writer.with_parent(metadata), flat_state, began_s)
        self._scheduler.record_local_stall(time.perf_counter() - began_s)
        if wait:
            handle.result()
        return handle

    def _agree_on_save(
        self,
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any] | None,
        step: int,
        to: SaveTo | str,
        described: dict[str, Any],
    ) -> tuple[VersionMetadata, FlatState]:
        """Check what this rank saves, and agree on it with the others. Any rank's error is raised on all ranks."""
        error: Exception | None = None
        metadata, flat_state = None, None
        reported: list[int] = []  # numbers of the earlier saves whose errors this call reports
        try:
            step = check_step(step)
            to = check_target(to, has_nodes=self._local is not None)
            if to is SaveTo.REPOSITORY:
                self._queue.check(step)
            reported, error = self._queue.report_failures(to_raise=self._failures == "raise" and not self.stop_signal)
            if error is None:
                if described["data"] is None:
                    described["data"] = self._recorded_data.uses()
                # Resolve a tag now: it may point at another version by the time this save is committed.
                if described["parent"] is not None:
                    described["parent"] = exact_version(self._repository, described["parent"])
                # Copy: the caller may change the values before the save thread writes them.
                metadata = copy.deepcopy(VersionMetadata(step, **described))
                flat_state = flatten_state(state, rank_state, self._main_channel.rank)
        except Exception as failure:  # noqa: BLE001 - `agree` raises it, on all ranks
            error = failure
        flat_state = self._agreement.agree(step, to, flat_state, reported, error)
        assert metadata is not None
        return metadata, flat_state

    @overload
    def restore(
        self,
        ref: str | None = None,
        *,
        only: Collection[str] = (),
        exclude: Collection[str] = (),
        rename: Mapping[str, str] | None = None,
        into: IntoState | None = None,
        strict: bool = True,
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
        into: IntoState | None = None,
        strict: bool = True,
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
        into: IntoState | None = None,
        strict: bool = True,
        progress: Progress = NO_PROGRESS,
    ) -> Any:
        """Return a verified checkpoint, the same on every rank. Its version becomes the parent of the next save.

        Every rank calls this; it waits for running saves first. For errors see `models.restore`.
        With `local` and without `ref`, the checkpoint may be a `LocalVersion`; the version of the repository that it
        continues becomes the parent. If the nodes have lost a part of their newest version, an older one is restored,
        of the nodes or the repository, and `Checkpoint.report.lost_steps` has the steps lost. After a restore with
        `ref`, or of a version of the repository, later restores return nothing older of the nodes.

        Args:
            ref: a version or tag of any model; None: the newest version of this model.
            default: value to return on all ranks if the model has no version at all. It replaces no error: neither
                that of a missing `ref`, nor that of nodes with only a part of a version.
            only: see `models.restore`.
            exclude: see `models.restore`.
            rename: see `models.restore`.
            into: see `models.restore`; each rank passes the state that it holds, as for `save`.
            strict: see `models.restore`.
            progress: see `models.restore`.
        """
        self._queue.finish()
        options: dict[str, Any] = {
            "only": only, "exclude": exclude, "rename": rename, "into": into, "strict": strict, "progress": progress
        }  # fmt: skip
        error, version, head = self._look_up(ref, has_default=default is not _NO_DEFAULT)
        lost_steps = 0
        if self._local is not None and ref is None:
            found = LocalRestore(self._local).restore_newest(head, error, options)
            if found.checkpoint is not None:
                self._continue_local(self._local.branch, found.checkpoint, head)
                return found.checkpoint
            lost_steps = found.choice.lost_steps
        if error is not None:
            raise error
        checkpoint, failure = None, None
        if version is not None:
            try:
                checkpoint = self._restore(version, **options)
            except Exception as own_failure:
                if self._main_channel.size == 1:
                    raise
                failure = own_failure
            raise_on_all_ranks(self._main_channel.exchange(describe_error(failure)), failure)
        if self._local is not None:
            self._local.begin_branch(head)  # what is on the nodes is left
        if checkpoint is None:
            return default
        step = read_step(checkpoint.entry, checkpoint.version)
        self._writer.set_newest(checkpoint.version, step)
        self._recorded_data = RecordedData(step)
        return replace(checkpoint, report=replace(checkpoint.report, lost_steps=lost_steps))

    def _continue_local(self, branch: NodeBranch | None, checkpoint: Checkpoint, head: RepositoryHead | None) -> None:
        """Make the next version of the repository continue the one that a version on the nodes continues."""
        # The next version has consumed all since then: a version that only the nodes have is no part of the history.
        assert branch is not None
        parent = parse_reference(checkpoint.entry["parent"] or self.name, "model")
        name, number, step = parent.name, parent.version, -1
        if head is not None and head.branch == branch.id:
            # The branch has committed this since, while the version was saved to the nodes.
            name, number, step = self.name, head.number, head.step
        self._writer.set_newest(Resolved("models", name, number) if number else None, step)
        uses = map(DataUse.from_dict, checkpoint.entry["data"])
        self._recorded_data = RecordedData(read_step(checkpoint.entry, checkpoint.version), earlier=tuple(uses))

    def newest_step(self) -> int | None:
        """Return the step of the newest version in the repository, None without one. A single rank may call this.

        Raises CorruptDataError or UnavailableError: see `Log.read`.
        """
        newest = self._repository.newest("models", self.name)
        return None if newest is None else read_step(self._repository.entry(newest).content, newest)

    def wait(self) -> None:
        """Wait for all saves. Raises DatasvcError: a save to the repository failed and was not reported yet."""
        if self._local is not None:
            self._local.finish()
        self._queue.wait()

    def close(self) -> None:
        """Wait for all saves, then release signal handlers, memory and connections to the other ranks.

        If the newest version of this manager is on the nodes only, it is committed to the repository first. (If an
        exception ends the `with` block, it is not, and stays on the nodes for the next run.)

        After a stop signal the wait ends with the grace period; if none of it is left, the newest version stays on
        the nodes, with a warning. A signal that `should_save` has not reported goes to the earlier handler.

        Raises:
            DatasvcError: a save failed and its error was not reported yet; or the newest version is on the nodes
                only and cannot be committed to the repository; or the last save to the nodes failed.
            UnavailableError: a save has not ended within the grace period; it continues until the process exits.
        """
        self._close(promotes=True)

    def _close(self, *, promotes: bool) -> None:
        local = self._local
        try:
            try:
                has_ended = local is None or local.finish(self._limit_s)
                self._queue.wait(self._limit_s)
                if not has_ended:
                    raise UnavailableError(
                        f"a save of {self.name!r} to the nodes has not ended within the grace period, and continues"
                    )
            finally:
                # Also after a failed save: the nodes may have what it did not commit.
                if local is not None and not self._is_closed:
                    promote_newest(local, self._writer, is_allowed=promotes and self._agree_to_promote(local))
        finally:
            # A save that continues needs the channels and the buffers; one to the nodes has those of `_saves`.
            if local is None or not local.is_busy:
                if local is not None:
                    local.close()
                if not self._queue.is_busy:
                    self._release()

    @property
    def _limit_s(self) -> float | None:
        """Seconds that `close` may still wait; None: no limit, because no signal was received."""
        preemption = self._preemption
        return None if preemption is None or preemption.received is None else preemption.remaining_s

    def _agree_to_promote(self, local: LocalTier) -> bool:
        """Return whether all ranks have ended their saves, and have time left; the same on all."""
        if self._preemption is None:
            return True  # the saves had no limit
        return all(self._main_channel.exchange(not self._queue.is_busy and not local.is_busy and self._limit_s != 0))

    def _release(self) -> None:
        self._is_closed = True
        self._main_channel.close()
        self._save_channel.close()
        self._writer.release_copies()
        self._saves.release()
        if self._preemption is not None:
            self._preemption.close()
            received, self._preemption = self._preemption.received, None
            # `should_save` has not reported this signal, so the run has not acted on it.
            if received is not None and self.stop_signal is None:
                signal.raise_signal(received)
