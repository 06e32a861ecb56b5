"""The folder of a decode group: one link per step that a job of the group decodes or has decoded.

The link of a step leads to a pipe of a job while that job decodes the step, afterwards to the memory of the batch.
Only one job can create the link, so each step is decoded once. The folder holds no data, and no job ever waits for a
lock of another: the jobs need no server, and one that exits or is killed leaves nothing but links that lead nowhere.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import quote

from datasvc.errors import ConfigError
from datasvc.loaders.core.batches import Cursor
from datasvc.loaders.core.data_ranks import DataRanks
from datasvc.loaders.decode_sharing.links import LinkFolder, OpenLink, target_of
from datasvc.loaders.decode_sharing.memory import KEY_BYTES, MappedBatches, SharedBuffer, size_of
from datasvc.loaders.decode_sharing.packing import pack

_ROOT: Final = Path("/dev/shm")  # noqa: S108 - local to the node, and the same for all its jobs, unlike TMPDIR
_JOB: Final = "job-"
_MAX_SETTINGS_BYTES: Final = 1 << 20
_MAX_SPARE: Final = 2
_TRIES: Final = 100


def folder_of(name: str, ranks: DataRanks) -> Path:
    """Return the folder of this user's decode group `name`; each data rank has a folder of its own."""
    return _ROOT / f"{_prefix()}{ranks.rank}-of-{ranks.world_size}-{quote(name, safe='')}"


def _prefix() -> str:
    # Process ids are valid in one name space only, and containers may share the root.
    return f"datasvc-decode-{os.getuid()}-{os.stat('/proc/self/ns/pid').st_ino}-"


class PendingStep:
    """A step that another job decodes; a context manager that closes it.

    Args:
        cursor: start of the step.
        link: the open link of the step, to a pipe.
    """

    def __init__(self, cursor: Cursor, link: OpenLink) -> None:
        self.cursor, self.link = cursor, link

    def wait(self, timeout_s: float) -> bool:
        """Wait until the job has decoded the step, has given it up or has exited; return False after `timeout_s`."""
        poll = select.poll()
        poll.register(self.link.descriptor, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.link.descriptor)


