"""`RepositorySaves`: copies states to host memory, queues their writes, and counts what this costs the training."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

from datasvc.errors import DatasvcError
from datasvc.models.saving.flat_state import FlatState
from datasvc.models.saving.nodes.local_tier import LocalTier
from datasvc.models.saving.queue import SaveQueue
from datasvc.models.saving.save_policy import SaveScheduler
from datasvc.models.saving.save_task import SaveHandle, SaveTask
from datasvc.models.saving.staging_buffer import HostBuffer, HostCopies
from datasvc.models.saving.writer import VersionWriter
from datasvc.models.versions.metadata import VersionMetadata

# One buffer is written to the store while the training fills the other.
NUM_BUFFERS: Final = 2


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
