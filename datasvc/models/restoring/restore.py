"""Restores whole checkpoints, or some of their tensors, from the node's cache, its peers, or repositories.

`CheckpointManager.restore` and `repo.models.restore` call `restore`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from datasvc.cache import Cache
from datasvc.cache.peers.peers import Peers
from datasvc.errors import ConfigError
from datasvc.models.restoring.copies import StoredCopies
from datasvc.models.restoring.fill_state import fill_state
from datasvc.models.restoring.report import RestoreReport
from datasvc.models.tensors.container_types import tied_tensors
from datasvc.models.tensors.name_filter import map_names, select_names
from datasvc.models.tensors.partial_read import PLANES
from datasvc.models.tensors.state_tree import MAX_STATE_BYTES, decode_state, unflatten
from datasvc.models.tensors.tensor_table import MAX_TABLE_BYTES, TensorRecord, decode_table
from datasvc.models.versions.entry_fields import objects_of_entry
from datasvc.models.versions.signing import check_signed
from datasvc.models.versions.signing import trusted_keys as load_trusted_keys
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest, Repository, Resolved

# Every restore begins with `read_version`, so that trusted keys are always enforced.


@dataclass(frozen=True)
class StoredVersion:
    """A version without the bytes of its tensors.

    Attributes:
        version: name and number of the version.
        entry: content of its log entry.
        records: records of its tensors, sorted by name.
        state: digest of its state object.
    """

    version: Resolved
    entry: Mapping[str, Any]
    records: tuple[TensorRecord, ...]
    state: Digest


def read_version(
    repository: Repository,
    ref: str | Resolved,
    *,
    read: Callable[[Digest, int], bytes] | None = None,
    trusted_keys: Sequence[str | Path] | None = None,
) -> StoredVersion:
    """Return the version that `ref` resolves to, without the bytes of its tensors.

    `read` returns a verified object of at most the given size in bytes; default: `Objects.read` of the repository.
    For the other arguments see `restore.restore`.

    Raises:
        ConfigError, NotFoundError, UnavailableError: see `Repository.resolve`, `signing.trusted_keys`.
        CorruptDataError: the entry or the table is damaged, or none of the keys has signed the version.
    """
    keys = load_trusted_keys(trusted_keys)
    version = repository.resolve("models", ref)
    entry = repository.entry(version)
    # Check the signature first: an object that an untrusted entry names must not be read.
    if keys:
        check_signed(repository, version, entry, keys)
    refs = objects_of_entry(entry.content, version)
    content = (read or repository.objects.read)(refs.tensors, MAX_TABLE_BYTES)
    records = decode_table(content, f"the tensor table {refs.tensors} of {version}")
    return StoredVersion(version, entry.content, records, refs.state)


IntoState = Mapping[str, Any] | Callable[[StoredVersion], Mapping[str, Any] | None]
"""Type of the argument `into` of `restore`: a state tree, such as the one that a save gets.

