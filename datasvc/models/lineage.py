"""What a model version came from: its data and position in it, and its code."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DataUse:
    """A split that a run reads, and how far it has come.

    Attributes:
        dataset: the version, "digits@1".
        split: "train".
        state: the loader's state: order, epoch, position. Everything before it was consumed.
    """

    dataset: str
    split: str
    state: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the use as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class CodeRevision:
    """The code of a run.

    Attributes:
        revision: git commit, None outside a git checkout.
        dirty: whether tracked files differed from that commit.
    """

    revision: str | None
    dirty: bool

    def __str__(self) -> str:
        if self.revision is None:
            return "not in a git checkout"
        return self.revision + (" (with local changes)" if self.dirty else "")


def describe_code(folder: Path | None = None) -> CodeRevision:
    """Return the git revision of the checkout around `folder`, the working folder by default."""
    where = str(folder or Path.cwd())
    revision = _git(where, "rev-parse", "HEAD")
    if revision is None:
        return CodeRevision(None, dirty=False)
    return CodeRevision(revision, dirty=bool(_git(where, "status", "--porcelain", "--untracked-files=no")))


def _git(folder: str, *arguments: str) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603
            ["git", "-C", folder, *arguments],  # noqa: S607 - the user's own git
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
