"""The folder of a decode group: one symbolic link per step that a job of the group decodes or has decoded.

While a job decodes a step, the link of the step points to a pipe of this job; afterwards it points to the memory of
the batch. Jobs that wait for the step poll the pipe. A job claims a step by creating its link: only one job can
create it, so each step is decoded once. The jobs need no server, and no job waits for a lock of another job. A job
that exits or is killed leaves only links without a target, which other jobs remove.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import select
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Self

from datasvc.loaders.core.batches import Cursor
from datasvc.loaders.decode_sharing.links import OpenLink, target_of
from datasvc.loaders.decode_sharing.membership import Membership
from datasvc.loaders.decode_sharing.memory import KEY_BYTES, MappedBatches, SharedBuffer, pack, size_of
from datasvc.loaders.ranks.data_ranks import DataRanks

# Buffers to keep for the next batches of this job, because allocating memory takes longer than filling it.
_MAX_SPARE: Final = 4
_TRIES: Final = 100  # to find or claim a step that other jobs claim and abandon at the same time


class PendingStep:
    """A step that another job decodes, with the open link to its pipe; a context manager that closes the link."""

    def __init__(self, cursor: Cursor, link: OpenLink) -> None:
        self.cursor, self.link = cursor, link

    def wait(self, timeout_s: float) -> bool:
        """Wait until the job has decoded or abandoned the step, or has exited. Return False after `timeout_s`."""
        poll = select.poll()
        poll.register(self.link.descriptor, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.link.descriptor)


class GroupFolder:
    """A job's view of its decode group. One thread calls `publish` and `abandon`, another one the other methods.

    A cursor identifies a step. `num_kept` is the maximum number of mappings of other jobs' memory to keep for later
    batches; for the other arguments and errors see `Membership`. Methods raise OSError if no file descriptor or no
    memory is left.
    """

    def __init__(self, name: str, ranks: DataRanks, settings: Mapping[str, Any], num_kept: int = 16) -> None:
        self._membership = Membership(name, ranks, settings)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._claims: dict[Cursor, tuple[int, int]] = {}  # pipe (read end, write end) of each claimed step
        self._published: dict[Cursor, SharedBuffer] = {}  # the batches that this job has decoded for the group
        self._spare: list[SharedBuffer] = []  # memory of retired batches, for the next ones
        self._mapped = MappedBatches(num_kept)
        # Process ids of jobs that did not finish a step in time; their claims are ignored, see `give_up`.
        self._silent: set[str] = set()
        _folders.add(self)

    def join(self) -> None:
        """Become a member, unless this job is one. Raises ConfigError, OSError: see `Membership.join`."""
        if not self._membership.is_member:
            self._membership.join()

    def leave(self) -> None:
        """Leave the group: abandon all claims and free the memory. Batches that are in use stay valid."""
        # A forked child must not remove the links of its parent.
        if not self._membership.is_member or self._pid != os.getpid():
            return
        self.abandon_all()
        self.retire(lambda _: False)
        self._mapped.close()
        with self._lock:
            while self._spare:
                self._spare.pop().close()
            self._membership.leave()

    def find(self, cursor: Cursor) -> Any | PendingStep | None:
        """Return the batch of a step, or None if there is no batch.

        If another job decodes the step, return a `PendingStep`, which the caller must close.
        """
        links, name = self._membership.links, _link_name(cursor)
        link = links.open(name)
        if link is None:
            return None
        batch: Any = None
        try:
            if not link.is_pipe:
                batch = self._mapped.read(link.descriptor, self._key(cursor))
            elif link.process not in self._silent:
                pending = PendingStep(cursor, link)
                link = None  # from now on, the pending step closes the descriptor
                return pending
        finally:
            if link is not None:
                os.close(link.descriptor)
        if batch is None:
            # The link is useless: its job is silent, or its memory has another batch now. Remove it, so that any job
            # can claim the step.
            links.remove(name, link.target)
        else:
            self._silent.discard(link.process)
        return batch

    def find_or_claim(self, cursor: Cursor) -> Any | PendingStep | None:
        """Return the result of `find`. If it is None, claim the step; the caller decodes it and calls `publish`."""
        # Repeat: another job may claim the step after `find`, and abandon it before the next `find`.
        for _ in range(_TRIES):
            result = self.find(cursor)
            if result is not None or self._claim(cursor):
                return result
        return None

    def give_up(self, pending: PendingStep) -> None:
        """Ignore all claims of the job that decodes a pending step, until that job publishes a batch."""
        self._silent.add(pending.link.process)
        self._membership.links.remove(_link_name(pending.cursor), pending.link.target)

    def others(self) -> list[Cursor]:
        """Return the steps that other jobs decode or keep."""
        steps = [_cursor_of(name) for name in self._membership.links.names()]
        with self._lock:
            own_steps = {*self._claims, *self._published}
        return [step for step in steps if step is not None and step not in own_steps]

    def is_alive(self, cursor: Cursor) -> bool:
        """Return whether the job that decodes or keeps a step is running."""
        return self._membership.links.has_target(_link_name(cursor))

    def publish(self, cursor: Cursor, batch: object) -> None:
        """Hand the batch of a claimed step to the other jobs, and end the claim. Do nothing without a claim."""
        if cursor not in self._claims:
            return
        try:
            parts = pack(batch)
            buffer = self._take_buffer(size_of(parts))
            buffer.write(self._key(cursor), parts)
            buffer.unlock()
            with self._lock:
                pipe, name = self._claims.get(cursor), _link_name(cursor)
                # If this job took too long, another job may have claimed the step.
                if pipe is None or self._membership.links.read(name) != target_of(pipe[0]):
                    self._keep_spare(buffer)
                else:
                    self._published[cursor] = buffer
                    self._membership.links.replace(name, buffer.descriptor)
        finally:
            # This ends the claim and wakes the waiting jobs. The link to the published memory stays.
            self.abandon(cursor)

    def abandon(self, cursor: Cursor) -> None:
        """End the claim of a step, if there is one. If no batch was published, a waiting job decodes the step."""
        with self._lock:
            pipe = self._claims.pop(cursor, None)
            if pipe is not None:
                self._membership.links.remove(_link_name(cursor), target_of(pipe[0]))
                # Wake the waiting jobs by a byte: closing would not wake them while a forked child has the pipe open.
                os.write(pipe[1], b"\0")
                _close_pipe(pipe)

    def abandon_all(self) -> None:
        """End the claims of all steps."""
        for cursor in list(self._claims):
            self.abandon(cursor)

    def retire(self, is_kept: Callable[[Cursor], bool]) -> None:
        """Drop the published batches for which `is_kept` returns False."""
        with self._lock:
            for cursor in [cursor for cursor in self._published if not is_kept(cursor)]:
                buffer = self._published.pop(cursor)
                self._membership.links.remove(_link_name(cursor), target_of(buffer.descriptor))
                self._keep_spare(buffer)

    def close_after_fork(self) -> None:
        """Close the descriptors in a forked child: they would keep memory and pipes open after the parent's exit."""
        for pipe in self._claims.values():
            _close_pipe(pipe)
        for buffer in (*self._published.values(), *self._spare):
            with suppress(BufferError):  # the parent was writing to the memory at the fork
                buffer.close()

    def __del__(self) -> None:
        if hasattr(self, "_membership"):  # False if the constructor has failed
            self.leave()

    def _claim(self, cursor: Cursor) -> bool:
        """Create the link of a step. Return False if another job has created it."""
        pipe = os.pipe()
        try:
            self._membership.links.create(_link_name(cursor), pipe[0])
        except OSError as error:
            _close_pipe(pipe)
            if isinstance(error, FileExistsError):
                return False
            raise
        with self._lock:
            self._claims[cursor] = pipe
        return True

    def _take_buffer(self, size_bytes: int) -> SharedBuffer:
        """Return memory for a batch, locked so that no job reads it: spare memory, or new memory."""
        with self._lock:
            for buffer in self._spare:
                if buffer.size_bytes >= size_bytes and buffer.try_lock():
                    self._spare.remove(buffer)
                    return buffer
        return SharedBuffer(size_bytes)  # needs no lock: no job can find it before a link points to it

    def _keep_spare(self, buffer: SharedBuffer) -> None:
        """Keep memory for a later batch. The caller holds the lock."""
        self._spare.append(buffer)
        while len(self._spare) > _MAX_SPARE:
            self._spare.pop(0).close()

    def _key(self, cursor: Cursor) -> bytes:
        """Return the key that identifies the batch of a step. It also depends on the settings of the group."""
        content = self._membership.settings + f" {_link_name(cursor)}".encode()
        return hashlib.blake2b(content, digest_size=KEY_BYTES).digest()


def _close_pipe(pipe: tuple[int, int]) -> None:
    for descriptor in pipe:
        os.close(descriptor)


def _link_name(cursor: Cursor) -> str:
    return f"{cursor.epoch}-{cursor.position}"


def _cursor_of(name: str) -> Cursor | None:
    """Return the step of a link; None for a link of another kind, such as that of a member."""
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
