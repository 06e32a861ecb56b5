"""Membership of a job in a decode group: its link in the group's folder, and the comparison of settings.

The link of a member points to a file in memory with its settings, through a file descriptor of its process (see
`links`). A job that joins the group compares them with its own settings. `GroupFolder` has one `Membership`.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from datasvc.errors import ConfigError
from datasvc.loaders.decode_sharing.links import LinkFolder, target_of
from datasvc.loaders.ranks.data_ranks import DataRanks

_ROOT: Final = Path("/dev/shm")  # noqa: S108 - local to the node, and the same for all its jobs, unlike TMPDIR
_MEMBER_PREFIX: Final = "job-"  # prefix of the names of members' links; other links have the name of a step
_MAX_SETTINGS_BYTES: Final = 1 << 20
_TRIES: Final = 100  # `join` starts again if the last member removes the folder in the meantime


def folder_of(name: str, ranks: DataRanks) -> Path:
    """Return the folder of a group of this user. Each data rank has its own folder, because its batches differ."""
    return _ROOT / f"{_prefix()}{ranks.rank}-of-{ranks.world_size}-{quote(name, safe='')}"


def _prefix() -> str:
    # The prefix names the PID namespace: containers may share `_ROOT`, but the links contain process ids, which are
    # valid only in one namespace.
    return f"datasvc-decode-{os.getuid()}-{os.stat('/proc/self/ns/pid').st_ino}-"


class Membership:
    """One job's place in a decode group, from `join` to `leave`.

    Args:
        name: name of the group.
        ranks: data rank of this process.
        settings: settings that affect the batches and must be equal in all jobs, JSON values by name.

    Attributes:
        path: folder of the group.
        settings: the settings as JSON; equal settings give equal bytes.

    Raises:
        ConfigError: the system is not Linux.
    """

    def __init__(self, name: str, ranks: DataRanks, settings: Mapping[str, Any]) -> None:
        if not hasattr(os, "memfd_create") or not _ROOT.is_dir():
            raise ConfigError(f"decode_group needs Linux with {_ROOT}; leave it out on this system")
        self.name, self.path = name, folder_of(name, ranks)
        self.settings = json.dumps(settings, default=repr, sort_keys=True).encode()
        self._links: LinkFolder | None = None
        self._link_name = ""  # name of this job's link
        self._descriptor = -1  # memory with this job's settings, the target of the link

    @property
    def is_member(self) -> bool:
        """Whether the job is a member."""
        return self._links is not None

    @property
    def links(self) -> LinkFolder:
        """The links in the folder of the group. Raises OSError: this job is not a member."""
        if self._links is None:
            raise OSError(errno.EBADF, "this job is no member of the decode group", str(self.path))
        return self._links

    def join(self) -> None:
        """Become a member. First remove the links of killed jobs in all groups of this user.

        Raises:
            ConfigError: jobs of the group have other settings; the folder belongs to another user.
            OSError: no file descriptor or no memory is left.
        """
        for path in _ROOT.glob(f"{_prefix()}*"):
            with suppress(OSError, ConfigError):  # the folder belongs to another user, or a job has just removed it
                LinkFolder(path).close()  # `close` removes links whose process has exited
        self._descriptor = os.memfd_create("datasvc-decode-settings", os.MFD_CLOEXEC)
        try:
            os.write(self._descriptor, self.settings)
            # All processes of a node have the same monotonic clock, so sorted names are in the order of joining.
            self._link_name = f"{_MEMBER_PREFIX}{time.monotonic_ns():020}-{os.getpid()}-{self._descriptor}"
            self._links = self._enter()
        except BaseException:
            os.close(self._descriptor)  # there is no link yet
            raise
        try:
            self._check_settings(self._links)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Remove the link of this job. The last member also removes the folder."""
        links, self._links = self.links, None
        links.remove(self._link_name, target_of(self._descriptor))
        links.close()
        os.close(self._descriptor)

    def _enter(self) -> LinkFolder:
        """Open the folder, create the link of this job in it, and return the folder."""
        for _ in range(_TRIES):
            # The last member may remove the folder between opening it and `create`: then try again.
            with suppress(FileNotFoundError):
                links = LinkFolder(self.path)
                try:
                    links.create(self._link_name, self._descriptor)
                except BaseException:
                    links.close()
                    raise
                return links
        raise OSError(
            errno.EAGAIN,
            f"could not join the decode group in {_TRIES} tries, because other jobs removed its folder",
            str(self.path),
        )

    def _check_settings(self, links: LinkFolder) -> None:
        """Raise ConfigError if a job that joined before this one has other settings.

        Each job checks only the jobs before it. So of two jobs with different settings, only the later one fails.
        """
        for name in sorted(links.names()):
            if not name.startswith(_MEMBER_PREFIX) or name >= self._link_name:
                continue
            link = links.open(name)
            if link is None:
                continue
            other: Any = None
            # After a job is killed, a new process may get its process id. The link then points to any file of that
            # process. So ignore what cannot be read, or is not a JSON object: it is not the settings of a member.
            with suppress(OSError, ValueError):
                other = json.loads(os.pread(link.descriptor, _MAX_SETTINGS_BYTES, 0))
            os.close(link.descriptor)
            mine = json.loads(self.settings)
            if isinstance(other, dict) and other != mine:
                raise ConfigError(_describe_mismatch(self.name, mine, other))


def _describe_mismatch(group: str, mine: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return an error message that names the settings in which another job differs."""
    differing = [name for name in sorted({*mine, *other}) if mine.get(name) != other.get(name)]
    values = "; ".join(f"{name} is {mine.get(name)!r} here and {other.get(name)!r} there" for name in differing)
    return (
        f"the jobs of the decode group {group!r} decode other batches than this job: {values}; give this job another "
        "group name or the same settings"
    )
