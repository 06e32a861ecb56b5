"""The last look before a commit: whether all objects that the new entry will name are still there.

They were, when they were stored or found. Since then a `gc` may have removed one, which was told that nobody writes
or misled by a clock; or another rank may have stored it to another place. An entry that names it could never be
restored, and the writer would report success.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from datasvc.errors import NotFoundError
from datasvc.repository.objects import Digest, Objects

_LOOKS_AT_ONCE: Final = 16
# Stores list so many names per request.
_NAMES_PER_REQUEST: Final = 1000


def check_present(objects: Objects, named: Iterable[Digest], what: str) -> None:
    """Raise where an object is missing that a commit is about to name.

    Args:
        objects: where they have to be.
        named: by the entry, directly or through its tables.
        what: is committed, for messages.

    Raises:
        NotFoundError: some are missing; nothing may be committed.
        UnavailableError: the store did not answer.
    """
    missing = find_missing(objects, named)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise NotFoundError(
            f"{what} is not committed: object {objects.location(min(missing))}{more}, which it names, is not there "
            "any more, though this process or another rank has stored or found it. Was a gc run with --no-writers, "
            "or are files removed by something else? Save again; `verify` names versions that miss objects too"
        )


def find_missing(objects: Objects, named: Iterable[Digest]) -> set[Digest]:
    """Return the objects that are not there. Raises UnavailableError.

    Costs a look at each, 16 at a time. A remote store is asked for lists of names instead where that takes fewer
    requests, which one list tells: objects are spread evenly over 256 folders by their digests.
    """
    folders: dict[str, set[Digest]] = defaultdict(set)
    for digest in named:
        folders[objects.path(digest).rpartition("/")[0]].add(digest)
    if not folders:
        return set()
    requests_per_list = math.inf
    fullest = max(folders, key=lambda folder: len(folders[folder]))
    if len(folders[fullest]) > 1 and not objects.storage.is_local:
        requests_per_list = len(objects.storage.list(fullest)) // _NAMES_PER_REQUEST + 1

    def missing_of(folder: str, wanted: Collection[Digest]) -> set[Digest]:
        if len(wanted) > requests_per_list:
            return set(wanted).difference(map(Digest, objects.storage.list(folder)))
        return {digest for digest in wanted if objects.size(digest) is None}

    with ThreadPoolExecutor(_LOOKS_AT_ONCE, thread_name_prefix="datasvc-look") as pool:
        return set().union(*pool.map(missing_of, folders, folders.values()))
