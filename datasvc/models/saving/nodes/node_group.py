"""`NodeGroup`: the ranks of a job, by the nodes that they run on, and what the nodes send each other.

The lowest rank of each node is its leader, which locks the folder, sends, receives, publishes and removes for it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.local.local_folder import FolderLock, LocalFolder, NodeName
from datasvc.models.local.local_saves import LocalVersion
from datasvc.models.saving.rank_channel import RankChannel, describe_error, raise_on_all_ranks
from datasvc.repository import Digest, ObjectInfo, Objects
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


class NodeCopy(NamedTuple):
    """An object that a node sends to another one.

    Attributes:
        digest: digest of the object.
        size_bytes: its size.
        source: index of the node that has it.
        target: index of the node that gets it.
    """

    digest: Digest
    size_bytes: int
    source: int
    target: int


def plan_copies(
    objects: Sequence[Mapping[Digest, int]], *, copies: int, everywhere: Collection[Digest] = ()
) -> list[NodeCopy]:
    """Return the copies after which each object is on `copies` nodes, or on all if there are fewer.

    The further copies of an object are on the nodes that follow its first one, so that each node has about as many.

    Args:
        objects: of each node, the objects that it has, with their sizes in bytes.
        copies: number of nodes that are to have each object.
        everywhere: objects that all nodes are to have.
    """
    num_nodes = len(objects)
    planned = []
    for digest, (size, holders) in _holders(objects).items():
        wanted = num_nodes if digest in everywhere else min(copies, num_nodes)
        following = [(holders[0] + distance) % num_nodes for distance in range(1, num_nodes)]
        targets = [node for node in following if node not in holders][: max(0, wanted - len(holders))]
        planned += [NodeCopy(digest, size, holders[0], target) for target in targets]
    return planned


def plan_fetches(objects: Sequence[Mapping[Digest, int]], wanted: Sequence[Collection[Digest]]) -> list[NodeCopy]:
    """Return the copies after which each node has the objects that it needs, of those that any node has.

    Of several nodes that have an object, the one with the fewest bytes to send so far sends it.

    Args:
        objects: of each node, the objects that it has, with their sizes in bytes.
        wanted: of each node, the objects that it needs.
    """
    sent_bytes = Counter[int]()
    planned = []
    for digest, (size, holders) in _holders(objects).items():
        for target, needs in enumerate(wanted):
            if digest in needs and target not in holders:
                source = min(holders, key=lambda node: (sent_bytes[node], node))
                sent_bytes[source] += size
                planned.append(NodeCopy(digest, size, source, target))
    return planned


def plan_rounds(
    copies: Iterable[NodeCopy], node: int, num_nodes: int
) -> list[tuple[NodeCopy | None, NodeCopy | None]]:
    """Return what a node sends and receives at the same time, in order; None: nothing.

    In the round with distance d, each node sends to the one that is d after it, and receives from the one that is d
    before it. So all connections are in use at once, and no node waits for another in a cycle.
    """
    planned: list[tuple[NodeCopy | None, NodeCopy | None]] = []
    listed = list(copies)
    for distance in range(1, num_nodes):
        of_round = [copy for copy in listed if (copy.target - copy.source) % num_nodes == distance]
        sent = [copy for copy in of_round if copy.source == node]
        received = [copy for copy in of_round if copy.target == node]
        planned += itertools.zip_longest(sent, received)
    return planned


def missing_objects(needed: Mapping[Digest, int | None], objects: Sequence[Mapping[Digest, int]]) -> list[Digest]:
    """Return the needed objects that no node has, or of another size only; the needed size None means any size."""
    return [
        digest
        for digest, size in needed.items()
        if not any(digest in on_node and size in (None, on_node[digest]) for on_node in objects)
    ]


def _holders(objects: Sequence[Mapping[Digest, int]]) -> dict[Digest, tuple[int, list[int]]]:
    """Return the size of each object, and the nodes that have it, in the order of digests."""
    found: dict[Digest, tuple[int, list[int]]] = {}
    for node, on_node in enumerate(objects):
        for digest, size in on_node.items():
            found.setdefault(digest, (size, []))[1].append(node)
    return dict(sorted(found.items()))
