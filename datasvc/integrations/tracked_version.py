"""What an experiment tracker has to know of a model version: which it is, its run, and the splits that it read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from datasvc.api import DataRepository
from datasvc.errors import ConfigError, NotFoundError
from datasvc.models import DataUse
from datasvc.models.versions.data_use import cursor_of
from datasvc.models.versions.entry_fields import runs_in_config
from datasvc.repository.store.redaction import redact_url

REPOSITORY: Final = "datasvc.repository"
VERSION: Final = "datasvc.version"
COMMIT: Final = "datasvc.commit"


@dataclass(frozen=True)
class ReadSplit:
    """A split that a model version read, such as "digits@1/train", for "training" or "evaluation".

    `digest` is that of the shard table, which identifies the samples. The position that the run had reached is that
    of the mixture, if there is one.
    """

    name: str
    digest: str
    context: str
    epoch: int
    position: int


def find_run(repo: DataRepository, name: str, tracker: str) -> str | None:
    """Return the id of the tracker's run that the newest version of a model has in its configuration; None: none."""
    newest = repo.repository.newest("models", name)
    if newest is None:
        return None
    return runs_in_config(repo.repository.entry(newest).content.get("config")).get(tracker)


def describe_reference(repo: DataRepository, ref: str) -> tuple[str, Mapping[str, Any], dict[str, str]]:
    """Return the immutable reference of a model version, its entry, and the tags that a tracker gets.

    Raises NotFoundError: the version does not exist.
    """
    resolved = repo.repository.resolve("models", ref)
    entry = repo.repository.entry(resolved).content
    tags = {REPOSITORY: redact_url(repo.repository.url), VERSION: str(resolved), COMMIT: str(entry["commit"])}
    names = [split.name for split in read_splits(entry)]
    return str(resolved), entry, tags | ({"datasvc.data": ", ".join(names)} if names else {})


def find_version(repo: DataRepository, tags: Mapping[str, Any], owner: str) -> str:
    """Return the model version that tags of `describe_reference` name, such as "net@3"; also a copy by push or pull.

    Raises:
        ConfigError: `owner`, the name in messages, has no such tags, or this repository does not have the version.
    """
    if VERSION not in tags or COMMIT not in tags:
        raise ConfigError(
            f"{owner} is no model version of datasvc: it has no {VERSION!r} and {COMMIT!r}; give one that "
            "datasvc.integrations has registered or logged"
        )
    # Numbers are those of one repository, and its URL may change, so the id of the commit identifies the version.
    name, commit = str(tags[VERSION]).partition("@")[0], tags[COMMIT]
    try:
        candidates = [repo.repository.resolve("models", str(tags[VERSION]))]
    except NotFoundError:
        candidates = []
    candidates += repo.models.versions(name) if repo.repository.newest("models", name) is not None else []
    for version in candidates:
        entry = repo.repository.entry(version).content
        if commit in {entry["commit"], (entry.get("origin") or {}).get("commit")}:
            return str(version)
    raise ConfigError(
        f"{owner} is {tags[VERSION]} of {tags.get(REPOSITORY)}, commit {commit}; no version of {name!r} in "
        f"{redact_url(repo.repository.url)} has this commit: open that repository, or pull the version from it"
    )


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
