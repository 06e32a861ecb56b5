"""What is set for a cache as a whole: `CACHE/cache.json`. It outlives the catalogue, which can be made again.

Also who may use a folder as a cache: a local disk with locks, of this user, of a format that this datasvc knows.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from datasvc import durable
from datasvc.cache.catalogue.quotas import Quota, check_quotas
from datasvc.errors import ConfigError, CorruptDataError
from datasvc.repository.repository import MARKER

CACHE_FORMAT: Final = 2
_NAME: Final = "cache.json"
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")  # proc(5): space, tab, newline and backslash as octal numbers
# Their locks are kept per machine, lost on a reconnect, or not kept at all; and a cache on a network is none.
_REMOTE_FILE_SYSTEMS: Final = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "davfs", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs", "gfs2", "glusterfs"}
    | {"gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "pvfs2", "smb2", "smb3", "smbfs", "virtiofs"}
)


@dataclass(frozen=True)
class Configuration:
    """Budget and quotas of a cache.

    Attributes:
        budget_bytes: 0 when none was ever set.
        quotas: by tenant.
    """

    budget_bytes: int = 0
    quotas: Mapping[str, Quota] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.budget_bytes:
            check_quotas(self.quotas, self.budget_bytes)

    def encode(self) -> bytes:
        """Return the configuration as JSON."""
        content = {
            "format": CACHE_FORMAT,
            "budget_bytes": self.budget_bytes,
            "tenants": {name: asdict(quota) for name, quota in sorted(self.quotas.items())},
        }
        return json.dumps(content, indent=2).encode() + b"\n"

    @classmethod
    def decode(cls, content: bytes, name: str) -> Configuration:
        """Return what `encode` gave.

        Raises:
            ConfigError: of a later format.
            CorruptDataError: it does not parse.
        """
        try:
            fields = json.loads(content)
            _check_format(int(fields["format"]), name)
            quotas = {tenant: Quota(**quota) for tenant, quota in fields["tenants"].items()}
            return cls(int(fields["budget_bytes"]), quotas)
        except ConfigError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise CorruptDataError(
                f"{name} is damaged: {error!r}; remove it and give the budget again: what is cached stays"
            ) from error

    def write(self, folder: Path) -> None:
        """Publish the configuration in a cache's folder. Raises OSError."""
        durable.write_file(folder / _NAME, self.encode())

    @staticmethod
    def is_written(folder: Path) -> bool:
        """Return whether a cache's folder has one."""
        return (folder / _NAME).exists()

    @classmethod
    def read(cls, folder: Path) -> Configuration | None:
        """Return the configuration of a cache's folder, None where there is none. Raises as `decode`."""
        path = folder / _NAME
        try:
            return cls.decode(path.read_bytes(), str(path))
        except FileNotFoundError:
            return None


def _check_format(found: int, name: str) -> None:
    if found > CACHE_FORMAT:
        raise ConfigError(
            f"{name} has format {found}; this datasvc reads up to {CACHE_FORMAT}: upgrade it, or use "
            "another cache folder"
        )


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be a cache; call it once the folder exists.

    Raises:
        ConfigError: it lies on a network file system, belongs to another user, or holds something else.
    """
    kind = file_system_of(folder, Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape"))
    if kind in _REMOTE_FILE_SYSTEMS:
        raise ConfigError(
            f"{folder} lies on {kind}, a network file system: its locks do not hold among nodes and its disk is not "
            "this node's; put the cache on a local disk"
        )
    owner = folder.stat().st_uid
    if owner != os.geteuid():
        raise ConfigError(
            f"the cache {folder} belongs to user {owner}, this is user {os.geteuid()}: users cannot share a cache "
            "folder; use another folder, or let `datasvc serve` run as one user for all"
        )
    # What lies below objects/ is taken for cached copies, and evicted. Looked at first: another process may be making
    # the folder, and makes objects/ last.
    has_objects = (folder / "objects").exists()
    is_cache = Configuration.is_written(folder) or (folder / "catalogue").exists()
    if (folder / MARKER).exists() or (has_objects and not is_cache):
        raise ConfigError(
            f"{folder} is a repository or something else with objects of its own, which a cache would evict: "
            "give the cache a folder to itself"
        )


def file_system_of(folder: Path, mounts: str) -> str:
    """Return the type of the file system that `folder` lies on; `mounts` as in /proc/self/mountinfo."""
    best, kind = -1, ""
    place = str(folder.resolve())
    for line in mounts.splitlines():
        fields, _, described = line.partition(" - ")
        point = _ESCAPED.sub(lambda found: chr(int(found[1], 8)), fields.split(" ")[4])
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        # Of two mounts on one point the later one is seen.
        if inside and len(point) >= best:
            best, kind = len(point), described.split(" ")[0]
    return kind
