"""Versions of data sets and models: what never changes of them, their objects and tensors, and their lineage."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from datasvc.errors import ConfigError
from datasvc.models.provenance.find_consumers import find_consumers
from datasvc.models.provenance.lineage import read_lineage
from datasvc.models.registry.registry import ModelVersion, describe_model
from datasvc.models.search.query import find_versions
from datasvc.models.tensors.tensor_table import TensorRecord, read_table
from datasvc.models.transfer.copying import reachable_objects
from datasvc.models.versions.artefacts import artefacts
from datasvc.repository import Kind, ObjectInfo, Repository, Resolved
from datasvc.repository.logs.references import check_name
from datasvc.repository.objects.objects import parse_digest
from datasvc.repository.resolved import KIND_NAMES
from datasvc.shards.lines.commit import check_splits
from datasvc.ui.registry.records import (
    ArtefactFacts,
    ArtefactList,
    ChunkFacts,
    DatasetDetails,
    LineageFacts,
    ModelDetails,
    ObjectFacts,
    ObjectsPage,
    SampleUsers,
    SplitFacts,
    TensorFacts,
    TensorsPage,
    TrainedModels,
)
from datasvc.ui.registry.route import cut_page, read_version
from datasvc.ui.web.page import Parts, Query
from datasvc.ui.web.seen_faults import collect_unreadable
from datasvc.ui.web.site import Site


def read_model(site: Site, parts: Parts, query: Query) -> ModelDetails:
    """Return a version of a model."""
    version = _describe_model(site, parts, query)
    entry = version.entry
    return ModelDetails(
        name=version.name,
        version=version.version,
        ref=str(version),
        created=entry["created"],
        message=entry["message"],
        step=entry["step"],
        metrics=entry["metrics"],
        data=tuple(dict.fromkeys(use["dataset"] for use in entry["data"] if use.get("purpose") != "evaluation")),
        parents=version.parents,
        run=entry.get("run"),
        tensors=version.tensors,
        entry=entry,
    )


def read_dataset(site: Site, parts: Parts, query: Query) -> DatasetDetails:
    """Return a version of a data set."""
    version = _resolve("datasets", site, parts, query)
    entry = site.repo.repository.entry(version).content
    splits = check_splits(entry, version)
    fields = ("samples", "bytes", "shards", "table")
    return DatasetDetails(
        name=version.name,
        version=version.version,
        ref=str(version),
        created=entry.get("created"),
        message=str(entry.get("message", "")),
        splits={name: SplitFacts(**{field: split[field] for field in fields}) for name, split in splits.items()},
        entry=entry,
    )


def list_objects(kind: Kind, site: Site, parts: Parts, query: Query) -> ObjectsPage:
    """Return a page of the objects that a version consists of."""
    objects = _read_objects(site.repo.repository, _resolve(kind, site, parts, query))
    page, following = cut_page(objects, query)
    return ObjectsPage(
        repository=site.url,
        num_objects=len(objects),
        total_bytes=sum(info.size_bytes for info in objects),
        items=tuple(_describe_object(site.repo.repository, info) for info in page),
        next=following,
    )


def list_tensors(site: Site, parts: Parts, query: Query) -> TensorsPage:
    """Return a page of the tensors of a version."""
    version = _describe_model(site, parts, query)
    records = _read_tensors(site.repo.repository, version.tensors)
    page, following = cut_page(records, query)
    return TensorsPage(len(records), tuple(map(_describe_tensor, page)), following)


def list_artefacts(site: Site, parts: Parts, query: Query) -> ArtefactList:
    """Return the artefacts of a version of a model."""
    repository = site.repo.repository
    items = (
        ArtefactFacts(
            name=artefact.name,
            format=artefact.format,
            digest=artefact.digest,
            created=artefact.created,
            message=artefact.message,
            details=artefact.details,
            files={path: _describe_object(repository, info) for path, info in artefact.files.items()},
        )
        for artefact in artefacts(repository, _resolve("models", site, parts, query))
    )
    return ArtefactList(site.url, tuple(items))


def read_version_lineage(site: Site, parts: Parts, query: Query) -> LineageFacts:
    """Return the lineage of a version of a model."""
    return LineageFacts(**read_lineage(site.repo.repository, str(_resolve("models", site, parts, query))).to_dict())


def list_trained_models(site: Site, parts: Parts, query: Query) -> TrainedModels:
    """Return the model versions that were trained on a version of a data set."""
    version = str(_resolve("datasets", site, parts, query))
    with collect_unreadable() as unreadable:
        # A valid name has no quotation mark.
        found = find_versions(site.repo.repository, f"'{version}' in data")
    return TrainedModels(version, tuple(map(str, found)), tuple(unreadable.messages()))


def read_sample_users(site: Site, parts: Parts, query: Query) -> SampleUsers:
    """Return the model versions that consumed the sample `key`, in any version of a data set."""
    key, name = query.text("key"), check_name(parts["name"], KIND_NAMES["datasets"])
    if key is None:
        raise ConfigError("the address has no key; expected ?key= and the key of a sample")
    site.repo.repository.resolve("datasets", name, removed=True)
    with collect_unreadable() as unreadable:
        report: dict[str, Any] = find_consumers(site.repo.repository, keys=[key], data=name).to_json()
    return SampleUsers(**report, unreadable=tuple(unreadable.messages()))


def _resolve(kind: Kind, site: Site, parts: Parts, query: Query) -> Resolved:
    """Return the version in a path. A removed one is not found unless the address has `removed=true`."""
    name = check_name(parts["name"], KIND_NAMES[kind])
    is_removed_too = query.choice("removed", ("false", "true")) == "true"
    return site.repo.repository.resolve(kind, f"{name}@{read_version(parts)}", removed=is_removed_too)


def _describe_model(site: Site, parts: Parts, query: Query) -> ModelVersion:
    return describe_model(site.repo.repository, str(_resolve("models", site, parts, query)))


# A reader asks for one page after the other, and the tables of a large version are megabytes.
@lru_cache(maxsize=1)
def _read_objects(repository: Repository, version: Resolved) -> Sequence[ObjectInfo]:
    return reachable_objects(repository, version, repository.entry(version).content)


@lru_cache(maxsize=1)
def _read_tensors(repository: Repository, table: str) -> Sequence[TensorRecord]:
    return read_table(repository.objects, parse_digest(table))


def _describe_object(repository: Repository, info: ObjectInfo) -> ObjectFacts:
    return ObjectFacts(info.digest, info.size_bytes, repository.objects.path(info.digest))


def _describe_tensor(record: TensorRecord) -> TensorFacts:
    chunks = (ChunkFacts(chunk.start, chunk.shape, chunk.digest) for chunk in record.chunks)
    return TensorFacts(record.name, record.dtype, record.shape, record.nbytes, tuple(chunks))
