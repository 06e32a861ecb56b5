"""What `datasvc.open` returns: data sets and models of one repository, each call one step into a room."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from datasvc.cache import Cache
from datasvc.cache.peers.peers import Peers
from datasvc.gc import GcReport, gc
from datasvc.models.interop import ImportReport, ModelExport, export_model, import_model
from datasvc.models.provenance.find_consumers import find_consumers
from datasvc.models.provenance.lineage import Lineage, read_lineage
from datasvc.models.provenance.sample_uses import ConsumerReport
from datasvc.models.registry.diff import ModelDifference
from datasvc.models.registry.diff import diff as diff_models
from datasvc.models.registry.registry import ModelVersion, describe_model
from datasvc.models.registry.removal import RemovalReport, remove, retain
from datasvc.models.registry.retention import RetentionPlan, RetentionPolicy
from datasvc.models.restoring.checkpoint import Checkpoint, save
from datasvc.models.restoring.fit import LoadReport
from datasvc.models.restoring.load_into_module import load_version_into
from datasvc.models.restoring.restore import restore
from datasvc.models.saving.manager import CheckpointManager
from datasvc.models.search.find import find_versions
from datasvc.models.transfer import TransferReport, transfer
from datasvc.repository import Kind, Repository, Resolved
from datasvc.repository.store.storage import redact_url
from datasvc.shards.export import ExportReport, export
from datasvc.shards.ingestion.ingest import IngestReport, ingest
from datasvc.shards.query.query import query
from datasvc.shards.sources import Source
from datasvc.shards.versions.class_names import name_classes
from datasvc.shards.versions.dataset import DatasetVersion, open_dataset
from datasvc.shards.versions.delete import DeleteReport, delete
from datasvc.shards.versions.diff import Difference, diff
from datasvc.shards.versions.merge import MergeReport, merge
from datasvc.shards.versions.verify import VerifyReport, verify

if TYPE_CHECKING:
    import torch


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

    def dataset(self, ref: str) -> DatasetVersion:
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

    def name_classes(self, ref: str, names: Sequence[str], *, message: str = "") -> Resolved:
        """Commit a version with names for its integer labels; arguments and errors are those of `name_classes`."""
        return name_classes(self.repository, ref, names, message=message)

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

    def model(
        self,
        name: str,
        *,
        cache: Cache | str | Path | None = None,
        peers: Peers | None = None,
        fallback: Sequence[Repository | str] = (),
        trusted_keys: Sequence[str | Path] | None = None,
        **options: Any,
    ) -> CheckpointManager:
        """Open a model that a run saves in the background. Of several ranks each calls this.

        Args:
            name: of the model, made when new.
            cache: what the model restores through, as of `restore.restore`, like what follows.
            peers: see `restore.restore`.
            fallback: see `restore.restore`.
            trusted_keys: see `restore.restore`.
            **options: those of `models.Model`, whose errors these are too.
        """
        restoring = partial(
            restore, self.repository, cache=cache, peers=peers, fallback=fallback, trusted_keys=trusted_keys
        )
        return CheckpointManager(self.repository, name, restoring=restoring, **options)

    def trained_on(self, refs: Sequence[str] = (), **samples: Any) -> ConsumerReport:
        """Return which model versions consumed some samples; arguments and errors: see `models.find_consumers`."""
        return find_consumers(self.repository, refs, **samples)

    def lineage(self, ref: str) -> Lineage:
        """Return where a model version came from, down to shards and sources. Raises as `models.read_lineage`."""
        return read_lineage(self.repository, ref)

    def describe(self, ref: str) -> ModelVersion:
        """Return what a model version says of itself. Raises as `describe_model`."""
        return describe_model(self.repository, ref)

    def save(self, name: str, state: Mapping[str, Any], **about: Any) -> Resolved:
        """Commit `state` as the next version of model `name`; arguments and errors are those of `models.save`."""
        return save(self.repository, name, state, **about)

    def restore(self, ref: str | Resolved, **how: Any) -> Checkpoint:
        """Return a checkpoint, every byte verified; arguments and errors are those of `restore.restore`."""
        return restore(self.repository, ref, **how)

    def load_into(self, model: torch.nn.Module, ref: str | Resolved, **how: Any) -> LoadReport:
        """Fill a torch model from a version; arguments and errors: see `load_into_module.load_version_into`."""
        return load_version_into(model, self.repository, ref, **how)

    def import_model(self, source: str, name: str, **options: Any) -> ImportReport:
        """Store a model of another format as the next version of `name`; as `models.foreign.import_model`."""
        return import_model(self.repository, source, name, **options)

    def export_model(self, ref: str, folder: str, format: str, **options: Any) -> ModelExport:  # noqa: A002
        """Write a model version as files of another format; arguments and errors are those of `export_model`."""
        return export_model(self.repository, ref, folder, format, **options)

    def push(self, refs: Sequence[str], to: str, **options: Any) -> TransferReport:
        """Let the repository at URL `to` have model versions too; arguments and errors are those of `transfer`."""
        return transfer(self.repository, Repository.open(to), refs, **options)

    def pull(self, refs: Sequence[str], origin: str, **options: Any) -> TransferReport:
        """Get model versions from the repository at URL `origin`; arguments and errors are those of `transfer`."""
        return transfer(Repository.open(origin), self.repository, refs, **options)

    def find(self, condition: str, **how: Any) -> list[Resolved]:
        """Return the model versions that meet a condition; arguments and errors are those of `find_versions`."""
        return find_versions(self.repository, condition, **how)

    def compare(self, a: str, b: str, **how: Any) -> ModelDifference:
        """Return how two model versions differ; arguments and errors are those of `models.difference.diff`."""
        return diff_models(self.repository, a, b, **how)

    def remove(self, refs: Sequence[str], **how: Any) -> RemovalReport:
        """Remove model versions; arguments and errors are those of `models.removal.remove`."""
        return remove(self.repository, refs, **how)

    def retain(self, name: str, policy: RetentionPolicy, **how: Any) -> tuple[list[ModelVersion], RetentionPlan]:
        """Plan which versions of a model stay, and remove the others if told so; as `models.removal.retain`."""
        return retain(self.repository, name, policy, **how)

    def tag(self, kind: Kind, ref: str, tag: str, **how: Any) -> Resolved:
        """Let `tag` stand on a version; arguments and errors are those of `Repository.tag`."""
        return self.repository.tag(kind, ref, tag, **how)

    def untag(self, kind: Kind, name: str, tag: str, **how: Any) -> None:
        """Take a tag away, its history stays; arguments and errors are those of `Repository.untag`."""
        self.repository.untag(kind, name, tag, **how)
