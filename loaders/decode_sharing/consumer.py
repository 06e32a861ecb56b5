"""The job's side of a decode group: requests batches from the decoding process, and starts it if there is none.

A lost, silent or overtaken decoding process is no error here: the result is then that this job decodes the batch.
"""

from __future__ import annotations

import os
import socket
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from datasvc.errors import ConfigError, LagError
from datasvc.loaders.core.data_ranks import DataRanks
from datasvc.loaders.core.split_reader import Cursor
from datasvc.loaders.decode_sharing.job import ServerJob, start_server
from datasvc.loaders.decode_sharing.loader_spec import LoaderSpec
from datasvc.loaders.decode_sharing.mapped_batch import MappedBatches
from datasvc.loaders.decode_sharing.messages import Message, receive, send
from datasvc.loaders.decode_sharing.rendezvous import address_of, connect_or_listen
from datasvc.loaders.decode_sharing.settings import DecodeGroup
from datasvc.loaders.decode_sharing.step_index import StepIndex

_MAX_LOSSES = 3  # after so many losses of the decoding process in a row, it is not started again


@dataclass
class SharingCounts:
    """A job's counters of its decode group.

    Attributes:
        shared: batches received from the decoding process.
        alone: batches that this job decoded itself.
        behind: number of times that the job fell too far behind the others.
        last_behind: batches behind the fastest job at the last such time.
        lost: number of losses of the decoding process.
    """

    shared: int = 0
    alone: int = 0
    behind: int = 0
    last_behind: int = 0
    lost: int = 0


