"""The fields of all responses of the registry. They are stable: fields may be added, none is renamed or removed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

Ref = Annotated[str, "Reference to a version, such as `digits-cnn@3`."]
Time = Annotated[str | None, "ISO 8601 in UTC, by the clock of the writer; null: not recorded."]
DigestText = Annotated[str, "BLAKE3-256 of the bytes of an object: 64 hexadecimal digits."]
Metrics = Annotated[
    Mapping[str, float | str], 'Metrics by name; a value that is not finite is a text: "nan", "inf" or "-inf".'
]
Next = Annotated[int | None, "Value of `after` for the next page; null: this is the last page."]
Unreadable = Annotated[tuple[str, ...], "What is left out because it cannot be read, and why."]


@dataclass(frozen=True)
class RegisteredName:
    """A data set or a model."""

    name: str
    newest: Annotated[
        int | None, "Newest version that is not removed, of a data set on its main line; null: there is none."
    ]
    num_versions: Annotated[int, "Number of versions, with removed ones."]
    removed: Annotated[tuple[int, ...], "Removed versions, ascending."]
    tags: Annotated[Mapping[str, int], "Version of each tag."]
    branches: Annotated[Mapping[str, int], "Head of each branch; a model has none."]


@dataclass(frozen=True)
class NamesPage:
    """A page of the names, in alphabetical order."""

    items: tuple[RegisteredName, ...]
    next: Next
    unreadable: Unreadable


@dataclass(frozen=True)
class RegisteredTag:
    """The version that a tag points at now."""

    name: Annotated[str, "Name of the data set or model."]
    tag: str
    version: int
    ref: Ref


@dataclass(frozen=True)
class TagList:
    """The tags of a data set or model."""

    items: tuple[RegisteredTag, ...]
    unreadable: Unreadable


@dataclass(frozen=True)
class TagMove:
    """One move of a tag."""

    version: Annotated[int | None, "Version that the tag points at since then; null: the tag was removed."]
    created: Time


@dataclass(frozen=True)
class TagHistory:
    """All moves of a tag."""

    items: Annotated[tuple[TagMove, ...], "Oldest first."]


@dataclass(frozen=True)
class ModelRow:
    """A version of a model in a list."""

    version: int
    ref: Ref
    created: Time
    message: str
    step: Annotated[int | None, "Optimizer steps of its weights."]
    metrics: Metrics
    tags: tuple[str, ...]
    removed: bool


@dataclass(frozen=True)
class ModelVersionsPage:
    """A page of the versions of a model."""

    items: Annotated[tuple[ModelRow, ...], "Newest first."]
    next: Next
    unreadable: Unreadable


@dataclass(frozen=True)
class DatasetRow:
    """A version of a data set in a list."""

    version: int
    ref: Ref
    created: Time
    message: str
    samples: Annotated[int, "Samples of all splits."]
    bytes: Annotated[int, "Bytes of all splits."]
    tags: tuple[str, ...]
    removed: bool
    branch: Annotated[str | None, "Branch that it was committed on; null: the main line."]


@dataclass(frozen=True)
class DatasetVersionsPage:
    """A page of the versions of a data set."""

    items: Annotated[tuple[DatasetRow, ...], "Newest first."]
    next: Next
    unreadable: Unreadable


@dataclass(frozen=True)
class ModelDetails:
    """What never changes of a version of a model; its tags and its removal are not part of it."""

    name: str
    version: int
    ref: Ref
    created: Time
    message: str
    step: Annotated[int | None, "Optimizer steps of its weights."]
    metrics: Metrics
    data: Annotated[tuple[str, ...], "Data sets that it was trained on, such as `digits@2`."]
    parents: Annotated[tuple[str, ...], "Versions that it continues."]
    run: Annotated[str | None, "Run whose log describes its training, NAME/ID."]
    tensors: Annotated[str, "Digest of its tensor table: equal for equal tensors in equal chunks."]
    entry: Annotated[Mapping[str, Any], "Its log entry as stored; docs/reference/formats.md has the fields."]


@dataclass(frozen=True)
class SplitFacts:
    """A split of a data-set version."""

    samples: int
    bytes: int
    shards: int
    table: Annotated[str, "Digest of its shard table: equal for equal samples."]


@dataclass(frozen=True)
class DatasetDetails:
    """What never changes of a version of a data set; its tags and its removal are not part of it."""

    name: str
    version: int
    ref: Ref
    created: Time
    message: str
    splits: Mapping[str, SplitFacts]
    entry: Annotated[Mapping[str, Any], "Its log entry as stored; docs/reference/formats.md has the fields."]


@dataclass(frozen=True)
class ObjectFacts:
    """An object of a version."""

    digest: DigestText
    size_bytes: int
    path: Annotated[str, "Path below the URL of the repository."]


@dataclass(frozen=True)
class ObjectsPage:
    """A page of the objects that a version consists of, sorted by digest."""

    repository: Annotated[str, "URL of the repository, without secrets."]
    num_objects: int
    total_bytes: Annotated[int, "Size of all objects, also of other pages. Other versions may share them."]
    items: tuple[ObjectFacts, ...]
    next: Next


@dataclass(frozen=True)
class ChunkFacts:
    """A chunk of a tensor."""

    start: Annotated[tuple[int, ...], "Index of its first element in the tensor."]
    shape: tuple[int, ...]
    digest: Annotated[str, "BLAKE3-256 of the bytes of its elements in row-major order."]


@dataclass(frozen=True)
class TensorFacts:
    """A tensor of a version."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: Annotated[int, "Bytes in memory."]
    chunks: tuple[ChunkFacts, ...]


