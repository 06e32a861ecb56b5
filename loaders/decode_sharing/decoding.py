"""The thread of a server that decodes: one batch at a time, wherever it is told, into memory that is shared."""

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
    """What became of a batch.

    Attributes:
        memory: what may be used now: with the batch, or spare where it failed.
        spans: where the batch lies in it.
        error: why there is none; empty where there is.
        is_final: there will never be one: the loader cannot be made.
    """

    memory: SharedBuffer | None
    spans: Sequence[Span] = ()
    error: str = ""
    is_final: bool = False


class Decoding:
    """Decodes in a thread of its own, so that questions are answered meanwhile.

    Args:
        recipe: of the loader, pickled: what is missing here is told like any other error.
        tell: called from the thread when `outcomes` has one more.

    Attributes:
        outcomes: in the order in which batches were asked for.
    """

    def __init__(self, recipe: bytes, tell: Callable[[], None]) -> None:
        self.outcomes: deque[Outcome] = deque()

        self._recipe = recipe
        self._loader: Positioned[Any] | None = None
        self._tell = tell
        self._wanted: queue.SimpleQueue[tuple[Cursor, SharedBuffer | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="datasvc-decode").start()

    def start(self, cursor: Cursor, spare: SharedBuffer | None) -> None:
        """Decode the step at `cursor` into spare memory, or new where it is too small or there is none."""
        self._wanted.put((cursor, spare))

    def _run(self) -> None:
        while True:
            cursor, spare = self._wanted.get()
            self.outcomes.append(self._decode(cursor, spare))
            self._tell()

    def _decode(self, cursor: Cursor, spare: SharedBuffer | None) -> Outcome:
        try:
            if self._loader is None:
                found: LoaderSpec = pickle.loads(self._recipe)  # noqa: S301 - from our own parent process
                loader = Positioned(found.make, found.iterate)
                loader.open()
                self._loader = loader
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            return Outcome(spare, error=_describe(error), is_final=True)
        try:
            memory, spans = write_batch(self._loader.read(cursor), spare)
        except Exception as error:  # noqa: BLE001 - likewise; they decode it themselves, and meet the same
            return Outcome(spare, error=_describe(error))
        if spare is not None and memory is not spare:
            spare.close()
        return Outcome(memory, spans)


def _describe(error: Exception) -> str:
    return traceback.format_exception_only(error)[-1].strip()[:1000]