class GroupFolder:
    """A job's view of its decode group. One thread calls `publish` and `abandon`, another one the other methods.

    Args:
        name: name of the group.
        ranks: data rank of this process.
        settings: settings that affect the batches and must be equal in all jobs, JSON values by name.
        num_kept: maximum number of mappings of other jobs' memory that are kept for later batches.

    Raises:
        ConfigError: the system is not Linux.
    """

    _links: LinkFolder | None = None  # while this job is a member

    def __init__(self, name: str, ranks: DataRanks, settings: Mapping[str, Any], num_kept: int = 16) -> None:
        if not hasattr(os, "memfd_create") or not _ROOT.is_dir():
            raise ConfigError(f"decode_group needs Linux with {_ROOT}; leave it out on this system")
        self._name, self._path = name, folder_of(name, ranks)
        self._settings = json.dumps(settings, default=repr, sort_keys=True).encode()
        self._process = os.getpid()
        self._job, self._job_descriptor = "", -1
        self._lock = threading.Lock()
        self._claims: dict[Cursor, tuple[int, int]] = {}  # the pipe of each step that this job decodes
        self._published: dict[Cursor, SharedBuffer] = {}
        self._spare: list[SharedBuffer] = []
        self._mapped = MappedBatches(num_kept)
        self._silent: set[str] = set()  # process ids of jobs that this one has given up
        _folders.add(self)

    def join(self) -> None:
        """Become a member; do nothing if this job is one.

        Raises:
            ConfigError: jobs of the group have other settings; the folder belongs to another user.
            OSError: no file descriptor or no memory is left.
        """
        if self._links is not None:
            return
        for path in _ROOT.glob(f"{_prefix()}*"):
            with suppress(OSError, ConfigError):  # the folder of another user, or one that is removed at this moment
                LinkFolder(path).close()
        self._job_descriptor = os.memfd_create("datasvc-decode-settings", os.MFD_CLOEXEC)
        try:
            os.write(self._job_descriptor, self._settings)
            # The clock is that of the whole node, so names tell which job was first.
            self._job = f"{_JOB}{time.monotonic_ns():020}-{self._process}-{self._job_descriptor}"
            self._links = self._enter()
        except BaseException:
            os.close(self._job_descriptor)
            raise
        try:
            self._check_settings(self._links)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Leave the group: give up its steps and free its memory. Batches that jobs have mapped stay valid."""
        if self._links is None or self._process != os.getpid():
            return
        for cursor in list(self._claims):
            self.abandon(cursor)
        self.retire(lambda _: False)
        with self._lock:
            while self._spare:
                self._spare.pop().close()
            links, self._links = self._links, None
        self._mapped.close()
        links.remove(self._job, target_of(self._job_descriptor))
        links.close()
        os.close(self._job_descriptor)

    def find(self, cursor: Cursor) -> Any | PendingStep | None:
        """Return the batch of a step; the pending step, which the caller closes, if a job decodes it; or None.

        Raises:
            OSError: no file descriptor or no memory is left.
        """
        links, name = self._require(), _name_of(cursor)
        link = links.open(name)
        if link is None:
            return None
        batch: Any = None
        try:
            if not link.is_pipe:
                batch = self._mapped.read(link.descriptor, self._key(cursor))
            elif link.process not in self._silent:
                pending, link = PendingStep(cursor, link), None
                return pending
        finally:
            if link is not None:
                os.close(link.descriptor)
        if batch is None:
            links.remove(name, link.target)
        else:
            self._silent.discard(link.process)
        return batch

    def find_or_claim(self, cursor: Cursor) -> Any | PendingStep | None:
        """Return the result of `find`; if it is None, this job is to decode the step and then calls `publish`.

        Raises:
            OSError: see `find`; the link cannot be created.
        """
        for _ in range(_TRIES):
            found = self.find(cursor)
            if found is not None or self._claim(cursor):
                return found
        return None

    def give_up(self, pending: PendingStep) -> None:
        """Stop waiting for a job: this and its other pending steps count as free until it publishes a batch."""
        self._silent.add(pending.link.process)
        self._require().remove(_name_of(pending.cursor), pending.link.target)

    def others(self) -> list[Cursor]:
        """Return the steps that other jobs decode or keep."""
        steps = [_parse(name) for name in self._require().names()]
        with self._lock:
            own = {*self._claims, *self._published}
        return [step for step in steps if step is not None and step not in own]

    def is_alive(self, cursor: Cursor) -> bool:
        """Return whether the job that decodes or keeps a step is running."""
        return self._require().leads_somewhere(_name_of(cursor))

    def publish(self, cursor: Cursor, batch: object) -> None:
        """Hand the batch of a claimed step to the other jobs, and end the claim; do nothing without a claim.

        Raises:
            OSError: no file descriptor or no memory is left.
        """
        if cursor not in self._claims:
            return
        try:
            parts = pack(batch)
            buffer = self._take_buffer(size_of(parts))
            buffer.write(self._key(cursor), parts)
            buffer.unlock()
            with self._lock:
                pipe, links, name = self._claims.get(cursor), self._links, _name_of(cursor)
                # Other jobs give up a job that is silent for too long: the step may be another job's by now.
                if pipe is None or links is None or links.read(name) != target_of(pipe[0]):
                    self._keep_spare(buffer)
                else:
                    self._published[cursor] = buffer
                    links.replace(name, buffer.descriptor)
        finally:
            self.abandon(cursor)

    def abandon(self, cursor: Cursor) -> None:
        """End the claim of a step, if there is one; a job that waits for a step without a batch then decodes it."""
        with self._lock:
            pipe = self._claims.pop(cursor, None)
            if pipe is not None:
                self._require().remove(_name_of(cursor), target_of(pipe[0]))
                # The end of the pipe alone wakes nobody while a forked child has it open.
                os.write(pipe[1], b"\0")
                _close_pipe(pipe)

    def retire(self, is_kept: Callable[[Cursor], bool]) -> None:
        """Drop the published batches that are not to be kept."""
        with self._lock:
            for cursor in [cursor for cursor in self._published if not is_kept(cursor)]:
                buffer = self._published.pop(cursor)
                self._require().remove(_name_of(cursor), target_of(buffer.descriptor))
                self._keep_spare(buffer)

    def close_after_fork(self) -> None:
        """Close the descriptors in a forked child: its copies would hide the parent's exit and keep its memory."""
        for pipe in self._claims.values():
            _close_pipe(pipe)
        for buffer in (*self._published.values(), *self._spare):
            with suppress(BufferError):  # the parent was writing into it
                buffer.close()

    def __del__(self) -> None:
        self.leave()

    def _enter(self) -> LinkFolder:
        """Open the folder, and create the link of this job in it."""
        for _ in range(_TRIES):
            # The last member removes the folder, perhaps after this job has opened it.
            with suppress(FileNotFoundError):
                links = LinkFolder(self._path)
                try:
                    links.create(self._job, self._job_descriptor)
                except BaseException:
                    links.close()
                    raise
                return links
        raise OSError(errno.EAGAIN, "the folder of the decode group is removed again and again", str(self._path))

    def _check_settings(self, links: LinkFolder) -> None:
        """Raise ConfigError if a job that joined before this one has other settings."""
        for name in sorted(links.names()):
            if not name.startswith(_JOB) or name >= self._job:
                continue
            link = links.open(name)
            if link is None:
                continue
            other: Any = None
            # A job that was killed may have left a link that now leads to a file of another process.
            with suppress(OSError, ValueError):
                other = json.loads(os.pread(link.descriptor, _MAX_SETTINGS_BYTES, 0))
            os.close(link.descriptor)
            mine = json.loads(self._settings)
            if isinstance(other, dict) and other != mine:
                raise ConfigError(_describe_mismatch(self._name, mine, other))

    def _claim(self, cursor: Cursor) -> bool:
        """Create the link of a step; return False if another job was faster."""
        pipe = os.pipe()
        try:
            self._require().create(_name_of(cursor), pipe[0])
        except OSError as error:
            _close_pipe(pipe)
            if isinstance(error, FileExistsError):
                return False
            raise
        with self._lock:
            self._claims[cursor] = pipe
        return True

    def _take_buffer(self, size_bytes: int) -> SharedBuffer:
        """Return locked memory for a batch: spare memory that no job maps, or new memory."""
        with self._lock:
            for buffer in self._spare:
                if buffer.size_bytes >= size_bytes and buffer.try_lock():
                    self._spare.remove(buffer)
                    return buffer
        return SharedBuffer(size_bytes)  # no link leads to it yet

    def _keep_spare(self, buffer: SharedBuffer) -> None:
        self._spare.append(buffer)
        while len(self._spare) > _MAX_SPARE:
            self._spare.pop(0).close()

    def _key(self, cursor: Cursor) -> bytes:
        content = self._settings + f" {_name_of(cursor)}".encode()
        return hashlib.blake2b(content, digest_size=KEY_BYTES).digest()

    def _require(self) -> LinkFolder:
        if self._links is None:
            raise OSError(errno.EBADF, "this job is no member of the decode group", str(self._path))
        return self._links


def _describe_mismatch(group: str, mine: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return an error message that names the settings in which another job differs."""
    differing = [name for name in sorted({*mine, *other}) if mine.get(name) != other.get(name)]
    values = "; ".join(f"{name} is {mine.get(name)!r} here and {other.get(name)!r} there" for name in differing)
    return (
        f"the jobs of the decode group {group!r} decode other batches than this job: {values}; give this job another "
        "group name or the same settings"
    )


def _close_pipe(pipe: tuple[int, int]) -> None:
    for descriptor in pipe:
        os.close(descriptor)


def _name_of(cursor: Cursor) -> str:
    return f"{cursor.epoch}-{cursor.position}"


def _parse(name: str) -> Cursor | None:
    epoch, _, position = name.partition("-")
    return Cursor(int(epoch), int(position)) if epoch.isdecimal() and position.isdecimal() else None


_folders: weakref.WeakSet[GroupFolder] = weakref.WeakSet()


def _leave_all() -> None:
    for folder in list(_folders):
        folder.leave()


def _close_all_after_fork() -> None:
    for folder in list(_folders):
        folder.close_after_fork()


atexit.register(_leave_all)
os.register_at_fork(after_in_child=_close_all_after_fork)
