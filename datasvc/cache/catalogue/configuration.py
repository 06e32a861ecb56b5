"""Budget and quotas of a cache (`CACHE/cache.json`), and its pins (`CACHE/pins/`), which survive a rebuild.

This module also checks that a folder can be a cache: that it is on a local disk with file locks, is owned by this
user, and has a format that this version of datasvc reads.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote

from datasvc import durable
from datasvc.cache.catalogue.object_locks import locked_byte
from datasvc.cache.catalogue.quotas import Quota, check_quotas
from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.repository import Digest
from datasvc.repository.marker import MARKER
from datasvc.repository.objects.objects import digest_of, parse_digest
from datasvc.sizes import parse_size

CACHE_FORMAT: Final = 2
_NAME: Final = "cache.json"
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")  # a space, tab, newline or backslash in a mount point, see proc(5)
# On these, locks are per machine, lost after a reconnect, or missing. Also, a cache on a network saves no transfer.
_REMOTE_FILE_SYSTEMS: Final = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs"}
    | {"nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb2", "smb3", "smbfs", "vboxsf", "virtiofs", "wekafs"}
)
# FUSE programs that mount remote storage: subtype in "fuse.SUBTYPE", or source of the mount, see `file_system_of`.
_REMOTE_FUSE: Final = frozenset(
    {"alluxio-fuse", "blobfuse", "blobfuse2", "ceph", "ceph-fuse", "cosfs", "cubefs", "curlftpfs", "curvefs"}
    | {"cvmfs2", "davfs", "davfs2", "dfuse", "fuse_dfs", "gcsfuse", "geesefs", "glusterfs", "goofys", "gvfsd-fuse"}
    | {"juicefs", "lizardfs", "mfs", "mountpoint-s3", "objectivefs", "obsfs", "ossfs", "quobyte", "rclone", "s3fs"}
    | {"s3ql", "saunafs", "seaweedfs", "smbnetfs", "sshfs", "vmhgfs-fuse"}
)


@dataclass(frozen=True)
class Configuration:
    """Budget and quotas of a cache.

    Attributes:
        budget_bytes: budget of the cache; 0: none was ever set.
        quotas: quotas by tenant.

    Raises:
        ConfigError: the guarantees of all tenants together exceed the budget.
    """

    budget_bytes: int = 0
    quotas: Mapping[str, Quota] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Without a budget there is nothing to compare the guarantees with.
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
        """Return the configuration that `encode` wrote; `name` is used in messages.

        Raises:
            ConfigError: `content` has a later format, or its quotas are not valid.
            CorruptDataError: `content` cannot be parsed.
        """
        try:
            fields = json.loads(content)
            _check_format(int(fields["format"]), name)
            quotas = {tenant: Quota(**quota) for tenant, quota in fields["tenants"].items()}
            return cls(int(fields["budget_bytes"]), quotas)
        except ConfigError:
            raise  # a subclass of ValueError, but not a sign of damage
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise CorruptDataError(
                f"{name} is damaged: {error!r}; remove it and set the budget again, the cached objects are kept"
            ) from error

    def write(self, folder: Path) -> None:
        """Write the configuration to a cache folder. Raises OSError."""
        durable.write_file(folder / _NAME, self.encode())

    @staticmethod
    def is_written(folder: Path) -> bool:
        """Return whether a cache folder has a configuration."""
        return (folder / _NAME).exists()

    @classmethod
    def read(cls, folder: Path) -> Configuration | None:
        """Return the configuration of a cache folder; None if there is none. Raises the errors of `decode`."""
        path = folder / _NAME
        try:
            return cls.decode(path.read_bytes(), str(path))
        except FileNotFoundError:
            return None


def parse_budget(text: str, folder: Path) -> int:
    """Return the bytes of a budget for a cache at `folder`: a size ("50GB"), or a share of its disk ("10%").

    Raises:
        ConfigError: `text` is neither a size nor a share, is not above zero, or is more than any disk has.
    """
    percent = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if percent:
        if float(percent[1]) > 100:
            raise ConfigError(f"a cache budget of {text!r} is more than the disk has; expected at most 100%")
        # The cache folder may not exist yet; its nearest existing parent is on the same disk.
        existing_folder = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
        budget = int(shutil.disk_usage(existing_folder).total * float(percent[1]) / 100)
    else:
        try:
            budget = parse_size(text)
        except OverflowError as error:
            raise ConfigError(
                f"a cache budget of {text[:20]!r}... is more than any disk has; write a size such as 50GB"
            ) from error
    if budget <= 0:
        raise ConfigError(f"a cache budget of {text!r} is not valid; expected more than 0 bytes, such as 50GB or 10%")
    return budget


def _check_format(file_format: int, name: str) -> None:
    if file_format > CACHE_FORMAT:
        raise ConfigError(
            f"{name} has format {file_format}; this version of datasvc reads formats up to {CACHE_FORMAT}: upgrade "
            "datasvc, or use another cache folder"
        )


def check_folder(folder: Path) -> None:
    """Raise an error if a folder cannot be a cache. The folder must exist.

    Raises:
        ConfigError: the folder is on a network file system, belongs to another user, or has other contents.
    """
    kind = file_system_of(folder, Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape"))
    if kind in _REMOTE_FILE_SYSTEMS or kind.removeprefix("fuse.") in _REMOTE_FUSE:
        raise ConfigError(
            f"{folder} is on {kind}, a network file system, whose file locks are not reliable between nodes; put the "
            "cache on a local disk"
        )
    folder_user = folder.stat().st_uid
    if folder_user != os.geteuid():
        raise ConfigError(
            f"the cache {folder} belongs to user {folder_user}, and this process runs as user {os.geteuid()}: users "
            "cannot share a cache folder; use another folder, or run `datasvc serve` as one user for all"
        )
    # A cache evicts the files below objects/, so these must be its own. Look up objects/ before catalogue/: another
    # process may be creating this cache now, and it creates them in the opposite order. So if objects/ of a cache is
    # found, catalogue/ is found too.
    has_objects = (folder / "objects").exists()
    if (folder / MARKER).exists() or (has_objects and not _is_cache(folder)):
        raise ConfigError(
            f"{folder} is a repository, or another folder with objects/, whose files a cache would evict: choose a "
            "folder that is used by the cache alone"
        )


def may_become_cache(folder: Path) -> bool:
    """Return whether a folder is no cache yet, but could be: it is missing, or has other contents.

    Raises:
        ConfigError: see `check_folder`.
    """
    try:
        if folder.is_dir():
            check_folder(folder)
            return not _is_cache(folder)
        return not folder.exists()
    except OSError:
        return False  # it cannot be read


def _is_cache(folder: Path) -> bool:
    return Configuration.is_written(folder) or (folder / "catalogue").exists()


def file_system_of(folder: Path, mounts: str) -> str:
    """Return the type of the file system of `folder`; `mounts` is the content of /proc/self/mountinfo.

    A FUSE mount has the type "fuse.SUBTYPE". If it has no subtype, the result is "fuse." and the source of the mount
    up to a colon: some programs use their own name as the source.
    """
    longest, kind = -1, ""
    path = str(folder.resolve())
    for line in mounts.splitlines():
        fields, _, type_fields = line.partition(" - ")
        mount_point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields.split(" ")[4])
        is_inside = path == mount_point or path.startswith(mount_point.rstrip("/") + "/")
        # Of two mounts at one mount point, the later one hides the earlier one.
        if is_inside and len(mount_point) >= longest:
            longest, (kind, source) = len(mount_point), type_fields.split(" ")[:2]
            if kind == "fuse":
                kind = f"fuse.{source.partition(':')[0].lower()}"
    return kind


@dataclass(frozen=True)
class Pin:
    """A named set of objects that are not evicted.

    Attributes:
        name: name of the pin, such as "pets@3".
        objects: size in bytes by digest.
    """

    name: str
    objects: Mapping[Digest, int]

    @property
    def size_bytes(self) -> int:
        """Total size of the objects."""
        return sum(self.objects.values())


def changing_pin(folder: Path, name: str) -> AbstractContextManager[None]:
    """Lock a pin for changes inside the block, after waiting for other changes of this pin. Raises OSError."""
    # 60 bits of the name's digest choose the byte to lock. Two names that share a byte only wait for each other.
    return locked_byte(folder / "lock", int(digest_of(name.encode())[:15], 16))


def write_pin(folder: Path, pin: Pin) -> None:
    """Write a pin; it replaces a pin of the same name. Raises OSError."""
    durable.write_file(_path(folder, pin.name), json.dumps({"name": pin.name, "objects": pin.objects}).encode())


def read_pins(folder: Path) -> dict[str, Pin]:
    """Return every pin by name. Raises CorruptDataError if a file is damaged."""
    pins = {}
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_bytes())
            name = str(content["name"])
            objects = {parse_digest(digest): int(size) for digest, size in content["objects"].items()}
        except (KeyError, TypeError, ValueError, AttributeError, CorruptDataError) as error:
            raise CorruptDataError(f"the pin {path} is damaged: {error!r}; remove the file and pin again") from error
        pins[name] = Pin(name, objects)
    return pins


def remove_pin(folder: Path, name: str) -> None:
    """Remove a pin if it exists."""
    _path(folder, name).unlink(missing_ok=True)


def find_pin(folder: Path, name: str) -> Pin:
    """Return a pin. Raises NotFoundError if there is none with that name."""
    pins = read_pins(folder)
    if name not in pins:
        pin_names = ", ".join(sorted(pins)) or "none"
        raise NotFoundError(f"nothing is pinned as {name!r}; existing pins: {pin_names}")
    return pins[name]


def _path(folder: Path, name: str) -> Path:
    return folder / f"{quote(name, safe='@')}.json"
