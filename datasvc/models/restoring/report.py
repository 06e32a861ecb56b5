"""How a restore went: how long it took, where its bytes came from, and which copies of them were bad."""

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
    """A copy of an object that could not be used, so that another one was.

    Attributes:
        digest: the object.
        location: where that copy lies.
        reason: what is wrong with it.
        tensors: that have wrong bytes in it, by name; () for a tensor table or a state.
    """

    digest: Digest
    location: str
    reason: str
    tensors: tuple[str, ...]

    def __str__(self) -> str:
        hit = f"; tensors hit: {shorten(self.tensors)}" if self.tensors else ""
        return f"{self.reason}{hit}"


@dataclass(frozen=True)
class RestoreReport:
    """How a restore went.

    Attributes:
        seconds: from the look-up of the version to the last tensor.
        size_bytes: of the tensors.
        came_bytes: stored bytes by where they came from: "resident" in the node's cache, "peer", "origin" by way of
            the cache, "direct" past it.
        bad_copies: what could not be used, and was read from another copy.
    """

    seconds: float
    size_bytes: int
    came_bytes: Mapping[str, int]
    bad_copies: tuple[BadCopy, ...]

    @property
    def bytes_s(self) -> float:
        """Restored bytes a second."""
        return self.size_bytes / self.seconds if self.seconds else 0.0


class BadCopies:
    """What was found bad while reading, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[Digest, str], tuple[str, Integers | None]] = {}

    def add(
        self,
        digest: Digest,
        location: str,
        reason: str,
        *,
        content: Content | None = None,
        intact: Content | None = None,
    ) -> None:
        """Note that the copy of an object at `location` is bad.

        Args:
            digest: the object.
            location: of the copy.
            reason: what is wrong with it.
            content: its bytes, where all could be read; with the right ones they tell which tensors are hit.
            intact: the right ones.
        """
        wrong = None if content is None or intact is None else _differing(content, intact)
        with self._lock:
            self._found.setdefault((digest, location), (reason, wrong))

    def listed(self, records: Iterable[TensorRecord] = ()) -> tuple[BadCopy, ...]:
        """Return the bad copies, each once, with the tensors of `records` that are bad in them."""
        with self._lock:
            found = dict(self._found)
        objects = {digest for digest, _ in found}
        places: dict[Digest, list[tuple[str, ChainLink]]] = {digest: [] for digest in objects}
        for record in records if objects else ():
            for piece in record.pieces:
                for link in piece.chain:
                    if link.object in objects:
                        places[link.object].append((record.name, link))
        return tuple(
            BadCopy(digest, location, reason, _hit(places[digest], wrong))
            for (digest, location), (reason, wrong) in found.items()
        )


def shorten(names: Sequence[str], most: int = 5) -> str:
    """Return names for a message: the first few, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _differing(content: Content, intact: Content) -> Integers | None:
    """Return the offsets of the bytes that differ, ascending; None where the sizes do."""
    if len(content) != len(intact):
        return None
    return np.flatnonzero(np.frombuffer(content, np.uint8) != np.frombuffer(intact, np.uint8))


def _hit(places: Iterable[tuple[str, ChainLink]], wrong: Integers | None) -> tuple[str, ...]:
    """Return the names of tensors that have a wrong byte in one of their links; all of them where nobody can tell."""
    hit = (
        name
        for name, link in places
        if wrong is None or np.searchsorted(wrong, link.offset) < np.searchsorted(wrong, link.offset + link.length)
    )
    return tuple(dict.fromkeys(hit))
