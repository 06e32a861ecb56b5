"""Merges the parts of attempts whose writers were killed, so that 100 such attempts do not leave thousands of files.

The next attempt of the run does this, in a thread. A silent writer may be alive: it was suspended, or the clocks
differ. Therefore the attempt is ended first, by a *closing part* with the next number. A part is created only if it
does not exist, so either the writer has this number or the closing part has it. In the first case the attempt goes
on, and is left alone. In the second one the writer can write no other part of the attempt: it finds the conflict, and
writes nothing more (`RunLog`). So the parts before the closing part are complete; what the writer reports after it is
lost, because the next attempt has replaced it.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from itertools import pairwise

from datasvc.errors import DatasvcError, UnavailableError
from datasvc.repository import Storage
from datasvc.runs.content import Content
from datasvc.runs.history import MISSED_HEARTBEATS, is_silent
from datasvc.runs.part import Part, PartRange, choose_parts, encode_part
from datasvc.runs.part_files import create_part, delete_parts, merge_parts, read_parts
from datasvc.runs.part_writer import ATTEMPT_LIMITS

_LOG = logging.getLogger(__name__)


def start_merging(
    storage: Storage, folder: str, attempt: int, heartbeat_s: float, stop: threading.Event
) -> threading.Thread:
    """Start and return the thread that merges the attempts before `attempt`, until `stop` is set."""

    def work() -> None:
        try:
            # After a quick restart, the writer that was killed counts as alive until it has missed its heartbeats.
            for wait_s in (0.0, (MISSED_HEARTBEATS + 1) * heartbeat_s):
                if stop.wait(wait_s):
                    return
                try:
                    if not merge_ended_attempts(storage, folder, attempt, stop=stop):
                        return
                except UnavailableError as error:
                    _LOG.debug("%s: ended attempts are not merged yet: %s", folder, error)
        except Exception as error:  # noqa: BLE001 - the top of a thread; the parts stay, and can be read
            _LOG.debug("%s: merging the parts of ended attempts failed: %r", folder, error)

    # A daemon, and no pool of threads: a store that does not answer must not keep the program from ending.
    thread = threading.Thread(target=work, name="datasvc-run-merge", daemon=True)
    thread.start()
    return thread


def merge_ended_attempts(
    storage: Storage,
    folder: str,
    attempt: int,
    *,
    now_s: float | None = None,
    stop: threading.Event | None = None,
) -> bool:
    """Merge the parts of each attempt before `attempt` that has ended, or whose writer is silent, to one and its end.

    Several processes may do this at once, and each may be killed at any time: readers find every event, and the next
    call does the rest.

    Args:
        storage: file tree of the repository.
        folder: folder of the run.
        attempt: number of the attempt of the caller.
        now_s: present time in seconds since 1970, which decides whether a writer is silent; default: now.
        stop: when this is set, no further attempt is merged.

    Returns:
        Whether some attempts were left, because their writers still report, or another process changed them.

    Raises:
        UnavailableError: the store does not respond.
    """
    listed = _list_parts(storage, folder)
    attempts = [number for number in sorted({part.attempt for part in listed}) if number < attempt]
    num_left = 0
    for number in attempts:
        if stop is not None and stop.is_set():
            break
        if sum(part.attempt == number for part in listed) > 2:  # the merged part and the end
            now = time.time() if now_s is None else now_s
            try:
                num_left += not _merge_attempt(storage, folder, number, now)
            except UnavailableError:
                raise
            except DatasvcError as error:  # such as a conflict: the writer, or another process, was faster
                _LOG.debug("%s: attempt %d is not merged: %s", folder, number, error)
                num_left += 1
    return num_left > 0


def _merge_attempt(storage: Storage, folder: str, attempt: int, now_s: float) -> bool:
    """Merge the parts of an attempt if it has ended or can be ended; return False if its writer still reports."""
    # Listed again: what was listed before other attempts were merged may be minutes old.
    files = _list_parts(storage, folder, attempt)
    chosen = _choose(files)
    parts, problems = read_parts(storage, folder, chosen, threads=1)
    if not parts or problems or not _are_consecutive(chosen):
        return True  # a writer merges them now, or one is damaged: leave all for readers
    *older, newest = parts
    if newest.head["state"] == "running":
        if not is_silent(newest.head, now_s):
            return False
        end = _closing_part(newest)
        create_part(storage, folder, end.range, encode_part(end))
        # If the writer has created this number before, and has merged and deleted it, the attempt goes on behind it.
        files = _list_parts(storage, folder, attempt)
        if _choose(files) != [*chosen, end.range]:
            return False
        older = parts
    if not older:
        return True
    merged = older[0] if len(older) == 1 else merge_parts(storage, folder, older, ATTEMPT_LIMITS)
    if merged is not None:
        # All that it covers: also parts that a process left which was killed between merging and deleting.
        delete_parts(
            storage, folder, [part for part in files if part.last <= merged.range.last and part != merged.range]
        )
    return True


def _closing_part(newest: Part) -> Part:
    """Return the part that ends an attempt after its newest part."""
    number = newest.range.last + 1
    head = {
        **newest.head,
        "writer": secrets.token_hex(8),
        "state": "interrupted",
        "message": "the process ended without closing the log",
    }
    return Part(PartRange(newest.range.attempt, number, number), head, Content())


def _list_parts(storage: Storage, folder: str, attempt: int | None = None) -> list[PartRange]:
    """Return the parts in a folder, also those that others replace; of one attempt, or of all."""
    parts = [part for name in storage.list(folder) if (part := PartRange.parse(name)) is not None]
    return [part for part in parts if attempt in {None, part.attempt}]


def _choose(files: Sequence[PartRange]) -> list[PartRange]:
    return choose_parts(part.file_name for part in files)


def _are_consecutive(ranges: Sequence[PartRange]) -> bool:
    return ranges[0].first == 1 and all(part.last + 1 == after.first for part, after in pairwise(ranges))
