"""Interface of sources, through which the ingest lists and reads data of any supported format.

A source whose listing gives each sample (image folders, manifests) is a `ListedSource`: the ingest assigns its
samples to shards one by one. Any other source is a `StreamedSource`: the ingest assigns its parts (such as files) to
units of work, and one worker reads each part from start to end. Sources are pickled for the worker processes, so they
hold no open file or client.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Final, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc

from datasvc.repository.objects.objects import Digest, digest_of
from datasvc.repository.store.redaction import redact_url
from datasvc.shards.format.schema import KEY, is_media
from datasvc.shards.images.header import ImageHeader
from datasvc.shards.sources.common.listing import SourceFile
from datasvc.shards.sources.common.options import SourceOptions, split_of_file

# Limits of a batch that a source yields; a batch of one sample may have more bytes. They are small, because many
# parts are read at the same time.
BATCH_BYTES: Final = 1 << 20
BATCH_SAMPLES: Final = 4096


@dataclass(frozen=True)
class BadSample:
    """A sample that was not ingested, and the reason."""

    split: str
    key: str
    reason: str


@dataclass(frozen=True)
class SourcePart:
    """A part of a source that one worker reads from start to end: a tar, a row group, a range of a file.

    Attributes:
        name: unique name in the source, for messages; in most sources the keys of its samples start with it.
        size_bytes: approximate number of bytes that are read for this part.
        num_samples: None: the listing does not give it.
        stamp: modification time or entity tag of its file; if it differs, the content may have changed.
        where: JSON values by which `StreamedSource.read` locates the part.
    """

    split: str
    name: str
    size_bytes: int
    num_samples: int | None = None
    stamp: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)


class ListedFile(NamedTuple):
    """One file of a listed source.

    Attributes:
        key: path of the file inside its split, unique there.
        path: path of the file on the source's file system.
        size_bytes: size when the file was listed.
        label: index of its class; None: it has no class.
        stamp: modification time or entity tag; if it differs, the file may have changed.
        values: values of the source's extra columns, in their order.
    """

    # A tuple and not a dataclass: a listing holds millions of them.

    key: str
    path: str
    size_bytes: int
    label: int | None
    stamp: str = ""
    values: tuple[Any, ...] = ()


class Source(ABC):
    """A data set in another format than that of shards, which can be ingested.

    Attributes:
        kind: name of the format for `--format` and log entries, such as "webdataset".
        url: URL, which may hold credentials; it is redacted before it is stored or shown.
        schema: columns of the samples, `key` first; `shards.format.schema` defines which of them are images.
        classes: names of the classes by index; empty without labels.
        ignored: number of files that the format does not use, by extension.
        key_prefix: text put before the key of every sample; see `with_key_prefix`.
    """

    kind: ClassVar[str]
    url: str
    schema: pa.Schema
    classes: tuple[str, ...]
    ignored: Counter[str]
    key_prefix: ClassVar[str] = ""

    def with_key_prefix(self, prefix: str) -> Self:
        """Return a copy whose keys start with `prefix`."""
        prefixed = copy.copy(self)
        object.__setattr__(prefixed, "key_prefix", prefix)  # a source may be frozen; this copy is not shared yet
        return prefixed

    @property
    def keys_are_places(self) -> bool:
        """Whether keys are paths, numbers, or file and row: then equal keys of two splits may be different samples.

        False if a column holds the keys: the user gave them, so a key names the same sample in each split.
        """
        return True

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Approximate number of bytes that are read to ingest the source."""

    @abstractmethod
    def fingerprint(self) -> Digest:
        """Return a digest of the listing; it differs if the source has changed."""

    def _digest(self, listed: list[Any]) -> Digest:
        """Return a digest of `listed` (JSON values of the listing) and of the attributes of the source."""
        # The URL is redacted, because new credentials do not make another source. Manifest values that are not JSON,
        # such as dates, become text.
        described = [self.kind, redact_url(self.url), str(self.schema), list(self.classes), listed]
        described += [self.key_prefix] if self.key_prefix else []
        return digest_of(json.dumps(described, sort_keys=True, default=str).encode())