Its tensors are filled in place; of a DTensor, only the part of this rank is read, however the version was sharded.
`Checkpoint.state` is this tree, with stored values in place of all parts without tensors; a part that the version
lacks stays as it is, and so does the optimizer's state of a parameter for which none was made, as without a gradient
(see `RestoreReport.kept`). A dict below the root also gets stored values without tensors that it lacks. Nothing else
is read. A function gets the version without its tensors, and returns such a tree, or None to restore all.
"""


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """A restored checkpoint.

    Attributes:
        version: the restored version.
        state: the state tree as it was saved; tensors on the CPU, verified, owned by the caller.
        entry: content of the version's log entry: data, code, configuration, metrics.
        report: duration, places that the bytes were read from, and bad copies.
    """

    version: Resolved
    state: Any
    entry: Mapping[str, Any]
    report: RestoreReport

    def __repr__(self) -> str:
        # Without the tensors of the state, which would fill a terminal.
        parts = ", ".join(map(str, self.state)) if isinstance(self.state, Mapping) else type(self.state).__name__
        return f"Checkpoint({self.version}, step {self.entry.get('step')}, state: {shorten(parts, 80)})"


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
    into: IntoState | None = None,
    strict: bool = True,
    planes: int | None = None,
    trusted_keys: Sequence[str | Path] | None = None,
    progress: Progress = NO_PROGRESS,
) -> Checkpoint:
    """Return the checkpoint that `ref` resolves to. Every byte is verified.

    An object comes from the cache, else a peer, the repository or a fallback. `Checkpoint.report` lists bad copies.

    Args:
        repository: repository of the version, and normally of its objects.
        ref: NAME, NAME@VERSION or NAME@TAG, or the result of a save.
        cache: the node's cache, or its folder; the cache must have a budget. Objects for which it has no space are
            read directly from the repository.
        peers: other nodes to fetch from; only if `cache` is a folder.
        fallback: other repositories, or their URLs, that may have copies of objects; tried in this order.
        only: patterns of tensors to restore. With `only`, `exclude` or `rename` the state is a dict of tensors by
            dotted name, and nothing else of the version is read; see `name_filter.select_names`.
        exclude: patterns of tensors to leave out.
        rename: map from stored names to new names; see `name_filter.map_names`.
        into: state tree to fill in place, see `IntoState`; `only` and `exclude` select in it. Not with `rename`.
        strict: with `into`, whether a missing tensor, or one of another dtype or shape, is an error; if False, it
            stays as it is and is in `RestoreReport.kept`.
        planes: for a preview, read only this number of high bytes, 2 or 3, of each float32 and complex64 (of float64
            and complex128 one more), with a relative error below 2^-7 or 2^-15; see `PartialReader.read`. They are
            not verified, because digests are those of all bytes. Not with `cache`, which fetches all, or `into`.
        trusted_keys: files of public keys, one of which must have signed the version; () for no check, None for the
            files that `DATASVC_TRUSTED_KEYS` names.
        progress: counts the bytes of each chunk that was loaded.

    Returns:
        The checkpoint; the caller owns its tensors, and none of them is a view of a mapped file.

    Raises:
        ConfigError: `ref`, a setting or a key is invalid; a stored format is newer than this release; or `into` does
            not fit the version, or has an object with a `state_dict`, such as a module. `into` was not changed.
        NotFoundError: the version or a fallback repository does not exist, or no place has an object.
        CorruptDataError: no place has a good copy of an object; or no trusted key has signed the version.
        UnavailableError: a store did not answer.
    """
    if planes is not None:
        _check_planes(planes, is_cached=cache is not None, is_filled=into is not None)
    return restore_from(
        StoredCopies(repository, cache=cache, peers=peers, fallback=fallback),
        ref,
        only=only,
        exclude=exclude,
        rename=rename,
        into=into,
        strict=strict,
        planes=planes,
        trusted_keys=trusted_keys,
        progress=progress,
    )


def restore_from(
    copies: StoredCopies,
    ref: str | Resolved,
    *,
    only: Collection[str] = (),
    exclude: Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    into: IntoState | None = None,
    strict: bool = True,
    planes: int | None = None,
    trusted_keys: Sequence[str | Path] | None = None,
    progress: Progress = NO_PROGRESS,
) -> Checkpoint:
    """Return the checkpoint that `ref` resolves to in the repository of `copies`. For the rest see `restore`."""
    began = time.monotonic()
    stored = read_version(copies.repository, ref, read=copies.direct.read, trusted_keys=trusted_keys)
    if callable(into) and not hasattr(into, "state_dict"):  # a module is callable too, and `fill_state` refuses it
        into = into(stored)
    # Check the patterns and the state before the tensors are read, because the tensors are by far the largest part.
    if rename and into is not None:
        raise ConfigError("into= cannot be combined with rename=; use load_into() of a module")
    is_part = bool(only or exclude or rename) and into is None
    records = _select(stored.records, only, exclude, rename) if is_part else stored.records
    skeleton = None
    if not is_part:
        skeleton = decode_state(copies.direct.read(stored.state, MAX_STATE_BYTES), str(stored.version))
    if into is not None:
        by_name = {record.name: record for record in records}
        filled = fill_state(
            into, copies, skeleton, by_name, str(stored.version), progress, only=only, exclude=exclude, strict=strict
        )
        report = replace(copies.report(filled.read, time.monotonic() - began), kept=filled.kept)
        return Checkpoint(stored.version, filled.state, stored.entry, report)
    tied = {} if is_part else tied_tensors(skeleton)
    if tied:
        tied = _confirm_tied(tied, records)
        records = [record for record in records if record.name not in tied]
    progress.begin(sum([record.nbytes for record in records]))
    tensors = copies.load(records, progress=progress, planes=planes)
    for name, first in tied.items():
        tensors[name] = tensors[first]
    state = tensors if is_part else unflatten(skeleton, tensors)
    return Checkpoint(stored.version, state, stored.entry, copies.report(records, time.monotonic() - began))


def _check_planes(planes: int, *, is_cached: bool, is_filled: bool) -> None:
    if planes not in PLANES:
        raise ConfigError(f"planes is {planes!r}; expected 2 or 3 high bytes, or None for all bytes")
    if is_cached or is_filled:
        other = "cache=, which fetches whole objects" if is_cached else "into="
        raise ConfigError(f"planes= cannot be combined with {other}")


def _confirm_tied(tied: Mapping[str, str], records: Sequence[TensorRecord]) -> dict[str, str]:
    """Return those of the tied tensors to restore as another tensor: the name of that one, by name."""
    by_name = {record.name: record for record in records}
    # Compare the contents, because tied tensors of a damaged state must not hide each other's values.
    return {
        name: first
        for name, first in tied.items()
        if first not in tied and {name, first} <= by_name.keys() and by_name[name].content == by_name[first].content
    }


def _select(
    records: Sequence[TensorRecord], only: Collection[str], exclude: Collection[str], rename: Mapping[str, str] | None
) -> list[TensorRecord]:
    """Return the records of the tensors to restore, under their new names."""
    by_name = {record.name: record for record in records}
    mapped = map_names(select_names(list(by_name), only, exclude), rename)
    return [replace(by_name[old], name=new) for old, new in mapped.items()]
