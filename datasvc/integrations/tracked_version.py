"""What an experiment tracker has to know of a model version: its tracker run, and the splits that it read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datasvc.api import DataRepository
from datasvc.models import DataUse
from datasvc.models.versions.data_use import cursor_of
from datasvc.repository.store.redaction import redact_url


@dataclass(frozen=True)
class ReadSplit:
    """A split that a model version read.

    Attributes:
        name: such as "digits@1/train".
        digest: digest of the shard table, which identifies the samples.
        context: "training" or "evaluation".
        epoch: epoch that the run had reached.
        position: position in it; for a mixture that of the mixture.
    """

    name: str
    digest: str
    context: str
    epoch: int
    position: int


def find_run(repo: DataRepository, name: str, field: str) -> str | None:
    """Return the id of the tracker's run that the newest version of a model has in its configuration; None: none."""
    newest = repo.repository.newest("models", name)
    config = {} if newest is None else repo.repository.entry(newest).content.get("config") or {}
    run_id = config.get(field)
    return None if run_id is None else str(run_id)


def describe_reference(repo: DataRepository, ref: str) -> tuple[str, Mapping[str, Any], dict[str, str]]:
    """Return the immutable reference of a model version, its entry, and the tags that a tracker gets.

    Raises NotFoundError: the version does not exist.
    """
    resolved = repo.repository.resolve("models", ref)
    entry = repo.repository.entry(resolved).content
    tags = {"datasvc.repository": redact_url(repo.repository.url), "datasvc.version": str(resolved)}
    names = [split.name for split in read_splits(entry)]
    return str(resolved), entry, tags | ({"datasvc.data": ", ".join(names)} if names else {})


def read_splits(entry: Mapping[str, Any]) -> list[ReadSplit]:
    """Return the splits that a model version read, from its entry; those of a mixture one by one."""
    found = []
    for use in map(DataUse.from_dict, entry.get("data") or ()):
        epoch, position = cursor_of(use.state)
        if "mixture" in use.state:
            tables = [(split["name"], split["version"]) for split in use.state["mixture"]["splits"]]
        else:
            tables = [(f"{use.dataset}/{use.split}", use.state["version"])]
        found += [ReadSplit(name, digest, use.purpose, epoch, position) for name, digest in tables]
    return found
