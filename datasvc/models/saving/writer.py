"""Background part of a save: waits for the device copies, stores the tensors and commits the version.

A `CheckpointManager` runs `VersionWriter.write` in its save thread. All ranks run the same steps, and each step ends
with an exchange of messages, so that an error on one rank is raised on all of them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import pyarrow as pa

from datasvc.errors import ConfigError, DatasvcError, NotFoundError
from datasvc.models.saving.distributed_save import (
    agree_on_tensors,
    gather_parts,
    join_parts,
    share_outcome,
    store_part,
)
from datasvc.models.saving.flat_state import FlatState
from datasvc.models.saving.nodes.local_tier import LocalTier
from datasvc.models.saving.queue import SaveHandle, SaveQueue, SaveTask
from datasvc.models.saving.rank_channel import RankChannel
from datasvc.models.saving.save_policy import SaveScheduler
from datasvc.models.saving.shared_store import check_same_store
from datasvc.models.saving.staging_buffer import HostBuffer, HostCopies
from datasvc.models.tensors.tensor_table import TensorRecord
from datasvc.models.tensors.write import Codec, StoredState
from datasvc.models.versions.commit import base_records, commit
from datasvc.models.versions.metadata import VersionMetadata
from datasvc.repository import Repository, Resolved

# One buffer is written to the store while the training fills the other.
NUM_BUFFERS: Final = 2


class VersionWriter:
    """Writes the versions of one model one after the other, in the save thread.

    No other thread may use its `channel` to the other ranks. With the codec "delta", chunks are stored as
    differences to the chunks of an earlier version, the base: the parent, or else the newest version of the model.

    Args:
        repository: repository that all ranks write to.
        name: name of the model.
        codec: see `store_tensors`.
        channel: channel of the save thread.
        is_store_checked: whether `check_same_store` has passed; otherwise the first save checks it.

    Attributes:
        repository: see above.
        codec: see above.
        newest: version that was committed or restored last; None: none yet.
        newest_step: its number of optimizer steps; -1 without a version, or if it is unknown.
    """

    def __init__(
        self,
        repository: Repository,
        name: str,
        codec: Codec,
        channel: RankChannel,
        *,
        is_store_checked: bool = True,
    ) -> None:
        self.repository = repository
        self._name = name
        self.codec: Codec = codec
        self._channel = channel
        self._is_store_checked = is_store_checked
        # Reference and records of the version that this rank committed last; ("", ()): none. Only rank 0 commits.
        self._committed: tuple[str, Sequence[TensorRecord]] = ("", ())
        if channel.rank == 0:
            # Arrow imports pandas here, where it is installed. Else the first commit would, beside the user's steps.
            pa.array([])
        # State of the last save, with its tensors in a host buffer. A later save may overwrite them while they are
        # used here, so `store_chunks` checks their digests.
        self._base_state: FlatState | None = None
        self._is_base_usable = True  # False after a save that failed
        self.newest: Resolved | None = None
        self.newest_step = -1

    def write(self, task: SaveTask) -> Resolved:
        """Store and commit a state; every rank calls this and gets the same version or the same error.

        Raises:
            ConfigError: the ranks are at different steps; nothing was committed.
            DatasvcError: a rank failed; nothing was committed.
            UnavailableError: a rank was lost before the commit; nothing was committed.
            UnknownOutcomeError: rank 0 was lost during the commit.
        """
        channel, state = self._channel, task.state
        part, version = None, None
        self.check_store()
        # `_is_base_usable` becomes True again only after success, so that every kind of failure leaves it False.
        is_base_usable = self._is_base_usable
        self._is_base_usable = False
        # An error on this rank is sent to the others before it is raised: otherwise they would wait for this rank.
        error: Exception | None = None
        try:
            state = _finish_copies(task)
        except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all
            error = failure
        differing = agree_on_tensors(channel, task.metadata.step, state, error)
        try:
            # After a failure, store in full: if the base lacks objects, every difference to it would fail too.
            base = self._base(task.metadata) if self.codec == "delta" and is_base_usable else ()
            part = store_part(
                channel,
                self.repository.objects,
                state,
                differing,
                base=base,
                base_chunks=self._base_state.chunks() if base and self._base_state is not None else (),
                codec=self.codec,
            )
        except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all
            error = failure
        parts = gather_parts(channel, part, error)
        try:
            if channel.rank == 0:
                version = self._commit(join_parts(state, parts), task)
        except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all
            error = failure
        version = share_outcome(channel, version, error)
        self._is_base_usable = True
        self._base_state = state
        self.set_newest(version, task.metadata.step)
        return version

    def set_newest(self, version: Resolved | None, step: int) -> None:
        """Set the version that the next one continues, and its number of optimizer steps."""
        self.newest, self.newest_step = version, step

    def check_store(self) -> None:
        """Check that all ranks write to one store, if that is not known yet. For errors see `check_same_store`."""
        if not self._is_store_checked:
            check_same_store(self._channel, self.repository.storage)
            self._is_store_checked = True

    def release_copies(self) -> None:
        """Delete the references to the copies of the last save, so that their memory can be freed."""
        self._base_state = None

    def with_parent(self, metadata: VersionMetadata) -> VersionMetadata:
        """Return the metadata with the parent of the version: their own, else the newest version."""
        # Determine the newest only now: when `save` was called, an earlier save may not have been committed yet.
        return metadata if metadata.parent or self.newest is None else replace(metadata, parent=str(self.newest))

    def _base(self, metadata: VersionMetadata) -> Sequence[TensorRecord]:
        """Return the records of the base of this save, () if there is none."""
        parent = self.with_parent(metadata).parent
        committed, records = self._committed
        if parent is not None and committed == parent:
            # Use the cached records only if the version still exists: after a removal, `gc` may delete its objects.
            with suppress(NotFoundError):
                self.repository.resolve("models", parent)
                return records
        self._committed = ("", ())
        return base_records(self.repository, self._name, parent)

    def _commit(self, stored: StoredState, task: SaveTask) -> Resolved:
        duration = {"stall_s": task.handle.stall_s, "total_s": time.perf_counter() - task.began_s}
        version = commit(
            self.repository,
            self._name,
            stored,
            self.with_parent(task.metadata),
            extra={"duration": {name: round(seconds, 6) for name, seconds in duration.items()}, **task.extra},
        )
        # The next save stores differences to this version. Keep the records, so that it need not read the table.
        self._committed = (str(version), stored.records)
        return version


def _finish_copies(task: SaveTask) -> FlatState:
    """Wait for the device copies and return the copied state. If the copying failed, raise its error."""
    if isinstance(task.copies, Exception):
        raise task.copies
    # Allocate the other buffer in the background: the next save then stalls the training for less time.
    # Too little memory is not an error here; the next save reports it.
    with suppress(ConfigError):
        task.next_buffer.reserve_like(task.buffer)
    device_s = task.copies.wait()
    task.handle.stall_s += device_s
    task.handle.device_s = device_s
    return task.state.with_tensors(task.copies.tensors)


class RepositorySaves:
    """Saves to the repository, of one rank.

    Args:
        writer: writes the versions, in the thread of the queue.
        queue: queue of the writes, with at most NUM_BUFFERS saves.
        scheduler: gets the cost of each save.
        local: writes each copy to the nodes too; None: versions are not saved on the nodes.
    """

    def __init__(
        self, writer: VersionWriter, queue: SaveQueue, scheduler: SaveScheduler, local: LocalTier | None
    ) -> None:
        self._writer = writer
        self._queue = queue
        self._scheduler = scheduler
        self._local = local
        self._buffers = deque(HostBuffer() for _ in range(NUM_BUFFERS))
        # Saves whose device copies are not yet counted in the cost, oldest first.
        self._copying: deque[SaveHandle] = deque()

    def save(self, metadata: VersionMetadata, flat_state: FlatState, began_s: float, *, wait: bool) -> SaveHandle:
        """Copy a state, and queue its write; with `wait`, return after the commit.

        `began_s` is the time at which the training stopped, on the clock `time.perf_counter`.
        """
        self.count_device_copies()
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

    def count_device_copies(self) -> None:
        """Add the device copies that have ended since the last call to the cost of saving."""
        while self._copying and (self._copying[0].device_s is not None or self._copying[0].done()):
            self._scheduler.record_device_copy(self._copying.popleft().device_s or 0.0)

    def release(self) -> None:
        """Free the memory of the copies; no save may be running."""
        for buffer in self._buffers:
            buffer.release()

    def _submit(self, metadata: VersionMetadata, flat_state: FlatState, began_s: float) -> SaveHandle:
        """Copy the state, and queue the write. If the copy fails or is interrupted, queue a save that fails."""
        handle = SaveHandle(metadata.step)
        buffer, next_buffer = self._buffers
        copies: HostCopies | Exception
        try:
            # After this wait, fewer saves are unfinished than there are buffers. The buffers are used in turn, so no
            # save uses `buffer`; nor does one to the nodes.
            self._queue.wait_for_slot()
            if self._local is not None:
                self._local.wait_for_slot()
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
            extra = {}
            if self._local is not None and self._local.branch is not None:
                extra["branch"] = self._local.branch.id
                self._local.submit_copies(self._writer.with_parent(metadata), flat_state, copies, buffer, began_s)
            self._queue.submit(SaveTask(handle, metadata, flat_state, copies, buffer, next_buffer, began_s, extra))
        return handle
