"""A checkpoint: the whole state of a run, bound to what it came from by one commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasvc.models.restoring.stored_version import read_version
from datasvc.models.tensors.chunk_reader import ChunkSource
from datasvc.models.tensors.read import load_tensors
from datasvc.models.tensors.state_tree import MAX_STATE_BYTES, decode_state, encode_state, flatten, unflatten
from datasvc.models.tensors.write import Codec, store_tensors
from datasvc.models.versions.code_revision import CodeRevision
from datasvc.models.versions.commit import StoredState, base_records, commit, exact_version
from datasvc.models.versions.data_use import DataUse
from datasvc.models.versions.metadata import VersionMetadata
from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.references import check_name

if TYPE_CHECKING:
    from datasvc.models.restoring.report import RestoreReport


@dataclass(frozen=True)
class Checkpoint:
    """A restored checkpoint.

    Attributes:
        version: which one.
        state: the state tree as it was saved; tensors on the CPU, verified, owned by the caller.
        entry: the version's entry: data, code, configuration, metrics.
        report: what it took, where that was measured.
    """

    version: Resolved
    state: Any
    entry: Mapping[str, Any]
    report: RestoreReport | None = None


def save(
    repository: Repository,
    name: str,
    state: Mapping[str, Any],
    *,
    step: int,
    data: Sequence[DataUse] = (),
    config: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    parent: str | None = None,
    merged: Sequence[str] = (),
    message: str = "",
    code: CodeRevision | None = None,
    environment: Mapping[str, Any] | None = None,
    codec: Codec = "delta",
    report: Callable[[int], None] | None = None,
) -> Resolved:
    """Store `state` as the next version of model `name`. One process of a job calls this.

    Args:
        repository: where to.
        name: of the model, made when new.
        state: tree of dicts, lists, tuples, numbers, strings and tensors: model, optimizer, loader, random states.
        step: optimizer steps behind this state.
        data: what was consumed so far.
        config: effective configuration of the run, JSON values.
        metrics: such as {"val_accuracy": 0.98}; NaN and infinities are stored as text.
        parent: the version this run continues, "digits-cnn@3"; a name or tag means what it does now. Where there is
            no such model here, the text is kept as it is: a version of another repository.
        merged: further versions that went into this one, as in an average of weights; likewise.
        message: for people.
        code: default: the git checkout of the working folder, with what differs from its revision.
        environment: default: this process's.
        codec: "none", "planes" or "delta": how tensors are stored that nobody stored before, see `store_tensors`.
        report: called with the bytes of each piece of a tensor once it is stored, from any thread.

    Returns:
        The committed version. Until this returns nothing of it is visible.

    Raises:
        ConfigError: bad name, or a value that cannot be stored; names it.
        NotFoundError: `parent` or one of `merged` is no version of its model; nothing was stored.
        ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`.
    """
    check_name(name, "model")
    # Before anything is stored: a tag may be moved meanwhile.
    parent, merged = exact_version(repository, parent), [exact_version(repository, each) for each in merged]
    about = VersionMetadata(step, data, config, metrics, parent, merged, message, code, environment)
    skeleton, tensors = flatten(state)
    encode_state(skeleton)  # refused before tensors are stored rather than after
    base = base_records(repository, name, parent) if codec == "delta" else ()
    stored = store_tensors(repository.objects, tensors, base=base, codec=codec, report=report)
    return commit(
        repository, name, StoredState(stored.records, skeleton, stored.new_bytes, stored.num_nonfinite), about
    )


def restore(
    repository: Repository,
    ref: str | Resolved,
    *,
    source: ChunkSource | None = None,
    trusted_keys: Sequence[str | Path] | None = None,
    report: Callable[[int], None] | None = None,
) -> Checkpoint:
    """Return the checkpoint that `ref` means now, every byte verified.

    Args:
        repository: where it is.
        ref: NAME, NAME@VERSION or NAME@TAG, or what a save returned.
        source: where the bytes of tensors are read; default the repository.
        trusted_keys: as of `stored_version.read_version`.
        report: called with the bytes of each piece of a tensor once it is there, from any thread.

    Raises:
        ConfigError, NotFoundError, UnavailableError: see `Repository.resolve`.
        CorruptDataError: an entry, the state or a tensor was changed; names it. Or it is not signed.
    """
    stored = read_version(repository, ref, trusted_keys=trusted_keys)
    skeleton = decode_state(repository.objects.read(stored.state, MAX_STATE_BYTES), str(stored.version))
    tensors = load_tensors(source or repository.objects, stored.records, report=report)
    return Checkpoint(stored.version, unflatten(skeleton, tensors), stored.entry)
