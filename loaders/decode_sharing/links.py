"""A private folder of symbolic links to file descriptors of running processes: `/proc/PID/fd/N`.

The jobs of a decode group find each other's batches by these links: a link leads to the pipe of a job that decodes a
batch, or to the memory with a decoded batch (`group_folder.py`). A link is created atomically. Its creator changes or
removes the link before it closes the descriptor. When a process exits, even by a crash, the kernel closes its
descriptors, so its links no longer have a target.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from datasvc.errors import ConfigError

_TRIES: Final = 100  # `open` starts again if another process changes the link in the meantime
# Errors of this system or process: they do not mean that the target of a link is gone.
_OUT_OF_RESOURCES: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class OpenLink(NamedTuple):
    """The open target of a link. The caller of `LinkFolder.open` closes the descriptor.

    Attributes:
        target: target of the link.
        descriptor: file descriptor of this process.
    """

    target: str
    descriptor: int

    @property
    def process(self) -> str:
        """Process id of the process that has created the link."""
        return self.target.split("/")[2]

    @property
    def is_pipe(self) -> bool:
        """Whether the link points to a pipe, and not to memory."""
        return stat.S_ISFIFO(os.fstat(self.descriptor).st_mode)


class LinkFolder:
    """An open folder of links, which is created if it does not exist.

    Raises:
        ConfigError: the path is not a folder that only this user can open.
        FileNotFoundError: another process has just removed the folder.
        OSError: no file descriptor or no memory is left. Methods raise it too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with suppress(FileExistsError):
            path.mkdir(0o700)
        self._descriptor = _open_private(path)

    def names(self) -> list[str]:
        """Return the names of all links."""
        return os.listdir(self._descriptor)

    def create(self, name: str, descriptor: int) -> None:
        """Create a link to a descriptor of this process. Raises FileExistsError: a link of this name exists."""
        os.symlink(target_of(descriptor), name, dir_fd=self._descriptor)

    def replace(self, name: str, descriptor: int) -> None:
        """Change a link of this process to another descriptor. Other processes see the old or the new target."""
        temporary_name = f"new-{os.getpid()}-{name}"
        self.create(temporary_name, descriptor)
        os.replace(temporary_name, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def remove(self, name: str, target: str) -> None:
        """Remove a link, unless its target is no longer `target`."""
        with suppress(OSError):  # another process may remove the same link
            if self.read(name) == target:
                os.unlink(name, dir_fd=self._descriptor)

    def read(self, name: str) -> str | None:
        """Return the target of a link; None if there is no such link."""
        try:
            return os.readlink(name, dir_fd=self._descriptor)
        except FileNotFoundError:
            return None

    def open(self, name: str) -> OpenLink | None:
        """Open the target of a link. Return None if there is no link.

        If the link has no target, remove the link and return None.
        """
        for _ in range(_TRIES):
            target = self.read(name)
            if target is None:
                return None
            descriptor = _open_target(target)
            # If the link has not changed, its creator still had the descriptor open at the call above. Otherwise the
            # number of the descriptor may already stand for another file.
            if self.read(name) == target:
                if descriptor is not None:
                    return OpenLink(target, descriptor)
                self.remove(name, target)
            elif descriptor is not None:
                os.close(descriptor)
        return None

    def has_target(self, name: str) -> bool:
        """Return whether the process that has created a link is running and has the descriptor open."""
        try:
            os.stat(name, dir_fd=self._descriptor)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the folder. Remove the links of killed processes, and the folder if no link is left."""
        with suppress(OSError):
            for name in self.names():
                target = self.read(name)
                if target is not None and not self.has_target(name):
                    self.remove(name, target)
        os.close(self._descriptor)
        with suppress(OSError):  # the folder has links, or another process has removed it
            self._path.rmdir()


def target_of(descriptor: int) -> str:
    """Return the target of a link to a descriptor of this process."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _open_private(path: Path) -> int:
    """Open a folder. Raises ConfigError: the folder belongs to another user, or other users can open it."""
    message = (
        f"{path} is not a folder that only this user can open: another user of the node may have created it; choose "
        "another group name, or remove the folder"
    )
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (PermissionError, NotADirectoryError) as error:
        raise ConfigError(message) from error
    status = os.fstat(folder)
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        os.close(folder)
        raise ConfigError(message)
    return folder


def _open_target(target: str) -> int | None:
    """Open the target of a link for reading; None if its process has exited or has closed the descriptor."""
    try:
        # The target may be any file of a new process with the same id. Opening a pipe must not wait for its writer
        # (O_NONBLOCK), and a terminal must not become the one that controls this process (O_NOCTTY).
        descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _OUT_OF_RESOURCES:
            raise
        return None
    # The new process may belong to another user, whose files a job of root can open too.
    if os.fstat(descriptor).st_uid == os.getuid():
        return descriptor
    os.close(descriptor)
    return None
