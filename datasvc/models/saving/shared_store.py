"""Whether all ranks of a save store to one place: a path such as `./repo` may be another folder on every node.

A rank leaves a marker, a small file of a random name with random content, and another one reads it. The name was
never looked up before, so no cache of a file system or driver can answer for it. The marker is removed at once; that
of a process that dies is a temporary file, which `gc` removes.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Final, NamedTuple

from datasvc.errors import ConfigError, NotFoundError
from datasvc.models.saving.rank_channel import RankChannel, describe_error, raise_on_all_ranks
from datasvc.repository import Storage
from datasvc.repository.logs.version_numbers import describe_numbers
from datasvc.repository.store.storage import redact_url

_READS_AT_ONCE: Final = 16


class Marker(NamedTuple):
    """A file that a rank left in the repository.

    Attributes:
        path: below the root.
        content: what is in it.
    """

    path: str
    content: str


def leave_marker(storage: Storage) -> Marker:
    """Write a marker. Raises ConfigError, UnavailableError."""
    content = secrets.token_hex(16)
    return Marker(storage.create_temporary(content.encode()), content)


def sees(storage: Storage, marker: Marker) -> bool:
    """Return whether what another rank left is found here. Raises ConfigError, UnavailableError."""
    try:
        return storage.read(marker.path, len(marker.content)) == marker.content.encode()
    except NotFoundError:
        return False


def check_same_store(channel: RankChannel, storage: Storage) -> None:
    """Raise the same error on all ranks where they do not store to one place. Every rank calls this.

    Raises:
        ConfigError: some ranks do not see what rank 0 has written; names them. Or the store cannot be written.
        UnavailableError: the store did not answer, or a rank is lost.
    """
    error: Exception | None = None
    marker, is_seen = None, False
    with ExitStack() as stack:
        try:
            storage.check_writable()
            if channel.rank == 0 and channel.size > 1:
                marker = leave_marker(storage)
                stack.callback(storage.remove_temporary, marker.path)
        except Exception as failure:  # noqa: BLE001 - told to all ranks, and raised on all
            error = failure
        answers = channel.exchange([describe_error(error), marker, redact_url(storage.url)])
        raise_on_all_ranks([answer[0] for answer in answers], error)
        if channel.size == 1:
            return
        _, left, place = answers[0]
        try:
            is_seen = sees(storage, Marker(*left))
        except Exception as failure:  # noqa: BLE001 - likewise
            error = failure
        answers = channel.exchange([describe_error(error), is_seen])
    raise_on_all_ranks([answer[0] for answer in answers], error)
    check_seen((rank for rank, answer in enumerate(answers) if not answer[1]), channel.size, place)


def check_markers(storage: Storage, markers: Sequence[Marker | None]) -> None:
    """Do the same where every rank but this one has left a marker, and remove those.

    Args:
        storage: of this rank, the coordinator.
        markers: by rank; None: the rank has left none.

    Raises:
        ConfigError: some of them are not found here; names their ranks.
        UnavailableError: the store did not answer.
    """
    left = {rank: marker for rank, marker in enumerate(markers) if marker is not None}
    with ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="datasvc-markers") as pool:
        found = dict(zip(left, pool.map(partial(sees, storage), left.values()), strict=True))
        list(pool.map(storage.remove_temporary, (left[rank].path for rank, is_seen in found.items() if is_seen)))
    check_seen((rank for rank, is_seen in found.items() if not is_seen), len(markers), redact_url(storage.url))


def check_seen(blind: Iterable[int], num_ranks: int, place: str) -> None:
    """Raise ConfigError if ranks, `blind`, do not find what rank 0 has in its repository at `place`, or it theirs."""
    ranks = set(blind)
    if ranks:
        raise ConfigError(
            f"rank {describe_numbers(ranks)} (of {num_ranks}) does not store to the same place as rank 0, {place}, "
            "though the path may have the same name there. Each would keep a part of the checkpoint, and nobody "
            "could restore it; nothing was stored. Give all ranks one repository: a folder that all nodes mount, or "
            "an object store such as s3://bucket/prefix"
        )
