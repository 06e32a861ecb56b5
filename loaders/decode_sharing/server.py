"""The decoding process of a decode group: `python -m datasvc.loaders.decode_sharing.server`.

The first job of the group starts it. It decodes each batch once, lends it to the consumers that request it, and exits
when the last consumer's socket is closed. It never waits for a consumer, and no consumer can write memory that
another reads. After a refused request the consumer decodes the batch itself.
"""

from __future__ import annotations

import os
import pickle  # from the process that started this one
import selectors
import signal
import socket
import sys
from collections import Counter
from contextlib import suppress
from typing import Any

from datasvc.loaders.core.split_reader import Cursor
from datasvc.loaders.decode_sharing.decode_thread import DecodeThread, Outcome
from datasvc.loaders.decode_sharing.job import ServerJob
from datasvc.loaders.decode_sharing.messages import Message, receive, send
from datasvc.loaders.decode_sharing.rendezvous import is_gone, user_of
from datasvc.loaders.decode_sharing.slots import BatchSlot, Slots
from datasvc.loaders.decode_sharing.window import Window


class Consumer:
    """A connected job.

    Attributes:
        connection: socket of the job.
        has_joined: whether the job has the server's settings; None before its `join` message.
        pending: requested steps that are not decoded yet, and the cursor of each.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.has_joined: bool | None = None
        self.pending: dict[int, Cursor] = {}


class DecodeServer:
    """Answers consumers until the last one has left.

    Args:
        job: description of the batches.
        listener: socket that accepts consumers.
    """

    def __init__(self, job: ServerJob, listener: socket.socket) -> None:
        self._job = job
        self._listener = listener
        listener.setblocking(False)
        self._wake_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_event, selectors.EVENT_READ, self._collect)
        self._window = Window(job.group.num_slots, job.group.patience)
        self._slots = Slots(job.group.num_slots)
        self._ready: dict[int, BatchSlot] = {}
        self._decoding = DecodeThread(job.spec, lambda: os.eventfd_write(self._wake_event, 1))
        self._in_progress: tuple[int, Cursor] | None = None
        self._first = Cursor(0, 0)  # start of the window's step 0
        self._next = Cursor(0, 0)  # start of the window's next step
        self._fatal_error = ""
        self._has_served = False
        self._is_ending = False
        self._consumers: set[Consumer] = set()
        self._counts: Counter[str] = Counter(decoded=0, lent=0, refused=0)

    def run(self) -> None:
        """Serve until no consumer is connected or in the accept queue, or all that remain need other settings."""
        self._accept()
        while self._consumers and not self._is_ending:
            for key, _ in self._selector.select():
                if not self._is_ending:
                    key.data()
            self._decode_next()
            if not self._consumers and not self._is_ending:
                self._accept()

    def announce_end(self, reason: str) -> None:
        """Send all consumers the reason why this process exits early."""
        for consumer in list(self._consumers):
            self._send(consumer, {"type": "failed", "reason": reason})

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                if user_of(connection) != os.getuid():
                    connection.close()
                    continue
                connection.setblocking(False)
                consumer = Consumer(connection)
                self._consumers.add(consumer)
                self._selector.register(
                    connection, selectors.EVENT_READ, lambda consumer=consumer: self._receive(consumer)
                )

    def _receive(self, consumer: Consumer) -> None:
        try:
            received = receive(consumer.connection)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            received = None
        if received is None:
            self._disconnect(consumer)
            return
        message, descriptor = received
        if descriptor is not None:
            os.close(descriptor)
        try:
            self._answer(consumer, message)
        except (KeyError, TypeError, AttributeError):
            self._disconnect(consumer)  # a malformed message

    def _answer(self, consumer: Consumer, message: Message) -> None:
        match message.get("type"):
            case "join":
                self._join(consumer, message["fingerprint"])
            case "request" if consumer.has_joined:
                self._request(consumer, Cursor(*message["cursor"]))
            case "cancel":
                self._window.cancel(consumer)
                consumer.pending.clear()
                self._send(consumer, {"type": "cancelled"})
            case "release":
                for number in message["numbers"]:
                    self._slots.release(number, consumer)
            case "status":
                counts: Message = dict(self._counts)
                self._send(
                    consumer, {"type": "status", "pid": os.getpid(), **counts, "num_in_memory": len(self._slots)}
                )
            case _:
                self._disconnect(consumer)

    def _join(self, consumer: Consumer, fingerprint: object) -> None:
        consumer.has_joined = fingerprint == self._job.fingerprint
        self._has_served = self._has_served or consumer.has_joined
        if not consumer.has_joined and not any(self._needs_server(other) for other in self._consumers):
            self._close_for_successor()
            return
        answer = "joined" if consumer.has_joined else "mismatch"
        self._send(consumer, {"type": answer, "fingerprint": self._job.fingerprint})

    def _needs_server(self, consumer: Consumer) -> bool:
        """Return whether a consumer reads these batches, or may be the one that started this process."""
        is_expected = consumer.has_joined is None and not self._has_served
        return (bool(consumer.has_joined) or is_expected) and not is_gone(consumer.connection)

    def _close_for_successor(self) -> None:
        """Free the name for a server of other settings, then send `closing`: its receiver binds the name at once."""
        self._is_ending = True
        self._selector.unregister(self._listener)
        self._listener.close()
        for consumer in list(self._consumers):
            self._send(consumer, {"type": "closing", "reason": "it decoded other batches and no job used them"})

    def _request(self, consumer: Consumer, cursor: Cursor) -> None:
        if self._fatal_error:
            self._send(consumer, {"type": "refused", "behind": 0, "reason": self._fatal_error})
            return
        step = self._job.step_index.steps_between(self._first, cursor)
        answer = self._window.request(consumer, step)
        if answer.status == "refused":
            self._counts["refused"] += 1
            self._drop_pending([consumer], "the job was overtaken")
            reason = (
                f"{answer.behind} batches behind the fastest"
                if answer.behind
                else "the other jobs read other steps of the run"
            )
            self._send(consumer, {"type": "refused", "behind": answer.behind, "reason": reason})
            return
        if answer.status == "restarted":
            self._drop_pending(list(self._consumers), "decoding moved to another step of the run")
            self._first, step = cursor, 0
            self._drop(list(self._ready))
        assert step is not None
        if self._window.next_step() == step:
            self._next = cursor
        self._drop([kept for kept in self._ready if kept not in self._window])
        self._send(consumer, {"type": "pending", "behind": answer.behind})
        if answer.status == "ready":
            self._lend(consumer, self._ready[step])
        else:
            consumer.pending[step] = cursor

    def _decode_next(self) -> None:
        step = self._window.next_step()
        if step is not None and self._in_progress is None and not self._fatal_error:
            self._in_progress = step, self._next
            self._decoding.start(self._next, self._slots.take_spare())

    def _collect(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_event)
        while self._decoding.outcomes:
            outcome = self._decoding.outcomes.popleft()
            assert self._in_progress is not None
            (step, cursor), self._in_progress = self._in_progress, None
            if outcome.error:
                self._fail(outcome)
                continue
            assert outcome.memory is not None
            self._counts["decoded"] += 1
            if (step, cursor) != (self._window.next_step(), self._next):
                self._slots.recycle(outcome.memory)  # the window moved while this batch was decoded
                continue
            self._ready[step] = slot = self._slots.add(cursor, outcome.memory, outcome.spans)
            waiting = self._window.mark_decoded()
            self._next = self._job.step_index.after(cursor)
            self._drop([kept for kept in self._ready if kept not in self._window])
            for consumer in waiting:
                if isinstance(consumer, Consumer) and consumer.pending.pop(step, None) is not None:
                    self._lend(consumer, slot)

    def _fail(self, outcome: Outcome) -> None:
        """Drop all requests after an error; each consumer decodes itself, and raises the error of its own sample."""
        self._slots.recycle(outcome.memory)
        self._window.restart()
        self._drop(list(self._ready))
        self._drop_pending(list(self._consumers), outcome.error)
        if outcome.is_final:
            self._fatal_error = outcome.error

    def _lend(self, consumer: Consumer, slot: BatchSlot) -> None:
        if consumer not in self._consumers:
            return  # it has just disconnected and would never release the batch
        self._counts["lent"] += 1
        slot.holders[consumer] += 1
        location: Message = {
            "cursor": [slot.cursor.epoch, slot.cursor.position],
            "number": slot.number,
            "memory": slot.memory.number,
        }
        self._send(consumer, {"type": "batch", **location, "spans": list(slot.spans)}, slot.memory.descriptor)

    def _drop_pending(self, consumers: list[Consumer], reason: str) -> None:
        for consumer in consumers:
            dropped, consumer.pending = consumer.pending, {}
            for cursor in dropped.values():
                self._send(consumer, {"type": "dropped", "cursor": [cursor.epoch, cursor.position], "reason": reason})

    def _drop(self, steps: list[int]) -> None:
        for step in steps:
            self._slots.drop(self._ready.pop(step))

    def _send(self, consumer: Consumer, message: Message, descriptor: int | None = None) -> None:
        if consumer not in self._consumers:
            return
        try:
            send(consumer.connection, message, descriptor)
        except OSError:
            self._disconnect(consumer)  # it is gone, or its socket is full because it does not read

    def _disconnect(self, consumer: Consumer) -> None:
        if consumer in self._consumers:
            self._consumers.discard(consumer)
            self._selector.unregister(consumer.connection)
            consumer.connection.close()
            self._window.remove(consumer)
            self._slots.release_all(consumer)


def main() -> None:
    """Serve on the listening socket whose descriptor is the first argument; read the `ServerJob` from stdin."""
    # Ctrl-C in the terminal stops the jobs; this process serves jobs of other terminals too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.set_inheritable(False)
    server: DecodeServer | None = None
    try:
        job: Any = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our own parent process
        server = DecodeServer(job, listener)
        server.run()
    except BaseException as error:  # noqa: BLE001 - the process exits; its consumers get the reason
        if server is not None:
            server.announce_end(repr(error))
    finally:
        os._exit(0)  # do not wait for the decoding thread; the kernel frees memory and socket name


if __name__ == "__main__":
    main()
