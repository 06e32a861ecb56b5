"""Facade of one repository: its data sets, its models, its runs and its garbage collection."""

from __future__ import annotations

import logging
import os

from datasvc.api.datasets import Datasets
from datasvc.api.gc import gc
from datasvc.api.models import Models
from datasvc.api.operation import Operation
from datasvc.api.runs import Runs
from datasvc.errors import UnavailableError
from datasvc.repository import Repository, Storage
from datasvc.repository.store.redaction import redact_url
from datasvc.shards.versions.dataset import open_dataset

logger = logging.getLogger(__name__)


class DataRepository:
    """An open repository, as `datasvc.open` returns it.

    Attributes:
        datasets: the data sets: ingest, delete, merge, diff, tag, verify, export and other operations. The method
            `dataset` is short for `datasets.open`.
        models: the models: save, restore, manager, find, diff, tag, verify, push and other operations.
        runs: the logs of training runs: list, read, start.
        repository: objects and logs, for operations that this class does not offer.
    """

    dataset = Operation(open_dataset)
    gc = Operation(gc)

    def __init__(self, repository: Repository) -> None:
        self.repository = repository
        self.datasets = Datasets(repository)
        self.models = Models(repository)
        self.runs = Runs(repository)

    @classmethod
    def open(
        cls, url: str | os.PathLike[str], *, create: bool = False, unavailable_ok: bool = False
    ) -> DataRepository:
        """Open the repository at `url`; for arguments and errors, see `datasvc.open`."""
        url = os.fspath(url)
        try:
            # `Repository.create` also opens a repository that exists.
            return cls(Repository.create(url) if create else Repository.open(url))
        except UnavailableError as error:
            if not unavailable_ok:
                raise
            logger.warning("the repository is opened without a look at it: %s", error)
            return cls(Repository(Storage(url)))

    def __repr__(self) -> str:
        return f"datasvc.open({redact_url(self.repository.url)!r})"
