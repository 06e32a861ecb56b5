"""`repo.runs`: the logs of training runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datasvc.api.operation import Operation
from datasvc.repository import Repository
from datasvc.repository.store.redaction import redact_url
from datasvc.runs import RunHistory, RunLog, follow_run, list_runs, read_run, resolve_run


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

    def follow(self, ref: str, after: str) -> RunHistory:
        """Return what the log of a run has after the `cursor` of an earlier result; see `follow_run` and `read`."""
        return follow_run(self.repository, *resolve_run(self.repository, ref), after)

    def __repr__(self) -> str:
        return f"datasvc.open({redact_url(self.repository.url)!r}).runs"
