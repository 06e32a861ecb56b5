"""Checks that all ranks of a save use the same store: a path such as `./repo` may be another folder on each node.

A rank writes a marker, a small file with a random name and random content, and another rank reads it. The name is
new, so no cache of a file system or client can have the file. For a `CheckpointManager`, rank 0 writes and all ranks
read (`check_same_store`). For a torch DCP save, all ranks but the coordinator write, and the coordinator reads
(`check_markers`). Markers are removed after the check. A marker that a killed process leaves is a temporary file,
which `gc` removes.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, NamedTuple

from datasvc.errors import ConfigError, NotFoundError, UnavailableError
from datasvc.models.saving.rank_channel import LostRankError, RankChannel, describe_error, raise_on_all_ranks
from datasvc.repository import Storage
from datasvc.repository.logs.log import describe_numbers
from datasvc.repository.store.redaction import redact_url
from datasvc.threads import map_in_threads

logger = logging.getLogger(__name__)

_REQUESTS_AT_ONCE: Final = 16


class Marker(NamedTuple):
    """A file that a rank wrote into the repository for the check: its path below the root, and its content."""

    path: str
    content: str


def write_marker(storage: Storage) -> Marker:
    """Write a marker and return it. For errors see `Storage.create_temporary`."""
    content = secrets.token_hex(16)
    return Marker(storage.create_temporary(content.encode()), content)


def can_read_marker(storage: Storage, marker: Marker) -> bool:
    """Return whether this rank can read another rank's marker. For errors see `Storage.read`."""
    try:
        return storage.read(marker.path, len(marker.content)) == marker.content.encode()
    except NotFoundError:
        return False


def check_same_store(channel: RankChannel, storage: Storage, *, is_needed: bool = True) -> bool:
    """Check that all ranks store to the same place; every rank calls this, and all raise the same error.

    Args:
        channel: channel between the ranks.
        storage: the store of this rank.
        is_needed: whether to raise an error if the store does not answer; otherwise that is logged.

    Returns:
        Whether the check has passed; False: the store does not answer.

    Raises:
        ConfigError: some ranks cannot read the marker of rank 0 (the message names these ranks); or the store is not
            writable.
        UnavailableError: the store did not answer, or a rank is lost.
    """
    try:
        _check_same_store(channel, storage)
    except LostRankError:
        raise
    except UnavailableError as error:
        if is_needed:
            raise
        logger.warning("the repository does not answer; the first save to it checks it: %s", error)
        return False
    return True


def _check_same_store(channel: RankChannel, storage: Storage) -> None:
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
        except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all
            error = failure
        # Exchange before the `with` block ends: rank 0 must not remove the marker before all ranks have read it.
        answers = channel.exchange([describe_error(error), is_visible])
    raise_on_all_ranks([answer[0] for answer in answers], error)
    _check_all_visible({rank: answer[1] for rank, answer in enumerate(answers)}, channel.size, rank0_url)


def check_markers(storage: Storage, markers: Sequence[Marker | None]) -> None:
    """Check that this rank can read the markers of the other ranks, and remove those that it can read.

    The coordinator of a save calls this after it has collected all markers.

    Args:
        storage: storage of this rank, the coordinator.
        markers: marker of each rank, in rank order; None: the rank wrote none.

    Raises:
        ConfigError: this rank cannot read some of the markers; the message names their ranks.
        UnavailableError: the store did not answer.
    """
    written = {rank: marker for rank, marker in enumerate(markers) if marker is not None}
    results = map_in_threads(partial(can_read_marker, storage), written.values(), _REQUESTS_AT_ONCE)
    is_visible = dict(zip(written, results, strict=True))
    # A marker that is not visible lies in another store, where `gc` removes it.
    paths = [marker.path for rank, marker in written.items() if is_visible[rank]]
    map_in_threads(storage.remove_temporary, paths, _REQUESTS_AT_ONCE)
    _check_all_visible(is_visible, len(markers), redact_url(storage.url))


def _check_all_visible(is_visible: Mapping[int, bool], num_ranks: int, url: str) -> None:
    """Raise ConfigError if `is_visible` is False for a rank, which then does not store to `url`, as rank 0 does."""
    elsewhere = {rank for rank, is_same_store in is_visible.items() if not is_same_store}
    if elsewhere:
        raise ConfigError(
            f"rank {describe_numbers(elsewhere)} (of {num_ranks}) does not store to the same place as rank 0, {url}, "
            "even if the path has the same name there. The checkpoint would be spread over several places and could "
            "not be restored; nothing was stored. Give all ranks one repository: a folder that all nodes mount, or "
            "an object store such as s3://bucket/prefix"
        )
