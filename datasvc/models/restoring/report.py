"""Report of a restore, for `Checkpoint.report` and `DcpReader.report`: duration, origin of the bytes, bad copies."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from datasvc.keyed_random import Integers
from datasvc.models.tensors.tensor_table import ChainLink, TensorRecord
from datasvc.repository import Digest

Content = bytes | memoryview


@dataclass(frozen=True)
class BadCopy:
    """A copy of an object that was unusable; the object was read from another copy.

    Attributes:
        digest: digest of the object.
        location: location of the copy.
        reason: what is wrong with it.
        tensors: names of tensors with wrong bytes in this copy; () for a tensor table or a state.
    """

    digest: Digest
    location: str
    reason: str
    tensors: tuple[str, ...]

    def __str__(self) -> str:
        affected = f"; affected tensors: {shorten(self.tensors)}" if self.tensors else ""
        return f"{self.reason}{affected}"


@dataclass(frozen=True)
class RestoreReport:
    """Duration of a restore, and the places that its bytes were read from.

    Attributes:
        seconds: time from the look-up of the version to the last tensor.
        size_bytes: size of the tensors in memory.
        came_bytes: stored bytes by place: "resident" (in the node's cache before), "peer" and "origin" (fetched into
            the cache), "direct" (read without the cache). Of a version on the nodes, "resident" is the disk of this
            node, and "peer" another node.
        bad_copies: copies that were unusable.
        kept: tensors of `into` for which the version has no value: they keep their own.
        lost_steps: steps of a newer version on the nodes that are lost, because they no longer have all of it.
    """

    seconds: float
    size_bytes: int
    came_bytes: Mapping[str, int]
    bad_copies: tuple[BadCopy, ...]
    lost_steps: int = 0
    kept: tuple[str, ...] = ()

    @property
    def bytes_s(self) -> float:
        """Restored bytes per second."""
        return self.size_bytes / self.seconds if self.seconds else 0.0


class BadCopies:
    """Collects the bad copies that a restore finds. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By digest and location: the reason, and the offsets of the wrong bytes, None if they are unknown.
        self._bad: dict[tuple[Digest, str], tuple[str, Integers | None]] = {}

    def add(
        self,
        digest: Digest,
        location: str,
        reason: str,
        *,
        content: Content | None = None,
        intact: Content | None = None,
    ) -> None:
        """Record that the copy of an object at `location` is bad, for `reason`.

        `content` has the bytes of this copy, and `intact` those of a good copy. Their comparison finds the affected
        tensors. If one of them is None, all tensors with bytes in the object count as affected.
        """
        wrong = None if content is None or intact is None else _differing(content, intact)
        with self._lock:
            # Several readers may find the same copy bad. Keep the first reason.
            self._bad.setdefault((digest, location), (reason, wrong))

    def listed(self, records: Iterable[TensorRecord] = ()) -> tuple[BadCopy, ...]:
        """Return the bad copies, each once, with the names of those tensors in `records` that are affected."""
        with self._lock:
            copies = dict(self._bad)
        if not copies:
            return ()
        objects = {digest for digest, _ in copies}
        links: dict[Digest, list[tuple[str, ChainLink]]] = {digest: [] for digest in objects}
        for record in records:
            for chunk in record.chunks:
                for link in chunk.chain:
                    if link.object in objects:
                        links[link.object].append((record.name, link))
        return tuple(
            BadCopy(digest, location, reason, _affected(links[digest], wrong))
            for (digest, location), (reason, wrong) in copies.items()
        )


def shorten(names: Sequence[str], most: int = 5) -> str:
    """Return names for a message: the first `most` names, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _differing(content: Content, intact: Content) -> Integers | None:
    """Return the offsets of bytes that differ, ascending; None if the sizes differ."""
    if len(content) != len(intact):
        return None
    return np.flatnonzero(np.frombuffer(content, np.uint8) != np.frombuffer(intact, np.uint8))


def _affected(links: Iterable[tuple[str, ChainLink]], wrong: Integers | None) -> tuple[str, ...]:
    """Return the tensors with a wrong byte in one of their links; all tensors if the wrong bytes are unknown."""
    # `searchsorted` counts the wrong offsets below a limit. A link has a wrong byte if more wrong offsets are below
    # its end than below its start.
    names = (
        name
        for name, link in links
        if wrong is None or np.searchsorted(wrong, link.offset) < np.searchsorted(wrong, link.offset + link.length)
    )
    return tuple(dict.fromkeys(names))
