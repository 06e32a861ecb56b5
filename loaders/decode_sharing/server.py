"""The process that decodes for the jobs of a share: `python -m datasvc.loaders.decode_sharing.server`.

The first of these jobs starts it.

It decodes each batch once, lends it to whoever asks, and ends when the last consumer has gone, which the kernel tells
by a closed socket. It never waits for a consumer, and no consumer can write what another reads. What it cannot do, it
refuses: then the consumer decodes by itself.
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
from datasvc.loaders.decode_sharing.decoding import Decoding, Outcome
from datasvc.loaders.decode_sharing.job import ServerJob
from datasvc.loaders.decode_sharing.messages import Message, receive, send
from datasvc.loaders.decode_sharing.rendezvous import is_gone, user_of
from datasvc.loaders.decode_sharing.slots import BatchSlot, Slots
from datasvc.loaders.decode_sharing.window import Window


class Consumer:
    """A job, as the server sees it.

    Attributes:
        connection: to it.
        has_joined: it asked for the same batches; None: it has not said yet.
        promised: steps that it waits for, and where they start.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.has_joined: bool | None = None
        self.promised: dict[int, Cursor] = {}


class DecodeServer:
    """Answers consumers until the last has gone.

    Args:
        job: what to do.
        listener: where they come in.
    """

    def __init__(self, job: ServerJob, listener: socket.socket) -> None:
        self._job = job
        self._listener = listener
        listener.setblocking(False)
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, self._collect)
        self._window = Window(job.share.num_slots, job.share.patience)
        self._slots = Slots(job.share.num_slots)
        self._ready: dict[int, BatchSlot] = {}
        self._decoding = Decoding(job.recipe, lambda: os.eventfd_write(self._woken, 1))
        self._under_way: tuple[int, Cursor] | None = None
        self._first = Cursor(0, 0)  # where step 0 of the window starts
        self._next = Cursor(0, 0)  # where the window's next step starts
        self._broken = ""
        self._has_served = False
        self._is_ending = False
        self._consumers: set[Consumer] = set()
        self._counts: Counter[str] = Counter(decoded=0, lent=0, refused=0)

    def run(self) -> None:
        """Serve until nobody is left, in the queue at the door either, or only who wants another server."""
        self._accept()
        while self._consumers and not self._is_ending:
            for key, _ in self._selector.select():
                if not self._is_ending:
                    key.data()
            self._decode_next()
            if not self._consumers and not self._is_ending:
                self._accept()

    def end(self, reason: str) -> None:
        """Tell everybody why this process ends before its time."""
        for consumer in list(self._consumers):
            self._say(consumer, {"say": "ended", "reason": reason})

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
                    connection, selectors.EVENT_READ, lambda consumer=consumer: self._hear(consumer)
                )

    def _hear(self, consumer: Consumer) -> None:
        try:
            heard = receive(consumer.connection)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            heard = None
        if heard is None:
            self._part_with(consumer)
            return
        message, descriptor = heard
        if descriptor is not None:
            os.close(descriptor)
        try:
            self._answer(consumer, message)
        except (KeyError, TypeError, AttributeError):
            self._part_with(consumer)  # it speaks another language

    def _answer(self, consumer: Consumer, message: Message) -> None:
        match message.get("do"):
            case "join":
                self._let_in(consumer, message["fingerprint"])
            case "ask" if consumer.has_joined:
                self._ask(consumer, Cursor(*message["cursor"]))
            case "forget":
                self._window.forget(consumer)
                consumer.promised.clear()
                self._say(consumer, {"say": "forgotten"})
            case "release":
                for number in message["numbers"]:
                    self._slots.release(number, consumer)
            case "status":
                counts: Message = dict(self._counts)
                self._say(
                    consumer, {"say": "status", "pid": os.getpid(), **counts, "num_in_memory": len(self._slots)}
                )
            case _:
                self._part_with(consumer)

    def _let_in(self, consumer: Consumer, fingerprint: object) -> None:
        consumer.has_joined = fingerprint == self._job.fingerprint
        self._has_served = self._has_served or consumer.has_joined
        if not consumer.has_joined and not any(self._counts_on(other) for other in self._consumers):
            self._end_for_others()
            return
        said = "joined" if consumer.has_joined else "mismatch"
        self._say(consumer, {"say": said, "fingerprint": self._job.fingerprint})

    def _counts_on(self, consumer: Consumer) -> bool:
        """Whether a consumer is here for these batches, or may be the one that started this process."""
        is_expected = consumer.has_joined is None and not self._has_served
        return (bool(consumer.has_joined) or is_expected) and not is_gone(consumer.connection)

    def _end_for_others(self) -> None:
        """Free the name for a server of other settings, then say so: who hears it takes its place at once."""
        self._is_ending = True
        self._selector.unregister(self._listener)
        self._listener.close()
        for consumer in list(self._consumers):
            self._say(consumer, {"say": "ending", "reason": "it decoded other batches, for nobody any more"})

    def _ask(self, consumer: Consumer, cursor: Cursor) -> None:
        if self._broken:
            self._say(consumer, {"say": "refused", "behind": 0, "reason": self._broken})
            return
        step = self._job.path.steps_between(self._first, cursor)
        answer = self._window.ask(consumer, step)
        if answer.verdict == "refused":
            self._counts["refused"] += 1
            self._lose([consumer], "it was overtaken")
            reason = f"{answer.behind} batches behind the fastest" if answer.behind else "the others are elsewhere"
            self._say(consumer, {"say": "refused", "behind": answer.behind, "reason": reason})
            return
        if answer.verdict == "moved":
            self._lose(list(self._consumers), "decoding went on elsewhere")
            self._first, step = cursor, 0
            self._drop(list(self._ready))
        assert step is not None
        if self._window.next_step() == step:
            self._next = cursor
        self._drop([kept for kept in self._ready if kept not in self._window])
        self._say(consumer, {"say": "promised", "behind": answer.behind})
        if answer.verdict == "ready":
            self._lend(consumer, self._ready[step])
        else:
            consumer.promised[step] = cursor

    def _decode_next(self) -> None:
        step = self._window.next_step()
        if step is not None and self._under_way is None and not self._broken:
            self._under_way = step, self._next
            self._decoding.start(self._next, self._slots.take_spare())

    def _collect(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._woken)
        while self._decoding.outcomes:
            outcome = self._decoding.outcomes.popleft()
            assert self._under_way is not None
            (step, cursor), self._under_way = self._under_way, None
            if outcome.error:
                self._fail(outcome)
                continue
            assert outcome.memory is not None
            self._counts["decoded"] += 1
            if (step, cursor) != (self._window.next_step(), self._next):
                self._slots.give_back(outcome.memory)  # the window went elsewhere meanwhile
                continue
            self._ready[step] = slot = self._slots.add(cursor, outcome.memory, outcome.spans)
            waiting = self._window.decoded()
            self._next = self._job.path.after(cursor)
            self._drop([kept for kept in self._ready if kept not in self._window])
            for consumer in waiting:
                if isinstance(consumer, Consumer) and consumer.promised.pop(step, None) is not None:
                    self._lend(consumer, slot)

    def _fail(self, outcome: Outcome) -> None:
        """Let everybody decode by himself: the same error reaches who meets the same sample."""
        self._slots.give_back(outcome.memory)
        self._window.give_up()
        self._drop(list(self._ready))
        self._lose(list(self._consumers), outcome.error)
        if outcome.is_final:
            self._broken = outcome.error

    def _lend(self, consumer: Consumer, slot: BatchSlot) -> None:
        if consumer not in self._consumers:
            return  # just gone: it would never give it back
        self._counts["lent"] += 1
        slot.holders[consumer] += 1
        place: Message = {
            "cursor": [slot.cursor.epoch, slot.cursor.position],
            "number": slot.number,
            "memory": slot.memory.number,
        }
        self._say(consumer, {"say": "ready", **place, "spans": list(slot.spans)}, slot.memory.descriptor)

    def _lose(self, consumers: list[Consumer], reason: str) -> None:
        for consumer in consumers:
            promised, consumer.promised = consumer.promised, {}
            for cursor in promised.values():
                self._say(consumer, {"say": "lost", "cursor": [cursor.epoch, cursor.position], "reason": reason})

    def _drop(self, steps: list[int]) -> None:
        for step in steps:
            self._slots.drop(self._ready.pop(step))

    def _say(self, consumer: Consumer, message: Message, descriptor: int | None = None) -> None:
        if consumer not in self._consumers:
            return
        try:
            send(consumer.connection, message, descriptor)
        except OSError:
            self._part_with(consumer)  # gone, or it asks and never listens

    def _part_with(self, consumer: Consumer) -> None:
        if consumer in self._consumers:
            self._consumers.discard(consumer)
            self._selector.unregister(consumer.connection)
            consumer.connection.close()
            self._window.leave(consumer)
            self._slots.leave(consumer)


def main() -> None:
    """Serve on the listening socket whose descriptor is the first argument; the job comes on standard input."""
    # The terminal's Ctrl-C is meant for jobs, and whoever started this may be gone long before it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.set_inheritable(False)
    server: DecodeServer | None = None
    try:
        job: Any = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our own parent process
        server = DecodeServer(job, listener)
        server.run()
    except BaseException as error:  # noqa: BLE001 - the end of this process
        if server is not None:
            server.end(repr(error))
    finally:
        os._exit(0)  # without waiting for a batch that nobody wants any more; memory and names go with the process


if __name__ == "__main__":
    main()
