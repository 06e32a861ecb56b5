"""Looks a version up in the repository for a restore: rank 0 does, and all ranks get the same answer."""

from __future__ import annotations

from typing import NamedTuple

from datasvc.errors import DatasvcError
from datasvc.models.local.restore_choice import RepositoryHead
from datasvc.models.saving.rank_channel import RankChannel, describe_error, raise_on_all_ranks
from datasvc.models.versions.entry_fields import read_step
from datasvc.repository import Repository, parse_reference


class LookUp(NamedTuple):
    """What is in the repository, the same on all ranks.

    Attributes:
        error: error of rank 0, as all ranks raise it; None: it has found the answer.
        version: version of the reference; None: the model has none.
        head: newest version of the model; None: it could not be read.
    """

    error: DatasvcError | None
    version: str | None
    head: RepositoryHead | None


def look_up(channel: RankChannel, repository: Repository, name: str, ref: str | None, *, has_default: bool) -> LookUp:
    """Return what rank 0 finds; every rank calls this. A tag may be moved between the look-ups of several ranks.

    Args:
        channel: channel between the ranks.
        repository: repository of the model.
        name: name of the model.
        ref: a version or tag of any model; None: the newest version of this model.
        has_default: whether a model without versions is no error.

    Raises:
        LostRankError: a rank is lost.
    """
    error: Exception | None = None
    version, head = None, None
    try:
        if channel.rank == 0:
            head = _read_head(repository, name)
            other = parse_reference(ref or name, "model").name
            if not has_default or repository.newest("models", other) is not None:
                version = str(repository.resolve("models", ref or name))
    except Exception as failure:  # noqa: BLE001 - returned on all ranks
        error = failure
    answers = channel.exchange([describe_error(error), version, head])
    _, version, found = answers[0]
    head = None if found is None else RepositoryHead(*found)
    try:
        raise_on_all_ranks([answer[0] for answer in answers], error)
    except DatasvcError as failure:
        return LookUp(failure, None, head)
    return LookUp(None, version, head)


def _read_head(repository: Repository, name: str) -> RepositoryHead:
    newest = repository.newest("models", name)
    if newest is None:
        return RepositoryHead()
    entry = repository.entry(newest).content
    return RepositoryHead(newest.version, read_step(entry, newest), str(entry.get("branch", "")))
