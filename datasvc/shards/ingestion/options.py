"""The options of an ingest, which Python, the command line and dry runs share."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, TypeVar, get_args

from datasvc.errors import ConfigError
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.shards.ingestion.executors import EngineName
from datasvc.shards.ingestion.plan import SHARD_BYTES
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.versions.combine import OnCommon
from datasvc.shards.versions.split_overlap import OnSplitOverlap, check_on_overlap

OnBad = Literal["fail", "skip"]
Duplicates = Literal["keep", "drop", "fail"]
CompressColumns = Literal["none", "auto"]
F = TypeVar("F", bound=Callable[..., object])


class IngestOptions(TypedDict, total=False):
    """The keywords of `ingest`, for type checkers; `IngestSettings` describes them and has their defaults."""

    source_options: SourceOptions | None
    classes: Sequence[str] | None
    shard_bytes: int
    compress_columns: CompressColumns | None
    on_bad: OnBad
    decode_check: bool
    duplicates: Duplicates
    max_side: int | None
    quality: int | None
    keep_order: bool
    val_fraction: float | None
    limit: int | None
    seed: int
    append: bool
    on_common: OnCommon
    on_split_overlap: OnSplitOverlap
    engine: EngineName
    workers: int | None
    message: str
    progress: Progress


@dataclass(frozen=True, kw_only=True)
class IngestSettings:
    """The options of an ingest.

    Attributes:
        source_options: format of the source and options for reading it.
        classes: class names for a source whose labels are integers without names, label 0 first.
        shard_bytes: size of the samples in a full shard.
        compress_columns: "auto" compresses the columns of text and numbers that become at least 1.3 times smaller, by
            zstd; each shard measures its own. A reader decodes what it reads of them, and older releases of datasvc
            cannot read such a data set. Blobs and lists stay as they are. "none" compresses nothing. An append
            without it does as the version it continues did.
        on_bad: "fail" checks all samples and commits nothing if one is bad; "skip" leaves bad samples out.
        decode_check: decode every image completely instead of checking its header and its end. Damage of a JPEG is
            then an error even if decoders can repair it.
        duplicates: rule for samples with the same content as an earlier one of their split. "keep" stores and reports
            them, "drop" leaves them out, "fail" raises an error, also if a label contradicts that of an equal sample
            of the version that an append continues.
        max_side: longest side in pixels; larger images are scaled down and encoded again. An append without it uses
            that of the version it continues, and the same for `quality`.
        quality: quality of images that are encoded again, 1 to 100. If only `quality` is given, and not `max_side`,
            all JPEG and WebP images are encoded again.
        keep_order: keep the source's order instead of assigning samples to shards by a permutation.
        val_fraction: fraction of "train" that becomes "val", chosen by the hash of each key, so that a sample keeps
            its split when data is added. None: for an append, the fraction of the data set; else 0.
        limit: read only this many samples of each split, the first ones of the source; bad ones count too. None: all.
        seed: seed of the permutation that assigns samples to shards.
        append: add the samples to those of the newest version.
        on_common: with `append`, if the newest version has a key in any split: "fail"; "drop" the new sample if it is
            equal, and fail if not; "keep" the old sample; or "replace" it by the new one.
        on_split_overlap: if two splits share samples, by key or by equal blobs: "fail" commits nothing, "drop" leaves
            them out of training, "keep" keeps both.
        engine: "local" for processes on this machine, "ray" for a Ray cluster.
        workers: number of processes that build shards; 1: only this process builds; None: one per core.
        message: text stored with the version.
        progress: counts the bytes, samples and shards.

    Raises:
        ConfigError: a rule or the engine is none of the choices.
    """

    source_options: SourceOptions | None = None
    classes: Sequence[str] | None = None
    shard_bytes: int = SHARD_BYTES
    compress_columns: CompressColumns | None = None
    on_bad: OnBad = "fail"
    decode_check: bool = False
    duplicates: Duplicates = "keep"
    max_side: int | None = None
    quality: int | None = None
    keep_order: bool = False
    val_fraction: float | None = None
    limit: int | None = None
    seed: int = 0
    append: bool = False
    on_common: OnCommon = "fail"
    on_split_overlap: OnSplitOverlap = "fail"
    engine: EngineName = "local"
    workers: int | None = 1
    message: str = ""
    progress: Progress = NO_PROGRESS

    def __post_init__(self) -> None:
        check_on_overlap(self.on_split_overlap)
        if self.compress_columns not in (None, *get_args(CompressColumns)):
            raise ConfigError(f"compress_columns is {self.compress_columns!r}; expected 'auto' or 'none'")
        for name, choices in (("on_bad", OnBad), ("duplicates", Duplicates), ("engine", EngineName)):
            if getattr(self, name) not in get_args(choices):
                expected = " or ".join(map(repr, get_args(choices)))
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected {expected}")


def show_ingest_options(function: F) -> F:
    """Let `help` of a function with `**options: Unpack[IngestOptions]` show each of them, with its default."""
    shown = inspect.signature(function)
    parameters = [each for each in shown.parameters.values() if each.kind is not each.VAR_KEYWORD]
    parameters += [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in dataclasses.fields(IngestSettings)
    ]
    function.__signature__ = shown.replace(parameters=parameters)  # type: ignore[attr-defined]
    texts = (inspect.getdoc(IngestSettings) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    function.__doc__ = re.sub(
        r"^    options: see `IngestSettings`.", texts, inspect.getdoc(function) or "", flags=re.MULTILINE
    )
    return function
