"""`repo.datasets`: ingest, change, compare, check, read, export and copy data sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from datasvc.api.certificates import list_certificates, read_certificate, read_certificates
from datasvc.api.operation import Collection, Operation
from datasvc.api.purge import purge
from datasvc.api.recorded_copies import read_copies
from datasvc.models.transfer import TransferReport, transfer_datasets
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Repository
from datasvc.repository.branching import branch_history, create_branch, read_branches, remove_branch
from datasvc.repository.removal import RemovalReport, remove_versions
from datasvc.shards.export import export
from datasvc.shards.history.columns import add_column, compact, drop_column, label, rename_column, set_column
from datasvc.shards.history.merge_branch import merge_branch
from datasvc.shards.history.rename import name_classes, rename
from datasvc.shards.history.repair import delete_damaged, repair_dataset
from datasvc.shards.history.revert import revert
from datasvc.shards.ingestion.attach import attach
from datasvc.shards.ingestion.dry_run import dry_run_ingest
from datasvc.shards.ingestion.ingest import ingest
from datasvc.shards.query.contact_sheet import Preview, preview_samples, write_contact_sheet
from datasvc.shards.query.histogram import confusion, histogram
from datasvc.shards.query.query import query
from datasvc.shards.query.sample_details import read_sample
from datasvc.shards.query.sample_page import read_page
from datasvc.shards.versions.dataset import (
    DatasetVersion,
    choose_split,
    list_datasets,
    open_dataset,
    readable_versions,
)
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.describe import describe_version, read_bad_samples, shared_bytes
from datasvc.shards.versions.diff import diff
from datasvc.shards.versions.merge import merge
from datasvc.shards.versions.verify import verify
from datasvc.shards.views.named import find_named, read_views, remove_view, save_view


class Columns:
    """Changes of columns: `repo.datasets.columns`; each commits a version, and writes no shard."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository

    set = Operation(set_column)
    add = Operation(add_column)
    drop = Operation(drop_column)
    rename = Operation(rename_column)


class Datasets(Collection):
    """The data sets of a repository: `repo.datasets`."""

    kind = "datasets"

    ingest = Operation(ingest)
    attach = Operation(attach)
    dry_run = Operation(dry_run_ingest)
    delete = Operation(delete)
    delete_damaged = Operation(delete_damaged)
    purge = Operation(purge)
    certificates = Operation(read_certificates)
    certificate = Operation(read_certificate)
    list_certificates = Operation(list_certificates)
    combine = Operation(merge)
    name_classes = Operation(name_classes)
    label = Operation(label)
    compact = Operation(compact)
    confusion = Operation(confusion)
    revert = Operation(revert)
    branch = Operation(create_branch)
    branches = Operation(read_branches)
    branch_history = Operation(branch_history)
    remove_branch = Operation(remove_branch)
    merge = Operation(merge_branch)
    save_view = Operation(save_view)
    views = Operation(read_views)
    view = Operation(find_named)
    remove_view = Operation(remove_view)
    rename = Operation(rename)
    open = Operation(open_dataset)
    describe = Operation(describe_version)
    log = Operation(readable_versions)
    shared_bytes = Operation(shared_bytes)
    bad_samples = Operation(read_bad_samples)
    diff = Operation(diff)
    verify = Operation(verify)
    repair = Operation(repair_dataset)
    sql = Operation(query)
    samples = Operation(read_page)
    sample = Operation(read_sample)
    histogram = Operation(histogram)
    export = Operation(export)
    push = Operation(transfer_datasets)
    copies = Operation(read_copies)

    @property
    def columns(self) -> Columns:
        """Correct, add, drop and rename columns: `repo.datasets.columns.set("pets", "label", "relabel.csv")`."""
        return Columns(self.repository)

    def ls(self) -> list[DatasetVersion]:
        """Return the newest version of every data set, sorted by name; see `list_datasets`."""
        return list_datasets(self.repository)

    def remove(self, refs: Sequence[str], *, force: bool = False, message: str = "") -> RemovalReport:
        """Remove versions; their numbers are never reused. For arguments and errors, see `remove_versions`."""
        return remove_versions(self.repository, "datasets", refs, force=force, message=message)

    def pull(
        self,
        origin: Repository | str,
        refs: Sequence[str],
        *,
        name: str | None = None,
        with_parents: bool = False,
        with_tags: bool = False,
        with_branches: bool = False,
        dry_run: bool = False,
        progress: Progress = NO_PROGRESS,
    ) -> TransferReport:
        """Copy versions from `origin`, a repository or its URL; for arguments and errors, see `transfer_datasets`."""
        # As in `Models.pull`.
        options = dict(locals())
        del options["self"], options["origin"]
        return transfer_datasets(origin, self.repository, **options)

    def head(
        self, ref: str, num_samples: int = 10, *, split: str | None = None, where: str | None = None
    ) -> Iterator[Preview]:
        """Return the first samples of each split, or of one split, for display, of those that satisfy a condition.

        For errors, see `preview_samples`.
        """
        splits = choose_split(open_dataset(self.repository, ref), split)
        return chain.from_iterable(preview_samples(chosen, num_samples, where) for chosen in splits)

    def contact_sheet(self, ref: str, path: str | Path, num_samples: int = 10, *, split: str | None = None) -> int:
        """Write the samples that `head` returns as an HTML page of thumbnails; return the number of samples.

        For errors, see `preview_samples` and `write_contact_sheet`.
        """
        dataset = open_dataset(self.repository, ref)
        samples = (preview_samples(chosen, num_samples) for chosen in choose_split(dataset, split))
        return write_contact_sheet(Path(path), dataset.title, chain.from_iterable(samples))