class ListedSource(Source):
    """A source of files that hold one image or sound each.

    Attributes:
        splits: files by split, ordered by key.
    """

    splits: dict[str, list[ListedFile]]

    @property
    def media(self) -> pa.Field:
        """The column that has the content of the files."""
        return next(column for column in self.schema if is_media(column))

    @property
    def size_bytes(self) -> int:
        """Size of all files when they were listed."""
        return sum(file.size_bytes for files in self.splits.values() for file in files)

    def with_key_prefix(self, prefix: str) -> Self:
        """Return a copy whose keys start with `prefix`."""
        prefixed = super().with_key_prefix(prefix)
        splits = {
            split: [file._replace(key=prefix + file.key) for file in files] for split, files in self.splits.items()
        }
        object.__setattr__(prefixed, "splits", splits)
        return prefixed

    def complete(self, file: ListedFile, header: ImageHeader) -> ListedFile:  # noqa: ARG002 - for subclasses
        """Return a file with the values of the extra columns, now that its image is read.

        Raises:
            BadSampleError: the values do not belong to an image of this size.
        """
        return file

    def without_files(self) -> Self:
        """Return a copy without the listing, for workers: their units of work hold the files."""
        unlisted = copy.copy(self)
        object.__setattr__(unlisted, "splits", {})  # as in `Source.with_key_prefix`
        return unlisted

    def fingerprint(self) -> Digest:
        """Return a digest of the listing."""
        return self._digest([[split, files] for split, files in self.splits.items()])


class StreamedSource(Source):
    """A source whose listing gives parts, and whose samples are found by reading the parts.

    Attributes:
        parts: all parts, in the order of the source.
    """

    parts: list[SourcePart]

    @property
    def size_bytes(self) -> int:
        """Size of all parts when they were listed."""
        return sum(part.size_bytes for part in self.parts)

    def fingerprint(self) -> Digest:
        """Return a digest of the listing."""
        return self._digest([asdict(part) for part in self.parts])

    def read_prefixed(self, part: SourcePart) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield what `read` yields, with `key_prefix` before each key; for errors, see `read`."""
        if not self.key_prefix:
            yield from self.read(part)
            return
        for item in self.read(part):
            if isinstance(item, BadSample):
                yield replace(item, key=self.key_prefix + item.key)
            else:
                yield prefix_keys(item, self.key_prefix)

    @abstractmethod
    def read(self, part: SourcePart) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield the samples of one part in order; every call yields the same ones (`PythonSource` only once).

        Yields:
            Batches of `schema` with at most `BATCH_SAMPLES` samples and `BATCH_BYTES` (only a single sample may be
            larger); and a `BadSample` for each sample that cannot be read. If the rest of a part cannot be read (a
            truncated archive), one last `BadSample` stands for the rest.

        Raises:
            NotFoundError: the part's file no longer exists.
            UnavailableError: the store does not respond.
            ConfigError: the columns of the part differ from those of the source.
        """


@dataclass(frozen=True, kw_only=True)
class FileSource(StreamedSource):
    """Base of sources that are listed from files. A subclass adds the attributes that its `read` needs."""

    url: str
    schema: pa.Schema
    parts: list[SourcePart]
    classes: tuple[str, ...] = ()
    ignored: Counter[str] = field(default_factory=Counter)

    @classmethod
    @abstractmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> FileSource:
        """List the source at `url`: its files, columns and classes.

        Raises:
            NotFoundError: there are no files of the format, or no samples in them.
            ConfigError: a file is not of the format, files differ in their columns, or an option is invalid.
            CorruptDataError: a file that the listing reads is damaged.
            UnavailableError: the store does not respond.
        """


def file_part(file: SourceFile, options: SourceOptions, **where: Any) -> SourcePart:
    """Return a part that is a whole file; `SourcePart.where` holds the file's path and the JSON values `where`."""
    where = {"path": file.path, **where}
    return SourcePart(split_of_file(file.name, options), file.name, file.size_bytes, stamp=file.stamp, where=where)


def batch_samples(sample_bytes: float) -> int:
    """Return the number of samples of this size that a batch may hold."""
    return max(1, min(BATCH_SAMPLES, int(BATCH_BYTES / max(sample_bytes, 1))))


def prefix_keys(batch: pa.RecordBatch, prefix: str) -> pa.RecordBatch:
    """Return samples with `prefix` before each key."""
    number = batch.schema.get_field_index(KEY)
    keys = pc.binary_join_element_wise(pa.scalar(prefix), batch.column(number), pa.scalar(""))
    return batch.set_column(number, batch.schema.field(number), keys)


def printable(text: str) -> str:
    """Return a name or key in which bytes that are not UTF-8 are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()
