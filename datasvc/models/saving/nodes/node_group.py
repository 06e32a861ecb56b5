"""`NodeGroup`: the ranks of a job, by the nodes that they run on, and what the nodes send each other.

The lowest rank of each node is its leader, which locks the folder, sends, receives, publishes and removes for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.local.folder_lock import FolderLock
from datasvc.models.local.local_folder import LocalFolder, NodeName
from datasvc.models.local.local_saves import LocalVersion
from datasvc.models.local.node_copies import NodeCopy, plan_rounds
from datasvc.models.saving.rank_channel import RankChannel, describe_error, raise_on_all_ranks
from datasvc.repository import ObjectInfo, Objects
from datasvc.repository.objects.objects import digest_of


class NodeGroup:
    """The ranks of a job by nodes; every rank makes a group, and calls the same methods in the same order.

    Args:
        channel: channel that only this group uses.
        root: folder of the node, for any number of models.
        name: name of the model.

    Attributes:
        channel: see above.
        folder: folder of the model on this node.
        names: name of each node, in the order of their leaders.
        node: index of the node of this rank.
        is_leader: whether this rank is the leader of its node.

    Raises:
        BusyError: another job uses the folder of a node.
        ConfigError: several machines use one folder.
        UnavailableError: a folder cannot be written, or a rank is lost.
    """

    def __init__(self, channel: RankChannel, root: Any, name: str) -> None:
        self.channel = channel

        def open_folder() -> NodeName:
            self.folder = LocalFolder(root, name)
            return self.folder.node_name()

        by_rank = [NodeName(*answer) for answer in self.agree(open_folder)]
        ids = [node.id for node in by_rank]
        self._leader_by_rank = [ids.index(node) for node in ids]
        self._leaders = sorted(set(self._leader_by_rank))
        self.names = [by_rank[leader] for leader in self._leaders]
        for node, leader in zip(by_rank, self._leader_by_rank, strict=True):
            if node.boot != by_rank[leader].boot:
                raise ConfigError(
                    f"{root} has the same node id on {node.host} and on {by_rank[leader].host}: either both use one "
                    "folder, then give local= a folder on a disk of each node; or one is a copy of the other, then "
                    "remove .node.json from one of them"
                )
        self.node = self._leaders.index(self._leader_by_rank[channel.rank])
        self.is_leader = channel.rank in self._leaders
        self._lock: FolderLock | None = None
        try:
            # The other ranks of the node rely on the lock of their leader.
            self.on_leaders(self._acquire)
        except BaseException:
            self._release()
            raise

    def _acquire(self) -> None:
        self._lock = self.folder.lock()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def agree(self, action: Callable[[], Any]) -> list[Any]:
        """Return the results of `action` on all ranks, as JSON values; if it fails on one, raise its error on all."""
        result, error = None, None
        try:
            result = action()
        except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all
            error = failure
        return self.share(result, error)

    def share(self, result: Any, error: BaseException | None) -> list[Any]:
        """Return the results of all ranks, as JSON values; if one has an error, raise it on all."""
        answers = self.channel.exchange([describe_error(error), result])
        raise_on_all_ranks([answer[0] for answer in answers], error)
        return [answer[1] for answer in answers]

    def on_leaders(self, action: Callable[[], Any]) -> list[Any]:
        """Return the results of `action` on the leaders, one for each node; see `agree`."""
        answers = self.agree(lambda: action() if self.is_leader else None)
        return [answers[leader] for leader in self._leaders]

    def by_node(self, answers: Sequence[Any]) -> list[list[Any]]:
        """Return the answers of all ranks, grouped by node."""
        grouped: list[list[Any]] = [[] for _ in self._leaders]
        for rank, answer in enumerate(answers):
            grouped[self._leaders.index(self._leader_by_rank[rank])].append(answer)
        return grouped

    def transfer(self, version: LocalVersion, copies: Sequence[NodeCopy]) -> None:
        """Send and receive the planned copies of objects of a version; each is verified by its receiver.

        Raises:
            CorruptDataError: an object is damaged where it was read; on all ranks.
            DatasvcError: an object cannot be read or written; on all ranks.
        """
        error: Exception | None = None
        if self.is_leader and copies:
            objects: Objects | None = None
            try:
                objects = self.folder.repository(version).objects  # creates the folder on a new node
            except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all
                error = failure
            for sent, received in plan_rounds(copies, self.node, len(self._leaders)):
                outgoing, incoming = None, None
                if sent is not None:
                    # After an error, go on with the others all the same: the other nodes count on it.
                    content = b"\0" * sent.size_bytes
                    try:
                        if objects is not None:
                            content = objects.read(sent.digest, sent.size_bytes)
                    except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all
                        error = error or failure
                    outgoing = (self._leaders[sent.target], content)
                if received is not None:
                    incoming = (self._leaders[received.source], received.size_bytes)
                content = self.channel.swap(outgoing, incoming)
                if received is None or objects is None:
                    continue
                try:
                    if digest_of(content) != received.digest:
                        raise CorruptDataError(f"object {received.digest} of {version} arrived damaged")  # noqa: TRY301
                    objects.write(ObjectInfo(received.digest, received.size_bytes), content)
                except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all
                    error = error or failure
        self.share(None, error)

    def close(self) -> None:
        """Release the lock of the folder and the connections."""
        self._release()
        self.channel.close()