class SharedBatches:
    """The batches of a decode group, for one job. Connects at the first request, and again after `close`.

    Args:
        group: the decode group.
        ranks: data rank of this process; every data rank has a decoding process of its own.
        spec: description of the decoding process's loader.
        step_index: the steps of a run.
        fingerprint: settings that affect the batches and must be equal in all jobs, JSON values by name.
        kind: kind of the batches, which must be equal in all jobs too.
        counts: counters that this object increments.

    Attributes:
        counts, kind: the arguments.

    Raises:
        ConfigError: `spec` cannot be pickled.
    """

    def __init__(
        self,
        group: DecodeGroup,
        *,
        ranks: DataRanks,
        spec: LoaderSpec,
        step_index: StepIndex,
        fingerprint: Message,
        kind: str,
        counts: SharingCounts,
    ) -> None:
        self.counts = counts
        self.kind = kind
        self._group = group
        self._address = address_of(group.name, ranks)
        self._job = ServerJob.plan(
            group, spec=spec, step_index=step_index, fingerprint=fingerprint | {"batches": kind}
        )
        self._connection: socket.socket | None = None
        self._has_joined = False
        self._is_starter = False
        self._losses = 0
        self._is_behind = False
        self._pending: set[Cursor] = set()
        self._arrived: dict[Cursor, tuple[Message, int]] = {}
        self._unused: list[int] = []  # numbers of batches that arrived after their request was cancelled
        self._mapped = MappedBatches(group.num_slots)
        _open.add(self)

    def request(self, cursor: Cursor) -> bool:
        """Request the batch that starts at `cursor`; return whether it will come, so that `take` can receive it.

        Raises:
            ConfigError: other jobs of the group have different settings; the message has both.
            LagError: this job is too far behind the others, and the group has `when_behind="raise"`.
        """
        if not self._join():
            return False
        answer: Message | None = None
        with self._exchange():
            self._send({"type": "request", "cursor": [cursor.epoch, cursor.position]})
            answer = self._receive_reply("pending", "refused")
            if answer["type"] == "pending":
                self._pending.add(cursor)
        if answer is None:
            return False
        is_pending = cursor in self._pending
        self._record_lag(answer, is_pending=is_pending)
        return is_pending

    def take(self, cursor: Cursor) -> Any | None:
        """Wait for a requested batch and return it; None if the server dropped it or is lost.

        Its arrays are views of shared memory. They do not change while they are referenced, and writing to them
        changes no other job's batch.
        """
        batch: Any | None = None
        with self._exchange():
            while cursor in self._pending and cursor not in self._arrived:
                self._apply(self._receive())
            self._pending.discard(cursor)
            if cursor in self._arrived:
                batch = self._read(*self._arrived.pop(cursor))
        if batch is not None:
            self._losses = 0
            self.counts.shared += 1
        return batch

    def cancel(self) -> None:
        """Cancel all requests, and discard their batches."""
        if self._connection is not None and self._pending:
            with self._exchange():
                self._send({"type": "cancel"})
                self._receive_reply("cancelled")
        self._pending.clear()
        for message, descriptor in self._arrived.values():
            os.close(descriptor)
            self._unused.append(message["number"])
        self._arrived.clear()

    def status(self) -> Message:
        """Return the process id and counters of the decoding process; {} if there is none."""
        if not self._has_joined:
            return {}
        with self._exchange():
            self._send({"type": "status"})
            return self._receive_reply("status")
        return {}

    def close(self) -> None:
        """Leave the group; its process exits after the last job. Received batches stay valid."""
        self._disconnect()
        self._losses = 0

    def close_after_fork(self) -> None:
        """Close the connection in a forked child; a copy left open would hide the parent's exit from the server."""
        if self._connection is not None:
            self._connection.close()

    def _join(self) -> bool:
        """Return whether this job is a member of the group; the first call waits for the server's answer."""
        if self._has_joined:
            return True
        if self._connection is None and self._losses >= _MAX_LOSSES:
            return False
        answer: Message | None = None
        with self._exchange(), suppress(BlockingIOError):
            answer = self._receive_join_reply()
        if answer is None:
            return False
        if answer["type"] == "mismatch":
            self._disconnect()
            raise ConfigError(self._job.describe_mismatch(answer["fingerprint"]))
        self._has_joined = True
        return True

    def _receive_join_reply(self) -> Message:
        """Return the server's answer to `join`; connect to the next server if one closes without an answer.

        Raises:
            BlockingIOError: there is no answer yet, and this job does not wait.
            OSError: the server that this job started has exited, or no server answered for `silent_s`.
        """
        # After a loss this job decodes alone and does not wait for the next server to start.
        timeout_s = self._group.silent_s if self._losses == 0 else 0
        give_up_at = time.monotonic() + self._group.silent_s
        while True:
            try:
                if self._connection is None:
                    self._connect()
                assert self._connection is not None
                self._connection.settimeout(timeout_s)
                answer = self._receive()
                self._connection.settimeout(self._group.silent_s)
            except ConnectionError:
                # A server exits when its last job leaves, which may be at this moment: try the next server. A server
                # that this job started itself and that failed would fail again.
                if self._is_starter or time.monotonic() > give_up_at:
                    raise
                self._disconnect()
            else:
                return answer

    def _connect(self) -> None:
        connection, listener = connect_or_listen(self._address, self._group.silent_s)
        self._connection, self._is_starter = connection, listener is not None
        if listener is not None:
            with listener:
                start_server(self._job, listener)
        send(connection, {"type": "join", "fingerprint": self._job.fingerprint})

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Record a loss if the connection fails in the block; disconnect if the block is interrupted.

        After an interrupt, a late answer would be taken for the answer to the next message.
        """
        try:
            yield
        except OSError as error:
            self._record_loss(str(error))
        except BaseException:
            self._disconnect()
            raise

    def _send(self, message: Message) -> None:
        assert self._connection is not None
        released = self._mapped.collect() + self._unused
        self._unused = []
        if released:
            send(self._connection, {"type": "release", "numbers": released})
        send(self._connection, message)

    def _receive_reply(self, *kinds: str) -> Message:
        while True:
            message = self._receive()
            if message["type"] in kinds:
                return message
            self._apply(message)

    def _receive(self) -> Message:
        """Return the next message. Raises OSError: the server is lost, or silent for too long."""
        assert self._connection is not None
        try:
            received = receive(self._connection)
        except TimeoutError:
            # Decoding or fetching may take longer than the time-out; a server that is alive answers this at once.
            send(self._connection, {"type": "status"})
            received = receive(self._connection)
        if received is None:
            raise ConnectionResetError("it closed the connection")
        message, descriptor = received
        if descriptor is not None:
            self._arrived[Cursor(*message["cursor"])] = message, descriptor
        elif message["type"] in {"failed", "closing"}:
            raise ConnectionResetError(message["reason"])
        return message

    def _apply(self, message: Message) -> None:
        """Apply a message that is no reply."""
        if message["type"] == "dropped":
            self._pending.discard(Cursor(*message["cursor"]))

    def _record_lag(self, answer: Message, *, is_pending: bool) -> None:
        was_behind, self._is_behind = self._is_behind, not is_pending
        if is_pending:
            return
        self.counts.last_behind = answer["behind"]
        self.counts.behind += not was_behind
        if self._group.when_behind == "raise":
            raise LagError(
                f"decode group {self._group.name!r}: {answer['reason']}; give the group a larger lag or patience, or "
                "when_behind='alone' to decode in this job"
            )
        if not was_behind:
            self._warn(f"{answer['reason']}; this job decodes alone until it catches up")

    def _read(self, message: Message, descriptor: int) -> Any:
        try:
            return self._mapped.read(message["number"], message["memory"], descriptor, message["spans"])
        finally:
            os.close(descriptor)

    def _record_loss(self, reason: str) -> None:
        self._disconnect()
        self._losses += 1
        self.counts.lost += 1
        restart = (
            "this job decodes alone until a new one has started"
            if self._losses < _MAX_LOSSES
            else f"this job decodes alone from now on, after {_MAX_LOSSES} losses in a row"
        )
        self._warn(f"the decoding process was lost ({reason}); {restart}")

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        self._has_joined = False
        self._pending.clear()
        for _, descriptor in self._arrived.values():
            os.close(descriptor)
        self._arrived.clear()
        self._unused = []  # batch numbers are valid for one server only
        self._mapped = MappedBatches(self._group.num_slots)
        if connection is not None:
            connection.close()

    def _warn(self, text: str) -> None:
        warnings.warn(f"decode group {self._group.name!r}: {text}", RuntimeWarning, stacklevel=2)


_open: weakref.WeakSet[SharedBatches] = weakref.WeakSet()


def _close_all_after_fork() -> None:
    for batches in list(_open):
        batches.close_after_fork()


os.register_at_fork(after_in_child=_close_all_after_fork)
