"""Restore a checkpoint through the node's cache and its peers, from several repositories in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from datasvc.cache import Cache
from datasvc.cache.peers.peers import Peers
from datasvc.errors import ConfigError
from datasvc.models.restoring.cached_source import CachedObjects
from datasvc.models.restoring.checkpoint import Checkpoint
from datasvc.models.restoring.copies import OpenCache, StagedSource, StoredCopies
from datasvc.models.restoring.failover_source import FailoverSource
from datasvc.models.restoring.stored_version import read_version
from datasvc.models.tensors.name_filter import map_names, select_names
from datasvc.models.tensors.read import load_tensors
from datasvc.models.tensors.state_tree import MAX_STATE_BYTES, decode_state, unflatten
from datasvc.models.tensors.tensor_table import TensorRecord
from datasvc.repository import Repository, Resolved


def restore(
    repository: Repository,
    ref: str | Resolved,
    *,
    cache: Cache | str | Path | None = None,
    peers: Peers | None = None,
    fallback: Sequence[Repository | str] | Repository | str = (),
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
        ref: NAME, NAME@VERSION or NAME@TAG, or what a save returned.
        cache: the node's cache or its folder, which has a budget. What finds no room in it is read past it.
        peers: of a cache that is given by its folder.
        fallback: other repositories, or their URLs, that may have copies of objects; asked in this order.
        only: which tensors; with this, `exclude` or `rename` the state is a dict of tensors by dotted name, and
            nothing else of the version is read; see `name_filter.select_names`.
        exclude: which not.
        rename: what they shall be called; see `name_filter.map_names`.
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
    copies = StoredCopies(repository, fallback=fallback, cache=node_cache(cache, peers))
    stored = read_version(repository, ref, read=copies.read, trusted_keys=trusted_keys)
    is_part = bool(only or exclude or rename)
    records = _select(stored.records, only, exclude, rename) if is_part else stored.records
    skeleton = None if is_part else decode_state(copies.read(stored.state, MAX_STATE_BYTES), str(stored.version))
    if begin is not None:
        begin(sum(record.nbytes for record in records))
    with copies.opened(records) as source:
        tensors = load_tensors(source, records, report=report)
    state = tensors if is_part else unflatten(skeleton, tensors)
    return Checkpoint(stored.version, state, stored.entry, copies.report(records, time.monotonic() - began))


def node_cache(cache: Cache | str | Path | None, peers: Peers | None = None) -> OpenCache | None:
    """Return what reads through a node's cache, for `datasvc.models.dcp.DcpReader`; None for no cache.

    Args:
        cache: of this node, or its folder, which has a budget. What finds no room in it is read past it.
        peers: of a cache that is given by its folder.

    Raises:
        ConfigError: peers without a cache, or of one that is open and so has its own.
    """
    if peers is not None and (cache is None or isinstance(cache, Cache)):
        raise ConfigError(
            "peers are asked by way of a node's cache: give its folder as cache=, or a Cache with peers"
        )
    if cache is None:
        return None

    @contextmanager
    def open_cache(
        repositories: Sequence[Repository], behind: FailoverSource, records: Sequence[TensorRecord]
    ) -> Iterator[StagedSource]:
        with ExitStack() as opened:
            node = cache if isinstance(cache, Cache) else opened.enter_context(Cache(cache, peers=peers))
            yield opened.enter_context(CachedObjects(node, repositories, behind, records))

    return open_cache


def _select(
    records: Sequence[TensorRecord], only: Collection[str], exclude: Collection[str], rename: Mapping[str, str] | None
) -> list[TensorRecord]:
    by_name = {record.name: record for record in records}
    mapped = map_names(select_names(list(by_name), only, exclude), rename)
    return [replace(by_name[old], name=new) for old, new in mapped.items()]
