"""What `datasvc.open` returns: data sets and models of one repository, each call one step into a room."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from datasvc.models.checkpoint import Checkpoint, restore, save
from datasvc.models.registry import ModelVersion, describe_model
from datasvc.repository import Kind, Repository, Resolved
from datasvc.shards.dataset import Dataset, open_dataset
from datasvc.shards.ingest import IngestReport, ingest
from datasvc.shards.sources import Source


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
        return f"datasvc.open({self.repository.url!r})"

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
