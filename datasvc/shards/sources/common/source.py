"""What every source is: pieces that one worker reads from start to end, and the columns of their samples.

A source that knows each sample from its listing (image folders, manifests) is a `ListedSource`: its samples are dealt
to shards one by one. All others are a `StreamedSource`: their parts are dealt to units of work, and each unit is read
as a stream. Either is small, holds no open file or client, and travels to worker processes by pickling.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Final, NamedTuple, Self

import pyarrow as pa

from datasvc.repository.objects.objects import Digest, digest_of
from datasvc.repository.store.storage import redact_url

# Batches that a source yields hold at most so many bytes, or one sample: many parts are read side by side.
BATCH_BYTES: Final = 1 << 20
BATCH_SAMPLES: Final = 4096


@dataclass(frozen=True)
class BadSample:
    """A sample that was not ingested, and why."""

    split: str
    key: str
    reason: str


@dataclass(frozen=True)
class SourcePart:
    """A piece of a source, read from its start to its end by one worker: a tar, a row group, a range of a file.

    Attributes:
        split: which its samples belong to.
        name: unique in the source, for messages; most sources begin the keys of its samples with it.
        size_bytes: about what reading it moves.
        num_samples: where the listing knows it.
        stamp: changes when the part's content may have changed: modification time or entity tag of its file.
        where: JSON values with which `StreamedSource.read` finds it.
    """

    split: str
    name: str
    size_bytes: int
    num_samples: int | None = None
    stamp: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)


class ImageFile(NamedTuple):
    """One file of a listed source; a tuple, since a listing holds millions.

    Attributes:
        key: its path inside its split, unique there.
        path: where it lies on the source's file system.
        size_bytes: as listed.
        label: index of its class, None without classes.
        stamp: changes when the file may have changed.
        values: of the source's extra columns, in their order.
    """

    key: str
    path: str
    size_bytes: int
    label: int | None
    stamp: str = ""
    values: tuple[Any, ...] = ()


class Source(ABC):
    """What can be ingested.

    Attributes:
        kind: its name for `--format` and entries, "webdataset".
        url: where it lies, credentials and all; never stored or shown as it is.
        schema: columns of the samples, `key` first; `shards.schema` says which of them are images.
        classes: names of the labels, index by index; empty without labels.
        ignored: how many files of each other extension were left out.
    """

    kind: ClassVar[str]
    url: str
    schema: pa.Schema
    classes: tuple[str, ...]
    ignored: Counter[str]

    @property
    def keys_are_places(self) -> bool:
        """Keys are made of file and row, so that samples of two splits may have the same."""
        return False

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """About how many bytes reading it moves."""

    @abstractmethod
    def fingerprint(self) -> Digest:
        """Return a digest of everything the listing said: another one means that the source has changed."""

    def _digest(self, listed: list[Any]) -> Digest:
        described = [self.kind, redact_url(self.url), str(self.schema), list(self.classes), listed]
        return digest_of(json.dumps(described, sort_keys=True, default=str).encode())


class ListedSource(Source):
    """A source of files that hold one image each.

    Attributes:
        splits: files of each split, ordered by key.
    """

    splits: dict[str, list[ImageFile]]

    @property
    def num_samples(self) -> int:
        """Images over all splits."""
        return sum(map(len, self.splits.values()))

    @property
    def size_bytes(self) -> int:
        """Bytes of all images, as listed."""
        return sum(file.size_bytes for files in self.splits.values() for file in files)

    def without_files(self) -> Self:
        """Return the source without its listing: what a worker needs whose units carry their files."""
        slim = copy.copy(self)
        object.__setattr__(slim, "splits", {})  # sources are frozen once they are listed; this copy is nobody's yet
        return slim

    def fingerprint(self) -> Digest:
        """Return a digest of the listing."""
        return self._digest([[split, files] for split, files in self.splits.items()])


class StreamedSource(Source):
    """A source of parts.

    Attributes:
        parts: in the source's own order.
    """

    parts: list[SourcePart]

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts, as listed."""
        return sum(part.size_bytes for part in self.parts)

    def fingerprint(self) -> Digest:
        """Return a digest of the listing."""
        return self._digest([asdict(part) for part in self.parts])

    @abstractmethod
    def read(self, part: SourcePart) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield the samples of one part in its order; the same ones each time.

        Yields:
            Batches of `schema` of at most `BATCH_BYTES` or one sample, and of at most `BATCH_SAMPLES`; and a
            `BadSample` for each sample that cannot be read. Where the rest of a part cannot be read (a truncated
            archive), one that says so, and no more.

        Raises:
            NotFoundError, UnavailableError: see `storage.translated`.
            ConfigError: the part's columns are not those of the source.
        """


def printable(text: str) -> str:
    """Return a name with what is not UTF-8 in it escaped."""
    return text.encode("utf-8", "backslashreplace").decode()
