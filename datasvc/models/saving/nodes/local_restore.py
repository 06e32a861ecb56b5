"""Restores versions from the disks of the nodes, by all ranks together; the repository is not needed.

A node reads what it has from its own disk. What its ranks need and it lacks, it gets from the nodes that have it: of
a sharded state only the chunks of its own parts.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from datasvc.errors import CorruptDataError, NotFoundError
from datasvc.models.local.local_folder import NeededObjects
from datasvc.models.local.local_saves import LocalVersion
from datasvc.models.local.restore_choice import (
    NodeBranch,
    NodeCandidate,
    RepositoryHead,
    RestoreChoice,
    choose_restore,
)
from datasvc.models.restoring.cached_source import count_bytes
from datasvc.models.restoring.copies import StoredCopies
from datasvc.models.restoring.restore import Checkpoint, restore_from
from datasvc.models.saving.nodes.local_tier import LocalTier
from datasvc.models.saving.nodes.node_group import NodeGroup, missing_objects, plan_fetches
from datasvc.models.tensors.chunk_reader import ChunkSource
from datasvc.models.tensors.tensor_table import TensorRecord
from datasvc.models.versions.entry_fields import objects_of_entry
from datasvc.printable import count_text
from datasvc.repository import Digest

logger = logging.getLogger(__name__)

# `Checkpoint.report` has the bytes by these places.
_OWN_DISK: Final = "resident"
_OTHER_NODES: Final = "peer"


@dataclass(frozen=True)
class _Holdings:
    """What the nodes have of a version.

    Attributes:
        objects: objects on each node, with their sizes in bytes.
        participants: ids and hosts of the nodes that saved the version; {}: no node has its entry.
        lacks: what they lack together, as a part of a sentence; "": nothing.
    """

    objects: list[dict[Digest, int]]
    participants: dict[str, str]
    lacks: str


class FoundOnNodes(NamedTuple):
    """The choice of a restore, and the checkpoint; None: the choice is of the repository, or nothing."""

    choice: RestoreChoice
    checkpoint: Checkpoint | None


class LocalRestore:
    """Chooses and restores a version on the nodes; every rank calls the same methods in the same order.

    Args:
        tier: tier of the job, which does not save meanwhile.
    """

    def __init__(self, tier: LocalTier) -> None:
        self._tier, self._nodes = tier, tier.nodes
        self._unusable: dict[LocalVersion, str] = {}  # complete, but no node has a good copy of something

    def choose(self, head: RepositoryHead | None, head_error: object = "") -> RestoreChoice:
        """Return what to restore, see `choose_restore`. Rank 0 logs the warnings.

        Args:
            head: newest version of the repository, the same on all ranks; None: it cannot be read.
            head_error: the reason for that.

        Raises:
            UnavailableError: a folder cannot be read, a rank is lost, or see `choose_restore`.
            ConfigError, CorruptDataError: see `LocalTier.read_branch`.
        """
        self._tier.finish()
        branch = self._tier.read_branch()
        limit = self._tier.settings.max_lost_steps
        choice = choose_restore(
            self._tier.name,
            self._candidates(branch),
            branch,
            head,
            head_error=str(head_error),
            max_lost_steps=limit,
        )
        if self._nodes.channel.rank == 0:
            for warning in choice.warnings:
                logger.warning("%s", warning)
        return choice

    def restore_newest(
        self, head: RepositoryHead | None, head_error: object, options: Mapping[str, Any]
    ) -> FoundOnNodes:
        """Restore what `choose` returns, if it is on the nodes, and begin a branch with it.

        Args:
            head: see `choose`.
            head_error: see `choose`.
            options: arguments of `restore_from`.

        Raises:
            ConfigError: the version does not fit what is to be filled.
            UnavailableError: a disk cannot be read or written, or see `choose`.
        """
        while True:
            choice = self.choose(head, head_error)
            if choice.version is None:
                return FoundOnNodes(choice, None)
            checkpoint = self._try_restore(choice.version, options)
            if checkpoint is not None:
                self._tier.begin_branch(head, choice.version)
                report = replace(checkpoint.report, lost_steps=choice.lost_steps)
                return FoundOnNodes(choice, replace(checkpoint, report=report))

    def _try_restore(self, version: LocalVersion, options: Mapping[str, Any]) -> Checkpoint | None:
        """Return the checkpoint of a version; None: no node has a good copy of a part of it, choose again."""
        for attempt in range(2):
            try:
                return self._restore(version, options)
            except (CorruptDataError, NotFoundError) as error:  # the same on all ranks
                if attempt:
                    self._unusable[version] = str(error)
                    break
                # A restore verifies all bytes. Remove those that are damaged: other nodes may have a good copy.
                if self._nodes.channel.rank == 0:
                    logger.warning("%s is read again from other nodes: %s", version, error)
                self._nodes.on_leaders(lambda: self._nodes.folder.remove_damaged(version))
        return None

    def share(self, version: LocalVersion) -> list[dict[Digest, int]]:
        """Give all nodes what describes a version, and return the objects of each node, with their sizes in bytes.

        Raises:
            NotFoundError: an object is on no node.
            CorruptDataError: an object is damaged; on all ranks.
        """
        return self._share_description(version).objects

    def _candidates(self, branch: NodeBranch) -> list[NodeCandidate]:
        """Return the versions of a branch, newest first, to the first that is complete."""
        folder = self._nodes.folder

        def list_versions() -> Any:
            return [[v.generation, v.step, v.session, published] for v, published in folder.versions().items()]

        found: dict[LocalVersion, bool] = {}
        for on_node in self._nodes.on_leaders(list_versions):
            for generation, step, session, is_published in on_node:
                version = LocalVersion("models", self._tier.name, 0, generation, step, session)
                found[version] = found.get(version, False) or is_published
        candidates = []
        for version in sorted(found, reverse=True):
            if version.generation != branch.generation and version.folder_name != branch.base:
                continue  # of a branch that a job has left
            lacks = self._unusable.get(version) or self._survey(version).lacks
            if lacks and not found[version]:
                continue  # prepared by some nodes, so its save has not ended: nothing that was saved is lost
            candidates.append(NodeCandidate(version, lacks))
            if not lacks:
                return candidates
        base = None if branch.base is None else LocalVersion.of_folder(self._tier.name, branch.base)
        if base is not None and base not in found:
            candidates.append(NodeCandidate(base, "none of these nodes has it"))
        return candidates

    def _survey(self, version: LocalVersion) -> _Holdings:
        """Return what the nodes have of a version; damaged tables and entries are removed."""
        folder = self._nodes.folder
        # The sizes of all objects of a large state are megabytes, and all ranks get each message: a leader reads them
        # from its own table, and sends only what its node has.
        sizes: dict[Digest, int | None] = {}

        def look() -> Any:
            needed = folder.needed_objects(version)
            if needed is None:
                folder.remove_damaged(version)
                return [folder.objects(version), {}]
            sizes.update(needed.sizes)
            return [folder.objects(version), _participants(needed)]

        answers = self._nodes.on_leaders(look)
        objects, participants_by_node = [answer[0] for answer in answers], [answer[1] for answer in answers]
        node = next((node for node, found in enumerate(participants_by_node) if found), None)
        if node is None:
            return _Holdings(objects, {}, "no node has an intact entry and tensor table of it")
        participants = participants_by_node[node]
        lacks = self._nodes.on_leaders(
            lambda: self._describe_missing(sizes, objects, participants) if self._nodes.node == node else None
        )
        return _Holdings(objects, participants, lacks[node])

    def _describe_missing(
        self, sizes: Mapping[Digest, int | None], objects: list[dict[Digest, int]], participants: dict[str, str]
    ) -> str:
        missing = missing_objects(sizes, objects)
        if not missing:
            return ""
        present = {name.id for name in self._nodes.names}
        away = [f"{host} ({node})" for node, host in participants.items() if node not in present]
        text = f"{count_text(len(missing), 'object')} of {len(sizes)} are on none of these nodes"
        return f"{text}; nodes that are missing: {', '.join(away)}" if away else f"{text}, they were lost or damaged"

    def _restore(self, version: LocalVersion, options: Mapping[str, Any]) -> Checkpoint:
        """Return the checkpoint of a version; if a rank fails, its error is raised on all."""
        survey = self._share_description(version)
        copies = NodeCopies(self._nodes, version, survey.objects)
        checkpoint, error = None, None
        try:
            # The folder of a version is a repository in which it is the only one.
            checkpoint = restore_from(copies, f"{version.name}@1", trusted_keys=(), **options)
        except Exception as failure:
            if copies.has_failed_on_all:
                raise
            error = failure
        # If this rank failed before it told the others what it needs, they are waiting for that: they get the error.
        self._nodes.share(None, error)
        assert checkpoint is not None
        return replace(checkpoint, version=version)

    def _share_description(self, version: LocalVersion) -> _Holdings:
        """Give all nodes the entry, the tensor table and the state of a version, and publish it; return a survey.

        Raises:
            NotFoundError: an object is on no node.
        """
        nodes, folder = self._nodes, self._nodes.folder
        survey = self._survey(version)
        if survey.lacks:
            raise NotFoundError(f"{version}: {survey.lacks}")
        entry = next(answer for answer in nodes.on_leaders(lambda: folder.entry(version)) if answer is not None)
        named = set(objects_of_entry(entry, version).all)
        nodes.transfer(version, plan_fetches(survey.objects, [named] * len(survey.objects)))
        content = {name: value for name, value in entry.items() if name not in ("format", "commit", "created")}
        nodes.on_leaders(lambda: folder.prepare(version, content))
        nodes.on_leaders(lambda: folder.publish(version))
        return replace(survey, objects=nodes.on_leaders(lambda: folder.objects(version)))


class NodeCopies(StoredCopies):
    """The objects of a version on the nodes, for one restore: what this node lacks comes from the others.

    Args:
        nodes: the ranks by nodes.
        version: the version; this node has its entry, tensor table and state.
        objects: objects on each node, with their sizes in bytes.

    Attributes:
        has_failed_on_all: whether all ranks have raised the same error when they told each other what they need.
    """

    def __init__(self, nodes: NodeGroup, version: LocalVersion, objects: Sequence[dict[Digest, int]]) -> None:
        super().__init__(nodes.folder.repository(version))
        self._nodes, self._version, self._objects = nodes, version, objects
        self.has_failed_on_all = False

    @contextmanager
    def open_source(self, records: Sequence[TensorRecord]) -> Iterator[ChunkSource]:
        """See `StoredCopies`; all ranks call this once. Raises the error of a rank that cannot read its records."""
        read_bytes = count_bytes(records)
        lacking = self._fetch(read_bytes)
        yield self.direct
        fetched_bytes = sum(read_bytes[digest] for digest in lacking)
        self._bytes_by_place[_OTHER_NODES] += fetched_bytes
        self._bytes_by_place[_OWN_DISK] += read_bytes.total() - fetched_bytes

    def _fetch(self, needed: Collection[Digest]) -> set[Digest]:
        """Copy what this node needs for its ranks; return what it lacked."""
        self.has_failed_on_all = True
        wanted_by_node = [
            {digest for wanted in by_rank for digest in wanted}
            for by_rank in self._nodes.by_node(self._nodes.share(sorted(needed), None))
        ]
        self._nodes.transfer(self._version, plan_fetches(self._objects, wanted_by_node))
        self.has_failed_on_all = False
        return set(needed) - self._objects[self._nodes.node].keys()


def _participants(needed: NeededObjects) -> dict[str, str]:
    """Return the ids and hosts of the nodes that saved a version, by its entry."""
    names = needed.entry.get("nodes")
    if not isinstance(names, list):
        return {"": "unknown"}
    return {str(name.get("id")): str(name.get("host")) for name in names if isinstance(name, dict)}
