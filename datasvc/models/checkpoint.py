"""A checkpoint: the whole state of a run, bound to what it came from by one commit."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.lineage import CodeRevision, DataUse, describe_code
from datasvc.models.tensors import load_tensors, store_tensors
from datasvc.models.tree import flatten, unflatten
from datasvc.repository import Repository, Resolved
from datasvc.repository.objects import parse_digest
from datasvc.repository.references import check_name

STATE_FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A restored checkpoint.

    Attributes:
        version: which one.
        state: the state tree as it was saved; tensors on the CPU, verified, owned by the caller.
        entry: the version's entry: data, code, configuration, metrics.
    """

    version: Resolved
    state: Any
    entry: Mapping[str, Any]


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
    message: str = "",
    code: CodeRevision | None = None,
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
        parent: the version this run continues, "digits-cnn@3".
        message: for people.
        code: default: the git checkout of the working folder.

    Returns:
        The committed version. Until this returns nothing of it is visible.

    Raises:
        ConfigError: bad name, or a value that cannot be stored; names it.
        ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`.
    """
    check_name(name, "model")
    skeleton, tensors = flatten(state)
    table = store_tensors(repository.objects, tensors)
    entry = {
        "step": step,
        "tensors": table.digest,
        "num_tensors": len(tensors),
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "state": repository.objects.put(encode_state(skeleton)).digest,
        "data": [use.to_dict() for use in data],
        "code": asdict(code or describe_code()),
        "config": dict(config or {}),
        "metrics": {key: _json_number(float(value)) for key, value in (metrics or {}).items()},
        "parent": parent,
        "message": message,
    }
    committed = repository.versions("models", name).append(lambda _head: entry)
    return Resolved("models", name, committed.number)


def restore(repository: Repository, ref: str) -> Checkpoint:
    """Return the checkpoint that `ref` means now, every byte verified.

    Raises:
        ConfigError, NotFoundError, UnavailableError: see `Repository.resolve`.
        CorruptDataError: an entry, the state or a tensor was changed; names it.
    """
    version = repository.resolve("models", ref)
    entry = repository.entry(version).content
    tensors = load_tensors(repository.objects, parse_digest(entry["tensors"]))
    stored = decode_state(repository.objects.read(parse_digest(entry["state"])), str(version))
    return Checkpoint(version, unflatten(stored, tensors), entry)


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


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else repr(float(value))
