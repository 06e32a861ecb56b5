"""`LocalTier`: saves versions on the disks of the nodes, by all ranks together.

Each rank stores its part into the folder of its node. Then the nodes send each other the objects that have too few
copies. Then each node writes the entry, and when all have, each publishes its folder. So the nodes together have all
objects of every published version, and still do if a node is lost, as long as another one has a copy of each object.
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any, Final

from datasvc.errors import ConfigError, DatasvcError
from datasvc.models.local.local_saves import LocalSaves, LocalVersion
from datasvc.models.local.restore_choice import NodeBranch, RepositoryHead
from datasvc.models.saving.distributed_save import agree_on_tensors, gather_parts, join_parts, store_part
from datasvc.models.saving.flat_state import FlatState
from datasvc.models.saving.nodes.node_group import NodeGroup, plan_copies
from datasvc.models.saving.queue import SaveHandle, SaveQueue, SaveTask
from datasvc.models.saving.rank_channel import LostRankError, RankChannel
from datasvc.models.saving.save_policy import is_multiple_reached
from datasvc.models.saving.staging_buffer import HostBuffer, HostCopies
from datasvc.models.versions.commit import prepare_entry
from datasvc.models.versions.metadata import VersionMetadata

logger = logging.getLogger(__name__)

# One save at a time: a disk of the node is fast, and a second copy of the state would take as much memory again.
_MAX_SAVES: Final = 1


class LocalTier:
    """Saves the versions of one model on the disks of the nodes; every rank calls the same methods in the same order.

    Args:
        settings: folder, number of versions and of copies.
        name: name of the model.
        channel: channel of the save thread for the nodes; `close` closes it.
        every: number of steps between two saves; None: `is_due` is always False.

    Attributes:
        settings: see above.
        name: see above.
        nodes: the ranks by nodes.
        branch: what the nodes have recorded of the branch that this job continues; None: it has begun none yet.
        newest: newest version on the nodes that this job has saved or restored; None: none.

    Raises:
        ConfigError, BusyError, UnavailableError: `every` is invalid; or see `NodeGroup`.
    """

    def __init__(self, settings: LocalSaves, name: str, channel: RankChannel, *, every: int | None) -> None:
        if every is not None and (type(every) is not int or every < 1):
            raise ConfigError(f"every_local is {every!r}; expected a number of steps, at least 1")
        self.settings, self.name, self._every = settings, name, every
        self.nodes = NodeGroup(channel, settings.folder, name)
        self.branch: NodeBranch | None = None
        self.newest: LocalVersion | None = None
        self._kept: list[LocalVersion] = []  # what this job saved or restored and did not remove, oldest first
        self._last_step: int | None = None
        self._failed_step: int | None = None  # step of the last save, if it failed
        self._buffer = HostBuffer()
        self._queue = SaveQueue(self._write, limit=_MAX_SAVES, overlap="queue")

    def is_due(self, step: int, *, since: int | None = None) -> bool:
        """Return whether to save after `step`: it, or one that was skipped since the last call, is a multiple.

        The first call counts the steps after `since`, by default this one alone.
        """
        last, self._last_step = self._last_step, step
        if last is None or last >= step:
            last = step - 1 if since is None else since
        return self._every is not None and is_multiple_reached(self._every, last, step)

    def wait_for_slot(self) -> None:
        """Wait for the save before, so that no save reads the buffer of a state that is about to be copied."""
        self._queue.wait_for_slot()

    def submit(self, metadata: VersionMetadata, flat_state: FlatState, began_s: float) -> SaveHandle:
        """Copy the state, and queue the write. If the copy fails or is interrupted, queue a save that fails."""
        copies: HostCopies | Exception = DatasvcError(f"the save of step {metadata.step} was interrupted")
        try:
            self.wait_for_slot()
            copies = self._buffer.copy(flat_state.all_tensors)
        except Exception as failure:  # noqa: BLE001 - the save thread raises it, on all ranks
            copies = failure
        finally:
            # Also after Ctrl-C: the other ranks queue this save, and would wait for this rank.
            handle = self.submit_copies(metadata, flat_state, copies, self._buffer, began_s)
        return handle

    def submit_copies(
        self,
        metadata: VersionMetadata,
        flat_state: FlatState,
        copies: HostCopies | Exception,
        buffer: HostBuffer,
        began_s: float,
    ) -> SaveHandle:
        """Queue the write of a state that is in host memory already; it must stay there until the write has ended."""
        handle = SaveHandle(metadata.step)
        handle.stall_s = time.perf_counter() - began_s
        self._queue.submit(SaveTask(handle, metadata, flat_state, copies, buffer, buffer, began_s))
        # A failure is logged when it occurs: the training goes on, and other versions remain.
        handle.mark_reported()
        self._queue.take_unreported_failure()  # forgets the failures before, which are all reported
        return handle

    def begin_branch(self, head: RepositoryHead | None, base: LocalVersion | None = None) -> NodeBranch:
        """Record durably, on all nodes, that the versions which they have are left, but for `base`.

        Args:
            head: newest version of the repository; None: it does not answer.
            base: version on the nodes that the job continues; None: it continues none of them.

        Raises:
            UnavailableError: a node cannot write the record, or a rank is lost; on all ranks.
        """
        self.finish()
        nodes = self.nodes
        before = self.read_branch()
        new_id = nodes.share(secrets.token_hex(8), None)[0]
        number = None if head is None else head.number
        if base is None:
            branch = NodeBranch(before.generation + 1, new_id, number, None)
        else:
            # It is the same branch: what it has committed to the repository since is its own.
            branch = NodeBranch(before.generation + 1, before.id, before.head, base.folder_name)
        nodes.on_leaders(lambda: nodes.folder.write_branch(branch))
        # All nodes have left their unfinished versions: only now can these be removed.
        nodes.on_leaders(nodes.folder.remove_unfinished)
        self.branch, self.newest, self._failed_step = branch, base, None
        self._kept = [] if base is None else [base]
        return branch

    def read_branch(self) -> NodeBranch:
        """Return the branch with the highest generation that a node has recorded.

        Raises:
            ConfigError: nodes have recorded two branches of this generation, as jobs on different nodes do.
            CorruptDataError: the record of a node is damaged.
        """
        found = [NodeBranch(*answer) for answer in self.nodes.on_leaders(self._read_own_branch)]
        generation = max(branch.generation for branch in found)
        newest = {branch.id: branch for branch in found if branch.generation == generation}
        if len(newest) > 1:
            hosts = [
                f"{name.host} ({branch.id})"
                for name, branch in zip(self.nodes.names, found, strict=True)
                if branch.generation == generation
            ]
            raise ConfigError(
                f"the nodes have versions of {self.name!r} of several jobs, which ran on different nodes: "
                f"{', '.join(hosts)}. Remove the folder {self.nodes.folder} on the nodes of all but one of them"
            )
        return next(iter(newest.values()))

    def _read_own_branch(self) -> list[Any]:
        branch = self.nodes.folder.read_branch()
        return [branch.generation, branch.id, branch.head, branch.base]

    @property
    def is_busy(self) -> bool:
        """Whether a save is queued or running."""
        return self._queue.is_busy

    def finish(self, timeout: float | None = None) -> bool:
        """Wait for the save, whose failure was logged; return whether it has ended within `timeout` seconds."""
        return self._queue.finish(timeout)

    def check_newest(self, saved_step: int) -> None:
        """Raise DatasvcError if the last save failed, and neither the nodes nor the repository have its step.

        `saved_step`: step of the newest version that this job has in the repository.
        """
        if self._failed_step is not None and self._failed_step > saved_step:
            raise DatasvcError(
                f"the last save of {self.name!r} to the nodes, step {self._failed_step}, has failed, and the "
                f"repository has step {saved_step} at most; the error is in the log"
            )

    def close(self) -> None:
        """Wait for the save, then release memory, the lock and the connections."""
        self.finish()
        self.nodes.close()
        self._buffer.release()

    def _write(self, task: SaveTask) -> LocalVersion:
        """Save a version, in the save thread; every rank gets the same version or the same error."""
        assert self.branch is not None
        # A step that is saved again is another version.
        session = self.nodes.share(secrets.token_hex(8), None)[0]
        version = LocalVersion("models", self.name, 0, self.branch.generation, task.metadata.step, session)
        self._failed_step = version.step
        try:
            self._store(version, task, self.branch)
        except BaseException as error:
            logger.error("the save of step %d to the nodes failed: %s", version.step, error)  # noqa: TRY400
            # If a rank was lost, the version may be published on its node: the next job finds out.
            if self.nodes.is_leader and not isinstance(error, LostRankError):
                self.nodes.folder.remove([version])
            raise
        self._failed_step = None
        self.newest = version
        return version

    def _store(self, version: LocalVersion, task: SaveTask, branch: NodeBranch) -> None:
        nodes, channel, folder = self.nodes, self.nodes.channel, self.nodes.folder
        state, part = task.state, None
        error: Exception | None = None
        try:
            if isinstance(task.copies, Exception):
                raise task.copies  # noqa: TRY301
            task.handle.device_s = task.copies.wait()
            state = state.with_tensors(task.copies.tensors)
        except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all
            error = failure
        differing = agree_on_tensors(channel, version.step, state, error)
        # Before anything is written: the disk need not have space for one version more than the limit allows.
        nodes.on_leaders(self._make_space)
        try:
            # In full: each version can be removed at any time without looking at the others.
            objects = folder.repository(version).objects
            part = store_part(channel, objects, state, differing, base=(), base_chunks=(), codec="none")
        except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all
            error = failure
        parts = gather_parts(channel, part, error)

        def describe() -> Any:
            if channel.rank != 0:
                return None
            stored = join_parts(state, parts)
            names = [{"id": name.id, "host": name.host} for name in nodes.names]
            extra = {"branch": branch.id, "nodes": names}
            entry, named = prepare_entry(folder.repository(version), self.name, stored, task.metadata, extra=extra)
            chunks = {link.object for record in stored.records for chunk in record.chunks for link in chunk.chain}
            return [entry, sorted(named - chunks)]

        entry, everywhere = nodes.agree(describe)[0]
        on_nodes = nodes.on_leaders(lambda: folder.objects(version))
        nodes.transfer(version, plan_copies(on_nodes, copies=self.settings.copies, everywhere=set(everywhere)))

        def prepare() -> None:
            # Once more: the version may be larger than the one before.
            self._make_space(version)
            folder.prepare(version, entry)

        nodes.on_leaders(prepare)
        # Publish only after all leaders have everything: one that cannot write an entry stops all of them before.
        nodes.on_leaders(lambda: folder.publish(version))
        self._kept = [*self._kept, version][-self.settings.keep :]
        if nodes.is_leader:
            try:
                folder.remove([old for old in folder.versions() if old not in self._kept])
            except Exception as failure:  # noqa: BLE001 - the version is published, on all nodes
                logger.warning("old versions stay in %s until the next save: %s", folder, failure)

    def _make_space(self, version: LocalVersion | None = None) -> None:
        """Remove old versions of this node until a new one fits, but not the newest; None: it is not written yet.

        Raises ConfigError: the version does not fit beside the newest one.
        """
        limit_bytes, folder = self.settings.limit_bytes, self.nodes.folder
        older = [other for other in folder.versions() if other not in self._kept and other != version]
        older += self._kept
        if limit_bytes is None or not older:
            return
        new_bytes = folder.size_bytes(older[-1] if version is None else version)
        total_bytes = folder.make_space(older, new_bytes, limit_bytes)
        if version is not None and total_bytes > limit_bytes:
            raise ConfigError(
                f"{version} and the version before it take {total_bytes} bytes in {folder}, and max_bytes is "
                f"{limit_bytes}; raise it, or leave it out"
            )
