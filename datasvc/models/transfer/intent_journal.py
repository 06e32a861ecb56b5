"""What a transfer is about to name, promised in a journal at the target: `gc` leaves it alone, however long it takes.

An object counts as new for the grace of `gc` only; a large model over a slow line may take longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from datasvc.errors import UnavailableError
from datasvc.repository import ObjectInfo, Repository, Resolved
from datasvc.repository.objects.objects import digest_of

_WORK: Final = digest_of(b"transfer of model versions")
_KEEP_S: Final = 3600.0


@contextmanager
def promised(target: Repository, objects: Mapping[Resolved, Sequence[ObjectInfo]]) -> Iterator[Callable[[], None]]:
    """Let `gc` leave objects alone until the block ends, or as long after it failed as any other journal.

    Args:
        target: where they will be named.
        objects: of every version that is to be committed.

    Yields:
        What keeps the promise young; to be called again and again.

    Raises:
        UnavailableError, UnknownOutcomeError: the journal cannot be written.
    """
    if not objects:
        yield lambda: None
        return
    names = {str(version): [info.digest for info in wanted] for version, wanted in objects.items()}
    told = repr(sorted(names.items())).encode()
    journal = target.journal(_WORK, digest_of(told))
    journal.begin()
    for number, wanted in enumerate(names.values()):
        journal.write(f"{number:06d}", {"objects": wanted})
    kept_s = time.monotonic()

    def keep() -> None:
        nonlocal kept_s
        if time.monotonic() - kept_s >= _KEEP_S:
            journal.begin()
            kept_s = time.monotonic()

    yield keep
    # Everything is committed: a journal that cannot be removed is left to gc.
    with suppress(UnavailableError):
        journal.remove()
