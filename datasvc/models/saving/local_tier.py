"""`LocalTier`: saves versions on the disks of the nodes, and restores them, by all ranks together.

Each rank stores its part into the folder of its node. Then the nodes send each other the objects that have too few
copies. Then each node publishes its folder. So the nodes together have all objects of every published version, and
still do if a node is lost, as long as another one has a copy of each of its objects.

The lowest rank of each node is its leader, which sends, receives and publishes for the node.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from datasvc.errors import ConfigError, CorruptDataError, DatasvcError, NotFoundError
from datasvc.models.local.local_folder import LocalFolder, LocalSaves, LocalVersion
from datasvc.models.local.node_copies import NodeCopy, missing_objects, plan_copies
from datasvc.models.restoring.restore import Checkpoint
from datasvc.models.saving.distributed_save import agree_on_tensors, gather_parts, join_parts, store_part
from datasvc.models.saving.flat_state import FlatState
from datasvc.models.saving.queue import SaveQueue
from datasvc.models.saving.rank_channel import LostRankError, describe_error, open_channels, raise_on_all_ranks
from datasvc.models.saving.save_task import SaveHandle, SaveTask
from datasvc.models.saving.staging_buffer import HostBuffer, HostCopies
from datasvc.models.versions.commit import prepare_entry
from datasvc.models.versions.metadata import VersionMetadata
from datasvc.repository import Digest, ObjectInfo, Repository
from datasvc.repository.objects.objects import digest_of

logger = logging.getLogger(__name__)

# One save at a time: a disk of the node is fast, and a second copy of the state would take as much memory again.
_MAX_SAVES: Final = 1


class LocalTier:
    """Saves and restores the versions of one model on the disks of the nodes; every rank calls the same methods.

    Args:
        settings: folder, number of versions and of copies.
        name: name of the model.
        every: number of steps between two saves; None: `is_due` is always False.
        group: torch.distributed group of the ranks, see `CheckpointManager`.
        timeout_s: see `CheckpointManager`.

    Raises:
        ConfigError: `every` is invalid.
        UnavailableError: the folder of a rank cannot be written, or the ranks cannot connect.
    """

    def __init__(self, settings: LocalSaves, name: str, *, every: int | None, group: Any, timeout_s: float) -> None:
        if every is not None and (type(every) is not int or every < 1):
            raise ConfigError(f"every_local is {every!r}; expected a number of steps, at least 1")
        self._settings, self._name, self._every = settings, name, every
        (self._channel,) = open_channels(group, timeout_s, 1)
        try:
            self._open()
        except BaseException:
            self._channel.close()
            raise
        self._num_attempts = 0
        self._lineage: list[LocalVersion] = []  # what this manager saved or restored and did not remove, oldest first
        self._last_step: int | None = None
        self._buffer = HostBuffer()
        self._queue = SaveQueue(self._write, limit=_MAX_SAVES, overlap="queue")

    def _open(self) -> None:
        """Open the folder, find the leader of each node, and agree on the name of this session."""
        node, error = "", None
        try:
            self._folder = LocalFolder(self._settings.folder, self._name)
            node = self._folder.node_id()
        except DatasvcError as failure:
            error = failure
        answers = self._channel.exchange([describe_error(error), node, secrets.token_hex(4)])
        raise_on_all_ranks([answer[0] for answer in answers], error)
        nodes = [answer[1] for answer in answers]
        self._leaders = [rank for rank, node in enumerate(nodes) if node not in nodes[:rank]]
        self._session = answers[0][2]
        if self._is_leader:
            self._folder.remove_incoming()
        self._channel.exchange(None)  # no rank may save before the leaders have cleaned up

    def is_due(self, step: int) -> bool:
        """Return whether to save after `step`: it, or one that was skipped since the last call, is a multiple."""
        last, self._last_step = self._last_step, step
        if last is None or last >= step:
            last = step - 1
        return self._every is not None and step // self._every > last // self._every

    def submit(self, metadata: VersionMetadata, flat_state: FlatState, began_s: float) -> SaveHandle:
        """Copy the state, and queue the write. It waits for the save before; a failure of that one is logged."""
        self._queue.wait_for_slot()
        self._log_failures()
        copies: HostCopies | Exception
        try:
            copies = self._buffer.copy(flat_state.all_tensors)
        except Exception as failure:  # noqa: BLE001 - the save thread raises it, on all ranks
            copies = failure
        handle = SaveHandle(metadata.step)
        handle.stall_s = time.perf_counter() - began_s
        self._queue.submit(SaveTask(handle, metadata, flat_state, copies, self._buffer, self._buffer, began_s))
        return handle

    def find(self) -> LocalVersion | None:
        """Return the newest step of which all nodes together have all objects; None: there is none.

        Raises:
            DatasvcError: the folder of a rank cannot be read.
        """
        self._queue.finish()
        own, error = [], None
        try:
            own = [[version.step, version.session] for version in self._folder.versions()]
        except DatasvcError as failure:
            error = failure
        answers = self._channel.exchange([describe_error(error), own])
        raise_on_all_ranks([answer[0] for answer in answers], error)
        found = {(step, session) for answer in answers for step, session in answer[1]}
        for step, session in sorted(found, reverse=True):
            version = LocalVersion("models", self._name, 0, step, session)
            objects, needed = self._survey(version)
            missing = None if needed is None else missing_objects(needed, objects)
            if missing == []:
                return version
            if self._channel.rank == 0:
                logger.warning("%s is not complete on these nodes: a node that had a part of it is missing", version)
        return None

    def restore(self, version: LocalVersion, restore: Callable[[Repository], Checkpoint]) -> Checkpoint | None:
        """Return the checkpoint of a version that `find` returned; None on all ranks if one rank cannot restore it.

        Raises:
            LostRankError: a rank is lost.
        """
        try:
            try:
                checkpoint = self._restore(version, restore)
            except CorruptDataError as error:
                # A restore verifies all bytes. Remove those that are damaged: other nodes may have a good copy.
                logger.warning("%s is read again from other nodes: %s", version, error)
                self._agree(lambda: self._folder.remove_damaged(version) if self._is_leader else None)
                checkpoint = self._restore(version, restore)
        except LostRankError:
            raise
        except DatasvcError as error:  # the same on all ranks
            logger.error("cannot restore %s: %s", version, error)  # noqa: TRY400 - the message has the reason
            return None
        self._lineage = [version]
        return checkpoint

    def forget(self) -> None:
        """Begin a new lineage: the first save removes all versions before it, as the weights are others now."""
        self._queue.finish()
        self._lineage = []

    def finish(self) -> None:
        """Wait for the save, and log its failure."""
        self._queue.finish()
        self._log_failures()

    def close(self) -> None:
        """Wait for the save, then release memory and connections."""
        self.finish()
        self._channel.close()
        self._buffer.release()

    def _restore(self, version: LocalVersion, restore: Callable[[Repository], Checkpoint]) -> Checkpoint:
        """Return the checkpoint of a version; if a rank fails, its error is raised on all."""
        repository = self._fetch(version)
        error: Exception | None = None
        checkpoint = None
        try:
            checkpoint = replace(restore(repository), version=version)
        except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all
            error = failure
        raise_on_all_ranks(self._channel.exchange(describe_error(error)), error)
        assert checkpoint is not None
        return checkpoint

    def _fetch(self, version: LocalVersion) -> Repository:
        """Return the folder of a complete version, after all its objects were copied to this node.

        Raises:
            NotFoundError: an object is on no node.
            DatasvcError: a rank cannot read or write an object.
        """
        objects, needed = self._survey(version)
        missing = needed and missing_objects(needed, objects)
        if needed is None or missing:
            raise NotFoundError(f"no node has an intact copy of {missing or 'the tensor table'}")
        lacks_folder = self._is_leader and not objects[self._node]

        def begin() -> Any:
            if lacks_folder:
                self._folder.repository(version, is_incoming=True)
            return self._entry(version)

        # Nodes without the folder take the entry from the first node that has one.
        entry = next(answer for answer in self._agree(begin) if answer is not None)
        copies = plan_copies(objects, copies=len(self._leaders), everywhere=needed)
        self._transfer(version, copies, is_incoming_at=[not on_node for on_node in objects])
        self._agree(lambda: self._publish(version, entry) if lacks_folder else None)
        return self._folder.repository(version)

    @property
    def _is_leader(self) -> bool:
        return self._channel.rank in self._leaders

    @property
    def _node(self) -> int:
        """Index of the node of which this rank is the leader."""
        return self._leaders.index(self._channel.rank)

    def _log_failures(self) -> None:
        # A failed save is not fatal: the versions before it and those of the repository remain.
        while (failure := self._queue.take_unreported_failure()) is not None:
            logger.error("on the nodes: %s", failure[1])

    def _write(self, task: SaveTask) -> LocalVersion:
        """Save a version, in the save thread; every rank gets the same version or the same error."""
        self._num_attempts += 1  # a step that is saved again is another version
        session = f"{self._session}{self._num_attempts:08x}"
        version = LocalVersion("models", self._name, 0, task.metadata.step, session)
        try:
            return self._store(version, task)
        except BaseException:
            if self._is_leader:
                self._folder.remove_incoming(version)
            raise

    def _store(self, version: LocalVersion, task: SaveTask) -> LocalVersion:
        state, part, repository = task.state, None, None
        error: Exception | None = None
        try:
            if isinstance(task.copies, Exception):
                raise task.copies  # noqa: TRY301
            task.handle.device_s = task.copies.wait()
            state = state.with_tensors(task.copies.tensors)
            repository = self._folder.repository(version, is_incoming=True)
        except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all
            error = failure
        differing = agree_on_tensors(self._channel, version.step, state, error)
        assert repository is not None
        try:
            # In full: each version can be removed at any time without looking at the others.
            part = store_part(
                self._channel, repository.objects, state, differing, base=(), base_chunks=(), codec="none"
            )
        except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all
            error = failure
        parts = gather_parts(self._channel, part, error)

        def describe() -> Any:
            prepared = None
            if self._channel.rank == 0:
                stored = join_parts(state, parts)
                entry, named = prepare_entry(repository, self._name, stored, task.metadata)
                chunks = {link.object for record in stored.records for chunk in record.chunks for link in chunk.chain}
                prepared = [entry, sorted(named - chunks)]
            return [prepared, self._folder.objects(version, is_incoming=True) if self._is_leader else None]

        answers = self._agree(describe)
        entry, everywhere = answers[0][0]
        objects = [answers[leader][1] for leader in self._leaders]
        copies = plan_copies(objects, copies=self._settings.copies, everywhere=set(everywhere))
        self._transfer(version, copies, is_incoming_at=[True] * len(self._leaders))

        def publish() -> None:
            if self._is_leader:
                others = [other for other in self._folder.versions() if other not in self._lineage]
                self._folder.make_space(version, [*others, *self._lineage], self._settings.limit_bytes)
                self._folder.repository(version, is_incoming=True).versions("models", self._name).append(
                    lambda _: entry
                )

        self._agree(publish)
        # Publish only after all leaders have everything: one that cannot write an entry stops all of them before.
        self._agree(lambda: self._folder.publish(version) if self._is_leader else None)
        self._lineage = [*self._lineage, version][-self._settings.keep :]
        if self._is_leader:
            self._folder.remove([old for old in self._folder.versions() if old not in self._lineage])
        return version

    def _survey(self, version: LocalVersion) -> tuple[list[dict[Digest, int]], dict[Digest, int | None] | None]:
        """Return the objects of a version on each node, and those that it needs; None: no node has its table."""

        def look() -> Any:
            if not self._is_leader:
                return [{}, None]
            needed = None
            with suppress(CorruptDataError, NotFoundError, ConfigError):  # another node may have them intact
                needed = self._folder.needed_objects(version)
            # A folder whose entry or table is damaged counts as one without anything.
            return [self._folder.objects(version) if needed is not None else {}, needed]

        answers = self._agree(look)
        needed = next((answer[1] for answer in answers if answer[1] is not None), None)
        return [answers[leader][0] for leader in self._leaders], needed

    def _entry(self, version: LocalVersion) -> Mapping[str, Any] | None:
        if not self._is_leader:
            return None
        with suppress(CorruptDataError, NotFoundError, ConfigError):
            return self._folder.repository(version).versions("models", self._name).read(1).content
        return None

    def _publish(self, version: LocalVersion, entry: Mapping[str, Any]) -> None:
        repository = self._folder.repository(version, is_incoming=True)
        repository.versions("models", self._name).append(lambda _: entry)
        self._folder.remove([version])  # a damaged folder of this name
        self._folder.publish(version)

    def _transfer(self, version: LocalVersion, copies: Sequence[NodeCopy], *, is_incoming_at: Sequence[bool]) -> None:
        """Send and receive the planned copies; each is verified. `is_incoming_at`: of each node, see `repository`.

        Raises DatasvcError: an object is damaged, or cannot be read or written; on all ranks.
        """
        error: Exception | None = None
        if self._is_leader:
            node = self._node
            for copy in copies:
                if node not in (copy.source, copy.target):
                    continue
                # After an error, send and receive the others all the same: the other nodes count on it.
                if copy.source == node:
                    content = b"\0" * copy.size_bytes
                    try:
                        objects = self._folder.repository(version, is_incoming=is_incoming_at[node]).objects
                        content = objects.read(copy.digest, copy.size_bytes)
                    except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all
                        error = error or failure
                    self._channel.send(content, self._leaders[copy.target])
                    continue
                content = self._channel.receive(copy.size_bytes, self._leaders[copy.source])
                try:
                    objects = self._folder.repository(version, is_incoming=is_incoming_at[node]).objects
                    if digest_of(content) != copy.digest:
                        raise CorruptDataError(f"object {copy.digest} of {version} arrived damaged")  # noqa: TRY301
                    objects.write(ObjectInfo(copy.digest, copy.size_bytes), content)
                except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all
                    error = error or failure
        raise_on_all_ranks(self._channel.exchange(describe_error(error)), error)

    def _agree(self, action: Callable[[], Any]) -> list[Any]:
        """Return the results of `action` on all ranks, as JSON values; if it fails on one, raise its error on all."""
        result, error = None, None
        try:
            result = action()
        except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all
            error = failure
        answers = self._channel.exchange([describe_error(error), result])
        raise_on_all_ranks([answer[0] for answer in answers], error)
        return [answer[1] for answer in answers]
