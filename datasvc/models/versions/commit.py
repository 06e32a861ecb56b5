"""The one commit of a model version: stored tensors, their state, and what is said of them become an entry."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, overload

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.models.tensors.state_tree import encode_state
from datasvc.models.tensors.tensor_table import TensorRecord, digest_of_content, encode_table, read_table
from datasvc.models.versions.code_revision import keep_code
from datasvc.models.versions.entry_refs import objects_of_entry
from datasvc.models.versions.environment import describe_environment
from datasvc.models.versions.metadata import VersionMetadata
from datasvc.repository import Digest, Repository, Resolved
from datasvc.repository.logs.references import check_name, parse_reference
from datasvc.repository.objects.objects import parse_digest
from datasvc.repository.objects.presence import check_present

# An entry is read by whoever lists versions: it does not grow with the model.
_MAX_NONFINITE: Final = 100


@dataclass(frozen=True)
class StoredState:
    """A state whose tensors are stored, by one process or by all ranks of a job.

    Attributes:
        records: of all its tensors.
        skeleton: of its tree, from `state_tree.flatten`.
        new_bytes: that were not in the repository before.
        num_nonfinite: NaN and infinities by tensor, where there are any.
    """

    records: Sequence[TensorRecord]
    skeleton: Any
    new_bytes: int
    num_nonfinite: Mapping[str, int] = field(default_factory=dict)


def commit(
    repository: Repository,
    name: str,
    state: StoredState,
    about: VersionMetadata,
    *,
    extra: Mapping[str, Any] | None = None,
    extra_objects: Iterable[Digest] = (),
) -> Resolved:
    """Commit a state as the next version of model `name`. Until this returns nothing of it is visible.

    Args:
        repository: where its tensors are stored.
        name: of the model, made when new.
        state: what was stored.
        about: what is said of it.
        extra: further fields of the entry.
        extra_objects: that they name, beside those of every entry.

    Raises:
        ConfigError: bad name; or the table, the state or the entry is larger than any that can be read again.
        NotFoundError: `about.parent` or one of `about.merged` is no version of its model; or an object that was
            stored, or was there, is not there any more.
        ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`.
    """
    check_name(name, "model")
    entry = {
        "step": about.step,
        "tensors": repository.objects.put(encode_table(state.records)).digest,
        "num_tensors": len(state.records),
        "bytes": sum(record.nbytes for record in state.records),
        "stored_bytes": state.new_bytes,
        "content": digest_of_content(state.records),
        "num_nonfinite": _worst(state.num_nonfinite),
        "state": repository.objects.put(encode_state(state.skeleton)).digest,
        "data": [use.to_dict() for use in about.data],
        "code": (about.code or keep_code(repository.objects)).to_dict(),
        "environment": dict(describe_environment() if about.environment is None else about.environment),
        "config": dict(about.config or {}),
        "metrics": {key: _json_number(value) for key, value in (about.metrics or {}).items()},
        "parent": exact_version(repository, about.parent),
        "message": about.message,
        **({"merged": [exact_version(repository, each) for each in about.merged]} if about.merged else {}),
        **(extra or {}),
    }
    pieces = (piece for record in state.records for piece in record.pieces)
    links = (link.object for piece in pieces for link in piece.chain)
    check_present(repository.objects, {*objects_of_entry(entry, name).all, *links, *extra_objects}, f"{name!r}")
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


def _worst(num_nonfinite: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of the tensors that have most."""
    ranked = sorted(num_nonfinite.items(), key=lambda counted: (-counted[1], counted[0]))
    return dict(ranked[:_MAX_NONFINITE])


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else repr(float(value))