@dataclass(frozen=True)
class TensorsPage:
    """A page of the tensors of a version, in the order of its tensor table."""

    num_tensors: int
    items: tuple[TensorFacts, ...]
    next: Next


@dataclass(frozen=True)
class ArtefactFacts:
    """Files that were made from a version and attached to it, such as an ONNX graph."""

    name: str
    format: Annotated[str, "Such as `onnx`."]
    digest: Annotated[str, "Digest of the list of its files: equal for equal files."]
    created: str
    message: str
    details: Annotated[Mapping[str, Any], "Facts about the files, such as the opset."]
    files: Annotated[Mapping[str, ObjectFacts], "Its files by their path in the artefact."]


@dataclass(frozen=True)
class ArtefactList:
    """The artefacts of a version of a model."""

    repository: Annotated[str, "URL of the repository, without secrets."]
    items: tuple[ArtefactFacts, ...]


@dataclass(frozen=True)
class LineageFacts:
    """Where a model version comes from, as `datasvc models lineage --json` prints it."""

    version: Ref
    models: Annotated[tuple[Mapping[str, Any], ...], "The version and all that it continues, newest first."]
    datasets: Annotated[tuple[Mapping[str, Any], ...], "Data-set versions that they read, and those before them."]
    shards: Annotated[Mapping[str, tuple[str, ...]], "Digests of the shards by the digest of their shard table."]
    gaps: Annotated[tuple[str, ...], "What is not known, in words."]


@dataclass(frozen=True)
class TrainedModels:
    """The model versions that were trained on a data-set version."""

    version: Ref
    models: Annotated[tuple[str, ...], "References; removed versions are left out."]
    unreadable: Unreadable


@dataclass(frozen=True)
class SampleUsers:
    """The model versions that consumed a sample, as `datasvc models trained-on --json` prints them."""

    samples: int
    missing: Annotated[tuple[str, ...], "The key, if no data that these versions read has it."]
    versions: Annotated[tuple[Mapping[str, Any], ...], "Versions with the number of requested samples of each."]
    gaps: Annotated[Mapping[str, tuple[str, ...]], "What is not known of a version, in words."]
    consumed: Annotated[tuple[Mapping[str, Any], ...], "Each use: data, version, epoch, position, step."]
    unreadable: Unreadable


@dataclass(frozen=True)
class RunFacts:
    """The state of a training run."""

    ref: Annotated[str, "NAME/ID."]
    name: str
    id: str
    state: Annotated[str, "Such as `running`, `not responding`, `finished`, `failed`, `interrupted`."]
    message: str
    started_s: Annotated[float, "Seconds since 1970."]
    last_s: Annotated[float, "When its newest part was written, in seconds since 1970."]
    step: Annotated[int | None, "Optimizer steps; null before the first one."]
    latest: Annotated[Mapping[str, Any], "Newest value of each fact of its steps, such as `loss`."]
    versions: Annotated[tuple[str, ...], "Model versions that it has saved, oldest first; at most the last 100."]
    data: Annotated[tuple[str, ...], "Versions of data sets."]
    world_size: Annotated[int | None, "Number of ranks; null: unknown."]
    verdict: Annotated[str, "Bottleneck in words; empty: none was reported."]


@dataclass(frozen=True)
class RunsPage:
    """A page of the runs."""

    items: Annotated[tuple[RunFacts, ...], "Newest first."]
    next: Next


@dataclass(frozen=True)
class ProblemDetails:
    """An error, as RFC 9457 defines it."""

    title: Annotated[str, "Meaning of the status."]
    status: Annotated[int, "Status of the response."]
    detail: Annotated[str, "What was expected, what was found, and what to do."]
