"""A checkpoint: the whole state of a run, bound to what it came from by one commit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, overload

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.models.code import CodeRevision, keep_code
from datasvc.models.data_use import DataUse
from datasvc.models.environment import describe_environment
from datasvc.models.load import load_tensors
from datasvc.models.piece_reader import ObjectSource
from datasvc.models.records import TensorRecord, digest_of_content, encode_table, read_table
from datasvc.models.store import Codec, store_tensors
from datasvc.models.stored_version import read_version
from datasvc.models.tree import flatten, unflatten
from datasvc.repository import Digest, Repository, Resolved
from datasvc.repository.objects import parse_digest
from datasvc.repository.references import check_name, parse_reference

if TYPE_CHECKING:
    from datasvc.models.restore_report import RestoreReport

STATE_FORMAT: Final = 1
# An entry is read by whoever lists versions: it does not grow with the model.
_MOST_NONFINITE: Final = 100


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


@dataclass(frozen=True)
class Stored:
    """What a version is made of, before its tensors are read.

    Attributes:
        version: which one.
        entry: its entry.
        records: its tensors.
        skeleton: its state tree without them; see `tree.unflatten`.
    """

    version: Resolved
    entry: Mapping[str, Any]
    records: tuple[TensorRecord, ...]
    skeleton: Any


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
    skeleton, tensors = flatten(state)
    base = base_records(repository, name, parent) if codec == "delta" else ()
    stored = store_tensors(repository.objects, tensors, base=base, codec=codec, report=report)
    return commit(
        repository,
        name,
        skeleton=skeleton,
        records=stored.records,
        new_bytes=stored.new_bytes,
        num_nonfinite=stored.num_nonfinite,
        step=step,
        data=data,
        config=config,
        metrics=metrics,
        parent=parent,
        merged=merged,
        message=message,
        code=code,
        environment=environment,
    )


def commit(
    repository: Repository,
    name: str,
    *,
    skeleton: Any,
    records: Iterable[TensorRecord],
    new_bytes: int,
    step: int,
    num_nonfinite: Mapping[str, int] | None = None,
    data: Sequence[DataUse] = (),
    config: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    parent: str | None = None,
    merged: Sequence[str] = (),
    message: str = "",
    code: CodeRevision | None = None,
    environment: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Resolved:
    """Commit tensors that are stored already as the next version of model `name`.

    Args:
        repository: where they are stored.
        name: of the model, made when new.
        skeleton: of the state, from `tree.flatten`.
        records: of all its tensors.
        new_bytes: that storing them added.
        step: as of `save`, like what is not named here.
        num_nonfinite: NaN and infinities by tensor.
        data: see `save`.
        config: see `save`.
        metrics: see `save`.
        parent: see `save`.
        merged: see `save`.
        message: see `save`.
        code: see `save`.
        environment: see `save`.
        extra: further fields of the entry.

    Returns, raises: as `save`.
    """
    check_name(name, "model")
    listed = tuple(records)
    entry = {
        "step": step,
        "tensors": repository.objects.put(encode_table(listed)).digest,
        "num_tensors": len(listed),
        "bytes": sum(record.nbytes for record in listed),
        "stored_bytes": new_bytes,
        "content": digest_of_content(listed),
        "num_nonfinite": _worst(num_nonfinite or {}),
        "state": repository.objects.put(encode_state(skeleton)).digest,
        "data": [use.to_dict() for use in data],
        "code": (code or keep_code(repository.objects)).to_dict(),
        "environment": dict(describe_environment() if environment is None else environment),
        "config": dict(config or {}),
        "metrics": {key: _json_number(float(value)) for key, value in (metrics or {}).items()},
        "parent": exact_version(repository, parent),
        "message": message,
        **({"merged": [exact_version(repository, each) for each in merged]} if merged else {}),
        **(extra or {}),
    }
    committed = repository.versions("models", name).append(lambda _head: entry)
    return Resolved("models", name, committed.number)


@overload
def exact_version(repository: Repository, ref: str) -> str: ...
@overload
def exact_version(repository: Repository, ref: None) -> None: ...
def exact_version(repository: Repository, ref: str | None) -> str | None:
    """Return the version that a parent's reference means now: a name or tag will mean another one later.

    One of a model that is not here, or that is no reference, is returned as it is: it may be of another repository.

    Raises:
        NotFoundError: the model is here, and has no such version or tag.
        UnavailableError: see `Repository.resolve`.
    """
    if ref is None:
        return None
    try:
        name = parse_reference(ref, "model").name
    except ConfigError:
        return ref
    try:
        return str(repository.resolve("models", ref, removed=True))
    except NotFoundError:
        if repository.versions("models", name).head():
            raise
        return ref


def base_records(repository: Repository, name: str, parent: str | None = None) -> tuple[TensorRecord, ...]:
    """Return the tensors to which those of the next version of `name` are stored as differences.

    Those of `parent`, else of the model's newest version. () where there is none, or where it is damaged: then the
    next version is stored in full, which needs nothing of it. Raises UnavailableError.
    """
    for ref in (parent, name):
        if ref is None:
            continue
        try:
            entry = repository.entry(repository.resolve("models", ref)).content
            return read_table(repository.objects, parse_digest(entry["tensors"]))
        except (ConfigError, NotFoundError, CorruptDataError, KeyError, TypeError):
            continue
    return ()


def restore(
    repository: Repository,
    ref: str,
    *,
    source: ObjectSource | None = None,
    trusted_keys: Sequence[str | Path] | None = None,
    report: Callable[[int], None] | None = None,
) -> Checkpoint:
    """Return the checkpoint that `ref` means now, every byte verified.

    Args:
        repository: where it is.
        ref: NAME, NAME@VERSION or NAME@TAG.
        source: where the bytes of tensors are read; default the repository.
        trusted_keys: as of `open_stored`.
        report: called with the bytes of each piece of a tensor once it is there, from any thread.

    Raises:
        ConfigError, NotFoundError, UnavailableError: see `Repository.resolve`.
        CorruptDataError: an entry, the state or a tensor was changed; names it. Or it is not signed.
    """
    stored = open_stored(repository, ref, trusted_keys=trusted_keys)
    tensors = load_tensors(source or repository.objects, stored.records, report=report)
    return Checkpoint(stored.version, unflatten(stored.skeleton, tensors), stored.entry)


def open_stored(
    repository: Repository,
    ref: str,
    *,
    read: Callable[[Digest], bytes] | None = None,
    trusted_keys: Sequence[str | Path] | None = None,
) -> Stored:
    """Return what the version that `ref` means now is made of, verified; its tensors are not read.

    Args:
        repository: has the version.
        ref: NAME, NAME@VERSION or NAME@TAG.
        read: gives whole objects, verified; default the repository's.
        trusted_keys: files of public keys, by one of which the version must be signed; () for none, None for those
            that `DATASVC_TRUSTED_KEYS` names.

    Raises: as `restore`.
    """
    found = read_version(repository, ref, read=read, trusted_keys=trusted_keys)
    state = (read or repository.objects.read)(found.state)
    return Stored(found.version, found.entry, found.records, decode_state(state, str(found.version)))


def encode_state(skeleton: Any) -> bytes:
    """Return the bytes of a state object from the skeleton that `tree.flatten` gave."""
    return json.dumps({"format": STATE_FORMAT, "state": skeleton}, sort_keys=True, allow_nan=False).encode()


def decode_state(raw: bytes, version: str) -> Any:
    """Return the skeleton in a state object of `version`. Raises CorruptDataError, ConfigError (later format)."""
    try:
        stored = json.loads(raw)
        found = int(stored["format"])
        skeleton = stored["state"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptDataError(f"the state of {version} is damaged: {error!r}") from error
    if found > STATE_FORMAT:
        raise ConfigError(f"{version} has state format {found}; this datasvc reads up to {STATE_FORMAT}")
    return skeleton


def _worst(num_nonfinite: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of the tensors that have most."""
    ranked = sorted(num_nonfinite.items(), key=lambda counted: (-counted[1], counted[0]))
    return dict(ranked[:_MOST_NONFINITE])


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else repr(float(value))
