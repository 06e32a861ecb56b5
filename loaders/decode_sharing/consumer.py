"""A job's side of a share: it asks the decoding process for batches, and starts that process where there is none.

Nothing here raises because the other side is gone, silent or overtaken: the answer is then that the batch has to be
decoded here.
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
from datasvc.loaders.decode_sharing.mapped_batch import BorrowedMemory
from datasvc.loaders.decode_sharing.messages import Message, receive, send
from datasvc.loaders.decode_sharing.rendezvous import address_of, connect_or_listen
from datasvc.loaders.decode_sharing.settings import DecodeGroup
from datasvc.loaders.decode_sharing.step_index import StepIndex

_LOSSES = 3  # of the decoding process in a row, until nobody starts it again


@dataclass
class ShareCounts:
    """How a job fared with its share.

    Attributes:
        shared: batches that came from it.
        alone: batches that this job decoded by itself.
        behind: times that it lost touch with the others, and was told.
        last_behind: batches that it was behind the fastest when it was told last.
        lost: times that the decoding process was gone.
    """

    shared: int = 0
    alone: int = 0
    behind: int = 0
    last_behind: int = 0
    lost: int = 0


class SharedBatches:
    """The batches of a share, seen from one job. Connects when asked first, and again after `close`.

    Args:
        share: which.
        ranks: of this process: every data rank has a decoding process of its own.
        recipe: how that makes its loader.
        path: the steps of a run.
        fingerprint: what jobs must agree on to get the same batches, JSON values by name.
        kind: of batches, which they must agree on as well.
        counts: to add to.

    Attributes:
        counts, kind: as given.

    Raises:
        ConfigError: the recipe does not pickle.
    """

    def __init__(
        self,
        share: DecodeGroup,
        *,
        ranks: DataRanks,
        recipe: LoaderSpec,
        path: StepIndex,
        fingerprint: Message,
        kind: str,
        counts: ShareCounts,
    ) -> None:
        self.counts = counts
        self.kind = kind
        self._share = share
        self._address = address_of(share.name, ranks)
        self._job = ServerJob.plan(share, recipe=recipe, path=path, fingerprint=fingerprint | {"batches": kind})
        self._connection: socket.socket | None = None
        self._has_joined = False
        self._is_starter = False
        self._losses = 0
        self._is_behind = False
        self._promised: set[Cursor] = set()
        self._arrived: dict[Cursor, tuple[Message, int]] = {}
        self._unread: list[int] = []  # lent, and not wanted after all
        self._borrowed = BorrowedMemory(share.num_slots)
        _open.add(self)

    def ask(self, cursor: Cursor) -> bool:
        """Return whether the batch that starts at `cursor` will come: `take` it then.

        Raises:
            ConfigError: other jobs decode something else under this name; says both.
            LagError: this job is out of reach of the others, and wants to be told so.
        """
        if not self._join():
            return False
        answer: Message | None = None
        with self._exchange():
            self._say({"do": "ask", "cursor": [cursor.epoch, cursor.position]})
            answer = self._wait_for("promised", "refused")
            if answer["say"] == "promised":
                self._promised.add(cursor)
        if answer is None:
            return False
        is_promised = cursor in self._promised
        self._note_lag(answer, is_promised=is_promised)
        return is_promised

    def take(self, cursor: Cursor) -> Any | None:
        """Return a batch that was promised, waiting for it; None where it does not come after all.

        Its arrays are views of shared memory, mapped for this batch alone: they stay as they are for as long as they
        are kept, and what is written to them nobody else sees.
        """
        batch: Any | None = None
        with self._exchange():
            while cursor in self._promised and cursor not in self._arrived:
                self._note(self._hear())
            self._promised.discard(cursor)
            if cursor in self._arrived:
                batch = self._read(*self._arrived.pop(cursor))
        if batch is not None:
            self._losses = 0
            self.counts.shared += 1
        return batch

    def forget(self) -> None:
        """Drop everything that was promised."""
        if self._connection is not None and self._promised:
            with self._exchange():
                self._say({"do": "forget"})
                self._wait_for("forgotten")
        self._promised.clear()
        for place, descriptor in self._arrived.values():
            os.close(descriptor)
            self._unread.append(place["number"])
        self._arrived.clear()

    def status(self) -> Message:
        """Return what the decoding process counted: {} where there is none."""
        if not self._has_joined:
            return {}
        with self._exchange():
            self._say({"do": "status"})
            return self._wait_for("status")
        return {}

    def close(self) -> None:
        """Leave the share: its process ends when nobody is left. Batches that were taken stay as they are."""
        self._disconnect()
        self._losses = 0

    def let_go(self) -> None:
        """In a forked child: close the copy of the connection, or the parent's end would not be seen."""
        if self._connection is not None:
            self._connection.close()

    def _join(self) -> bool:
        """Return whether this job takes part; the first time that waits for the answer."""
        if self._has_joined:
            return True
        if self._connection is None and self._losses >= _LOSSES:
            return False
        answer: Message | None = None
        with self._exchange(), suppress(BlockingIOError):
            answer = self._hear_of_joining()
        if answer is None:
            return False
        if answer["say"] == "mismatch":
            self._disconnect()
            raise ConfigError(self._job.describe_mismatch(answer["fingerprint"]))
        self._has_joined = True
        return True

    def _hear_of_joining(self) -> Message:
        """Return what the server says to a newcomer. One that ends before it says anything only has its place taken.

        Raises:
            BlockingIOError: nothing yet, and this job does not wait.
            OSError: the server that this job started is gone, or another for `silent_s`.
        """
        # Who lost a server works on alone until the next one is up.
        timeout_s = self._share.silent_s if self._losses == 0 else 0
        give_up_at = time.monotonic() + self._share.silent_s
        while True:
            try:
                if self._connection is None:
                    self._connect()
                assert self._connection is not None
                self._connection.settimeout(timeout_s)
                answer = self._hear()
                self._connection.settimeout(self._share.silent_s)
            except ConnectionError:
                # The last job of a share has just left, perhaps this one. A new server that fails would fail again.
                if self._is_starter or time.monotonic() > give_up_at:
                    raise
                self._disconnect()
            else:
                return answer

    def _connect(self) -> None:
        connection, listener = connect_or_listen(self._address, self._share.silent_s)
        self._connection, self._is_starter = connection, listener is not None
        if listener is not None:
            with listener:
                start_server(self._job, listener)
        send(connection, {"do": "join", "fingerprint": self._job.fingerprint})

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Count the other side as lost where it is; leave where the block is interrupted.

        What is still to come would be taken for the answer to the next question.
        """
        try:
            yield
        except OSError as error:
            self._lose(str(error))
        except BaseException:
            self._disconnect()
            raise

    def _say(self, message: Message) -> None:
        assert self._connection is not None
        released = self._borrowed.collect() + self._unread
        self._unread = []
        if released:
            send(self._connection, {"do": "release", "numbers": released})
        send(self._connection, message)

    def _wait_for(self, *kinds: str) -> Message:
        while True:
            message = self._hear()
            if message["say"] in kinds:
                return message
            self._note(message)

    def _hear(self) -> Message:
        """Return the next message. Raises OSError: the other side is gone, or silent for too long."""
        assert self._connection is not None
        try:
            found = receive(self._connection)
        except TimeoutError:
            # It may be decoding, or fetching; but then it answers this.
            send(self._connection, {"do": "status"})
            found = receive(self._connection)
        if found is None:
            raise ConnectionResetError("it is gone")
        message, descriptor = found
        if descriptor is not None:
            self._arrived[Cursor(*message["cursor"])] = message, descriptor
        elif message["say"] in {"ended", "ending"}:
            raise ConnectionResetError(message["reason"])
        return message

    def _note(self, message: Message) -> None:
        """Follow what was said unasked."""
        if message["say"] == "lost":
            self._promised.discard(Cursor(*message["cursor"]))

    def _note_lag(self, answer: Message, *, is_promised: bool) -> None:
        was_behind, self._is_behind = self._is_behind, not is_promised
        if is_promised:
            return
        self.counts.last_behind = answer["behind"]
        self.counts.behind += not was_behind
        if self._share.when_behind == "raise":
            raise LagError(
                f"share {self._share.name!r}: {answer['reason']}; give it a larger lag or patience, or let this job "
                "decode alone with when_behind='alone'"
            )
        if not was_behind:
            self._warn(f"{answer['reason']}; this job decodes alone until it meets the others again")

    def _read(self, place: Message, descriptor: int) -> Any:
        try:
            return self._borrowed.read(place["number"], place["memory"], descriptor, place["spans"])
        finally:
            os.close(descriptor)

    def _lose(self, reason: str) -> None:
        self._disconnect()
        self._losses += 1
        self.counts.lost += 1
        again = "it is started again" if self._losses < _LOSSES else "it is not started again"
        self._warn(f"the decoding process was lost ({reason}); {again}, this job decodes alone meanwhile")

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        self._has_joined = False
        self._promised.clear()
        for _, descriptor in self._arrived.values():
            os.close(descriptor)
        self._arrived.clear()
        self._unread = []  # numbers of one server mean nothing to the next
        self._borrowed = BorrowedMemory(self._share.num_slots)
        if connection is not None:
            connection.close()

    def _warn(self, text: str) -> None:
        warnings.warn(f"share {self._share.name!r}: {text}", RuntimeWarning, stacklevel=2)


_open: weakref.WeakSet[SharedBatches] = weakref.WeakSet()


def _let_go_of_all() -> None:
    for batches in list(_open):
        batches.let_go()


os.register_at_fork(after_in_child=_let_go_of_all)
