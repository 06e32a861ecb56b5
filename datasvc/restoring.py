"""Restore a checkpoint through the node's cache and its peers, from several repositories in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from datasvc.cache import Cache
from datasvc.cache.peers import Peers
from datasvc.cached_objects import DIRECT, CachedObjects, count_bytes, links_of
from datasvc.errors import ConfigError, UnavailableError
from datasvc.models.checkpoint import Checkpoint, decode_state
from datasvc.models.load import ObjectSource, load_tensors
from datasvc.models.records import TensorRecord
from datasvc.models.restore_report import RestoreReport
from datasvc.models.selection import map_names, select_names
from datasvc.models.sources import CopiesInTurn
from datasvc.models.stored_version import read_version
from datasvc.models.tree import unflatten
from datasvc.repository import Repository, Storage


def restore(
    repository: Repository,
    ref: str,
    *,
    cache: Cache | str | Path | None = None,
    peers: Peers | None = None,
    fallback: Sequence[Repository | str] = (),
    only: Collection[str] = (),
    exclude: Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    trusted_keys: Sequence[str | Path] | None = None,
    begin: Callable[[int], None] | None = None,
    report: Callable[[int], None] | None = None,
) -> Checkpoint:
    """Return the checkpoint that `ref` means now, every byte verified.

    Bytes come from the node's cache where there is one, which asks its peers before the repository; what is missing,
    damaged or out of reach there comes from the next place that has a good copy, and is told in `Checkpoint.report`.

    Args:
        repository: has the version, and as a rule its objects.
        ref: NAME, NAME@VERSION or NAME@TAG.
        cache: the node's cache or its folder, which has a budget. What finds no room in it is read past it.
        peers: of a cache that is given by its folder.
        fallback: other repositories, or their URLs, that may have copies of objects; asked in this order.
        only: which tensors; with this, `exclude` or `rename` the state is a dict of tensors by dotted name, and
            nothing else of the version is read; see `selection.select_names`.
        exclude: which not.
        rename: what they shall be called; see `selection.map_names`.
        trusted_keys: files of public keys, by one of which the version must be signed; () for none, None for those
            that `DATASVC_TRUSTED_KEYS` names.
        begin: called once, with the bytes of all tensors.
        report: called with the bytes of each piece of a tensor once it is there, from any thread.

    Returns:
        The checkpoint; its tensors are the caller's own, none lies in a mapped file.

    Raises:
        ConfigError: `ref`, a setting or a key is wrong; or something has a later format.
        NotFoundError: there is no such version, no such other repository, or an object is nowhere.
        CorruptDataError: no place has a good copy of some object; names tensors and places. Or it is not signed.
        UnavailableError: a store did not answer.
    """
    began = time.monotonic()
    repositories = [repository, *map(_open_fallback, fallback)]
    behind = CopiesInTurn([each.objects for each in repositories])
    stored = read_version(repository, ref, read=behind.read, trusted_keys=trusted_keys)
    is_part = bool(only or exclude or rename)
    records = _select(stored.records, only, exclude, rename) if is_part else stored.records
    skeleton = None if is_part else decode_state(behind.read(stored.state), str(stored.version))
    size_bytes = sum(record.nbytes for record in records)
    if begin is not None:
        begin(size_bytes)
    with ExitStack() as opened:
        source: ObjectSource = behind
        cached = None
        node = _open_cache(cache, peers, opened)
        if node is not None:
            source = cached = opened.enter_context(CachedObjects(node, repositories, behind, records))
        tensors = load_tensors(source, records, report=report)
    state = tensors if is_part else unflatten(skeleton, tensors)
    came = {DIRECT: count_bytes(links_of(records)).total()} if cached is None else cached.came_bytes
    done = RestoreReport(time.monotonic() - began, size_bytes, came, behind.bad.listed(records))
    return Checkpoint(stored.version, state, stored.entry, done)


def _select(
    records: Sequence[TensorRecord], only: Collection[str], exclude: Collection[str], rename: Mapping[str, str] | None
) -> list[TensorRecord]:
    by_name = {record.name: record for record in records}
    mapped = map_names(select_names(list(by_name), only, exclude), rename)
    return [replace(by_name[old], name=new) for old, new in mapped.items()]


def _open_cache(cache: Cache | str | Path | None, peers: Peers | None, opened: ExitStack) -> Cache | None:
    if cache is None or isinstance(cache, Cache):
        if peers is not None:
            raise ConfigError(
                "peers are asked by way of a node's cache: give its folder as cache=, or a Cache with peers"
            )
        return cache
    return opened.enter_context(Cache(cache, peers=peers))


def _open_fallback(place: Repository | str) -> Repository:
    if isinstance(place, Repository):
        return place
    try:
        return Repository.open(place)
    except (ConfigError, UnavailableError):
        # It may never be needed; where it is, whoever asks it for an object hears why it gives none.
        return Repository(Storage(place))
