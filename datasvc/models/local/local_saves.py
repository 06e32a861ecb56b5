"""Settings of the versions on the disks of the nodes, and what identifies such a version."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from datasvc.errors import ConfigError
from datasvc.repository import Resolved
from datasvc.sizes import parse_size

_FOLDER_NAME = re.compile(r"(\d{8,})-(\d{10,})-([0-9a-f]{16})")


class SaveTo(StrEnum):
    """Where a save is due, the result of `CheckpointManager.should_save`; `NOWHERE` is false, the others are true.

    Attributes:
        NOWHERE: no save is due.
        NODES: to the disks of the nodes only.
        REPOSITORY: to the repository, and to the disks of the nodes if the manager has any.
    """

    NOWHERE = ""
    NODES = "nodes"
    REPOSITORY = "repository"


@dataclass(frozen=True)
class LocalSaves:
    """Where and how many versions each node keeps: `manager(..., local=LocalSaves("/nvme/ckpt"), every_local=50)`.

    Attributes:
        folder: folder on a disk of the node; the same path is another folder on each node.
        keep: number of versions to keep, at least 1. While a version is written, the folder has one more: without
            `max_bytes`, the disk must have space for `keep` + 1.
        max_bytes: bytes that these versions may take on a node, the one that is written included, or text such as
            "200GB"; None: no limit. Older versions are removed before one is written that has the size of the newest
            and does not fit; more are removed if it has become larger. The newest one is never removed for a new one
            that may not be complete, so there must be space for two.
        copies: number of nodes that have each object: with 2, the loss of one node leaves all objects.
        max_lost_steps: most steps that `restore` may lose because the nodes no longer have all of their newest
            version; beyond that it raises an error. None: no limit, `Checkpoint.report` has the number.
    """

    folder: str | Path
    keep: int = 2
    max_bytes: int | str | None = None
    copies: int = 2
    max_lost_steps: int | None = None

    def __post_init__(self) -> None:
        if not str(self.folder):
            raise ConfigError("the folder of local versions is empty; give its path, such as /nvme/ckpt")
        for name, smallest in (("keep", 1), ("copies", 1), ("max_lost_steps", 0)):
            value = getattr(self, name)
            if value is None and name == "max_lost_steps":
                continue
            if type(value) is not int or value < smallest:
                raise ConfigError(f"{name} is {value!r}; expected a number of at least {smallest}")
        if self.limit_bytes is not None and self.limit_bytes < 1:
            raise ConfigError(f"max_bytes is {self.max_bytes!r}; expected at least one byte, or None")

    @property
    def limit_bytes(self) -> int | None:
        """`max_bytes` as a number."""
        return parse_size(self.max_bytes) if isinstance(self.max_bytes, str) else self.max_bytes


@dataclass(frozen=True)
class LocalVersion(Resolved):
    """A version on the nodes; its `version` is 0, which no version of a repository has.

    Attributes:
        generation: number of the branch that it belongs to, see `restore_choice`.
        step: number of optimizer steps of the weights.
        session: random text, another one for each save.
    """

    generation: int = 0
    step: int = 0
    session: str = ""

    def __str__(self) -> str:
        return f"{self.name}, step {self.step}, on the nodes"

    def __lt__(self, other: LocalVersion) -> bool:
        # By generation first: a branch that was left may have more steps than the one that continues.
        return (self.generation, self.step, self.session) < (other.generation, other.step, other.session)

    @property
    def folder_name(self) -> str:
        """Name of the folder of the version."""
        return f"{self.generation:08d}-{self.step:010d}-{self.session}"

    @classmethod
    def of_folder(cls, name: str, folder_name: str) -> LocalVersion | None:
        """Return the version of model `name` in a folder; None: it is not the name of the folder of a version."""
        match = _FOLDER_NAME.fullmatch(folder_name)
        return None if match is None else cls("models", name, 0, int(match[1]), int(match[2]), match[3])


def check_target(to: SaveTo | str, *, has_nodes: bool) -> SaveTo:
    """Return where a save goes. Raises ConfigError: `to` is no place, or is the nodes, and there are none."""
    if to not in (SaveTo.NODES, SaveTo.REPOSITORY):
        raise ConfigError(
            f"to is {to!r}; expected 'repository', 'nodes', or the result of should_save() if it is true"
        )
    if to == SaveTo.NODES and not has_nodes:
        raise ConfigError("to='nodes' needs the folder of each node; give local='/nvme/ckpt' to the manager too")
    return SaveTo(to)


def check_local(local: object, every_local: int | None, *, is_trusted_only: bool) -> None:
    """Raise ConfigError if versions on the nodes cannot go with the other settings of a manager."""
    if every_local is not None and local is None:
        raise ConfigError("every_local needs the folder of each node; give local='/nvme/ckpt' too")
    if is_trusted_only:
        raise ConfigError(
            "local= does not go with trusted keys (trusted_keys= or DATASVC_TRUSTED_KEYS): nothing signs the "
            "versions on the nodes; give local= or trusted keys"
        )
