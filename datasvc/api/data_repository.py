"""Facade of one repository: its data sets, its models, its runs and its garbage collection."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING, Any

from datasvc.api.datasets import Datasets
from datasvc.api.gc import gc
from datasvc.api.models import Models
from datasvc.api.operation import Operation
from datasvc.errors import ConfigError, UnavailableError
from datasvc.repository import Repository, Storage
from datasvc.repository.store.redaction import redact_url
from datasvc.runs import RunHistory, RunLog, follow_run, list_runs, read_run, resolve_run
from datasvc.shards.versions.dataset import open_dataset
from datasvc.threads import call_within

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from datasvc.ledger.signals import SignalSource, SignalWriter
    from datasvc.models.provenance.signal_summary import SignalSummary
    from datasvc.models.provenance.signal_values import Reduce
    from datasvc.shards import Split

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


class Runs:
    """The run logs of a repository: of which runs there are, how they went, and a log for a new one."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository

    ls = Operation(list_runs)

    def start(
        self,
        name: str,
        *,
        run_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        data: Sequence[str] | str = (),
        parent: str | None = None,
        world_size: int = 1,
        facts: Mapping[str, Any] | None = None,
    ) -> RunLog:
        """Open the log of a new run, or the next attempt of a run; for arguments and errors, see `RunLog.open`."""
        return RunLog.open(
            self.repository,
            name,
            run_id=run_id,
            config=config,
            data=data,
            parent=parent,
            world_size=world_size,
            facts=facts,
        )

    def read(self, ref: str) -> RunHistory:
        """Return what the log of a run has.

        Args:
            ref: the run, such as "digits-cnn/20261123-221830-3fa9c1"; a name means its newest run.

        Raises:
            ConfigError, NotFoundError, UnavailableError: see `resolve_run` and `read_run`.
        """
        return read_run(self.repository, *resolve_run(self.repository, ref))

    def follow(self, ref: str, after: str, *, timeout_s: float | None = None) -> RunHistory:
        """Return what the log of a run has after the `cursor` of an earlier result; see `follow_run` and `read`.

        Args:
            ref: the run, see `read`.
            after: cursor; "" returns all.
            timeout_s: seconds to wait for the store, more than 0; None: as long as its client does. A store that does
                not answer in this time leaves a thread behind. It ends when the client gives up, or with the program.

        Raises:
            ConfigError: `timeout_s` is not valid; or see `resolve_run` and `follow_run`.
            NotFoundError: see `resolve_run` and `follow_run`.
            UnavailableError: the store does not respond, or not within `timeout_s`.
        """

        def follow() -> RunHistory:
            return follow_run(self.repository, *resolve_run(self.repository, ref), after)

        if timeout_s is None:
            return follow()
        if not 0 < timeout_s <= TIMEOUT_MAX:
            raise ConfigError(
                f"timeout_s is {timeout_s}; expected seconds above 0, at most {TIMEOUT_MAX:,.0f}, or None to wait as "
                "long as the client of the store does"
            )
        try:
            return call_within(timeout_s, follow)
        except TimeoutError as error:
            raise UnavailableError(
                f"{self.repository.storage.location('runs')} has not answered for {timeout_s:g} s; try again with "
                "the same cursor, or a longer timeout_s"
            ) from error

    def record(self, ref: str, loader: SignalSource, *, name: str = "loss") -> SignalWriter:
        """Record a signal of a run: from here on, `loader.record(batch, values)` keeps a number for each sample.

        Every rank calls this for its own loader. For arguments and errors, see `SignalWriter`.
        """
        from datasvc.ledger.signals import SignalWriter

        return SignalWriter(self.repository, ref, loader, name=name)

    def signals(self, ref: str) -> list[str]:
        """Return the names of the signals that a run has recorded.

        Args:
            ref: the run, see `read`.

        Raises:
            ConfigError, NotFoundError, UnavailableError: see `resolve_run`.
        """
        from datasvc.ledger.signals import list_signals

        return list_signals(self.repository, "/".join(resolve_run(self.repository, ref)))

    def signal(
        self, ref: str, split: Split, name: str = "loss", *, reduce: Reduce = "last"
    ) -> npt.NDArray[np.float32]:
        """Return what a run recorded for each sample of a split: `float32[len(split)]`, NaN for those it never saw.

        Args:
            ref: the run, see `read`.
            split: the split that the run read.
            name: name of the signal.
            reduce: of several epochs, the value of the "last", their "mean" or their "max".

        Raises:
            ConfigError, NotFoundError, CorruptDataError, UnavailableError: see `resolve_run` and `signal_values`.
        """
        from datasvc.models.provenance.signal_values import signal_values

        run = "/".join(resolve_run(self.repository, ref))
        return signal_values(split, run, name, reduce=reduce, repository=self.repository)

    def signal_summary(
        self, ref: str, name: str = "loss", *, data: str | None = None, count: int = 24
    ) -> SignalSummary:
        """Return the distribution of the last epoch of a signal, and the samples with the largest values.

        For arguments and errors, see `summarize_signal`; `ref` may be a name, for its newest run.
        """
        from datasvc.models.provenance.signal_summary import summarize_signal

        run = "/".join(resolve_run(self.repository, ref))
        return summarize_signal(self.repository, run, name, data=data, count=count)

    def signal_table(self, ref: str, dataset: str, name: str = "loss", *, reduce: Reduce = "last") -> pa.Table:
        """Return what a run recorded of the samples of a data set, by key, for `datasets.columns.add`.

        For arguments and errors, see `signal_values.signal_table`; `ref` may be a name, for its newest run.
        """
        from datasvc.models.provenance.signal_values import signal_table

        run = "/".join(resolve_run(self.repository, ref))
        return signal_table(self.repository, run, dataset, name, reduce=reduce)

    def __repr__(self) -> str:
        return f"datasvc.open({redact_url(self.repository.url)!r}).runs"
