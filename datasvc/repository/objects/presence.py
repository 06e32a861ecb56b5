"""The last look before a commit: whether all objects that the new entry will name are still there.

They were, when they were stored or found. Since then a `gc` may have removed one, which was told that nobody writes
or misled by a clock; or another rank may have stored it to another place. An entry that names it could never be
restored, and the writer would report success.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from datasvc.errors import NotFoundError
from datasvc.repository.objects.objects import Digest, Objects

_LOOKS_AT_ONCE: Final = 16
_MAX_LOOKS_PER_FOLDER: Final = 32
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

    Costs a look at each, 16 at a time. A remote store is asked for the names in a folder instead where more than
    `_MAX_LOOKS_PER_FOLDER` objects of it are wanted, and the list takes fewer requests than they: the list of one
    folder tells, as objects are spread evenly over 256 folders by their digests.
    """
    folders: dict[str, set[Digest]] = defaultdict(set)
    for digest in named:
        folders[objects.path(digest).rpartition("/")[0]].add(digest)

    def list_missing(folder: str) -> tuple[set[Digest], int]:
        names = objects.storage.list(folder)
        return folders[folder].difference(map(Digest, names)), len(names) // _NAMES_PER_REQUEST + 1

    missing: set[Digest] = set()
    listed: list[str] = []
    fullest = max(folders, key=lambda folder: len(folders[folder]), default="")
    # A folder of a large store has some hundred pages of names, one after another: not for a handful of objects.
    if not objects.storage.is_local and len(folders[fullest]) > _MAX_LOOKS_PER_FOLDER:
        missing, num_requests = list_missing(fullest)
        del folders[fullest]
        least = max(_MAX_LOOKS_PER_FOLDER, num_requests)
        listed = [folder for folder, wanted in folders.items() if len(wanted) > least]
    single = [digest for folder in folders.keys() - set(listed) for digest in folders[folder]]
    with ThreadPoolExecutor(_LOOKS_AT_ONCE, thread_name_prefix="datasvc-look") as pool:
        for lacking, _ in pool.map(list_missing, listed):
            missing |= lacking
        sizes = pool.map(objects.size, single)
        return missing.union(digest for digest, size in zip(single, sizes, strict=True) if size is None)
