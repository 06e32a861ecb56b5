"""The decoding thread of a server: decodes one batch at a time, at any cursor, into shared memory."""

from __future__ import annotations

import pickle  # from the process that started this one
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from datasvc.loaders.core.split_reader import Cursor
from datasvc.loaders.decode_sharing.loader_spec import LoaderSpec, Positioned
from datasvc.loaders.decode_sharing.memory import SharedBuffer, Span, write_batch


@dataclass(frozen=True)
class Outcome:
    """The result of decoding one batch.

    Attributes:
        memory: memory that holds the batch; after a failure, the spare memory for reuse, if there was any.
        spans: offset and length in bytes of each part of the batch in `memory`.
        error: reason of a failure; empty after a success.
        is_final: whether every later batch fails too, because the loader cannot be created.
    """

    memory: SharedBuffer | None
    spans: Sequence[Span] = ()
    error: str = ""
    is_final: bool = False


class DecodeThread:
    """Decodes in a separate thread, so that the server can answer messages at the same time.

    Args:
        spec: pickled `LoaderSpec`; a module that is missing in this process is reported like any other error.
        notify: callback of the thread, called after each new entry of `outcomes`.

    Attributes:
        outcomes: results in the order of the calls to `start`.
    """

    def __init__(self, spec: bytes, notify: Callable[[], None]) -> None:
        self.outcomes: deque[Outcome] = deque()

        self._spec = spec
        self._loader: Positioned[Any] | None = None
        self._notify = notify
        self._requests: queue.SimpleQueue[tuple[Cursor, SharedBuffer | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="datasvc-decode").start()

    def start(self, cursor: Cursor, spare: SharedBuffer | None) -> None:
        """Start decoding the step at `cursor`, into `spare` if the batch fits, otherwise into new memory."""
        self._requests.put((cursor, spare))

    def _run(self) -> None:
        while True:
            cursor, spare = self._requests.get()
            self.outcomes.append(self._decode(cursor, spare))
            self._notify()

    def _decode(self, cursor: Cursor, spare: SharedBuffer | None) -> Outcome:
        try:
            if self._loader is None:
                spec: LoaderSpec = pickle.loads(self._spec)  # noqa: S301 - from our own parent process
                loader = Positioned(spec.make, spec.iterate)
                loader.open()
                self._loader = loader
        except Exception as error:  # noqa: BLE001 - reported to all consumers
            return Outcome(spare, error=_describe(error), is_final=True)
        try:
            memory, spans = write_batch(self._loader.read(cursor), spare)
        except Exception as error:  # noqa: BLE001 - the consumers decode the batch themselves and get the same error
            return Outcome(spare, error=_describe(error))
        if spare is not None and memory is not spare:
            spare.close()
        return Outcome(memory, spans)


def _describe(error: Exception) -> str:
    return traceback.format_exception_only(error)[-1].strip()[:1000]
