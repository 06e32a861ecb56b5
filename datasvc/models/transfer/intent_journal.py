"""Intent journal of a transfer: protects the copied objects at the target from `gc` until the versions are committed.

Without a journal, `gc` keeps an unreferenced object only for its grace period. The transfer of a large model over a
slow network may take longer than that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from datasvc.errors import UnavailableError
from datasvc.repository import ObjectInfo, Repository, Resolved
from datasvc.repository.objects.objects import digest_of

# All transfers have the same work id. The fingerprint, a digest of the objects, tells their journals apart.
_WORK_ID: Final = digest_of(b"transfer of model versions")
_RENEW_INTERVAL_S: Final = 3600.0


@contextmanager
def declare_intent(
    target: Repository, objects: Mapping[Resolved, Sequence[ObjectInfo]]
) -> Iterator[Callable[[], None]]:
    """Write the intent journal. During the `with` block, it protects `objects` (by version) from `gc`.

    Yields a function that renews the journal; call it regularly, from one thread at a time. It writes the journal at
    most once per hour. If the block fails, the journal stays, and expires like any other journal.

    Raises:
        UnavailableError, UnknownOutcomeError: the journal cannot be written.
    """
    if not objects:
        yield lambda: None
        return
    digests = {str(version): [info.digest for info in infos] for version, infos in objects.items()}
    journal = target.journal(_WORK_ID, digest_of(repr(sorted(digests.items())).encode()))
    journal.begin()
    for number, digests_of_version in enumerate(digests.values()):
        journal.write(f"{number:06d}", {"objects": digests_of_version})
    last_renewal_s = time.monotonic()

    def renew() -> None:
        nonlocal last_renewal_s
        if time.monotonic() - last_renewal_s >= _RENEW_INTERVAL_S:
            journal.begin()  # a journal expires by its age; this resets the age
            last_renewal_s = time.monotonic()

    # No `finally`: after a failure the journal must stay, so that a repeated transfer finds the copied objects.
    yield renew
    # All versions are committed, so the journal is no longer needed. If it cannot be removed, `gc` deletes it later.
    with suppress(UnavailableError):
        journal.remove()
