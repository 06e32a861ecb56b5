"""Ingest: a source becomes the next version of a data set.

The plan - which sample goes to which shard, in which order - is a pure function of the source's listing and the
options, so the same source gives the same shards, byte for byte. Samples are dealt to shards by a permutation keyed
by the seed, so class-sorted sources do no harm. All objects are stored before the one commit; whatever fails
before it leaves nothing visible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from datasvc.errors import BadSampleError, ConfigError
from datasvc.keyed import KeyedPermutation, derive_keys
from datasvc.repository import ObjectInfo, Repository, Resolved
from datasvc.repository.references import check_name
from datasvc.repository.storage import redact_url
from datasvc.shards.images import read_header
from datasvc.shards.schema import HEIGHT, IMAGE, KEY, LABEL, WIDTH, image_schema
from datasvc.shards.sources.image_folder import FileReader, ImageFile, ImageFolder
from datasvc.shards.table import ShardTable
from datasvc.shards.writer import ShardStatistics, ShardWriter

OnBad = Literal["fail", "skip"]

SHARD_BYTES = 64 << 20
_PERMUTATION = 16  # purpose of keys; those of the access order are below
_NAMED_BAD_SAMPLES = 10


@dataclass(frozen=True)
class BadSample:
    """A sample that was not ingested, and why."""

    split: str
    key: str
    reason: str


@dataclass(frozen=True)
class IngestReport:
    """What an ingest did.

    Attributes:
        version: the committed version.
        num_samples: samples in each split.
        num_shards: shards in each split.
        size_bytes: bytes of all shards.
        bad: samples that were skipped.
        ignored: files of the source that are no images, by extension.
    """

    version: Resolved
    num_samples: dict[str, int]
    num_shards: dict[str, int]
    size_bytes: int
    bad: list[BadSample] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)


def ingest(
    repository: Repository,
    source: str | ImageFolder,
    name: str,
    *,
    shard_bytes: int = SHARD_BYTES,
    on_bad: OnBad = "fail",
    decode_check: bool = False,
    seed: int = 0,
    message: str = "",
    report: Callable[[int], None] | None = None,
) -> IngestReport:
    """Ingest an image folder as the next version of data set `name`. Existing versions are untouched.

    Args:
        repository: where to.
        source: local folder or fsspec URL, see `sources.image_folder`; or one that was listed already.
        name: of the data set, made when new.
        shard_bytes: image bytes at which a shard is full.
        on_bad: "fail" commits nothing when a sample is bad, after all were looked at; "skip" leaves it out.
        decode_check: decode every image fully rather than check its header and its end.
        seed: of the permutation that deals samples to shards.
        message: kept with the version.
        report: called with the bytes of each sample once it was looked at.

    Raises:
        ConfigError: an option is out of range, or the source's layout is mixed.
        NotFoundError: the source is not there or holds no image.
        BadSampleError: samples are bad and `on_bad` is "fail"; names and counts them.
        ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`.
    """
    check_name(name, "data set")
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes is {shard_bytes}; expected at least 1")
    if on_bad not in ("fail", "skip"):
        raise ConfigError(f"on_bad is {on_bad!r}; expected 'fail' or 'skip'")
    source = ImageFolder.list(source) if isinstance(source, str) else source
    builder = _ShardBuilder(repository, source, decode_check=decode_check, report=report)
    tables = {}
    for split, files in source.splits.items():
        shards = [builder.build(split, plan) for plan in plan_shards(files, shard_bytes, seed)]
        kept = [shard for shard in shards if shard[1].num_samples]
        tables[split] = ShardTable.build(kept, builder.schema, source.classes)
    _check_bad(builder.bad, source, on_bad)
    options = {"shard_bytes": shard_bytes, "on_bad": on_bad, "decode_check": decode_check, "seed": seed}
    entry = {
        "message": message,
        "splits": {split: _store_table(repository, table) for split, table in tables.items()},
        "source": {"kind": "image-folder", "url": redact_url(source.url), "options": options},
        "skipped": len(builder.bad),
    }
    committed = repository.versions("datasets", name).append(lambda _head: entry)
    return IngestReport(
        version=Resolved("datasets", name, committed.number),
        num_samples={split: table.num_samples for split, table in tables.items()},
        num_shards={split: table.num_shards for split, table in tables.items()},
        size_bytes=sum(table.size_bytes for table in tables.values()),
        bad=builder.bad,
        ignored=source.ignored,
    )


def plan_shards(files: Sequence[ImageFile], shard_bytes: int, seed: int) -> list[list[ImageFile]]:
    """Deal files to shards: permute them by the seed, then cut where `shard_bytes` are reached."""
    keys = derive_keys(seed, 0, _PERMUTATION, KeyedPermutation.num_keys)
    order = KeyedPermutation(len(files), keys).permute(np.arange(len(files)))
    plans: list[list[ImageFile]] = []
    room = 0
    for number in order.tolist():
        if room <= 0:
            plans.append([])
            room = shard_bytes
        plans[-1].append(files[number])
        room -= files[number].size_bytes
    return plans


class _ShardBuilder:
    """Reads, checks and writes the samples of one shard after the other."""

    def __init__(
        self,
        repository: Repository,
        source: ImageFolder,
        *,
        decode_check: bool,
        report: Callable[[int], None] | None,
    ) -> None:
        self.schema: pa.Schema = image_schema(labelled=bool(source.classes))
        self.bad: list[BadSample] = []
        self._repository = repository
        self._reader = FileReader(source.url)
        self._decode_check = decode_check
        self._report = report

    def build(self, split: str, files: Sequence[ImageFile]) -> tuple[ObjectInfo, ShardStatistics]:
        """Store one shard; returns its name, size and statistics."""
        with self._repository.objects.writing() as sink, ShardWriter(sink, self.schema) as writer:
            for file in files:
                content = self._reader.read(file)
                try:
                    writer.append(self._sample(file, content))
                except BadSampleError as error:
                    self.bad.append(BadSample(split, _printable(file.key), str(error)))
                if self._report is not None:
                    self._report(len(content))
        return sink.info, writer.statistics

    def _sample(self, file: ImageFile, content: bytes) -> dict[str, Any]:
        if _printable(file.key) != file.key:
            raise BadSampleError("its name is not UTF-8: rename it")
        header = read_header(content, decode=self._decode_check)
        sample = {KEY: file.key, IMAGE: content, WIDTH: header.width, HEIGHT: header.height}
        return sample if file.label is None else {**sample, LABEL: file.label}


def _check_bad(bad: list[BadSample], source: ImageFolder, on_bad: OnBad) -> None:
    """Raise BadSampleError where bad samples forbid a commit: any with "fail", all of a split always."""
    in_split = Counter(sample.split for sample in bad)
    emptied = any(count == len(source.splits[split]) for split, count in in_split.items())
    if not bad or (on_bad == "skip" and not emptied):
        return
    named = "; ".join(f"{sample.split}/{sample.key}: {sample.reason}" for sample in bad[:_NAMED_BAD_SAMPLES])
    more = f"; and {len(bad) - _NAMED_BAD_SAMPLES} more" if len(bad) > _NAMED_BAD_SAMPLES else ""
    raise BadSampleError(
        f"{len(bad)} of {source.num_samples} samples of {redact_url(source.url)} are bad, nothing was committed: "
        f"{named}{more}. "
        "Mend or remove them, or leave them out with --on-bad skip, which must leave some in each split"
    )


def _store_table(repository: Repository, table: ShardTable) -> dict[str, Any]:
    stored = repository.objects.put(table.encode())
    return {
        "table": stored.digest,
        "samples": table.num_samples,
        "bytes": table.size_bytes,
        "shards": table.num_shards,
    }


def _printable(key: str) -> str:
    return key.encode("utf-8", "backslashreplace").decode()
