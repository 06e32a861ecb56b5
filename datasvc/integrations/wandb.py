"""Weights & Biases: runs that continue with their model, data-set versions as inputs, artifacts that are versions.

The weights stay in the repository: an artifact has a small file that names the version. All but the links of inputs
works offline.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from datasvc.api import DataRepository
from datasvc.extras import explain_missing
from datasvc.integrations.tracked_version import REPOSITORY, describe_reference, find_run, find_version, read_splits
from datasvc.models.versions.entry_fields import config_of_run

with explain_missing("datasvc.integrations.wandb"):
    import wandb

__all__ = ["log_inputs", "log_version", "resolve", "run_config", "start_run"]

_TRACKER: Final = "wandb"
_INPUTS: Final = "datasvc.inputs"


def start_run(repo: DataRepository, name: str, **options: Any) -> Any:
    """Start a run of W&B, or continue the run of the newest version of a model.

    Put `run_config(run)` into the `config=` of each save, so that the versions have the id of the run.

    Args:
        repo: repository of the model.
        name: name of the model.
        **options: arguments of `wandb.init`, such as `project`.

    Returns:
        The run, a context manager.
    """
    run_id = find_run(repo, name, _TRACKER)
    # Allow other values: a program that starts again may have other settings, such as more epochs.
    continued = {} if run_id is None else {"id": run_id, "resume": "allow", "allow_val_change": True}
    return wandb.init(**options | continued)


def run_config(run: Any) -> dict[str, str]:
    """Return the configuration by which the versions of a model name their run."""
    return config_of_run(_TRACKER, run.id)


def log_inputs(run: Any, repo: DataRepository, ref: str) -> None:
    """Record the splits that a model version read, in the configuration of a run and, online, as used artifacts.

    Raises:
        NotFoundError: the version does not exist.
    """
    _, entry, tags = describe_reference(repo, ref)
    splits = read_splits(entry)
    run.config.update({_INPUTS: [asdict(split) for split in splits]}, allow_val_change=True)
    if run.offline:
        return  # W&B links used artifacts only online
    for split in splits:
        content = {"repository": tags[REPOSITORY], "split": split.name, "digest": split.digest}
        name = split.name.replace("@", "-v").replace("/", "-")
        run.use_artifact(_artifact(name, "dataset", content))


def log_version(
    run: Any, repo: DataRepository, ref: str, *, name: str | None = None, aliases: Sequence[str] = ()
) -> Any:
    """Log a model version as an artifact of a run, and return it. Equal versions give one version of the artifact.

    Args:
        run: run that trained the model.
        repo: repository of the version.
        ref: NAME, NAME@VERSION or NAME@TAG.
        name: name of the artifact; None: that of the model.
        aliases: further aliases of the artifact, such as ["prod"].

    Raises:
        NotFoundError: the version does not exist.
    """
    version, _, tags = describe_reference(repo, ref)
    artifact = _artifact(name or version.partition("@")[0], "model", tags)
    return run.log_artifact(artifact, aliases=["latest", *aliases])


def resolve(repo: DataRepository, artifact: Any) -> str:
    """Return the model version, such as "net@3", of an artifact of `log_version`, for `repo.models.restore`.

    Args:
        repo: repository of the version, or one that has a copy of it by push or pull.
        artifact: artifact of a run, or of `wandb.Api().artifact(NAME)`.

    Raises:
        ConfigError: the artifact is none of `log_version`, or `repo` does not have the version.
    """
    return find_version(repo, artifact.metadata, f"artifact {artifact.name!r}")


def _artifact(name: str, kind: str, content: Mapping[str, str]) -> Any:
    """Return an artifact with a file of `content`. W&B stores artifacts with equal files once."""
    artifact = wandb.Artifact(name, kind, metadata=dict(content))
    with artifact.new_file("datasvc.json") as file:
        json.dump(dict(content), file, indent=1, sort_keys=True)
    return artifact
