"""The registry: which models there are, and what their versions say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datasvc.repository import Digest, Repository
from datasvc.repository.objects import parse_digest


@dataclass(frozen=True)
class ModelVersion:
    """What a version's entry says.

    Attributes:
        name: of the model.
        version: its number.
        tags: that stand on it now.
        entry: step, data, code, config, metrics, parent, digests.
    """

    name: str
    version: int
    tags: tuple[str, ...]
    entry: Mapping[str, Any]

    @property
    def tensors(self) -> Digest:
        """Digest of the tensor table: equal for two versions exactly when all their tensors are equal."""
        return parse_digest(self.entry["tensors"])


def list_models(repository: Repository) -> list[ModelVersion]:
    """Return the newest version of every model, by name. Raises UnavailableError, CorruptDataError."""
    return [describe_model(repository, name) for name in repository.names("models")]


def describe_model(repository: Repository, ref: str) -> ModelVersion:
    """Return one version. Raises ConfigError, NotFoundError, CorruptDataError, UnavailableError."""
    version = repository.resolve("models", ref)
    entry = repository.entry(version).content
    return ModelVersion(version.name, version.version, _tags_on(repository, version.name, version.version), entry)


def model_log(repository: Repository, name: str) -> list[ModelVersion]:
    """Return every version of a model, oldest first. Raises as `describe_model`."""
    resolved = repository.resolve("models", name)
    entries = repository.versions("models", resolved.name).entries()
    tags = repository.tags("models", resolved.name)
    return [
        ModelVersion(
            resolved.name,
            entry.number,
            tuple(tag for tag, number in tags.items() if number == entry.number),
            entry.content,
        )
        for entry in entries
    ]


def _tags_on(repository: Repository, name: str, version: int) -> tuple[str, ...]:
    return tuple(tag for tag, number in repository.tags("models", name).items() if number == version)
