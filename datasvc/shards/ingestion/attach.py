"""Attach a source: a version whose shards are built from the files of the source, which stay where they are.

An attach reads each file once, as an ingest does: it stores the sample index, the shard table and, in place of the
shard, its recipe. So an attached version has digests, diffs, views and orders like any other. A reader of
a shard, such as a node's cache, builds the same bytes from its file, and verifies them against the digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO

from datasvc.errors import (
    ConfigError,
    CorruptDataError,
    DatasvcError,
    NotFoundError,
    SourceChangedError,
    UnavailableError,
)
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest, Objects, Repository
from datasvc.repository.logs.copies import ATTACHED, RecordedCopy, record_copies
from datasvc.repository.objects.in_place import Recipe
from datasvc.repository.objects.objects import parse_digest
from datasvc.shards.ingestion.build import BuiltShard, HashedObjects, IngestWork, ShardFinisher, ShardOutput
from datasvc.shards.ingestion.build_streamed import fill_shards
from datasvc.shards.ingestion.ingest import AnySource, IngestReport, run_ingest
from datasvc.shards.ingestion.options import Duplicates, IngestSettings, OnBad
from datasvc.shards.ingestion.plan import SHARD_BYTES, BuildOptions, IngestUnit
from datasvc.shards.ingestion.recipes import ShardRecipe, made_by
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.listing import stat_file
from datasvc.shards.sources.common.options import HELD_OUT_SPLIT, SourceOptions
from datasvc.shards.sources.common.source import BadSample
from datasvc.shards.versions.combine import OnCommon
from datasvc.shards.versions.dataset import open_dataset
from datasvc.shards.versions.split_overlap import OnSplitOverlap


def attach(
    repository: Repository,
    source: AnySource,
    name: str,
    *,
    source_options: SourceOptions | None = None,
    classes: Sequence[str] | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_bad: OnBad = "fail",
    duplicates: Duplicates = "keep",
    val_fraction: float | None = None,
    append: bool = False,
    on_common: OnCommon = "fail",
    on_split_overlap: OnSplitOverlap = "fail",
    workers: int | None = 1,
    message: str = "",
    progress: Progress = NO_PROGRESS,
) -> IngestReport:
    """Make WebDataset tars or Parquet files the next version of data set `name`; their bytes stay where they are.

    Samples and keys are those that `ingest` gives, in the order of the source. The repository gets the keys and
    digests of the samples, and for each shard which bytes of which file it is built from. A shard has samples of one
    file: a large tar is divided at samples, and a Parquet file at row groups. A changed file is an error when a shard
    of it is built, before a sample of it is served.

    Args:
        repository: the repository to store the version in.
        source: path or URL of files, which every node that reads the version must be able to read.
        name: name of the data set, which is created if it does not exist; or NAME@BRANCH to commit to a branch.
        source_options: format of the source and options for reading it.
        classes: class names for a source whose labels are integers without names, label 0 first.
        shard_bytes: bytes of a file that are one shard.
        on_bad: see `ingest`, as for all arguments below.
        duplicates: rule for samples with the same content as an earlier one.
        val_fraction: fraction of "train" that becomes "val".
        append: add the samples to those of the newest version, which may be stored or attached.
        on_common: with `append`, what happens to a sample whose key the newest version has.
        on_split_overlap: what happens if two splits share samples.
        workers: number of processes that read files; None: one per core.
        message: text stored with the version.
        progress: counts the bytes, samples and shards.

    Raises:
        ConfigError: the source is of another format, or its URL has credentials; or see `ingest`.
        NotFoundError, BadSampleError, SourceChangedError, ConflictError, UnavailableError: see `ingest`.
    """
    settings = IngestSettings(
        source_options=source_options,
        classes=classes,
        shard_bytes=shard_bytes,
        on_bad=on_bad,
        duplicates=duplicates,
        val_fraction=val_fraction,
        append=append,
        on_common=on_common,
        on_split_overlap=on_split_overlap,
        workers=workers,
        message=message,
        progress=progress,
    )
    report = run_ingest(repository, source, name, settings, in_place=True)
    version = open_dataset(repository, str(report.version))
    tables = {split.name: parse_digest(split.digest) for split in version.values()}
    url = str(version.entry.content["source"]["url"])
    # A purge lists this place. The files have all samples, whatever was purged of other versions: hence 0 redactions.
    record_copies(
        repository.storage,
        [RecordedCopy(str(report.version), ATTACHED, url, sum(report.num_samples.values()), tables, 0)],
    )
    return report


class _OneShard(ShardFinisher):
    """Writes the shard of one split to a file, and keeps nothing else."""

    needs_index = False

    def __init__(self, work: IngestWork, objects: HashedObjects) -> None:
        self._work, self._objects = work, objects
        self._unfinished: list[ShardOutput] = []
        self.digest: Digest | None = None

    def add(self, split: str, ordinal: int, output: ShardOutput) -> None:  # noqa: ARG002 - see `ShardFinisher`
        output.close()
        self.digest = output.digest

    def keep(self, shard: BuiltShard | None) -> None:
        """Do nothing: the shard of the other split is not built."""


def build_shard(objects: Objects, digest: Digest, recipes: Sequence[Recipe], file: BinaryIO | None) -> None:
    """Write an attached shard to `file`, and verify it; see `in_place.build_object`."""
    recipe = _choose_recipe(recipes)
    if file is None:
        return
    source, reader = recipe.source, FileReader(recipe.source.url)
    location = reader.location(recipe.path)
    options = BuildOptions(in_place=True, val_fraction=recipe.val_fraction)
    work = IngestWork("", "", "", "", source, recipe.schema, options, recipe.classes, recipe.labels)
    unit = IngestUnit(0, source.parts[0].split, parts=tuple(source.parts))
    others = {unit.split, HELD_OUT_SPLIT} - {recipe.split}
    finisher = _OneShard(work, HashedObjects(objects.storage, file))
    bad: list[BadSample] = []
    problem: object = None
    try:
        fill_shards(work, unit, finisher, NO_PROGRESS, dict.fromkeys((other, 0) for other in others), bad)
    except UnavailableError:
        raise
    except DatasvcError as error:
        problem = error
    if finisher.digest == digest:
        return
    size_bytes, stamp = stat_file(reader.file_system, recipe.path, location)
    if (size_bytes, stamp) != (recipe.file_bytes, recipe.stamp):
        detail = f"its size or its modification time or ETag is another one: {size_bytes} bytes, {stamp or 'no ETag'}"
    elif recipe.made_by != made_by():
        raise SourceChangedError(
            f"{location} gives other bytes than when it was attached, at the same size and time: it was changed and "
            f"its time set back, or {made_by()} builds other bytes than {recipe.made_by}, which attached it. No "
            "sample of it was served. Put the file back as it was, use that release, or attach it again"
        )
    else:
        detail = "its size and its modification time or ETag are the same, but its bytes differ"
    problem = problem or (f"{bad[0].key}: {bad[0].reason}" if bad else None)
    raise _changed(location, f"{detail}{f' ({problem})' if problem else ''}")


def _choose_recipe(recipes: Sequence[Recipe]) -> ShardRecipe:
    """Return a recipe whose file has its size, and if there is one, its stamp.

    If there is none, raise the error of the first place that does not respond, else of the first one.
    """
    of_size: ShardRecipe | None = None
    errors: list[DatasvcError] = []
    for each in recipes:
        try:
            recipe = ShardRecipe.of_json(each)
            reader = FileReader(recipe.source.url)
            location = reader.location(recipe.path)
            size_bytes, stamp = stat_file(reader.file_system, recipe.path, location)
        except (ConfigError, CorruptDataError, UnavailableError) as failure:
            errors.append(failure)  # another place may have the file
        except NotFoundError:
            errors.append(
                NotFoundError(
                    f"{location} does not exist, and an attached shard is built from it: the repository has no copy "
                    "of its bytes. Put the file back, make it readable from this node, or attach it at its new place"
                )
            )
        else:
            if (size_bytes, stamp) == (recipe.file_bytes, recipe.stamp):
                return recipe
            # Another time or ETag alone is no change: the bytes of a copied or restored file are verified.
            if size_bytes == recipe.file_bytes:
                of_size = of_size or recipe
                continue
            errors.append(_changed(location, f"it has {size_bytes} bytes, and had {recipe.file_bytes}"))
    if of_size is not None:
        return of_size
    raise next((error for error in errors if isinstance(error, UnavailableError)), errors[0])


def _changed(location: str, detail: str) -> SourceChangedError:
    return SourceChangedError(
        f"{location} has changed since it was attached: {detail}. No sample of it was served. Put the file back as "
        "it was, or attach the new one as another version by `datasvc attach`"
    )
