"""Commits model versions: writes a log entry with the digests of the stored tensors and state, and the metadata.

Every save, import and sharded save calls `commit`, so that every version passes the same checks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.models.tensors.state_tree import encode_state
from datasvc.models.tensors.tensor_table import TensorRecord, digest_of_content, encode_table, read_table
from datasvc.models.tensors.write import StoredState
from datasvc.models.versions.code_revision import describe_environment, keep_code
from datasvc.models.versions.metadata import VersionMetadata
from datasvc.repository import Digest, Repository, Resolved
from datasvc.repository.logs.references import check_name, parse_reference
from datasvc.repository.objects.objects import parse_digest
from datasvc.repository.objects.presence import check_present

# Listing the versions reads all their entries, so the size of an entry must not grow with the model.
_MAX_LISTED_NONFINITE: Final = 100


def commit(
    repository: Repository,
    name: str,
    state: StoredState,
    metadata: VersionMetadata,
    *,
    extra: Mapping[str, Any] | None = None,
    extra_objects: Iterable[Digest] = (),
) -> Resolved:
    """Commit a state as the next version of model `name`. Nothing is visible to readers before this returns.

    Args:
        repository: repository in which the tensors are stored.
        name: name of the model; the first commit creates the model.
        state: skeleton and tensor records; the chunks are already stored.
        metadata: metadata of the version.
        extra: further fields of the entry.
        extra_objects: digests of the objects that `extra` names.

    Raises:
        ConfigError: `name` is invalid; or the table, the state or the entry is larger than readers accept.
        NotFoundError: `metadata.parent` or one of `metadata.merged` does not exist in its model; or an object that
            the entry names is no longer in the repository.
        ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`.
    """
    entry, referenced = prepare_entry(repository, name, state, metadata, extra=extra)
    # Check before the append: an entry must never name an object that is missing.
    check_present(repository.objects, {*referenced, *extra_objects}, f"{name!r}")
    # Commit point: the version is visible from here on.
    committed = repository.versions("models", name).append(lambda _head: entry)
    return Resolved("models", name, committed.number)


def prepare_entry(
    repository: Repository,
    name: str,
    state: StoredState,
    metadata: VersionMetadata,
    *,
    extra: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], set[Digest]]:
    """Store the tensor table, the state and the code of a version; return its entry, and the objects that it names.

    For the arguments and errors see `commit`, which appends the entry.
    """
    check_name(name, "model")
    table_digest = repository.objects.put(encode_table(state.records)).digest
    state_digest = repository.objects.put(encode_state(state.skeleton)).digest
    code = metadata.code or keep_code(repository.objects)
    entry = {
        "step": metadata.step,
        "tensors": table_digest,
        "num_tensors": len(state.records),
        "bytes": sum(record.nbytes for record in state.records),
        "stored_bytes": state.new_bytes,
        "content": digest_of_content(state.records),
        "num_nonfinite": _largest_counts(state.num_nonfinite),
        "state": state_digest,
        "data": [use.to_dict() for use in metadata.data],
        "code": code.to_dict(),
        "environment": dict(describe_environment() if metadata.environment is None else metadata.environment),
        "config": dict(metadata.config or {}),
        "metrics": {key: _json_number_or_text(value) for key, value in (metadata.metrics or {}).items()},
        "parent": None if metadata.parent is None else exact_version(repository, metadata.parent),
        "message": metadata.message,
        **({"merged": [exact_version(repository, ref) for ref in metadata.merged]} if metadata.merged else {}),
        **({} if metadata.execution is None else {"execution": metadata.execution.to_dict()}),
        **(
            {"tournament": metadata.execution.tournament}
            if metadata.execution and metadata.execution.tournament
            else {}
        ),
        **({} if metadata.architecture is None else metadata.architecture.to_dict()),
        **({} if metadata.run is None else {"run": metadata.run}),
        **(extra or {}),
    }
    referenced = {link.object for record in state.records for chunk in record.chunks for link in chunk.chain}
    code_objects = () if code.diff is None else (parse_digest(code.diff),)
    referenced.update((table_digest, state_digest), code_objects)
    return entry, referenced


def exact_version(repository: Repository, ref: str) -> str:
    """Return the version that the reference to a parent resolves to now, because a tag may be moved later.

    The parent may be a removed version. A reference to a model that is not in this repository, or a text that is not
    a reference, is returned unchanged: it may name a version of another repository.

    Raises:
        NotFoundError: the model exists here and has no such version or tag.
        UnavailableError: see `Repository.resolve`.
    """
    try:
        name = parse_reference(ref, "model").name
    except ConfigError:
        return ref
    try:
        return str(repository.resolve("models", ref, removed=True))
    except NotFoundError:
        # The model exists here, so the reference does not name a version of another repository.
        if repository.versions("models", name).head():
            raise
        return ref


def base_records(repository: Repository, name: str, parent: str | None = None) -> tuple[TensorRecord, ...]:
    """Return the records of the base: the version to which the next version of `name` stores differences.

    The base is `parent`; if that does not exist or is damaged, it is the newest version of the model. Returns () if
    there is no base; the next version is then stored in full. Raises UnavailableError: the store does not respond.
    """
    for ref in (parent, name):
        if ref is None:
            continue
        try:
            # Do not `resolve` a name: for a new model, `resolve` lists all models, for the message of its error.
            version = repository.newest("models", ref) if ref == name else repository.resolve("models", ref)
            if version is not None:
                entry = repository.entry(version).content
                return read_table(repository.objects, parse_digest(entry["tensors"]))
        except (ConfigError, NotFoundError, CorruptDataError, KeyError, TypeError):
            continue
    return ()


def _largest_counts(num_nonfinite: Mapping[str, int]) -> dict[str, int]:
    """Return the `_MAX_LISTED_NONFINITE` largest counts, in descending order."""
    ranked = sorted(num_nonfinite.items(), key=lambda counted: (-counted[1], counted[0]))
    return dict(ranked[:_MAX_LISTED_NONFINITE])


def _json_number_or_text(value: float) -> float | str:
    # JSON cannot represent NaN and infinities: store them as text.
    return value if math.isfinite(value) else repr(float(value))
