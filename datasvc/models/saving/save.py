"""Saves a state tree as a model version, by one process and in the foreground: `models.save`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from datasvc.models.tensors.state_tree import encode_state, flatten
from datasvc.models.tensors.write import Codec, store_tensors
from datasvc.models.versions.architecture import Architecture
from datasvc.models.versions.code_revision import CodeRevision
from datasvc.models.versions.commit import base_records, commit, exact_version
from datasvc.models.versions.data_use import DataUse
from datasvc.models.versions.metadata import Execution, VersionMetadata
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.references import check_name


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
    execution: Execution | None = None,
    run: str | None = None,
    architecture: Architecture | None = None,
    codec: Codec = "delta",
    progress: Progress = NO_PROGRESS,
) -> Resolved:
    """Store `state` as the next version of model `name`. One process of a job calls this.

    Args:
        repository: repository that stores the version.
        name: name of the model; the first save creates the model.
        state: tree of dicts, lists, tuples, numbers, strings and tensors: model, optimizer, loader, random states.
        step: number of optimizer steps that produced this state.
        data: data consumed so far.
        config: effective configuration of the run; see `versions.metadata.json_form` for what is stored of it.
        metrics: metric values by name, {"val_accuracy": 0.98}; NaN and infinities are stored as text.
        parent: version that this run continues, "digits-cnn@3"; a name or tag is resolved now. A reference to a model
            that is not in this repository is stored as it is: it may name a version of another repository.
        merged: further versions that this version was made from, as in an average of weights; resolved like `parent`.
        message: free text for readers of the log.
        code: code of the run; default: the git checkout of the working folder, with its local changes.
        environment: environment of the run; default: that of this process.
        execution: how the ranks of the run computed its steps; None: not recorded.
        run: run whose log describes the training, `RunLog.ref`; None: none.
        architecture: counts of modules and operators, from `describe_architecture`; None: not recorded.
        codec: "none", "planes" or "delta": encoding of chunks that are not stored yet, see `store_tensors`.
        progress: counts the bytes of each chunk that was stored.

    Returns:
        The committed version. Nothing is visible to readers before this returns.

    Raises:
        ConfigError: `name` is invalid, or a value cannot be stored; the message names it.
        NotFoundError: `parent` or one of `merged` does not exist in its model; nothing was stored.
        ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`.
    """
    check_name(name, "model")
    # Resolve references first: a tag may be moved while tensors are stored.
    parent = None if parent is None else exact_version(repository, parent)
    merged = [exact_version(repository, ref) for ref in merged]
    metadata = VersionMetadata(
        step,
        data,
        config,
        metrics,
        parent,
        merged,
        message,
        code,
        environment,
        execution,
        run,
        architecture,
    )
    skeleton, tensors = flatten(state)
    # Encode the state for the errors only: a state that is too large must fail before tensors are stored.
    encode_state(skeleton)
    # Chunks are stored as differences to the chunks of the base.
    base = base_records(repository, name, parent) if codec == "delta" else ()
    stored = store_tensors(repository.objects, tensors, base=base, codec=codec, progress=progress)
    return commit(repository, name, replace(stored, skeleton=skeleton), metadata)
