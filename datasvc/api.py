"""Facade of one repository, returned by `datasvc.open`: every method calls one function of `shards` or `models`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from datasvc.shards.ingestion.ingest import AnySource, IngestReport, ingest
from datasvc.shards.query.query import query
from datasvc.shards.versions.class_names import name_classes
from datasvc.shards.versions.dataset import DatasetVersion, open_dataset
from datasvc.shards.versions.delete import DeleteReport, delete
from datasvc.shards.versions.diff import Difference, diff
from datasvc.shards.versions.merge import MergeReport, merge
from datasvc.shards.versions.verify import VerifyReport, verify

if TYPE_CHECKING:
    import torch


class DataRepository:
    """An open repository with its data sets and models. Created by `datasvc.open`.

    Attributes:
        repository: objects and logs, for operations that this class does not offer.
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
        """Return the names of all data sets.

        Raises:
            UnavailableError: the store does not respond.
        """
        return self.repository.names("datasets")

    def models(self) -> list[str]:
        """Return the names of all models.

        Raises:
            UnavailableError: the store does not respond.
        """
        return self.repository.names("models")

    def dataset(self, ref: str) -> DatasetVersion:
        """Return a data-set version, a mapping from split names to splits; for errors, see `open_dataset`."""
        return open_dataset(self.repository, ref)

    def ingest(self, source: AnySource, name: str, **options: Any) -> IngestReport:
        """Ingest a source as the next version of data set `name`; for options and errors, see `shards.ingest`."""
        return ingest(self.repository, source, name, **options)

    def delete(self, ref: str, **options: Any) -> DeleteReport:
        """Commit the next version of a data set without some samples.

        For arguments and errors, see `shards.versions.delete.delete`.
        """
        return delete(self.repository, ref, **options)

    def merge(self, refs: Sequence[str], name: str, **options: Any) -> MergeReport:
        """Commit the samples of several versions as the next version of data set `name`.

        For arguments and errors, see `shards.versions.merge.merge`.
        """
        return merge(self.repository, refs, name, **options)

    def diff(self, a: str, b: str) -> Difference:
        """Return the differences between two data-set versions; for errors, see `shards.versions.diff.diff`."""
        return diff(self.repository, a, b)

    def name_classes(self, ref: str, names: Sequence[str], *, message: str = "") -> Resolved:
        """Commit the next version of a data set, with class names for its integer labels.

        For arguments and errors, see `shards.versions.class_names.name_classes`.
        """
        return name_classes(self.repository, ref, names, message=message)

    def sql(self, ref: str, sql: str) -> pa.Table:
        """Return the result of an SQL query over a data-set version; for errors, see `shards.query.query.query`."""
        return query(self.repository, ref, sql)

    def export(self, ref: str, destination: str, format: str, **options: Any) -> ExportReport:  # noqa: A002
        """Write a data-set version as files of another format.

        For arguments and errors, see `shards.export.export`.
        """
        return export(self.repository, ref, destination, format, **options)

    def verify(self, ref: str, *, deep: bool = False) -> VerifyReport:
        """Find missing and changed objects of a data-set version; for errors, see `shards.versions.verify.verify`."""
        return verify(self.repository, ref, deep=deep)

    def gc(self, **options: Any) -> GcReport:
        """Remove objects that no log entry references; by default only list them (`dry_run`).

        For arguments and errors, see `datasvc.gc.gc`.
        """
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
        """Return a checkpoint manager, which saves versions of model `name` in the background.

        In a job of several ranks, every rank calls this. For errors, see `CheckpointManager`.

        Args:
            name: name of the model; the first save creates it.
            cache: this node's cache, or its folder, for restores; see `models.restoring.restore.restore`.
            peers: other nodes to fetch from, for a cache given by its folder.
            fallback: other repositories with copies of objects, tried in this order.
            trusted_keys: files of public keys; a restored version must be signed by one of them.
            **options: options of `CheckpointManager`.
        """
        restoring = partial(
            restore, self.repository, cache=cache, peers=peers, fallback=fallback, trusted_keys=trusted_keys
        )
        return CheckpointManager(self.repository, name, restoring=restoring, **options)

    def trained_on(self, refs: Sequence[str] = (), **options: Any) -> ConsumerReport:
        """Return the model versions that consumed the given samples.

        For arguments and errors, see `models.find_consumers`.
        """
        return find_consumers(self.repository, refs, **options)

    def lineage(self, ref: str) -> Lineage:
        """Return the lineage of a model version, down to its sources; for errors, see `models.read_lineage`."""
        return read_lineage(self.repository, ref)

    def describe(self, ref: str) -> ModelVersion:
        """Return the metadata of a model version; for errors, see `models.describe_model`."""
        return describe_model(self.repository, ref)

    def save(self, name: str, state: Mapping[str, Any], **options: Any) -> Resolved:
        """Commit `state` as the next version of model `name`; for arguments and errors, see `models.save`."""
        return save(self.repository, name, state, **options)

    def restore(self, ref: str | Resolved, **options: Any) -> Checkpoint:
        """Return a checkpoint, with every byte verified.

        For arguments and errors, see `models.restoring.restore.restore`.
        """
        return restore(self.repository, ref, **options)

    def load_into(self, model: torch.nn.Module, ref: str | Resolved, **options: Any) -> LoadReport:
        """Load the tensors of a model version into a torch module.

        For arguments and errors, see `models.restoring.load_into_module.load_version_into`.
        """
        return load_version_into(model, self.repository, ref, **options)

    def import_model(self, source: str, name: str, **options: Any) -> ImportReport:
        """Store a model of another format as the next version of model `name`.

        For arguments and errors, see `models.interop.import_model`.
        """
        return import_model(self.repository, source, name, **options)

    def export_model(self, ref: str, folder: str, format: str, **options: Any) -> ModelExport:  # noqa: A002
        """Write a model version as files of another format.

        For arguments and errors, see `models.interop.export_model`.
        """
        return export_model(self.repository, ref, folder, format, **options)

    def push(self, refs: Sequence[str], to: str, **options: Any) -> TransferReport:
        """Copy model versions to the repository at URL `to`; for options and errors, see `models.transfer`."""
        return transfer(self.repository, Repository.open(to), refs, **options)

    def pull(self, refs: Sequence[str], origin: str, **options: Any) -> TransferReport:
        """Copy model versions from the repository at URL `origin`; for options and errors, see `models.transfer`."""
        return transfer(Repository.open(origin), self.repository, refs, **options)

    def find(self, condition: str, **options: Any) -> list[Resolved]:
        """Return the model versions that satisfy a condition.

        For arguments and errors, see `models.search.find.find_versions`.
        """
        return find_versions(self.repository, condition, **options)

    def compare(self, a: str, b: str, **options: Any) -> ModelDifference:
        """Return the differences between two model versions; see `models.registry.diff.diff`."""
        return diff_models(self.repository, a, b, **options)

    def remove(self, refs: Sequence[str], **options: Any) -> RemovalReport:
        """Remove model versions; for arguments and errors, see `models.registry.removal.remove`."""
        return remove(self.repository, refs, **options)

    def retain(self, name: str, policy: RetentionPolicy, **options: Any) -> tuple[list[ModelVersion], RetentionPlan]:
        """Return a plan of which versions of a model to keep; with `dry_run=False`, remove the other versions.

        For arguments and errors, see `models.registry.removal.retain`.
        """
        return retain(self.repository, name, policy, **options)

    def tag(self, kind: Kind, ref: str, tag: str, **options: Any) -> Resolved:
        """Point `tag` at the version `ref` resolves to; for arguments and errors, see `Repository.tag`."""
        return self.repository.tag(kind, ref, tag, **options)

    def untag(self, kind: Kind, name: str, tag: str, **options: Any) -> None:
        """Remove a tag but keep its history; for arguments and errors, see `Repository.untag`."""
        self.repository.untag(kind, name, tag, **options)
