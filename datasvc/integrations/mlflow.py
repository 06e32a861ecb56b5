"""MLflow: runs that continue with their model, data-set versions as inputs, registered models that are versions.

The weights stay in the repository. MLflow gets names, digests and metrics; `mlflow` and `mlflow-skinny` both do.
"""

from __future__ import annotations

from typing import Any, Final, Self

from datasvc.api import DataRepository
from datasvc.errors import ConfigError
from datasvc.extras import explain_missing
from datasvc.integrations.tracked_version import (
    COMMIT,
    REPOSITORY,
    VERSION,
    describe_reference,
    find_run,
    find_version,
    read_splits,
)
from datasvc.models.versions.entry_fields import config_of_run, runs_in_config

with explain_missing("datasvc.integrations.mlflow"):
    import mlflow
    from mlflow.data.dataset import Dataset
    from mlflow.data.dataset_source import DatasetSource
    from mlflow.exceptions import MlflowException

__all__ = ["SplitSource", "log_inputs", "register", "resolve", "run_config", "start_run"]

_TRACKER: Final = "mlflow"
_MAX_DIGEST: Final = 36  # characters that MLflow stores


def start_run(repo: DataRepository, name: str, **options: Any) -> Any:
    """Start a run of MLflow, or continue the run of the newest version of a model.

    Put `run_config(run)` into the `config=` of each save, so that the versions have the id of the run.

    Args:
        repo: repository of the model.
        name: name of the model.
        **options: arguments of `mlflow.start_run` for a new run, such as `run_name`.

    Returns:
        The active run, a context manager.
    """
    run_id = find_run(repo, name, _TRACKER)
    return mlflow.start_run(**options) if run_id is None else mlflow.start_run(run_id=run_id)


def run_config(run: Any) -> dict[str, str]:
    """Return the configuration by which the versions of a model name their run."""
    return config_of_run(_TRACKER, run.info.run_id)


def log_inputs(repo: DataRepository, ref: str) -> None:
    """Log the splits that a model version read as inputs of the active run, with the position that it had reached.

    Raises:
        NotFoundError: the version does not exist.
    """
    version, entry, tags = describe_reference(repo, ref)
    for split in read_splits(entry):
        source = SplitSource(tags[REPOSITORY], split.name)
        reached = {"datasvc.epoch": str(split.epoch), "datasvc.position": str(split.position)}
        mlflow.log_input(SplitDataset(source, split.digest), context=split.context, tags=reached | {VERSION: version})


def register(repo: DataRepository, ref: str, *, name: str | None = None, alias: str | None = None) -> Any:
    """Register a model version at MLflow, and return MLflow's version, whose tags name the version of the repository.

    A version that is registered already is not registered again.

    Args:
        repo: repository of the version.
        ref: NAME, NAME@VERSION or NAME@TAG.
        name: name of the registered model; None: that of the model.
        alias: alias to point at the version, such as "prod".

    Raises:
        NotFoundError: the version does not exist.
    """
    version, entry, tags = describe_reference(repo, ref)
    name = name or version.partition("@")[0]
    client = mlflow.MlflowClient()
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    found = _registered(client, name, tags)
    if found is None:
        run_id = runs_in_config(entry.get("config")).get(_TRACKER)
        created = client.create_model_version(name, source=f"datasvc:{version}", run_id=run_id, tags=tags)
        # Another process may have registered the version at the same time. All of them keep the first.
        found = _registered(client, name, tags) or created
        if found.version != created.version:
            client.delete_model_version(name, created.version)
    if alias is not None:
        client.set_registered_model_alias(name, alias, found.version)
    return found


def _registered(client: Any, name: str, tags: dict[str, str]) -> Any:
    """Return the first of MLflow's versions that name a version of the repository; None: none does."""
    found = [
        version
        for version in client.search_model_versions(f"name='{name}'")
        if version.tags.get(COMMIT) == tags[COMMIT] and version.tags.get(VERSION) == tags[VERSION]
    ]
    return min(found, key=lambda version: int(version.version), default=None)


def resolve(repo: DataRepository, uri: str) -> str:
    """Return the model version, such as "net@3", of a registered model, for `repo.models.restore`.

    Args:
        repo: repository of the version, or one that has a copy of it by push or pull.
        uri: "models:/NAME/VERSION" or "models:/NAME@ALIAS", with the numbers and aliases of MLflow.

    Raises:
        ConfigError: `uri` has another form, the registered version is none of datasvc, or `repo` does not have it.
        MlflowException: MLflow has no such version.
    """
    scheme, _, path = uri.partition(":/")
    name, at, alias = path.partition("@")
    model, slash, number = path.rpartition("/")
    client = mlflow.MlflowClient()
    if scheme == "models" and at:
        found = client.get_model_version_by_alias(name, alias)
    elif scheme == "models" and slash:
        found = client.get_model_version(model, number)
    else:
        raise ConfigError(f"{uri!r} is no registered model; expected models:/NAME/VERSION or models:/NAME@ALIAS")
    return find_version(repo, found.tags, uri)


class SplitSource(DatasetSource):
    """Where a split is: a repository, and a name such as "digits@1/train"."""

    def __init__(self, repository: str, name: str) -> None:
        self.repository, self.name = repository, name

    @staticmethod
    def _get_source_type() -> str:
        return "datasvc"

    def load(self) -> Any:
        """Return the split."""
        dataset, _, split = self.name.rpartition("/")
        return DataRepository.open(self.repository).dataset(dataset)[split]

    @staticmethod
    def _can_resolve(raw_source: Any) -> bool:  # noqa: ARG004 - MLflow's signature
        return False  # only a text from `to_json` has both parts

    @classmethod
    def _resolve(cls, raw_source: Any) -> Self:
        raise NotImplementedError(f"{raw_source!r} does not name a repository and a split; use from_dict")

    def to_dict(self) -> dict[str, str]:
        """Return the parts as JSON values."""
        return {"repository": self.repository, "name": self.name}

    @classmethod
    def from_dict(cls, source_dict: dict[Any, Any]) -> Self:
        """Return the source of a `to_dict` result."""
        return cls(source_dict["repository"], source_dict["name"])


class SplitDataset(Dataset):
    """A split as MLflow's data set, for `mlflow.log_input`; `digest` is that of its shard table."""

    def __init__(self, source: SplitSource, digest: str) -> None:
        super().__init__(source, source.name, digest[:_MAX_DIGEST])

    def _compute_digest(self) -> str:
        raise NotImplementedError("the digest is given")

    @property
    def profile(self) -> None:
        """None."""

    @property
    def schema(self) -> None:
        """None."""
