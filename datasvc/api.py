"""What `datasvc.open` returns: data sets and models of one repository, each call one step into a room."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from datasvc.gc import GcReport, gc
from datasvc.models.checkpoint import Checkpoint, restore, save
from datasvc.models.registry import ModelVersion, describe_model
from datasvc.repository import Kind, Repository, Resolved
from datasvc.repository.storage import redact_url
from datasvc.shards.dataset import Dataset, open_dataset
from datasvc.shards.delete import DeleteReport, delete
from datasvc.shards.diff import Difference, diff
from datasvc.shards.export import ExportReport, export
from datasvc.shards.ingest import IngestReport, ingest
from datasvc.shards.merge import MergeReport, merge
from datasvc.shards.query import query
from datasvc.shards.sources import Source
from datasvc.shards.verify import VerifyReport, verify


class DataRepository:
    """A repository open for use. Make one with `datasvc.open`.

    Attributes:
        repository: objects and logs, for what this class does not offer.
    """

    def __init__(self, repository: Repository) -> None:
        self.repository = repository

    @classmethod
    def open(cls, url: str, *, create: bool = False) -> DataRepository:
        """Open the repository at `url`; see `datasvc.open`."""
        return cls(Repository.create(url) if create else Repository.open(url))

    def __repr__(self) -> str:
        return f"datasvc.open({redact_url(self.repository.url)!r})"

    def datasets(self) -> list[str]:
        """Return the names of all data sets. Raises UnavailableError."""
        return self.repository.names("datasets")

    def models(self) -> list[str]:
        """Return the names of all models. Raises UnavailableError."""
        return self.repository.names("models")

    def dataset(self, ref: str) -> Dataset:
        """Return a data-set version: a mapping from split names to splits. Raises as `open_dataset`."""
        return open_dataset(self.repository, ref)

    def ingest(self, source: str | Source | Iterable[Mapping[str, Any]], name: str, **options: Any) -> IngestReport:
        """Ingest a source as the next version of `name`; options and errors are those of `shards.ingest`."""
        return ingest(self.repository, source, name, **options)

    def delete(self, ref: str, **which: Any) -> DeleteReport:
        """Commit the next version without some samples; arguments and errors are those of `shards.delete`."""
        return delete(self.repository, ref, **which)

    def merge(self, refs: Sequence[str], name: str, **options: Any) -> MergeReport:
        """Commit the samples of several versions as the next one of `name`; as `shards.merge`."""
        return merge(self.repository, refs, name, **options)

    def diff(self, a: str, b: str) -> Difference:
        """Return how two data-set versions differ. Raises as `shards.diff`."""
        return diff(self.repository, a, b)

    def sql(self, ref: str, sql: str) -> pa.Table:
        """Return what an SQL query over a data-set version gives. Raises as `shards.query`."""
        return query(self.repository, ref, sql)

    def export(self, ref: str, destination: str, format: str, **options: Any) -> ExportReport:  # noqa: A002
        """Write a data-set version as files of another format; arguments and errors are those of `shards.export`."""
        return export(self.repository, ref, destination, format, **options)

    def verify(self, ref: str, *, deep: bool = False) -> VerifyReport:
        """Look for missing and changed objects of a data-set version. Raises as `shards.verify`."""
        return verify(self.repository, ref, deep=deep)

    def gc(self, **options: Any) -> GcReport:
        """Remove what no log names; by default only say what that is. Arguments and errors are those of `gc.gc`."""
        return gc(self.repository, **options)

    def model(self, ref: str) -> ModelVersion:
        """Return what a model version says of itself. Raises as `describe_model`."""
        return describe_model(self.repository, ref)

    def save(self, name: str, state: Mapping[str, Any], **about: Any) -> Resolved:
        """Commit `state` as the next version of model `name`; arguments and errors are those of `models.save`."""
        return save(self.repository, name, state, **about)

    def restore(self, ref: str) -> Checkpoint:
        """Return a checkpoint, every byte verified. Raises as `models.restore`."""
        return restore(self.repository, ref)

    def tag(self, kind: Kind, ref: str, tag: str) -> Resolved:
        """Let `tag` stand on a version. Raises as `Repository.tag`."""
        return self.repository.tag(kind, ref, tag)
