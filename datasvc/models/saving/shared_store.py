"""Checks that all ranks of a save store to the same place: `./repo` may be a different folder on every node.

One rank writes a marker, a small file with a random name and random content, and another one reads it. No cache of a
file system or driver can answer for a name that was never looked up. The marker is removed at once; one that a killed
process leaves is a temporary file, which `gc` removes.
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
    """A file that a rank wrote into the repository for this check.

    Attributes:
        path: path below the root.
        content: content of the file.
    """

    path: str
    content: str


def write_marker(storage: Storage) -> Marker:
    """Write a marker and return it. Raises ConfigError, UnavailableError."""
    content = secrets.token_hex(16)
    return Marker(storage.create_temporary(content.encode()), content)


def can_read_marker(storage: Storage, marker: Marker) -> bool:
    """Return whether this rank can read another rank's marker. Raises ConfigError, UnavailableError."""
    try:
        return storage.read(marker.path, len(marker.content)) == marker.content.encode()
    except NotFoundError:
        return False


def check_same_store(channel: RankChannel, storage: Storage) -> None:
    """Check that all ranks store to the same place; every rank calls this, and all raise the same error.

    Raises:
        ConfigError: some ranks cannot read the marker of rank 0; the message names them. Or the store is not
            writable.
        UnavailableError: the store did not answer, or a rank is lost.
    """
    error: Exception | None = None
    marker, is_visible = None, False
    with ExitStack() as stack:
        try:
            storage.check_writable()
            if channel.rank == 0 and channel.size > 1:
                marker = write_marker(storage)
                stack.callback(storage.remove_temporary, marker.path)
        except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all
            error = failure
        answers = channel.exchange([describe_error(error), marker, redact_url(storage.url)])
        raise_on_all_ranks([answer[0] for answer in answers], error)
        if channel.size == 1:
            return
        _, rank0_marker, rank0_url = answers[0]
        try:
            is_visible = can_read_marker(storage, Marker(*rank0_marker))
        except Exception as failure:  # noqa: BLE001 - likewise
            error = failure
        answers = channel.exchange([describe_error(error), is_visible])
    raise_on_all_ranks([answer[0] for answer in answers], error)
    check_all_visible((rank for rank, answer in enumerate(answers) if not answer[1]), channel.size, rank0_url)


def check_markers(storage: Storage, markers: Sequence[Marker | None]) -> None:
    """Check and remove the markers that the other ranks have written; for saves where a coordinator collects them.

    Args:
        storage: storage of this rank, the coordinator.
        markers: marker by rank; None: the rank wrote none.

    Raises:
        ConfigError: this rank cannot read some of them; the message names their ranks.
        UnavailableError: the store did not answer.
    """
    written = {rank: marker for rank, marker in enumerate(markers) if marker is not None}
    with ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="datasvc-markers") as pool:
        visible = dict(zip(written, pool.map(partial(can_read_marker, storage), written.values()), strict=True))
        list(pool.map(storage.remove_temporary, (written[rank].path for rank, is_seen in visible.items() if is_seen)))
    check_all_visible(
        (rank for rank, is_seen in visible.items() if not is_seen), len(markers), redact_url(storage.url)
    )


def check_all_visible(mismatched: Iterable[int], num_ranks: int, url: str) -> None:
    """Raise ConfigError if any rank, `mismatched`, does not share the repository of rank 0 at `url`."""
    ranks = set(mismatched)
    if ranks:
        raise ConfigError(
            f"rank {describe_numbers(ranks)} (of {num_ranks}) does not store to the same place as rank 0, {url}, "
            "even if the path has the same name there. The checkpoint would be spread over several places and could "
            "not be restored; nothing was stored. Give all ranks one repository: a folder that all nodes mount, or "
            "an object store such as s3://bucket/prefix"
        )
